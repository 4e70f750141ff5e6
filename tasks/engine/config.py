"""What a run is asked to do: one frozen, typed object in sections, each name of which is a flag,
a YAML key, a field of Prefect's form and an MLflow param. It holds no defaults for the machine
(that is `device.py`) and no place where results go (that is `mlflow.yaml`); it refuses what it
does not know, and a value of the wrong type is never bent into the right one.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, field_validator, model_validator

Int = Annotated[int, Strict()]  # `true` is not 1
Float = Annotated[float, Strict(), Field(allow_inf_nan=False)]
Bool = Annotated[bool, Strict()]  # "yes" is not true
Text = Annotated[str, Strict(), Field(max_length=4096)]

DEVICE_KINDS = ("cuda", "rocm", "mps", "xpu", "cpu")
TABLE_FILES = ("csv", "parquet", "npz", "npy")
TOKEN_SOURCES = ("text", "tokens")
_DEVICE = re.compile(r"(auto|gpu|cpu|mps|(cuda|rocm|xpu)(:[0-9]{1,4})?)")


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True
    )


class DeviceConfig(Section):
    name: Text = "auto"
    """Where to train: auto (the GPU with the most free memory, else the CPU), cpu, mps, cuda, rocm
    or xpu, the last three also with an index: cuda:1."""
    require: Literal["any", "gpu"] = "any"
    """gpu: stop where no GPU works, instead of falling back to the CPU."""

    @field_validator("name")
    @classmethod
    def _known_form(cls, name: str) -> str:
        if not _DEVICE.fullmatch(name) or name == "gpu":
            raise ValueError("must be auto, cuda, cuda:INDEX, rocm, rocm:INDEX, xpu, mps or cpu")
        return name

    @model_validator(mode="after")
    def _not_contradicting(self) -> DeviceConfig:
        if self.require == "gpu" and self.name == "cpu":
            raise ValueError("name is cpu but require is gpu; drop one of them")
        return self


class DataConfig(Section):
    source: Literal["digits", "csv", "parquet", "npz", "npy", "synthetic", "text", "tokens"] = (
        "digits"
    )
    """digits: 1,797 real handwritten digits that ship with scikit-learn; csv, parquet, npz, npy:
    the file at data.path; synthetic: made-up rows, for benchmarks; text: the bytes of any file;
    tokens: numbers in an npy file, or 16-bit ones in a bin file."""
    path: Text | None = None
    """The file to read, for the sources csv, parquet, npz, npy, tokens and text. Default of text:
    the licence and the documentation that come with Python."""
    target: Text | None = None
    """The column (csv, parquet) or array (npz) to predict. Default: a column named target, label,
    class or y. An npy file holds it in its last column."""
    task: Literal["auto", "classification", "regression", "tokens"] = "auto"
    """What to learn. auto: the next token of the sources text and tokens; else classification
    where the target is text, boolean or whole numbers with at most 100 different values, else
    regression."""
    validation_fraction: Annotated[Float, Field(gt=0, lt=1)] = 0.2
    """Share of the rows kept for validation; stratified by class. Of tokens: the last ones."""
    split_seed: Annotated[Int, Field(ge=0, lt=2**32)] = 0
    """Seed of the split. Apart from train.seed, so that runs with other seeds stay comparable."""
    scale: Bool = True
    """Standardize each feature with mean and deviation of the training rows (images: of all their
    pixels together). Tokens stay as they are."""
    rows: Annotated[Int, Field(ge=10, le=10**9)] = 10_000
    """Rows of the synthetic source."""
    features: Annotated[Int, Field(ge=1, le=10**6)] = 64
    """Features of the synthetic source."""
    classes: Annotated[Int, Field(ge=1, le=10**5)] = 10
    """Classes of the synthetic source; 1 makes a regression."""
    context: Annotated[Int, Field(ge=1, le=2**20)] = 128
    """Tokens that one row of the sources text and tokens holds: as far as the model looks back."""
    vocab: Annotated[Int, Field(ge=2, le=2**16)] | None = None
    """Different tokens of the source tokens. Default: the largest in the file plus 1; give it where
    the file may lack some, such as 50257 for GPT-2's."""
    cache: Annotated[Text, Field(min_length=1)] = ".headroom/data"
    """Folder for prepared arrays, reused by runs with the same data and settings."""

    @model_validator(mode="after")
    def _path_fits_source(self) -> DataConfig:
        takes = (*TABLE_FILES, *TOKEN_SOURCES)
        has_default = self.source == "text" and self.path is None
        if self.source in takes and not self.path and not has_default:
            raise ValueError(f"path: is needed for source {self.source}; name the file to read")
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
    def _task_fits_source(self) -> DataConfig:
        if self.source in TOKEN_SOURCES and self.task not in ("auto", "tokens"):
            raise ValueError(
                f"task: must be auto or tokens for source {self.source} (got {self.task}); drop it"
            )
        if self.source not in TOKEN_SOURCES and self.task == "tokens":
            raise ValueError(
                f"task: tokens needs source {' or '.join(TOKEN_SOURCES)} (got {self.source}); "
                "change one of them"
            )
        return self


class ModelConfig(Section):
    name: Literal["linear", "mlp", "cnn", "transformer"] = "mlp"
    """linear: one layer; mlp: fully connected; cnn: convolutions, for images; transformer: a GPT,
    for tokens."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the model. mlp: hidden (list of widths), dropout; cnn: width, dropout;
    transformer: layers, heads, width, dropout, positions (rope or learned)."""


class OptimConfig(Section):
    name: Literal["adamw", "sgd"] = "adamw"
    """The optimizer."""
    lr: Annotated[Float, Field(gt=0, le=1000)] = 2e-3
    """Peak learning rate."""
    weight_decay: Annotated[Float, Field(ge=0, le=1000)] = 0.01
    """Decoupled (AdamW) or L2 (SGD) weight decay."""
    momentum: Annotated[Float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD (Nesterov); AdamW's beta1."""
    beta2: Annotated[Float, Field(ge=0, lt=1)] = 0.999
    """AdamW's beta2."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up: falling to 0 along a cosine, or constant."""
    warmup_fraction: Annotated[Float, Field(ge=0, le=1)] = 0.05
    """Share of all steps in which the learning rate rises linearly from 0."""
    clip_norm: Annotated[Float, Field(gt=0)] | None = None
    """Largest norm of all gradients together; larger ones are scaled down."""


class TrainConfig(Section):
    epochs: Annotated[Int, Field(ge=1, le=10**6)] = 20
    """Passes over the training rows."""
    batch_size: Annotated[Int, Field(ge=1, le=10**7)] = 64
    """Rows of one optimizer step."""
    accumulate: Annotated[Int, Field(ge=1, le=10**5)] = 1
    """Micro-batches that one batch is split into; their gradients are summed before the step."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """Arithmetic of the forward pass. auto: bf16 where the GPU computes in it, else tf32, else
    fp32; on a CPU fp32."""
    compile: Literal["auto", "off", "default", "max"] = "auto"
    """torch.compile: off, its default mode, or max-autotune. auto: measured in the first steps, and
    done where what is left of the run repays it; on CUDA a small step is replayed as a graph."""
    loss: Literal["auto", "cross_entropy", "mse"] = "auto"
    """auto: cross entropy for a classification and for tokens, mean squared error for a
    regression."""
    seed: Annotated[Int, Field(ge=0, lt=2**63)] = 0
    """Seed of the weights, the order of the rows and dropout."""
    deterministic: Bool = False
    """Only what gives the same bits again: algorithms, and threads not chosen by timing."""
    patience: Annotated[Int, Field(ge=0, le=10**6)] = 0
    """Stop after this many epochs without a better validation loss, and keep the best weights;
    0: never."""
    log_every: Annotated[Int, Field(ge=1, le=10**9)] = 10
    """Optimizer steps between two log points, at which the host waits for the device."""

    @model_validator(mode="after")
    def _micro_batch_holds_a_row(self) -> TrainConfig:
        if self.accumulate > self.batch_size:
            raise ValueError(
                f"accumulate: must be at most train.batch_size "
                f"(got {self.accumulate} for a batch of {self.batch_size})"
            )
        return self


class MemoryConfig(Section):
    on_leak: Literal["warn", "fail"] = "warn"
    """What to do when memory is not given back at the end: name its owners, or fail the run."""
    limit_mib: Annotated[Float, Field(gt=0, le=2**30)] | None = None
    """The most memory this run may allocate on its device, in MiB. A CPU, which has no allocator
    that keeps it, counts all tensors, which makes short steps slower."""
    wait_s: Annotated[Float, Field(ge=0, le=10**6)] = 0.0
    """Seconds to wait for memory that other processes hold, where not even one row fits. Then the
    run is refused."""
    snapshot: Bool = False
    """Keep what the allocator of CUDA or ROCm does, to be looked at in pytorch.org/memory_viz; also
    kept, for the last attempt, when memory runs out."""


class RunSettings(Section):
    name: Annotated[Text, Field(min_length=1, max_length=250)] | None = None
    """Name of the run in MLflow. Default: model, source and time."""
    experiment: Annotated[Text, Field(min_length=1, max_length=250)] | None = None
    """MLflow experiment. Default: what mlflow.yaml says."""

    @field_validator("name", "experiment")
    @classmethod
    def _printable(cls, text: str | None) -> str | None:
        if text is not None and (not text.isprintable() or not text.strip()):
            raise ValueError("must be printable text on one line")
        return text


class RunConfig(Section):
    """Everything that one training run is asked to do."""

    device: DeviceConfig = DeviceConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    memory: MemoryConfig = MemoryConfig()
    run: RunSettings = RunSettings()

    def flat(self) -> dict[str, Any]:
        """The settings under their dotted names, in order; model.args stays one value."""
        sections = self.model_dump()
        return {f"{s}.{k}": v for s, fields in sections.items() for k, v in fields.items()}
