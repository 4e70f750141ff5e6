"""Runs the trainings of a comparison, each in a process of its own: one after another on a
device, side by side on different ones; a grid knows all of them, a search draws them as it
goes. What has ended is kept in the comparison's folder, so that a comparison that was
interrupted goes on where it was. It ends what it started.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from headroom.base.event_log import LOG, TRAINING_LOCK, read_begins, read_end, read_json
from headroom.base.file_lock import FileLock, is_held
from headroom.base.import_paths import find_module_spec
from headroom.base.names import PARENT, PARENT_TAG
from headroom.base.units import make_printable
from headroom.base.written_files import write_whole
from headroom.comparison.grid import Cell
from headroom.comparison.run_groups import shorten_names
from headroom.prefect.prefect_http import FLOW_RUN
from headroom.process.redaction import redact
from headroom.run.known_runs import list_run_folders, make_timestamp, read_start
from headroom.run.run_keys import is_key_held
from headroom.settings.read_settings import (
    ConfigError,
    collect_params,
    dump_yaml,
    find_import_paths,
    find_secret_variables,
    hide_config_secrets,
)

STATE = "comparison.json"
LOCK = "comparison.lock"
POLL_S = 0.1
LOOK_S = 0.5  # between two looks at what a training has measured
END_S = 60.0  # for a training that is told to end, to do so in order
NAME_LETTERS = 200

Inputs = dict[str, dict[str, str]]  # see describe_inputs


@dataclass(frozen=True)
class TrainingEnd:
    """How a training ended, by its number."""

    number: int
    status: str
    run_id: str = ""
    error: str = ""
    value: float | None = None  # of what a search looks for


@dataclass
class ComparisonFolder:
    """The folder of a comparison, and how far it has come."""

    folder: Path
    words: str  # what it is of: the same words go on with it
    run_id: str = ""
    is_over: bool = False
    ended: dict[int, TrainingEnd] = field(default_factory=dict)
    lock: FileLock | None = None
    inputs: Inputs = field(default_factory=dict)
    taken_over: list[int] = field(default_factory=list)  # those that had ended before this process

    def add(self, ended: TrainingEnd) -> TrainingEnd:
        self.ended[ended.number] = ended
        self.keep()
        return ended

    def keep(self) -> None:
        state = {
            "words": self.words,
            "run_id": self.run_id,
            "is_over": self.is_over,
            "inputs": self.inputs,
            "ended": [asdict(one) for one in self.ended.values()],
        }
        with write_whole(self.folder / STATE) as half:
            half.write_text(json.dumps(state, indent=1))


def describe_inputs(cells: Sequence[Cell], data: Mapping[str, str]) -> Inputs:
    """Return what these trainings are made of beside their words: settings, code and data, by name.

    The code is that of this project, and the files of a user's own. data: fingerprints, by source.
    """
    base = hide_config_secrets(cells[0].config)
    settings = {name: str(value) for name, value in collect_params(base).items()}
    settings["--vary"] = _hash(json.dumps([cell.settings for cell in cells]).encode())
    home = Path(__file__).parent.parent.parent
    parts = [
        file
        for part in ("headroom", "flows", "tasks")
        for file in sorted((home / part).rglob("*.py"))
    ]
    code = {"Headroom": _hash(*(file.read_bytes() for file in parts))}
    for path in {path for cell in cells for path in find_import_paths(cell.config).values()}:
        spec = find_module_spec(path.partition(":")[0])
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            code[spec.origin] = _hash(Path(spec.origin).read_bytes())
    return {"settings": settings, "code": code, "data": dict(data)}


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def describe_changes(before: Inputs, now: Inputs) -> list[str]:
    """Return in words what differs."""
    changes = []
    for kind, names in now.items():
        was = before.get(kind, names)
        for name in dict.fromkeys([*was, *names]):
            old, new = was.get(name, "absent"), names.get(name, "absent")
            if old != new and kind == "settings" and name != "--vary":
                shown = (make_printable(value, limit=60) for value in (old, new))
                changes.append("{} was {} and is {}".format(name, *shown))
            elif old != new:
                what = f"the {kind} differs ({name})"
                changes.append(what if kind != "settings" else "other values vary")
    return changes


def open_comparison(
    place: Path, words: str, inputs: Inputs | None = None, *, is_anew: bool = False
) -> ComparisonFolder:
    """Return the newest unfinished comparison of the same words, or a new one.

    This process locks it. is_anew: the unfinished ones are over. Raises ConfigError where what
    it is made of has changed since some had ended: with those the others could not be compared.
    """
    inputs = inputs or {}
    for file in sorted(place.glob(f"*/{STATE}"), reverse=True):
        state = read_json(file)
        if state.get("words") != words or state.get("is_over"):
            continue
        lock = FileLock(file.parent / LOCK)
        if not lock.take():
            lock.close()
            continue
        ended = {one["number"]: TrainingEnd(**one) for one in state.get("ended", ())}
        opened = ComparisonFolder(file.parent, words, state.get("run_id", ""), False, ended, lock)
        opened.inputs, opened.taken_over = state.get("inputs") or inputs, [*ended]
        changes = describe_changes(opened.inputs, inputs)
        if not (is_anew or changes):
            return opened
        opened.is_over = is_anew or not ended  # then nothing is lost
        if opened.is_over:
            opened.keep()
        lock.close()
        if not opened.is_over:
            raise ConfigError(
                f"--anew: these words were interrupted when {len(ended)} of the trainings had "
                f"ended, and now {'; '.join(changes)}. Put that back, and they go on; or add "
                "--anew, and all are trained anew"
            )
    folder = place / f"{make_timestamp()}-{uuid4().hex[:6]}"
    folder.mkdir(mode=0o700, parents=True)
    lock = FileLock(folder / LOCK)
    lock.take()
    return ComparisonFolder(folder, words, lock=lock, inputs=inputs)


class Source(Protocol):
    """Where the trainings come from, and what is told how they end."""

    @property
    def devices(self) -> Sequence[str]: ...

    def take_next(self, device: str) -> Cell | None:
        """Return the training for a device that is free; None where there is none for it."""

    def is_pruned(self, cell: Cell, folder: Path) -> bool:
        """Return whether the training ends here, by what is in its run's folder so far."""

    def take_end(self, cell: Cell, ended: TrainingEnd, folder: Path | None) -> TrainingEnd:
        """Take how the training ended; return it as it is kept."""


class GridSource:
    """The source that knows its trainings from the beginning.

    Those on the CPU come last: they would take the cores that feed a GPU, and neither speed
    would be true.
    """

    def __init__(self, comparison: ComparisonFolder, grid: Sequence[Cell]) -> None:
        self.comparison, self._grid = comparison, grid
        self._queues: dict[str, list[Cell]] = {}
        for cell in grid:
            if cell.number not in comparison.ended:
                self._queues.setdefault(cell.device, []).append(cell)

    @property
    def devices(self) -> Sequence[str]:
        return sorted(self._queues, key=lambda device: device == "cpu")

    def take_next(self, device: str) -> Cell | None:
        others = (cell for cell in self._grid if cell.device != "cpu")
        if device == "cpu" and any(cell.number not in self.comparison.ended for cell in others):
            return None
        return self._queues[device].pop(0) if self._queues[device] else None

    def is_pruned(self, cell: Cell, folder: Path) -> bool:
        return False

    def take_end(self, cell: Cell, ended: TrainingEnd, folder: Path | None) -> TrainingEnd:
        return self.comparison.add(ended)


@dataclass
class _LiveTraining:
    cell: Cell
    process: subprocess.Popen[bytes]
    folder: Path | None = None  # of its run
    look_at: float = 0.0  # when to look there next
    kill_at: float = float("inf")

    def follow(self, comparison: ComparisonFolder, source: Source, runs: Path) -> None:
        """End it where it is pruned, in the order in which a signal ends a training."""
        now = time.monotonic()
        if now > self.kill_at:
            self.process.kill()
        elif now > self.look_at and self.kill_at == float("inf"):
            self.look_at = now + LOOK_S
            self.folder = self.folder or find_run_folder(comparison, self.cell, runs)
            if self.folder is not None and source.is_pruned(self.cell, self.folder):
                self.process.terminate()
                self.kill_at = now + END_S


def run_trainings(
    comparison: ComparisonFolder,
    source: Source,
    *,
    runs: Path,
    tell: Callable[[Cell, TrainingEnd | None], None],
) -> None:
    """Train all that has not ended yet.

    tell: is called for each that begins, and with how it ended. A training that was stopped
    in its middle goes on from its checkpoint.
    """

    def end_training(cell: Cell, ended: TrainingEnd) -> None:
        tell(cell, source.take_end(cell, ended, find_run_folder(comparison, cell, runs)))

    live: dict[str, _LiveTraining] = {}
    try:
        while True:
            for device in source.devices:
                while device not in live and (cell := source.take_next(device)) is not None:
                    if cell.refused:
                        end_training(cell, TrainingEnd(cell.number, "FAILED", error=cell.refused))
                    elif (ended := _find_missed_end(comparison, cell, runs)) is not None:
                        source.take_end(cell, ended, find_run_folder(comparison, cell, runs))
                    else:
                        tell(cell, None)
                        live[device] = _LiveTraining(cell, _start_training(comparison, cell))
            if not live:
                break
            for device, one in list(live.items()):
                if one.process.poll() is None:
                    one.follow(comparison, source, runs)
                else:
                    del live[device]
                    end_training(
                        one.cell, _read_end(comparison, one.cell, one.process.returncode, runs)
                    )
            time.sleep(POLL_S)
    finally:
        _stop_processes([one.process for one in live.values()])


def _find_missed_end(comparison: ComparisonFolder, cell: Cell, runs: Path) -> TrainingEnd | None:
    """Return how the training ended after its comparison was killed.

    Wait for one that still lives.
    """
    while is_key_held(runs, _make_key(comparison, cell)):  # it may be about to begin
        time.sleep(POLL_S)
    folder = find_run_folder(comparison, cell, runs)
    if folder is None:
        return None
    while is_held(folder / TRAINING_LOCK):
        time.sleep(POLL_S)
    ended = _read_end(comparison, cell, 0, runs)
    return ended if ended.status == "FINISHED" else None


def _start_training(comparison: ComparisonFolder, cell: Cell) -> subprocess.Popen[bytes]:
    file = comparison.folder / f"{cell.number:04d}.yaml"
    settings: dict[str, Any] = hide_config_secrets(cell.config).model_dump()
    named = zip(shorten_names([*cell.settings]), cell.settings.values(), strict=True)
    label = cell.title or ", ".join(f"{name}={value}" for name, value in named)
    label = label or cell.config.model.name
    name = " ".join(filter(None, [settings["run"]["name"], label + cell.turn]))
    settings["run"]["name"] = make_printable(name, limit=NAME_LETTERS)
    settings["run"]["key"] = _make_key(comparison, cell)
    file.write_text(dump_yaml(settings))
    environment = {k: v for k, v in os.environ.items() if k != FLOW_RUN}
    words = [sys.executable, "-m", "headroom", "train", "--config", str(file)]
    with file.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            shlex.split(cell.command) or words,
            cwd=cell.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, **find_secret_variables(cell.config), PARENT: comparison.run_id},
            start_new_session=True,  # Ctrl-C is for the comparison, which then ends it
        )


def _make_key(comparison: ComparisonFolder, cell: Cell) -> str:
    return f"{comparison.folder.name}/{cell.number:04d}"


def _read_end(comparison: ComparisonFolder, cell: Cell, code: int, runs: Path) -> TrainingEnd:
    """Return how the training ended, by its run.

    One that never had a run ends with its last line.
    """
    folder = find_run_folder(comparison, cell, runs)
    start = read_start(folder) if folder is not None else None
    run: Mapping[str, Any] = read_end(folder) if folder is not None else {}
    status = run.get("status") or ("KILLED" if code < 0 else "FAILED")
    error = str(run.get("error") or "")
    if code and not error:
        error = _read_last_line(comparison.folder / f"{cell.number:04d}.log") or f"exit code {code}"
    ended = TrainingEnd(cell.number, status, start.run_id if start is not None else "")
    return replace(ended, error=make_printable(redact(error), limit=300))


def find_run_folder(comparison: ComparisonFolder, cell: Cell, runs: Path) -> Path | None:
    """Return the folder of its newest run. That of a command has no key: it is the newest that
    says the comparison is its parent, and that nothing else is known to be."""
    if cell.command:
        others = {end.run_id for end in comparison.ended.values() if end.number != cell.number}
        return next((f for f in list_run_folders(runs) if _is_of(f, comparison, others)), None)
    key = _make_key(comparison, cell)
    of_key = (
        f for f in list_run_folders(runs) if (s := read_start(f)) is not None and s.key == key
    )
    return next(of_key, None)


def _is_of(folder: Path, comparison: ComparisonFolder, others: Collection[str]) -> bool:
    start = read_start(folder)
    if start is None or start.run_id in others:
        return False
    begins = read_begins(folder / LOG, 0)
    return any(begin.get("tags", {}).get(PARENT_TAG) == comparison.run_id for begin, _ in begins)


def _read_last_line(log: Path) -> str:
    with suppress(OSError):
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""
    return ""


def _stop_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Send SIGTERM to the processes, and wait until they have ended."""
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
