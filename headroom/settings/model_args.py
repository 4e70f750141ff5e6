"""Check the arguments that the built-in models take under `model.args`, from their names and
values alone: before any data is read, and without PyTorch. It travels with every logged model,
as builtin.py does, which calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

BUILTIN_ARGS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "mlp": ("hidden", "dropout"),
    "cnn": ("width", "dropout"),
    "transformer": ("layers", "heads", "width", "dropout", "positions"),
}
POSITIONS = ("rope", "learned")
WIDEST = 2**20
DEEPEST = 1000


class ModelError(ValueError):
    """A model cannot be built as configured; the text starts with the setting at fault."""


def find_argument_problems(model: str, args: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with each argument of a built-in model; empty where nothing is."""
    names = BUILTIN_ARGS[model]
    takes = f"takes {', '.join(names)}" if names else "takes no arguments"
    problems = []
    for name, value in args.items():
        near = get_close_matches(str(name)[:80], names, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        text = (
            _find_problem(name, value)
            if name in names
            else f"{name!r} is unknown; the model {model} {takes}{hint}"
        )
        problems += [text] if text else []
    return problems or (_find_joint_problem(args) if model == "transformer" else [])


def _find_problem(name: str, value: Any) -> str | None:
    most = DEEPEST if name == "layers" else WIDEST
    rule, fits = f"a whole number from 1 to {most:,}", _is_count(value, most)
    if name == "dropout":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        rule, fits = "from 0 to below 1", is_number and 0 <= value < 1
    elif name == "positions":
        rule, fits = " or ".join(POSITIONS), isinstance(value, str) and value in POSITIONS
    elif name == "hidden":
        rule = f"a list of whole numbers from 1 to {most:,}, such as {[value] if fits else [256]}"
        fits = isinstance(value, list | tuple) and all(_is_count(v, most) for v in value)
    return None if fits else f"{name} must be {rule} (got {value!r})"


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _find_joint_problem(args: Mapping[str, Any]) -> list[str]:
    heads, width = args.get("heads", 4), args.get("width", 128)  # as models.transformer has them
    if width % heads:
        return [f"width must be a multiple of heads (got width {width} for {heads} heads)"]
    if args.get("positions", "rope") == "rope" and width // heads % 2:
        return [
            f"width / heads must be even for positions rope (got {width} / {heads} = "
            f"{width // heads}); use another width, or positions learned"
        ]
    return []
