"""A model of the user's own, made by its factory. It refuses what the factory gives where that is
no nn.Module. It travels with logged models, which are made again by it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.engine.base.factory_call import arguments, called
from tasks.engine.base.import_paths import found
from tasks.engine.base.secret_names import given_again, variable
from tasks.engine.models.model_call import Outputs
from tasks.engine.settings.model_args import ModelError

CODE = "code"  # the folder beside the weights in which the user's code travels


def construct(
    factory: Callable[..., Any],
    name: str,
    args: Mapping[str, Any],
    *,
    input_shape: Sequence[int],
    outputs: int,
) -> nn.Module:
    """What the factory makes. outputs: 0 where nobody tells. Raises ModelError."""
    offered = {"input_shape": tuple(input_shape)} | ({"outputs": outputs} if outputs else {})
    given = arguments(factory, args, offered, setting="model.args", refusal=ModelError)
    model = called(factory, given, setting="model.name", path=name, refusal=ModelError)
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise ModelError(f"model.name: {name} must give an nn.Module (got {got}); return a model")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"model.name: {name} gives TorchScript, whose training steps and evaluations exclude "
            "each other; give the nn.Module that it was made of (train.compile makes it faster)"
        )
    if "_parameters" not in vars(model):
        raise ModelError(
            f"model.name: {name} does not call super().__init__(); do so first in its __init__"
        )
    return model


def again(spec: Mapping[str, Any], folder: Path) -> Outputs:
    """The model that spec.json tells of, with the code that lies in its folder; weights of now.

    Raises ModelError, also where import paths are forbidden.
    """
    code = str(folder / CODE)
    if code not in sys.path and (folder / CODE).is_dir():
        sys.path.insert(0, code)  # it stays: a forward pass may import too
    factory = found(spec["model"], setting="model.name", refusal=ModelError)
    missing: list[str] = []
    args = given_again(spec["args"], "model.args", missing)
    if missing:
        told = f"{missing[0]}: was hidden when the model was kept; give it in the environment as"
        raise ModelError(f"{told} {variable(missing[0])}")
    model = construct(
        factory,
        spec["model"],
        args,
        input_shape=spec["input_shape"],
        outputs=spec["offered_outputs"],
    )
    return Outputs(model)
