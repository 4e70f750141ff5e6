"""The list of the names of the record: each metric, tag, group of params and phase is a row here,
with what it is, its unit, which direction is better and where it is shown. Whoever measures,
chooses, compares, refuses or shows one asks this list, so that a metric more is a row and the
function that measures it. It imports nothing of the project, so that settings may ask it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

TASKS = ("classification", "multilabel", "regression", "tokens", "own")


class Place(StrEnum):
    """Where a metric is shown, or what asks for it; each shows its metrics in the list's order."""

    BEST_METRIC = "train.best_metric"  # weights may be chosen by it
    GOAL = "gate and comparisons"  # a run is judged by the first of these that it has
    HEADLINE = "headline"  # the first of these that a run has stands in the report's first line
    UNEVEN = "headline of uneven classes"  # before all others where nearly all rows are of one
    SCORES = "report: scores"
    SPEED = "report: speed"
    DEVICE = "report: device"
    TIME = "report: time"
    STAGES = "report: stages of the run"
    TRAINING = "report: parts of the training"
    TRAINING_WORDS = "report: parts of the training in words"
    STEP = "report: phases of a step"
    MEMORY = "report: memory"
    TROUBLE = "report: trouble with memory"
    HOST = "report: memory of the process"
    OWNERS = "report: memory by owner"
    PHASE_PEAKS = "report: memory by phase"
    RELEASE = "report: release"
    RANKS = "report: processes"  # it is told of several processes from the least to the most
    PROGRESS_SCORE = "progress line: score"
    PROGRESS_SPEED = "progress line: speed"
    PROGRESS_MEMORY = "progress line: memory"
    LOSS_PLOT = "plot of losses"
    SCORE_PLOT = "plot of the score"
    MEMORY_PLOT = "plot of the device's memory"
    HOST_PLOT = "plot of the process's memory"
    TREND_PLOT = "plot of the trend"
    GATE = "gate"
    MLFLOW_COLUMN = "MLflow: column"
    MLFLOW_CHART = "MLflow: chart"
    MLFLOW_BARS = "MLflow: bars of a comparison"
    BEST_RUN = "comparison: best run"  # the run that holds the others has it of the best
    PEAK = "comparison: peak"  # the first of these that all runs have
    NEXT_RUN = "next run"  # the next one alike begins with it


@dataclass(frozen=True)
class Metric:
    """A metric of the record."""

    name: str  # as MLflow has it; of a family with what changes in capitals
    what: str
    is_lower_better: bool | None = None  # None: neither is
    tasks: tuple[str, ...] = ()  # of an evaluation of these it is a score
    shown: Mapping[Place, str] = field(default_factory=dict)  # where, and in which words
    needs: str = ""  # what it is measured with alone
    unit_words: str = ""  # where the unit does not stand in the name

    @property
    def last_part(self) -> str:
        return self.name.partition("/")[2]

    @property
    def unit(self) -> str:
        return self.unit_words or find_unit(self.name)


@dataclass(frozen=True)
class Tag:
    """A tag of the record: what was found, in words."""

    name: str  # as MLflow has it; of a family with what changes in capitals
    what: str
    is_compared: bool = False  # runs that differ by it are two groups of a comparison
    explains: tuple[str, ...] = ()  # phases of a step that may take longer because of it
    needs: str = ""


@dataclass(frozen=True)
class ParamGroup:
    """Params of the record whose names begin alike: a section of the settings."""

    name: str
    what: str


class PhaseKind(StrEnum):
    STEP = "step"  # time/NAME_ms
    TRAINING = "training"  # time/NAME_s, a part of the stage train_model
    STAGE = "run"  # time/NAME_s


@dataclass(frozen=True)
class Phase:
    """A part of a step, of a training or of a run, whose time is a metric."""

    name: str
    kind: PhaseKind
    what: str
    label: str = ""  # of a step's in a comparison, of others in the report
    failed_in: str = ""  # in the sentence on memory that ran out in it
    is_named: bool = False  # a loop of one's own may say that it begins
    has_peak: bool = False  # the highest use of memory in it is a metric too
    shown: Mapping[Place, str] = field(default_factory=dict)
    needs: str = ""

    @property
    def metric(self) -> str:
        return f"time/{self.name}_{'ms' if self.kind == PhaseKind.STEP else 's'}"


TOP_OF = 10  # classes: of more, it is a score too whether the class is among the first five
UNITS = {  # by the end of a name
    "per_s": "1/s",
    "mib": "MiB",
    "ms": "ms",
    "s": "s",
    "pct": "%",
    "w": "W",
    "c": "C",
    "j": "J",
}
CUDA, GPU, SEVERAL = "an NVIDIA GPU", "a GPU", "several processes"
GONE_ON = "--resume, a key or a checkpoint"
REPLAY, OTHER, COUNTED, BETWEEN = "replay", "other", "counted_step", "between"

PHASES = (
    Phase(
        "data_wait",
        PhaseKind.STEP,
        "waiting for a batch",
        "data wait",
        failed_in="wait for a batch",
        shown={Place.RANKS: "wait for data"},
        is_named=True,
    ),
    Phase(
        "h2d",
        PhaseKind.STEP,
        "copying a batch to the device",
        "copy to the device",
        failed_in="copy of a batch to the device",
        needs="rows in the host's memory",
        is_named=True,
    ),
    Phase(
        "forward",
        PhaseKind.STEP,
        "the model and the loss",
        "forward",
        failed_in="forward pass",
        has_peak=True,
        is_named=True,
    ),
    Phase(
        "backward",
        PhaseKind.STEP,
        "the gradients",
        "backward",
        failed_in="backward pass",
        has_peak=True,
        is_named=True,
    ),
    Phase(
        "communication",
        PhaseKind.STEP,
        "exchanging gradients between processes",
        "communication",
        shown={Place.RANKS: "communication"},
        needs=SEVERAL,
        is_named=True,
    ),
    Phase(
        "optimizer",
        PhaseKind.STEP,
        "the update of the weights",
        "optimizer",
        failed_in="optimizer step",
        has_peak=True,
        is_named=True,
    ),
    Phase(
        OTHER,
        PhaseKind.STEP,
        "what belongs to no other phase, of a loop of one's own",
        failed_in="rest",
        needs="a loop of one's own",
        is_named=True,
    ),
    Phase(
        BETWEEN,
        PhaseKind.STEP,
        "what a loop of one's own does between two steps, where it says nothing of it",
        needs="a loop of one's own, on a CPU",
    ),
    Phase(
        REPLAY,
        PhaseKind.STEP,
        "all of a step that is replayed from a graph, but for its data",
        needs=CUDA,
    ),
    Phase("setup", PhaseKind.TRAINING, "building model and optimizer, and moving them", "set-up"),
    Phase(
        "first_step",
        PhaseKind.TRAINING,
        "the first step, with warm-up and compilation",
        "first step",
        shown={Place.TRAINING_WORDS: "first step {}"},
    ),
    Phase("steps", PhaseKind.TRAINING, "all other steps", "steps"),
    Phase(
        "eval",
        PhaseKind.TRAINING,
        "evaluations",
        "evaluation",
        failed_in="evaluation",
        has_peak=True,
        shown={Place.TRAINING_WORDS: "eval {}"},
        is_named=True,
    ),
    Phase(
        "log",
        PhaseKind.TRAINING,
        "log points and what is written at the end",
        "log",
        shown={Place.TRAINING_WORDS: "log {}"},
        is_named=True,
    ),
    Phase(
        "checkpoint",
        PhaseKind.TRAINING,
        "checkpoints and the model's files",
        "checkpoint",
        shown={Place.TRAINING_WORDS: "checkpoint {}"},
        is_named=True,
    ),
    Phase(
        COUNTED,
        PhaseKind.TRAINING,
        "steps whose memory was counted, which are in no speed",
        "counting memory",
        shown={Place.TRAINING_WORDS: "counting memory {}"},
        needs="a loop of one's own",
    ),
    Phase("start", PhaseKind.STAGE, "imports and servers that a person waited for", "start"),
    Phase("detect_device", PhaseKind.STAGE, "finding the device", "detect"),
    Phase("prepare_data", PhaseKind.STAGE, "reading, checking and preparing the rows", "prepare"),
    Phase("open_run", PhaseKind.STAGE, "opening the run in MLflow", "open the run"),
    Phase("train_model", PhaseKind.STAGE, "the training", "train"),
    Phase("release_memory", PhaseKind.STAGE, "giving the memory back, and proving it", "release"),
    Phase("close", PhaseKind.STAGE, "sending the rest to MLflow", "close"),
)


def list_phases(kind: PhaseKind) -> list[Phase]:
    return [phase for phase in PHASES if phase.kind == kind]


def _make_phase_metrics(kind: PhaseKind) -> Iterator[Metric]:
    places = {
        PhaseKind.STEP: Place.STEP,
        PhaseKind.TRAINING: Place.TRAINING,
        PhaseKind.STAGE: Place.STAGES,
    }
    where = "of a step" if kind == PhaseKind.STEP else f"of the {kind}"
    for phase in list_phases(kind):
        label = phase.name.replace("_", " ") if kind == PhaseKind.STEP else phase.label
        shown = {places[kind]: label} if phase.name != REPLAY else {}
        yield Metric(
            phase.metric,
            f"{where}: {phase.what}",
            True,
            shown={**shown, **phase.shown},
            needs=phase.needs,
        )


LOWER_BOUND = "memory/peak_is_lower_bound"  # then the peak is said to be "at least" so much
OWNERS = {  # of memory: the label of each in the report
    "parameters": "parameters",
    "buffers": "buffers",
    "best_weights": "best weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer",
    "data": "data",
    "batch": "batch",
    "activations": "activations",
    "libraries": "libraries",
    "graph": "recorded graph",
    "rest": "the rest",
}
_SELDOM_OWNERS = {
    "best_weights": "best weights on the device",
    "libraries": "a GPU, or operations that take memory for themselves",
    "graph": CUDA,
}

METRICS = (
    Metric(
        "train/loss",
        "mean loss of the batches since the last log point",
        True,
        shown={Place.LOSS_PLOT: "train", Place.MLFLOW_CHART: ""},
    ),
    Metric("train/lr", "learning rate"),
    Metric("train/grad_norm", "norm of all gradients"),
    Metric("train/epoch", "epochs that are done"),
    Metric("train/best_epoch", "epoch whose weights are kept"),
    Metric(
        "val/accuracy",
        "share of the rows, or of the labels of all rows, that are predicted right",
        False,
        ("classification", "multilabel"),
        {
            Place.BEST_METRIC: "",
            Place.GOAL: "",
            Place.HEADLINE: "",
            Place.SCORES: "",
            Place.PROGRESS_SCORE: "val accuracy {}",
            Place.SCORE_PLOT: "validation accuracy",
            Place.MLFLOW_CHART: "",
        },
    ),
    Metric(
        "val/r2",
        "share of the target's variance that is explained; absent where the target never changes",
        False,
        ("regression",),
        {
            Place.BEST_METRIC: "",
            Place.GOAL: "",
            Place.HEADLINE: "",
            Place.SCORES: "",
            Place.PROGRESS_SCORE: "val R2 {}",
            Place.SCORE_PLOT: "validation R2",
            Place.MLFLOW_CHART: "",
        },
    ),
    Metric(
        "val/balanced_accuracy",
        "mean recall of the classes that rows have",
        False,
        ("classification",),
        {Place.BEST_METRIC: "", Place.UNEVEN: "val balanced accuracy {}", Place.SCORES: ""},
    ),
    Metric(
        "val/macro_f1",
        "mean F1 of the classes, or labels, that rows have or were given",
        False,
        ("classification", "multilabel"),
        {Place.BEST_METRIC: "", Place.SCORES: ""},
    ),
    Metric(
        "val/top5_accuracy",
        "share of the rows whose class is among the first five",
        False,
        ("classification",),
        {Place.BEST_METRIC: "", Place.SCORES: ""},
        needs="more than ten classes",
    ),
    Metric(
        "val/largest_class_share",
        "share of the rows that are of the largest class",
        None,
        ("classification",),
        {Place.SCORES: ""},
        needs="rows nearly all of one class",
    ),
    Metric(
        "val/f1",
        "F1 of all labels taken together",
        False,
        ("multilabel",),
        {Place.BEST_METRIC: "", Place.SCORES: ""},
    ),
    Metric(
        "val/average_precision",
        "mean average precision of the labels that a row has",
        False,
        ("multilabel",),
        {Place.BEST_METRIC: "", Place.SCORES: ""},
    ),
    Metric(
        "val/mae",
        "mean absolute error",
        True,
        ("regression",),
        {
            Place.BEST_METRIC: "",
            Place.HEADLINE: "",
            Place.SCORES: "",
            Place.PROGRESS_SCORE: "val mae {}",
            Place.SCORE_PLOT: "validation mean absolute error",
            Place.MLFLOW_CHART: "",
        },
        unit_words="the target's",
    ),
    Metric(
        "val/rmse",
        "root of the mean squared error",
        True,
        ("regression",),
        {Place.BEST_METRIC: "", Place.SCORES: ""},
        unit_words="the target's",
    ),
    Metric(
        "val/mape",
        "mean absolute error as a share of the target; absent where a row's target is 0",
        True,
        ("regression",),
        {Place.BEST_METRIC: "", Place.SCORES: ""},
        unit_words="%",
    ),
    Metric(
        "val/perplexity",
        "exponential of the loss: among how many tokens alike the model hesitates",
        True,
        ("tokens",),
        {
            Place.BEST_METRIC: "",
            Place.GOAL: "",
            Place.HEADLINE: "",
            Place.SCORES: "",
            Place.PROGRESS_SCORE: "val perplexity {}",
            Place.SCORE_PLOT: "validation perplexity",
            Place.MLFLOW_CHART: "",
        },
    ),
    Metric(
        "val/loss",
        "mean loss",
        True,
        TASKS,
        {
            Place.BEST_METRIC: "",
            Place.GOAL: "",
            Place.HEADLINE: "",
            Place.SCORES: "",
            Place.LOSS_PLOT: "validation",
            Place.MLFLOW_CHART: "",
        },
    ),
    Metric("val/NAME", "a metric of your own, of train.metrics"),
    Metric("test/NAME", "each val/NAME, of the rows that data.test_fraction puts aside"),
    Metric(
        "speed/samples_per_s",
        "rows trained a second, of the whole run",
        False,
        shown={
            Place.SPEED: "{} samples/s",
            Place.PROGRESS_SPEED: "{} samples/s",
            Place.GATE: "{} samples/s",
            Place.TREND_PLOT: "samples a second",
            Place.MLFLOW_COLUMN: "",
            Place.MLFLOW_BARS: "",
            Place.BEST_RUN: "",
        },
    ),
    Metric(
        "speed/tokens_per_s",
        "tokens trained a second, of the whole run",
        False,
        shown={
            Place.SPEED: "{} tokens/s",
            Place.PROGRESS_SPEED: "{} tokens/s",
            Place.MLFLOW_COLUMN: "",
            Place.BEST_RUN: "",
        },
    ),
    Metric(
        "speed/steps_per_s",
        "optimizer steps a second, of the whole run",
        False,
        shown={Place.SPEED: "{} steps/s"},
    ),
    Metric(
        "speed/mfu",
        "share of the device's peak that the model's arithmetic takes",
        False,
        needs="a device whose peak is known",
    ),
    Metric(
        "speed/recent_samples_per_s",
        "the same, from log point to log point",
        False,
        shown={Place.MLFLOW_CHART: ""},
    ),
    Metric(
        "speed/recent_tokens_per_s",
        "the same, from log point to log point",
        False,
        shown={Place.MLFLOW_CHART: ""},
    ),
    Metric("speed/recent_steps_per_s", "the same, from log point to log point", False),
    Metric(
        "speed/recent_mfu",
        "the same, from log point to log point",
        False,
        needs="a device whose peak is known",
    ),
    *_make_phase_metrics(PhaseKind.STEP),
    Metric(
        "time/fast_step_ms",
        "a fast step: one in twenty is faster",
        True,
        shown={
            Place.GATE: "a step takes {} where nothing is in its way",
            Place.TREND_PLOT: "fast step, ms",
        },
    ),
    Metric(
        "time/reference_ms",
        "a fixed piece of work between steps: how fast the machine itself was",
        True,
        needs="a CPU, for some seconds",
    ),
    *_make_phase_metrics(PhaseKind.TRAINING),
    Metric(
        "bound/share_pct",
        "share of the time after the first step of what the tag bound names: see the verdict",
        shown={Place.MLFLOW_COLUMN: ""},
        needs="a cause that takes a share of the time",
    ),
    Metric(
        "time/unaccounted_pct",
        "share of the training that no phase holds",
        True,
        shown={Place.TIME: "{} % unaccounted"},
    ),
    Metric(
        "time/timed_steps",
        "steps whose phases were timed",
        shown={Place.TIME: "phases of {} steps timed"},
        needs=f"{GPU}, or a loop of one's own",
    ),
    Metric(
        "time/phase_error_pct",
        "largest standard error of a phase's share of a step, in points",
        True,
        needs="a loop of one's own",
    ),
    Metric(
        "time/host_bound_pct",
        "share of the timed steps in whose backward pass the device waited for each call",
        True,
        needs=GPU,
    ),
    Metric(
        "time/step_cpu_ms",
        "processor time of a step, of all threads of the process",
        True,
        shown={Place.TIME: "a step takes {} of processor time"},
    ),
    Metric(
        "time/workers_cpu_ms",
        "processor time of a step in the workers of a loader",
        True,
        shown={Place.TIME: "its workers {}"},
        needs="workers of a loader",
    ),
    Metric(
        "time/step_operations",
        "operations of PyTorch that a step calls, backward pass included; four times the nodes "
        "of its graph where no step was counted",
        True,
    ),
    Metric(
        "time/arithmetic_ms",
        "what the products of matrices and the convolutions of a step would take at the pace of "
        "time/reference_ms, by the shapes in its graph; those that are known",
        True,
        needs="a loop of one's own, on a CPU",
    ),
    Metric(
        "time/first_waits_s",
        "waiting for the first batch of each later pass over a loader",
        True,
        needs="a loop of one's own",
    ),
    Metric("time/garbage_s", "Python's garbage collector, in the thread of the loop", True),
    Metric(
        "time/core_limited_pct",
        "share of the time in which a container's limit kept it from its cores",
        True,
        needs="such a limit",
    ),
    Metric(
        "time/memory_wait_pct",
        "share of the time in which it stood still for pages that were taken from memory",
        True,
        needs="Linux with PSI",
    ),
    Metric(
        "time/core_wait_pct",
        "share of the time in which other work had the cores of the training",
        True,
        shown={Place.TIME: "other work had its cores {} % of the time"},
    ),
    Metric(
        "time/core_wait_own_pct",
        "share in which its own threads and helpers had them",
        True,
        shown={Place.TIME: "its own threads and helpers {} %"},
    ),
    Metric(
        "time/plain_step_ms",
        "a step as it is",
        True,
        shown={Place.NEXT_RUN: ""},
        needs="steps on which train.compile was tried",
    ),
    Metric(
        "time/compiled_step_ms",
        "a compiled step",
        True,
        shown={Place.NEXT_RUN: ""},
        needs="steps on which train.compile was tried",
    ),
    Metric(
        "time/compile_s",
        "compiling it",
        True,
        shown={Place.NEXT_RUN: ""},
        needs="steps on which train.compile was tried",
    ),
    Metric(
        "time/checkpoint_copy_s",
        "copying the state of checkpoints off the device",
        True,
        needs="a checkpoint in mid-training",
    ),
    *_make_phase_metrics(PhaseKind.STAGE),
    Metric(
        "time/wait_device_s",
        "waiting for a device that others had",
        True,
        needs="a device that was taken",
    ),
    Metric("time/total_s", "all of the run, since a person began to wait", True),
    Metric(
        "memory/run_peak_allocated_mib",
        "most that tensors took in the run",
        True,
        shown={
            Place.MEMORY: "peak {} allocated",
            Place.PROGRESS_MEMORY: "peak {}",
            Place.RANKS: "peak memory",
            Place.GATE: "peak {}",
            Place.TREND_PLOT: "peak memory, MiB",
            Place.MLFLOW_COLUMN: "",
            Place.MLFLOW_BARS: "",
            Place.BEST_RUN: "",
            Place.PEAK: "",
            Place.NEXT_RUN: "",
        },
    ),
    Metric(
        "memory/run_peak_reserved_mib",
        "most that the allocator reserved in the run",
        True,
        shown={Place.MEMORY: "{} reserved", Place.NEXT_RUN: ""},
        needs=GPU,
    ),
    Metric(
        LOWER_BOUND,
        "1 where operations may have taken more for themselves than was seen",
        needs="a profiler of the loop's own, several processes, or memory.limit_mib on a CPU",
    ),
    Metric(
        "memory/predicted_peak_mib",
        "what the peak was predicted to be",
        shown={Place.MEMORY: "{} predicted"},
        needs="a GPU, or memory.limit_mib",
    ),
    Metric(
        "memory/predicted_reserved_mib",
        "what was predicted to be reserved",
        needs="a GPU, or memory.limit_mib",
    ),
    Metric(
        "memory/headroom_mib",
        "the device's memory less the most that all processes had in use",
        False,
        shown={Place.MEMORY: "headroom {}"},
        needs=GPU,
    ),
    Metric(
        "memory/fragmentation_pct",
        "share of what was reserved that was idle at the peak",
        True,
        shown={Place.MEMORY: "{} % idle at the peak"},
        needs=GPU,
    ),
    Metric(
        "memory/alloc_retries",
        "times that the allocator had to free its cache",
        True,
        shown={Place.TROUBLE: "{} allocation retries"},
        needs=GPU,
    ),
    Metric(
        "memory/ooms_recovered",
        "times that memory ran out and the training went on with less at once",
        True,
        shown={Place.TROUBLE: "{} out-of-memory errors recovered", Place.RANKS: ""},
    ),
    Metric(
        "memory/micro_batch",
        "rows that fit at once",
        shown={Place.NEXT_RUN: ""},
    ),
    Metric(
        "memory/peak_reserved_mib",
        "most that was reserved since the last log point",
        shown={Place.MEMORY_PLOT: "peak reserved"},
        needs=GPU,
    ),
    Metric(
        "memory/reserved_mib",
        "reserved at a log point",
        shown={Place.MEMORY_PLOT: "reserved"},
        needs=GPU,
    ),
    Metric(
        "memory/peak_allocated_mib",
        "most that tensors took since the last log point",
        shown={
            Place.MEMORY_PLOT: "peak allocated",
            Place.PROGRESS_MEMORY: "peak {}",
            Place.MLFLOW_CHART: "",
        },
        needs=GPU,
    ),
    Metric(
        "memory/allocated_mib",
        "what tensors took at a log point",
        shown={Place.MEMORY_PLOT: "allocated"},
        needs=GPU,
    ),
    Metric("memory/free_mib", "free on the whole device at a log point", needs=GPU),
    Metric(
        "memory/host_rss_mib",
        "the process's memory at a log point",
        shown={
            Place.HOST: "host process {}",
            Place.HOST_PLOT: "resident",
            Place.PROGRESS_MEMORY: "host {}",
            Place.MLFLOW_CHART: "",
        },
    ),
    Metric(
        "memory/host_rss_peak_mib",
        "most that the process took",
        True,
        shown={Place.HOST: "its peak {}", Place.BEST_RUN: "", Place.PEAK: ""},
    ),
    *(
        Metric(
            f"memory/{owner}_mib",
            f"of the peak of tensors: {label}",
            shown={Place.OWNERS: label},
            needs=_SELDOM_OWNERS.get(owner, ""),
        )
        for owner, label in OWNERS.items()
    ),
    *(
        Metric(
            f"memory/peak_{phase.name}_mib",
            f"most that tensors took in: {phase.what}",
            True,
            shown={Place.PHASE_PEAKS: phase.name},
        )
        for phase in PHASES
        if phase.has_peak
    ),
    Metric("memory/release_ok", "1 where all was given back, else 0", False),
    Metric(
        "memory/released_mib",
        "given back after the training",
        shown={Place.RELEASE: "{} given back"},
    ),
    Metric(
        "memory/baseline_mib",
        "in use before the run",
        shown={Place.RELEASE: "{} in use before the run"},
    ),
    Metric(
        "memory/residual_mib",
        "kept by libraries",
        shown={Place.RELEASE: "{} kept by libraries"},
    ),
    Metric(
        "memory/held_mib",
        "still held by the model and its optimizer, at the end of a loop of one's own",
        shown={Place.RELEASE: "{} still held by the model and its optimizer"},
        needs="a loop of one's own",
    ),
    Metric(
        "memory/held_beside_mib",
        "held by other objects of that loop",
        shown={Place.RELEASE: "{} by other objects of the loop"},
        needs="a loop of one's own",
    ),
    Metric(
        "memory/leaked_mib",
        "tensors that nobody should hold any longer",
        True,
        shown={
            Place.RELEASE: "{} leaked",
            Place.RANKS: "leaked",
            Place.GATE: "{} leaked",
            Place.TREND_PLOT: "leaked, MiB",
            Place.MLFLOW_COLUMN: "",
            Place.BEST_RUN: "",
        },
    ),
    Metric(
        "memory/reserved_residual_mib",
        "still reserved after all was given back",
        True,
        shown={Place.RELEASE: "{} still reserved"},
        needs=GPU,
    ),
    Metric(
        "gpu/utilization_pct",
        "share of the time in which it computed",
        shown={Place.DEVICE: "{} % busy"},
        needs=CUDA,
    ),
    Metric("gpu/power_w", "power", shown={Place.DEVICE: "{} W"}, needs=CUDA),
    Metric("gpu/temperature_c", "temperature", shown={Place.DEVICE: "{} C"}, needs=CUDA),
    Metric(
        "gpu/energy_j",
        "energy since the run began",
        True,
        shown={Place.DEVICE: "{} J used"},
        needs=CUDA,
    ),
    Metric("gpu/throttled", "1 where heat or power slowed it, else 0", True, needs=CUDA),
    Metric("checkpoint/written", "checkpoints that were written", needs="checkpoints"),
    Metric(
        "ranks/NAME_WHICH",
        "of all processes: the least, the median and the most of what the report tells of them",
        needs=SEVERAL,
    ),
    Metric("system/NAME", "MLflow's own metrics of the machine", needs="system_metrics on"),
)

TAGS = (
    Tag("device", "where the run was, such as cuda:0", is_compared=True),
    Tag("device.kind", "cuda, rocm, mps, xpu or cpu"),
    Tag(
        "device.model",
        "what it is called",
        is_compared=True,
        explains=("forward", "backward", "optimizer"),
    ),
    Tag("device.uuid", "which one it is", needs=CUDA),
    Tag("device.reason", "why this one, and why not a better one"),
    Tag("device.total_mib", "its memory, MiB"),
    Tag("device.peak_tflops", "its peak in the run's arithmetic", needs="a device with a peak"),
    Tag("device.peak_source", "where that number is from", needs="a device with a peak"),
    Tag("accelerator.runtime", "such as CUDA 13.0", needs=GPU),
    Tag("driver.version", "of the device's driver", needs=GPU),
    Tag("data.fingerprint", "a hash of the prepared rows", is_compared=True),
    Tag("data.notes", "what was decided about the columns", needs="a table"),
    Tag(
        "data.residency",
        "where the rows are: device, pinned or host",
        explains=("data_wait", "h2d"),
    ),
    Tag("data.residency.reason", "why there"),
    Tag("torch.version", "of PyTorch", is_compared=True),
    Tag("precision", "arithmetic of the forward pass", explains=("forward", "backward")),
    Tag(
        "compiled",
        "whether and how the step is compiled",
        explains=("forward", "backward", "optimizer"),
    ),
    Tag("compiled.reason", "why so"),
    Tag("micro_batch", "rows that go through the model at once", explains=("forward", "backward")),
    Tag("threads", "threads that compute", explains=("forward", "backward")),
    Tag("memory.admission", "why the run might start with the memory that is free"),
    Tag("memory.release", "why nobody can tell what was given back", needs="a broken device"),
    Tag("host", "the machine's name", is_compared=True),
    Tag("pid", "the process's number"),
    Tag("process.started_at", "when it began, Unix time"),
    Tag("process.uptime_s", "seconds that the machine was up then"),
    Tag("git.commit", "the commit of the code", needs="a git repository"),
    Tag("git.dirty", "true where files differ from it", needs="a git repository"),
    Tag("run.name", "run.name"),
    Tag("run.key", "run.key, or the key of a loop of one's own", needs="a key"),
    Tag("journal", "the run's folder"),
    Tag("removal", "keep_days, of which it is being removed", needs="keep_days"),
    Tag("journal.notes", "what was odd about writing it", needs="a disk that fills up"),
    Tag("journal.damaged_lines", "lines of it that could not be read", needs="a damaged folder"),
    Tag("unsent", "what MLflow has not got, and where it is", needs="an MLflow that is away"),
    Tag("alike", "a hash of what runs share whose steps do the same work"),
    Tag("gate", "ok, worse, larger, slower or new: see the gate"),
    Tag("gate.why", "that as a sentence"),
    Tag("gate.of", "a hash of what runs share that are compared with each other"),
    Tag("registered", "the version of the registered model", needs="run.registered_model"),
    Tag("bound", "what held the run back, in one word: see the verdict"),
    Tag("bound.why", "that as a sentence, with what to do"),
    Tag("warnings", "what a person should doubt, a line each"),
    Tag("alerts", "what was wrong while it trained, a line each", needs="such a run"),
    Tag("end.reason", "why the run ended before its end", needs="such an end"),
    Tag("end.status", "how it ended, told before MLflow has the rest of it"),
    Tag("failure", "the kind of failure", needs="a failure"),
    Tag("resumed", "how often the run was gone on with", needs=GONE_ON),
    Tag("resumed_from_step", "the step that it went on from", needs=GONE_ON),
    Tag("resumed.by.NAME", "who went on with it", needs=GONE_ON),
    Tag("anew", "why a key, or a checkpoint, began a new run", needs=GONE_ON),
    Tag("retries", "how often it began again by itself, and after what", needs="run.retries"),
    Tag("retry_of", "the run that this one is a retry of", needs="run.retries"),
    Tag("ranks", "how many processes trained it", needs=SEVERAL),
    Tag("ranks.devices", "where each of them was", needs=SEVERAL),
    Tag("ranks.restarts", "how often they began again after a lost one", needs=SEVERAL),
    Tag("ranks.NAME_most", "which of them had the most of a metric", needs=SEVERAL),
    Tag("prefect.flow_run_id", "the flow run in Prefect"),
    Tag("prefect.flow_run_url", "its page", needs="a server that stays"),
    Tag("prefect.deployment", "what started it", needs="a deployment"),
    Tag("prefect.earlier_flow_runs", "those that this run goes on with", needs="--resume"),
    Tag("log.NAME", "a word that a loop of one's own has logged", needs="a loop of one's own"),
    Tag("comparison", "how many trainings a comparison has", needs="a comparison"),
    Tag("best", "the settings that came out best", needs="a comparison"),
    Tag("best.run_id", "the run that has them", needs="a search"),
    Tag("best.value", "what it came to", needs="a search"),
    Tag("best.command", "how to train it again", needs="a search"),
    Tag("pruned", "why a trial was ended early", needs="a search"),
    Tag("mlflow.NAME", "MLflow's own: the report as mlflow.note.content, the parent, the user"),
)

PARAM_GROUPS = (
    ParamGroup("device", "where to train"),
    ParamGroup("data", "on which rows"),
    ParamGroup("model", "which model"),
    ParamGroup("optim", "optimizer and learning rate"),
    ParamGroup("train", "how long, in which batches, by which loss"),
    ParamGroup("checkpoint", "how often its state is kept"),
    ParamGroup("memory", "how much memory it may take"),
    ParamGroup("gate", "when it is worse than the last runs"),
    ParamGroup("launch", "with how many processes"),
    ParamGroup("run", "what it is called"),
)


def is_family(name: str) -> bool:
    """Return whether this is the name of a row that stands for many."""
    return re.search("[A-Z]", name) is not None


def _is_of(family: str, name: str) -> bool:
    pattern = re.sub("[A-Z]+", ".+", re.sub(r"[.]", r"\\.", family))
    return re.fullmatch(pattern, name) is not None


_BY_NAME = {metric.name: metric for metric in METRICS}
_TAGS_BY_NAME = {tag.name: tag for tag in TAGS}
PARENT = "HEADROOM_PARENT_RUN"  # in the environment: the run in MLflow that a run is part of
PARENT_TAG = "mlflow.parentRunId"


def make_parent_tags() -> dict[str, str]:
    """Return the tag of the run that holds this process's runs; empty where none does."""
    parent = os.environ.get(PARENT)
    return {PARENT_TAG: parent} if parent else {}


def find_metric(name: str) -> Metric | None:
    """Return the row of a metric, or that of its family; None where there is none."""
    families = (row for row in METRICS if is_family(row.name) and _is_of(row.name, name))
    return _BY_NAME.get(name) or next(families, None)


def find_tag(name: str) -> Tag | None:
    """Return the row of a tag, or that of its family; None where there is none."""
    families = (row for row in TAGS if is_family(row.name) and _is_of(row.name, name))
    return _TAGS_BY_NAME.get(name) or next(families, None)


def find_unit(name: str) -> str:
    """Return the unit that stands in the name of a metric; empty where none does."""
    return next((unit for end, unit in UNITS.items() if name.endswith(f"_{end}")), "")


def is_lower_better(name: str) -> bool:
    """Return whether less of a metric is better; False for one of a user's own."""
    return name in _BY_NAME and _BY_NAME[name].is_lower_better is True


def list_shown(place: Place) -> tuple[str, ...]:
    """Return the names of the metrics that are shown there."""
    return tuple(name for name, _ in list_words(place))


@cache
def list_words(place: Place) -> tuple[tuple[str, str], ...]:
    """Return the names of the metrics that are shown there, each with its words."""
    return tuple((row.name, row.shown[place]) for row in METRICS if place in row.shown)


def list_best_metrics(task: str, *, classes: int = 0) -> list[str]:
    """Return the metrics by which the weights of a task may be chosen; those of more than ten
    classes where it has so many."""
    return [
        metric.name
        for metric in METRICS
        if task in metric.tasks and Place.BEST_METRIC in metric.shown
        if not metric.needs or classes > TOP_OF
    ]


def list_scores(task: str) -> list[str]:
    """Return the last parts of the names of all scores of a task's evaluations."""
    return [metric.last_part for metric in METRICS if task in metric.tasks]


def is_taken(score: str) -> bool:
    """Return whether a metric of the user's own, val/SCORE, would take the place of another."""
    return not is_family(score) and f"val/{score}" in _BY_NAME


def make_markdown_tables() -> dict[str, str]:
    """Return the rows as Markdown tables: metrics, phases, tags and params."""
    better = {None: "", True: "lower", False: "higher"}
    metrics = [
        (
            f"`{row.name}`",
            row.unit,
            better[row.is_lower_better],
            ", ".join(row.tasks) if len(row.tasks) < len(TASKS) else "all tasks",
            row.what + (f"; needs {row.needs}" if row.needs else ""),
            ", ".join(row.shown),
        )
        for row in METRICS
    ]
    phases = [(f"`{row.name}`", row.kind, f"`{row.metric}`", row.what) for row in PHASES]
    tags = [
        (f"`{row.name}`", row.what + (f"; needs {row.needs}" if row.needs else "")) for row in TAGS
    ]
    params = [(f"`{row.name}.`", row.what) for row in PARAM_GROUPS]
    return {
        "metrics": _make_table(("metric", "unit", "better", "of", "what it is", "shown"), metrics),
        "phases": _make_table(("phase", "part of the", "metric", "what it is"), phases),
        "tags": _make_table(("tag", "what it is"), tags),
        "params": _make_table(("params", "what they say"), params),
    }


def _make_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, (":--",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
