"""Build a user's own model by its factory. A result that is no nn.Module is refused. It travels
with logged models, which are rebuilt by it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.engine.base.import_paths import bind_arguments, call_factory, import_callable
from tasks.engine.base.secret_names import make_variable_name, restore_secrets
from tasks.engine.models.model_call import OutputsOnly
from tasks.engine.settings.model_args import ModelError

CODE = "code"  # the folder beside the weights in which the user's code travels


def construct_model(
    factory: Callable[..., Any],
    name: str,
    args: Mapping[str, Any],
    *,
    input_shape: Sequence[int],
    outputs: int,
) -> nn.Module:
    """Build the factory's model. outputs: 0 where they are unknown. Raises ModelError."""
    offered = {"input_shape": tuple(input_shape)} | ({"outputs": outputs} if outputs else {})
    given = bind_arguments(factory, args, offered, setting="model.args", refusal=ModelError)
    model = call_factory(factory, given, setting="model.name", path=name, refusal=ModelError)
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


def rebuild_model(spec: Mapping[str, Any], folder: Path) -> OutputsOnly:
    """Rebuild the model that spec.json describes, with the code that lies in its folder; its
    weights are new.

    Raises ModelError, also where import paths are forbidden.
    """
    code = str(folder / CODE)
    if code not in sys.path and (folder / CODE).is_dir():
        sys.path.insert(0, code)  # it stays: a forward pass may import too
    factory = import_callable(spec["model"], setting="model.name", refusal=ModelError)
    missing: list[str] = []
    args = restore_secrets(spec["args"], "model.args", missing)
    if missing:
        told = f"{missing[0]}: was hidden when the model was kept; give it in the environment as"
        raise ModelError(f"{told} {make_variable_name(missing[0])}")
    model = construct_model(
        factory,
        spec["model"],
        args,
        input_shape=spec["input_shape"],
        outputs=spec["offered_outputs"],
    )
    return OutputsOnly(model)
