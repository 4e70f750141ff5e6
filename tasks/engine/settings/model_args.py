"""What the built-in models take under `model.args`, and what is wrong with what was given, told
from the names and values alone: before any data is read, and without PyTorch. It travels with every
logged model, as builtin.py does, which calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

TAKES: dict[str, tuple[str, ...]] = {
    "linear": (),
    "mlp": ("hidden", "dropout"),
    "cnn": ("width", "dropout"),
    "transformer": ("layers", "heads", "width", "dropout", "positions"),
}
POSITIONS = ("rope", "learned")
WIDEST = 2**20
DEEPEST = 1000


class ModelError(ValueError):
    """A model that can't be built as asked; the text starts with the setting at fault."""


def problems(model: str, args: Mapping[str, Any]) -> list[str]:
    """What is wrong with each argument of a built-in model; empty where all can be."""
    known = TAKES[model]
    takes = f"takes {', '.join(known)}" if known else "takes no arguments"
    told = []
    for name, value in args.items():
        near = get_close_matches(str(name)[:80], known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        text = (
            _wrong(name, value)
            if name in known
            else f"{name!r} is unknown; the model {model} {takes}{hint}"
        )
        told += [text] if text else []
    return told or (_wrong_together(args) if model == "transformer" else [])


def _wrong(name: str, value: Any) -> str | None:
    got = f"(got {value!r})"
    if name == "dropout":
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = is_number and 0 <= value < 1
        return None if fits else f"dropout must be from 0 to below 1 {got}"
    if name == "positions":
        fits = isinstance(value, str) and value in POSITIONS
        return None if fits else f"positions must be {' or '.join(POSITIONS)} {got}"
    if name == "hidden":
        fits = isinstance(value, list | tuple) and all(_is_count(v, WIDEST) for v in value)
        like = [value] if _is_count(value, WIDEST) else [256]
        rule = f"a list of whole numbers from 1 to {WIDEST:,}, such as {like}"
        return None if fits else f"hidden must be {rule} {got}"
    most = DEEPEST if name == "layers" else WIDEST
    fits = _is_count(value, most)
    return None if fits else f"{name} must be a whole number from 1 to {most:,} {got}"


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def _wrong_together(args: Mapping[str, Any]) -> list[str]:
    heads, width = args.get("heads", 4), args.get("width", 128)  # as models.transformer has them
    if width % heads:
        return [f"width must be a multiple of heads (got width {width} for {heads} heads)"]
    if args.get("positions", "rope") == "rope" and width // heads % 2:
        return [
            f"width / heads must be even for positions rope (got {width} / {heads} = "
            f"{width // heads}); use another width, or positions learned"
        ]
    return []
