"""The memory of a training for a person who asks first, with the past of a real MLflow."""

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from headroom.device.detection import DeviceError
from headroom.settings.run_config import RunConfig
from tasks.forecast_memory import forecast_memory


def test_a_forecast_leaves_no_run_and_no_database(place: Path) -> None:
    foreseen = forecast_memory(RunConfig())
    assert foreseen.fits and foreseen.largest == 64 and foreseen.past_mib is None
    assert sorted(f.name for f in place.iterdir()) == [".headroom", "mlflow.yaml"]
    assert [f.name for f in (place / ".headroom").iterdir()] == ["data"]


def _limited(limit_mib: float) -> RunConfig:
    return RunConfig.model_validate({"memory": {"limit_mib": limit_mib}})


def test_what_is_too_small_is_told_and_not_raised(place: Path) -> None:
    whole = forecast_memory(RunConfig()).memory
    tight = forecast_memory(_limited(whole.parameter_bytes / 2**20))
    assert not tight.fits and tight.largest is None
    with pytest.raises(DeviceError, match="^memory.limit_mib: must be above 0 and at most"):
        forecast_memory(_limited(2.0**30))


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
