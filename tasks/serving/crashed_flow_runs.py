"""Flow runs that a desk left behind: those that Prefect shows as running though their process is
gone. Whoever comes next marks them as crashed, as orphaned_runs.py ends them in MLflow.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from tasks.serving.prefect_http import LIVE, call, dead_of_pool, set_state

STATES = {"FINISHED": "COMPLETED", "FAILED": "FAILED"}  # of Prefect, by those of MLflow
TAG = "process"  # of a flow run: process:HOST:PID:START


def tag() -> str:
    """The tag by which this process is known again."""
    me = psutil.Process()
    return ":".join([TAG, socket.gethostname(), str(me.pid), f"{me.create_time():.2f}", uptime(me)])


@dataclass(frozen=True)
class End:
    """What a flow run came to that could not say so itself."""

    type: str = "CRASHED"
    message: str = "Its process was gone."
    at_s: float = math.inf  # Unix time of its last sign of life


def ends(runs: Path) -> dict[str, End]:
    """Of flow runs whose process was one of this host and is gone, by their ids: how their runs
    ended, as `runs` keeps it. Prefect may have been away then."""
    found = {}
    for file in runs.glob("*/run.json"):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            run = json.loads(file.read_text())
            tags, status = run["tags"], run["status"]
            is_here = tags["host"] == socket.gethostname()
            if is_here and not lives(tags):
                reason = run.get("error") or run.get("stopped") or "to its end"
                at_s = (file.parent / "metrics.jsonl").stat().st_mtime
                end = End(STATES.get(status, "CRASHED"), f"{status} in MLflow: {reason}", at_s)
                found[tags["prefect.flow_run_id"]] = end
    return found


def crash_the_dead(
    api: str, known: Mapping[str, End], *, of_worker: Sequence[str] = (), does: bool = True
) -> dict[str, End]:
    """Give those of this host whose process is gone the state that is known, or mark them as
    crashed. of_worker: the states of the work pool's runs that are looked at too, where its worker
    is this host's. Returns them by their names; raises OSError."""
    live: dict[str, Any] = {"state": {"type": {"any_": LIVE}}}
    asked = {run["id"]: run for run in _filtered(api, live)}
    dead = {id: end for id, run in asked.items() if (end := _end_of(run, known)) is not None}
    # What ended while we looked has said so by now.
    still = _filtered(api, live | {"id": {"any_": list(dead)}}) if dead else []
    names = {run["id"]: run["name"] for run in still}
    names |= dead_of_pool(api, of_worker) if of_worker else {}
    for id in names if does else ():
        end = dead.get(id, End())
        set_state(api, id, type=end.type, message=end.message)
    return {name: dead.get(id, End()) for id, name in names.items()}


def _filtered(api: str, flow_runs: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = call("POST", f"{api}/flow_runs/filter", {"flow_runs": flow_runs})
    return found


def _end_of(run: dict[str, Any], known: Mapping[str, End]) -> End | None:
    """None of one that may live: where Prefect began it again, the end that is known is not its."""
    end = known.get(run["id"])
    if end and datetime.fromisoformat(run["state"]["timestamp"]).timestamp() <= end.at_s:
        return end
    return End() if _is_dead(run) else None


def _is_dead(run: dict[str, list[str]]) -> bool:
    here = f"{TAG}:{socket.gethostname()}:"
    mine = [word.removeprefix(here).split(":") for word in run["tags"] if word.startswith(here)]
    return any(len(words) in (2, 3) and not is_alive(*words) for words in mine)


def uptime(process: psutil.Process) -> str:
    """Seconds from the host's start to the process's, which no setting of the clock changes."""
    return f"{process.create_time() - psutil.boot_time():.2f}"


def lives(tags: Mapping[str, str]) -> bool:
    """Whether the process of the run with these tags does, which was one of this host."""
    words = (tags.get(name, "") for name in ("pid", "process.started_at", "process.uptime_s"))
    return is_alive(*words)


def is_alive(pid: str, started_at: str, uptime_s: str = "") -> bool:
    """Whether that very process is there; a pid alone may be another process by now. uptime_s: of
    the host at its start; the time of its start is another one where the clock was set since."""
    try:
        process = psutil.Process(int(pid))
        is_same = abs(process.create_time() - float(started_at)) < 1 or uptime(process) == uptime_s
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError):
        return False
