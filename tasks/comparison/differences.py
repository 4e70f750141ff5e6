"""Computes what makes one group of runs slower, larger or better than another, from what
was logged: the shares of a difference sum to the whole. It says nothing where a difference
lies within the spread of the runs, and, where there is one run of each, nothing below what
runs on a busy machine differ by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tasks.comparison.run_groups import PEAKS, SPEED, STEPS, Group, find_score
from tasks.engine.base.units import format_mebibytes, format_number, format_percent
from tasks.engine.memory import memory_by_owner
from tasks.engine.settings.run_config import LOWER_IS_BETTER
from tasks.run.gate import BUSY, CORE_WAIT

PHASES = {  # of a step; what no phase holds is "other"
    "time/data_wait_ms": "data wait",
    "time/h2d_ms": "copy to the device",
    "time/forward_ms": "forward",
    "time/backward_ms": "backward",
    "time/communication_ms": "communication",
    "time/optimizer_ms": "optimizer",
}
OWNERS = {
    f"memory/{owner}_mib": owner.replace("_", " ")
    for owner in memory_by_owner.OWNERS
    if owner != "rest"  # is other too
}
OTHER = "other"
MIN_SINGLE_DIFFERENCE = (
    0.10  # of a single run, by which two alike may differ on a machine that others use
)
MIN_DIFFERENCE = 0.02  # of several runs, whatever they say
MIN_DIFFERENCE_MIB = 1.0  # of a difference in memory
SAME_WORK = ("optim.", "train.seed")  # no step costs more for these alone
MIN_SHARE = 0.10  # of a difference, from which on a share is told
COMPUTED = ("device.model", "precision", "compiled", "micro_batch", "threads")
WHY = {  # the tags that may say why a phase takes longer
    "data wait": ("data.residency",),
    "copy to the device": ("data.residency",),
    "forward": COMPUTED,
    "backward": COMPUTED,
    "optimizer": ("device.model", "compiled"),
}


def compute_time_parts(group: Group) -> dict[str, float]:
    """Return the milliseconds that 1,000 samples take, by phase.

    They sum to what the speed says. Empty where the speed is not known. A step whose phases
    are timed waits for the device after each of them: where the phases take longer than a
    step does in all, each gets its share of the step.
    """
    speed, steps = group.compute_median(SPEED), group.compute_median(STEPS)
    if not speed or not steps:
        return {}
    whole, step_ms = 1e6 / speed, 1000 / steps
    known = {
        name: ms for key, name in PHASES.items() if (ms := group.compute_median(key)) is not None
    }
    scale = whole / max(step_ms, sum(known.values()))
    parts = {name: milliseconds * scale for name, milliseconds in known.items()}
    return {**parts, OTHER: whole - sum(parts.values())}


def compute_memory_parts(group: Group) -> dict[str, float]:
    """Return the MiB of the peak of tensors, by owner; they sum to it.

    Empty where it is not known.
    """
    peak = group.compute_median(PEAKS[0])
    if peak is None:
        return {}
    parts = {n: mib for key, n in OWNERS.items() if (mib := group.compute_median(key)) is not None}
    return {**parts, OTHER: peak - sum(parts.values())}


def compute_shares(of: Mapping[str, float], than: Mapping[str, float]) -> dict[str, float]:
    """Return each part's share of the whole difference, the largest first; they sum to 1."""
    whole = sum(of.values()) - sum(than.values())
    names = [*of, *(name for name in than if name not in of)]
    parts = {name: (of.get(name, 0.0) - than.get(name, 0.0)) / whole for name in names}
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def describe_differences(groups: Sequence[Group]) -> list[str]:
    """Return a sentence for each group that differs from the fastest, and for the best one."""
    timed = [group for group in groups if compute_time_parts(group)]
    if len(timed) < 2:
        return []
    base = max(timed, key=lambda group: group.compute_median(SPEED) or 0.0)
    lines = [_describe_best(groups)]
    for group in sorted(timed, key=lambda group: -(group.compute_median(SPEED) or 0.0)):
        if group is not base:
            said = [_describe_slowness(group, base), _describe_memory(group, base)]
            if any(said):
                lines.append(f"{group.called} {'; '.join(filter(None, said))}")
    if all(len(group.done) == 1 for group in timed):
        lines.append(
            "There is one run of each: what differs by less than "
            f"{format_percent(MIN_SINGLE_DIFFERENCE)} is not told, "
            "nor are speeds where the steps do the same work."
        )
    waits = [waited for group in timed if (waited := group.compute_median(CORE_WAIT) or 0.0) > BUSY]
    if waits:
        lines.append(
            f"In {len(waits)} of {len(timed)} other work on the machine had the cores that threads "
            f"waited for, up to {format_percent(max(waits) / 100)} of the time: it slowed them."
        )
    return [line for line in lines if line]


def is_different(one: Group, other: Group, metric: str) -> bool:
    """Return whether the medians lie further apart than the runs of both groups do."""
    a, b = one.compute_median(metric), other.compute_median(metric)
    if a is None or b is None:
        return False
    spreads = [group.compute_spread(metric) for group in (one, other)]
    known = [spread for spread in spreads if spread is not None]
    least = (MIN_DIFFERENCE if len(known) == 2 else MIN_SINGLE_DIFFERENCE) * max(abs(a), abs(b))
    return abs(a - b) > max(sum(known), least)


def _describe_slowness(group: Group, base: Group) -> str:
    if not is_different(group, base, SPEED) or _is_chance(group, base):
        return ""
    mine, its = compute_time_parts(group), compute_time_parts(base)
    times = sum(mine.values()) / sum(its.values())
    parts = [
        f"{format_percent(share)} {name}{_explain_phase(name, group, base)}"
        for name, share in compute_shares(mine, its).items()
        if share >= MIN_SHARE
    ]
    parts += [
        f"{format_percent(s)} {n}" for n, s in compute_shares(mine, its).items() if s <= -MIN_SHARE
    ]
    return f"is {times:.3g}x slower than {base.called}: of the difference {', '.join(parts)}"


def _is_chance(group: Group, base: Group) -> bool:
    """Return whether one run of each did the same work in every step.

    Only the machine differed.
    """
    is_known = bool(group.find_tag("alike")) and len(group.done) == len(base.done) == 1
    mine, its = group.settings, base.settings
    names = [n for n in {**mine, **its} if mine.get(n) != its.get(n)]
    is_same = all(group.find_tag(name) == base.find_tag(name) for name in ("alike", *COMPUTED))
    return is_known and is_same and all(name.startswith(SAME_WORK) for name in names)


def _explain_phase(phase: str, group: Group, base: Group) -> str:
    told = []
    asked = {name.rpartition(".")[2] for name in group.settings}  # which says it already
    for name in WHY.get(phase, ()):
        mine, its = group.find_tag(name), base.find_tag(name)
        if name in asked or (name == "micro_batch" and "batch_size" in asked):
            continue
        if mine and its and mine != its:
            reason = group.find_tag(f"{name}.reason")
            told.append(f"{name} {mine} against {its}" + (f": {reason}" if reason else ""))
    return f" ({'; '.join(told)})" if told else ""


def _describe_memory(group: Group, base: Group) -> str:
    """Return in words how much more or less memory the group takes.

    Tensors take the same each time: what differs by more than rounding is no chance.
    """
    mine, its = compute_memory_parts(group), compute_memory_parts(base)
    difference = sum(mine.values()) - sum(its.values())
    if (
        not mine
        or not its
        or abs(difference) <= max(MIN_DIFFERENCE_MIB, MIN_DIFFERENCE * sum(mine.values()))
    ):
        return ""
    name, size = max(
        ((name, mine.get(name, 0.0) - its.get(name, 0.0)) for name in {**mine, **its}),
        key=lambda part: part[1] * difference,
    )
    more = "more" if difference > 0 else "less"
    most = f"{format_mebibytes(abs(size))} {more} {name}"
    return (
        f"takes {format_mebibytes(abs(difference))} {more} memory at its peak than "
        f"{base.called} ({most})"
    )


def _describe_best(groups: Sequence[Group]) -> str:
    """Return in words which group learned best, where that is more than chance."""
    score = find_score(groups)
    judged = [group for group in groups if group.compute_median(score) is not None] if score else []
    sign = 1 if score in LOWER_IS_BETTER else -1
    judged.sort(key=lambda group: sign * (group.compute_median(score) or 0.0))
    if len(judged) < 2 or not is_different(judged[0], judged[1], score):
        return ""
    best = format_number(judged[0].compute_median(score) or 0.0)
    return f"{judged[0].called} has the best {score}: {best}"


def compute_speed_up(group: Group, slowest: Group) -> tuple[float, float] | None:
    """Return how often the group is as fast as the slowest, and how far that may be off.

    The second is computed from the spreads of both. None where a speed is not known.
    """
    mine, its = group.compute_median(SPEED), slowest.compute_median(SPEED)
    if not mine or not its:
        return None
    off = [
        (g.compute_spread(SPEED) or 0.0) / (g.compute_median(SPEED) or 1.0)
        for g in (group, slowest)
    ]
    return mine / its, mine / its * sum(off)
