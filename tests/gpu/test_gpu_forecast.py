"""A forecast against what the allocator of a real CUDA GPU counts at its peak."""

import gc
from pathlib import Path

import pytest
import torch

from tasks.engine.config import ModelConfig, RunConfig, TrainConfig
from tasks.engine.data import prepare
from tasks.engine.data_config import DataConfig
from tasks.engine.device import detect
from tasks.engine.forecast import forecast
from tasks.engine.leaks import release
from tasks.engine.training import train

if not torch.cuda.is_available() or torch.version.hip:
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
CASES = {
    "mlp": ({"source": "synthetic", "features": 512}, {"hidden": [2048, 2048]}, 2048),
    "cnn": ({"source": "digits"}, {"width": 64}, 1024),
    "transformer": ({"source": "text", "context": 256}, {"width": 256}, 32),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", CASES)
def test_a_forecast_is_within_15_percent_of_the_allocators_peak(
    model: str, precision: str, tmp_path: Path
) -> None:
    source, args, batch_size = CASES[model]
    device = detect("cuda")
    if precision == "bf16" and not device.bf16:
        pytest.skip("needs bf16")
    data = prepare(DataConfig(cache=str(tmp_path / "cache"), **source))
    config = RunConfig(
        model=ModelConfig(name=model, args=args),
        # Without torch.compile: a recorded graph has a pool of its own.
        train=TrainConfig(batch_size=batch_size, precision=precision, epochs=1, compile="off"),
    )
    before = torch.cuda.memory_allocated()
    told = forecast(config, data, device)
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 512  # what wakes autograd up
    release(torch.device(device.name), baseline_bytes=before)
    facts = train(config, device, data, folder=tmp_path, log=lambda metrics, step: None)
    measured = facts.metrics["memory/run_peak_allocated_mib"] * 2**20
    assert told.peak_bytes == pytest.approx(measured, rel=0.15)
