"""Stays where a run has ended and MLflow has not got all of it, until it has: tries again, more and
more seldom, for as long as mlflow.yaml says. One process for a folder of runs, which imports no
mlflow while it waits. A sending process that could not send all becomes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from headroom.base.file_lock import FileLock, is_held
from headroom.process import children
from headroom.tracking.left_folders import has_left_folders
from headroom.tracking.tracking_settings import TrackingSettings

FIRST_S, LONGEST_S = 15.0, 600.0  # between two tries
HANDOVER_S = 2.0  # for another one that is just leaving
STAYS = "later.lock"  # of a folder of runs: who stays holds it
# With these it would be taken for the flow run itself, or for the part of a service that began it.
OTHERS = ("PREFECT__FLOW_RUN_ID", "HEADROOM_SERVE_PART")


def is_needed(runs: Path) -> bool:
    """Return whether something is there to send, and nobody stays to do so."""
    return has_left_folders(runs) and not is_held(runs / STAYS)


def replace_process(chosen: TrackingSettings, prefect_api: str) -> NoReturn:
    """Replace this process by one that stays: what it holds is given back, its pid stays."""
    read, write = os.pipe()
    with os.fdopen(write, "w") as pipe:  # as an argument `ps` would show it: a URI may hold a login
        pipe.write(_make_order(chosen, prefect_api))
    os.dup2(read, 0)
    os.execve(sys.executable, [sys.executable, "-m", __spec__.name], make_environment(os.environ))


def start(chosen: TrackingSettings, prefect_api: str) -> None:
    """Start a process that stays, and outlives this one."""
    one = subprocess.Popen(
        [sys.executable, "-m", __spec__.name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        env=make_environment(os.environ),
        start_new_session=True,
    )
    assert one.stdin is not None
    one.stdin.write(_make_order(chosen, prefect_api))
    one.stdin.close()
    threading.Thread(target=one.wait, daemon=True).start()  # else it would stay a zombie


def make_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the process that stays."""
    path = os.pathsep.join(filter(None, [_PROJECT, environment.get("PYTHONPATH")]))
    return {k: v for k, v in environment.items() if k not in OTHERS} | {"PYTHONPATH": path}


_PROJECT = str(Path(__file__).parent.parent.parent)


def _make_order(chosen: TrackingSettings, prefect_api: str) -> str:
    return json.dumps({"where": chosen.model_dump(), "does": True, "prefect_api": prefect_api})


def main() -> None:
    """Stay, if nobody does. On standard input is what orphaned_runs.py is asked."""
    text = sys.stdin.read()
    chosen = TrackingSettings(**json.loads(text)["where"])
    runs = Path(chosen.runs)
    until = time.monotonic() + chosen.send_later_s
    with FileLock(runs / STAYS) as lock:
        if not lock.take(f"process {os.getpid()}"):
            time.sleep(HANDOVER_S)
            if not lock.take(f"process {os.getpid()}"):
                return
        pause_s = FIRST_S
        while (left_s := until - time.monotonic()) > 0 and runs.is_dir() and has_left_folders(runs):
            time.sleep(min(pause_s, left_s))
            pause_s = min(LONGEST_S, 2 * pause_s)
            _try(text)


def _try(order: str) -> None:
    with children.start_child(
        "headroom.tracking.orphaned_runs", stderr=subprocess.DEVNULL
    ) as trying:
        trying.communicate(order)


if __name__ == "__main__":
    main()
