"""Asks MLflow, from a process that never imports mlflow, in a second process that does: for
what comparable finished runs have measured, and for a logged model, which
`model_finder.py` finds; that process may be started early. It creates nothing: a database
that is not there has no past runs.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from headroom.base.facts import ModelFacts
from headroom.data.source_data import DataError
from headroom.process import children
from headroom.process.redaction import redact
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings

ANSWER_S = 60.0  # longer than MLflow's import on a busy machine; a past is not worth more


def read_past_metrics(
    where: TrackingSettings, alike: str, wanted: Sequence[str]
) -> dict[str, float]:
    """Return the newest values of the wanted metrics among finished runs with the tag `alike`.

    Empty where MLflow does not answer.
    """
    if where.database is not None and not where.database.is_file():
        return {}
    order = {"where": where.model_dump(), "alike": alike, "wanted": list(wanted)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "headroom.tracking.query_runs"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            cwd=Path(__file__).parent.parent.parent,
            check=False,
        )
        metrics: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, json.JSONDecodeError, IndexError):
        return {}
    return metrics


ANSWERING_MODULE = "headroom.tracking.model_finder"
MOST_SKIPPED = 20  # models that latest may not be

log = logging.getLogger(__name__)
_spare: list[subprocess.Popen[str]] = []


def warm_up() -> None:
    """Start the second process early: it imports mlflow while this one imports torch."""
    _spare.append(children.start_child(ANSWERING_MODULE))


def find_logged_model(
    run: str,
    where: TrackingSettings,
    *,
    folder: Path,
    check: Callable[[ModelFacts], None] = lambda model: None,
) -> ModelFacts:
    """Return the model of a run, with its files on this machine.

    Downloaded ones go to `folder`. check: raises DataError for a model that can't take the
    rows; latest is then the one before it. Raises TrackingError where there is none, and
    what `check` raises.
    """
    process = _spare.pop() if _spare else children.start_child(ANSWERING_MODULE)
    ask = partial(_ask_process, process, {"where": where.model_dump(), "folder": str(folder)})
    with process:
        try:
            if run == "latest":
                return _find_latest(ask, check)
            model = ask(run=run, skipped=[])
        finally:
            process.kill()  # it has nothing left to do, and may not outlive an interruption
    check(model)
    return model


def _find_latest(ask: Callable[..., ModelFacts], check: Callable[[ModelFacts], None]) -> ModelFacts:
    """Return the newest model that passes the check; log which it is, and which do not pass.

    Where none does, the error is that of the newest.
    """
    skipped: list[str] = []
    first: DataError | None = None
    while first is None or len(skipped) < MOST_SKIPPED:
        try:
            model = ask(run="latest", skipped=skipped)
        except TrackingError:
            if first is None:
                raise
            break
        try:
            check(model)
        except DataError as error:
            message = str(error).splitlines()[0]
            log.info(
                "latest: run %s does not fit these rows and is skipped: %s", model.run_id, message
            )
            first = first or error
            skipped.append(model.model_id)
        else:
            log.info("latest: run %s, model %s", model.run_id, model.model_id)
            return model
    more = f"\nrun: none of the {len(skipped)} newest models fits these rows; name a run"
    raise DataError(f"{first}{more if len(skipped) > 1 else ''}")


def _ask_process(
    process: subprocess.Popen[str], question: dict[str, object], *, run: str, skipped: list[str]
) -> ModelFacts:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps({**question, "run": run, "skipped": skipped}) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline() or "{}")
    except (BrokenPipeError, json.JSONDecodeError):
        answer = {}
    if not answer:
        answer = {"error": "tracking_uri: the process that asks MLflow ended; set tracking_uri"}
    if "error" in answer:
        raise TrackingError(redact(answer["error"]))
    return ModelFacts(**answer)
