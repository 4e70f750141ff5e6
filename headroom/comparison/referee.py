"""Judges candidates, from what was asked for to the answer: it opens a session, or goes on with
one, trains what a decision needs as children of one run in MLflow, and says keep, discard or
undecided, with what it cost and what would decide.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headroom.base.event_log import read_json
from headroom.base.units import format_number, format_seconds
from headroom.comparison.grid import Cell, GridCheck
from headroom.comparison.judging import (
    CannotJudge,
    JudgingSource,
    Resolve,
    format_gain,
    leave_candidate,
    open_candidate,
)
from headroom.comparison.run_groups import PEAKS
from headroom.comparison.search_space import find_goal
from headroom.comparison.sequential_tests import Difference, RunsNeeded
from headroom.comparison.session import STATE as SESSION
from headroom.comparison.session import VERSION, WORKTREES, Session, make_session, read_session
from headroom.comparison.session_page import PAGE, write_session_page
from headroom.comparison.sides import Side, find_unfair, remove_worktree
from headroom.comparison.trainings import (
    STATE,
    ComparisonFolder,
    TrainingEnd,
    describe_inputs,
    run_trainings,
)
from headroom.run.findings import make_process_tags
from headroom.settings.read_settings import ConfigError
from headroom.tracking.mlflow_pages import ComparisonView
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings

if TYPE_CHECKING:
    from headroom.tracking.query_runs import ExperimentRuns

SESSIONS = "sessions"  # the folder of all of them, beside that of the runs
MOST = 10_000  # runs of a call that has no limit of its own


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


def begin_session(
    place: Path, name: str, rules: Rules, base: Side, resolve: Resolve, *, is_of_one: bool = False
) -> Session:
    """Return a new session of this base, whose settings, data and device are looked at first.

    is_of_one: for questions alone; the one that is there of the same base is gone on with. Raises
    ConfigError.
    """
    goal, inputs = rules.goal, dict[str, Any]()
    if base.command:
        if not goal:
            raise ConfigError("--goal: name the metric that the command logs, as min:val/loss")
        inputs = {"settings": {"command": base.command}}
    else:
        cell = Cell(1, {"base": base.label}, resolve(base.settings))
        check = GridCheck([cell])
        check.answer()
        found = find_goal("", check.tasks, [*cell.config.train.metrics]) if not goal else None
        goal = goal or (found.name if found is not None else "")
        inputs = dict(describe_inputs([cell], check.data))
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
        first_base=base,
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
    cell = Cell(1, {"base": session.base.label}, resolve(session.base.settings))
    check = GridCheck([cell])
    check.answer()
    now = describe_inputs([cell], check.data)
    changed = [kind for kind in ("data", "code") if now.get(kind) != session.inputs.get(kind)]
    if changed:
        raise ConfigError(
            f"session: {' and '.join(changed)} of its base have changed since its runs; put that "
            "back, or close it and begin another"
        )


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
        leave_candidate(session, candidate)
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
                said += f"; gain {format_gain(gain, session.state.goal)}"
        print(f"{cell.number}. {cell.title}: {said}", file=sys.stderr, flush=True)


def _show_in_mlflow(store: ExperimentRuns, session: Session, status: str) -> None:
    """Keep what is known of the session in the run that holds the others."""
    store.set_tags(session.run_id, {"base": session.base.label})
    varied = dict.fromkeys(name for one in session.candidates for name in one.side.settings)
    goal = session.state.goal
    view = ComparisonView(
        *(session.run_id, session.name, [*varied], session.goal_name),
        is_lower_better=goal.direction == "min",
        is_grouped=True,
    )
    store.keep_view(view)
    try:
        page = write_session_page(session, _compute_noise(session))
        store.end(session.run_id, status=status, text=make_markdown(session), files=[page])
    except (TrackingError, OSError) as error:  # what is decided is on disk; a next call tells it
        print(f"the session is not shown in MLflow: {error}", file=sys.stderr)


def make_markdown(session: Session) -> str:
    """Return the session as a table: its candidates in order."""
    lines = [
        f"**{session.name}**: {session.goal_name}, base: {session.base.label}",
        "",
        "| # | change | verdict | gain | runs |",
        "|--:|:--|:--|:--|--:|",
    ]
    for one in session.candidates:
        gain = format_gain(one.gain, session.state.goal) if one.gain is not None else ""
        runs = len(session.list_runs(one.number))
        label = one.side.label.replace("|", "\\|")
        lines.append(f"| {one.number} | {label} | {one.verdict} | {gain} | {runs} |")
    return "\n".join(lines)


def describe_judgement(
    session: Session,
    number: int,
    base_number: int,
    needed: RunsNeeded | None = None,
    *,
    bases_before: int = 0,
) -> dict[str, Any]:
    """Return a candidate for programs; see docs/agents.md."""
    candidate = session.candidates[number - 1]
    base, tried = session.list_runs(base_number), session.list_runs(number)
    goal = session.state.goal
    of_base = len(base) - bases_before
    seconds = sum(run.seconds for run in (*tried, *base[bases_before:]))
    return {
        "version": VERSION,
        "session": session.name,
        "candidate": number,
        "change": candidate.side.text,
        "verdict": candidate.verdict,
        "reason": candidate.reason,
        "goal": {"name": session.goal_name, "direction": goal.direction, "scale": goal.scale},
        "base": _describe_runs(session, base_number),
        "tried": _describe_runs(session, number),
        "gain": _describe_gain(candidate.gain),
        "p_value": candidate.p_value,
        "not_worse": dict(candidate.not_worse),
        "memory": _compare_memory(session, base_number, number),
        "cost": {"runs": len(tried) + max(of_base, 0), "seconds": round(seconds, 1)},
        "needed": _describe_needed(session, needed),
        "run_id": session.run_id,
        "page": str(session.folder / PAGE),
    }


def _describe_runs(session: Session, of: int) -> dict[str, Any]:
    runs = session.list_runs(of)
    values = [run.figures[session.goal_name] for run in runs if session.goal_name in run.figures]
    mean = sum(values) / len(values) if values else None
    return {"runs": len(runs), "mean": mean, "run_ids": [run.run_id for run in runs]}


def _describe_gain(gain: Difference | None) -> dict[str, float | None] | None:
    if gain is None:
        return None
    ends = {"value": gain.gain, "low": gain.low, "high": gain.high, "deviation": gain.deviation}
    return {name: value if math.isfinite(value) else None for name, value in ends.items()}


def _compare_memory(session: Session, base: int, tried: int) -> dict[str, Any] | None:
    """Return the peaks of both sides in MiB, of the first metric that all their runs have."""
    for name in PEAKS:
        of_base = [run.value for run in session.measure(base, name)]
        of_tried = [run.value for run in session.measure(tried, name)]
        if of_base and of_tried:
            means = {"base": sum(of_base) / len(of_base), "tried": sum(of_tried) / len(of_tried)}
            return {"name": name, **means}
    return None


def _describe_needed(session: Session, needed: RunsNeeded | None) -> dict[str, Any] | None:
    if needed is None:
        return None
    seconds = (needed.candidate + needed.base) * session.compute_run_s()
    return {"candidate": needed.candidate, "base": needed.base, "seconds": round(seconds)}


def make_text(session: Session, answer: Mapping[str, Any]) -> list[str]:
    """Return the answer as a person reads it, the decision first."""
    candidate = session.candidates[answer["candidate"] - 1]
    base, tried, name = answer["base"], answer["tried"], session.goal_name
    lines = [f"{candidate.verdict}: {candidate.side.label}. {candidate.reason}"]
    if base["mean"] is not None and tried["mean"] is not None:
        figures = f"{name} {format_number(tried['mean'])} against {format_number(base['mean'])}"
        gain = candidate.gain
        said = f", gain {format_gain(gain, session.state.goal)}" if gain is not None else ""
        lines.append(f"  {figures}{said}")
    for other, said in candidate.not_worse.items():
        share = f"{100 * session.not_worse[other]:g} %"
        words = {
            "holds": f"is not worse by more than {share}",
            "fails": f"is worse by more than {share}",
            "unclear": f"may be worse by more than {share}, or not: that is not clear yet",
        }
        lines.append(f"  {other} {words[said]}")
    if memory := answer["memory"]:
        more = memory["tried"] - memory["base"]
        if abs(more) >= 1:
            price = "at the cost of" if more > 0 else "with a peak lower by"
            lines.append(f"  {price} {abs(more):,.0f} MiB ({memory['name']})")
    spent = answer["cost"]
    lines.append(
        f"  {tried['runs']} runs of it, {base['runs']} of the base; took {spent['runs']} runs, "
        f"{format_seconds(spent['seconds'])}"
    )
    if needed := answer["needed"]:
        lines.append(
            f"  {needed['candidate']} more runs of it and {needed['base']} of the base would "
            f"decide, if it is what it seems: about {format_seconds(needed['seconds'])}"
        )
    lines.append(f"Page     {answer['page']}")
    return lines


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


def list_sessions(place: Path) -> Sequence[Session]:
    """Return the sessions that are there and can be read, the newest last."""
    sessions = []
    for file in sorted(place.glob(f"*/{SESSION}"), key=lambda file: file.stat().st_mtime):
        with suppress(ConfigError):
            sessions.append(read_session(file.parent))
    return sessions


def describe_session(session: Session) -> dict[str, Any]:
    """Return a session for programs; see docs/agents.md."""
    base_runs = session.measure(session.base_number, session.goal_name)
    values = [run.value for run in base_runs]
    return {
        "version": VERSION,
        "session": session.name,
        "is_closed": session.is_closed,
        "base": {"change": session.base.text, "candidate": session.base_number},
        "goal": {"name": session.goal_name, "direction": session.state.goal.direction},
        "base_values": values,
        "noise": _compute_noise(session),
        "runs": len([run for run in session.runs if run.status == "FINISHED"]),
        "seconds": round(sum(run.seconds for run in session.runs), 1),
        "budget": {"alpha": session.state.budget.alpha, "spent": session.state.budget.spent},
        "candidates": [
            {
                "candidate": one.number,
                "change": one.side.text,
                "verdict": one.verdict,
                "reason": one.reason,
                "gain": _describe_gain(one.gain),
                "runs": len(session.list_runs(one.number)),
            }
            for one in session.candidates
        ],
        "run_id": session.run_id,
    }


def _compute_noise(session: Session) -> float | None:
    """Return the standard deviation of a run of the base, as a share of its mean; None where no two
    runs are there."""
    values = [run.value for run in session.measure(session.base_number, session.goal_name)]
    mean = sum(values) / len(values) if values else 0.0
    if len(values) < 2 or not mean:
        return None
    return statistics.stdev(values) / abs(mean)


def make_session_text(session: Session) -> list[str]:
    """Return the session as a person reads it: how good one run is first, then its candidates."""
    answer = describe_session(session)
    noise = answer["noise"]
    lines = [f"{session.name}: base {session.base.label}, judged by {session.goal_name}"]
    if noise is not None:
        lines.append(f"  one run is good to +-{100 * noise:.2g} % (standard deviation)")
    spent = answer["budget"]
    lines.append(
        f"  {answer['runs']} runs, {format_seconds(answer['seconds'])}; "
        f"{100 * spent['spent']:.2g} of {100 * spent['alpha']:g} % of error spent"
    )
    for one in session.candidates:
        gain = format_gain(one.gain, session.state.goal) if one.gain is not None else ""
        lines.append(f"  #{one.number} {one.verdict:<9} {one.side.label}  {gain}")
    if session.is_closed:
        lines.append("  closed")
    if (session.folder / PAGE).exists():
        lines.append(f"Page     {session.folder / PAGE}")
    return lines
