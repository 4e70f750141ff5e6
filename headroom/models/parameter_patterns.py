"""Finds parameters of a model by patterns of their names, as a shell matches files, and freezes
some of them. A pattern that names a module means all of it. It refuses a pattern that matches
nothing, with the nearest names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from headroom.settings.model_args import ModelError
from headroom.settings.read_settings import ConfigError

SHOWN = 3  # names in a sentence


def is_match(name: str, pattern: str) -> bool:
    """Return whether the parameter of this name is meant."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def find_parameters(model: nn.Module, pattern: str, *, setting: str) -> list[nn.Parameter]:
    """Return the parameters that are meant. Raises ConfigError where there are none."""
    named = dict(model.named_parameters(remove_duplicate=False))
    parameters = [parameter for name, parameter in named.items() if is_match(name, pattern)]
    if not parameters:
        modules = [
            name for name, module in model.named_modules() if name and [*module.parameters()]
        ]
        near = get_close_matches(pattern[:80], [*modules, *named], SHOWN)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {_list_some(named)}"
        raise ConfigError(f"{setting}: {pattern[:80]!r} matches no parameter of the model; {hint}")
    return parameters


def _list_some(names: Iterable[str]) -> str:
    first = [*names]
    more = f" and {len(first) - SHOWN} more" if len(first) > SHOWN else ""
    return ", ".join(first[:SHOWN]) + more


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Train none of the parameters that are meant. Raises ConfigError, and ModelError where none
    is left."""
    for pattern in patterns:
        for parameter in find_parameters(model, pattern, setting="model.freeze"):
            parameter.requires_grad_(False)
    if patterns and not any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            f"model.freeze: {', '.join(patterns)[:80]} is all of the model; leave some of it to be "
            "trained"
        )
