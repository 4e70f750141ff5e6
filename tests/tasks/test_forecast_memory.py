"""The memory of a training for a person who asks first, with the past of a real MLflow."""

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient
from rich.console import Console

from headroom.device.detection import DeviceError
from headroom.settings.run_config import MemoryConfig, RunConfig
from headroom.tracking.ask_mlflow import read_past_metrics
from headroom.tracking.tracking_settings import read_tracking_settings
from tasks.forecast_memory import forecast_memory


def test_a_forecast_leaves_no_run_and_no_database(place: Path) -> None:
    foreseen = forecast_memory(RunConfig())
    assert foreseen.fits and foreseen.largest == 64 and foreseen.past_mib is None
    assert sorted(f.name for f in place.iterdir()) == [".headroom", "mlflow.yaml"]
    assert [f.name for f in (place / ".headroom").iterdir()] == ["data"]


def test_what_is_too_small_is_told_and_not_raised(place: Path) -> None:
    whole = forecast_memory(RunConfig()).memory
    tight = forecast_memory(RunConfig(memory=MemoryConfig(limit_mib=whole.parameter_bytes / 2**20)))
    assert not tight.fits and tight.largest is None
    with pytest.raises(DeviceError, match="^memory.limit_mib: must be above 0 and at most"):
        forecast_memory(RunConfig(memory=MemoryConfig(limit_mib=2.0**30)))


def test_the_table_has_every_owner_and_phase_and_what_a_run_alike_took(place: Path) -> None:
    foreseen = replace(forecast_memory(RunConfig()), past_mib=12.5, room_bytes=math.inf)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(foreseen.make_table())
    text = console.export_text()
    for name in (
        *foreseen.memory.owners,
        *foreseen.memory.phases,
        "12.5 MiB",
        "not told",
        "64 rows",
    ):
        assert name in text


def test_the_past_is_that_of_finished_runs_alike(place: Path) -> None:
    client = MlflowClient(read_tracking_settings().tracking_uri)
    experiment = client.create_experiment(read_tracking_settings().experiment)
    for tag, status, value in (
        ("a", "FINISHED", 1.0),
        ("a", "FAILED", 2.0),
        ("b", "FINISHED", 3.0),
    ):
        run = client.create_run(experiment, tags={"alike": tag}).info.run_id
        client.log_metric(run, "memory/x_mib", value)
        client.set_terminated(run, status)
    assert read_past_metrics(read_tracking_settings(), "a", ["memory/x_mib", "memory/y_mib"]) == {
        "memory/x_mib": 1.0
    }
