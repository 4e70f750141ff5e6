"""What a session and a judgement are in words, for a person and for a program: the answers that
docs/answers.schema.json describes, and the same as lines for a terminal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headroom.base.units import format_number, format_seconds
from headroom.comparison.run_groups import PEAKS
from headroom.comparison.sequential_tests import Difference, Goal, RunsNeeded
from headroom.comparison.session import Session

PAGE = "session.html"  # in the session's folder


def express_gain(gain: float, goal: Goal) -> float:
    """Return a gain of a log scale in per cent of the base's figure; others as they are."""
    if goal.scale == "linear" or not math.isfinite(gain):
        return gain
    return 100 * (math.exp(gain) - 1 if goal.direction == "max" else 1 - math.exp(-gain))


def format_gain(gain: Difference, goal: Goal) -> str:
    """Return a gain with its interval in words: a ratio in per cent, others in units of the
    figure. More than 0 is better."""

    def show(value: float) -> str:
        if not math.isfinite(value):
            return "unknown"
        expressed = express_gain(value, goal)
        if goal.scale == "linear":
            return f"{'+' if expressed > 0 else ''}{format_number(expressed)}"
        return f"{expressed:+.{1 if abs(expressed) < 10 else 0}f} %"

    if not math.isfinite(gain.low) and not math.isfinite(gain.high):
        return f"{show(gain.gain)} (how sure is not known yet)"
    return f"{show(gain.gain)} ({show(gain.low)} to {show(gain.high)})"


def make_markdown(session: Session) -> str:
    """Return the session as a table: its candidates in order."""
    lines = [
        f"**{session.name}**: {session.goal_name}, base: {session.base.label}",
        "",
        "| # | change | verdict | gain | runs |",
        "|--:|:--|:--|:--|--:|",
    ]
    for one in session.candidates:
        gain = format_gain(one.gain, session.trial.goal) if one.gain is not None else ""
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
    goal = session.trial.goal
    of_base = len(base) - bases_before
    seconds = sum(run.seconds for run in (*tried, *base[bases_before:]))
    return {
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
        said = f", gain {format_gain(gain, session.trial.goal)}" if gain is not None else ""
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


def describe_session(session: Session) -> dict[str, Any]:
    """Return a session for programs; see docs/agents.md."""
    base_runs = session.measure(session.base_number, session.goal_name)
    values = [run.value for run in base_runs]
    return {
        "session": session.name,
        "is_closed": session.is_closed,
        "base": {"change": session.base.text, "candidate": session.base_number},
        "goal": {"name": session.goal_name, "direction": session.trial.goal.direction},
        "base_values": values,
        "noise": session.compute_noise(),
        "runs": len([run for run in session.runs if run.status == "FINISHED"]),
        "seconds": round(sum(run.seconds for run in session.runs), 1),
        "budget": {"alpha": session.trial.budget.alpha, "spent": session.trial.budget.spent},
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
        gain = format_gain(one.gain, session.trial.goal) if one.gain is not None else ""
        lines.append(f"  #{one.number} {one.verdict:<9} {one.side.label}  {gain}")
    if session.is_closed:
        lines.append("  closed")
    if (session.folder / PAGE).exists():
        lines.append(f"Page     {session.folder / PAGE}")
    return lines
