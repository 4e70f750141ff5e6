"""A training at a desk, whose server of Prefect may fail before its flow has begun."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from httpx import ConnectError
from prefect import Task
from prefect.client.schemas.objects import State
from prefect.states import Completed

from headroom.prefect_flows import flow_run
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from tasks.detect_device import detect_device

CPU = RunConfig.model_validate({"device": {"name": "cpu"}}).device


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_flow_that_has_begun_is_never_run_once_more(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """Code of a user's own may ask servers too, and fail as Prefect's client does."""
    monkeypatch.setattr(flow_run, "is_temporary_api", lambda api: True)
    monkeypatch.setattr(flow_run, "is_healthy", lambda url: True)
    monkeypatch.setattr("headroom.process.command.leave_prefect", lambda: None)
    monkeypatch.setattr(Task, "__call__", lambda *_, **__: "recorded")
    called: list[str] = []

    def flow() -> None:
        called.append("flow")
        begun = flow_run._begun.get()
        assert begun is not None
        if has_begun:
            begun.set()
        raise ConnectError("refused")

    def function() -> State[int]:
        called.append("function")
        assert detect_device(CPU).name == "cpu", "a task that Prefect records"
        return Completed(data=3)

    if has_begun:
        with pytest.raises(ConnectError, match="refused"):
            flow_run.run_at_desk(flow, function)
    else:
        assert flow_run.run_at_desk(flow, function) == 3
    assert called == (["flow"] if has_begun else ["flow", "function"])
    assert detect_device(CPU) == "recorded" and flow_run._begun.get() is None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("train.epochs: no"), "bad_input: train.epochs: no"),
        (KeyError("w"), "user_code: 'w'"),
    ],
)
def test_prefect_is_told_the_class_of_what_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    record: Any = SimpleNamespace(folder=tmp_path, failure=None, config=RunConfig())
    with pytest.raises(type(error)), flow_run.schedule_retry(record):
        raise error  # called from Python, or at a desk
    monkeypatch.setattr(flow_run, "_make_own_key", lambda: "flow run 1")
    monkeypatch.setattr(flow_run, "flow_run", SimpleNamespace(id="1", run_count=1))
    with pytest.raises(type(error)), flow_run.schedule_retry(record):
        raise error  # a part of somebody's own flow
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "1")
    with pytest.raises(flow_run.Ended) as told, flow_run.schedule_retry(record):
        raise error
    assert str(told.value) == said and told.value.__cause__ is error
