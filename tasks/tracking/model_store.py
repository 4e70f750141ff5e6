"""Asks MLflow for a logged model, from a process that never imports mlflow: `logged_models.py`
answers in a second one, which may be started ahead of need.
"""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tasks.engine.base.facts import ModelFacts
from tasks.engine.files.source_data import DataError
from tasks.process import children
from tasks.process.redaction import redacted
from tasks.tracking.where import TrackingError, Where

ANSWERING = "tasks.tracking.logged_models"
MOST_SKIPPED = 20  # models that latest may not be

log = logging.getLogger(__name__)
_spare: list[subprocess.Popen[str]] = []


def warm_up() -> None:
    """Start the other process ahead of need: it imports mlflow while this one imports torch."""
    _spare.append(children.start(ANSWERING))


def model_of(
    run: str,
    where: Where,
    *,
    folder: Path,
    check: Callable[[ModelFacts], None] = lambda model: None,
) -> ModelFacts:
    """The model of a run, with its files on this machine; downloaded ones are put into `folder`.

    check: raises DataError for a model that can't take the rows; latest is then the one before it.
    Raises TrackingError where there is none, and what `check` raises.
    """
    process = _spare.pop() if _spare else children.start(ANSWERING)
    ask = partial(_answer, process, {"where": where.model_dump(), "folder": str(folder)})
    with process:
        try:
            if run == "latest":
                return _latest(ask, check)
            model = ask(run=run, skipped=[])
        finally:
            process.kill()  # it has nothing left to do, and may not outlive an interruption
    check(model)
    return model


def _latest(ask: Callable[..., ModelFacts], check: Callable[[ModelFacts], None]) -> ModelFacts:
    """The newest model that passes the check; it says which, and which not. Where none does, the
    error is that of the newest."""
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
            told = str(error).splitlines()[0]
            log.info(
                "latest: run %s does not fit these rows and is skipped: %s", model.run_id, told
            )
            first = first or error
            skipped.append(model.model_id)
        else:
            log.info("latest: run %s, model %s", model.run_id, model.model_id)
            return model
    more = f"\nrun: none of the {len(skipped)} newest models fits these rows; name a run"
    raise DataError(f"{first}{more if len(skipped) > 1 else ''}")


def _answer(
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
        raise TrackingError(redacted(answer["error"]))
    return ModelFacts(**answer)
