"""The settings of a run: one frozen, typed object in sections, each name of which is a flag, a
YAML key, a field of Prefect's form and an MLflow param. It holds no defaults for the machine
(that is `device/`) and no place where results go (that is `mlflow.yaml`). Unknown names and
values of a wrong type are refused, never converted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from datetime import datetime
from difflib import get_close_matches
from pathlib import PurePath
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from headroom.base.import_paths import IMPORT_PATH, is_import_path
from headroom.base.names import Place, is_lower_better, is_taken, list_shown
from headroom.base.units import parse_seconds
from headroom.settings.arguments import (
    OPTIMIZER_ARGS,
    SCHEDULE_ARGS,
    CrossEntropyArgs,
    DelimitedArgs,
    ImageArgs,
    SyntheticArgs,
    TokenArgs,
    check_arguments,
)
from headroom.settings.file_formats import (
    ARRAYS,
    FORMATS,
    IMAGES,
    MATRIX,
    TABLE,
    TEXT,
    TOKENS,
    list_endings,
    list_formats,
)
from headroom.settings.model_args import BUILTIN_ARGS, find_argument_problems
from headroom.settings.section import Bool, Float, Int, Section, Text


def _check_printable(text: str) -> str:
    if text and (not text.isprintable() or not text.strip()):
        raise ValueError("must be printable text on one line")
    return text


PRINTABLE = AfterValidator(_check_printable)
Name = Annotated[Text, Field(min_length=1, max_length=250), PRINTABLE]


def require_known(names: Iterable[str]) -> AfterValidator:
    """Return pydantic's validator of a name that is one of these, or an import path."""

    def check(name: str) -> str:
        if name in names or IMPORT_PATH.fullmatch(name):
            return name
        near = get_close_matches(name[:80].lower(), names, 1)
        raise ValueError(
            f"must be one of {', '.join(names)}, or package.module:attribute for your own "
            f"(got {name[:80]!r})" + (f"; did you mean {near[0]}?" if near else "")
        )

    return AfterValidator(check)


LONGEST_S = 10**8  # of a duration
LEAST_WAIT_S = 600.0  # for others to start, as PyTorch's launcher has it
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_COUNT = re.compile(r"[1-9][0-9]{0,2}|10[01][0-9]|102[0-4]")


class LaunchConfig(Section):
    processes: Text = "1"
    """Processes that train one model together, each on a device of its own and on its share of each
    batch: a number, or auto: one for each GPU here. On a CPU they share its cores."""
    nodes: Text = ""
    """Machines that train one model together, by their names or addresses: host1,host2. The same
    command is given on each of them; launch.processes is then of each. Empty: this one alone."""
    port: Annotated[Int, Field(ge=1, le=65535)] = 29400
    """Where they meet, on the first of them by name."""
    timeout_s: Annotated[Float, Field(ge=10, le=10**6)] = 600.0
    """Seconds that processes wait for one that does not come to a step, an evaluation or the end.
    Then all begin again from the last checkpoint. It is the time-out of PyTorch's process group:
    nobody but you knows how long one may be busy alone, with a data set or a file. At the start
    all machines and processes are waited for as long, and at least ten minutes."""

    @field_validator("processes", mode="before")
    @classmethod
    def _check_count(cls, value: Any) -> Any:
        text = str(value) if type(value) is int else value
        if text != "auto" and not (isinstance(text, str) and _COUNT.fullmatch(text)):
            raise ValueError("must be auto, or a whole number from 1 to 1,024")
        return text

    @field_validator("nodes")
    @classmethod
    def _check_names(cls, text: str) -> str:
        names = [name.strip() for name in text.split(",")] if text else []
        if not all(map(_NAME.fullmatch, names)) or len(names) == 1 or len({*names}) < len(names):
            raise ValueError("must be names of two or more machines, such as host1,host2")
        return ",".join(sorted(names))

    @property
    def machines(self) -> list[str]:
        """Return the machines' names, in the order in which PyTorch's launcher numbers them."""
        return self.nodes.split(",") if self.nodes else []

    @property
    def wait_s(self) -> float:
        """Return the seconds to wait for all machines, and then for all processes, to come."""
        return max(LEAST_WAIT_S, self.timeout_s)

    @property
    def count(self) -> int | None:
        """Return the number of processes; None: one for each GPU."""
        return None if self.processes == "auto" else int(self.processes)


TABLE_FILES = list_formats(TABLE)
FILE_SOURCES = list_formats(TABLE, ARRAYS, MATRIX, IMAGES)
TOKEN_SOURCES = list_formats(TEXT, TOKENS)
DELIMITED_FILES = tuple(name for name in TABLE_FILES if FORMATS[name].is_delimited)
UNORDERED_SOURCES = ("digits", "images", "synthetic")  # rows as they lie say nothing of time
SOURCES = ("digits", *FILE_SOURCES, "synthetic", *TOKEN_SOURCES)
SPLIT_SETTINGS = ("test_fraction", "split")
ENDINGS = list_endings(*FORMATS)
_SOURCE = (  # a docstring could not list the formats
    "digits: 1,797 real handwritten digits that ship with scikit-learn, unless data.path is given, "
    f"whose ending then decides; {', '.join(list_formats(TABLE, ARRAYS, MATRIX))}: the file at "
    "data.path, of parquet also a folder of them; images: a folder with a folder of images for "
    "each class; synthetic: made-up rows, for benchmarks; text: the bytes of any file; tokens: "
    "numbers in an npy file, or 16-bit ones in a bin file; package.module:factory: your own, see "
    "data.args."
)


Args = TypeVar("Args", bound=Section)


class DataConfig(Section):
    source: Annotated[Text, require_known(SOURCES), Field(description=_SOURCE)] = "digits"
    path: Text | None = None
    """The file or folder to read. Default of text: the licence and the documentation that come with
    Python."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the source, such as the missing values of a csv and the rows of synthetic:
    docs/settings.md lists them. The factory of your own is called with them."""
    target: Text | None = None
    """The column of a table, or the array of several, to predict. Default: the one named
    target, label, class or y. An npy file holds it in its last column."""
    task: Literal["auto", "classification", "multilabel", "regression", "tokens", "own"] = "auto"
    """What to learn. auto: the next token of the sources text and tokens; else classification
    where the target is text, boolean or whole numbers with at most 100 different values, multilabel
    where it has several columns of 0 and 1, else regression. own, of data of your own: whatever the
    model's own loss or train.loss makes of it, judged by that and by train.metrics alone."""
    memory_mib: Annotated[Float, Field(ge=64, le=2**30)] | None = None
    """Host memory that the data may take, in MiB, while it is prepared and on a CPU while it is
    trained on, where rows beyond half of it are read from disk. Default: what is free."""
    validation_fraction: Annotated[Float, Field(gt=0, lt=1)] = 0.2
    """Share of the rows kept for validation; stratified by class. Of tokens: the last ones."""
    test_fraction: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Share of the rows that are put aside and judged once, at the end, by the weights that are
    logged: test/ metrics. Nothing else ever looks at them. Not of data sets and loaders."""
    split: Text = "random"
    """How rows come into the parts. random: drawn, of each class the same share; time: the latest
    are for validation, and of these the very latest for the test, in the order of the rows;
    time:COLUMN: by this column of a table, which is learnt from too, unless data.args.drop names
    it; group:COLUMN: rows that are alike in this column, which is no feature, are in one part.
    Tokens are always split by their order. Not of data sets and loaders."""
    split_seed: Annotated[Int, Field(ge=0, lt=2**32)] = 0
    """Seed of the split. Apart from train.seed, so that runs with other seeds stay comparable."""
    scale: Bool = True
    """Standardize each feature with mean and deviation of the training rows (images: of all their
    pixels together). Tokens stay as they are."""
    target_transform: Literal["auto", "scale", "log", "raw"] = "auto"
    """What is learnt of a regression's target. scale: each of its columns standardized, with mean
    and deviation of the training rows; log: the same of log(1 + target / unit), where the unit is
    the median of the training rows above 0, for targets from 0 on; raw: the target as it is, as a
    model of your own needs it whose outputs are bounded (a softplus at the end). auto: log for one
    target that is skewed to the right, where boosted trees on a sample of the rows make smaller
    errors on the validation rows with it (mean absolute times root mean squared error, in the
    target's units); else scale. Predictions, all figures, and what a loss and metrics of your own
    are given are in the target's units all the same; val/loss is that of what is learnt. Data sets
    and loaders stay as they are."""
    cache: Annotated[Text, Field(min_length=1)] = ".headroom/data"
    """Folder for prepared arrays, reused by runs with the same data and settings."""

    @model_validator(mode="before")
    @classmethod
    def _choose_source(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("source", "digits") != "digits":
            return values
        path = values.get("path")
        if not isinstance(path, str) or not path:
            return values
        return {**values, "source": ENDINGS.get(PurePath(path).suffix.lower(), "digits")}

    @field_validator("split")
    @classmethod
    def _check_split_form(cls, split: str) -> str:
        if not re.fullmatch(r"random|time(:.+)?|group:.+", split, re.DOTALL):
            raise ValueError(
                f"must be random, time, time:COLUMN or group:COLUMN (got {split[:80]!r})"
            )
        return split

    @property
    def split_by(self) -> str:
        """Return how rows are split: random, time or group."""
        return self.split.partition(":")[0]

    @property
    def split_column(self) -> str | None:
        """Return the column of a table that rows are split by; None where there is none."""
        return self.split.partition(":")[2] or None

    @property
    def table(self) -> DelimitedArgs:
        """Return the arguments of a table; defaults of another source, and of a parquet's
        decimal mark."""
        return self._take(DelimitedArgs)

    @property
    def images(self) -> ImageArgs:
        return self._take(ImageArgs)

    @property
    def synthetic(self) -> SyntheticArgs:
        return self._take(SyntheticArgs)

    @property
    def tokens(self) -> TokenArgs:
        """Return the arguments of the sources text and tokens; defaults of another."""
        return self._take(TokenArgs)

    def _take(self, kind: type[Args]) -> Args:
        arguments = {} if is_import_path(self.source) else self.args
        return kind(**{name: v for name, v in arguments.items() if name in kind.model_fields})

    @field_validator("args")
    @classmethod
    def _check_arguments(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        source = info.data.get("source")
        is_unclear = source == "digits" and info.data.get("path")
        if source is not None and not is_unclear:  # else the source's own problem is told
            check_arguments("data.args", source, args)
        return args

    @property
    def own_split(self) -> dict[str, Any]:
        """Return the split settings (SPLIT_SETTINGS) that are not at their defaults."""
        usual = type(self).model_construct()
        return {n: v for n in SPLIT_SETTINGS if (v := getattr(self, n)) != getattr(usual, n)}

    @model_validator(mode="after")
    def _check_path(self) -> DataConfig:
        takes = (*FILE_SOURCES, *TOKEN_SOURCES)
        has_default = self.source == "text" and self.path is None
        if self.source in takes and not self.path and not has_default:
            raise ValueError(f"path: is needed for source {self.source}; name the file to read")
        if self.source == "digits" and self.path:
            raise ValueError(
                f"source: the ending of {self.path[:200]!r} does not tell; set data.source to one "
                f"of {', '.join(takes)}"
            )
        if self.source not in takes and self.path is not None:
            raise ValueError(
                f"path: has no meaning for source {self.source} (got {self.path!r}); "
                f"set data.source to one of {', '.join(takes)}"
            )
        for name, text in (("path", self.path or ""), ("cache", self.cache)):
            if "\0" in text:
                raise ValueError(f"{name}: must not hold a NUL character")
        return self

    @model_validator(mode="after")
    def _check_settings(self) -> DataConfig:
        if self.split_column is not None and self.source not in TABLE_FILES:
            raise ValueError(
                f"split: {self.split_by} needs a column of {', '.join(TABLE_FILES)} (the source is "
                f"{self.source}); set it to random or time"
            )
        return self

    @model_validator(mode="after")
    def _check_split(self) -> DataConfig:
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"test_fraction: {self.test_fraction:g} and data.validation_fraction "
                f"{self.validation_fraction:g} leave no row to train on; lower one"
            )
        if self.split_by == "time" and self.source in UNORDERED_SOURCES:
            raise ValueError(
                f"split: time needs rows that have an order (the source is {self.source}); set it "
                "to random"
            )
        return self

    @model_validator(mode="after")
    def _check_task(self) -> DataConfig:
        if self.source in TOKEN_SOURCES and self.task not in ("auto", "tokens"):
            raise ValueError(
                f"task: must be auto or tokens for source {self.source} (got {self.task}); drop it"
            )
        own = is_import_path(self.source)
        if self.source not in TOKEN_SOURCES and self.task == "tokens" and not own:
            raise ValueError(
                f"task: tokens needs source {' or '.join(TOKEN_SOURCES)} (got {self.source}); "
                "change one of them"
            )
        if self.task == "own" and not own:
            raise ValueError(
                f"task: own needs a source of your own (got {self.source}); change one of them"
            )
        return self


FUSED = ("adamw", "sgd")
WEIGHT_DECAY = 0.01  # of these, of an optimizer of one's own, and of AdamW
WEIGHT_DECAYS = {"Muon": 0.1, "AdamW": WEIGHT_DECAY}  # PyTorch's presets; else 0
LOSSES = ("auto", "cross_entropy", "bce", "mse")
_DEVICE = re.compile(r"(auto|gpu|cpu|mps|(cuda|rocm|xpu)(:[0-9]{1,4})?)")


class DeviceConfig(Section):
    name: Text = "auto"
    """Where to train: auto (the GPU with the most free memory, else the CPU), gpu (the same GPU,
    and no run where none works), cpu, mps, cuda, rocm or xpu, the last three also with an index:
    cuda:1."""
    wait_s: Annotated[Float, Field(ge=0, le=10**7)] = 86_400.0
    """Seconds to wait for a GPU on which another training of this project runs; first come, first
    served. Then the run is refused."""
    share: Bool = False
    """true: train beside others on the same GPU."""

    @field_validator("name")
    @classmethod
    def _check_form(cls, name: str) -> str:
        if not _DEVICE.fullmatch(name):
            raise ValueError(
                "must be auto, gpu, cuda, cuda:INDEX, rocm, rocm:INDEX, xpu, mps or cpu"
            )
        return name


class ModelConfig(Section):
    name: Annotated[Text, require_known(BUILTIN_ARGS)] = "mlp"
    """linear: one layer; mlp: fully connected; cnn: convolutions, for images; transformer: a GPT,
    for tokens; package.module:factory: your own, a class or function that gives an nn.Module."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the model. mlp: hidden (list of widths), dropout; cnn: width, dropout;
    transformer: layers, heads, width, dropout, positions (rope or learned). Your own is called with
    them, and with input_shape and outputs where it has parameters of these names."""
    freeze: list[Text] = Field(default_factory=list)
    """Parameters that are not trained, by patterns of their names, such as encoder.*; encoder alone
    is all of that module."""

    @model_validator(mode="after")
    def _check_arguments(self) -> ModelConfig:
        wrong = [] if is_import_path(self.name) else find_argument_problems(self.name, self.args)
        if wrong:
            raise ValueError(f"args: {'; '.join(wrong)}")
        return self


class GroupConfig(Section):
    """What a part of the model has for itself."""

    lr: Annotated[Float, Field(gt=0, le=1000)] | None = None
    weight_decay: Annotated[Float, Field(ge=0, le=1000)] | None = None


class OptimConfig(Section):
    name: Annotated[Text, require_known(OPTIMIZER_ARGS)] = "adamw"
    """adamw, sgd: fused, and replayed from a graph where that is faster; Adam, RMSprop, ...: the
    class of torch.optim, of which Muon trains matrices only; package.module:Class: your own, called
    with the parameters and, where it has parameters of these names, with lr and weight_decay."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the optimizer, such as the momentum of sgd and the betas of adamw:
    docs/settings.md lists them. Your own is called with them."""
    lr: Annotated[Float, Field(gt=0, le=1000)] = 2e-3
    """Peak learning rate."""
    weight_decay: Annotated[Float, Field(ge=0, le=1000)] | None = None
    """Decoupled (AdamW) or L2 (SGD) weight decay. Norms, biases (all parameters of one axis) and
    embeddings have none. Default: 0.01 of adamw, sgd and your own; of a class of torch.optim
    PyTorch's, 0 for most."""
    groups: dict[str, GroupConfig] = Field(default_factory=dict)
    """Parts of the model with a peak learning rate or a weight decay of their own, by patterns of
    parameter names: {"encoder.*": {lr: 1e-5}}. The first that matches counts; the schedule is that
    of all."""
    schedule: Annotated[Text, require_known(SCHEDULE_ARGS)] = "cosine"
    """Learning rate after the warm-up. cosine, linear: falling; constant; step: falling every so
    many epochs; plateau: falling where train.best_metric gets no better; one_cycle: PyTorch's
    OneCycleLR. package.module:function: your own, of the step (from 0) and the steps of the run,
    that gives the share of optim.lr there; without a warm-up."""
    schedule_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the schedule, such as the step_size of step: docs/settings.md lists them. Your
    own is called with them, by name."""
    warmup: Annotated[Float, Field(ge=0, le=10**12)] | None = None
    """In how many steps the learning rate rises, linearly from 0: a share of all where it is below
    1, else so many. Default: 0.05; of one_cycle 0.3."""
    clip_norm: Annotated[Float, Field(gt=0)] | None = None
    """Largest norm of all gradients together; larger ones are scaled down."""
    ema_decay: Annotated[Float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, such as 0.999: this average is then
    what is evaluated and logged. It takes as much memory as the weights."""

    @property
    def decay(self) -> float:
        """Return weight_decay, or what this optimizer presets."""
        if self.weight_decay is not None:
            return self.weight_decay
        is_torchs = self.name not in FUSED and not is_import_path(self.name)
        return WEIGHT_DECAYS.get(self.name, 0.0) if is_torchs else WEIGHT_DECAY

    @property
    def has_momentum(self) -> bool:
        """Return whether the optimizer keeps a momentum, which some may do without."""
        kind = OPTIMIZER_ARGS.get(self.name)
        args = kind(**self.args).model_dump() if kind else self.args
        return bool(args.get("momentum", True))

    @field_validator("args", "schedule_args")
    @classmethod
    def _check_arguments(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        owner = info.data.get("name" if info.field_name == "args" else "schedule")
        if owner is not None:  # else its own problem is told
            check_arguments(f"optim.{info.field_name}", owner, args)
        return args

    @field_validator("name", mode="before")
    @classmethod
    def _refuse_closures(cls, name: Any) -> Any:
        if isinstance(name, str) and name.lower() == "lbfgs":
            raise ValueError(
                f"the steps of {name} search along a line of the loss of all rows, and batches "
                "here are other ones each time; choose another"
            )
        return name

    @field_validator("warmup")
    @classmethod
    def _check_steps(cls, warmup: float | None) -> float | None:
        if warmup is not None and warmup > 1 and not warmup.is_integer():
            raise ValueError(f"must be a share below 1, or a whole number of steps (got {warmup})")
        return warmup

    @model_validator(mode="after")
    def _check_warm_up(self) -> OptimConfig:
        if self.warmup is not None and is_import_path(self.schedule):
            raise ValueError(
                f"warmup: is not for a schedule of your own ({self.schedule}), which gives the "
                "rate of every step; drop it"
            )
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> OptimConfig:
        for pattern, group in self.groups.items():
            if group.lr is None and group.weight_decay is None:
                raise ValueError(
                    f"groups: {pattern[:80]!r} must have lr, weight_decay or both; such as "
                    "{'encoder.*': {lr: 1e-5}}"
                )
        return self


class BestMetric(NamedTuple):
    """The metric by which weights are the best."""

    name: str
    is_lower: bool  # whether less is better


def parse_best_metric(text: str) -> BestMetric:
    """Return the metric of a name, or of min:NAME and max:NAME."""
    direction, _, name = text.rpartition(":")
    return BestMetric(name, direction == "min" if direction else is_lower_better(name))


def _is_clock(text: str) -> bool:
    try:
        datetime.strptime(text, "%H:%M" if len(text) == 5 else "%Y-%m-%d %H:%M")
    except ValueError:
        return False
    return True


def _is_duration(text: str) -> bool:
    return 0 < (parse_seconds(text) or 0) <= LONGEST_S


class TrainConfig(Section):
    epochs: Annotated[Int, Field(ge=1, le=10**6)] = 20
    """Passes over the training rows."""
    max_steps: Annotated[Int, Field(ge=1, le=10**12)] | None = None
    """Ends the training after so many optimizer steps, where its epochs have not done so before;
    needed where a loader of your own has no length."""
    end: Text | None = None
    """Ends the training for now, with a checkpoint: so long after it began, such as 6h, 45min, 90s
    or 1h30min, or at a time of the host's clock, such as 06:30, the next there is, or 2030-01-31
    06:30. Another run with the same run.key, or --resume, goes on from it."""
    batch_size: Annotated[Int, Field(ge=1, le=10**7)] = 64
    """Rows of one optimizer step."""
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """How several processes train one model: each with all of it (ddp, and auto), or with its share
    of weights, gradients and optimizer state (fsdp), for models that one device does not hold."""
    accumulate: Annotated[Int, Field(ge=1, le=10**5)] = 1
    """Micro-batches that one batch is split into; their gradients are summed before the step."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Arithmetic of the forward pass. auto: bf16 where the GPU computes in it, else tf32, else
    fp32; on a CPU fp32."""
    compile: Literal["auto", "off", "default", "max"] = "auto"
    """torch.compile: off, its default mode, or max-autotune. auto: measured in the first steps, and
    done where what is left of the run repays it; on CUDA a small step is replayed as a graph."""
    loss: Annotated[Text, require_known(LOSSES)] = "auto"
    """auto: cross_entropy for a classification and for tokens, bce (binary cross entropy) for a
    multilabel, mse (mean squared error) for a regression; where inputs have an entry labels and the
    model returns a loss, that one. package.module:function: your own, of outputs and targets, the
    mean over the rows."""
    loss_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the loss, such as the label_smoothing of cross_entropy: docs/settings.md lists
    them. Your own is called with them, by name."""
    metrics: dict[str, Text] = Field(default_factory=dict)
    """Validation metrics of your own, by name: package.module:function of outputs and targets, the
    mean over the rows of a batch; logged as val/NAME."""
    seed: Annotated[Int, Field(ge=0, lt=2**63)] = 0
    """Seed of the weights, the order of the rows and dropout."""
    deterministic: Bool = False
    """Only what gives the same bits again: algorithms, and nothing that is chosen by timing, which
    train.compile: auto is."""
    eval_every_steps: Annotated[Int, Field(ge=1, le=10**12)] | None = None
    """Optimizer steps between two evaluations within an epoch, beside the one at its end."""
    best_metric: Text = "val/loss"
    """The validation metric that tells which weights are best, such as val/accuracy; one of
    train.metrics with its direction: max:val/NAME or min:val/NAME."""
    patience: Annotated[Int, Field(ge=0, le=10**6)] = 0
    """Stop after this many evaluations, one an epoch as a rule, in which train.best_metric got no
    better; 0: never."""
    min_delta: Annotated[Float, Field(ge=0)] = 0.0
    """How much better it has to get to count for train.patience and for the schedule plateau."""
    keep: Literal["best", "last"] = "best"
    """Which weights are logged: the best by train.best_metric, or the last."""
    log_every: Annotated[Int, Field(ge=1, le=10**9)] = 10
    """Optimizer steps between two log points, at which the host waits for the device."""

    @field_validator("end", mode="before")
    @classmethod
    def _check_end(cls, end: Any) -> Any:
        if end is None or (isinstance(end, str) and (_is_clock(end) or _is_duration(end))):
            return end
        # A bare number is not taken for seconds: YAML 1.1 makes 990 of 16:30.
        raise ValueError(
            "must be how long, such as 6h, 45min or 90s, or a time of the clock in quotes, such as "
            "06:30 or 2030-01-31 06:30"
        )

    @field_validator("loss_args")
    @classmethod
    def _check_arguments(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        loss = info.data.get("loss")
        if loss is not None:  # else its own problem is told
            owner = "cross_entropy" if loss == "auto" else loss
            check_arguments("train.loss_args", owner, args)
        return args

    @property
    def cross_entropy(self) -> CrossEntropyArgs:
        """Return the arguments of the cross entropy; defaults of another loss."""
        is_other = self.loss not in ("auto", "cross_entropy")
        return CrossEntropyArgs(**({} if is_other else self.loss_args))

    @property
    def end_after_s(self) -> float | None:
        """Return the seconds after which the training ends; None where end is not given so."""
        return None if self.end is None else parse_seconds(self.end)

    @property
    def end_clock(self) -> str | None:
        """Return the time of the clock at which the training ends; None where end is none."""
        return self.end if self.end_after_s is None else None

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, metrics: dict[str, str]) -> dict[str, str]:
        for name, path in metrics.items():
            if not re.fullmatch(r"[A-Za-z0-9_ -]{1,50}", name):
                raise ValueError(f"names must be letters, digits, _ and - (got {name[:80]!r})")
            if is_taken(name):
                raise ValueError(
                    f"{name!r} is the name of a figure of the task itself; give yours another"
                )
            if not IMPORT_PATH.fullmatch(path):
                raise ValueError(f"{name} must be package.module:function (got {path[:80]!r})")
        return metrics

    @model_validator(mode="after")
    def _check_best_metric(self) -> TrainConfig:
        direction, colon, name = self.best_metric.rpartition(":")
        own = [f"val/{metric}" for metric in self.metrics]
        of_tasks = list_shown(Place.BEST_METRIC)
        choices = [*of_tasks, *own]
        if name not in choices or (colon and direction not in ("min", "max")):
            near = get_close_matches(f"val/{name.removeprefix('val/')}"[:80], choices, 1)
            raise ValueError(
                f"best_metric: must be one of {', '.join(choices)} (got {self.best_metric[:80]!r})"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        if name not in of_tasks and not colon:
            raise ValueError(f"best_metric: {name} is your own; say min:{name} or max:{name}")
        return self

    @property
    def best(self) -> BestMetric:
        """Return the metric that best_metric names."""
        return parse_best_metric(self.best_metric)

    @model_validator(mode="after")
    def _check_micro_batches(self) -> TrainConfig:
        if self.accumulate > self.batch_size:
            raise ValueError(
                f"accumulate: must be at most train.batch_size "
                f"(got {self.accumulate} for a batch of {self.batch_size})"
            )
        return self


_STEPS = re.compile(r"([1-9][0-9]{0,11}) ?steps?")


class CheckpointConfig(Section):
    every: Text | None = "5min"
    """How long from one checkpoint to the next, such as 5min or 90s, or how many optimizer steps,
    such as 500steps. A training that was ended goes on from the last; there is also one at the end
    and at a signal. none: there are none at all."""
    keep: Annotated[Int, Field(ge=1, le=10**4)] = 2
    """How many of the newest checkpoints stay, beside that of the best epoch."""

    @field_validator("every", mode="before")
    @classmethod
    def _check_every(cls, every: Any) -> Any:
        is_text = isinstance(every, str)
        if every is None or (is_text and (_is_duration(every) or _STEPS.fullmatch(every))):
            return every
        raise ValueError(
            "must be how long, such as 5min or 90s, or how many steps, such as 500steps, or none"
        )

    @property
    def every_s(self) -> float | None:
        """Return the seconds between two checkpoints; None where steps are counted, or none is
        written."""
        return None if self.every is None else parse_seconds(self.every)

    @property
    def every_steps(self) -> int | None:
        """Return the steps between two checkpoints; None where time is counted, or none is
        written."""
        counted = _STEPS.fullmatch(self.every or "")
        return int(counted[1]) if counted else None

    @property
    def is_on(self) -> bool:
        return self.every is not None


class MemoryConfig(Section):
    on_leak: Literal["warn", "fail"] = "warn"
    """What to do when memory is not given back at the end: name its owners, or fail the run."""
    limit_mib: Annotated[Float, Field(gt=0, le=2**30)] | None = None
    """The most memory this run may allocate on its device, in MiB. A CPU, which has no allocator
    that keeps it, counts all tensors, which makes short steps slower."""
    recompute: Bool = False
    """Drop what the forward pass of a block leaves, and compute it again for its backward pass:
    activations take less memory, a step about a third more time. Blocks are those of nn.Sequential
    and nn.ModuleList; transformers models do it by their gradient_checkpointing_enable()."""
    wait_s: Annotated[Float, Field(ge=0, le=10**6)] = 0.0
    """Seconds to wait for memory that other processes hold, where not even one row fits. Then the
    run is refused."""
    snapshot: Bool = False
    """Keep what the allocator of CUDA or ROCm does, to be looked at in pytorch.org/memory_viz; also
    kept, for the last attempt, when memory runs out."""


class GateConfig(Section):
    fail: Bool = False
    """true: a run that is slower, larger or worse than the last good ones of the same settings,
    data and device model ends its flow run as failed, with exit code 1; the run in MLflow is
    finished, and keeps its model. See docs/schedule.md."""


def is_web_address(place: str) -> bool:
    """Return whether messages go to an address, and not to a command."""
    return place.lower().startswith(("http://", "https://"))


def find_notify_problem(place: str) -> str:
    """Return why no message could go there, without the place, which is a secret; else nothing."""
    rule = "must be an http(s) address or a command; what it got is a secret, and not shown"
    try:
        if is_web_address(place):
            return "" if urlsplit(place).hostname else rule
        words = shlex.split(place)
    except ValueError:
        return rule
    return rule if words and "://" in words[0] else ""


class RunSettings(Section):
    name: Name | None = None
    """Name of the run in MLflow. Default: model, source and time."""
    experiment: Name | None = None
    """MLflow experiment. Default: what mlflow.yaml says."""
    key: Name | None = None
    """Name of a training that may take several nights: another run with the same key goes on where
    the last one was ended, in the same MLflow run. A flow run that Prefect starts again does so by
    itself."""
    retries: Annotated[Int, Field(ge=0, le=1000)] = 2
    """How often a training that failed begins again, in a new process and from its last checkpoint,
    where that may help: the device was lost, other processes held its memory, or a server was away.
    The first does so after half a minute, each next one after twice as long, up to ten minutes. The
    count begins anew once there is a newer checkpoint. 0: never."""
    notify: Annotated[Text, PRINTABLE] = ""
    """Where messages of this run go, which never delay it: alerts while it trains, and its end. The
    http(s) address of a webhook (Slack's, or one that takes the same; ntfy), or a command, which
    gets the text on its stdin. All of it is a secret. Empty: nowhere."""
    registered_model: Annotated[Text, Field(max_length=250), PRINTABLE] = ""
    """Registered model in MLflow that the run's model becomes a version of: challenger where the
    run passed its gate, champion where it also has the best validation. Empty: none."""

    @field_validator("notify")
    @classmethod
    def _check_place(cls, place: str) -> str:
        if problem := find_notify_problem(place):
            raise ValueError(problem)
        return place

    @field_validator("registered_model")
    @classmethod
    def _check_registrable(cls, name: str) -> str:
        if set(name) & set("/:") or name == "." or name.startswith(".."):
            raise ValueError(
                f"must be a name that MLflow takes: without / and :, not beginning with .. "
                f"(got {name[:80]!r})"
            )
        return name


class RunConfig(Section):
    """All settings of one training run."""

    device: DeviceConfig = DeviceConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    memory: MemoryConfig = MemoryConfig()
    gate: GateConfig = GateConfig()
    launch: LaunchConfig = LaunchConfig()
    run: RunSettings = RunSettings()

    def flat(self) -> dict[str, Any]:
        """Return the settings under their dotted names, in order; model.args stays one
        value."""
        sections = self.model_dump()
        return {f"{s}.{k}": v for s, fields in sections.items() for k, v in fields.items()}
