"""Judges a candidate against the base of a session: it trains what is needed, one run after
another, looks after each, and ends as soon as keep or discard is decided. It is a source of
trainings, as a grid or a search is.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headroom.base.event_log import LOG, read_begins, read_end
from headroom.base.units import make_printable
from headroom.comparison.grid import Cell
from headroom.comparison.run_groups import PEAKS
from headroom.comparison.sequential_tests import (
    MOST_RUNS,
    Difference,
    Goal,
    Judgement,
    Measurement,
    RunsNeeded,
    check_not_worse,
    estimate_difference,
    forecast_runs,
)
from headroom.comparison.session import (
    OF_ONE,
    WORKTREES,
    Candidate,
    CannotJudge,
    JudgedRun,
    Session,
    make_goal,
)
from headroom.comparison.sides import SEED, Side, check_out, find_changed_evaluation
from headroom.comparison.trainings import ComparisonFolder, TrainingEnd
from headroom.run.gate import BUSY, CORE_WAIT
from headroom.settings.read_settings import ConfigError, check_imports, dump_yaml
from headroom.settings.run_config import RunConfig
from headroom.tracking.tracking_settings import TrackingSettings

# What two runs must share, or one of them says nothing of the other.
SAME_TAGS = ("data.fingerprint", "host", "device.model", "device.kind", "torch.version")
BUSY_RUNS = 3  # on a busy machine, of a speed, before that is given up
Resolve = Callable[[Mapping[str, str]], RunConfig]


@dataclass
class JudgingSource:
    """The runs that decide about the open candidate of a session; see trainings.Source."""

    session: Session
    trainings: ComparisonFolder
    resolve: Resolve
    where: TrackingSettings
    most_runs: int  # that this call may take
    home: Path  # the working folder
    device: str = field(init=False)  # of both sides
    taken: int = 0
    begun_at: float = 0.0  # the run that was taken last; Unix time
    judgement: Judgement | None = None

    def __post_init__(self) -> None:
        self.device = self.resolve(self.session.base.settings).device.name

    @property
    def devices(self) -> Sequence[str]:
        return [self.device]

    def take_next(self, device: str) -> Cell | None:
        """Return the next run of either side; None where it is decided, or enough for this call."""
        session = self.session
        waiting = next((run for run in session.runs if not run.status), None)
        if waiting is None:
            if session.open is None or self.taken >= self.most_runs:
                return None
            following = session.trial.choose_next_run()
            of = session.base_number if following.of == "base" else session.open.number
            waiting = session.plan_run(of, following.seed)
            session.save()
        self.taken += 1
        self.begun_at = time.time()
        return self._make_cell(waiting)

    def is_pruned(self, cell: Cell, folder: Path) -> bool:
        return False

    def _find_side(self, run: JudgedRun) -> Side:
        session = self.session
        if run.of == session.base_number or session.open is None:
            return session.base
        return session.base.apply(session.open.side)

    def _make_cell(self, run: JudgedRun) -> Cell:
        side = self._find_side(run)
        name = "base" if run.of == self.session.base_number else f"#{run.of} {side.label}"
        title, refused = f"{name}, seed {run.seed}", ""
        try:
            config, folder = self.prepare(side, run.seed)
        except ConfigError as error:  # what was there when it began is gone
            refused, config, folder = "; ".join(error.problems), self.resolve({}), None
        command = _make_command(side, run.seed)
        return Cell(
            run.number,
            {},
            config,
            refused=refused,
            folder=folder,
            title=title,
            command=command,
        )

    def prepare(self, side: Side, seed: int) -> tuple[RunConfig, Path | None]:
        """Return the settings of a run of this side, and the folder of its commit, if it has one.

        Raises ConfigError where it can't be trained, or not be judged by its base.
        """
        config = self._make_config(side, seed)
        if side.commit:
            return config, self._check_out(side.commit, config)
        check_imports(config)
        return config, None

    def _make_config(self, side: Side, seed: int) -> RunConfig:
        """Return the settings of a run; its data and its cache are where those of the base are."""
        config = self.resolve({**side.settings, "train.seed": str(seed)})
        data = {"cache": str(self.home / config.data.cache)}
        if config.data.path and (self.home / config.data.path).exists():
            data["path"] = str(self.home / config.data.path)
        return config.model_copy(update={"data": config.data.model_copy(update=data)})

    def _check_out(self, commit: str, config: RunConfig) -> Path:
        """Return the folder of the commit. Its runs are kept where all others are.

        Raises ConfigError where its own metrics are not those of the base.
        """
        place = self.session.folder / WORKTREES / commit[:16]
        folder = check_out(commit, place, self.home)
        base = self.session.base.commit
        of_base = check_out(base, place.with_name(base[:16]), self.home) if base else self.home
        if changed := find_changed_evaluation(config, of_base, folder):
            raise ConfigError(
                f"--candidate: its code of {', '.join(changed)} is not that of the base, so its "
                "figure is another one"
            )
        settings = {**self.where.model_dump(), "runs": self.where.runs}
        (folder / "mlflow.yaml").write_text(dump_yaml(settings))
        return folder

    def take_end(self, cell: Cell, ended: TrainingEnd, folder: Path | None) -> TrainingEnd:
        """Keep how a run ended, then look: a decision ends the candidate."""
        session = self.session
        run = session.runs[cell.number - 1]
        run, tags = self._measure(run, ended, folder)
        self.trainings.add(ended)
        session.put_run(run)
        self._take_run(run, tags, folder)
        session.save()
        value = run.figures.get(session.goal_name)
        return replace(ended, status=run.status, error=run.error, value=value)

    def _measure(
        self, run: JudgedRun, ended: TrainingEnd, folder: Path | None
    ) -> tuple[JudgedRun, Mapping[str, str]]:
        """Return the run with its figures, and its tags."""
        end = read_end(folder) if folder is not None else {}
        metrics: Mapping[str, float] = end.get("metrics") or {}
        goal = self.session.goal_name
        wanted = {goal, *self.session.not_worse, *PEAKS, CORE_WAIT}
        status, error = ended.status, ended.error
        missing = [name for name in (goal, *self.session.not_worse) if name not in metrics]
        if status == "FINISHED" and missing:
            status, error = "FAILED", f"{missing[0]} was not measured"
        ended_at = time.time()
        return (
            replace(
                run,
                status=status,
                run_id=ended.run_id,
                error=error,
                figures={name: float(metrics[name]) for name in wanted if name in metrics},
                seconds=ended_at - self.begun_at,
                ended_at=ended_at,
            ),
            end.get("tags") or {},
        )

    def _take_run(self, run: JudgedRun, tags: Mapping[str, str], folder: Path | None) -> None:
        session = self.session
        is_base = run.of == session.base_number
        if run.status != "FINISHED":
            if is_base:
                raise CannotJudge(f"the base could not be trained: {run.error or run.status}")
            self._decide("discard", f"Its training came to no end: {run.error or run.status}.")
            return
        here = {name: tags[name] for name in SAME_TAGS if name in tags}
        session.environment = session.environment or here
        if differs := _describe_difference(session.environment, here):
            if is_base:
                raise CannotJudge(f"the base is not what it was: {differs}")
            self._decide("refused", f"It can't be judged by its base: {differs}.")
            return
        if self._is_too_busy(run):
            return
        value = run.figures[session.goal_name]
        try:
            goal = self._find_goal(folder)
            session.trial = replace(session.trial, goal=goal)
            measured = Measurement(value, run.seed, run.ended_at)
            session.trial = session.trial.add_run(measured, "base" if is_base else "candidate")
        except ValueError as error:
            raise CannotJudge(f"--goal {session.goal_name}: {error}") from None
        self._look()

    def _find_goal(self, folder: Path | None) -> Goal:
        """Return the goal with the least step of an accuracy, which the rows of validation give."""
        goal = self.session.trial.goal
        has_steps = self.session.goal_name.endswith("/accuracy") and goal.scale == "linear"
        if goal.resolution or not has_steps or folder is None:
            return goal
        rows = _count_validation_rows(folder)
        return replace(goal, resolution=1 / rows) if rows else goal

    def _is_too_busy(self, run: JudgedRun) -> bool:
        """True if the run is no measurement of a speed, by the gate's rule; it is run once more.

        Raises CannotJudge where that comes again and again.
        """
        session = self.session
        is_timed = session.trial.goal.design == "interleaved"
        if not is_timed or run.figures.get(CORE_WAIT, 0.0) <= BUSY:
            return False
        session.put_run(replace(run, status="BUSY"))
        busy = [one for one in session.runs[-BUSY_RUNS:] if one.status == "BUSY"]
        if len(busy) == BUSY_RUNS:
            raise CannotJudge(
                f"the machine is not free: the last {BUSY_RUNS} runs waited for a core for over "
                f"{BUSY:.0f} % of their time, and so no speed can be judged"
            )
        return True

    def _look(self) -> None:
        """Judge by the runs so far."""
        session = self.session
        assert session.open is not None
        judgement = self.judgement = session.trial.judge()
        if judgement.verdict == "undecided":
            session.trial = session.trial.record(judgement)
            self._put("undecided", judgement)
            return
        if judgement.verdict == "keep" and (not_worse := self._check_others()):
            failed = [name for name, said in not_worse.items() if said == "fails"]
            unclear = [name for name, said in not_worse.items() if said == "unclear"]
            if failed:
                share = session.not_worse[failed[0]]
                why = f"{failed[0]} is worse by more than {100 * share:g} %"
                self._decide("discard", f"{session.goal_name} is better, but {why}.", judgement)
                return
            if unclear and len(session.trial.candidate or ()) < MOST_RUNS:
                self._put("undecided", judgement, reason=f"{unclear[0]} is not clear yet.")
                return
            if unclear:
                why = f"{MOST_RUNS} runs do not show that {unclear[0]} is not worse"
                self._decide("discard", f"{session.goal_name} is better, but {why}.", judgement)
                return
        self._decide(judgement.verdict, judgement.reason, judgement)

    def _check_others(self) -> dict[str, str]:
        """Return what is known of the figures that may not be worse."""
        session = self.session
        return {
            name: check_not_worse(difference, share)
            if (difference := self.estimate(name)) is not None
            else "unclear"
            for name, share in session.not_worse.items()
        }

    def estimate(self, name: str) -> Difference | None:
        """Return how much better the candidate is in another figure, as a logarithm; None where
        that is not known."""
        session = self.session
        number = session.candidates[-1].number
        base, tried = session.measure(session.base_number, name), session.measure(number, name)
        if not (base and tried) or min(run.value for run in (*base, *tried)) <= 0:
            return None
        goal = replace(make_goal(name), scale="log")
        return estimate_difference(base, tried, goal=goal)

    def _put(self, verdict: str, judgement: Judgement | None, *, reason: str = "") -> Candidate:
        candidate = self.session.candidates[-1]
        if judgement is not None:
            reason = reason or judgement.reason
            gain, p_value = judgement.difference, judgement.p_value
            candidate = replace(candidate, gain=gain, p_value=p_value)
        others = self._check_others()
        ended = replace(candidate, verdict=verdict, reason=reason, not_worse=others)
        return self.session.put_candidate(ended)

    def _decide(self, verdict: str, reason: str, judgement: Judgement | None = None) -> None:
        """End the candidate: one that is kept becomes the base, unless it is one question alone."""
        session = self.session
        candidate = self._put(verdict, judgement, reason=reason)
        is_new_base = verdict == "keep" and not session.is_of_one
        if is_new_base and judgement is not None:
            session.trial = session.trial.record(judgement)
            session.base = session.base.apply(candidate.side)
            session.base_number = candidate.number
        else:
            session.trial = session.trial.withdraw_candidate()

    def forecast(self) -> RunsNeeded | None:
        """Return how many more runs would decide; None where that is not known."""
        trial = self.session.trial
        if self.judgement is None or trial.candidate is None:
            return None
        return forecast_runs(
            self.judgement, trial.base, trial.candidate, goal=trial.goal, level=trial.budget.level
        )


def _count_validation_rows(folder: Path) -> int:
    """Return how many rows a run was judged by; 0 where its log does not say."""
    for begin, _ in read_begins(folder / LOG, 0):
        for rows in begin.get("data") or ():
            if rows.get("context") == "validation":
                return int(json.loads(rows["profile"]).get("num_rows") or 0)
    return 0


def _make_command(side: Side, seed: int) -> str:
    """Return the command of a run, by this interpreter where it only says python."""
    words = shlex.split(side.command.replace(SEED, str(seed)))
    if words and words[0] in ("python", "python3"):
        words[0] = sys.executable
    return shlex.join(words)


def _describe_difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return in words what the two do not share; empty where they are the same."""
    names = [name for name in before if now.get(name, before[name]) != before[name]]
    return ", ".join(
        f"{name} was {make_printable(before[name], limit=60)} and is "
        f"{make_printable(now[name], limit=60)}"
        for name in names
    )


def open_candidate(session: Session, side: Side) -> Candidate:
    """Return the candidate that goes on or begins with this change; another one that was undecided
    is withdrawn, and its share of the budget stays spent."""
    candidate = session.open
    if candidate is not None:
        if candidate.side == side:
            return candidate
        leave_candidate(session, candidate)
    if session.is_of_one:
        session.trial = replace(session.trial, budget=OF_ONE)
    session.trial = session.trial.open_candidate()
    candidate = Candidate(len(session.candidates) + 1, side)
    session.candidates.append(candidate)
    session.save()
    return candidate


def leave_candidate(session: Session, candidate: Candidate) -> None:
    """Withdraw the candidate that is open, with its run that has not ended."""
    session.trial = session.trial.withdraw_candidate()
    session.put_candidate(replace(candidate, verdict="discard", reason="It was left undecided."))
    for run in session.runs:
        if run.of == candidate.number and not run.status:
            session.put_run(replace(run, status="LEFT"))
    print(f"#{candidate.number} {candidate.side.label}: left undecided", file=sys.stderr)
