"""What the optimizers, the schedules, the losses and the sources of data take under `optim.args`,
`optim.schedule_args`, `train.loss_args` and `data.args`: one class each, with the limits and
defaults of its arguments. They are checked here by their names, before anything is read or built.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from headroom.base.import_paths import is_import_path
from headroom.settings.file_formats import ARRAYS, FORMATS, IMAGES, MATRIX, TABLE, TEXT, TOKENS
from headroom.settings.section import Bool, Float, Int, Section, Text

Beta = Annotated[Float, Field(ge=0, lt=1)]
Factor = Annotated[Float, Field(gt=0, lt=1)]
Positive = Annotated[Float, Field(gt=0)]
NotNegative = Annotated[Float, Field(ge=0)]
UNKNOWN_ARGUMENT = "unknown_argument"  # the kind of such an error


class BetasArgs(Section):
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decays of the averages of the gradient and of its square."""
    eps: NotNegative = 1e-8
    """Added to what the gradient is divided by."""


class AmsgradArgs(BetasArgs):
    amsgrad: Bool = False
    """Divide by the largest average of squares that there was."""


class MomentumArgs(Section):
    momentum: Beta = 0.9
    """Momentum; 0: none, and no state."""
    nesterov: Bool = True
    """Nesterov's momentum."""


class AdadeltaArgs(Section):
    rho: Annotated[Float, Field(ge=0, le=1)] = 0.9
    """Decay of the average of squares."""
    eps: NotNegative = 1e-6
    """Added to what the gradient is divided by."""


class AdafactorArgs(Section):
    beta2_decay: Annotated[Float, Field(le=0)] = -0.8
    """Power of the step by which the average of squares decays."""
    d: Annotated[Float, Field(ge=1)] = 1.0
    """Largest root mean square of an update."""


class AdagradArgs(Section):
    lr_decay: NotNegative = 0.0
    """How the learning rate falls with the steps."""
    initial_accumulator_value: NotNegative = 0.0
    """What the sum of squares begins with."""
    eps: NotNegative = 1e-10
    """Added to what the gradient is divided by."""


class AsgdArgs(Section):
    lambd: Float = 1e-4
    """Decay of the terms."""
    alpha: Float = 0.75
    """Power by which the learning rate falls."""
    t0: Float = 1e6
    """Step from which on weights are averaged."""


class MuonArgs(Section):
    momentum: Beta = 0.95
    """Momentum; 0: none, and no state."""
    nesterov: Bool = True
    """Nesterov's momentum."""
    ns_steps: Annotated[Int, Field(ge=1, lt=100)] = 5
    """Steps of the Newton-Schulz iteration."""
    eps: NotNegative = 1e-7
    """Added to what the gradient is divided by."""


class NadamArgs(BetasArgs):
    momentum_decay: NotNegative = 4e-3
    """Decay of the momentum."""


class RmspropArgs(Section):
    alpha: NotNegative = 0.99
    """Decay of the average of squares."""
    momentum: Beta = 0.0
    """Momentum; 0: none, and no state."""
    centered: Bool = False
    """Divide by an estimate of the gradient's variance."""
    eps: NotNegative = 1e-8
    """Added to what the gradient is divided by."""


class RpropArgs(Section):
    etas: tuple[Factor, Annotated[Float, Field(gt=1)]] = (0.5, 1.2)
    """What a step size is multiplied by after a change of sign, and else."""
    step_sizes: tuple[Positive, Positive] = (1e-6, 50.0)
    """The smallest and the largest step size."""


class TorchSgdArgs(Section):
    momentum: Beta = 0.0
    """Momentum; 0: none, and no state."""
    dampening: Float = 0.0
    """Share of the gradient that the momentum leaves out."""
    nesterov: Bool = False
    """Nesterov's momentum."""


OPTIMIZER_ARGS: dict[str, type[Section]] = {
    "adamw": BetasArgs,
    "sgd": MomentumArgs,
    "Adadelta": AdadeltaArgs,
    "Adafactor": AdafactorArgs,
    "Adagrad": AdagradArgs,
    "Adam": AmsgradArgs,
    "AdamW": AmsgradArgs,
    "Adamax": BetasArgs,
    "ASGD": AsgdArgs,
    "Muon": MuonArgs,
    "NAdam": NadamArgs,
    "RAdam": BetasArgs,
    "RMSprop": RmspropArgs,
    "Rprop": RpropArgs,
    "SGD": TorchSgdArgs,
}


class NoArgs(Section):
    pass


class FallingArgs(Section):
    min_lr_fraction: Annotated[Float, Field(ge=0, le=1)] = 0.0
    """Share of optim.lr that the rate falls to, at most."""


class StepArgs(Section):
    step_size: Annotated[Int, Field(ge=1, le=10**6)] = 30
    """Epochs between two falls."""
    gamma: Factor = 0.1
    """What each fall multiplies the rate by."""


class PlateauArgs(FallingArgs):
    factor: Factor = 0.1
    """What each fall multiplies the rate by."""
    patience: Annotated[Int, Field(ge=0, le=10**6)] = 10
    """Evaluations without an improvement that are waited for; at the next one the rate falls."""


SCHEDULE_ARGS: dict[str, type[Section]] = {
    "cosine": FallingArgs,
    "constant": NoArgs,
    "linear": FallingArgs,
    "step": StepArgs,
    "plateau": PlateauArgs,
    "one_cycle": NoArgs,
}


class CrossEntropyArgs(Section):
    label_smoothing: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Share of each label that all classes get, as nn.CrossEntropyLoss has it. It is of training
    alone: val/loss stays what can be compared."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: each class of a classification weighs as much as the others, however few its
    rows."""


# auto is cross_entropy where it takes these; of another task they are refused when that is known.
LOSS_ARGS: dict[str, type[Section]] = {
    "cross_entropy": CrossEntropyArgs,
    "bce": NoArgs,
    "mse": NoArgs,
}


class TableArgs(Section):
    drop: list[Text] = Field(default_factory=list)
    """Columns to leave out."""
    missing: Literal["fail", "drop", "mean"] = "fail"
    """Rows with missing features. fail: refuse them; drop: leave them out; mean: take the mean of
    the training rows, and for text the category `missing`."""
    na: list[Text] | None = None
    """Words that mean missing, beside the empty cell; also numbers, in quotes: ["-999"]. Null: NA,
    N/A, NULL, NaN and the like in files of text, none in parquet."""


class DelimitedArgs(TableArgs):
    decimal: Literal[".", ","] = "."
    """The decimal mark of numbers."""


class ImageArgs(Section):
    image_size: Annotated[Int, Field(ge=4, le=4096)] = 64
    """Pixels of a side to which the square in the middle of each image is resized."""


class SyntheticArgs(Section):
    rows: Annotated[Int, Field(ge=10, le=10**9)] = 10_000
    """Rows that are made up."""
    features: Annotated[Int, Field(ge=1, le=10**6)] = 64
    """Their features."""
    classes: Annotated[Int, Field(ge=1, le=10**5)] = 10
    """Their classes; 1 makes a regression."""


class TextArgs(Section):
    context: Annotated[Int, Field(ge=1, le=2**20)] = 128
    """Tokens that one row holds: as far as the model looks back."""


class TokenArgs(TextArgs):
    vocab: Annotated[Int, Field(ge=2, le=2**16)] | None = None
    """Different tokens. Null: the largest in the file plus 1; give it where the file may lack some,
    such as 50257 for GPT-2's."""


_OF_KINDS: dict[str, type[Section]] = {
    TABLE: TableArgs,
    MATRIX: NoArgs,
    ARRAYS: NoArgs,
    IMAGES: ImageArgs,
    TEXT: TextArgs,
    TOKENS: TokenArgs,
}
SOURCE_ARGS: dict[str, type[Section]] = {
    "digits": NoArgs,
    "synthetic": SyntheticArgs,
    **{name: _OF_KINDS[about.holds] for name, about in FORMATS.items()},
    **{name: DelimitedArgs for name, about in FORMATS.items() if about.is_delimited},
}
# By the setting that holds them.
ARGUMENTS: dict[str, dict[str, type[Section]]] = {
    "data.args": SOURCE_ARGS,
    "optim.args": OPTIMIZER_ARGS,
    "optim.schedule_args": SCHEDULE_ARGS,
    "train.loss_args": LOSS_ARGS,
}


def check_arguments(setting: str, owner: str, args: Mapping[str, Any]) -> None:
    """Raise pydantic's ValidationError for arguments under `setting` that `owner`, an optimizer, a
    schedule, a loss or a source, does not take; of one's own, which is called with them, any will
    do."""
    if is_import_path(owner):
        return
    kind = ARGUMENTS[setting][owner]
    takes = list(kind.model_fields)
    unknown = []
    for name, value in args.items():
        if name not in takes:
            text = f"{owner} takes " + (
                f"{', '.join(takes)}, and none of this name" if takes else "no arguments"
            )
            if near := get_close_matches(str(name)[:80], takes, 1):
                text += f"; did you mean {near[0]}?"
            problem = PydanticCustomError(UNKNOWN_ARGUMENT, "{text}", {"text": text})
            unknown.append(InitErrorDetails(type=problem, loc=(str(name),), input=value))
    if unknown:
        raise ValidationError.from_exception_data(owner, unknown)
    kind.model_validate(args)
