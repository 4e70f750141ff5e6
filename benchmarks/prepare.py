"""A table of numbers made ready to train on, against reading the same file with pandas and
pyarrow's engine, which gives no split, no scaling, no checks and no arrays on disk. Both in one
process and in turns, from files that the system has in memory.

`python -m benchmarks.prepare [ROUNDS] [--rows N] [--columns N] [--results FOLDER]` prints the table
and keeps it.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import csv, parquet

from benchmarks.conditions import RESULTS, publish
from benchmarks.turns import in_turns, median_ratio, spread
from headroom.base.units import format_mebibytes
from headroom.data.preparation import prepare_dataset
from headroom.settings.run_config import DataConfig

BAR = 1.3  # of CSV
NOTES = """
- prepare: read, checked, hashed, split, scaled and written with checksums and fsync, into a new
  folder each time. pandas: the same file as a DataFrame.
- ratio: prepare over pandas, the median of the ratios turn by turn.
"""


def main(rounds: int, rows: int, columns: int, results: Path) -> None:
    """Measure, print, keep."""
    with tempfile.TemporaryDirectory() as scratch:
        lines = _report(rounds, rows, columns, Path(scratch))
        publish("prepare", "Preparing a table", lines, results.resolve())


def _report(rounds: int, rows: int, columns: int, scratch: Path) -> Iterator[str]:
    yield from NOTES.splitlines()
    yield ""
    yield f"## {rows:,} rows x {columns} columns: {rounds} runs each, in turns"
    yield ""
    yield "| file | size | who | median s | least to most | ratio | bar |"
    yield "|:--|--:|:--|--:|--:|--:|--:|"
    for kind, file in _written(rows, columns, scratch).items():
        peer = partial(pd.read_csv, file, engine="pyarrow")
        if kind == "parquet":
            peer = partial(pd.read_parquet, file, engine="pyarrow")
        runs = {"prepare": partial(_ours, file, scratch), "pandas": partial(_timed, peer)}
        found = in_turns(runs, rounds)
        ratio = median_ratio(found["prepare"], found["pandas"])
        bar = f"{BAR}" if kind == "csv" else ""
        size = format_mebibytes(file.stat().st_size / 1024**2)
        for name, seconds in found.items():
            mine = f"{ratio:.2f} | {bar}" if name == "prepare" else "|"
            yield f"| {kind} | {size} | {name} | {spread(seconds, digits=2)} | {mine} |"


def _written(rows: int, columns: int, scratch: Path) -> dict[str, Path]:
    random = np.random.default_rng(0)
    features = {f"c{i}": random.normal(size=rows).round(6) for i in range(columns - 1)}
    table = pa.table({**features, "y": random.integers(0, 2, rows)})
    files = {kind: scratch / f"rows.{kind}" for kind in ("csv", "parquet")}
    csv.write_csv(table, files["csv"])
    parquet.write_table(table, files["parquet"])
    return files


def _ours(file: Path, scratch: Path) -> float:
    cache = scratch / "cache"
    try:
        return _timed(partial(prepare_dataset, DataConfig(path=str(file), cache=str(cache))))
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int, nargs="?", default=5)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=50)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    main(asked.rounds, asked.rows, asked.columns, asked.results)
