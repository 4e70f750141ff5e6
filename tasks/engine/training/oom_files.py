"""Reports the end of a run for lack of memory: one error with one sentence, and the files
beside it. Files that cannot be written are no reason to hide the sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from tasks.engine.accounts.phases import Phases
from tasks.engine.memory.allocation_log import AllocationLog
from tasks.engine.memory.oom_report import OomExplanation, explain_oom
from tasks.engine.report.memory_timeline import make_timeline_page
from tasks.engine.step.micro_batches import MemoryFailure
from tasks.engine.step.plan import Plan

log = logging.getLogger(__name__)


class OutOfMemory(RuntimeError):
    """A run ended for lack of memory: what was tried, what was free and what to change."""

    def __init__(self, explanation: OomExplanation) -> None:
        super().__init__(explanation.sentence)
        self.explanation = explanation


def describe_setup_failure(error: BaseException) -> MemoryFailure:
    """Return a failure beside the steps, where nothing is repeated and nobody counted."""
    return MemoryFailure(str(error), phase="set-up")


def explain_failure(
    failure: MemoryFailure, phases: Phases | None, *, plan: Plan, folder: Path
) -> OomExplanation:
    """Return the explanation of a failure, left in `folder`/memory/oom.json as well.

    phases: None where the training had none yet.
    """
    explanation = explain_oom(
        failure.text,
        phases.accounts.ledger if phases else AllocationLog(plan.torch_device),
        config=plan.settings,
        device=plan.device.name,
        precision=plan.precision,
        phase=failure.phase,
        step=failure.step,
        batch_shape=failure.batch_shape,
        allocator=failure.allocator,
        tried=failure.tried,
        fitted=failure.fitted,
    )
    try:
        (folder / "memory").mkdir(parents=True, exist_ok=True)
        (folder / "memory" / "oom.json").write_text(explanation.to_json())
    except OSError as error:
        log.warning("memory/oom.json could not be written: %s", error)
    if phases is not None:
        title = f"Out of memory: {explanation.phase} of step {explanation.step}"
        write_timeline(phases.accounts.ledger, folder, title=title, lines=[explanation.sentence])
    return explanation


def write_timeline(
    ledger: AllocationLog, folder: Path, *, title: str, lines: Sequence[str]
) -> None:
    """Write the last step that was counted as the page `folder`/memory/snapshot.html."""
    try:
        (folder / "memory").mkdir(parents=True, exist_ok=True)
        file = folder / "memory" / "snapshot.html"
        file.write_text(make_timeline_page(ledger, title=title, lines=lines), encoding="utf-8")
    except (OSError, MemoryError) as error:  # drawing takes some 40 MiB
        log.warning("memory/snapshot.html could not be written: %s", error)
