"""What the optimizers and the schedules take under `optim.args` and `optim.schedule_args`: one
class each, with the limits and defaults of its arguments. They are checked here by their names,
before anything is read or built.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from headroom.base.import_paths import is_import_path
from headroom.settings.section import Bool, Float, Int, Section

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
# By the setting that holds them.
ARGUMENTS: dict[str, dict[str, type[Section]]] = {
    "optim.args": OPTIMIZER_ARGS,
    "optim.schedule_args": SCHEDULE_ARGS,
}


def check_arguments(setting: str, owner: str, args: Mapping[str, Any]) -> None:
    """Raise pydantic's ValidationError for arguments under `setting` that `owner`, an optimizer or
    a schedule, does not take; of one's own, which is called with them, any will do."""
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
