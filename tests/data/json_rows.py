"""Rows of a table, and the files of JSON lines and of CSV that hold them."""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd

ROWS: list[dict[str, Any]] = [
    {
        "row": i,
        "amount": [None, 0.5, -3e-7, 12, 1e22][i % 5],
        "flag": i % 3 == 0,
        "colour": ["red", 'gr\u00fcn, "hell"', "", None][i % 4],
        "zip": ["007", "8001"][i % 2],
        "day": f"2026-11-{i % 28 + 1:02}T18:30:00",
        "mixed": [7, "b", "c", "d", "e"][i % 5],
        "holes": math.nan if i % 6 == 0 else i / 7,
        "y": i % 2,
    }
    for i in range(120)
]


def write_lines(folder: Path, *lines: str | bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
    )
    return path


def dump_lines(rows: list[dict[str, Any]]) -> list[str]:
    return [json.dumps(row) for row in rows]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    pd.DataFrame([{k: v for k, v in row.items()} for row in rows], dtype=object).to_csv(
        path, index=False
    )
    return path
