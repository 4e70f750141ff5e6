"""Which flow runs are marked as crashed: those of this host whose very process is gone."""

import os
import socket
from typing import Any

import psutil
import pytest

from tasks.serving import crashed_flow_runs


def test_a_flow_run_is_crashed_only_where_its_very_process_was_here_and_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, began = socket.gethostname(), psutil.Process().create_time()
    tags = {
        "mine": [crashed_flow_runs.tag()],
        "dead": ["other", f"process:{host}:{2**22 + 1}:1.00"],
        "another with its pid": [f"process:{host}:{os.getpid()}:{began - 60:.2f}"],
        "on another host": ["process:elsewhere:1:1.00"],
        "of a worker": [],
        "somebody's own": ["process", f"process:{host}:", f"process:{host}:1:2:3"],
    }
    ended = []

    def call(method: str, url: str, body: Any) -> Any:
        if url.endswith("/filter"):
            return [{"id": name, "tags": words} for name, words in tags.items()]
        assert body["state"]["type"] == "CRASHED" and body["force"]
        ended.append(url.split("/")[-2])
        return None

    monkeypatch.setattr("tasks.serving.crashed_flow_runs.call", call)
    monkeypatch.setattr("tasks.serving.prefect_http.call", call)
    assert crashed_flow_runs.crash_the_dead("http://x/api") == 2
    assert ended == ["dead", "another with its pid"]
