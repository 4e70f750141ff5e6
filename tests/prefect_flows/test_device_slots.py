"""What a real Prefect server shows of a device that is held, and of a run that waits for one."""

from __future__ import annotations

from typing import Any

import pytest
from prefect import flow
from prefect.runtime import flow_run

from headroom.prefect.prefect_http import call_api
from headroom.prefect_flows import flow_run as run_of_flow

DEVICE = "GPU-1b2c"


def _slots(api: str) -> int:
    return int(call_api("GET", f"{api}/v2/concurrency_limits/{DEVICE}")["active_slots"])


def _state(api: str) -> dict[str, Any]:
    state: dict[str, Any] = call_api("GET", f"{api}/flow_runs/{flow_run.id}")["state"]
    return state


def test_a_device_that_is_held_has_its_slot_taken_and_nobody_waits_for_prefect(
    prefect_api: str,
) -> None:
    @flow
    def play() -> None:
        with run_of_flow.take_device_slot(DEVICE):
            assert _slots(prefect_api) == 1
            with run_of_flow.take_device_slot(
                DEVICE
            ):  # of a holder that is gone, as Prefect sees it
                assert _slots(prefect_api) == 1
        assert _slots(prefect_api) == 0

    play()


def test_a_run_that_waits_says_for_what_and_runs_again(prefect_api: str) -> None:
    @flow
    def play() -> None:
        run_of_flow.show_waiting("GPU-1b2c is held by process 7, nightly")
        state = _state(prefect_api)
        assert (state["type"], state["name"]) == ("RUNNING", "AwaitingDevice")
        assert state["message"] == "GPU-1b2c is held by process 7, nightly"
        run_of_flow.show_waiting("")
        assert _state(prefect_api)["name"] == "Running"

    play()
    play(return_state=True)


def test_without_a_server_it_is_silent(prefect_api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @flow
    def play() -> str:
        def away(**_: object) -> None:
            raise ConnectionError("the server is away")

        monkeypatch.setattr(run_of_flow, "get_client", away)
        run_of_flow.show_waiting("something")
        with run_of_flow.take_device_slot(DEVICE):
            return "done"

    assert play() == "done"
    with run_of_flow.take_device_slot(DEVICE):  # outside of a flow
        pass
