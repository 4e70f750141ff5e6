"""The folder that a training leaves: weights, description, an example of the rows, and for a model
of the user's own its code. What is in it can be read without running any of it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from tasks.engine.base.field_types import is_import
from tasks.engine.models import builtin, own_code, predictor


def keep(model: nn.Module, spec: dict[str, Any], rows: dict[str, np.ndarray], folder: Path) -> None:
    """Write what `predictor.load` makes the same model of again, and two rows by the names of its
    inputs: example.npy of the only one, else example.npz.

    Raises OSError, in words of its own, where the folder can't be written.
    """
    try:
        requirements: list[str] = []
        if is_import(spec["model"]):
            requirements = own_code.save(spec["model"], folder)
        predictor.save(model, {**spec, "requirements": requirements}, folder)
        if set(rows) == {"x"}:
            np.save(folder / "example.npy", rows["x"])
        else:
            np.savez(folder / "example.npz", allow_pickle=False, **rows)
    except OSError as error:
        why = error.strerror or str(error)
    except RuntimeError as error:  # of torch.save, which says "unexpected pos" of a full disk
        if shutil.disk_usage(folder).free > builtin.bytes_of(model):
            raise
        why = f"no space left; {error}"
    else:
        return
    raise OSError(f"runs: the model can't be written to {folder} ({why}); make room there")
