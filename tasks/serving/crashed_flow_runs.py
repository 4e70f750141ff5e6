"""Flow runs that a desk left behind: those that Prefect shows as running though their process is
gone. Whoever comes next marks them as crashed, as left_runs.py ends them in MLflow.
"""

from __future__ import annotations

import os
import socket

import psutil

from tasks.serving.prefect_http import LIVE, call, set_state

TAG = "process"  # of a flow run: process:HOST:PID:START


def tag() -> str:
    """The tag by which this process is known again."""
    return f"{TAG}:{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.2f}"


def crash_the_dead(api: str) -> int:
    """Mark those of this host whose process is gone. Returns how many; raises OSError."""
    asked = {"flow_runs": {"state": {"type": {"any_": LIVE}}}}
    dead = [run["id"] for run in call("POST", f"{api}/flow_runs/filter", asked) if _is_dead(run)]
    for run in dead:
        set_state(api, run, type="CRASHED", message="Its process was gone.")
    return len(dead)


def _is_dead(run: dict[str, list[str]]) -> bool:
    here = f"{TAG}:{socket.gethostname()}:"
    mine = [word.removeprefix(here).split(":") for word in run["tags"] if word.startswith(here)]
    return any(len(words) == 2 and not is_alive(*words) for words in mine)


def is_alive(pid: str, started_at: str) -> bool:
    """Whether that very process is there; a pid alone may be another process by now."""
    try:
        process = psutil.Process(int(pid))
        is_same = abs(process.create_time() - float(started_at)) < 1
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError):
        return False
