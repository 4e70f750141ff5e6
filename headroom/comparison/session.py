"""A judging session on disk: what its base is, which candidates were judged and how, and which runs
they took. It is written after each run, whole, so that a kill at any moment loses none of them.
"""

from __future__ import annotations

import json
import secrets
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headroom.base.file_lock import FileLock
from headroom.base.names import find_metric
from headroom.base.units import make_printable
from headroom.base.written_files import write_whole
from headroom.comparison.platform_trial import ErrorBudget, PlatformTrial
from headroom.comparison.run_groups import PEAKS
from headroom.comparison.sequential_tests import Difference, Goal, Measurement
from headroom.comparison.sides import Side
from headroom.settings.read_settings import ConfigError

SESSIONS = "sessions"  # the folder of all of them, beside that of the runs
STATE, LOCK, WORKTREES = "session.json", "session.lock", "worktrees"
VERSION = 1  # of the file
OF_ONE = ErrorBudget(alpha=0.1, half_spent_after=1)  # its first level is 5 %: one question alone
SEEDS = 2**31


class CannotJudge(RuntimeError):
    """The base itself can't be trained or measured; the text says why."""


@dataclass(frozen=True)
class Rules:
    """What candidates are judged by, in words of a command line.

    not_worse: by metric, the share by which it may be worse. time: that each run has, such as 5min.
    """

    words: list[str]  # settings of both sides
    goal: str = ""  # by default that of the task
    not_worse: Mapping[str, float] = field(default_factory=dict)
    time: str = ""
    experiment: str | None = None


@dataclass(frozen=True)
class JudgedRun:
    """A run of the session: whose it is, by the number of its candidate, 0 for the first base."""

    number: int
    of: int
    seed: int
    status: str = ""  # empty: it has not ended
    run_id: str = ""
    error: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)  # the goal's among them
    seconds: float = 0.0
    ended_at: float = 0.0  # Unix time


@dataclass(frozen=True)
class Candidate:
    """A change that was tried, over the base of then."""

    number: int
    side: Side
    verdict: str = "open"  # then keep, discard, undecided or refused
    reason: str = ""
    gain: Difference | None = None
    p_value: float = 1.0
    not_worse: Mapping[str, str] = field(default_factory=dict)  # holds, fails, unclear


@dataclass
class Session:
    """What is judged by what, and how far it has come.

    goal_name: of the metric. not_worse: by metric, the share by which it may be worse. time: that
    each run has, as train.end says it. words: settings of both sides, as flags.
    """

    folder: Path
    name: str
    words: list[str]
    goal_name: str
    trial: PlatformTrial  # its tests and what of the budget is spent
    time: str = ""
    not_worse: Mapping[str, float] = field(default_factory=dict)
    root: int = 0  # that the seeds are drawn from
    run_id: str = ""  # in MLflow
    is_of_one: bool = False  # each candidate is one question alone, and the base stays
    is_closed: bool = False
    base: Side = Side("")  # noqa: RUF009 (frozen)
    base_number: int = 0  # of the candidate that the base is now; 0 for the first
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)  # see trainings.Inputs
    environment: Mapping[str, str] = field(default_factory=dict)  # tags that all runs share
    candidates: list[Candidate] = field(default_factory=list)
    runs: list[JudgedRun] = field(default_factory=list)

    @property
    def open(self) -> Candidate | None:
        """Return the candidate that is judged, or that is undecided yet."""
        last = self.candidates[-1] if self.candidates else None
        return last if last is not None and last.verdict in ("open", "undecided") else None

    def save(self) -> None:
        """Write the session, whole. Raises OSError."""
        state = {n: v for n, v in vars(self).items() if n not in ("folder", "trial")}
        state |= {
            "version": VERSION,
            "trial": self.trial.as_dict(),
            "base": asdict(self.base),
            "candidates": [asdict(one) for one in self.candidates],
            "runs": [asdict(one) for one in self.runs],
        }
        with write_whole(self.folder / STATE) as half:
            half.write_text(json.dumps(state, indent=1))

    def put_candidate(self, candidate: Candidate) -> Candidate:
        """Keep a candidate as it is now, instead of as it was."""
        self.candidates[candidate.number - 1 :] = [candidate]
        return candidate

    def put_run(self, run: JudgedRun) -> None:
        """Keep a run as it is now, instead of as it was."""
        self.runs[run.number - 1] = run

    def plan_run(self, of: int, seed: int | None) -> JudgedRun:
        """Return the next run, with a seed that neither side has a say in."""
        number = len(self.runs) + 1
        run = JudgedRun(number, of, draw_seed(self.root, number) if seed is None else seed)
        self.runs.append(run)
        return run

    def list_runs(self, of: int) -> list[JudgedRun]:
        """Return the runs of a side that came to their end."""
        return [run for run in self.runs if run.of == of and run.status == "FINISHED"]

    def measure(self, of: int, name: str) -> list[Measurement]:
        """Return a figure of a side's runs, of those that have it."""
        return [
            Measurement(run.figures[name], run.seed, run.ended_at)
            for run in self.list_runs(of)
            if name in run.figures
        ]

    def compute_noise(self) -> float | None:
        """Return the standard deviation of a run of the base, as a share of its mean; None where no
        two runs are there."""
        values = [run.value for run in self.measure(self.base_number, self.goal_name)]
        mean = sum(values) / len(values) if values else 0.0
        return statistics.stdev(values) / abs(mean) if len(values) > 1 and mean else None

    def compute_run_s(self) -> float:
        """Return the mean seconds of a run; 0 where none has ended."""
        times = [run.seconds for run in self.runs if run.status == "FINISHED"]
        return sum(times) / len(times) if times else 0.0


def draw_seed(root: int, number: int) -> int:
    """Return the seed of a run, below 2**31: neither side has a say in it."""
    return int(np.random.SeedSequence((root, number)).generate_state(1)[0]) % SEEDS


def make_goal(name: str, direction: str = "") -> Goal:
    """Return how a metric is judged. A loss, a time or a speed is judged by its ratio; a speed with
    the base's runs in turns, since a machine gets faster and slower over a night.

    direction: "min" or "max"; by default that of the list of names. Raises ConfigError.
    """
    row = find_metric(name)
    is_lower = direction == "min" if direction else row and row.is_lower_better
    if is_lower is None:
        raise ConfigError(f"--goal {make_printable(name, limit=80)}: say min:NAME or max:NAME")
    is_timed = name.startswith(("speed/", "time/"))
    is_ratio = is_timed or name.rpartition("/")[2].endswith("loss") or name in PEAKS
    return Goal(
        "min" if is_lower else "max",
        "log" if is_ratio else "linear",
        "interleaved" if is_timed else "independent",
    )


def make_session(
    folder: Path, *, name: str, words: Sequence[str], goal: str, **more: Any
) -> Session:
    """Return a new session in this folder, which is made; goal: a metric, or min:NAME, max:NAME.

    more: other fields of a session. Raises ConfigError and OSError.
    """
    direction, _, metric = goal.rpartition(":")
    trial = PlatformTrial(make_goal(metric, direction))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    root = secrets.randbits(64)
    return Session(folder, name, list(words), metric, trial, root=root, **more)


def read_session(folder: Path) -> Session:
    """Return the session of this folder. Raises ConfigError where none is, or a damaged one."""
    try:
        told = json.loads((folder / STATE).read_text())
        if told.pop("version") != VERSION:
            raise ConfigError(f"session: {folder.name} was written by another version of Headroom")
        told["trial"] = PlatformTrial.from_dict(told["trial"])
        told["base"] = Side(**told["base"])
        told["candidates"] = [_read_candidate(one) for one in told["candidates"]]
        told["runs"] = [JudgedRun(**one) for one in told["runs"]]
        return Session(folder, **told)
    except FileNotFoundError:
        raise ConfigError(f"session: there is none called {folder.name}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"session: {folder / STATE} can't be read ({error})") from None


def _read_candidate(told: Mapping[str, Any]) -> Candidate:
    gain = told["gain"]
    made = Candidate(**{**told, "side": Side(**told["side"]), "gain": None})
    return replace(made, gain=None if gain is None else Difference(**gain))


@contextmanager
def hold_session(folder: Path) -> Iterator[Session]:
    """Yield the session of this folder to the only process that judges in it.

    Raises ConfigError where none is, or another one does.
    """
    read_session(folder)  # before a lock is made where nothing is
    lock = FileLock(folder / LOCK)
    try:
        if not lock.take():
            name = folder.name
            raise ConfigError(f"session: {name} is judging already; two would share its budget")
        yield read_session(folder)  # as it is now that nobody else judges
    finally:
        lock.close()


def list_sessions(place: Path) -> Sequence[Session]:
    """Return the sessions that are there and can be read, the newest last."""
    sessions = []
    for file in sorted(place.glob(f"*/{STATE}"), key=lambda file: file.stat().st_mtime):
        with suppress(ConfigError):
            sessions.append(read_session(file.parent))
    return sessions
