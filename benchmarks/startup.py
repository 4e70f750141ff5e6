"""From the start of the process to its end, on digits: this project against the script a user would
write by hand, and against the flow a user would write first. All take the same number of steps of
the same model and log the same number of metrics to an SQLite MLflow; they run in turns. `warm` has
used its Prefect home and its MLflow database before, `new` has neither.

`python -m benchmarks.startup [ROUNDS]` prints the table and keeps it in benchmarks/results.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from datetime import date
from fcntl import LOCK_EX, flock
from pathlib import Path

from benchmarks.conditions import conditions

ROOT = Path(__file__).parent.parent
CONTENDERS = {
    "headroom": "flows.train",
    "by hand": "benchmarks.peers.handwritten",
    "naive flow": "benchmarks.peers.naive_flow",
}
BARS = {"by hand": 1.1, "naive flow": 0.55}


def main(rounds: int) -> None:
    """Measure, print, keep."""
    lines = [f"# Start to exit on digits, {date.today()}", ""]
    lines += [f"- {name}: {value}" for name, value in conditions().items()]
    for state in ("warm", "new"):
        lines += ["", *_table(state, rounds)]
        print("\n".join(lines[-7:]), flush=True)
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"startup-{date.today()}-cpu.md").write_text("\n".join(lines) + "\n")


def _table(state: str, rounds: int) -> list[str]:
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    metrics: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(-1 if state == "warm" else 0, rounds):
            for name, module in CONTENDERS.items():
                place = Path(scratch) / (name if state == "warm" else f"{name} {turn}")
                took_s = _run(module, place)
                if turn >= 0:
                    seconds[name].append(took_s)
                metrics[name] = _metrics_of_last_run(place / "mlflow.db")
    ours = seconds["headroom"]
    rows = [
        f"## {state}: {rounds} runs each, in turns",
        "",
        "| | median s | least to most | logged metrics | headroom / it (median of turns) | bar |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for name, theirs in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        rows.append(
            f"| {name} | {statistics.median(theirs):.2f} | {min(theirs):.2f} to {max(theirs):.2f} "
            f"| {metrics[name]} | {ratio:.2f} | {BARS.get(name, '')} |"
        )
    return rows


def _run(module: str, place: Path) -> float:
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
    return took_s


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
