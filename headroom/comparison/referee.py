"""Judges candidates, from what was asked for to the answer: it opens a session, or goes on with
one, trains what a decision needs as children of one run in MLflow, and says keep, discard or
undecided, with what it cost and what would decide.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headroom.base.event_log import read_json
from headroom.base.units import format_number
from headroom.comparison.grid import Cell, GridCheck
from headroom.comparison.judging_source import (
    JudgingSource,
    Resolve,
    leave_candidate,
    open_candidate,
)
from headroom.comparison.search_space import find_goal
from headroom.comparison.session import STATE as SESSION
from headroom.comparison.session import (
    WORKTREES,
    CannotJudge,
    Rules,
    Session,
    make_session,
    read_session,
)
from headroom.comparison.session_page import write_session_page
from headroom.comparison.session_report import describe_judgement, format_gain, make_markdown
from headroom.comparison.sides import Side, find_unfair, remove_worktree
from headroom.comparison.trainings import (
    STATE,
    ComparisonFolder,
    Inputs,
    TrainingEnd,
    describe_changes,
    describe_inputs,
    run_trainings,
)
from headroom.run.findings import make_process_tags
from headroom.settings.read_settings import ConfigError
from headroom.tracking.mlflow_pages import ComparisonView
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings

if TYPE_CHECKING:
    from headroom.tracking.query_runs import ExperimentRuns

MOST = 10_000  # runs of a call that has no limit of its own


def begin_session(
    place: Path, name: str, rules: Rules, base: Side, resolve: Resolve, *, is_of_one: bool = False
) -> Session:
    """Return a new session of this base, whose settings, data and device are looked at first.

    is_of_one: for questions alone; the one that is there of the same base is gone on with. Raises
    ConfigError.
    """
    goal, inputs = rules.goal, Inputs()
    if base.command:
        if not goal:
            raise ConfigError("--goal: name the metric that the command logs, as min:val/loss")
        inputs = {"settings": {"command": base.command}}
    else:
        check, inputs = _look_at_base(base, resolve)
        goal = goal or find_goal("", check.tasks, []).name
        if base.commit:  # which says itself what its code is, whatever the working folder holds
            del inputs["code"]
    if is_of_one:
        machine = [platform.node(), version("torch")]
        told = json.dumps(
            [inputs, base.commit, goal, rules.time, dict(rules.not_worse), rules.words, machine]
        )
        name = f"judge-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    folder = place / name
    if (folder / SESSION).is_file():
        if is_of_one:
            return read_session(folder)
        raise ConfigError(f"session: {name} is there already; close it, or take another name")
    session = make_session(
        folder,
        name=name,
        words=rules.words,
        goal=goal,
        not_worse=dict(rules.not_worse),
        time=rules.time,
        inputs=inputs,
        base=base,
        is_of_one=is_of_one,
    )
    session.save()
    return session


def check_inputs(session: Session, resolve: Resolve) -> None:
    """Raise ConfigError where code or data of the base are not what its runs had. A commit says
    itself what its code is, and its runs what their data are."""
    if session.base.command or session.base.commit or not session.runs:
        return
    _, now = _look_at_base(session.base, resolve)
    changes = describe_changes(session.inputs, {"data": now["data"], "code": now["code"]})
    if changes:
        raise ConfigError(
            f"session: {'; '.join(changes)} since the runs of its base; put that back, or close it "
            "and begin another"
        )


def _look_at_base(base: Side, resolve: Resolve) -> tuple[GridCheck, Inputs]:
    """Return what is found of the base in a process of its own, and what it is made of. Raises
    ConfigError where it can't be trained."""
    cell = Cell(1, {"base": base.label}, resolve(base.settings))
    check = GridCheck([cell])
    check.answer()
    return check, describe_inputs([cell], check.data)


def judge_candidate(
    session: Session,
    change: Side,
    *,
    resolve: Resolve,
    where: TrackingSettings,
    experiment: str | None = None,
    most_runs: int | None = None,
) -> dict[str, Any]:
    """Train what a decision about this change needs, and return the answer for programs.

    The caller holds the session's lock. most_runs: of this call. Raises ConfigError, TrackingError
    and CannotJudge.
    """
    from headroom.tracking.query_runs import ExperimentRuns  # imports mlflow

    unfair = find_unfair(change, goal=session.goal_name, has_time=bool(session.time))
    if bool(change.command) != bool(session.base.command):
        unfair.append("--candidate: of a command and a training of settings no figure is the same")
    if unfair:
        raise ConfigError(*unfair)
    changed = resolve(session.base.apply(change).settings)  # before any is trained
    is_same = changed == resolve(session.base.settings)
    if is_same and not change.command and change.commit == session.base.commit:
        raise ConfigError(f"--candidate: {change.label} changes nothing of its base")
    source = JudgingSource(
        session, _open_trainings(session), resolve, where, most_runs or MOST, Path.cwd()
    )
    source.prepare(session.base.apply(change), seed=0)
    store = ExperimentRuns(where, experiment)
    candidate = open_candidate(session, change)
    tags = {**make_process_tags("flows/judge.py"), "goal": session.goal_name}
    count = len(session.runs)
    session.run_id = store.begin(session.run_id, name=session.name, count=count, tags=tags)
    source.trainings.run_id = session.run_id
    session.save()
    before, status = len(session.list_runs(session.base_number)), "KILLED"
    base_number = session.base_number
    try:
        run_trainings(source.trainings, source, runs=Path(where.runs), tell=_Teller(source).tell)
        status = "FINISHED"
    except CannotJudge:
        status = "FAILED"
        session.save()
        raise
    finally:
        _show_in_mlflow(store, session, status)
        if session.open is None:
            remove_worktrees(session, kept=session.base.commit)
    return describe_judgement(
        session, candidate.number, base_number, source.forecast(), bases_before=before
    )


def _open_trainings(session: Session) -> ComparisonFolder:
    ended = [TrainingEnd(**one) for one in read_json(session.folder / STATE).get("ended", ())]
    by_number = {end.number: end for end in ended}
    return ComparisonFolder(session.folder, session.name, session.run_id, ended=by_number)


@dataclass
class _Teller:
    """Prints how runs begin and end."""

    source: JudgingSource

    def tell(self, cell: Cell, ended: TrainingEnd | None) -> None:
        said = "begins"
        if ended is not None:
            session = self.source.session
            said = ended.status
            if ended.value is not None:
                said += f", {session.goal_name} {format_number(ended.value)}"
            if ended.error:
                said += f": {ended.error}"
            gain = session.candidates[-1].gain
            if gain is not None:
                said += f"; gain {format_gain(gain, session.trial.goal)}"
        print(f"{cell.number}. {cell.title}: {said}", file=sys.stderr, flush=True)


def _show_in_mlflow(store: ExperimentRuns, session: Session, status: str) -> None:
    """Keep what is known of the session in the run that holds the others."""
    store.set_tags(session.run_id, {"base": session.base.label})
    varied = dict.fromkeys(name for one in session.candidates for name in one.side.settings)
    goal = session.trial.goal
    view = ComparisonView(
        *(session.run_id, session.name, [*varied], session.goal_name),
        is_lower_better=goal.direction == "min",
        is_grouped=True,
    )
    store.keep_view(view)
    try:
        page = write_session_page(session)
        store.end(session.run_id, status=status, text=make_markdown(session), files=[page])
    except (TrackingError, OSError) as error:  # what is decided is on disk; a next call tells it
        print(f"the session is not shown in MLflow: {error}", file=sys.stderr)


def close_session(session: Session) -> None:
    """End the session: nothing more is judged in it. Worktrees go, runs and figures stay."""
    if session.open is not None:
        leave_candidate(session, session.open)
    session.is_closed = True
    session.save()
    remove_worktrees(session)


def remove_worktrees(session: Session, kept: str = "") -> None:
    """Let go of the worktrees of the session, but for that of this commit."""
    for place in sorted(session.folder.glob(f"{WORKTREES}/*")):
        if not kept.startswith(place.name):
            remove_worktree(place, Path.cwd())
