"""A forecast against what CUDA's own allocator counts: bytes held and bytes reserved."""

from pathlib import Path

import pytest
import torch

from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.training import choose_step
from headroom.training.plan import make_plan
from headroom.training.plan_forecast import forecast_training
from headroom.training.trainer import train
from headroom.watch.leaks import release_device_memory, take_baseline

if not torch.cuda.is_available() or torch.version.hip:
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
MIB = 2**20
CASES = {
    "linear": ({"source": "synthetic", "args": {"rows": 3000, "features": 512}}, {}, 1024),
    "mlp": (
        {"source": "synthetic", "args": {"rows": 3000, "features": 256}},
        {"hidden": [512, 512], "dropout": 0.1},
        1024,
    ),
    "transformer": ({"source": "text", "args": {"context": 64}}, {"width": 64, "layers": 2}, 32),
    # 12 % of what is held was missing, 45 % of its evaluation: what attention takes for a moment.
    "transformer 256": (
        {"source": "text", "args": {"context": 256}},
        {"width": 128, "layers": 2},
        16,
    ),
}


# What lies in blocks of which the rest, of up to 1 MiB, is not split off.
UNSPLIT = {
    "mlp": (
        {"source": "synthetic", "args": {"rows": 6000, "features": 64}},
        {"hidden": [1024, 1024]},
        512,
    ),
    "cnn": ({"source": "digits"}, {}, 64),
}


def _config(model: str, tmp_path: Path, **train) -> RunConfig:
    source, args, batch_size = CASES[model]
    if source["source"] == "text":
        text = tmp_path / "text.txt"
        text.write_text("a text of some length, to be learnt by heart. " * 600)
        source = {**source, "path": str(text)}
    sections = {
        "data": {**source, "cache": str(tmp_path / "cache")},
        "model": {"name": model.split()[0], "args": args},
        "train": {"batch_size": batch_size, "epochs": 1, "compile": "off", **train},
    }
    return RunConfig.model_validate(sections)


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("model", CASES)
def test_a_forecast_is_within_5_percent_of_what_is_held_and_10_of_what_is_reserved(
    model: str, precision: str, optim: str, tmp_path: Path
) -> None:
    device = detect_best_device("cuda")
    if precision == "bf16" and not device.bf16:
        pytest.skip("needs bf16")
    config = _config(model, tmp_path, precision=precision)
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"name": optim})})
    data = prepare_dataset(config.data)
    before = take_baseline(device.name)
    told = forecast_training(make_plan(config, device, data))
    assert torch.cuda.memory_allocated() <= before.bytes + 512  # what wakes autograd up
    facts = train(make_plan(config, device, data), folder=tmp_path, log=lambda metrics, step: None)
    release_device_memory(device.name, baseline_bytes=before.bytes)
    _compare(told, facts.metrics, before)


@pytest.mark.parametrize("model", UNSPLIT)
def test_a_forecast_counts_the_whole_blocks_that_tensors_lie_in(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 % of an mlp and 4.4 % of the cnn were not foretold: what was held beside tensors."""
    if model == "cnn" and torch.backends.cudnn.enabled:
        pytest.skip("cuDNN takes for a moment what it likes")
    monkeypatch.setitem(CASES, model, UNSPLIT[model])
    config = _config(model, tmp_path, precision="fp32")
    device, data = detect_best_device("cuda"), prepare_dataset(config.data)
    before = take_baseline(device.name)
    told = forecast_training(make_plan(config, device, data))
    facts = train(make_plan(config, device, data), folder=tmp_path, log=lambda metrics, step: None)
    release_device_memory(device.name, baseline_bytes=before.bytes)
    held = facts.metrics["memory/run_peak_allocated_mib"] * MIB - before.bytes
    assert told.peak_bytes == pytest.approx(held, rel=0.01)


def test_a_recorded_step_is_part_of_the_forecast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """17.2 MiB were foretold of a run that held 82: its recording was forgotten."""
    monkeypatch.setattr(choose_step, "GRAPH_BELOW_S", 1e9)
    config = _config("mlp", tmp_path, precision="fp32", compile="auto", epochs=50)
    device, data = detect_best_device("cuda"), prepare_dataset(config.data)
    before = take_baseline(device.name)
    told = forecast_training(make_plan(config, device, data)).graphed
    assert told is not None
    facts = train(make_plan(config, device, data), folder=tmp_path, log=lambda metrics, step: None)
    release_device_memory(device.name, baseline_bytes=before.bytes)
    _compare(told, facts.metrics, before)


def test_a_limit_that_just_holds_what_is_needed_is_kept_without_running_out(tmp_path: Path) -> None:
    """44 MiB were admitted under a limit that counts segments, and failed 11 times."""
    config = _config("mlp", tmp_path, precision="fp32", epochs=2)
    device, data = detect_best_device("cuda"), prepare_dataset(config.data)
    needed_bytes = forecast_training(make_plan(config, device, data)).needed_bytes
    before = take_baseline(device.name)
    # The limit is the whole process's, what it holds from before included.
    limit_mib = (needed_bytes + (before.taken.reserved or 0)) / MIB
    memory = config.memory.model_copy(update={"limit_mib": limit_mib})
    config = config.model_copy(update={"memory": memory})
    facts = train(make_plan(config, device, data), folder=tmp_path, log=lambda metrics, step: None)
    release_device_memory(device.name, baseline_bytes=before.bytes)
    assert facts.metrics["memory/run_peak_reserved_mib"] <= limit_mib
    assert facts.metrics["memory/ooms_recovered"] == 0
    assert facts.tags["micro_batch"] == str(config.train.batch_size)


def _compare(told, metrics, before) -> None:
    """Peaks are the whole process's, what it held before included."""
    held = metrics["memory/run_peak_allocated_mib"] * MIB - before.bytes
    reserved = metrics["memory/run_peak_reserved_mib"] * MIB - before.taken.reserved
    assert told.peak_bytes == pytest.approx(held, rel=0.05)
    # Segments that are held from before have room, which small blocks fill first.
    room = before.taken.reserved - before.bytes
    assert 0.9 * reserved <= told.reserved_bytes <= 1.1 * (reserved + room)
