"""A run's record as the training process keeps it: every metric goes to a local file first, and a
second process (`tracking.py`) sends it to MLflow, so that no step ever waits for a database and
nothing is lost where MLflow is away. This process never imports mlflow.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from tasks.redaction import redacted
from tasks.where import TrackingError, Where

OPEN_S = 180.0  # the first use of a new database on a busy machine, with room to spare
CLOSE_S = 120.0  # without a sign of it, beside the time for a store that is away

_spare: list[subprocess.Popen[str]] = []


def warm_up(where: Where) -> None:
    """Start the sending process ahead of need: it imports mlflow while this one imports torch."""
    _spare.append(_spawn(where))


class Journal:
    """One run's record. A context manager: left by an exception, it leaves no process behind."""

    def __init__(self, where: Where, folder: Path) -> None:
        self.where = where
        self.folder = folder
        self.run_id = ""
        self.experiment_id = ""
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._metrics: FileIO | None = None
        self._sender: subprocess.Popen[str] | None = None

    def __enter__(self) -> Journal:
        self._sender = _spare.pop() if _spare else _spawn(self.where)
        threading.Thread(target=self._listen, args=(self._sender,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._sender is not None and self._sender.stdin is not None:
            with suppress(OSError):  # it has gone already
                self._sender.stdin.close()  # it ends by itself: what is unsent, it still sends

    def open(self, experiment: str | None) -> None:
        """Begin to open the experiment. `create` waits for it."""
        where = self.where.model_copy(update={"experiment": experiment or self.where.experiment})
        prefect_api = os.environ.get("PREFECT_API_URL", "")  # a desk has set it
        self._tell({"do": "open", "where": where.model_dump(), "prefect_api": prefect_api})

    def create(
        self,
        *,
        name: str,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        wanted: Sequence[str] = (),
    ) -> dict[str, float]:
        """Open the run in MLflow. Raises TrackingError where that can't be done.

        Returns the newest values of the wanted metrics among finished runs with the same tag
        `alike`.
        """
        self._answer(OPEN_S)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Unbuffered: what was logged survives the death of this process.
        self._metrics = open(self.folder / "metrics.jsonl", "ab", buffering=0)  # noqa: SIM115
        self._tell(
            {
                "do": "create",
                "folder": str(self.folder),
                "name": name,
                "params": {k: "" if v is None else str(v) for k, v in params.items()},
                "tags": {"alike": "", **tags},
                "wanted": list(wanted),
            }
        )
        answer = self._answer(OPEN_S)
        self.run_id, self.experiment_id = answer["run_id"], answer["experiment_id"]
        past: dict[str, float] = answer["past"]
        return past

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep metrics of a step. Costs one short write; sent later, by the other process."""
        assert self._metrics is not None, "log() before create()"
        try:
            _append(self._metrics, _line(metrics, step, unix_ms=int(time.time() * 1000)))
        except OSError as error:
            place = f"{self.folder} can't be written"
            raise TrackingError(f"runs: {place} ({error.strerror}); make room there") from None

    def close(self, run: Mapping[str, Any]) -> dict[str, float]:
        """Send what is left, with the files of the folder, and end the run with `run["status"]`.

        Returns the times that only the end could tell. Raises TrackingError where MLflow does not
        answer; everything is then still in the folder.
        """
        with suppress(OSError):  # a full disk; it is for sending later, and also goes by the pipe
            (self.folder / "run.json").write_text(json.dumps(run, indent=1))
        self._tell({"do": "close", "run": dict(run)})
        while "sending" in (answer := self._answer(self.where.give_up_s + CLOSE_S)):
            pass  # there is much of it, and it goes on
        times: dict[str, float] = answer["times"]
        return times

    def _tell(self, what: dict[str, Any]) -> None:
        assert self._sender is not None and self._sender.stdin is not None, "not entered"
        with suppress(OSError):  # it is gone: the answer that is missing says so
            self._sender.stdin.write(json.dumps(what) + "\n")
            self._sender.stdin.flush()

    def _answer(self, timeout_s: float) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            answer = {"error": f"tracking_uri: no answer within {timeout_s:.0f} s"}
        if "error" in answer:
            raise TrackingError(redacted(answer["error"]))
        return answer

    def _listen(self, sender: subprocess.Popen[str]) -> None:
        assert sender.stdout is not None
        with sender.stdout as answers:
            for line in answers:
                with suppress(json.JSONDecodeError):  # a library that prints
                    self._answers.put(json.loads(line))
        sender.wait()
        log = Path(self.where.runs) / "tracking.log"
        self._answers.put({"error": f"tracking_uri: the sending process ended; see {log}"})


def _append(file: FileIO, line: bytes) -> None:
    """The whole line or none of it: half of one would spoil the next."""
    written = file.write(line)
    if written != len(line):
        file.truncate(file.tell() - (written or 0))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _line(metrics: Mapping[str, float], step: int, *, unix_ms: int) -> bytes:
    """The line as JSON, by json.dumps() only where it takes its words for what is no number."""
    values = orjson.dumps(metrics)
    if b"null" in values:
        values = json.dumps(metrics).encode()
    return b'{"step":%d,"t":%d,"metrics":%b}\n' % (step, unix_ms, values)


def _spawn(where: Where) -> subprocess.Popen[str]:
    runs = Path(where.runs)
    try:
        runs.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = open(runs / "tracking.log", "a", opener=_private)  # noqa: SIM115
    except OSError as error:
        raise TrackingError(f"runs: {runs} can't be written ({error.strerror})") from None
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", "tasks.tracking"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": _project_first()},
            start_new_session=True,  # Ctrl-C is for the training; the record still has to be closed
        )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _project_first() -> str:
    project = str(Path(__file__).parent.parent)
    return os.pathsep.join(p for p in (project, os.environ.get("PYTHONPATH")) if p)
