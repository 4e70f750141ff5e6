"""Histories: what people and trainings do on a simulated host, what befalls it meanwhile, and how
it is put right again. The record's own code does all of it: each start is a `Recording` with its
claim, lease, journal and sending process; what is left is cleaned up by `flows.tidy`'s function.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from headroom.base import event_log, file_lock
from headroom.device import leases
from headroom.device.leases import DevicesBusyError
from headroom.prefect import prefect_http
from headroom.process import children
from headroom.report import run_report
from headroom.run import findings, known_runs, recording, resume, run_keys, tidy
from headroom.run.recording import Recording
from headroom.run.resume import LoopClaim, NamedRun
from headroom.run.run_keys import KeyHeld
from headroom.settings.read_settings import ConfigError
from headroom.tracking import (
    journal,
    left_folders,
    mlflow_sender,
    mlflow_store,
    orphaned_runs,
    query_runs,
    run_sender,
    send_later,
    tracking_settings,
)
from headroom.tracking.journal import JournalError
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings
from headroom.training import kept_steps
from headroom.watch import phases
from tests.simulation import stand_ins
from tests.simulation.drawing import History, Start, Sweep
from tests.simulation.server import EXPERIMENT, Client, Server, make_away
from tests.simulation.stand_ins import LEASES, Path, installed, played_in
from tests.simulation.world import ROOM, Killed, World

RUNS, ELSEWHERE = "/runs", "/others"
HELD = 4  # an exit code: the key is another's
DATABASE = "/mlflow.db"
DEVICES = ("GPU-1", "GPU-2")
MODULES = [
    *(event_log, file_lock, leases, prefect_http, children, findings, known_runs, recording),
    *(resume, run_keys, tidy, journal, left_folders, mlflow_sender, mlflow_store),
    *(orphaned_runs, run_sender, query_runs, send_later, tracking_settings, kept_steps, phases),
]
METRICS = ("train/loss", "train/lr")
REPORT = run_sender.REPORT
LATE_S = 40.0  # after which MLflow has a point: it is asked each 30 s, where it was away
LONG_FREE_S = 60.0  # a device that is free for so long is taken by who waits
KILLS = {"kill", "kill after", "kill all"}
HARMLESS = {"clock", "pause"}  # faults, of which a run that is taken back knows nothing


class Broken(AssertionError):
    """The record did not hold what it promises."""


@dataclass
class Truth:
    """What really happened, by the folders of the runs."""

    points: dict[str, dict[tuple[str, int], float]] = field(default_factory=dict)
    ends: dict[str, set[str]] = field(default_factory=dict)  # of which one has to be told
    training: dict[str, Any] = field(default_factory=dict)  # the process of each
    holders: dict[str, Any] = field(default_factory=dict)  # of each device
    keys: dict[str, Any] = field(default_factory=dict)  # who trains under each
    checkpoints: dict[str, tuple[dict[str, Any], int]] = field(default_factory=dict)  # by key
    given_up: set[str] = field(default_factory=set)  # folders whose run was taken back
    cut: set[str] = field(default_factory=set)  # folders that a power loss has met
    earlier: dict[str, set[str]] = field(default_factory=dict)  # ends that were told before
    begins: dict[str, int] = field(default_factory=dict)  # how often each began, or went on
    last_held: float = 0.0  # when a device was last let go of


class SimulatedRecording(Recording):
    """A recording that notes what is told and when; what it tells is Recording's own."""

    def __init__(self, play: Play, *args: Any) -> None:
        super().__init__(*args, params={"lr": "0.1"})
        self.play = play
        real = self._journal.close

        def close(run: Any, *, beside: Any = None) -> Any:
            name, truth = self.folder.name, play.truth
            before = truth.ends.get(name, set())
            truth.ends[name] = before | {run["status"]}
            try:
                times = real(run)
            finally:
                if not play.is_dead():
                    is_kept = self._journal._unkept_end is None
                    closed = self._journal._is_closed
                    if is_kept or closed:
                        truth.ends[name] = {run["status"]}
                        truth.earlier.setdefault(name, set()).add(run["status"])
            play.judge_closed(name, run["status"])
            return times

        self._journal.close = close  # type: ignore[method-assign]

    def _judge(self) -> None:
        """What held it back is not asked here."""

    def _compare(self) -> dict[str, Any]:
        return {}

    def train(self, start: Start) -> None:
        """Train as an account does: open, log, keep checkpoints."""
        play, truth, claim = self.play, self.play.truth, self._claim
        self._found.tags |= {
            "device.kind": "cpu",
            **findings.make_process_tags("train.py"),
            "gate.of": "",
            **({"run.key": claim.key} if claim.key else {}),
        }
        self._follow_claim()
        self._open(start)
        if start.by == "late" and start.key in truth.checkpoints:
            self._open_named(start)
        self.name = name = self.folder.name
        me = play.me()
        other = truth.training.get(name)
        if other is not None and not other.is_dead:
            raise Broken(f"{name} is trained twice at once")
        truth.training[name] = me
        truth.begins[name] = truth.begins.get(name, 0) + 1
        step = claim.step
        told_at: list[tuple[float, int]] = []
        for count in range(1, start.points + 1):
            step += 1
            play.world.sleep(start.pause_s)
            values = {m: float(step) + i / 10 for i, m in enumerate(METRICS)}
            self.log(values, step)
            if play.is_dead():
                raise Killed
            truth.points.setdefault(name, {}).update(
                {(m, step): truth.points.get(name, {}).get((m, step), v) for m, v in values.items()}
            )
            told_at.append((play.world.mono, step))
            play.judge_training(name, self._journal, told_at)
            if count % start.keeps_every == 0:
                state = NamedRun(self._journal.run_id, name, step).make_state()
                truth.checkpoints[start.key] = (state, step)
        if start.ends == "fails":
            raise RuntimeError("the loop failed")
        if start.ends == "stops":
            self._found.stopped = "a time limit"
        if start.ends == "gone" and self._journal._sender is not None:
            play.world.kill(self._journal._sender.process)
        if start.ends in ("left", "gone"):
            play.world.kill(me)

    def _open(self, start: Start) -> None:
        truth, claim = self.play.truth, self._claim
        if claim.resumes:
            tags = self._found.tags
            self._found.tags = {**tags, "resumed_from_step": str(claim.step)}
            name = self.folder.name
            before = truth.ends.get(name, {"KILLED"})
            truth.ends[name] = before | {"KILLED"}
            truth.earlier.setdefault(name, set()).update(before)  # perhaps told, and not heard of
            try:
                if self._reopen(claim.step) is not None:
                    truth.ends[name] = {"KILLED"}
                else:
                    truth.ends[name] = before
            except TrackingError as unusable:
                truth.ends[name] = before
                claim.begin_anew(unusable)
                self._follow_claim()
            if not claim.resumes:
                self._found.tags = tags
        begun = claim.start
        if begun is None:
            self._tell_anew("a new run")
            truth.ends[self.folder.name] = {"KILLED"}
            begun, _ = self._create(self.params, waits=start.waits)
        self._announce(begun, CPU)

    def _open_named(self, start: Start) -> None:
        truth, claim = self.play.truth, self._claim
        named = NamedRun.read(truth.checkpoints[start.key][0])
        assert named is not None
        if claim.resumes or claim.find_named(named) == self.folder:
            return
        old = self.folder.name
        try:
            is_found = claim.take_named(named, self._journal.take_back)
        except (TrackingError, OSError) as unusable:
            is_found, claim.anew = False, str(unusable)
        if not is_found:
            return self._tell_anew("a new run")
        truth.given_up.add(old)
        self._files.clear()
        self._follow_claim()
        self._open(start)


CPU: Any = SimpleNamespace(kind="cpu", name="cpu")


class Play:
    """One history being played."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.world = World(history.seed, history.faults, switch=history.switch, lies=history.lies)
        self.server = Server(self.world)
        self.client = Client(self.server)
        self.truth = Truth()
        uri = f"sqlite:///{DATABASE}" if history.direct else "http://mlflow"
        self.where = TrackingSettings(
            tracking_uri=uri, runs=RUNS, give_up_s=5, send_later_s=0, flush_s=2, keep_runs=200
        )
        self.world.on_power.append(self._note_power)
        self.codes: list[str] = []

    def me(self) -> Any:
        assert self.world.now is not None
        return self.world.now.process

    def is_dead(self) -> bool:
        return bool(self.me().is_dead)

    def play(self) -> None:
        """Play it to its end. Raises Broken where something does not hold."""
        children._left.clear()
        file_lock._open_locks.clear()
        mlflow_store.notes.clear()
        with played_in(self.world):
            self.world.run(self._be_a_person)

    # What people do

    def _be_a_person(self) -> None:
        world, history = self.world, self.history
        for place, mode in ((RUNS, 0o700), (ELSEWHERE, 0o700), (LEASES, 0o1777)):
            node = world.make(place, is_dir=True, mode=mode)
            world.set_name(world.root, place[1:], node)
        world.set_name(world.root, DATABASE[1:], world.make(DATABASE, is_dir=False, mode=0o600))
        world.sync()
        begun = []
        for number, start in enumerate(history.starts):
            if begun and not start.beside:
                self._wait_for(begun)
            for sweep in history.sweeps:
                if sweep.start == number:
                    world.begin("tidy", lambda sweep=sweep: self._sweep(sweep))  # type: ignore[misc]
            world.wait(None, start.after_s)
            begun.append(world.begin("training", lambda start=start: self._ask(start)))  # type: ignore[misc]
        self._wait_for(begun)
        self._put_right()
        self._judge()

    def _wait_for(self, processes: list[Any]) -> None:
        self.world.wait(lambda: all(p.is_dead for p in processes), None)

    def _wait_for_all(self) -> None:
        self.world.wait(lambda: len(self.world.processes) == 1, 2000.0)
        if len(self.world.processes) > 1:
            kinds = sorted(p.kind for p in self.world.processes.values() if p.kind != "person")
            raise Broken(f"still there after all was healthy again: {', '.join(kinds)}")

    def _put_right(self) -> None:
        """Let all be healthy; go on with the key, or not; and clean up."""
        world = self.world
        world.is_healthy, world.room = True, ROOM
        world.away_until = world.starved_until = 0.0
        world.half, world.answer_fault = None, ""
        world.after.clear()
        self._wait_for_all()
        if self.history.resumes_at_last:
            last = Start(key="k", points=2, pause_s=0.0)
            one = world.begin("training", lambda: self.train(last))
            self._wait_for_all()
            if one.code != 0:
                raise Broken(f"the key can't be gone on with: {self.codes[-1:]}")
        world.begin("tidy", lambda: self._tidy(self.where))
        self._wait_for_all()

    def _tidy(self, where: TrackingSettings) -> None:
        for action in tidy.clean_up(where, does=True):
            if action.problem and self.world.is_healthy:
                self.codes.append(f"tidy: {action.what}: {action.problem}")

    def _sweep(self, sweep: Sweep) -> None:
        self.world.sleep(sweep.at_s)
        if sweep.how in ("tidy", "elsewhere"):
            runs = RUNS if sweep.how == "tidy" else ELSEWHERE
            return self._tidy(self.where.model_copy(update={"runs": runs}))
        for log in list(Path(RUNS).glob(f"*/{event_log.LOG}")):
            mlflow_sender.send_folder(log.parent)

    def _ask(self, start: Start) -> None:
        """Start a training; where its key is held, so often as it is to be asked for."""
        for left in reversed(range(start.asks)):
            try:
                return self.train(start)
            except SystemExit as refused:
                if refused.code != HELD or not left:
                    raise
            self.world.sleep(0.002 * self.world.drawn.random())

    def train(self, start: Start) -> None:
        """One start of a training, whatever comes of it."""
        truth, me = self.truth, self.me()
        claim = LoopClaim(Path(RUNS), "loop", start.key)
        if start.by == "checkpoint" and start.key in truth.checkpoints:
            claim.named = NamedRun.read(truth.checkpoints[start.key][0])
        one = SimulatedRecording(self, self.where, claim)
        lease = one._live.make_leases(wait_s=120.0)
        try:
            with one:
                if start.key:
                    other = truth.keys.get(start.key)
                    if other is not None and not other.is_dead:
                        raise Broken(f"the key {start.key!r} is held twice")
                    truth.keys[start.key] = me
                    one._held.callback(lambda: truth.keys.pop(start.key, None))
                if start.device:
                    one._held.callback(lease.close)
                    self._take(lease, one)
                one.train(start)
        except KeyHeld:
            raise SystemExit(HELD) from None
        except (RuntimeError, DevicesBusyError, JournalError, ConfigError, TrackingError) as error:
            self.codes.append(f"{type(error).__name__}: {error}")
            raise SystemExit(2) from None
        except OSError as error:
            self.codes.append(f"{type(error).__name__}: {error}")
            raise SystemExit(3) from None

    def _take(self, lease: Any, one: Any) -> None:
        me, world, truth = self.me(), self.world, self.truth
        asked_at = world.mono
        try:
            device = lease.take(DEVICES[:1])
        except DevicesBusyError:
            free_s = world.mono - max(asked_at, truth.last_held)
            if not truth.holders and free_s > LONG_FREE_S:
                raise Broken(f"{DEVICES[0]} was refused, free for {free_s:.0f} s") from None
            raise
        other = truth.holders.get(device)
        if other is not None and not other.is_dead:
            raise Broken(f"{device} is leased twice at once")
        truth.holders[device] = me

        def let_go() -> None:
            if truth.holders.get(device) is me:
                del truth.holders[device]
                truth.last_held = world.mono

        one._held.callback(let_go)
        me.on_death.append(let_go)

    # What has to hold

    def judge_closed(self, name: str, status: str) -> None:
        """Who trains has heard that its run is closed: MLflow has all of it by now. What a power
        cut took before, and how a run goes on that was killed meanwhile, is judged at the end."""
        befell = {fault.what for fault in self.world.met}
        if self.is_dead() or befell & {"power", "twice"}:
            return
        runs = self._find_runs(name)
        there = {(key, step) for run in runs for key, _, _, step in run.points}
        lost = sorted(self.truth.points.get(name, {}).keys() - there)
        if runs and not any(REPORT in run.artifacts for run in runs):
            raise Broken(f"{name} is closed as {status}, and has no report in MLflow")
        if lost or status not in {run.status for run in runs}:
            statuses = [run.status for run in runs]
            raise Broken(f"{name} is closed as {status}; MLflow says {statuses}, lacks {lost[:4]}")

    def _is_swept(self, run: Any) -> bool:
        """Return whether who has not its folder has ended it in the instant in which it was gone on
        with, and was killed before it could look again: not promised."""
        befell = {fault.what for fault in self.world.met}
        ways = {sweep.how for sweep in self.history.sweeps}
        is_guess = run.status == "KILLED" and run.tags.get("end.reason") == orphaned_runs.DEAD
        return is_guess and "elsewhere" in ways and bool(befell & KILLS)

    def judge_training(
        self, name: str, journal: journal.Journal, told_at: list[tuple[float, int]]
    ) -> None:
        """Who trains is told of as one who trains: nobody has ended its log or its run, and what it
        told long ago is in MLflow, where nothing befell it since."""
        world = self.world
        log = world.find(f"{RUNS}/{name}/{event_log.LOG}")
        assert log is not None
        if log.data.rfind(b'\n{"end":') > log.data.rfind(b'{"begin":'):
            raise Broken(f"the log of {name} says an end, and it trains")
        run = self.server.runs.get(journal.run_id)
        if run is None or world.mono - world.away_until < LATE_S:
            return
        until = world.mono + 1.0
        # Who has looked for the process again puts it right, or tells it when all is well again.
        while run.status != "RUNNING" and world.mono < max(until, world.troubled_until + LATE_S):
            world.wait(None, 1.0)
        sender = journal._sender
        is_mute = sender is None or sender.poll() is not None  # on a host without memory
        if run.status != "RUNNING" and not is_mute and not self._is_swept(run):
            raise Broken(f"{run.run_id} of {name} says {run.status}, and it trains")
        is_calm = world.mono - world.troubled_until > LATE_S and world.room == ROOM
        if not is_calm or self.history.busy or is_mute:
            return
        there = {step for run in self._find_runs(name) for _, _, _, step in run.points}
        late = [step for at, step in told_at if world.mono - at > LATE_S and step not in there]
        if late:
            raise Broken(f"MLflow has not heard of the steps {late} of {name}, which trains")

    def _note_power(self) -> None:
        """What the disk has lost is promised only where MLflow has it."""
        runs = self.world.find(RUNS)
        assert runs is not None
        for name, points in self.truth.points.items():
            folder = runs.names.get(name)
            log = folder.names.get(event_log.LOG) if folder is not None else None
            kept: set[tuple[str, int]] = set()
            for line in bytes(log.data).split(b"\n")[:-1] if log is not None else ():
                with suppress(*event_log._DAMAGE):
                    _, step, metrics = event_log._parse_line(line + b"\n")
                    kept |= {(key, step) for key in metrics}
            is_known = bool(self._find_runs(name))
            is_begun = log is not None and _is_begun(bytes(log.data))
            if self.history.lies or not (is_known or is_begun):
                kept = set()  # where its begin is gone, nobody knows what run it was
            for run in self._find_runs(name):
                kept |= {(key, step) for key, _, _, step in run.points}
            self.truth.points[name] = {at: v for at, v in points.items() if at in kept}
        is_full = any(fault.what == "full" for fault in self.world.met)
        for name, ends in self.truth.ends.items():
            self.truth.cut.add(name)
            # How it went on may be gone; the end of a run that was not gone on with is on the disk,
            # but where that was full, and MLflow alone was told of it.
            is_over = len(ends) == 1 and "KILLED" not in ends and not self.history.lies
            folder = runs.names.get(name)
            log = folder.names.get(event_log.LOG) if folder is not None else None
            is_unkept = is_full and (log is None or b'{"end":' not in bytes(log.data))
            if not is_over or is_unkept:
                self.truth.ends[name] = ends | self.truth.earlier.get(name, set()) | {"KILLED"}

    def _find_runs(self, name: str) -> list[Any]:
        return [
            run
            for run in self.server.runs.values()
            if run.tags.get("journal") == name and run.stage == "active"
            if not self._is_ended_double(run)
        ]

    def _is_ended_double(self, run: Any) -> bool:
        """Return whether MLflow was made to make it beside another, and who has not its folder has
        ended it before who has could take it away: it stays, empty."""
        is_double = "twice" in {fault.what for fault in self.world.met} and not run.points
        ways = {sweep.how for sweep in self.history.sweeps}
        return is_double and run.status == "KILLED" and "elsewhere" in ways

    def _is_unmarked(self, run: Any) -> bool:
        """Return whether a power cut has lost the mark by which its folder had gone on with it, on
        a disk that says that it has written what it has not: the folder is then taken for another
        copy. Tidy says so, and what trains there stays in the folder."""
        if not self.history.lies or "power" not in {fault.what for fault in self.world.met}:
            return False
        with played_in(self.world):
            marks = orphaned_runs._read_marks(Path(RUNS, run.tags.get("journal", "")))
        named = re.compile(rf"\b{run.run_id}\b")
        told = any(named.search(code) and "another copy" in code for code in self.codes)
        return told and bool(run_sender.find_other_copy(run.describe(), marks))

    def _read_log(self, name: str) -> dict[tuple[str, int], float]:
        with played_in(self.world):
            series = event_log.read_series(Path(RUNS, name, event_log.LOG))
        return {(key, int(step)): v for key, points in series.items() for step, v, _ in points}

    def _judge(self) -> None:
        truth, wrong = self.truth, []
        for run in self.server.runs.values():
            if run.stage != "active":
                continue
            name = run.tags.get("journal", "")
            # A power cut took the folder, and a request that was asked again had made two runs.
            is_stray = bool(name) and self.world.find(f"{RUNS}/{name}") is None and not run.points
            is_stray |= self._is_ended_double(run)
            if name in truth.given_up and {f.what for f in self.world.met} <= HARMLESS:
                wrong.append(f"{run.run_id} of {name} was taken back and is there")
            if self._is_unmarked(run):
                pass
            elif run.status == "RUNNING":
                wrong.append(f"{run.run_id} of {name} says RUNNING")
            elif not is_stray and run.status not in truth.ends.get(name, {"KILLED"}):
                wrong.append(
                    f"{run.run_id} of {name} says {run.status}, not {sorted(truth.ends[name])}"
                )
            elif run.status != "KILLED" and run.tags.get("end.reason") == orphaned_runs.DEAD:
                wrong.append(f"{run.run_id} of {name} says {run.status}, and its process was gone")
            counts: dict[tuple[str, int], int] = {}
            for key, _, _, step in run.points:
                if key in METRICS:
                    counts[key, step] = counts.get((key, step), 0) + 1
            doubled = [at for at, count in counts.items() if count > 1]
            if doubled:
                wrong.append(f"{run.run_id} of {name} has twice: {sorted(doubled)[:4]}")
        gone = {Path(RUNS, n) for n in truth.points if self.world.find(f"{RUNS}/{n}") is None}
        befell = {fault.what for fault in self.world.met}
        for name, points in truth.points.items():
            runs = self._find_runs(name)
            if runs and "power" not in befell and not any(REPORT in r.artifacts for r in runs):
                wrong.append(f"{name} has no report in MLflow")
            if Path(RUNS, name) in gone:  # a power cut took it: which run it was told nobody knows
                runs = [run for run in runs if run.points]
            # Not promised: a power cut may take which of two runs that MLflow was made to make.
            if len(runs) > 1 and not befell >= {"twice", "power"}:
                wrong.append(f"{name} has the runs {[run.run_id for run in runs]}")
            there = {(key, step): v for run in runs for key, v, _, step in run.points}
            if any(map(self._is_unmarked, runs)):
                there |= self._read_log(name)
            lost = [at for at, v in points.items() if there.get(at) != v]
            if lost:
                wrong.append(f"{name} lacks {len(lost)} of {len(points)}: {sorted(lost)[:4]}")
        wrong += self._judge_logs()
        with played_in(self.world):
            for name in ("k", "other"):
                with suppress(ConfigError), run_keys.lock_key(Path(RUNS), name):
                    continue
                wrong.append(f"the key {name!r} can't be taken")
        place = self.world.find(LEASES)
        assert place is not None
        left = sorted(n for n in place.names if n.endswith((".ticket", ".run")))
        if left:
            wrong.append(f"left beside the leases: {left}")
        for node in self._walk(self.world.root):
            if node.alone is not None or node.sharing:
                wrong.append("a lock is held by nobody")
        if wrong:
            raise Broken("; ".join(wrong))

    def _judge_logs(self) -> list[str]:
        """Return what is wrong with the logs. A power cut may take any of it, and on a full disk
        an end goes to MLflow alone; half a line is left by who is killed while it writes."""
        befell = {fault.what for fault in self.world.met}
        if "power" in befell:
            return []
        wrong = []
        with played_in(self.world):
            for name, count in self.truth.begins.items():
                folder = Path(RUNS, name)
                if name in self.truth.given_up or self.world.find(str(folder)) is None:
                    continue
                if (there := len(event_log.read_begins(folder / event_log.LOG, 0))) < count:
                    wrong.append(f"the log of {name} says {there} begins of {count}")
                status = event_log.read_end(folder).get("status")
                if "full" not in befell and status not in self.truth.ends[name]:
                    wrong.append(f"the log of {name} says {status} at its end")
        # On a full disk half a line is there for the moment until it is cut off.
        is_cut = "kill in it" in befell or ("full" in befell and bool(befell & KILLS))
        for run in self.server.runs.values():
            if "journal.damaged_lines" in run.tags and not is_cut:
                wrong.append(f"{run.run_id} says that lines of its log are damaged")
        return wrong

    def _walk(self, node: Any) -> Iterator[Any]:
        yield node
        for child in node.names.values():
            yield from self._walk(child)


def _is_begun(log: bytes) -> bool:
    """Return whether the log says how its run began."""
    first, end, _ = log.partition(b"\n")
    with suppress(*event_log._DAMAGE):
        event_log._check_line(first + end)
        return first.startswith(b'{"begin"')
    return False


class _Quiet:
    """In place of what tells people of a run."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.steps = self.epochs = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def _insert(path: Any, run_id: str, samples: Any) -> bool:
    return _playing[-1].client.insert(run_id, samples)


def _open_experiment(where: Any) -> tuple[Any, str]:
    play = _playing[-1]
    play.server.ask(lambda: None)
    return play.client, EXPERIMENT


_playing: list[Play] = []


@contextmanager
def stage() -> Iterator[None]:
    """Let the record's modules be in simulated worlds, until it is left."""
    logging.disable(logging.CRITICAL)
    quiet_signals = SimpleNamespace(
        hold_signals=lambda hurry: nullcontext(),
        find_exit_code=lambda: None,
    )
    no_prefect = SimpleNamespace(
        read_flow_run_ends=lambda runs: {},
        correct_flow_runs=lambda api, runs: None,
    )
    report = SimpleNamespace(
        draw_plots=lambda run, folder: {},
        make_html=lambda run, plots, open_command: "",
        make_markdown=lambda run, open_command: "",
        load_plotting=lambda: None,
    )
    more: dict[Any, dict[str, Any]] = {
        recording: {
            "signals": quiet_signals,
            "Alerts": _Quiet,
            "Messenger": _Quiet,
            "make_device_json": lambda device: "{}",
        },
        journal: {
            "copy_context": lambda: SimpleNamespace(run=lambda call, *args: call(*args)),
            "host_memory": SimpleNamespace(
                count_kills=lambda: None, describe_kills_since=lambda kills: ""
            ),
        },
        mlflow_sender: {
            "redact_output": lambda is_log: None,
            "read_tracking_settings": lambda: _playing[-1].where,
            "make_client": lambda *_: _playing[-1].client,
            "run_report": report,
            "prefect_http": no_prefect,
            "SystemMetricsMonitor": _Quiet,
            "host_memory": SimpleNamespace(
                count_kills=lambda: None, describe_kills_since=lambda kills: ""
            ),
            "read_code_version": lambda source="": {},
            "pause_collection": nullcontext,
        },
        mlflow_store: {"open_experiment": _open_experiment},
        orphaned_runs: {
            "open_experiment": _open_experiment,
            "make_client": lambda *_: _playing[-1].client,
            "prefect_http": no_prefect,
        },
        run_sender: {
            "run_report": report,
            "_try_insert": _insert,
            "_describe_environment": lambda: "",
        },
        tidy: {"prefect_http": no_prefect, "_find_servers": lambda: {}},
    }
    stand_ins.PROGRAMS |= {
        "headroom.tracking.mlflow_sender": lambda: mlflow_sender.main(),
        "headroom.tracking.orphaned_runs": lambda: orphaned_runs.main(),
    }
    assert run_report and make_away
    throttle = run_sender.Throttle.__init__
    before = dict(throttle.__kwdefaults__ or {})
    lease = leases.Leases.__init__
    lease_before = dict(lease.__kwdefaults__ or {})
    throttle.__kwdefaults__ = {"now_s": stand_ins.time.monotonic, "idle_s": _read_idle_s}
    lease.__kwdefaults__ = {
        **lease_before,
        "now_s": stand_ins.time.monotonic,
        "sleep": stand_ins.time.sleep,
    }
    try:
        with installed(MODULES, more):
            yield
    finally:
        throttle.__kwdefaults__, lease.__kwdefaults__ = before, lease_before
        logging.disable(logging.NOTSET)


def _read_idle_s() -> float:
    play = _playing[-1]
    return 0.0 if play.history.busy else 2 * play.world.mono


def play_history(history: History) -> Play:
    """Play it, on the stage. Raises what it did not hold, or what went wrong."""
    play = Play(history)
    _playing.append(play)
    try:
        play.play()
    finally:
        _playing.pop()
    return play
