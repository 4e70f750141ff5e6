"""A trained model on disk, and rows in, predictions out. The folder holds spec.json and
weights.pt; weights are read with `weights_only=True`, so that none is ever executed; a model of
the user's own brings its code, which is. MLflow calls `_load_pyfunc`; this file and all that it
imports travel with every logged model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from headroom.base.raw_inputs import (
    check_inputs,
    is_structured,
    make_array,
    make_inputs,
    refuse_no_number,
)
from headroom.models.builtin import Standardize, Transformer, build_model
from headroom.models.checksums import check_checksums
from headroom.models.user_model import rebuild_model as build_again
from headroom.models.user_model import split_inputs

ROWS = 4096  # rows predicted at once
TOKENS = 1 << 14  # the same for a model of tokens
LARGEST_LOG = 690.0  # exp() of it is 1e299
HF_LENGTH = 20  # tokens that transformers writes where nobody says how many


def restore_units(
    outputs: np.ndarray, *, offset: Any, scale: Any, log: Sequence[float]
) -> np.ndarray:
    """Return a regression's outputs, (rows, targets), in the units of its targets, as float64:
    float32 knows a date in seconds to two minutes.

    log: units, where log(1 + amount / unit) was learnt; amounts end at 1e300 of them.
    """
    values = outputs * np.asarray(scale, dtype=np.float64) + offset
    return values if not log else np.expm1(np.minimum(values, LARGEST_LOG)) * np.asarray(log)


class Predictor:
    """Predicts on the raw rows that a user has: unscaled, labels as they were named."""

    def __init__(self, spec: dict[str, Any], model: nn.Module) -> None:
        self.spec = spec
        self.model = model.eval()
        self.device = torch.device("cpu")

    def to(self, device: torch.device) -> Self:
        """Predict on `device` from here on; rows and results stay on the CPU."""
        self.model, self.device = self.model.to(device), device
        return self

    @torch.inference_mode()
    def outputs(self, rows: Any) -> np.ndarray:
        """Return what the network returns, (rows, outputs): logits, or regressed values in the
        units of their target; NaN for a row with a missing value that nothing replaces."""
        if self.spec.get("columns"):
            missing = self.spec.get("missing", "fail")
            na = self.spec.get("na")
            inputs = make_inputs(rows, self.spec["columns"], missing=missing, na=na)
            outputs = self._outputs(inputs.x)
            refuse_no_number(outputs[inputs.whole], self.spec["task"])
            outputs[~inputs.whole] = np.nan
            return outputs
        x = make_array(rows, self.spec["feature_names"], tuple(self.spec["input_shape"]))
        outputs = self._outputs(x)
        whole = ~np.isnan(x).any(tuple(range(1, x.ndim)))
        refuse_no_number(outputs[whole], self.spec["task"])
        return outputs

    def _outputs(self, x: np.ndarray) -> np.ndarray:
        parts = [
            self.model(torch.from_numpy(x[i : i + ROWS]).to(self.device)).cpu()
            for i in range(0, len(x), ROWS)
        ]
        if not parts:
            return np.empty((0, self.spec["outputs"]))
        joined = torch.cat(parts).float().numpy()
        if self.spec["task"] != "regression":
            return joined
        return restore_units(
            joined,
            offset=self.spec.get("target_offset", 0.0),
            scale=self.spec.get("target_scale", 1.0),
            log=self.spec.get("target_log") or (),
        )

    def predict(self, rows: Any, params: dict[str, Any] | None = None) -> Any:
        """A DataFrame with a row for each one given: `prediction`, and for a classification its
        `probability`; of several labels the probability of each, under its name; of several values
        `prediction_0` and so on. Nothing is predicted for a row that misses what nothing stands
        for: None, or NaN.

        rows: a DataFrame with the raw feature columns among others, or an array of shape
        (rows, *input_shape). Raises ValueError where columns are missing or shapes do not fit.
        """
        return _make_table(self.spec, torch.from_numpy(self.outputs(rows)))


def _make_table(spec: dict[str, Any], outputs: torch.Tensor) -> Any:
    import pandas as pd  # only MLflow's users need it

    names = spec["class_names"]
    if spec["task"] == "own":
        return pd.DataFrame({"prediction": outputs.tolist()})
    if spec["task"] == "multilabel":
        return pd.DataFrame(outputs.sigmoid().numpy(), columns=list(names))
    if spec["task"] == "regression":
        values = outputs.flatten(1).numpy()
        alone = values.shape[1] == 1
        columns = ["prediction"] if alone else [f"prediction_{i}" for i in range(values.shape[1])]
        return pd.DataFrame(values, columns=columns)
    chances = outputs.softmax(1)
    best = chances.argmax(1)
    is_known = (~outputs.isnan().any(1)).tolist()
    named = best.tolist() if names is None else [names[i] for i in best.tolist()]
    if not all(is_known):
        named = [name if there else None for name, there in zip(named, is_known, strict=True)]
    return pd.DataFrame(
        {
            "prediction": named,
            "probability": chances.gather(1, best[:, None])[:, 0].numpy(),
        }
    )


class OwnPredictor(Predictor):
    """Predicts with a model whose inputs are not one array of floating-point numbers.

    Rows are a dict of arrays by the names of the inputs, or the array where there is only one.
    Of a model of tokens the outputs are those at the last position.
    """

    @torch.inference_mode()
    def outputs(self, rows: Any) -> np.ndarray:
        checked = check_inputs(rows, self.spec)
        parts = [
            self.model(_move_to_device(x, self.device)).float().cpu()
            for x in split_inputs(checked, self.spec, ROWS)
        ]
        if self.spec["task"] == "tokens":
            parts = [part[:, -1] for part in parts]
        return torch.cat(parts).numpy() if parts else np.empty((0, self.spec["outputs"]))


class WritingPredictor(OwnPredictor):
    """Predicts the tokens that a model of an encoder and a decoder writes for its inputs."""

    @torch.inference_mode()
    def predict(self, rows: Any, params: dict[str, Any] | None = None) -> Any:
        """A DataFrame with a row for each one given: the tokens of its `prediction`, a list, by the
        model's own generate(). Where its generation_config does not say how many, they are as many
        as the first rows of the training had."""
        import pandas as pd  # only MLflow's users need it

        network: Any = self.model.model
        own = network.generation_config
        is_limited = own.max_new_tokens or own.max_length not in (None, HF_LENGTH)
        most = {} if is_limited else {"max_new_tokens": self.spec["writes"]}
        written: list[list[int]] = []
        for x in split_inputs(check_inputs(rows, self.spec), self.spec, ROWS):
            written += network.generate(**_move_to_device(x, self.device), **most).tolist()
        return pd.DataFrame({"prediction": written})


def is_writing(model: nn.Module) -> bool:
    """Return whether a user's own model has an encoder and a decoder, whose outputs depend on what
    was written before, and writes by itself, as those of Hugging Face transformers do."""
    config = getattr(model, "config", None)
    return bool(getattr(config, "is_encoder_decoder", False)) and hasattr(model, "generate")


def _move_to_device(x: Any, device: torch.device) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {name: part.to(device) for name, part in x.items()}
    return tuple(part.to(device) for part in x)


class TokenPredictor:
    """Predicts the token after each row of tokens, or the byte after each text."""

    def __init__(self, spec: dict[str, Any], model: Transformer) -> None:
        self.spec = spec
        self.model = model.eval()
        self.device = torch.device("cpu")

    def to(self, device: torch.device) -> Self:
        """Predict on `device` from here on; rows and results stay on the CPU."""
        self.model, self.device = self.model.to(device), device
        return self

    @torch.inference_mode()
    def outputs(self, rows: Any) -> np.ndarray:
        """Return the logits of the token after each row, float32 (rows, outputs)."""
        sequences = self._texts(rows) if self.spec["source"] == "text" else self._tokens(rows)
        step = max(1, TOKENS // self.model.context)
        parts = [self._after(sequences[i : i + step]) for i in range(0, len(sequences), step)]
        return torch.cat(parts).float().numpy() if parts else np.empty((0, self.spec["outputs"]))

    def predict(self, rows: Any, params: dict[str, Any] | None = None) -> Any:
        """A DataFrame with a row for each one given: the `prediction` and its `probability`.

        rows: an array of tokens, (rows, up to context), or for a model of text a DataFrame with
        the column `text`, or texts. Of a text the last bytes count, as many as the context; the
        prediction is one byte, shown as the character of that number (latin-1).
        Raises ValueError for what is no row of tokens.
        """
        import pandas as pd  # only MLflow's users need it

        chances = torch.from_numpy(self.outputs(rows)).softmax(1)
        best = chances.argmax(1)
        text = self.spec["source"] == "text"
        return pd.DataFrame(
            {
                "prediction": [chr(i) for i in best.tolist()] if text else best.numpy(),
                "probability": chances.gather(1, best[:, None])[:, 0].numpy(),
            }
        )

    def _after(self, sequences: Sequence[np.ndarray]) -> torch.Tensor:
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        # Filled up on the right, which changes nothing: no position sees a later one.
        x = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)
        for row, sequence in zip(x, sequences, strict=True):
            row[: len(sequence)] = torch.from_numpy(sequence)
        features = self.model.features(x.to(self.device))
        last = features[torch.arange(len(x), device=self.device), (lengths - 1).to(self.device)]
        # Logits at the last position only: those of all would be vocabulary times a row.
        return self.model.logits(last).cpu()

    def _texts(self, rows: Any) -> list[np.ndarray]:
        if hasattr(rows, "columns"):
            if "text" not in rows.columns:
                raise ValueError("rows: the column 'text' is missing")
            rows = rows["text"]
        sequences = []
        for text in np.asarray(rows, dtype=object).ravel():
            if not isinstance(text, str) or not text:
                raise ValueError(f"rows: must be texts of at least one character (got {text!r})")
            last = text.encode(errors="replace")[-self.model.context :]
            sequences.append(np.frombuffer(last, np.uint8).astype(np.int64))
        return sequences

    def _tokens(self, rows: Any) -> list[np.ndarray]:
        tokens, context = np.asarray(rows), self.model.context
        if tokens.ndim != 2 or not 1 <= tokens.shape[1] <= context or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"rows: must be whole numbers of the shape (rows, 1 to {context}) "
                f"(got {tokens.dtype} {tokens.shape})"
            )
        beyond = tokens[(tokens < 0) | (tokens >= self.spec["outputs"])]
        if beyond.size:
            raise ValueError(
                f"rows: tokens must be from 0 to below {self.spec['outputs']} (got {beyond[0]})"
            )
        return list(tokens.astype(np.int64))


class CausalModel(nn.Module):
    """A user's own model, with the methods of a Transformer."""

    def __init__(self, model: nn.Module, context: int) -> None:
        super().__init__()
        self.model, self.context = model, context

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.model(tokens)
        return outputs


class OwnTokenPredictor(TokenPredictor):
    """Predicts tokens with a user's own model, which may look at later positions too: rows of
    one length go through it together, and nothing is padded."""

    def _after(self, sequences: Sequence[np.ndarray]) -> torch.Tensor:
        by_length: dict[int, torch.Tensor] = {}
        for length in {len(sequence) for sequence in sequences}:
            alike = [i for i, sequence in enumerate(sequences) if len(sequence) == length]
            x = torch.from_numpy(np.stack([sequences[i] for i in alike])).to(self.device)
            last = self.model.logits(x)[:, -1].float().cpu()
            by_length |= dict(zip(alike, last, strict=True))
        return torch.stack([by_length[i] for i in range(len(sequences))])


def save(model: nn.Module, spec: dict[str, Any], folder: Path) -> None:
    """Write spec.json and weights.pt, from which `load` makes the same model again."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    torch.save(weights, folder / "weights.pt")
    (folder / "spec.json").write_text(json.dumps(spec, indent=1))


def load(folder: str | Path) -> Predictor | TokenPredictor:
    """Load the model of `folder` on the CPU. Raises ModelError, also where a file was changed."""
    folder = Path(folder)
    check_checksums(folder)
    spec = json.loads((folder / "spec.json").read_text())
    model = rebuild_network(spec, folder)
    if isinstance(model, Transformer):
        return TokenPredictor(spec, model)
    inputs = spec.get("inputs")
    if spec["task"] == "tokens" and (inputs is None or inputs["kind"] == "rows"):
        causal = CausalModel(model, spec["input_shape"][0])
        return OwnTokenPredictor(spec, causal)  # type: ignore[arg-type]
    if is_structured(spec):
        return (WritingPredictor if spec.get("writes") else OwnPredictor)(spec, model)
    return Predictor(spec, nn.Sequential(Standardize(spec["offset"], spec["scale"]), model))


def rebuild_network(spec: dict[str, Any], folder: Path) -> nn.Module:
    """Rebuild the network on the CPU with its weights, as it takes scaled inputs; of a user's
    own model the outputs alone."""
    weights = torch.load(folder / "weights.pt", weights_only=True, map_location="cpu")
    if ":" in spec["model"]:
        again = build_again(spec, folder)
        again.model.load_state_dict(weights)
        return again
    model = build_model(
        spec["model"],
        input_shape=spec["input_shape"],
        outputs=spec["outputs"],
        args=spec["args"],
        times=spec.get("times"),
    )
    model.load_state_dict(weights)
    return model


def _load_pyfunc(path: str) -> Predictor | TokenPredictor:
    return load(path)
