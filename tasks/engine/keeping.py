"""The folder that a training leaves: weights, description, an example of the rows, and for a model
of the user's own its code. What is in it can be read without running any of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from tasks.engine import own_code, predictor
from tasks.engine.section import is_import


def keep(model: nn.Module, spec: dict[str, Any], folder: Path) -> None:
    """Write what `predictor.load` makes the same model of again."""
    requirements: list[str] = []
    if is_import(spec["model"]):
        requirements = own_code.save(spec["model"], folder)
    predictor.save(model, {**spec, "requirements": requirements}, folder)


def keep_example(rows: dict[str, np.ndarray], folder: Path) -> None:
    """Write two rows, by the names of the inputs: example.npy of the only one, else example.npz."""
    if set(rows) == {"x"}:
        np.save(folder / "example.npy", rows["x"])
    else:
        np.savez(folder / "example.npz", allow_pickle=False, **rows)
