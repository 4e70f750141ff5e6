"""The trainings of a comparison, each in a process of its own: one after another on a device, side
by side on different ones; a grid knows all of them, a search draws them as it goes. What has ended
is kept in the comparison's folder, so that a comparison that was interrupted goes on where it was.
It ends what it started.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from tasks.comparison.grid import Cell
from tasks.engine.base.file_lock import FileLock, is_held
from tasks.engine.base.units import printable
from tasks.engine.settings.read_settings import hidden, secret_variables
from tasks.engine.settings.yaml_file import to_yaml
from tasks.flow_run import PARENT
from tasks.process.redaction import redacted
from tasks.resume import is_key_held, stamp
from tasks.run_folders import LOCK as TRAINING_LOCK
from tasks.run_folders import folders, json_of, start_of
from tasks.serving.prefect_http import FLOW_RUN

STATE = "comparison.json"
LOCK = "comparison.lock"
POLL_S = 0.1
LOOK_S = 0.5  # between two looks at what a training has measured
END_S = 60.0  # for a training that is told to end, to do so in order
NAME_LETTERS = 200


@dataclass(frozen=True)
class Ended:
    """How a training ended, by its number."""

    number: int
    status: str
    run_id: str = ""
    error: str = ""
    value: float | None = None  # of what a search looks for


@dataclass
class Comparison:
    """The folder of a comparison, and how far it has come."""

    folder: Path
    asked: str  # what it is of: the same words go on with it
    run_id: str = ""
    is_over: bool = False
    ended: dict[int, Ended] = field(default_factory=dict)
    lock: FileLock | None = None

    def add(self, ended: Ended) -> Ended:
        self.ended[ended.number] = ended
        self.keep()
        return ended

    def keep(self) -> None:
        told = {
            "asked": self.asked,
            "run_id": self.run_id,
            "is_over": self.is_over,
            "ended": [asdict(one) for one in self.ended.values()],
        }
        half = self.folder / f"{STATE}.new"
        half.write_text(json.dumps(told, indent=1))
        half.rename(self.folder / STATE)


def opened(place: Path, asked: str) -> Comparison:
    """The newest comparison of the same words that did not come to its end, or a new one; it is
    held by this process."""
    for file in sorted(place.glob(f"*/{STATE}"), reverse=True):
        told = json_of(file)
        if told.get("asked") == asked and not told.get("is_over"):
            lock = FileLock(file.parent / LOCK)
            if lock.take():
                ended = {one["number"]: Ended(**one) for one in told.get("ended", ())}
                return Comparison(file.parent, asked, told.get("run_id", ""), False, ended, lock)
            lock.close()
    folder = place / f"{stamp()}-{uuid4().hex[:6]}"
    folder.mkdir(mode=0o700, parents=True)
    lock = FileLock(folder / LOCK)
    lock.take()
    return Comparison(folder, asked, lock=lock)


class Source(Protocol):
    """Where the trainings come from, and who hears how they end."""

    @property
    def devices(self) -> Sequence[str]: ...

    def next(self, device: str) -> Cell | None:
        """That to train on a device that is free; None where there is none for it."""

    def pruned(self, cell: Cell, folder: Path) -> bool:
        """Whether it ends here, by what is in its run's folder so far."""

    def over(self, cell: Cell, ended: Ended, folder: Path | None) -> Ended:
        """How it ended, as it is kept."""


class Grid:
    """The source that knows its trainings from the beginning. Those on the CPU come last: they
    would take the cores that feed a GPU, and neither speed would be true."""

    def __init__(self, comparison: Comparison, grid: Sequence[Cell]) -> None:
        self.comparison, self._grid = comparison, grid
        self._queues: dict[str, list[Cell]] = {}
        for cell in grid:
            if cell.number not in comparison.ended:
                self._queues.setdefault(cell.device, []).append(cell)

    @property
    def devices(self) -> Sequence[str]:
        return sorted(self._queues, key=lambda device: device == "cpu")

    def next(self, device: str) -> Cell | None:
        others = (cell for cell in self._grid if cell.device != "cpu")
        if device == "cpu" and any(cell.number not in self.comparison.ended for cell in others):
            return None
        return self._queues[device].pop(0) if self._queues[device] else None

    def pruned(self, cell: Cell, folder: Path) -> bool:
        return False

    def over(self, cell: Cell, ended: Ended, folder: Path | None) -> Ended:
        return self.comparison.add(ended)


@dataclass
class _Live:
    cell: Cell
    process: subprocess.Popen[bytes]
    folder: Path | None = None  # of its run
    look_at: float = 0.0  # when to look there next
    kill_at: float = float("inf")

    def follow(self, comparison: Comparison, source: Source, runs: Path) -> None:
        """End it where it is pruned, in the order in which a signal ends a training."""
        now = time.monotonic()
        if now > self.kill_at:
            self.process.kill()
        elif now > self.look_at and self.kill_at == float("inf"):
            self.look_at = now + LOOK_S
            self.folder = self.folder or _folder_of(comparison, self.cell, runs)
            if self.folder is not None and source.pruned(self.cell, self.folder):
                self.process.terminate()
                self.kill_at = now + END_S


def play(
    comparison: Comparison,
    source: Source,
    *,
    runs: Path,
    tell: Callable[[Cell, Ended | None], None],
) -> None:
    """Train all that has not ended yet. tell: is told of each that begins, and how it ended. A
    training that was stopped in its middle goes on from its checkpoint."""

    def over(cell: Cell, ended: Ended) -> None:
        tell(cell, source.over(cell, ended, _folder_of(comparison, cell, runs)))

    live: dict[str, _Live] = {}
    try:
        while True:
            for device in source.devices:
                while device not in live and (cell := source.next(device)) is not None:
                    if cell.refused:
                        over(cell, Ended(cell.number, "FAILED", error=cell.refused))
                    elif (ended := _ended_since(comparison, cell, runs)) is not None:
                        source.over(cell, ended, _folder_of(comparison, cell, runs))
                    else:
                        tell(cell, None)
                        live[device] = _Live(cell, _start(comparison, cell))
            if not live:
                break
            for device, one in list(live.items()):
                if one.process.poll() is None:
                    one.follow(comparison, source, runs)
                else:
                    del live[device]
                    over(one.cell, _end_of(comparison, one.cell, one.process.returncode, runs))
            time.sleep(POLL_S)
    finally:
        _stop([one.process for one in live.values()])


def _ended_since(comparison: Comparison, cell: Cell, runs: Path) -> Ended | None:
    """How it came to its end after its comparison was killed; one that lives is waited for."""
    while is_key_held(runs, _key(comparison, cell)):  # it may be about to begin
        time.sleep(POLL_S)
    folder = _folder_of(comparison, cell, runs)
    if folder is None:
        return None
    while is_held(folder / TRAINING_LOCK):
        time.sleep(POLL_S)
    ended = _end_of(comparison, cell, 0, runs)
    return ended if ended.status == "FINISHED" else None


def _start(comparison: Comparison, cell: Cell) -> subprocess.Popen[bytes]:
    file = comparison.folder / f"{cell.number:04d}.yaml"
    settings: dict[str, Any] = hidden(cell.config).model_dump()
    turn = f", repeat {cell.repeat}" if cell.repeat > 1 else ""
    name = " ".join(filter(None, [settings["run"]["name"], cell.label + turn]))
    settings["run"]["name"] = printable(name, limit=NAME_LETTERS)
    settings["run"]["key"] = _key(comparison, cell)
    file.write_text(to_yaml(settings))
    environment = {k: v for k, v in os.environ.items() if k != FLOW_RUN}
    with file.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.train", "--config", str(file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, **secret_variables(cell.config), PARENT: comparison.run_id},
            start_new_session=True,  # Ctrl-C is for the comparison, which then ends it
        )


def _key(comparison: Comparison, cell: Cell) -> str:
    return f"{comparison.folder.name}/{cell.number:04d}"


def _end_of(comparison: Comparison, cell: Cell, code: int, runs: Path) -> Ended:
    """By what its run has told; one that never had a run is told by its last line."""
    folder = _folder_of(comparison, cell, runs)
    start = start_of(folder) if folder is not None else None
    told: Mapping[str, Any] = json_of(folder / "run.json") if folder is not None else {}
    status = told.get("status") or ("KILLED" if code < 0 else "FAILED")
    error = str(told.get("error") or "")
    if code and not error:
        error = _last_line(comparison.folder / f"{cell.number:04d}.log") or f"exit code {code}"
    ended = Ended(cell.number, status, start.run_id if start is not None else "")
    return replace(ended, error=printable(redacted(error), limit=300))


def _folder_of(comparison: Comparison, cell: Cell, runs: Path) -> Path | None:
    """That of its newest run."""
    key = _key(comparison, cell)
    of_key = (f for f in folders(runs) if (s := start_of(f)) is not None and s.key == key)
    return next(of_key, None)


def _last_line(log: Path) -> str:
    with suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""
    return ""


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask them to end, and wait until they have."""
    for process in processes:
        with suppress(OSError):
            process.terminate()
    until = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
