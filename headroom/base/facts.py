"""The records that tasks pass to each other: frozen dataclasses of plain values, small enough
for Prefect to keep. No tensor, model or open file ever crosses a task border; a fact that is
not known is None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One question asked of the machine, its answer, and what to do about it."""

    name: str  # e.g. "driver"
    ok: bool | None  # None: could not be found out, or does not apply
    finding: str
    remedy: str = ""


@dataclass(frozen=True)
class DeviceFacts:
    """The device a run uses and why. Sizes in bytes."""

    name: str  # "cuda:0", "mps", "cpu": what torch.device() takes
    kind: str  # cuda, rocm, mps, xpu or cpu
    index: int | None
    model: str | None
    uuid: str | None
    reason: str  # one sentence: why this one, and why not a better one
    total_bytes: int | None
    free_bytes: int | None
    torch_version: str
    runtime: str | None  # "CUDA 13.0", "ROCm 7.1"; None on a CPU
    driver_version: str | None
    bf16: bool  # computes in bf16 natively
    tf32: bool
    checks: tuple[Check, ...] = ()
    baseline_bytes: int = 0  # in use on the device before the run allocates anything
    fell_back: bool = False  # auto found no GPU that works, though the machine has one
    beside: tuple[str, ...] = ()  # leased with it, for the other processes of the training


@dataclass(frozen=True)
class Column:
    """A feature column as its user has it, and how it became inputs of the model."""

    name: str
    kind: str  # number; category: one input for each of its values; date: one for each part
    values: tuple[
        str, ...
    ] = ()  # of a category, or the parts of a date, in the order of its inputs
    # What stands for a missing value, of a date for each part; None: nothing does.
    fill: float | str | tuple[float, ...] | None = None
    whole: bool = False  # numbers that were all integers or booleans
    rest: str | None = (
        None  # the category of texts that are none of the values; None: there is none
    )


@dataclass(frozen=True)
class TimeInputs:
    """The inputs of the column of times by which rows were split, as a built-in mlp treats them;
    scaled."""

    places: tuple[int, ...]  # among the inputs
    low: tuple[float, ...]  # between these, those of the training rows, the net sees them
    high: tuple[float, ...]
    slope: tuple[float, ...] = ()  # of a line beside the net, in which they go on; empty: none
    intercept: float = 0.0


@dataclass(frozen=True)
class DataFacts:
    """Prepared arrays on disk. Shapes exclude the row axis; sizes in bytes."""

    folder: str  # holds the arrays and manifest.json
    source: str
    task: str  # classification, multilabel, regression or tokens
    train_rows: int
    val_rows: int
    input_shape: tuple[int, ...]  # (64,) a row of features; (1, 8, 8) an image; (128,) tokens
    outputs: int  # classes, regressed values, or different tokens; 0: a loader does not tell
    class_names: tuple[str, ...] | None
    feature_names: tuple[str, ...] | None
    offset: tuple[float, ...]  # x_scaled = (x - offset) / scale; one value, or one a feature
    scale: tuple[float, ...]
    bytes: int  # of all prepared arrays
    fingerprint: str  # SHA-256 of the prepared content, 16 hex digits; empty for loaders
    reused: bool
    columns: tuple[Column, ...] | None = None  # of a table, before it became inputs
    class_rows: tuple[int, ...] | None = None  # training rows of each class
    missing: str = "fail"  # what was done with rows that miss a feature: fail, drop or mean
    na: tuple[str, ...] | None = None  # the words that meant missing; None: the default ones
    decimal: str = "."  # the decimal mark of numbers in text
    notes: tuple[str, ...] = ()  # what else was done to the data, for a person
    warnings: tuple[str, ...] = ()  # what a person should doubt in it
    # Of the best answer that is the same for all validation rows: the accuracy of a classification,
    # the loss of tokens.
    guess: float | None = None
    batch: Any | None = None  # of a loader: what its batches hold; see nested.describe_structure
    batch_rows: int | None = None  # of a loader: rows of its batches
    val_batch_rows: int = 0  # of a loader to validate on
    # Of a loader: inputs and targets of the first rows that it gives, as nested.pack_rows packs
    # them; models and losses are tried on these.
    first_rows: Any | None = field(default=None, repr=False, compare=False)
    endless: bool = False  # of a loader: whether it has no length; rows are then those of a batch
    target_offset: tuple[float, ...] = (0.0,)  # y_scaled = (y - offset) / scale, of a regression
    target_scale: tuple[float, ...] = (1.0,)
    # Units: an amount is learnt as log(1 + amount / unit), scaled; none: as it is, scaled.
    target_log: tuple[float, ...] = ()
    # Mean and median of the training rows of a regression, each by target, in its units.
    target_guess: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    test_rows: int = 0  # put aside, to be judged once
    times: TimeInputs | None = None  # None: rows were not split by a column of times


@dataclass(frozen=True)
class TrainFacts:
    """What training measured. Metric names are those of the run record."""

    metrics: dict[str, float]  # final values
    tags: dict[str, str]
    steps: int
    epochs: int
    stopped_early: bool
    stopped: str  # why it ended before it was done, to be gone on with; empty: it is done
    model_folder: str  # spec.json and weights.pt
    held_bytes: int  # in use on the device at the end of the training, before anything was freed
    stats: dict[str, Any] = field(default_factory=dict)  # the allocator's raw statistics
    layers: dict[str, Any] = field(default_factory=dict)  # of its peak; see describe_layers
    profile: dict[str, Any] = field(default_factory=dict)  # what a verdict needs beside them
    warnings: tuple[str, ...] = ()  # what a person should doubt in the results
    # Of a classification, by part of the rows: its figures by class, for the report; see by_class.
    classes: dict[str, Any] = field(default_factory=dict)
    # What several processes that trained it did not give back; see ReleaseFacts.owners.
    leaks: tuple[Owner, ...] = ()


@dataclass(frozen=True)
class Owner:
    """Something that still holds device memory."""

    kind: str  # Tensor, Parameter, ...
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    held_by: str  # "list in module my_hooks, name 'kept'"


@dataclass(frozen=True)
class UnreturnedMemory:
    """Memory above the baseline that was not returned and that no tensor holds."""

    name: str  # "private pools of graphs", "pinned host memory", ...
    bytes: int


@dataclass(frozen=True)
class ReleaseFacts:
    """The proof that memory was given back. Sizes in bytes."""

    baseline_bytes: int
    before_bytes: int  # in use when the release began
    after_bytes: int
    released_bytes: int
    residual_bytes: int  # workspaces that the libraries keep
    leaked_bytes: int
    ok: bool
    owners: tuple[Owner, ...] = ()
    # What the allocator still holds of the device above the baseline; None where that is not known.
    reserved_bytes: int | None = None
    kept: tuple[UnreturnedMemory, ...] = ()
    broken: str = ""  # why nothing can be given back before this process ends
    # Of a loop whose objects are somebody else's, and may live on: what those still hold, of the
    # watched models and optimizers and of the others. None where a run lets go of all that it made.
    held_bytes: tuple[int, int] | None = None


@dataclass(frozen=True)
class ModelFacts:
    """A logged model whose files are at hand."""

    folder: str  # holds spec.json and weights.pt
    run_id: str  # that trained it
    model_id: str


@dataclass(frozen=True)
class PredictFacts:
    """What a prediction has done."""

    output: str
    rows: int
    rows_at_once: int  # that went through the model together at the end
    recovered: int  # times that memory ran out and prediction went on
    predict_s: float  # from the first row read to the output in its place, the model loaded
    held_bytes: int  # in use on the device at the end, before anything was freed
    warnings: tuple[str, ...] = ()  # what a person should doubt in the predictions
