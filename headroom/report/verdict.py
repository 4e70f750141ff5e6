"""What held a run back: one word, how much of its time, what would be won at most without it, and
what to do next, from the figures of the run alone. The rules are a table; the first that holds is
told, and others that hold for a tenth of the time or more in a clause. Where the figures bear
nothing, that is said.

A share is one of the time after the first step. "Up to" is what the run would take without that
share: 1 / (1 - share), Amdahl's bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from headroom.base.names import BETWEEN, COUNTED, OTHER, PhaseKind, list_phases
from headroom.base.units import format_mebibytes, format_milliseconds, format_percent
from headroom.ranks.slow_rank import LEAST
from headroom.watch.stack_samples import (
    CHECKPOINT,
    CODE,
    COLLATE,
    COPY,
    DATA,
    FORWARD,
    LOGGING,
    READ,
    START,
    WORKERS,
)

SHORT, COMPUTE, MIXED, CONTENTION = "short", "compute", "mixed", "contention"
LEAST_STEPS, LEAST_S = 50, 3.0
TOLD, CLAUSE = 0.20, 0.10  # shares of the time: of a cause, and of a clause beside it
NOT_FREE = 25.0  # per cent of the time in which others had the cores
CROWDED = 10.0  # the same of the run's own threads
GROWN_SHARE, GROWN_MIB = 0.10, 64.0  # of the memory of the process
SLOWER = 1.3  # the last step of the slope, at least, as a multiple of the first
OPTIMIZER = 0.50
MOSTLY = 0.75  # of the time, from which on the model's own work is all there is to tell
PER_OPERATION_US = 10.0  # processor time: tiny ones took 6 to 9
ARITHMETIC = 0.25  # of the processor time; of tiny operations 0.00, of a GRU 0.46
# What is left takes less where nothing is between it: caches stay warm and cores fast. Without
# planted causes most loops were 1.0 to 1.2 times as fast as by the share alone.
LIGHTER = 0.2  # times the share
HOST_BOUND, PER_CALL_US = 80.0, 100.0  # on a GPU: per cent of the steps; and of its own time
STARTS = 0.5  # of the wait for data, at the starts of passes over the loader
RETRIES = 0.05  # of the steps, in which the allocator had to free its cache
ERRORS = 2.0  # standard errors by which a share lies above its threshold
WORK = ("forward", "backward", "optimizer", "communication", "replay")
CODES = (CODE, COPY, READ)  # kinds of the user's own
LOG_SELDOM = "Log every 50 steps, and tensors without .item(): it waits for the device"
PIN = "Pin the rows (pin_memory=True) and copy with non_blocking=True, or keep them there"
BOUND = "bound"
WHY = "bound.why"
SHARE = "bound/share_pct"  # a metric


@dataclass(frozen=True)
class Verdict:
    """What held a run back."""

    bound: str  # a word of BOUNDS
    why: str  # a sentence, with its share and what to do
    share: float | None = None  # of the time after the first step
    gain: float | None = None  # times as fast, at most

    def make_tags(self) -> dict[str, str]:
        """Return the tags of the record."""
        return {BOUND: self.bound, WHY: self.why}

    def make_metrics(self) -> dict[str, float]:
        """Return the metric of the record; none where what is told has no share of the time."""
        return {} if self.share is None else {SHARE: 100 * self.share}


@dataclass(frozen=True)
class Finding:
    """A rule that holds: what it has found, in words, and its share where it has one."""

    text: str
    advice: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Figures:
    """The figures of one run: its metrics and tags, what is known of its surroundings, and the
    shares of its time by part, which sum to 1."""

    metrics: Mapping[str, float]
    profile: Mapping[str, Any]
    tags: Mapping[str, str]
    params: Mapping[str, Any]
    shares: Mapping[str, float] = field(default_factory=dict)
    steps: float = 0.0
    loop_s: float = 0.0
    step_ms: float = 0.0

    def get(self, name: str) -> float:
        return float(self.metrics.get(name, 0.0))

    def get_share(self, *parts: str) -> float:
        return sum(self.shares.get(part, 0.0) for part in parts)

    @property
    def error(self) -> float:
        """Return the standard error of the share of a phase within a step."""
        return self.get("time/phase_error_pct") / 100

    @property
    def is_on_host(self) -> bool:
        """Return whether the processor itself computes, not another device that it calls."""
        return self.tags.get("device.kind", "cpu") == "cpu"

    @property
    def is_own(self) -> bool:
        """Return whether a training of the settings is told of, not a loop of somebody else's."""
        return "train.batch_size" in self.params

    def find_line(self, state: str, *kinds: str) -> str:
        """Return the line of the user's code that was seen most often in this state, at one of
        these kinds of work or any."""
        for seen in self.profile.get("places", {}).get(state, ()):
            if seen["line"] and (not kinds or seen["kind"] in kinds):
                return f", most often at {seen['line']}"
        return ""

    def find_kind(self, state: str) -> str:
        """Return the kind of work that was seen most often in this state."""
        kinds = [seen["kind"] for seen in self.profile.get("places", {}).get(state, ())]
        return next((kind for kind in kinds if kind != "account"), "")


@dataclass(frozen=True)
class Rule:
    """A rule of the table."""

    bound: str
    what: str  # it tells
    threshold: str
    figures: str  # it reads, beside others
    source: str  # of the threshold
    judge: Callable[[Figures], Finding | None]
    is_structural: bool = False  # it is told before any share of the time
    is_of_short: bool = False  # it is told of a run that is too short for all others, too


def read_figures(run: Mapping[str, Any]) -> Figures:
    """Return the figures of a run as its report has it."""
    metrics = {k: float(v) for k, v in (run.get("metrics") or {}).items() if _is_number(v)}
    figures = Figures(
        metrics,
        run.get("profile") or {},
        run.get("tags") or {},
        run.get("params") or {},
    )
    steps_s, per_s = metrics.get("time/steps_s", 0.0), metrics.get("speed/steps_per_s", 0.0)
    # The stage of several processes has their start in it.
    loop_s = figures.profile.get("whole_s") or metrics.get("time/train_model_s", 0.0)
    for part in ("setup", "first_step", COUNTED):
        loop_s -= metrics.get(f"time/{part}_s", 0.0)
    once_s = figures.profile.get("once_s") or {}  # what is written once, at the end
    loop_s -= sum(once_s.values())
    if steps_s <= 0 or per_s <= 0 or loop_s <= 0:
        return figures
    loop_s = max(loop_s, steps_s)
    steps = per_s * (steps_s + metrics.get("time/first_step_s", 0.0)) - 1
    parts_s = {
        part: max(0.0, metrics.get(f"time/{part}_s", 0.0) - once_s.get(part, 0.0))
        for part in ("eval", "log", "checkpoint")
    }
    phases = {
        phase.name: metrics[phase.metric]
        for phase in list_phases(PhaseKind.STEP)
        if phase.metric in metrics
    }
    if "replay" in phases:  # the others are of the few steps that were taken plainly
        phases = {k: v for k, v in phases.items() if k in ("data_wait", "h2d", "replay")}
    told_ms = sum(phases.values())
    # Where only some steps were timed, their phases stand for all: scaled, they sum to the steps.
    scale = steps_s / told_ms if told_ms else 0.0
    parts_s |= {phase: ms * scale for phase, ms in phases.items()}
    if not phases:
        parts_s["steps"] = steps_s
    parts_s["untold"] = max(
        0.0, loop_s - steps_s - sum(parts_s[part] for part in ("eval", "log", "checkpoint"))
    )
    whole_s = sum(parts_s.values())
    return replace(
        figures,
        shares={part: seconds / whole_s for part, seconds in parts_s.items()},
        steps=steps,
        loop_s=loop_s,
        step_ms=1000 * steps_s / max(steps, 1.0),
    )


def judge_run(run: Mapping[str, Any]) -> Verdict | None:
    """Return what held a run back; None of one that has taken no steps, or does not tell."""
    return judge(read_figures(run))


def judge(figures: Figures) -> Verdict | None:
    """Return the verdict of the first rule that holds: those of the surroundings in the table's
    order, then that of the largest share."""
    if not figures.shares:
        return None
    is_short = figures.steps < LEAST_STEPS or figures.loop_s < LEAST_S
    rules = [rule for rule in RULES if rule.is_of_short or not is_short]
    findings = [(rule, rule.judge(figures)) for rule in rules]
    held = [(rule, finding) for rule, finding in findings if finding is not None]
    first = [one for one in held if one[0].is_structural]
    shares = [one for one in held if not one[0].is_structural]
    shares.sort(key=lambda one: -(one[1].share or 0.0))
    largest: dict[str, tuple[Rule, Finding]] = {}
    for one in shares:
        largest.setdefault(one[0].bound, one)
    main_causes = [one for one in largest.values() if (one[1].share or 0.0) >= TOLD]
    beside = [one for one in largest.values() if CLAUSE <= (one[1].share or 0.0) < TOLD]
    main_causes.sort(key=lambda one: one[0].bound == CONTENTION)  # the parts have their share of it
    causes = [*first, *main_causes]
    if not causes and is_short:
        steps = f"{figures.steps:.0f} steps in {figures.loop_s:.1f} s"
        return Verdict(SHORT, f"Too short to tell: {steps}")
    if not causes:
        return _describe_work(figures, beside)
    rule, finding = causes[0]
    gain = None if finding.share is None else compute_gain(finding.share)
    sentence = finding.text
    if gain is not None:
        sentence += f"; without it up to {_format_gain(gain)}"
    if finding.advice:
        sentence += f". {finding.advice}"
    clauses = [one[1].text for one in (*causes[1:], *beside)][:2]
    if clauses:
        sentence += f". Beside it: {'; '.join(_lower(clause) for clause in clauses)}"
    return Verdict(rule.bound, sentence, finding.share, gain)


def compute_gain(share: float) -> float:
    """Return how many times as fast a run is at most without what takes this share of its time."""
    return 1 / max(0.01, (1 - share) * (1 - LIGHTER * share))


def _describe_work(figures: Figures, beside: list[tuple[Rule, Finding]]) -> Verdict:
    """Return the verdict of a run that nothing holds back but its own work, or no single part."""
    work = figures.get_share(*WORK)
    parts = sorted(figures.shares.items(), key=lambda one: -one[1])
    if work >= MOSTLY:
        parts = [one for one in parts if one[0] in WORK]
    listed = ", ".join(f"{_name(part)} {format_percent(share)}" for part, share in parts[:3])
    clause = f". Beside it: {_lower(beside[0][1].text)}" if beside else ""
    others_pct = figures.get("time/core_wait_pct")
    if others_pct >= 10:
        clause += f". Others had its cores {others_pct:.0f} % of the time"
    if figures.get_share(OTHER) >= MOSTLY:
        share = format_percent(figures.get_share(OTHER))
        advice = "Call the model itself, not its parts, or name them by run.phase('forward')"
        return Verdict(
            MIXED, f"Steps have no parts that were seen, for {share} of the time. {advice}"
        )
    if work < MOSTLY:
        return Verdict(MIXED, f"No single part: {listed}{clause}")
    faster = ""
    if figures.is_own:
        other = "a GPU" if figures.is_on_host else "a smaller model"
        faster = f". Faster by {other}, train.precision bf16 or train.compile on"
    share = format_percent(work)
    text = f"Nothing stands out: {share} of the time is the model's own work ({listed})"
    return Verdict(COMPUTE, f"{text}{faster}{clause}", work)


def _judge_contention(figures: Figures) -> Finding | None:
    limited_pct = figures.get("time/core_limited_pct")
    others_pct = figures.get("time/core_wait_pct")
    if limited_pct > NOT_FREE:
        return Finding(
            f"The limit of its container kept it from its cores {limited_pct:.0f} % of the time",
            "Raise the limit on processor time, or take fewer threads",
            limited_pct / 100,
        )
    if others_pct > NOT_FREE:
        return Finding(
            f"The machine was not free: others had its cores {others_pct:.0f} % of the time",
            "Train when it is free, or on cores of its own (taskset, a cpuset); its times are no "
            "measure of the model",
            min(0.95, others_pct / 100),
        )
    return None


def _judge_threads(figures: Figures) -> Finding | None:
    threads, cores = figures.profile.get("threads"), figures.profile.get("cores")
    own_pct = figures.get("time/core_wait_own_pct")
    if not threads or not cores or threads <= cores or own_pct <= CROWDED:
        return None
    return Finding(
        f"{threads} threads on {cores} cores: they waited for each other {own_pct:.0f} % of the "
        "time",
        f"Take torch.set_num_threads({cores}), or OMP_NUM_THREADS={cores}",
    )


def _judge_leak(what: str, memory: str) -> Callable[[Figures], Finding | None]:
    """Return the rule of this memory, which grows."""

    def judge_memory(figures: Figures) -> Finding | None:
        growth = figures.profile.get("growth", {}).get(memory)
        if not growth or growth["least"] < max(GROWN_MIB, GROWN_SHARE * growth["first"]):
            return None
        change, first = growth["change"], growth["first"]
        per_step_kib = 1024 * change / max(figures.steps, 1.0)
        text = (
            f"{what} grows: {format_mebibytes(first)} to {format_mebibytes(first + change)}, "
            f"{per_step_kib:.3g} KiB a step"
        )
        kept = figures.profile.get("growing_list")
        if not kept:
            return Finding(
                text,
                "Look for what keeps tensors from step to step: a list of losses keeps their "
                "graphs; append loss.item() or loss.detach()",
            )
        shape = "x".join(map(str, kept["shape"])) or "one number"
        graphs = ", with their graphs" if kept["has_graphs"] else ""
        advice = "Append loss.item() or loss.detach()" if graphs else "Keep fewer of them"
        has = f"{kept['holder']} has {kept['tensors']:,} tensors of {shape}{graphs}"
        return Finding(f"{text}: {has}", advice)

    return judge_memory


def _judge_memory(figures: Figures) -> Finding | None:
    retries = figures.get("memory/alloc_retries")
    if retries <= RETRIES * figures.steps:
        return None
    return Finding(
        f"Memory is short: the allocator freed its cache {retries:.0f} times in "
        f"{figures.steps:.0f} steps",
        "Take smaller batches, or PYTORCH_ALLOC_CONF=expandable_segments:True",
    )


def _judge_swapping(figures: Figures) -> Finding | None:
    share = figures.get("time/memory_wait_pct") / 100
    if share < TOLD:
        return None
    return Finding(
        "The host is short of memory: it stood still for pages that were taken from it "
        f"{format_percent(share)} of the time",
        "Load less at once, take fewer workers, or a machine or container with more memory",
        min(0.95, share),
    )


def _judge_throttled(figures: Figures) -> Finding | None:
    if not figures.get("gpu/throttled"):
        return None
    return Finding(
        "The GPU was slowed by heat or power", "See to its cooling and its power limit (nvidia-smi)"
    )


def _judge_slowing(figures: Figures) -> Finding | None:
    is_busy = figures.get("time/core_wait_pct") >= CLAUSE * 100
    growths = figures.profile.get("growth", {})
    growth = growths.get("step_cpu" if is_busy else "step")
    if not growth or growth["first"] <= 0:
        return None
    least = 1 + growth["least"] / growth["first"]
    machine = growths.get("reference")
    if machine and machine["least"] > 0:  # a fixed piece of work took longer, too
        least /= 1 + machine["change"] / machine["first"]
    if least < SLOWER:
        return None
    by_processor = growths.get("step_cpu")
    if by_processor and by_processor["change"] < 0.5 * (least - 1) * by_processor["first"]:
        return None  # it waits for longer, and does no more
    ratio = 1 + growth["change"] / growth["first"]
    mean_ms = figures.get("time/step_cpu_ms") if is_busy else figures.step_ms
    # Of the time, above the first pace.
    start_ms = 1000 * growth["start"]
    if not is_busy:  # a reading is of many steps, of which the first ones are faster still
        start_ms = min(start_ms, figures.get("time/fast_step_ms") or start_ms)
    share = max(0.0, 1 - start_ms / max(mean_ms, 1e-9))
    line = figures.find_line(BETWEEN) if figures.get_share(BETWEEN) >= TOLD else ""
    return Finding(
        f"Steps grow: the last take {ratio:.1f} times as long as the first{line}",
        "Look for what grows from step to step: the length of the batches, or a list that is "
        "walked through",
        share,
    )


def _judge_data(figures: Figures) -> Finding | None:
    share = figures.get_share("data_wait")
    workers = _count_workers(figures)
    if share < CLAUSE or workers > (figures.profile.get("cores") or workers):
        return None
    text = _describe_wait(figures, share)
    starts_s = figures.get("time/first_waits_s")
    if starts_s > STARTS * share * figures.loop_s:
        return Finding(
            f"{text}; most of it for the first batch of a pass",
            "Keep the workers between epochs: persistent_workers=True",
            share,
        )
    state = "data_wait" if figures.find_kind("data_wait") else ""
    kind = figures.find_kind(state)
    line = figures.find_line(state, "data", "collate", *CODES)
    cores = figures.profile.get("cores") or 1
    if workers:
        who = f"its {workers} worker{'s' if workers > 1 else ''} cannot keep up"
        advice = "Make the rows cheaper: decode or resize them once, beforehand"
        if workers < cores - 1:
            advice = f"Take {cores - 1} workers, or make the rows cheaper"
        return Finding(f"{text}: {who}", advice, share)
    what = "collate_fn" if kind == "collate" else "the data set"
    advice = "Do it once, beforehand, or in workers of the loader (num_workers"
    advice += f"={max(1, cores - 1)})" if cores > 1 else ")"
    return Finding(f"{text}: {what} is slow{line}", advice, share)


def _judge_workers(figures: Figures) -> Finding | None:
    share = figures.get_share("data_wait")
    workers, cores = _count_workers(figures), figures.profile.get("cores") or 0
    if share < CLAUSE or not cores or workers <= cores:
        return None
    return Finding(
        f"{_describe_wait(figures, share)}: {workers} workers share {cores} cores",
        f"Take num_workers={max(1, cores - 1)} and persistent_workers=True",
        share,
    )


def _judge_transfer(figures: Figures) -> Finding | None:
    share = figures.get_share("h2d")
    if share < CLAUSE:
        return None
    return Finding(
        f"Copies of batches to the device take {format_percent(share)} of the time", PIN, share
    )


def _judge_part(
    part: str, what: str, advice: str, *, own: str = ""
) -> Callable[[Figures], Finding | None]:
    """Return the rule of a part of the run beside its steps. own: the advice for a training of the
    settings."""

    def judge_share(figures: Figures) -> Finding | None:
        share = figures.get_share(part)
        if share < CLAUSE:
            return None
        text = f"{what} {format_percent(share)} of the time{figures.find_line(part)}"
        return Finding(text, own if own and figures.is_own else advice, share)

    return judge_share


# What is done between the steps, by its word: what that is, how it is told, and what to do.
_BETWEEN = {
    "python": (
        "Python, its garbage collector included",
        "Code between the steps takes",
        "Do it less often, or in another process",
    ),
    "data": (
        "a loader",
        "It waits for data",
        "Give the loader to run.batches(), which tells more; take workers",
    ),
    "workers": (
        "the start of a loader's workers",
        "Starting the workers of a loader takes",
        "Keep them between epochs (persistent_workers=True), and no more than cores",
    ),
    "logging": ("logging, or reading from a device", "Logging takes", LOG_SELDOM),
    "transfer": ("copying to a device", "Copies to the device take", PIN),
    "checkpoint": ("torch.save", "Checkpoints take", "Write them less often"),
    "eval": ("passes of a model", "Evaluations take", "Evaluate less often, or on fewer rows"),
}


def _judge_between(bound: str) -> Callable[[Figures], Finding | None]:
    """Return the rule of what lies between the steps and nobody has named, which is of this kind
    by the lines that were seen there."""

    def judge_kind(figures: Figures) -> Finding | None:
        share = figures.get_share(BETWEEN, "untold")
        garbage = figures.get("time/garbage_s") / figures.loop_s
        is_garbage = garbage > share / 2
        if share < CLAUSE or ("python" if is_garbage else _find_between(figures)) != bound:
            return None
        line = figures.find_line(BETWEEN)
        if is_garbage:
            return Finding(
                f"Python's garbage collector takes {format_percent(garbage)} of the time",
                "Make fewer objects that live from step to step, or call gc.freeze() once they "
                "are made",
                garbage,
            )
        _, words, advice = _BETWEEN[bound]
        return Finding(f"{words} {format_percent(share)} of the time{line}", advice, share)

    return judge_kind


def _find_between(figures: Figures) -> str:
    """Return the word of what is done between the steps."""
    kinds = {
        DATA: "data",
        COLLATE: "data",
        WORKERS: "data",
        START: "workers",
        LOGGING: "logging",
        CHECKPOINT: "checkpoint",
        FORWARD: "eval",
    }
    if not figures.is_on_host:
        kinds |= {COPY: "transfer", READ: "logging"}
    return kinds.get(figures.find_kind(BETWEEN), "python")


def _judge_optimizer(figures: Figures) -> Finding | None:
    optimizer = figures.get_share("optimizer")
    work = figures.get_share("forward", "backward")
    if optimizer - ERRORS * figures.error < OPTIMIZER or optimizer <= 1.5 * work:
        return None
    return Finding(
        f"The optimizer takes {format_percent(optimizer)} of the time, more than forward and "
        f"backward together ({format_percent(work)}){figures.find_line('step', 'optimizer')}",
        "Take one of torch.optim with foreach=True or fused=True, not a loop over parameters",
        optimizer,
    )


def _judge_launch(figures: Figures) -> Finding | None:
    operations, work = figures.get("time/step_operations"), figures.get_share(*WORK)
    step_ms = figures.get("time/step_cpu_ms") if figures.is_on_host else figures.step_ms
    if not operations or not step_ms or work < 0.5 or _judge_optimizer(figures):
        return None  # those of a slow optimizer are its own
    each_us = 1000 * step_ms * work / operations
    text = f"Its operations are tiny: {operations:,.0f} a step of {each_us:.1f} us"
    if figures.is_on_host:
        arithmetic = figures.get("time/arithmetic_ms") / (step_ms * work)
        is_tiny = each_us < PER_OPERATION_US and arithmetic < ARITHMETIC
        text += " of processor time each, most of which is the call"
    else:
        waits_pct = figures.get("time/host_bound_pct")
        is_tiny = waits_pct >= HOST_BOUND and each_us < PER_CALL_US
        text += f" each, and in {waits_pct:.0f} % of the steps the device waits for their calls"
    advice = "Take larger batches, or torch.compile, or operations on whole tensors"
    return Finding(text, advice) if is_tiny else None


def _judge_compile(figures: Figures) -> Finding | None:
    share = min(0.99, figures.get("time/compile_s") / max(figures.loop_s, 1e-9))
    if share < TOLD:
        return None
    return Finding(
        f"Compiling the step took {format_percent(share)} of the time",
        "It pays in longer trainings; train.compile off leaves it out",
        share,
    )


def _judge_slow_rank(figures: Figures) -> Finding | None:
    slow = figures.profile.get("slow_rank")
    if not slow:
        return None
    return Finding(
        f"Rank {slow['rank']} is slow: it takes {format_milliseconds(slow['own_ms'])} of its own "
        f"a step, the others {format_milliseconds(slow['others_ms'])}, mostly in {slow['phase']}; "
        "they wait for it",
        "Look at its rows, its device and what else runs there",
        slow["share"],
    )


_DRAFT = "benchmarks/verdict.py: planted causes against healthy runs"
RULES = (
    Rule(
        CONTENTION,
        "cores taken by others, or by a limit of the container",
        f"> {NOT_FREE:.0f} % of the time",
        "time/core_wait_pct, time/core_limited_pct",
        _DRAFT,
        _judge_contention,
    ),
    Rule(
        "threads",
        "more threads than cores",
        f"threads > cores, and they wait for each other > {CROWDED:.0f} % of the time",
        "time/core_wait_own_pct",
        _DRAFT,
        _judge_threads,
        is_structural=True,
    ),
    Rule(
        "throttled",
        "a device that heat or power slowed",
        "once",
        "gpu/throttled",
        "NVML's reasons for throttling",
        _judge_throttled,
        is_structural=True,
    ),
    Rule(
        "memory",
        "memory that is short: the allocator frees its cache",
        f"in > {RETRIES:.0%} of the steps",
        "memory/alloc_retries",
        "a retry empties the cache and waits for the device (PyTorch, CUDA semantics)",
        _judge_memory,
        is_structural=True,
    ),
    Rule(
        "memory",
        "memory that is short: pages of the host are taken and read back (swap, page faults)",
        f">= {TOLD:.0%} of the time",
        "time/memory_wait_pct",
        "Linux's pressure stall information, `some` (Documentation/accounting/psi.rst)",
        _judge_swapping,
        is_structural=True,
    ),
    Rule(
        "device_leak",
        "memory of the device that grows",
        f"> {GROWN_SHARE:.0%} and > {GROWN_MIB:.0f} MiB, by the lower bound of its slope",
        "memory/allocated_mib",
        _DRAFT,
        _judge_leak("What tensors hold on the device", "device"),
        is_structural=True,
    ),
    Rule(
        "host_leak",
        "memory of the process that grows",
        f"> {GROWN_SHARE:.0%} and > {GROWN_MIB:.0f} MiB, by the lower bound of its slope, and up "
        "in 7 of 8 parts of the run",
        "memory/host_rss_mib",
        _DRAFT,
        _judge_leak("The memory of the process", "memory"),
        is_structural=True,
    ),
    Rule(
        "slow_rank",
        "a process that the others wait for",
        f"it waits {LEAST:.0%} of a step less than the median, by work of its own",
        "ranks/NAME_WHICH",
        _DRAFT,
        _judge_slow_rank,
        is_structural=True,
    ),
    Rule(
        "slowing",
        "steps that grow over the run",
        f"the last > {SLOWER} times the first, by the lower bound of the slope and beyond what a "
        "fixed product of matrices took longer; by processor time on a busy machine",
        "speed/recent_steps_per_s, time/step_cpu_ms",
        _DRAFT,
        _judge_slowing,
        is_structural=True,
    ),
    Rule(
        "workers",
        "more workers of a loader than cores",
        f"the wait for data >= {TOLD:.0%}, workers > cores",
        "time/data_wait_ms",
        _DRAFT,
        _judge_workers,
    ),
    Rule(
        "data",
        "the wait for data",
        f">= {TOLD:.0%} of the time",
        "time/data_wait_ms, time/first_waits_s",
        _DRAFT,
        _judge_data,
    ),
    Rule(
        "transfer",
        "copies to the device",
        f">= {TOLD:.0%} of the time",
        "time/h2d_ms",
        _DRAFT,
        _judge_transfer,
    ),
    Rule(
        "eval",
        "evaluations",
        f">= {TOLD:.0%}",
        "time/eval_s",
        _DRAFT,
        _judge_part(
            "eval",
            "Evaluations take",
            "Evaluate less often, or on fewer rows",
            own="Evaluate less often, or on fewer rows (data.validation_fraction)",
        ),
    ),
    Rule(
        "checkpoint",
        "checkpoints",
        f">= {TOLD:.0%}",
        "time/checkpoint_s",
        _DRAFT,
        _judge_part(
            "checkpoint",
            "Checkpoints take",
            "Write them less often, or the best alone",
            own="Write them less often: checkpoint.every",
        ),
    ),
    Rule(
        "logging",
        "logging",
        f">= {TOLD:.0%}",
        "time/log_s",
        _DRAFT,
        _judge_part(
            "log",
            "Logging takes",
            LOG_SELDOM,
        ),
    ),
    *(
        Rule(
            bound,
            f"code between the steps that no phase names, of this kind: {what}",
            f">= {TOLD:.0%} of the time",
            "time/between_ms, time/unaccounted_pct, time/garbage_s",
            _DRAFT,
            _judge_between(bound),
        )
        for bound, (what, _, _) in _BETWEEN.items()
    ),
    Rule(
        "optimizer",
        "a slow optimizer",
        f">= {OPTIMIZER:.0%} of the time, and more than 1.5 times forward and backward",
        "time/optimizer_ms",
        _DRAFT,
        _judge_optimizer,
    ),
    Rule(
        "compile",
        "compiling the step, in a training that is over soon after",
        f">= {TOLD:.0%} of the time",
        "time/compile_s",
        _DRAFT,
        _judge_compile,
        is_of_short=True,
    ),
    Rule(
        "launch",
        "calls rather than arithmetic",
        f"< {PER_OPERATION_US:.0f} us of processor time an operation, and < "
        f"{100 * ARITHMETIC:.0f} % of it products of matrices; on a GPU < "
        f"{PER_CALL_US:.0f} us, and it waits for the host in >= {HOST_BOUND:.0f} % of the steps",
        "time/step_operations, time/step_cpu_ms, time/arithmetic_ms, time/host_bound_pct",
        _DRAFT,
        _judge_launch,
        is_structural=True,
    ),
)
BOUNDS = (*dict.fromkeys(rule.bound for rule in RULES), COMPUTE, MIXED, SHORT)


def make_markdown_table() -> str:
    """Return the rules as a Markdown table."""
    rows = [
        f"| `{rule.bound}` | {rule.what} | {rule.threshold} | "
        f"`{rule.figures.replace(', ', '`, `')}` | {rule.source} |"
        for rule in RULES
    ]
    head = "| bound | what it tells | threshold | figures | source of the threshold |"
    return "\n".join((head, "|:--|:--|:--|:--|:--|", *rows))


def _count_workers(figures: Figures) -> int:
    return int(figures.profile.get("workers") or 0)


def _describe_wait(figures: Figures, share: float) -> str:
    text = f"It waits for data {format_percent(share)} of the time"
    wait_ms = figures.get("time/data_wait_ms")
    if not wait_ms:
        return text
    step = format_milliseconds(figures.step_ms)
    return f"{text}, {format_milliseconds(wait_ms)} of {step} a step"


def _format_gain(gain: float) -> str:
    return f"{gain:.1f}x as fast" if gain < 10 else f"{gain:.0f}x as fast"


def _name(part: str) -> str:
    return {
        "data_wait": "data wait",
        "h2d": "copies",
        "untold": "untold",
        "eval": "evaluation",
    }.get(part, part)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
