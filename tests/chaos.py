"""Trainings that are ended at random moments, again and again, and have to come out as if nothing
had happened: `make chaos`. A fork for each attempt; a count of what was tried and held at the end.

python -m tests.chaos [--seed N] [--device cuda:0] [KIND=COUNT ...]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which torch.optim would import in each fork

from headroom.training.loop import StopRequest
from tests.conftest import warm_python
from tests.device.test_leases import hold_gpu
from tests.run.chaos_runs import Broken, Runs
from tests.training.test_checkpoint_files import (
    damage,
    find_step_after_damage,
    read_all_kept,
    written_pair,
)
from tests.training.test_resume import SAME, WAYS, same_to_the_bit, train

ROOT = Path(__file__).parent.parent
COUNTS = {
    "kill -9": 300,
    "SIGTERM": 100,
    "exception": 100,
    "death between steps": 100,
    "death in a writing": 100,
    "damaged": 1000,
    "pair": 200,
    "flow": 30,
    **dict.fromkeys(("fork", "sweep", "key", "clock", "deleted", "stop"), 100),
}
# For a test of the suite: 20 of each, fewer of whole runs, no flows, which start whole processes.
FEW = {
    **dict.fromkeys(COUNTS, 20),
    **dict.fromkeys(("fork", "sweep", "key", "clock", "deleted", "stop"), 5),
    "flow": 0,
}
ON_CUDA: dict[str, dict[str, Any]] = {
    **{name: WAYS[name] for name in ("mlp with dropout", "accumulation", "early stopping")},
    "fp16": {"train": {"precision": "fp16"}},
    "a small micro-batch": {
        "model": {"args": {"hidden": [8192], "dropout": 0.2}},
        "train": {"batch_size": 512, "epochs": 6},
        # Few rows to judge by: what is halved in an evaluation may be so elsewhere the next time.
        "data": {"validation_fraction": 0.05},
        "memory": {"limit_mib": 60},
    },
}
# A checkpoint is written by these, at each of which the process may die.
WRITES = ("fsync", "fchmod", "rename", "unlink")
Act = Callable[[], None]


@dataclass
class Chaos:
    """The trials of one run of this program, in one folder."""

    place: Path
    seed: int
    device: str = "cpu"
    done: dict[str, int] = field(default_factory=dict)
    tried: int = 0  # deaths in a writing

    def __post_init__(self) -> None:
        self.drawn = random.Random(self.seed)
        self.ways = WAYS if self.device == "cpu" else ON_CUDA
        self.wholes: dict[str, float] = {}  # seconds of an undisturbed training, by its way

    def run(self, counts: dict[str, int]) -> None:
        """Each kind as often as asked. Raises Broken at the first that does not hold."""
        runs = Runs(self.place, self.drawn, _forked, self._count)
        others = {
            **{"damaged": self._damaged, "pair": self._pair, "flow": self._flows},
            **{"fork": runs.fork, "sweep": runs.sweep, "key": runs.key},
            **{"clock": runs.clock, "deleted": runs.deleted, "stop": runs.stop},
        }
        for kind, count in counts.items():
            began = time.monotonic()
            while self.done.get(kind, 0) < count:
                others.get(kind, self._killed)(kind)
            if count:
                print(f"{kind}: {self.done[kind]}, {time.monotonic() - began:.0f} s", flush=True)

    def _count(self, kind: str) -> None:
        self.done[kind] = self.done.get(kind, 0) + 1

    # Trainings

    def _killed(self, kind: str) -> None:
        """One training, ended one to three times, then gone on with to its end."""
        way = self.drawn.choice(sorted(self.ways))
        whole = self._whole(way)
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.place))
        ends = self.drawn.randint(1, 3)
        for attempt in range(ends):
            if self._ended(kind, way, folder, resumes=attempt > 0):
                self._count(kind)
            self._no_announced_one_is_lost(folder / "run")
        if self._play(way, folder, resumes=True) != 0:
            raise Broken(f"{kind}, {way}: it did not go on; see {folder}/log (--seed {self.seed})")
        try:
            assert _series(folder) == _series(whole), "the series differ"
            same_to_the_bit(whole / "run", folder / "run")
        except AssertionError as error:
            raise Broken(f"{kind}, {way}: {error}; see {folder} (--seed {self.seed})") from None
        shutil.rmtree(folder)

    def _whole(self, way: str) -> Path:
        folder = self.place / re.sub(r"\W", "-", way)
        if way not in self.wholes:
            folder.mkdir()
            for _ in range(2):  # the first one prepares the data
                shutil.rmtree(folder / "run", ignore_errors=True)
                (folder / "series").unlink(missing_ok=True)
                began = time.monotonic()
                if self._play(way, folder, resumes=False) != 0:
                    raise Broken(f"{way}: fails undisturbed; see {folder}/log")
                self.wholes[way] = time.monotonic() - began
        return folder

    def _ended(self, kind: str, way: str, folder: Path, *, resumes: bool) -> bool:
        """Whether it was ended before its end."""
        if kind == "death between steps":
            at = self.drawn.randint(1, 40)
            return self._play(way, folder, resumes=resumes, dies_after=at) != 0
        if kind == "death in a writing":
            # Each call of each, one after the other; a short training has no sixth.
            name, at = WRITES[self.tried % len(WRITES)], self.tried // len(WRITES) % 6
            self.tried += 1
            code = self._play(way, folder, resumes=resumes, first=lambda: _die_in(name, at))
            return code != 0
        after_s = self.drawn.uniform(0, 1.05 * self.wholes[way])
        number = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM}.get(kind, signal.SIGUSR2)
        return self._play(way, folder, resumes=resumes, after_s=after_s, number=number) != 0

    def _play(
        self,
        way: str,
        folder: Path,
        *,
        resumes: bool,
        after_s: float = 0.0,
        number: int = 0,
        dies_after: int = 0,
        first: Act = lambda: None,
    ) -> int:
        """Train in a fork, and send it a signal after so long; its exit code, negative where a
        signal has ended it."""

        def trains() -> None:
            first()
            sections = {**self.ways[way], "device": {"name": self.device}}
            # Of all that it copies for a best epoch and by steps, more is under way at any moment.
            sections["checkpoint"] = {"every": "5steps"}
            if self.device != "cpu":
                sections["train"] = {"deterministic": True, **sections.get("train", {})}
            _train(folder, sections, resumes=resumes, dies_after=dies_after)

        pid = _forked(trains, folder / "log")
        if number:
            time.sleep(after_s)
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _no_announced_one_is_lost(self, folder: Path) -> None:
        read_all_kept(folder / "checkpoints")

    # Checkpoints

    def _damaged(self, kind: str) -> None:
        folder = Path(tempfile.mkdtemp(prefix="damaged-", dir=self.place))
        written_pair(folder)
        told = damage(folder, self.drawn)
        found = find_step_after_damage(folder, damaged=2)
        if found == 2:
            raise Broken(f"{told} was not noticed; see {folder}")
        if found != 1:
            raise Broken(f"{told}: the one before was not taken; see {folder}")
        shutil.rmtree(folder)
        self._count(kind)

    # Leases

    def _pair(self, kind: str) -> None:
        """Two trainings that start at once on one device; sometimes the one that has it dies."""
        inside, leases = self.place / "inside", self.place / "leases"
        dies = self.drawn.random() < 0.3

        def trains(is_first: bool) -> None:
            with hold_gpu(leases, wait_s=60):
                inside.touch(exist_ok=False)  # fails where the other one is inside
                time.sleep(0.005)
                inside.unlink()
                if dies and is_first:
                    os.kill(os.getpid(), signal.SIGKILL)

        pids = [_forked(partial(trains, f), self.place / "pair.log") for f in (True, False)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if codes != [-signal.SIGKILL if dies else 0, 0]:
            raise Broken(f"a pair ended with {codes}; see {self.place}/pair.log")
        if list(leases.glob("*.ticket")):
            raise Broken(f"a ticket was left in {leases}")
        self._count(kind)

    # Whole flows

    def _flows(self, kind: str) -> None:
        """`python -m flows.train` under one key, ended until it has trained; no run says RUNNING
        then, and each step was told once."""
        place = Path(tempfile.mkdtemp(prefix="flow-", dir=self.place))
        shutil.copy(ROOT / "mlflow.yaml", place)
        words = "--run.key chaos --train.epochs 200 --checkpoint.every 50steps --device.name"
        command = [sys.executable, "-m", "flows.train", *words.split(), self.device]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "HEADROOM_LEASES": f"{place}/leases"}
        for attempt in range(40):
            with open(place / "log", "a") as log:
                process = subprocess.Popen(command, cwd=place, env=env, stdout=log, stderr=log)
            if attempt % 4 != 3:  # each fourth one may come to its end
                number = self.drawn.choice((signal.SIGKILL, signal.SIGTERM))
                time.sleep(self.drawn.uniform(2, 14))
                if process.poll() is None:
                    process.send_signal(number)
                    self._count(kind)
                expected = {0, -number, 128 + number}
            else:
                expected = {0}
            if process.wait(timeout=300) not in expected:
                raise Broken(f"a flow ended with {process.returncode}; see {place}/log")
            if process.returncode == 0:
                break
        self._told_once(place)

    def _told_once(self, place: Path) -> None:
        with sqlite3.connect(place / "mlflow.db") as database:
            states = database.execute("select status, count(*) from runs group by status")
            told = dict(states.fetchall())
            # But for its last step, where a run also says by what its weights were chosen.
            losses = database.execute(
                "select run_uuid, count(*), count(distinct step) from metrics"
                " join runs using (run_uuid) where key = 'train/loss' and status = 'FINISHED'"
                " and step < 4600 group by run_uuid"
            ).fetchall()
        if "RUNNING" in told or "FINISHED" not in told:
            raise Broken(f"runs were left as {told}; see {place}")
        for run, points, steps in losses:  # 200 epochs of 23 steps, a log point every 10
            if (points, steps) != (459, 459):
                raise Broken(f"{run} has {points} points at {steps} steps, not 459; see {place}")


def _forked(what: Act, log: Path) -> int:
    """The process that does it; its code is 0 only where it came to its end."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = sys.stderr = os.fdopen(file, "w", buffering=1)  # under pytest they are its own
        torch.set_num_threads(1)
        what()
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _train(folder: Path, sections: dict[str, Any], *, resumes: bool, dies_after: int) -> None:
    """As the flow's task does it: what is logged is in a file at once, and a signal waits.
    dies_after: so many steps, where it is not 0."""
    steps = iter(range(1, 10**9))
    series = os.open(folder / "series", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def log(metrics: dict[str, float], step: int) -> None:
        told = {name: value for name, value in metrics.items() if name.startswith(SAME)}
        os.write(series, (json.dumps([step, told]) + "\n").encode())

    def fails(*_: object) -> None:
        raise RuntimeError("at a random moment")

    signal.signal(signal.SIGUSR2, fails)
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))

    def asked() -> StopRequest | None:
        if next(steps) == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return StopRequest("", act=partial(sys.exit, 143)) if came else None

    train(folder / "run", sections, log=log, resumes=resumes, check_stop=asked)
    if came:
        sys.exit(143)


def _die_in(name: str, at: int) -> None:
    """This process dies in the `at`-th call of that function from now on."""
    real, calls = getattr(os, name), iter(range(10**9))

    def dies(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(os, name, dies)


def _series(folder: Path) -> dict[tuple[int, str], float]:
    """What was logged of each step; what was logged twice was the same."""
    found: dict[tuple[int, str], float] = {}
    for line in (folder / "series").read_text().splitlines():
        step, told = json.loads(line)
        for name, value in told.items():
            assert found.setdefault((step, name), value) == value, f"{name} of step {step} differs"
    return found


def main(words: Sequence[str]) -> int:
    """Print what was tried. Returns 1 where something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("counts", nargs="*", metavar="KIND=COUNT", help=f"of {', '.join(COUNTS)}")
    asked = parser.parse_args(words)
    counts = {kind: int(count) for kind, _, count in (c.partition("=") for c in asked.counts)}
    if strangers := counts.keys() - COUNTS.keys():
        parser.error(f"{', '.join(strangers)}: not among {', '.join(COUNTS)}")
    place = Path(tempfile.mkdtemp(prefix="headroom-chaos-"))
    print(f"seed {asked.seed}, in {place}", flush=True)
    # What sends to MLflow is forked too: importing it takes longer than a training.
    os.environ |= {"TESTS_SHARED": str(place), "TESTS_PID": str(os.getpid())}
    cold, sys.executable = sys.executable, warm_python(place / "bin", sys.executable)
    try:
        Chaos(place, asked.seed, asked.device).run(counts or COUNTS)
    except Broken as error:
        print(f"BROKEN: {error} (--seed {asked.seed})", file=sys.stderr)
        return 1
    finally:
        sys.executable = cold
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))
