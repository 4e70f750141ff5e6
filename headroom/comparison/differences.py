"""Says what makes one group of runs slower, larger or better than another, from what was logged,
and before that what makes the figures doubtful. Speeds are one family of tests and scores another
(see pairwise_tests.py); groups whose steps do the same work are one, for speeds. Causes are told of
a difference where the phases of a step hold them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median, stdev

import numpy as np

from headroom.base.names import OWNERS as OWNER_NAMES
from headroom.base.names import TAGS, PhaseKind, list_phases
from headroom.base.units import (
    format_mebibytes,
    format_milliseconds,
    format_number,
    format_percent,
    format_seconds,
)
from headroom.comparison.pairwise_tests import Noise, PairTests, compare_all_pairs
from headroom.comparison.run_groups import (
    PEAKS,
    SEED,
    SPEED,
    STEPS,
    Group,
    MeasuredRun,
    choose_goal,
    compute_epoch_parts,
)
from headroom.report.verdict import BOUND
from headroom.run.gate import BUSY, CORE_WAIT, HUGE, describe_disturbance, find_usual_ms

# Of a step; what no phase holds is "other".
PHASES = {phase.metric: phase.label for phase in list_phases(PhaseKind.STEP) if phase.label}
OWNERS = {
    f"memory/{owner}_mib": owner.replace("_", " ")
    for owner in OWNER_NAMES
    if owner != "rest"  # is other too
}
OTHER = "other"
MIN_DIFFERENCE = 0.03  # of speeds, however sure it is
MIN_PROCESSOR = 0.10  # of processor times, which a busy machine moves too, by some per cent
MIN_DIFFERENCE_MIB, MIN_DIFFERENCE_MEMORY = 1.0, 0.02  # of memory, which is hardly chance
# No step costs more for these alone; for those of an optimizer neither, where `alike` is the same.
SAME_WORK = (
    *("optim.lr", "optim.weight_decay", "optim.args.betas", "optim.schedule", "optim.warmup", SEED),
)
ALIKE, OPTIMIZER = "alike", "optim."
SINGLE_NOISE = 0.05  # of a speed or a loss, where no setting has two runs; of a score in its unit
LEAST_SPEEDS = 3  # of one run, from log point to log point, to show what its steps vary by
POWER = 0.8  # with which a difference is told that is named where none was
RESOLUTION = 0.01  # of a score: the most that one row more or less is taken to change
OWN_WAIT = "time/core_wait_own_pct"
OUTLIER = 1.3  # times as slow as the median of its repeats
STEP_PARTS = ("steps", "first step")  # of an epoch
MIN_SHARE = 0.10  # of a difference, from which on a share is told
ROUNDING = 0.02  # of a difference, by which shares may be below 0
MOST, MOST_NAMED = 12, 5  # sentences of one kind, and names in one; the table has all
WHY = {  # the tags that may say why a phase takes longer
    phase.label: [tag.name for tag in TAGS if phase.name in tag.explains]
    for phase in list_phases(PhaseKind.STEP)
    if phase.label
}
COMPUTED = WHY["forward"]


def compute_time_parts(group: Group) -> dict[str, float]:
    """Return the milliseconds that 1,000 samples take, by phase.

    They sum to what the speed says. Empty where the speed is not known. A step whose phases
    are timed waits for the device after each of them: where the phases take longer than a
    step does in all, each gets its share of the step.
    """
    names = (SPEED, STEPS, *PHASES)
    return _split_time({n: v for n in names if (v := group.compute_median(n)) is not None})


def _split_time(metrics: Mapping[str, float]) -> dict[str, float]:
    speed, steps = metrics.get(SPEED), metrics.get(STEPS)
    if not speed or not steps:
        return {}
    whole, step_ms = 1e6 / speed, 1000 / steps
    phases = {name: metrics[key] for key, name in PHASES.items() if key in metrics}
    scale = whole / max(step_ms, sum(phases.values()))
    parts = {name: milliseconds * scale for name, milliseconds in phases.items()}
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


@dataclass(frozen=True)
class WorkClass:
    """Groups whose steps do the same work: for speeds and memory they are one."""

    group: Group  # all of their runs, under the settings that they share
    numbers: list[int]  # of the groups
    judged: Group  # with those runs whose speed is judged
    disturbed: list[MeasuredRun] = field(default_factory=list)

    @classmethod
    def collect(cls, members: Sequence[Group], groups: Sequence[Group]) -> WorkClass:
        """members: groups of the same work, among all of these groups."""
        runs = [run for group in members for run in group.runs]
        whole = replace(members[0], runs=runs, settings=_find_shared(members, groups))
        timed = [run for run in whole.done if _split_time(run.metrics)]
        usual_ms = find_usual_ms([run.metrics for run in timed])
        disturbed = [run for run in timed if describe_disturbance(run.metrics, usual_ms, BUSY)]
        free = [run for run in timed if not any(run is one for one in disturbed)]
        return cls(whole, [g.number for g in members], replace(whole, runs=free), disturbed)


def find_work_classes(groups: Sequence[Group]) -> list[WorkClass]:
    """Return the groups by the work of their steps, in their order."""
    is_known = all(group.find_tag(ALIKE) for group in groups if group.done)
    left_out = (*SAME_WORK, OPTIMIZER) if is_known else SAME_WORK
    classes: dict[tuple[object, ...], list[Group]] = {}
    for group in groups:
        values = tuple(v for n, v in group.settings.items() if not n.startswith(left_out))
        work = (*values, *(group.find_tag(name) for name in (ALIKE, *COMPUTED)))
        classes.setdefault(work, []).append(group)
    return [WorkClass.collect(members, groups) for members in classes.values()]


def _find_shared(members: Sequence[Group], groups: Sequence[Group]) -> dict[str, str]:
    """Return the settings that all members share, where no other group has them all; else those
    of the first."""
    first = members[0].settings
    if len(members) == 1:
        return first
    shared = {n: v for n, v in first.items() if all(g.settings.get(n) == v for g in members)}
    others = (group for group in groups if all(group is not one for one in members))
    is_unique = not any(shared.items() <= group.settings.items() for group in others)
    return shared if is_unique else first


@dataclass(frozen=True)
class SpeedTests:
    """Every pair of the speeds that are judged, tested."""

    classes: Sequence[WorkClass]
    tests: PairTests  # of the logarithms of the seconds that a sample takes

    @cached_property
    def at(self) -> dict[int, int]:
        """Return the class of each group, by the number of that."""
        return {n: at for at, one in enumerate(self.classes) for n in one.numbers}

    @cached_property
    def order(self) -> list[int]:
        """Return the classes from the fastest on."""
        return [int(at) for at in np.argsort(self.tests.difference[:, 0], kind="stable")]

    def is_slower(self, one: int, other: int) -> bool:
        is_far = self.tests.difference[one, other] >= math.log1p(MIN_DIFFERENCE)
        return bool(is_far and self.tests.is_told[one, other])

    def compute_speed_up(self, group: Group) -> float | None:
        """Return how often the group is as fast as the slowest; None where it may be no faster."""
        slowest, mine = self.order[-1], self.at.get(group.number)
        if mine is None:
            return None
        if mine == slowest:
            return 1.0 if self.is_slower(slowest, self.order[0]) else None
        faster = math.exp(self.tests.difference[slowest, mine])
        return faster if self.is_slower(slowest, mine) else None


def compare_speeds(classes: Sequence[WorkClass]) -> SpeedTests | None:
    """Return the tests of all speeds that are judged; None where fewer than two are.

    Where none has two runs, a run's noise is taken to be what it varied by itself from log point to
    log point, or SINGLE_NOISE where that is more; one that does not show it is not judged.
    """
    judged = [one for one in classes if one.judged.runs]
    noises: float | list[Noise] = SINGLE_NOISE
    if needs_recent_speeds(judged):
        pairs = [(one, noise) for one in judged if (noise := _find_noise(one.judged.runs[0]))]
        judged, noises = [one for one, _ in pairs], [noise for _, noise in pairs]
    if len(judged) < 2:
        return None
    seconds = [[-math.log(run.metrics[SPEED]) for run in one.judged.runs] for one in judged]
    return SpeedTests(judged, compare_all_pairs(seconds, floor=1e-4, assumed=noises))


def needs_recent_speeds(classes: Sequence[WorkClass]) -> bool:
    """Return whether there is one run of each, so that their own speeds have to show the noise."""
    return not any(len(one.judged.runs) > 1 for one in classes)


def _find_noise(run: MeasuredRun) -> Noise | None:
    speeds = [math.log(speed) for speed in run.recent_speeds if speed > 0]
    if len(speeds) < LEAST_SPEEDS:
        return None
    noise = Noise(stdev(speeds), len(speeds) - 1.0)
    return noise if noise.deviation > SINGLE_NOISE else Noise(SINGLE_NOISE)


def _describe_single_noise(classes: Sequence[WorkClass]) -> str:
    """Return what is taken for the noise of speeds where there is one run of each."""
    runs = [run for one in classes for run in one.judged.runs]
    deviations = [noise.deviation for run in runs if (noise := _find_noise(run)) is not None]
    source = f"{format_percent(SINGLE_NOISE)} is taken for it"
    if deviations and max(deviations) > SINGLE_NOISE:
        most = format_percent(max(deviations))
        source += f", and of a speed what it varied by from log point to log point, up to {most}"
    if left := len(runs) - len(deviations):
        of = f"that of {left} of {len(runs)}" if deviations else "any"
        source += f"; no difference of {of} in speed is told, since they logged too few to show it"
    return source


def describe_doubts(groups: Sequence[Group], classes: Sequence[WorkClass]) -> list[str]:
    """Return what makes the figures doubtful, a sentence each."""
    lines = []
    timed = [run for one in classes for run in (*one.judged.runs, *one.disturbed)]
    disturbed = [run for one in classes for run in one.disturbed]
    waits = [w for run in disturbed if (w := run.metrics.get(CORE_WAIT, 0.0)) > BUSY]
    if disturbed:
        why = ["the machine took longer than usual for the same work"]
        if waits:
            most = format_percent(max(waits) / 100)
            other = "other work had the cores that their threads waited for, up to"
            why = [f"{other} {most} of the time", *(why if len(waits) < len(disturbed) else [])]
        count = f"{len(disturbed)} of {len(timed)} runs"
        lines.append(f"The speed of {count} is not judged: {'; '.join(why)}")
    own = [w for run in timed if (w := run.metrics.get(OWN_WAIT, 0.0)) > BUSY]
    if own:
        lines.append(
            f"In {len(own)} of {len(timed)} runs threads waited for cores that their own processes "
            f"had, up to {format_percent(max(own) / 100)} of the time: that is part of their speed"
        )
    done = [run for group in groups for run in group.done]
    seeds = {run.params.get(SEED, "") for run in done}
    single = [group for group in groups if len(group.done) == 1]
    if len(groups) > 1 and done and len(single) == sum(bool(group.done) for group in groups):
        are_timed = any(len(one.judged.runs) > 1 for one in classes)  # by those of the same work
        what = "scores of repeats" if are_timed else "repeats"
        taken = f"{format_percent(SINGLE_NOISE)} is taken for it"
        taken = taken if are_timed else _describe_single_noise(classes)
        lines.append(
            f"There is one run of each: how far {what} would lie apart is not known, and {taken}"
        )
    elif len(groups) > 1 and single:
        lines.append(
            f"Of {len(single)} of {len(groups)} settings there is one run: repeats of it are taken "
            "to lie as far apart as those of the others"
        )
    elif len(groups) > 1 and len(seeds) == 1 and "" not in seeds:
        lines.append(
            f"All runs have {SEED} {seeds.pop()}: scores of repeats do not show what another seed "
            "changes"
        )
    return lines + [line for one in classes for line in _describe_outliers(one.judged)][:MOST]


def _describe_outliers(group: Group) -> list[str]:
    """Return a sentence for each run that was far slower than its repeats."""
    speeds = [run.metrics[SPEED] for run in group.runs]
    if len(speeds) < 3:
        return []
    return [
        f"Run {run.run_id[:8]} of {group.called} was {median(speeds) / speed:.2f}x slower than its "
        "repeats: differences that are small beside that are not seen"
        for run, speed in zip(group.runs, speeds, strict=True)
        if median(speeds) / speed > OUTLIER
    ]


def describe_differences(
    groups: Sequence[Group], classes: Sequence[WorkClass], speeds: SpeedTests | None
) -> list[str]:
    """Return what the scores say, and a sentence for each class that differs from the fastest."""
    ordered, base = list(classes), None
    if speeds is not None:
        of_speed = [speeds.classes[at] for at in speeds.order]
        base = of_speed[0]
        ordered = [*of_speed, *(one for one in classes if not one.judged.runs)]
    elif measured := [one for one in classes if compute_memory_parts(one.group)]:
        base = min(measured, key=lambda one: sum(compute_memory_parts(one.group).values()))
    lines = []
    for one in ordered:
        if base is not None and one is not base:
            slowness = _describe_slowness(one, base, speeds) if speeds is not None else ""
            said = [slowness, _describe_memory(one.group, base.group)]
            if any(said):
                lines.append(f"{one.group.called} {'; '.join(filter(None, said))}")
    is_slower_told = any(" slower than " in line for line in lines)
    return [
        *describe_scores(groups),
        *_limit(lines, "are slower or larger"),
        *(_describe_processor_times(classes) if speeds is None else []),
        *([_describe_power(speeds)] if speeds is not None and not is_slower_told else []),
        *_describe_epochs(groups),
        *_describe_bounds(groups),
    ]


def compute_processor_ms(run: MeasuredRun) -> float | None:
    """Return the milliseconds of processor time that a step took, its loader's workers included."""
    step_ms = run.metrics.get("time/step_cpu_ms")
    return None if not step_ms else step_ms + run.metrics.get("time/workers_cpu_ms", 0.0)


def _describe_processor_times(classes: Sequence[WorkClass]) -> list[str]:
    """Return a sentence for each class whose steps take more processor time than those of the
    least, beyond chance, where the machine was too busy for speeds: on a CPU, runs by two of each
    at least."""
    measured = []
    for one in classes:
        runs = [run for run in one.group.done if run.tags.get("device.kind") == "cpu"]
        values = [ms for run in runs if (ms := compute_processor_ms(run)) is not None]
        if len(values) > 1 and one.disturbed:
            measured.append((one, values))
    if len(measured) < 2:
        return []
    tests = compare_all_pairs(
        [[math.log(ms) for ms in values] for _, values in measured],
        floor=1e-2,
        assumed=SINGLE_NOISE,
    )
    base = int(np.argsort(tests.difference[:, 0], kind="stable")[0])
    least, of_least = measured[base]
    lines = []
    for at, (one, values) in enumerate(measured):
        difference = tests.difference[at, base]
        if difference >= math.log1p(MIN_PROCESSOR) and tests.is_told[at, base]:
            low, times, high = (
                _format_times(math.exp(of[at, base]))
                for of in (tests.low, tests.difference, tests.high)
            )
            lines.append(
                f"A step of {one.group.called} takes {times}x the processor time of one of "
                f"{least.group.called} ({low} to {high}; {format_milliseconds(median(values))} "
                f"against {format_milliseconds(median(of_least))}), which a busy machine hardly "
                "changes"
            )
    return _limit(lines, "take more processor time")


def _describe_bounds(groups: Sequence[Group]) -> list[str]:
    """Return a sentence on what bounds each group, where the words differ; see the verdict."""
    bounds = {group.called: bound for group in groups if (bound := group.find_usual(BOUND))}
    if len(set(bounds.values())) < 2:
        return []
    listed = [f"{called} by {bound.replace('_', ' ')}" for called, bound in bounds.items()]
    more = f" and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return [f"What bounds them: {', '.join(listed[:MOST_NAMED])}{more}"]


def _describe_power(speeds: SpeedTests) -> str:
    """Return that no speed differs by more than chance, and which difference would have been told.

    See PairTests.find_told_difference.
    """
    counts = sorted({len(one.judged.runs) for one in speeds.classes})
    runs = " to ".join(map(str, (counts[0], counts[-1])[: len(counts)]))
    runs += " run" if counts[-1] == 1 else " runs"
    least = math.log1p(MIN_DIFFERENCE)
    difference = math.expm1(speeds.tests.find_told_difference(POWER, least=least))
    words = format_percent(difference) if difference < 1 else f"{_format_times(1 + difference)}x"
    return (
        f"No difference in speed is beyond chance: at this noise of "
        f"{format_percent(speeds.tests.deviation)} and {runs} of each, one of {words} would have "
        "been told in 4 of 5 comparisons"
    )


def _describe_epochs(groups: Sequence[Group]) -> list[str]:
    """Return a sentence on the epochs that hold the least of steps, where that is below half."""
    by_group = [(group, parts) for group in groups if (parts := compute_epoch_parts(group))]
    if not by_group:
        return []

    def share(parts: Mapping[str, float]) -> float:
        return sum(parts.get(name, 0.0) for name in STEP_PARTS) / sum(parts.values())

    group, parts = min(by_group, key=lambda one: share(one[1]))
    if share(parts) >= 0.5:
        return []
    beside = sorted(
        ((s, name) for name, s in parts.items() if name not in STEP_PARTS), reverse=True
    )
    sentences = [
        f"{format_seconds(s)} {name}" for s, name in beside if s >= MIN_SHARE * sum(parts.values())
    ]
    whole = format_seconds(sum(parts.values()))
    return [
        f"Steps are {format_percent(share(parts))} of an epoch of {group.called} ({whole}); beside "
        f"them {', '.join(sentences)}"
    ]


def _limit(lines: list[str], what: str) -> list[str]:
    left = len(lines) - MOST
    return lines if left <= 0 else [*lines[:MOST], f"and {left:,} more {what}, in the table"]


def _describe_slowness(one: WorkClass, base: WorkClass, speeds: SpeedTests) -> str:
    at, of = (speeds.at.get(which.group.number) for which in (one, base))
    if at is None or of is None or not speeds.is_slower(at, of):
        return ""
    tests = speeds.tests
    low, times, high = (
        _format_times(math.exp(of_pair[at, of]))
        for of_pair in (tests.low, tests.difference, tests.high)
    )
    sentence = f"is {times}x slower than {base.group.called} ({low} to {high})"
    causes = _describe_causes(one.judged, base.judged)
    return f"{sentence}: of the difference {', '.join(causes)}" if causes else sentence


def _format_times(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:,.3g}" if value < 1e3 else f"{value:,.0f}"


def _describe_causes(group: Group, base: Group) -> list[str]:
    """Return the phases that hold the difference, each with its share.

    None where a phase takes less time than in the other, for then the others hold more than there
    is; and none that may be chance.
    """
    mine, its = compute_time_parts(group), compute_time_parts(base)
    if sum(mine.values()) <= sum(its.values()):  # of medians, where the means are the other way
        return []
    shares = compute_shares(mine, its)
    if sum(share for share in shares.values() if share < 0) < -ROUNDING:
        return []
    phases = [n for n, s in shares.items() if s >= MIN_SHARE and _is_held(n, group, base)]
    return [
        f"{format_percent(shares[name])} {name}{_explain_phase(name, group, base)}"
        for name in phases
        if phases != [OTHER]
    ]


def _is_held(phase: str, group: Group, base: Group) -> bool:
    """Return whether the phase took longer by more than chance; of single runs nobody knows."""
    values = [[_split_time(run.metrics).get(phase, 0.0) for run in of.runs] for of in (group, base)]
    if any(len(of) < 2 for of in values):
        return True
    return bool(compare_all_pairs(values, floor=1e-9, assumed=0.0).is_told[0, 1])


def _explain_phase(phase: str, group: Group, base: Group) -> str:
    causes = []
    names = {name.rpartition(".")[2] for name in group.settings}  # which says it already
    for name in WHY.get(phase, ()):
        mine, its = group.find_tag(name), base.find_tag(name)
        if name in names or (name == "micro_batch" and "batch_size" in names):
            continue
        if mine and its and mine != its:
            reason = group.find_tag(f"{name}.reason")
            causes.append(f"{name} {mine} against {its}" + (f": {reason}" if reason else ""))
    return f" ({'; '.join(causes)})" if causes else ""


def _describe_memory(group: Group, base: Group) -> str:
    """Return in words how much more or less memory the group takes.

    Tensors take the same each time: what differs by more than rounding is no chance.
    """
    mine, its = compute_memory_parts(group), compute_memory_parts(base)
    difference = sum(mine.values()) - sum(its.values())
    if (
        not mine
        or not its
        or abs(difference) <= max(MIN_DIFFERENCE_MIB, MIN_DIFFERENCE_MEMORY * sum(mine.values()))
    ):
        return ""
    name, size = max(
        ((name, mine.get(name, 0.0) - its.get(name, 0.0)) for name in {**mine, **its}),
        key=lambda part: part[1] * difference,
    )
    more = "more" if difference > 0 else "less"
    most = f"{format_mebibytes(abs(size))} {more} {name}"
    is_seen = group.has_lower_bound or base.has_lower_bound
    seen = ", of what was seen" if is_seen else ""
    return (
        f"takes {format_mebibytes(abs(difference))} {more} memory at its peak than "
        f"{base.called}{seen} ({most})"
    )


def describe_scores(groups: Sequence[Group]) -> list[str]:
    """Return which groups learned best, which worse, and which cannot be told from the best."""
    goal = choose_goal(groups)
    if goal is None:
        return []
    score, is_low = goal.name, goal.is_lower_better
    values = {
        group.number: [v for v in group.list_values(score) if math.isfinite(v) and abs(v) < HUGE]
        for group in groups
    }
    judged = [group for group in groups if values[group.number]]
    if len(judged) < 2:
        return []
    all_values = [v for group in judged for v in values[group.number]]
    is_log = is_low and min(all_values) > 0
    worse = [  # the higher, the worse
        [(math.log(v) if is_log else v) * (1 if is_low else -1) for v in values[group.number]]
        for group in judged
    ]
    floor = _find_resolution(worse) / math.sqrt(3)  # of what may be one row off either way
    tests = compare_all_pairs(worse, floor=floor, assumed=SINGLE_NOISE)
    order = [int(at) for at in np.argsort(tests.difference[:, 0], kind="stable")]
    best, shown = order[0], {at: format_number(median(values[judged[at].number])) for at in order}
    # What a person would read as the same number is no difference.
    below = [at for at in order if tests.is_told[at, best] and shown[at] != shown[best]]
    equal = [at for at in order[1:] if at not in below]
    name, value = judged[best].called, shown[best]

    def describe_gap(at: int, words: tuple[str, str]) -> str:
        low, high = tests.low[at, best], tests.high[at, best]
        if not is_log:
            return f"{low:.2g} to {high:.2g} {words[0]}"
        return f"{100 * math.expm1(low):.2g} to {100 * math.expm1(high):.2g} % {words[1]}"

    lines = [
        f"{judged[at].called} has a worse {score} than {name}: {shown[at]} against {value} "
        f"({describe_gap(at, ('worse', 'higher'))})"
        for at in below
    ]
    if not equal:
        next_best = f"{value} against {shown[below[0]]} of {judged[below[0]].called}"
        best_line = f"{name} has the best {score}: {next_best}"
        gap = describe_gap(below[0], ("apart", "apart"))
        return [f"{best_line} ({gap})", *_limit(lines[1:], "are worse")]
    others = [f"{judged[at].called} ({shown[at]})" for at in equal[:MOST_NAMED]]
    others += [f"{len(equal) - MOST_NAMED:,} more"] if len(equal) > MOST_NAMED else []
    sentence = f"{name} ({value}) cannot be told apart from {'; '.join(others)} by {score}"
    return [sentence, *_limit(lines, "are worse")]


def _find_resolution(values: Sequence[Sequence[float]]) -> float:
    """Return the least step between two of these values that is none of rounding."""
    steps = np.diff(np.sort(np.concatenate([np.asarray(of) for of in values])))
    return min(RESOLUTION, float(steps[steps > 1e-9].min(initial=RESOLUTION)))
