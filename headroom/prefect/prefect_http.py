"""Asks a Prefect server in plain HTTP, since importing Prefect's client would cost two seconds a
call: whether it answers, about the work pool and the worker; and gives flow runs their true end,
where Prefect shows them as running although their process is gone, or as crashed although what they
trained came to its end.
"""

from __future__ import annotations

import json
import math
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from headroom.base.event_log import LOG, read_end, read_sent

POOL = "headroom"
ANSWER_S = 30.0  # a server that has just come up, on a busy machine, has taken 13
FLOW_RUN = "PREFECT__FLOW_RUN_ID"  # in the environment of a run that a worker has started
LIVE = ["RUNNING", "PENDING", "CANCELLING"]
PENDING_S = 300.0  # a worker takes seconds from there to the process, which then brings the code

# 127.0.0.1 is never behind a proxy, whatever the environment says.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call_api(method: str, url: str, body: object = None) -> Any:
    """Send a request and return the decoded answer.

    Raises OSError where there is none, HTTPError where it is a refusal. 503 is Prefect's
    answer while its SQLite is busy: it is asked again.
    """
    request = urllib.request.Request(
        url,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    for pause_s in (0.5, 1.0, 2.0, 4.0, None):
        try:
            with _opener.open(request, timeout=ANSWER_S) as response:
                text = response.read()
            break
        except urllib.error.HTTPError as error:
            if error.code != 503 or pause_s is None:
                raise
            error.close()
            time.sleep(pause_s)
    with suppress(ValueError):
        return json.loads(text)
    return text.decode(errors="replace")


def is_healthy(url: str) -> bool:
    """Return whether a health endpoint says that all is well."""
    try:
        return call_api("GET", url) in (True, "OK")
    except (OSError, ValueError):
        return False


def make_pool(api: str) -> None:
    """Make the work pool, where it does not exist. The worker adds the template of its jobs."""
    try:
        call_api("POST", f"{api}/work_pools/", {"name": POOL, "type": "process"})
    except urllib.error.HTTPError as error:
        if error.code != 409:  # it is there already
            raise


def is_pool_paused(api: str) -> bool:
    """Return whether the work pool is paused: nothing would start."""
    return bool(call_api("GET", f"{api}/work_pools/{POOL}")["is_paused"])


def set_pool_paused(api: str, *, paused: bool) -> None:
    """Pause the work pool, so that it hands out no runs, or resume it."""
    call_api("PATCH", f"{api}/work_pools/{POOL}", {"is_paused": paused})


def is_worker_online(api: str, name: str, *, since: float) -> bool:
    """Return whether that worker has reported after `since` (Unix time).

    Not an older one of the same name.
    """
    try:
        workers = call_api("POST", f"{api}/work_pools/{POOL}/workers/filter", {})
    except OSError:
        return False
    return any(
        worker["name"] == name
        and worker["status"] == "ONLINE"
        and datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp() >= since
        for worker in workers
    )


def cancel_flow_run(api: str, run: str) -> None:
    """Cancel a run as the UI would: its worker signals its process."""
    call_api("POST", f"{api}/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})


def confirm_cancelled(api: str, run: str) -> None:
    """Set a run whose process has gone to CANCELLED, where its worker has not done so yet."""
    if call_api("GET", f"{api}/flow_runs/{run}")["state"]["type"] in LIVE:
        set_state(api, run, type="CANCELLED", message="Its process ended with the service.")


def find_dead_pool_runs(api: str, workers: Sequence[float]) -> dict[str, str]:
    """Return the names, by id, of the pool's live runs without a process, e.g. after a power cut.

    Prefect itself would show them as running, or as about to run, for ever. workers: when those
    of the pool that live began, all on this host, in Unix time.
    """
    query = {"state": {"type": {"any_": LIVE}}}
    begun = {
        run["id"]
        for run in _read_pool_runs(api, query)
        if not _may_get_process(run["state"], workers)
    }
    alive = set()  # who is there is looked for after the runs
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            alive.add(process.environ().get(FLOW_RUN))
    dead = begun - alive
    return {
        run["id"]: run["name"]
        for run in _read_pool_runs(api, query)
        if run["id"] in dead and not _may_get_process(run["state"], workers)
    }


def _may_get_process(state: Mapping[str, str], workers: Sequence[float]) -> bool:
    """Return whether a run without a process may be about to get it.

    It may, of a worker that was there when the run became pending, and not long ago.
    """
    if state["type"] != "PENDING":
        return False
    since = datetime.fromisoformat(state["timestamp"]).timestamp()
    return time.time() - since < PENDING_S and any(began <= since for began in workers)


def skip_missed_runs(api: str) -> int:
    """Cancel scheduled runs whose time has passed, all but the latest of each deployment.

    Return how many. A worker would start all of them: seven trainings after a week away.
    Runs that a person asked for stay.
    """
    now = datetime.now(UTC).isoformat()
    query = {"state": {"type": {"any_": ["SCHEDULED"]}}, "expected_start_time": {"before_": now}}
    missed = [run for run in _read_pool_runs(api, query) if run["auto_scheduled"]]
    missed.sort(key=lambda run: datetime.fromisoformat(run["expected_start_time"]))
    latest = {run["deployment_id"]: run["id"] for run in missed}
    earlier = [run["id"] for run in missed if run["id"] not in latest.values()]
    for run in earlier:
        message = "Its time passed while no service was up; a later one takes its place."
        set_state(api, run, type="CANCELLED", message=message, name="Missed")
    return len(earlier)


def _read_pool_runs(api: str, flow_runs: dict[str, Any]) -> list[dict[str, Any]]:
    query = {"flow_runs": flow_runs, "work_pools": {"name": {"any_": [POOL]}}}
    answer: list[dict[str, Any]] = call_api("POST", f"{api}/flow_runs/filter", query)
    return answer


def set_state(api: str, run: str, *, type: str, message: str, name: str = "") -> None:
    """Give a flow run that state, whatever Prefect's rules say. name: if not that of the type."""
    state = {"type": type, "message": message, **({"name": name} if name else {})}
    call_api("POST", f"{api}/flow_runs/{run}/set_state", {"state": state, "force": True})


STATES = {"FINISHED": "COMPLETED", "FAILED": "FAILED"}  # of Prefect, by those of MLflow
UNSENT, RESUMED = "Unsent", "Resumed"  # names of states
MOST = 200  # flow runs that Prefect tells of at once
# Of a flow run: process:HOST:PID:START. Its flow moves it to the field infrastructure_pid.
TAG = "process"


def make_flow_run_tag() -> str:
    """Return the tag of a flow run that names its process: host, pid and start."""
    me = psutil.Process()
    return ":".join(
        [TAG, socket.gethostname(), str(me.pid), f"{me.create_time():.2f}", compute_uptime(me)]
    )


@dataclass(frozen=True)
class FlowRunEnd:
    """How a flow run ended that could not report it itself."""

    type: str = "CRASHED"
    message: str = "Its process was gone."
    at_s: float = math.inf  # Unix time of its last sign of life
    name: str = ""  # of the state, where it is not that of its type
    cancelled: str = ""  # the message of one that was cancelled: where it is, and what goes on


def make_flow_run_end(run: Mapping[str, Any], unsent: str = "") -> FlowRunEnd:
    """Return how the flow run of a run should end, by the end that the run's log has.

    unsent: why MLflow has not got all of it.
    """
    status, tags = run["status"], run["tags"]
    stopped, gate = run.get("stopped") or "", tags.get("gate", "")
    reason = run.get("error") or stopped or "to its end"
    end = FlowRunEnd(STATES.get(status, "CRASHED"), f"{status} in MLflow: {reason}")
    if status == "KILLED":
        return replace(end, cancelled=_describe_cancelled(run, end.message))
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


def _describe_cancelled(run: Mapping[str, Any], message: str) -> str:
    opens, called = run.get("open_command", ""), run.get("run_id") or run.get("name", "")
    page = next((word for word in opens.split() if word.startswith("http")), "")
    again = f"Go on with it on {run['tags'].get('host', 'its host')}: " if called else ""
    again += f"`python -m flows.train --resume {called}`" if called else ""
    return "\n".join(filter(None, (message, page, again)))


def read_flow_run_ends(runs: Path, host: str = "") -> dict[str, FlowRunEnd]:
    """Return how flow runs ended that may not have said so, by their ids, the newest first.

    `runs` keeps it: of those whose process was one of this host and is gone, and of those that
    others went on with. Prefect may have been away then. host: what the runs call it, where that
    is another name.
    """
    ends: dict[str, FlowRunEnd] = {}
    host = host or socket.gethostname()
    for log in sorted(runs.glob(f"*/{LOG}"), reverse=True):
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            run, sent = read_end(log.parent), read_sent(log.parent)
            tags, end = run["tags"], make_flow_run_end(run, sent.get("unsent", ""))
            at_s = log.stat().st_mtime
            if run["status"] == "FINISHED" and not run.get("stopped"):
                of = tags.get("prefect.flow_run_id", "")
                inside = f" in flow run {of}" if of else ""
                message = f"Its training was gone on with{inside}, to its end."
                resumed = FlowRunEnd("COMPLETED", message, at_s, RESUMED)
                for id in filter(None, sent.get("earlier", "").split(",")):
                    ends.setdefault(id, resumed)
            if tags["host"] == host and not is_run_alive(tags):
                ends.setdefault(tags["prefect.flow_run_id"], replace(end, at_s=at_s))
    return ends


def correct_flow_runs(api: str, runs: Path) -> None:
    """Correct in Prefect all flow runs that these runs know of.

    Its server may be gone, or ask for a password: then the next process does it.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        if api:
            ends = read_flow_run_ends(runs)
            end_dead_flow_runs(api, ends)
            correct_flow_run_ends(api, ends)


def correct_flow_run_ends(
    api: str, ends: Mapping[str, FlowRunEnd], *, does: bool = True
) -> dict[str, FlowRunEnd]:
    """Give flow runs their known end where they show another one; return these by name.

    They say that they crashed, but their training came to its end; or that not all was sent, and
    it has been. Raises OSError.
    """
    better = {id: end for id, end in ends.items() if end.type == "COMPLETED"}
    query = {"id": {"any_": list(better)[:MOST]}}
    flow_runs = _read_flow_runs(api, query) if better else []
    wrong = [run for run in flow_runs if _is_false(run["state"], better[run["id"]])]
    for run in wrong if does else ():
        _set_end(api, run["id"], better[run["id"]])
    _explain_cancelled(api, ends, does=does)
    return {run["name"]: better[run["id"]] for run in wrong}


def _explain_cancelled(api: str, ends: Mapping[str, FlowRunEnd], *, does: bool) -> None:
    """Say in the state of those that were cancelled where they are, and what goes on with them:
    their worker, which gave them that state, knows neither."""
    killed = {id: end.cancelled for id, end in ends.items() if end.cancelled}
    query = {"id": {"any_": list(killed)[:MOST]}, "state": {"type": {"any_": ["CANCELLED"]}}}
    for run in _read_flow_runs(api, query) if killed and does else ():
        if run["state"]["message"] != killed[run["id"]]:
            set_state(api, run["id"], type="CANCELLED", message=killed[run["id"]])


def _is_false(state: Mapping[str, str], end: FlowRunEnd) -> bool:
    if state["type"] == "COMPLETED":
        return (state["name"] == UNSENT) != (end.name == UNSENT)
    return state["type"] == "CRASHED" or (state["type"] == "FAILED" and end.name == RESUMED)


def end_dead_flow_runs(
    api: str,
    ends: Mapping[str, FlowRunEnd],
    *,
    workers: Sequence[float] | None = None,
    does: bool = True,
) -> dict[str, FlowRunEnd]:
    """Give those of this host whose process is gone the state that is known, or mark them as
    crashed. workers: when those of the work pool began that live, where all of them are this
    host's; then the pool's runs are looked at too. Returns them by their names; raises OSError."""
    live: dict[str, Any] = {"state": {"type": {"any_": LIVE}}}
    by_id = {run["id"]: run for run in _read_flow_runs(api, live)}
    dead = {id: end for id, run in by_id.items() if (end := _find_end(run, ends)) is not None}
    # What ended while we looked has said so by now.
    still = _read_flow_runs(api, live | {"id": {"any_": list(dead)}}) if dead else []
    names = {run["id"]: run["name"] for run in still}
    names |= find_dead_pool_runs(api, workers) if workers is not None else {}
    for id in names if does else ():
        _set_end(api, id, dead.get(id, FlowRunEnd()))
    return {name: dead.get(id, FlowRunEnd()) for id, name in names.items()}


def _set_end(api: str, id: str, end: FlowRunEnd) -> None:
    set_state(api, id, type=end.type, message=end.message, name=end.name)


def _read_flow_runs(api: str, flow_runs: dict[str, Any]) -> list[dict[str, Any]]:
    answer: list[dict[str, Any]] = call_api(
        "POST", f"{api}/flow_runs/filter", {"flow_runs": flow_runs}
    )
    return answer


def _find_end(run: dict[str, Any], ends: Mapping[str, FlowRunEnd]) -> FlowRunEnd | None:
    """Return how the run ended; None where it may live.

    Where Prefect has started it again since, the end that is known is not its end.
    """
    end = ends.get(run["id"])
    if end and datetime.fromisoformat(run["state"]["timestamp"]).timestamp() <= end.at_s:
        return end
    return FlowRunEnd() if _is_dead(run) else None


def _is_dead(run: dict[str, Any]) -> bool:
    here = f"{TAG}:{socket.gethostname()}:"
    named = [*run["tags"], run.get("infrastructure_pid") or ""]
    mine = [word.removeprefix(here).split(":") for word in named if word.startswith(here)]
    return any(len(words) in (2, 3) and not is_alive(*words) for words in mine)


def compute_uptime(process: psutil.Process) -> str:
    """Return the seconds from the host's start to the process's: no set clock changes them."""
    return f"{process.create_time() - psutil.boot_time():.2f}"


def is_run_alive(tags: Mapping[str, str]) -> bool:
    """Return whether the process of the run with these tags lives; it was one of this host."""
    words = (tags.get(name, "") for name in ("pid", "process.started_at", "process.uptime_s"))
    return is_alive(*words)


def is_alive(pid: str, started_at: str, uptime_s: str = "") -> bool:
    """Return whether that very process is there; a pid alone may be another process by now.

    uptime_s: of the host at its start; the time of its start is another one where the clock was
    set since.
    """
    try:
        process = psutil.Process(int(pid))
        is_same = (
            abs(process.create_time() - float(started_at)) < 1
            or compute_uptime(process) == uptime_s
        )
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, ValueError):
        return False
