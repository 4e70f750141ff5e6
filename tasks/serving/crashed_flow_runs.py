"""Flow runs whose state in Prefect is not the truth: those that it shows as running, or as about
to run, though their process is gone, those that crashed when all was done, or that another flow run
went on with to the end, and those whose record has been sent at last. Whoever comes next puts that
right, as orphaned_runs.py ends runs in MLflow.
"""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from tasks.serving.prefect_http import LIVE, call, dead_of_pool, set_state

STATES = {"FINISHED": "COMPLETED", "FAILED": "FAILED"}  # of Prefect, by those of MLflow
UNSENT, RESUMED = "Unsent", "Resumed"  # names of states
MOST = 200  # flow runs that Prefect tells of at once
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
    name: str = ""  # of the state, where it is not that of its type


def end_of(run: Mapping[str, Any], unsent: str = "") -> End:
    """What the flow run of a run should say, by what that has left in its run.json. unsent: why
    MLflow has not got all of it."""
    status, tags = run["status"], run["tags"]
    stopped, gate = run.get("stopped") or "", tags.get("gate", "")
    reason = run.get("error") or stopped or "to its end"
    end = End(STATES.get(status, "CRASHED"), f"{status} in MLflow: {reason}")
    if end.type != "COMPLETED":
        return end
    if stopped:
        end = replace(end, name="Stopped", message=stopped)
    elif gate not in ("", "ok", "new"):
        end = replace(end, name=gate.capitalize(), message=tags["gate.why"])
        if run["params"]["gate.fail"]:
            return replace(end, type="FAILED", name="")
    if unsent:
        more = f"; {end.name}: {end.message}" if end.name else ""
        end = replace(end, name=UNSENT, message=unsent + more)
    return end


def ends(runs: Path, host: str = "") -> dict[str, End]:
    """How flow runs ended that may not have said so, by their ids, as `runs` keeps it, the newest
    first: those whose process was one of this host and is gone, and those that others went on with.
    Prefect may have been away then. host: what the runs call it, where that is another name."""
    found: dict[str, End] = {}
    host = host or socket.gethostname()
    for file in sorted(runs.glob("*/run.json"), reverse=True):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            run, sent = json.loads(file.read_text()), _sent(file.parent)
            tags, end = run["tags"], end_of(run, sent.get("unsent", ""))
            at_s = (file.parent / "metrics.jsonl").stat().st_mtime
            if run["status"] == "FINISHED" and not run.get("stopped"):
                of = tags.get("prefect.flow_run_id", "")
                inside = f" in flow run {of}" if of else ""
                message = f"Its training was gone on with{inside}, to its end."
                resumed = End("COMPLETED", message, at_s, RESUMED)
                for id in filter(None, sent.get("earlier", "").split(",")):
                    found.setdefault(id, resumed)
            if tags["host"] == host and not lives(tags):
                found.setdefault(tags["prefect.flow_run_id"], replace(end, at_s=at_s))
    return found


def _sent(folder: Path) -> dict[str, Any]:
    """What sent.json says."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / "sent.json").read_text())
        return found if isinstance(found, dict) else {}
    return {}


def set_right(api: str, runs: Path) -> None:
    """All that these runs know of, in Prefect. Its server may be gone, or ask for a password: then
    the next one does."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if api:
            known = ends(runs)
            crash_the_dead(api, known)
            correct(api, known)


def correct(api: str, known: Mapping[str, End], *, does: bool = True) -> dict[str, End]:
    """Give flow runs the end that is known where they say that they crashed, but their training
    came to its end, or that not all was sent, and it has been. By their names; raises OSError."""
    better = {id: end for id, end in known.items() if end.type == "COMPLETED"}
    asked = {"id": {"any_": list(better)[:MOST]}}
    found = _filtered(api, asked) if better else []
    wrong = [run for run in found if _is_false(run["state"], better[run["id"]])]
    for run in wrong if does else ():
        _set(api, run["id"], better[run["id"]])
    return {run["name"]: better[run["id"]] for run in wrong}


def _is_false(state: Mapping[str, str], end: End) -> bool:
    if state["type"] == "COMPLETED":
        return (state["name"] == UNSENT) != (end.name == UNSENT)
    return state["type"] == "CRASHED" or (state["type"] == "FAILED" and end.name == RESUMED)


def crash_the_dead(
    api: str,
    known: Mapping[str, End],
    *,
    workers: Sequence[float] | None = None,
    does: bool = True,
) -> dict[str, End]:
    """Give those of this host whose process is gone the state that is known, or mark them as
    crashed. workers: when those of the work pool began that live, where all of them are this
    host's; then the pool's runs are looked at too. Returns them by their names; raises OSError."""
    live: dict[str, Any] = {"state": {"type": {"any_": LIVE}}}
    asked = {run["id"]: run for run in _filtered(api, live)}
    dead = {id: end for id, run in asked.items() if (end := _end_of(run, known)) is not None}
    # What ended while we looked has said so by now.
    still = _filtered(api, live | {"id": {"any_": list(dead)}}) if dead else []
    names = {run["id"]: run["name"] for run in still}
    names |= dead_of_pool(api, workers) if workers is not None else {}
    for id in names if does else ():
        _set(api, id, dead.get(id, End()))
    return {name: dead.get(id, End()) for id, name in names.items()}


def _set(api: str, id: str, end: End) -> None:
    set_state(api, id, type=end.type, message=end.message, name=end.name)


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
