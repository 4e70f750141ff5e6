"""What a run is asked to do: one frozen, typed object in sections, each name of which is a flag,
a YAML key, a field of Prefect's form and an MLflow param. It holds no defaults for the machine
(that is `device/`) and no place where results go (that is `mlflow.yaml`); it refuses what it
does not know, and a value of the wrong type is never bent into the right one.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tasks.engine.base.field_types import IMPORT, Bool, Float, Int, Section, Text, known_or_imported
from tasks.engine.settings.data_config import DataConfig
from tasks.engine.settings.launch_config import LaunchConfig

MODELS = ("linear", "mlp", "cnn", "transformer")
FUSED = ("adamw", "sgd")
TORCH_OPTIMIZERS = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam"),
    *("RAdam", "RMSprop", "Rprop", "SGD"),
)
SCHEDULES = ("cosine", "constant")
LOSSES = ("auto", "cross_entropy", "bce", "mse")
_DEVICE = re.compile(r"(auto|cpu|mps|(cuda|rocm|xpu)(:[0-9]{1,4})?)")


class DeviceConfig(Section):
    name: Text = "auto"
    """Where to train: auto (the GPU with the most free memory, else the CPU), cpu, mps, cuda, rocm
    or xpu, the last three also with an index: cuda:1."""
    require: Literal["any", "gpu"] = "any"
    """gpu: stop where no GPU works, instead of falling back to the CPU."""
    wait_s: Annotated[Float, Field(ge=0, le=10**7)] = 86_400.0
    """Seconds to wait for a GPU on which another training of this project runs; first come, first
    served. Then the run is refused."""
    share: Bool = False
    """true: train beside others on the same GPU."""

    @field_validator("name")
    @classmethod
    def _known_form(cls, name: str) -> str:
        if not _DEVICE.fullmatch(name):
            raise ValueError("must be auto, cuda, cuda:INDEX, rocm, rocm:INDEX, xpu, mps or cpu")
        return name

    @model_validator(mode="after")
    def _not_contradicting(self) -> DeviceConfig:
        if self.require == "gpu" and self.name == "cpu":
            raise ValueError("name: is cpu but require is gpu; drop one of them")
        return self


class ModelConfig(Section):
    name: Text = "mlp"
    """linear: one layer; mlp: fully connected; cnn: convolutions, for images; transformer: a GPT,
    for tokens; package.module:factory: your own, a class or function that gives an nn.Module."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the model. mlp: hidden (list of widths), dropout; cnn: width, dropout;
    transformer: layers, heads, width, dropout, positions (rope or learned). Your own is called with
    them, and with input_shape and outputs where it has parameters of these names."""

    @field_validator("name")
    @classmethod
    def _known_model(cls, name: str) -> str:
        return known_or_imported(name, MODELS)


class OptimConfig(Section):
    name: Text = "adamw"
    """adamw, sgd: fused, and replayed from a graph where that is faster; Adam, RMSprop, ...: the
    class of torch.optim; package.module:Class: your own, called with the parameters and, where it
    has parameters of these names, with lr, weight_decay, momentum and betas."""
    lr: Annotated[Float, Field(gt=0, le=1000)] = 2e-3
    """Peak learning rate."""
    weight_decay: Annotated[Float, Field(ge=0, le=1000)] = 0.01
    """Decoupled (AdamW) or L2 (SGD) weight decay. Norms, biases (all parameters of one axis) and
    embeddings have none."""
    momentum: Annotated[Float, Field(ge=0, lt=1)] = 0.9
    """Momentum of SGD (Nesterov); AdamW's beta1."""
    beta2: Annotated[Float, Field(ge=0, lt=1)] = 0.999
    """AdamW's beta2."""
    schedule: Text = "cosine"
    """Learning rate after the warm-up: falling along a cosine, or constant.
    package.module:function: your own, of the step (from 0) and the steps of the run, that gives the
    share of optim.lr there; without a warm-up."""
    min_lr_fraction: Annotated[Float, Field(ge=0, le=1)] = 0.0
    """Share of the peak learning rate that the cosine falls to."""
    warmup_fraction: Annotated[Float, Field(ge=0, le=1)] = 0.05
    """Share of all steps in which the learning rate rises linearly from 0."""
    clip_norm: Annotated[Float, Field(gt=0)] | None = None
    """Largest norm of all gradients together; larger ones are scaled down."""

    @field_validator("name")
    @classmethod
    def _known_optimizer(cls, name: str) -> str:
        if name.lower() == "lbfgs":
            raise ValueError(
                f"the steps of {name} need a closure that computes the loss anew, and batches here "
                "are seen once; choose another"
            )
        return known_or_imported(name, (*FUSED, *TORCH_OPTIMIZERS))

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, name: str) -> str:
        return known_or_imported(name, SCHEDULES)


class TrainConfig(Section):
    epochs: Annotated[Int, Field(ge=1, le=10**6)] = 20
    """Passes over the training rows."""
    max_steps: Annotated[Int, Field(ge=1, le=10**12)] | None = None
    """Ends the training after so many optimizer steps, where its epochs have not done so before;
    needed where a loader of your own has no length."""
    max_s: Annotated[Float, Field(gt=0, le=10**8)] | None = None
    """Ends the training for now after so many seconds of this run, with a checkpoint. Another run
    with the same run.key, or --resume, goes on from it."""
    until: Text | None = None
    """The same at a time of the host's clock: HH:MM, the next there is, or YYYY-MM-DD HH:MM."""
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
    loss: Text = "auto"
    """auto: cross_entropy for a classification and for tokens, bce (binary cross entropy) for a
    multilabel, mse (mean squared error) for a regression; where inputs have an entry labels and the
    model returns a loss, that one. package.module:function: your own, of outputs and targets, the
    mean over the rows."""
    metrics: dict[str, Text] = Field(default_factory=dict)
    """Validation metrics of your own, by name: package.module:function of outputs and targets, the
    mean over the rows of a batch; logged as val/NAME."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: each class of a classification weighs as much as the others, however few its
    rows."""
    seed: Annotated[Int, Field(ge=0, lt=2**63)] = 0
    """Seed of the weights, the order of the rows and dropout."""
    deterministic: Bool = False
    """Only what gives the same bits again: algorithms, and nothing that is chosen by timing, which
    threads and train.compile: auto are."""
    patience: Annotated[Int, Field(ge=0, le=10**6)] = 0
    """Stop after this many epochs without a better validation loss; 0: never."""
    keep: Literal["best", "last"] = "best"
    """Which weights are logged: those of the epoch with the lowest validation loss, or the last."""
    log_every: Annotated[Int, Field(ge=1, le=10**9)] = 10
    """Optimizer steps between two log points, at which the host waits for the device."""

    @field_validator("until")
    @classmethod
    def _time_of_day(cls, until: str | None) -> str | None:
        if until is None:
            return None
        try:
            datetime.strptime(until, "%H:%M" if len(until) == 5 else "%Y-%m-%d %H:%M")
        except ValueError:
            raise ValueError(
                f"must be a time such as 06:30 or 2030-01-31 06:30 (got {until[:80]!r})"
            ) from None
        return until

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, name: str) -> str:
        return known_or_imported(name, LOSSES)

    @field_validator("metrics")
    @classmethod
    def _imported_metrics(cls, metrics: dict[str, str]) -> dict[str, str]:
        for name, path in metrics.items():
            if not re.fullmatch(r"[A-Za-z0-9_ -]{1,50}", name):
                raise ValueError(f"names must be letters, digits, _ and - (got {name[:80]!r})")
            if not IMPORT.fullmatch(path):
                raise ValueError(f"{name} must be package.module:function (got {path[:80]!r})")
        return metrics

    @model_validator(mode="after")
    def _micro_batch_holds_a_row(self) -> TrainConfig:
        if self.accumulate > self.batch_size:
            raise ValueError(
                f"accumulate: must be at most train.batch_size "
                f"(got {self.accumulate} for a batch of {self.batch_size})"
            )
        return self


class CheckpointConfig(Section):
    every_s: Annotated[Float, Field(gt=0, le=10**7)] | None = 300.0
    """Seconds between two checkpoints, from which a training that was ended goes on; also one at
    the end and at a signal. none, with every_steps none: there are none at all."""
    every_steps: Annotated[Int, Field(ge=1, le=10**12)] | None = None
    """Optimizer steps between two checkpoints, beside those by time."""
    keep: Annotated[Int, Field(ge=1, le=10**4)] = 2
    """How many of the newest checkpoints stay, beside that of the best epoch."""

    @property
    def is_on(self) -> bool:
        return self.every_s is not None or self.every_steps is not None


class MemoryConfig(Section):
    on_leak: Literal["warn", "fail"] = "warn"
    """What to do when memory is not given back at the end: name its owners, or fail the run."""
    limit_mib: Annotated[Float, Field(gt=0, le=2**30)] | None = None
    """The most memory this run may allocate on its device, in MiB. A CPU, which has no allocator
    that keeps it, counts all tensors, which makes short steps slower."""
    recompute: Bool = False
    """Drop what the forward pass of a block leaves, and compute it again for its backward pass:
    activations take less memory, a step about a third more time."""
    wait_s: Annotated[Float, Field(ge=0, le=10**6)] = 0.0
    """Seconds to wait for memory that other processes hold, where not even one row fits. Then the
    run is refused."""
    snapshot: Bool = False
    """Keep what the allocator of CUDA or ROCm does, to be looked at in pytorch.org/memory_viz; also
    kept, for the last attempt, when memory runs out."""


class GateConfig(Section):
    last: Annotated[Int, Field(ge=5, le=30)] = 20
    """Good runs of the same settings, data and device model whose median a finished run is compared
    with; it needs five. See docs/schedule.md."""
    fail: Bool = False
    """true: a run that is slower, larger or worse than them ends its flow run as failed, with exit
    code 1; the run in MLflow is finished, and keeps its model."""


class RunSettings(Section):
    name: Annotated[Text, Field(min_length=1, max_length=250)] | None = None
    """Name of the run in MLflow. Default: model, source and time."""
    experiment: Annotated[Text, Field(min_length=1, max_length=250)] | None = None
    """MLflow experiment. Default: what mlflow.yaml says."""

    key: Annotated[Text, Field(min_length=1, max_length=250)] | None = None
    """Name of a training that may take several nights: another run with the same key goes on where
    the last one was ended, in the same MLflow run. A flow run that Prefect starts again does so by
    itself."""
    retries: Annotated[Int, Field(ge=0, le=1000)] = 2
    """How often a training that failed begins again, in a new process and from its last checkpoint,
    where that may help: the device was lost, other processes held its memory, or a server was away.
    The count begins anew once there is a newer checkpoint. 0: never."""
    retry_wait_s: Annotated[Float, Field(ge=0, le=600)] = 30.0
    """Seconds before the first of these; each next one waits twice as long, up to ten minutes."""
    registered_model: Annotated[Text, Field(max_length=250)] = ""
    """Registered model in MLflow that the run's model becomes a version of: challenger where the
    run passed its gate, champion where it also has the best validation. Empty: none."""

    @field_validator("name", "experiment", "key")
    @classmethod
    def _printable(cls, text: str | None) -> str | None:
        if text is not None and (not text.isprintable() or not text.strip()):
            raise ValueError("must be printable text on one line")
        return text

    @field_validator("registered_model")
    @classmethod
    def _registrable(cls, name: str) -> str:
        if name and (not name.isprintable() or not name.strip()):
            raise ValueError("must be printable text on one line")
        if set(name) & set("/:") or name == "." or name.startswith(".."):
            raise ValueError(
                f"must be a name that MLflow takes: without / and :, not beginning with .. "
                f"(got {name[:80]!r})"
            )
        return name


class RunConfig(Section):
    """Everything that one training run is asked to do."""

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
        """The settings under their dotted names, in order; model.args stays one value."""
        sections = self.model_dump()
        return {f"{s}.{k}": v for s, fields in sections.items() for k, v in fields.items()}
