"""Asks MLflow for a logged model, from a process that never imports mlflow: `tracking_models.py`
answers in a second one, which may be started ahead of need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tasks.engine.facts import ModelFacts
from tasks.redaction import redacted
from tasks.where import TrackingError, Where

_spare: list[subprocess.Popen[str]] = []


def warm_up() -> None:
    """Start the other process ahead of need: it imports mlflow while this one imports torch."""
    _spare.append(_spawn())


def model_of(run: str, where: Where, *, folder: Path) -> ModelFacts:
    """The model of a run, with its files on this machine; downloaded ones are put into `folder`.

    Raises TrackingError where there is none.
    """
    process = _spare.pop() if _spare else _spawn()
    question = {"where": where.model_dump(), "run": run, "folder": str(folder)}
    with process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline() or "{}")
        except (BrokenPipeError, json.JSONDecodeError):
            answer = {}
        finally:
            process.kill()  # it has nothing left to do, and may not outlive an interruption
    if not answer:
        answer = {"error": "tracking_uri: the process that asks MLflow ended; set tracking_uri"}
    if "error" in answer:
        raise TrackingError(redacted(answer["error"]))
    return ModelFacts(**answer)


def _spawn() -> subprocess.Popen[str]:
    project = str(Path(__file__).parent.parent)
    path = os.pathsep.join(p for p in (project, os.environ.get("PYTHONPATH")) if p)
    return subprocess.Popen(
        [sys.executable, "-m", "tasks.tracking_models"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is for the prediction, which ends it
    )
