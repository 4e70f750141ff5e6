"""Which flow runs are marked as crashed: those of this host whose very process is gone."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from headroom.prefect import prefect_http
from headroom.prefect.prefect_http import (
    FLOW_RUN,
    PENDING_S,
    correct_flow_run_ends,
    end_dead_flow_runs,
    read_flow_run_ends,
)
from tests.run_folders import LOG, write_end

MINE = f"{psutil.Process().create_time():.2f}"


class Prefect:
    """What a server answers. fast: those that end right after they were asked for."""

    def __init__(
        self, patch: pytest.MonkeyPatch, runs: dict[str, Any], fast: Sequence[str] = ()
    ) -> None:
        self.runs, self.fast = runs, fast
        self.ended: dict[str, tuple[str, str]] = {}
        self.names: dict[str, str] = {}
        patch.setattr("headroom.prefect.prefect_http.call_api", self.call)
        patch.setattr("headroom.prefect.prefect_http.call_api", self.call)

    def call(self, method: str, url: str, body: Any) -> Any:
        if url.endswith("/filter"):
            ids = body["flow_runs"].get("id", {"any_": self.runs})["any_"]
            found = [{"id": n, "name": n, **run} for n, run in self.runs.items() if n in ids]
            self.runs = {name: run for name, run in self.runs.items() if name not in self.fast}
            return found
        assert body["force"]
        id, state = url.split("/")[-2], body["state"]
        self.ended[id] = state["type"], state["message"]
        self.names[id] = state.get("name", "")
        return None


def test_a_process_is_known_though_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever came next ended a run that lived: what Linux tells of a process's start moves with
    the clock."""
    me = psutil.Process()
    tags = {"pid": str(me.pid), "process.started_at": f"{me.create_time():.2f}"}
    tags["process.uptime_s"] = prefect_http.compute_uptime(me)
    real, booted = psutil.Process.create_time, psutil.boot_time()
    monkeypatch.setattr(psutil, "boot_time", lambda: booted - 3600)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: real(process) - 3600)
    assert prefect_http.is_run_alive(tags)
    assert not prefect_http.is_run_alive({**tags, "process.uptime_s": ""})
    assert not prefect_http.is_run_alive({**tags, "process.uptime_s": "1.00"})


def test_a_flow_run_is_crashed_only_where_its_very_process_was_here_and_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, began = socket.gethostname(), psutil.Process().create_time()
    tags = {
        "mine": [prefect_http.make_flow_run_tag()],
        "dead": ["other", f"process:{host}:{2**22 + 1}:1.00"],
        "another with its pid": [f"process:{host}:{os.getpid()}:{began - 60:.2f}"],
        "on another host": ["process:elsewhere:1:1.00"],
        "of a worker": [],
        "somebody's own": ["process", f"process:{host}:", f"process:{host}:1:2:3:4"],
    }
    runs: dict[str, Any] = {name: {"tags": words} for name, words in tags.items()}
    gone = f"process:{host}:{2**22 + 1}:1.00"  # where its flow has moved it
    runs |= {"moved": {"tags": ["a"], "infrastructure_pid": gone}}
    runs |= {"of another worker": {"tags": [], "infrastructure_pid": f"{host}:{2**22 + 1}"}}
    prefect = Prefect(monkeypatch, runs)
    dead = ["dead", "another with its pid", "moved"]
    assert list(end_dead_flow_runs("http://x/api", {}, does=False)) == dead and not prefect.ended
    assert list(end_dead_flow_runs("http://x/api", {})) == dead
    assert prefect.ended == dict.fromkeys(dead, ("CRASHED", "Its process was gone."))


def test_a_flow_run_gets_the_end_that_its_run_had_while_prefect_was_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    me = {"host": socket.gethostname(), "pid": "4194305", "process.started_at": "1.0"}
    for name, status, host in (
        ("done", "FINISHED", {}),
        ("failed", "FAILED", {}),
        ("killed", "KILLED", {}),
        ("elsewhere", "FINISHED", {"host": "elsewhere"}),
        ("alive", "FINISHED", {"pid": str(os.getpid()), "process.started_at": MINE}),
        ("begun again", "FAILED", {}),
    ):
        run = {
            "status": status,
            "error": "why",
            "tags": {"prefect.flow_run_id": name, **me, **host},
        }
        (tmp_path / name).mkdir()
        write_end(tmp_path / name, run)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / LOG).write_text("[]\n")
    now = datetime.now(UTC)
    at = {name: now - timedelta(minutes=1) for name in ("done", "failed", "killed", "alive")}
    at |= {"begun again": now + timedelta(minutes=1), "elsewhere": now - timedelta(minutes=1)}
    runs = {n: {"tags": [], "state": {"timestamp": t.isoformat()}} for n, t in at.items()}
    prefect = Prefect(monkeypatch, runs)
    end_dead_flow_runs("http://x/api", read_flow_run_ends(tmp_path))
    assert prefect.ended == {
        "done": ("COMPLETED", "FINISHED in MLflow: why"),
        "failed": ("FAILED", "FAILED in MLflow: why"),
        "killed": ("CRASHED", "KILLED in MLflow: why"),
    }


def test_a_cancelled_flow_run_says_where_it_is_and_what_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It had the message of its worker, no link, and no command to go on."""
    run = _kept(tmp_path, "cancelled", "KILLED")
    more = {"run_id": "abc", "open_command": "http://x/#/abc", "error": "terminated"}
    write_end(tmp_path / "cancelled", run | more)
    state = {"type": "CANCELLED", "name": "Cancelled", "message": "Flow run was cancelled."}
    prefect = Prefect(monkeypatch, {"cancelled": {"state": state, "tags": []}})
    correct_flow_run_ends("http://x/api", read_flow_run_ends(tmp_path))
    kind, message = prefect.ended["cancelled"]
    assert kind == "CANCELLED" and message.splitlines() == [
        "KILLED in MLflow: terminated",
        "http://x/#/abc",
        f"Go on with it on {socket.gethostname()}: `python -m flows.train --resume abc`",
    ]
    prefect.runs, prefect.ended = {"cancelled": {"state": {**state, "message": message}}}, {}
    correct_flow_run_ends("http://x/api", read_flow_run_ends(tmp_path))
    assert not prefect.ended, "said once"


def test_what_ends_while_the_dead_are_looked_for_keeps_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dead = [f"process:{socket.gethostname()}:{2**22 + 1}:1.00"]
    prefect = Prefect(monkeypatch, {"one": {"tags": dead}, "two": {"tags": dead}}, fast=["one"])
    end_dead_flow_runs("http://x/api", {})
    assert list(prefect.ended) == ["two"]


def _kept(runs: Path, name: str, status: str = "FINISHED", **sent: str) -> dict[str, Any]:
    """The folder of a run whose process was here and is gone."""
    tags = {"host": socket.gethostname(), "pid": "4194305", "process.started_at": "1.0"}
    run = {"status": status, "tags": {**tags, "prefect.flow_run_id": name}}
    (runs / name).mkdir()
    write_end(runs / name, run)
    (runs / name / "sent.json").write_text(json.dumps(sent))
    return run


def test_a_flow_run_that_crashed_when_all_was_done_or_was_gone_on_with_to_the_end_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """PostgreSQL was away for 25 s at a training's end: CRASHED, with a whole record in MLflow. And
    one that was killed, resumed and FINISHED was told as failed for ever."""
    _kept(tmp_path, "whole", earlier="killed,failed,stopped by a person")
    _kept(tmp_path, "really failed", "FAILED", earlier="killed before")
    _kept(tmp_path, "sent at last")
    _kept(tmp_path, "sent in part", unsent="its model is not in MLflow yet")
    _kept(tmp_path, "still in part", unsent="its model is not in MLflow yet")
    at = datetime.now(UTC).isoformat()
    states = {
        "whole": ("CRASHED", "Crashed"),
        "killed": ("CRASHED", "Crashed"),
        "failed": ("FAILED", "Failed"),
        "stopped by a person": ("CANCELLED", "Cancelled"),
        "really failed": ("CRASHED", "Crashed"),
        "killed before": ("CRASHED", "Crashed"),
        "sent at last": ("COMPLETED", "Unsent"),
        "sent in part": ("COMPLETED", "Completed"),
        "still in part": ("COMPLETED", "Unsent"),
    }
    runs = {
        id: {"tags": [], "state": {"type": type, "name": name, "timestamp": at}}
        for id, (type, name) in states.items()
    }
    prefect = Prefect(monkeypatch, runs)
    known = read_flow_run_ends(tmp_path)
    told = correct_flow_run_ends("http://x/api", known, does=False)
    assert not prefect.ended and correct_flow_run_ends("http://x/api", known) == told
    assert told.keys() == prefect.ended.keys()
    types = {id: (ended[0], prefect.names[id]) for id, ended in prefect.ended.items()}
    assert types == {
        "whole": ("COMPLETED", ""),
        "killed": ("COMPLETED", "Resumed"),
        "failed": ("COMPLETED", "Resumed"),
        "sent at last": ("COMPLETED", ""),
        "sent in part": ("COMPLETED", "Unsent"),
    }
    assert "in flow run whole" in prefect.ended["killed"][1]
    assert prefect.ended["sent in part"][1] == "its model is not in MLflow yet"


@pytest.mark.parametrize(
    ("age_s", "worker_began_s", "is_dead"),
    [
        (10, 60, False),  # it is about to get its process
        (10, 5, True),  # from a worker that came later: not from that one
        (10, None, True),
        (PENDING_S + 10, 9999, True),
    ],
)
def test_a_pending_run_ends_where_its_worker_is_gone_or_took_too_long(
    monkeypatch: pytest.MonkeyPatch, age_s: float, worker_began_s: float | None, is_dead: bool
) -> None:
    """A worker was killed in a pull step: its run was PENDING for 68 minutes."""
    now = datetime.now(UTC)
    state = {"type": "PENDING", "timestamp": (now - timedelta(seconds=age_s)).isoformat()}
    prefect = Prefect(monkeypatch, {"one": {"tags": [], "state": state}})
    workers = [] if worker_began_s is None else [now.timestamp() - worker_began_s]
    end_dead_flow_runs("http://x/api", {}, workers=workers)
    assert list(prefect.ended) == (["one"] if is_dead else [])
    end_dead_flow_runs("http://x/api", {})  # of a server whose workers may be anywhere
    assert list(prefect.ended) == (["one"] if is_dead else [])


def test_a_pending_run_whose_process_brings_the_code_lives_without_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {"type": "PENDING", "timestamp": datetime.now(UTC).isoformat()}
    prefect = Prefect(monkeypatch, {"one": {"tags": [], "state": state}})
    with subprocess.Popen(["sleep", "60"], env={**os.environ, FLOW_RUN: "one"}) as process:
        while process.poll() is None and not psutil.Process(process.pid).environ().get(FLOW_RUN):
            time.sleep(0.01)
        end_dead_flow_runs("http://x/api", {}, workers=[])
        process.kill()
    assert not prefect.ended


def test_a_run_that_mlflow_has_not_got_whole_ends_as_unsent(tmp_path: Path) -> None:
    tags = {"prefect.flow_run_id": "mine", "host": socket.gethostname(), "pid": "4194304"}
    (tmp_path / "one").mkdir()
    write_end(
        tmp_path / "one", {"status": "FINISHED", "tags": {**tags, "process.started_at": "1.0"}}
    )
    for unsent, name in (("part of it is not there", "Unsent"), ("", "")):
        (tmp_path / "one" / "sent.json").write_text(json.dumps({"unsent": unsent}))
        end = read_flow_run_ends(tmp_path)["mine"]
        assert (end.type, end.name) == ("COMPLETED", name)
        assert not unsent or end.message == unsent
