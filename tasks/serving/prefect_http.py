"""What `serve` asks of its Prefect server, in plain HTTP: is it there, the work pool, the worker,
and the runs that are to be ended. Importing Prefect's client would cost two seconds a call.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import psutil

POOL = "headroom"
ANSWER_S = 30.0  # a server that has just come up, on a busy machine, has taken 13
FLOW_RUN = "PREFECT__FLOW_RUN_ID"  # in the environment of a run that a worker has started
LIVE = ["RUNNING", "PENDING", "CANCELLING"]
PENDING_S = 300.0  # a worker takes seconds from there to the process, which then brings the code

# 127.0.0.1 is never behind a proxy, whatever the environment says.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def call(method: str, url: str, body: object = None) -> Any:
    """The decoded answer. Raises OSError where there is none, HTTPError where it is a refusal.

    503 is Prefect's word for a busy SQLite, and means: ask again.
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


def answers(url: str) -> bool:
    """Whether a health endpoint says that all is well."""
    try:
        return call("GET", url) in (True, "OK")
    except (OSError, ValueError):
        return False


def make_pool(api: str) -> None:
    """Make the work pool. The worker fills in how its jobs look."""
    try:
        call("POST", f"{api}/work_pools/", {"name": POOL, "type": "process"})
    except urllib.error.HTTPError as error:
        if error.code != 409:  # it is there already
            raise


def is_paused(api: str) -> bool:
    """Whether somebody has paused the pool: nothing would start."""
    return bool(call("GET", f"{api}/work_pools/{POOL}")["is_paused"])


def pause(api: str, *, paused: bool) -> None:
    """Let the pool hand out no runs, or let it again."""
    call("PATCH", f"{api}/work_pools/{POOL}", {"is_paused": paused})


def worker_is_online(api: str, name: str, *, since: float) -> bool:
    """Whether that worker has reported after `since` (unix time); not its namesake of yesterday."""
    try:
        workers = call("POST", f"{api}/work_pools/{POOL}/workers/filter", {})
    except OSError:
        return False
    return any(
        worker["name"] == name
        and worker["status"] == "ONLINE"
        and datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp() >= since
        for worker in workers
    )


def cancel(api: str, run: str) -> None:
    """Cancel a run as the UI would: its worker signals its process."""
    call("POST", f"{api}/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})


def confirm_cancelled(api: str, run: str) -> None:
    """Say that a run whose process has gone is cancelled, where its worker has not said so yet."""
    if call("GET", f"{api}/flow_runs/{run}")["state"]["type"] in LIVE:
        set_state(api, run, type="CANCELLED", message="Its process ended with the service.")


def dead_of_pool(api: str, workers: Sequence[float]) -> dict[str, str]:
    """Of the pool's live runs those without a process, e.g. after a power cut, their names by their
    ids. Prefect itself would show them as running, or as about to run, for ever. workers: when
    those of the pool that live began, all on this host, in Unix time."""
    asked = {"state": {"type": {"any_": LIVE}}}
    begun = {run["id"] for run in _runs(api, asked) if not _gets_process(run["state"], workers)}
    alive = set()  # who is there is looked for after the runs
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            alive.add(process.environ().get(FLOW_RUN))
    dead = begun - alive
    return {
        run["id"]: run["name"]
        for run in _runs(api, asked)
        if run["id"] in dead and not _gets_process(run["state"], workers)
    }


def _gets_process(state: Mapping[str, str], workers: Sequence[float]) -> bool:
    """Whether one without a process may be about to get it: of a worker that was there when the run
    became pending, and not long ago."""
    if state["type"] != "PENDING":
        return False
    since = datetime.fromisoformat(state["timestamp"]).timestamp()
    return time.time() - since < PENDING_S and any(began <= since for began in workers)


def skip_the_missed(api: str) -> int:
    """Of the scheduled runs of a deployment whose time has passed, let only the latest start: a
    worker would start all of them, seven trainings after a week away. What a person asked for
    stays. Returns how many were cancelled."""
    now = datetime.now(UTC).isoformat()
    asked = {"state": {"type": {"any_": ["SCHEDULED"]}}, "expected_start_time": {"before_": now}}
    missed = [run for run in _runs(api, asked) if run["auto_scheduled"]]
    missed.sort(key=lambda run: datetime.fromisoformat(run["expected_start_time"]))
    latest = {run["deployment_id"]: run["id"] for run in missed}
    earlier = [run["id"] for run in missed if run["id"] not in latest.values()]
    for run in earlier:
        message = "Its time passed while no service was up; a later one takes its place."
        set_state(api, run, type="CANCELLED", message=message)
    return len(earlier)


def _runs(api: str, flow_runs: dict[str, Any]) -> list[dict[str, Any]]:
    asked = {"flow_runs": flow_runs, "work_pools": {"name": {"any_": [POOL]}}}
    found: list[dict[str, Any]] = call("POST", f"{api}/flow_runs/filter", asked)
    return found


def set_state(api: str, run: str, *, type: str, message: str, name: str = "") -> None:
    """Give a flow run that state, whatever Prefect's rules say. name: if not that of the type."""
    state = {"type": type, "message": message, **({"name": name} if name else {})}
    call("POST", f"{api}/flow_runs/{run}/set_state", {"state": state, "force": True})
