"""Checks rows of the user's, as a model of their own takes them: an array, or a dict of arrays by
the names of the inputs that the training's loader gave. It refuses what is missing or of another
shape. It travels with logged models, and imports no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

LABELS = ("labels", "label")
Inputs = dict[str, np.ndarray]


def is_structured(spec: Mapping[str, Any]) -> bool:
    """Return whether the inputs are other than one array of floating-point numbers."""
    inputs = spec.get("inputs")
    return inputs is not None and not (inputs["kind"] == "rows" and "float" in inputs["dtype"])


def describe_inputs(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each input is: {"name": {"shape": ..., "dtype": ...}}; the only one is called
    x."""
    inputs = spec["inputs"]
    if inputs["kind"] == "rows":
        return {"x": inputs}
    of = inputs["of"]
    named = of.items() if isinstance(of, dict) else ((str(i), part) for i, part in enumerate(of))
    return {n: p for n, p in named if p["kind"] == "rows" and n not in LABELS}


def check_inputs(rows: Any, spec: Mapping[str, Any]) -> Inputs:
    """Return the rows as arrays of the right types. Raises ValueError.

    rows: a dict or a DataFrame with the names of the inputs, or the array itself where it is
    one.
    """
    needs = describe_inputs(spec)
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
