"""Rows of the user's, as a model of their own takes them: an array, or a dict of arrays by the
names of the inputs that the training's loader gave. It refuses what is missing or of another
shape. It travels with logged models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tasks.engine.models.model_call import LABELS

Inputs = dict[str, np.ndarray]


def is_structured(spec: Mapping[str, Any]) -> bool:
    """Whether the inputs are other than one array of floating-point numbers."""
    inputs = spec.get("inputs")
    return inputs is not None and not (inputs["kind"] == "rows" and "float" in inputs["dtype"])


def wanted(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What each input is: {"name": {"shape": ..., "dtype": ...}}; the only one is called x."""
    inputs = spec["inputs"]
    if inputs["kind"] == "rows":
        return {"x": inputs}
    of = inputs["of"]
    named = of.items() if isinstance(of, dict) else ((str(i), part) for i, part in enumerate(of))
    return {n: p for n, p in named if p["kind"] == "rows" and n not in LABELS}


def checked(rows: Any, spec: Mapping[str, Any]) -> Inputs:
    """The rows as arrays of the right types. Raises ValueError.

    rows: a dict or a DataFrame with the names of the inputs, or the array itself where it is one.
    """
    needs = wanted(spec)
    if not isinstance(rows, Mapping) and not hasattr(rows, "columns"):
        if len(needs) > 1:
            raise ValueError(f"rows: must be a dict of arrays with {', '.join(needs)}")
        rows = {next(iter(needs)): rows}
    found: Inputs = {}
    for name, need in needs.items():
        if name not in rows:
            raise ValueError(f"rows: the input {name!r} is missing; needs {', '.join(needs)}")
        # The cells of a column may be lists.
        given = rows[name].tolist() if hasattr(rows, "columns") else rows[name]
        array = np.asarray(given)
        kinds = "fiub" if "float" in need["dtype"] else "iub"
        axes = len(need["shape"]) + 1
        if array.dtype.kind not in kinds or array.ndim != axes:
            sizes = ", ".join(["rows", *map(str, need["shape"])])
            raise ValueError(
                f"rows: the input {name!r} must be {need['dtype']} of about the shape ({sizes}) "
                f"(got {array.dtype} {array.shape})"
            )
        found[name] = array.astype("float32" if "float" in need["dtype"] else need["dtype"])
    rows_of = {name: len(array) for name, array in found.items()}
    if len(set(rows_of.values())) > 1:
        raise ValueError(f"rows: all inputs must have as many rows (got {rows_of})")
    return found


def batches(found: Inputs, spec: Mapping[str, Any], rows: int) -> Iterator[Any]:
    """The inputs as the model takes them, on the CPU, so many rows at a time."""
    whole = len(next(iter(found.values())))
    for start in range(0, whole, rows):
        parts = {n: torch.from_numpy(a[start : start + rows].copy()) for n, a in found.items()}
        yield _structured(spec["inputs"], parts)


def _structured(inputs: Mapping[str, Any], parts: dict[str, torch.Tensor]) -> Any:
    if inputs["kind"] == "rows":
        return parts["x"]
    if inputs["kind"] == "dict":
        return parts
    return tuple(parts[str(i)] for i in range(len(inputs["of"])))
