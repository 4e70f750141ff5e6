"""Runs under a key that are ended at random moments, with their journals and MLflow: what
`make chaos` does to what is around a training. Each is the flow's own order of tasks in a fork,
with a sending process of its own, on a tiny data set; Prefect is left out, which costs seconds.
After each trial flows.runs and MLflow have to agree.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flows import stop
from headroom.run.known_runs import list_known_runs, list_run_folders, read_start
from headroom.run.record import Record
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.tracking.tracking_settings import TrackingError
from headroom.training import trainer
from headroom.training.kept_steps import list_steps
from headroom.training.loop import StopRequest
from headroom.training.plan import make_plan
from tasks.detect_device import detect_device
from tasks.prepare_data import prepare_data
from tasks.release_memory import release_memory
from tasks.train_model import train_model
from tests.process.ends import end_by_signals
from tests.run_folders import SENDING_LOCK, is_held, read_end, write_end

KEY, CHECKPOINTS = "chaos", "checkpoints"
EPOCHS, STEPS = 12, 60  # 160 rows to train on, by 32
STAGES = ("detected", "prepared", "begun", "trained", "released", "closed")
SETTINGS: dict[str, Any] = {
    "run": {"key": KEY, "name": KEY},
    "device": {"name": "cpu"},
    "data": {"source": "synthetic", "args": {"rows": 200, "features": 4, "classes": 2}},
    "model": {"args": {"hidden": [8]}},
    "train": {"epochs": EPOCHS, "batch_size": 32, "log_every": 5, "compile": "off"},
    "checkpoint": {"every": "5steps"},
}
ENDED_S = 60.0  # for the process that sends a run's end
ZONES = ("UTC", "Pacific/Kiritimati", "Pacific/Midway", "Europe/Berlin", "Asia/Kathmandu")


class Broken(AssertionError):
    """Something did not hold; the text says what, and how to see it again."""


@dataclass(frozen=True)
class Way:
    """How one start of the command is, beside what it is asked."""

    dies_at: str = ""  # one of STAGES
    dies_after: int = 0  # so many steps of this start
    stops_after: int = 0  # so many steps, as train.end does
    forks: bool = False  # a process that waits, as a user's code may
    clock_s: float = 0.0  # that the clock is wrong by
    turns_s: float = 0.0  # that it is set by, in mid-training
    zone: str = "UTC"
    resume: str = ""
    step_s: float = 0.0  # that each step takes longer


@dataclass
class Runs:
    """The trials on whole runs, each in a folder of its own."""

    place: Path
    drawn: random.Random
    forked: Callable[[Callable[[], None], Path], int]
    count: Callable[[str], None]
    templates: dict[str, Path] = field(default_factory=dict)

    # Trials

    def fork(self, kind: str) -> None:
        """A training whose code has forked a process that waits is killed; its key goes on."""
        place = self._new(kind)
        at = self.drawn.randint(1, STEPS - 1)
        way = self.drawn.choice(
            (Way(forks=True, dies_after=at), Way(forks=True, dies_at=self.drawn.choice(STAGES[2:])))
        )
        self._expect(place, way, -signal.SIGKILL)
        if self.drawn.random() < 0.5:
            self._settle(place)
        self._whole(place)
        self._over(place, kind)

    def sweep(self, kind: str) -> None:
        """Journals are swept by others while a key goes on."""
        place = self._copied("swept", self._swept)
        sweepers = [self.start(place, None) for _ in range(2)]
        time.sleep(self.drawn.uniform(0, 0.3))
        self._expect(place, Way(), 0)
        for pid in sweepers:
            os.waitpid(pid, 0)
        self._settle(place)
        newest = self._folders(place)[0]
        self._is_once(place, newest)
        start = read_start(newest)
        if start is None or start.resumed != 1:
            raise Broken(f"{kind}: the key did not go on with what was left; see {place}")
        self._over(place, kind)

    def key(self, kind: str) -> None:
        """Two starts of a key at once, the first or a later one; sometimes one of them dies."""
        is_first = self.drawn.random() < 0.5
        place = self._new(kind) if is_first else self._copied("stopped", self._stopped)
        slow = Way(step_s=0.01)
        ways = [slow, slow]
        if self.drawn.random() < 0.5:
            ways[0] = self.drawn.choice(
                (
                    replace(slow, dies_after=self.drawn.randint(1, 20)),
                    replace(slow, dies_at=self.drawn.choice(STAGES)),
                )
            )
        pids = [self.start(place, ways[0])]
        time.sleep(self.drawn.uniform(0, 0.1))
        pids.append(self.start(place, ways[1]))
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        allowed = {0, 2, -signal.SIGKILL} if ways[0] != slow else {0, 2}
        if not set(codes) <= allowed or (ways[0] == slow and sorted(codes) != [0, 2]):
            raise Broken(f"{kind}: two starts ended with {codes}; see {place}/log")
        self._settle(place)
        runs = len(self._folders(place))
        if ways[0] == slow and runs != 1:
            raise Broken(f"{kind}: {runs} runs began; see {place}")
        if self._is_due(place):
            self._whole(place)
        self._is_once(place, self._folders(place)[0])
        self._agrees(place)
        self._over(place, kind)

    def clock(self, kind: str) -> None:
        """Starts by clocks that were set, in other time zones; a run of another day lies beside."""
        place = self._copied("done", self._done)
        for _ in range(self.drawn.randint(1, 2)):
            way = Way(
                clock_s=self.drawn.choice((-86400.0, -3600.0, 0.0, 3600.0)),
                turns_s=self.drawn.choice((-3600.0, 0.0, 3600.0)),
                zone=self.drawn.choice(ZONES),
            )
            at = self.drawn.randint(6, 20)  # there is a checkpoint by then
            ends = self.drawn.choice((replace(way, dies_after=at), replace(way, stops_after=at)))
            self._expect(place, ends, 0 if ends.stops_after else -signal.SIGKILL)
            self._settle(place)
        way = replace(way, clock_s=self.drawn.choice((-7200.0, 0.0)), turns_s=0.0)
        self._whole(place, way=way)
        self._over(place, kind)

    def deleted(self, kind: str) -> None:
        """What a key would go on with is gone, in MLflow or on disk."""
        place = self._copied("stopped", self._stopped)
        (old,) = self._folders(place)
        start = read_start(old)
        assert start is not None
        how = self.drawn.choice(sorted(DELETIONS))
        DELETIONS[how](place, old, start.run_id, self.drawn)
        code = self._played(place, Way(resume=start.run_id))
        told = (place / "log").read_text().splitlines()[-1]
        if code != 2 or (old.is_dir() and str(old) not in told):
            raise Broken(f"{kind}, {how}: --resume ended with {code}: {told}; see {place}")
        self._whole(place, lost=start.run_id)
        self._over(place, kind)

    def stop(self, kind: str) -> None:
        """flows.stop comes at any moment, once or twice, for a first start or a later one."""
        place = (
            self._new(kind) if self.drawn.random() < 0.5 else self._copied("stopped", self._stopped)
        )
        pid = self.start(place, Way(step_s=0.02))
        stops = []
        time.sleep(self.drawn.uniform(0, 2.5))
        for _ in range(self.drawn.randint(1, 2)):
            stops.append(self.forked(partial(_stop, place), place / "stop.log"))
            time.sleep(self.drawn.choice((0, 0.05, 0.3)))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        codes = [os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]) for one in stops]
        if code not in (0, 143) or not set(codes) <= {0, 2}:
            raise Broken(f"{kind}: ended with {code}, flows.stop with {codes}; see {place}")
        self._settle(place)
        if self._is_due(place):
            self._whole(place)
        self._agrees(place)
        self._over(place, kind)

    # What they are made of

    def start(self, place: Path, way: Way | None) -> int:
        """The process of one start of the command; of what sweeps for None."""
        what = partial(_sweep, place) if way is None else partial(_flow, place, way)
        return self.forked(what, place / "log")

    def _played(self, place: Path, way: Way) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.start(place, way), 0)[1])

    def _expect(self, place: Path, way: Way, code: int) -> None:
        found = self._played(place, way)
        if found != code:
            raise Broken(f"{way} ended with {found}, not {code}; see {place}/log")

    def _whole(self, place: Path, *, way: Way = Way(), lost: str = "") -> None:
        """The key comes to its end at the next start, in a run that tells each step once: the one
        of before, where something is left of it. lost: a run that can't be gone on with."""
        before = self._folders(place)
        goes_on = self._is_due(place) and bool(before) and not lost
        goes_on = goes_on and bool(list_steps(before[0] / CHECKPOINTS))
        self._expect(place, way, 0)
        self._settle(place)
        after = self._folders(place)
        self._is_once(place, after[0])
        self._agrees(place, lost)
        if len(after) != len(before) + (not goes_on) or (goes_on and after[0] != before[0]):
            raise Broken(f"of {before} came {after}; see {place}")

    def _folders(self, place: Path) -> list[Path]:
        return list_run_folders(place / ".headroom" / "runs")

    def _is_due(self, place: Path) -> bool:
        """Whether the key's newest run is not done."""
        newest = self._folders(place)[:1]
        run = read_end(newest[0]) if newest else {}
        return run.get("status") != "FINISHED" or bool(run.get("stopped"))

    def _settle(self, place: Path) -> None:
        """Nobody sends any more."""
        until = time.monotonic() + ENDED_S
        while True:
            left = [
                f for f in (place / ".headroom" / "runs").iterdir() if is_held(f / SENDING_LOCK)
            ]
            if not left and not _senders(place):
                return
            if time.monotonic() > until:
                raise Broken(f"{left or 'something'} is sent for ever; see {place}")
            time.sleep(0.02)

    def _is_once(self, place: Path, folder: Path) -> None:
        """Its series have each step once, but for its last step, where a run says once more by what
        its weights were chosen, and none at the step of what has no series."""
        start = read_start(folder)
        assert start is not None
        asked = "select key, step, count(*) from metrics where run_uuid = ? group by key, step"
        with closing(sqlite3.connect(place / "mlflow.db")) as database:
            told = database.execute(asked, (start.run_id,)).fetchall()
        found: dict[str, dict[int, int]] = {}
        for name, step, points in told:
            found.setdefault(name, {})[step] = points
        expected = {
            "train/loss": set(range(5, STEPS + 1, 5)),
            "val/loss": set(range(5, STEPS + 1, 5)),
            "train/epoch": set(range(5, STEPS + 1, 5)),
        }
        for name, at in expected.items():
            points = found.get(name, {})
            twice = [step for step, times in points.items() if times > 1 and step < STEPS]
            if set(points) != at or twice or points[STEPS] > 2:
                raise Broken(f"{name} of {folder} was told at {points}; see {place}")

    def _agrees(self, place: Path, lost: str = "") -> None:
        """flows.runs and MLflow say the same of each run, and none that it runs."""
        with closing(sqlite3.connect(place / "mlflow.db")) as database:
            asked = "select run_uuid, status from runs where lifecycle_stage = 'active'"
            in_mlflow = dict(database.execute(asked).fetchall())
        here = {r.run_id: r.state for r in list_known_runs(place / ".headroom" / "runs")}
        here.pop(lost, None)
        in_mlflow.pop(lost, None)
        if here != in_mlflow or not set(here.values()) <= {"FINISHED", "KILLED", "FAILED"}:
            raise Broken(f"flows.runs has {here}, and MLflow {in_mlflow}; see {place}")

    def _over(self, place: Path, kind: str) -> None:
        for line in (place / "forked").read_text().split() if (place / "forked").exists() else ():
            with suppress(ProcessLookupError):
                os.kill(int(line), signal.SIGKILL)
        shutil.rmtree(place)
        self.count(kind)

    # Where they begin

    def _new(self, kind: str) -> Path:
        place = self.place / f"{kind}-{self.drawn.randrange(10**9):09d}"
        (place / ".headroom" / "runs").mkdir(parents=True)
        (place / "mlflow.yaml").write_text("flush_s: 0.2\ngive_up_s: 10\n")
        return place

    def _copied(self, name: str, make: Callable[[], Path]) -> Path:
        """A folder as `make` leaves one, which is made once."""
        if name not in self.templates:
            self.templates[name] = make()
        place = self.place / f"{name}-{self.drawn.randrange(10**9):09d}"
        shutil.copytree(self.templates[name], place)
        return place

    def _stopped(self) -> Path:
        place = self._new("template")
        self._expect(place, Way(stops_after=31), 0)
        self._settle(place)
        return place

    def _done(self) -> Path:
        place = self._new("template")
        self._expect(place, Way(), 0)
        self._settle(place)
        return place

    def _swept(self) -> Path:
        """One that stopped, and many that are done and came later."""
        place = self._copied("stopped", self._stopped)
        (place / "mlflow.yaml").write_text("flush_s: 0.2\nkeep_runs: 1\n")
        for number in range(30):
            folder = place / ".headroom" / "runs" / f"2030-{number:02d}"
            (folder / CHECKPOINTS).mkdir(parents=True)
            said = {"run_id": "", "experiment_id": "1", "name": "", "key": f"other {number}"}
            (folder / "start.json").write_text(json.dumps({**said, "made_at": 1e9 + number}))
            write_end(folder, {"status": "FINISHED"}, is_sent=True)
            (folder / CHECKPOINTS / "step-000000000007.json").touch()
        return place


def _delete(place: Path, old: Path, run_id: str, drawn: random.Random) -> None:
    _execute(place, "update runs set lifecycle_stage = 'deleted'")


def _purge(place: Path, old: Path, run_id: str, drawn: random.Random) -> None:
    tables = ("metrics", "latest_metrics", "params", "tags", "runs")
    _execute(place, *(f"delete from {table}" for table in tables))


def _lose_database(place: Path, old: Path, run_id: str, drawn: random.Random) -> None:
    for file in place.glob("mlflow.db*"):
        file.unlink()


def _damage(place: Path, old: Path, run_id: str, drawn: random.Random) -> None:
    suffix = drawn.choice((".json", ".safetensors"))
    for file in (old / CHECKPOINTS).glob(f"*{suffix}"):
        body = bytearray(file.read_bytes())
        body[drawn.randrange(len(body))] ^= 1 << drawn.randrange(8)
        file.write_bytes(body)


def _remove_tensors(place: Path, old: Path, run_id: str, drawn: random.Random) -> None:
    for file in (old / CHECKPOINTS).glob("*.safetensors"):
        file.unlink()


def _remove_folder(place: Path, old: Path, run_id: str, drawn: random.Random) -> None:
    shutil.rmtree(old)


DELETIONS: dict[str, Callable[[Path, Path, str, random.Random], None]] = {
    "deleted": _delete,
    "purged": _purge,
    "the database": _lose_database,
    "damaged": _damage,
    "the tensors": _remove_tensors,
    "the folder": _remove_folder,
}


def _execute(place: Path, *texts: str) -> None:
    with closing(sqlite3.connect(place / "mlflow.db")) as database, database:
        for text in texts:
            database.execute(text)


def _senders(place: Path) -> list[int]:
    """Processes that work in that folder, but for what a training forked."""
    kept = (place / "forked").read_text().split() if (place / "forked").exists() else []
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            is_there = entry.name.isdecimal() and os.readlink(entry / "cwd") == str(place)
            if (
                is_there
                and entry.name not in kept
                and (entry / "stat").read_text().split()[2] != "Z"
            ):
                found.append(int(entry.name))
    return found


def _flow(place: Path, way: Way) -> None:
    """What flows/train.py does, in this process, which is a fork."""
    _enter(place, way)
    end_by_signals()
    taken = iter(range(1, 10**9))
    began_s = time.monotonic()

    def reached(stage: str) -> None:
        if way.dies_at == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    real = trainer.train

    def train(*args: Any, check_stop: Any, **kwargs: Any) -> Any:
        def after_a_step() -> Any:
            step = next(taken)
            time.sleep(way.step_s)
            if step == way.dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 3 and way.turns_s:
                _set_clock(way.clock_s + way.turns_s)
            if step == way.stops_after:
                return StopRequest("enough for now")
            return check_stop()

        return real(*args, check_stop=after_a_step, **kwargs)

    trainer.train = train
    try:
        config = RunConfig.model_validate(SETTINGS)
        named = Record(config, flow_run={}, resume=way.resume or None, waited_s=0.0)
        with named as record:
            device = detect_device.fn(config.device, leases=record.leases)
            reached("detected")
            data = prepare_data.fn(config.data, batch_size=config.train.batch_size)
            reached("prepared")
            plan = record.begin(make_plan(config, device, data))
            if way.forks:
                _fork(place)
            reached("begun")
            try:
                facts = train_model.fn(
                    plan, record.past, record.folder, record.log, resumes=record.resumes
                )
                reached("trained")
                record.keep_training(facts)
            finally:
                record.keep_release(
                    release_memory.fn(
                        device, record.held_bytes, record.leaks, on_leak=config.memory.on_leak
                    )
                )
            reached("released")
        reached("closed")
    except (ConfigError, TrackingError) as error:
        print(f"{error}", file=sys.stderr, flush=True)
        sys.exit(2)
    print(f"done in {time.monotonic() - began_s:.2f} s", file=sys.stderr, flush=True)


def _sweep(place: Path) -> None:
    """What the sending process of another run does at its end, again and again."""
    from tests.tracking.test_old_journals import sweep  # imports MLflow

    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        sweep(place / ".headroom" / "runs", keep=1)
        time.sleep(0.005)


def _stop(place: Path) -> None:
    _enter(place, Way())
    sys.exit(stop.main([KEY]))


def _enter(place: Path, way: Way) -> None:
    os.chdir(place)
    os.environ |= {"HEADROOM_LEASES": f"{place}/leases", "TZ": way.zone}
    time.tzset()
    _set_clock(way.clock_s)
    torch.set_num_threads(1)


_clock = time.time


def _set_clock(wrong_s: float) -> None:
    time.time = lambda: _clock() + wrong_s


def _fork(place: Path) -> None:
    """A process that waits, and holds all that Python lets a fork have."""
    pid = os.fork()
    if not pid:
        time.sleep(120)
        os._exit(0)
    with open(place / "forked", "a") as file:
        file.write(f"{pid}\n")
