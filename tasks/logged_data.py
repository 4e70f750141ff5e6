"""What MLflow is told of the prepared data, as inputs of the run: the rows that are trained on and
those that it is validated on. It says nothing of a loader's rows, which nobody has seen before.
"""

from __future__ import annotations

import json
from pathlib import Path

from tasks.engine.base.facts import Column, DataFacts
from tasks.engine.settings.data_config import DataConfig

SCHEMA_LIMIT = 2**20 - 1  # characters that MLflow takes; of what is larger nothing is told


def data_inputs(data: DataConfig, facts: DataFacts) -> list[dict[str, str]]:
    """By the names of MLflow's entity Dataset, and its context."""
    if not facts.fingerprint:
        return []
    kind, source = "code", json.dumps({"tags": {"mlflow.source.name": data.source}})
    if data.path is not None:
        kind, source = "local", json.dumps({"uri": str(Path(data.path).absolute())})
    name, schema = Path(data.path or data.source).name, json.dumps(_schema(facts))
    told = {"source_type": kind, "source": source, "digest": facts.fingerprint[:36]}
    if len(schema) <= SCHEMA_LIMIT:
        told["schema"] = schema
    parts: tuple[tuple[str, str, int], ...] = (
        ("training", name, facts.train_rows),
        ("validation", f"{name} (val)", facts.val_rows),
    )
    if facts.test_rows:
        parts += (("test", f"{name} (test)", facts.test_rows),)
    return [
        {**told, "context": part, "name": called, "profile": json.dumps({"num_rows": rows})}
        for part, called, rows in parts
    ]


def _schema(facts: DataFacts) -> dict[str, object]:
    """A table's columns as its user has them, of other data the shapes that the model gets."""
    if facts.columns is not None:
        return {"mlflow_colspec": [_column(column) for column in facts.columns]}
    rows = [-1, *facts.input_shape]
    if facts.task == "tokens":
        x, y = ("int64", rows), ("int64", rows)
    elif facts.task == "classification":
        x, y = ("float32", rows), ("int64", [-1])
    else:
        x, y = ("float32", rows), ("float32", [-1, facts.outputs])
    return {"mlflow_tensorspec": {"features": _tensor(*x), "targets": _tensor(*y)}}


def _column(column: Column) -> dict[str, object]:
    number = "long" if column.whole else "double"
    kind = {"category": "string", "date": "datetime"}.get(column.kind, number)
    return {"name": column.name, "type": kind, "required": column.fill is None}


def _tensor(dtype: str, shape: list[int]) -> str:
    return json.dumps([{"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": shape}}])
