"""A training at a desk, whose server of Prefect may fail before its flow has begun."""

import pytest
from httpx import ConnectError
from prefect.client.schemas.objects import State
from prefect.states import Completed

from headroom.prefect.run_task import IS_RECORDED
from headroom.prefect_flows import flow_run
from headroom.process import command


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_flow_that_has_begun_is_never_run_once_more(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """Code of a user's own may ask servers too, and fail as Prefect's client does."""
    monkeypatch.setattr(flow_run, "is_temporary_api", lambda api: True)
    monkeypatch.setattr(flow_run, "is_healthy", lambda url: True)
    monkeypatch.setattr(command, "leave_prefect", lambda: None)
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
        assert not IS_RECORDED.get()
        return Completed(data=3)

    if has_begun:
        with pytest.raises(ConnectError, match="refused"):
            flow_run.run_at_desk(flow, function)
    else:
        assert flow_run.run_at_desk(flow, function) == 3
    assert called == (["flow"] if has_begun else ["flow", "function"])
    assert IS_RECORDED.get() and flow_run._begun.get() is None
