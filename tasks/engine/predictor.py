"""A trained model on disk, and rows in, predictions out. The folder holds spec.json and weights.pt;
it is read with `weights_only=True`, so that nothing in it is ever executed. MLflow calls
`_load_pyfunc`; this file and `models.py` travel with every logged model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tasks.engine.models import Standardize, build

ROWS = 4096  # rows predicted at once


class Predictor:
    """Predicts on the raw rows that a user has: unscaled, labels as they were named."""

    def __init__(self, spec: dict[str, Any], model: nn.Module) -> None:
        self.spec = spec
        self.model = model.eval()

    @torch.inference_mode()
    def outputs(self, rows: Any) -> np.ndarray:
        """What the network returns, float32 (rows, outputs): logits, or regressed values."""
        x = self._array(rows)
        parts = [self.model(torch.from_numpy(x[i : i + ROWS])) for i in range(0, len(x), ROWS)]
        return torch.cat(parts).float().numpy() if parts else np.empty((0, self.spec["outputs"]))

    def predict(self, rows: Any, params: dict[str, Any] | None = None) -> Any:
        """A DataFrame with a row for each one given: `prediction`, and for a classification its
        `probability`.

        rows: a DataFrame with the feature columns, or an array of shape (rows, *input_shape).
        Raises ValueError where columns are missing or shapes do not fit.
        """
        import pandas as pd  # only MLflow's users need it

        outputs = torch.from_numpy(self.outputs(rows))
        if self.spec["task"] == "regression":
            return pd.DataFrame({"prediction": outputs[:, 0].numpy()})
        chances = outputs.softmax(1)
        best = chances.argmax(1)
        names = self.spec["class_names"]
        return pd.DataFrame(
            {
                "prediction": [names[i] for i in best.tolist()],
                "probability": chances.gather(1, best[:, None])[:, 0].numpy(),
            }
        )

    def _array(self, rows: Any) -> np.ndarray:
        names = self.spec["feature_names"]
        if hasattr(rows, "columns") and names:
            missing = [name for name in names if name not in rows.columns]
            if missing:
                raise ValueError(f"rows: the column {missing[0]!r} is missing; needs {names}")
            rows = rows[names]
        x = np.ascontiguousarray(rows, dtype=np.float32)
        shape = tuple(self.spec["input_shape"])
        if x.ndim == 2 and x.shape[1] == int(np.prod(shape)):
            x = x.reshape(len(x), *shape)
        if x.shape[1:] != shape:
            sizes = ", ".join(map(str, shape))
            raise ValueError(f"rows: must have the shape (rows, {sizes}) (got {x.shape})")
        return x


def save(model: nn.Module, spec: dict[str, Any], folder: Path) -> None:
    """Write spec.json and weights.pt, from which `load` makes the same model again."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    torch.save(weights, folder / "weights.pt")
    (folder / "spec.json").write_text(json.dumps(spec, indent=1))


def load(folder: str | Path) -> Predictor:
    """The model of `folder` on the CPU."""
    folder = Path(folder)
    spec = json.loads((folder / "spec.json").read_text())
    model = build(
        spec["model"], input_shape=spec["input_shape"], outputs=spec["outputs"], args=spec["args"]
    )
    weights = torch.load(folder / "weights.pt", weights_only=True, map_location="cpu")
    model.load_state_dict(weights)
    return Predictor(spec, nn.Sequential(Standardize(spec["offset"], spec["scale"]), model))


def _load_pyfunc(path: str) -> Predictor:
    return load(path)
