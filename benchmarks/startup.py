"""From the start of the process to its end, on digits: this project against the script a user would
write by hand, the flow a user would write first, and Lightning where it is installed. All take the
same number of steps of the same model and log about the same number of metrics to an SQLite MLflow;
they run in turns. `warm` has used its Prefect home and its MLflow database before, `new` has
neither.

`python -m benchmarks.startup [ROUNDS]` prints the table and keeps it in benchmarks/results.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from fcntl import LOCK_EX, flock
from functools import partial
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from benchmarks.conditions import publish
from benchmarks.turns import in_turns, median_ratio, spread

ROOT = Path(__file__).parent.parent
CONTENDERS = {
    "headroom": "flows.train",
    "by hand": "benchmarks.peers.handwritten",
    "naive flow": "benchmarks.peers.naive_flow",
    "lightning": "benchmarks.peers.lightning_digits",
}
BARS = {"by hand": 1.1, "naive flow": 0.55}


@dataclass(frozen=True)
class Run:
    seconds: float
    metrics: int  # logged


def main(rounds: int) -> None:
    """Measure, print, keep."""
    tables = (_table(state, rounds) for state in ("warm", "new"))
    publish("startup", "Start to exit on digits", chain.from_iterable(tables))


def _table(state: str, rounds: int) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        runs: dict[str, Callable[[], Run]] = {}
        for name, module in CONTENDERS.items():
            if name != "lightning" or find_spec(name) is not None:
                runs[name] = partial(_run, module, Path(scratch), is_warm=state == "warm")
        found = in_turns(runs, rounds, warm_up=state == "warm")
    seconds = {name: [run.seconds for run in of] for name, of in found.items()}
    rows = [
        "",
        f"## {state}: {rounds} runs each, in turns",
        "",
        "| | median s | least to most | logged metrics | headroom / it (median of turns) | bar |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for name, theirs in seconds.items():
        ratio = median_ratio(seconds["headroom"], theirs)
        cells = f"{spread(theirs, digits=2)} | {found[name][-1].metrics} | {ratio:.2f}"
        rows.append(f"| {name} | {cells} | {BARS.get(name, '')} |")
    return rows


def _run(module: str, scratch: Path, *, is_warm: bool) -> Run:
    place = scratch / module if is_warm else Path(tempfile.mkdtemp(dir=scratch))
    place.mkdir(exist_ok=True)
    drop = ("PREFECT_", "MLFLOW_", "HEADROOM_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    environment |= {
        "PREFECT_HOME": str(place / "prefect"),
        "PYTHONPATH": str(ROOT),
        "MLFLOW_TRACKING_URI": f"sqlite:///{place}/mlflow.db",
    }
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", module], cwd=place, env=environment, capture_output=True, text=True
    )
    took_s = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{module} failed:\n{done.stdout}{done.stderr}")
    _wait_until_alone(place / "prefect" / "headroom-server.lock")
    return Run(took_s, _metrics_of_last_run(place / "mlflow.db"))


def _wait_until_alone(lock: Path) -> None:
    """Until the shared server has ended itself: the next in turn must neither use it nor wait."""
    if lock.exists():
        with open(lock) as held:
            flock(held, LOCK_EX)


def _metrics_of_last_run(database: Path) -> int:
    query = (
        "SELECT COUNT(*) FROM metrics WHERE run_uuid = "
        "(SELECT run_uuid FROM runs ORDER BY start_time DESC LIMIT 1)"
    )
    with closing(sqlite3.connect(database)) as opened:
        return int(opened.execute(query).fetchone()[0])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
