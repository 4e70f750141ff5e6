"""The forecast for GPUs that are not here, held against that for a GPU with as much memory."""

from dataclasses import replace
from pathlib import Path

import pytest

from flows.cli.flags import parse_training
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.read_settings import ConfigError, override_config, resolve_config
from headroom.training.gpu_fit import TAKEN_MIB, make_gpu_table, parse_gpu_sizes
from headroom.training.plan import make_plan
from headroom.training.plan_forecast import forecast_training
from tasks.forecast_memory import forecast_on_gpus

MIB = 2**20
SEGMENT_MIB = 2.0
WIDE = {"model.args": {"hidden": [2048, 2048]}, "train.batch_size": 256}


def test_the_largest_batch_fits_and_twice_as_much_does_not(place: Path) -> None:
    config = resolve_config(None, WIDE)
    data = prepare_dataset(config.data, batch_size=256, seed=config.train.seed)

    def needed_mib(room_mib: float, rows: int) -> float:
        room = int(room_mib * MIB)
        gpu = replace(detect_best_device("cpu"), name="cuda:0", kind="cuda", index=0, bf16=True)
        gpu = replace(gpu, total_bytes=room, free_bytes=room)
        larger = override_config(config, {"train.batch_size": rows})
        return forecast_training(make_plan(larger, gpu, data)).needed_bytes / MIB

    asked = {f"{mib} MiB": float(TAKEN_MIB + mib) for mib in (1, 100, 120, 8000)}
    gpus = forecast_on_gpus(config, asked)
    tiny, small, middle, large = gpus.values()
    assert large.fits and large.batch == large.micro_batch == 1024, "1,438 rows"
    assert not tiny.fits and tiny.micro_batch is None and tiny.batch is None
    for one in (small, middle):
        # By a segment of the allocator's: what is freed when is not always the same.
        assert one.needed_mib == pytest.approx(needed_mib(one.room_mib, 256), abs=SEGMENT_MIB)
        assert one.fits is (one.needed_mib <= one.room_mib)
        if one.batch is not None:
            assert needed_mib(one.room_mib, one.batch) <= one.room_mib + SEGMENT_MIB
            assert needed_mib(one.room_mib, 2 * one.batch) > one.room_mib - SEGMENT_MIB
    assert not small.fits and middle.fits and middle.batch is not None, "one of each"
    assert list(make_gpu_table(gpus, 256).columns[-1].cells) == ["NO", "NO", "yes", "yes"]


def test_names_and_sizes_are_told_apart_and_others_are_refused() -> None:
    assert parse_gpu_sizes("T4, 24GiB,512 mib") == {
        "t4": 15360.0,
        "24gib": 24576.0,
        "512 mib": 512.0,
    }
    with pytest.raises(ConfigError) as refused:
        parse_gpu_sizes("x5,0GiB,a100")
    assert "t4, a10, a10g" in refused.value.problems[0]
    assert [line.split(":")[0] for line in refused.value.problems] == [
        "--for x5",
        "--for 0gib",
        "--for a100",
    ]
    with pytest.raises(ConfigError, match="--for: goes with --forecast"):
        parse_training(["--for", "t4"])
    with pytest.raises(ConfigError, match="--require: goes with --forecast"):
        parse_training(["--require", "t4"])
