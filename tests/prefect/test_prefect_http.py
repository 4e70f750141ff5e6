"""What is asked of a Prefect server, asked of a real one."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

from headroom.prefect.prefect_http import POOL, call_api, make_pool, skip_missed_runs


def test_of_a_week_of_missed_nights_only_the_last_one_is_made_up_for(prefect_api: str) -> None:
    make_pool(prefect_api)
    flow = call_api("POST", f"{prefect_api}/flows/", {"name": f"night-{uuid4().hex[:6]}"})
    given = {"flow_id": flow["id"], "work_pool_name": POOL, "entrypoint": "x.py:x"}
    hourly = {"schedule": {"interval": 86400, "timezone": "UTC"}, "active": True}
    made = {}
    for name in ("one", "another"):
        order = {**given, "name": name, "schedules": [hourly]}
        made[name] = call_api("POST", f"{prefect_api}/deployments/", order)["id"]
    asked_for = call_api("POST", f"{prefect_api}/deployments/{made['one']}/create_flow_run", {})
    now = datetime.now(UTC)
    week = {
        "start_time": (now - timedelta(days=6, hours=1)).isoformat(),
        "end_time": now.isoformat(),
        "min_runs": 6,
    }
    for deployment in made.values():
        call_api("POST", f"{prefect_api}/deployments/{deployment}/schedule", week)

    cancelled = skip_missed_runs(prefect_api)

    for deployment in made.values():
        asked = {"deployments": {"id": {"any_": [deployment]}}}
        runs = call_api("POST", f"{prefect_api}/flow_runs/filter", asked)
        runs = [r for r in runs if r["expected_start_time"] < now.isoformat()]
        nights = sorted(
            (r["expected_start_time"], r["state_name"]) for r in runs if r["auto_scheduled"]
        )
        assert len(nights) >= 6
        assert [state for _, state in nights] == ["Missed"] * (len(nights) - 1) + ["Scheduled"]
        cancelled -= len(nights) - 1
    assert cancelled == 0
    asked_again = call_api("GET", f"{prefect_api}/flow_runs/{asked_for['id']}")
    assert asked_again["state_type"] == "SCHEDULED"
    for deployment in made.values():
        call_api("DELETE", f"{prefect_api}/deployments/{deployment}")
