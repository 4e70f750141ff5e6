"""Several processes on several GPUs, by NCCL."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.base.facts import TrainFacts
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import DeviceError, detect_best_device
from headroom.launch.placement import count_processes
from headroom.launch.processes import train_in_processes
from headroom.launch.rank import Job
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.admission import PastRuns
from headroom.training.plan import make_plan

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two processes need two GPUs")


def test_more_processes_than_gpus_are_refused_and_auto_is_one_for_each() -> None:
    here, facts = torch.cuda.device_count(), detect_best_device("cuda:0")
    assert count_processes(RunConfig(launch={"processes": "auto"}).launch, facts) == here
    with pytest.raises(DeviceError, match=f"launch.processes: must be at most {here}, one for"):
        count_processes(RunConfig(launch={"processes": str(here + 1)}).launch, facts)


def _train(folder: Path, processes: int, **train: Any) -> tuple[TrainFacts, dict[int, float]]:
    sections = {"model": {"name": "cnn"}, "train": {"epochs": 2, "precision": "fp32", **train}}
    made = {"data": {"cache": str(folder.parent / "data")}, **sections}
    config, losses = RunConfig.model_validate(made), {}
    data, device = prepare_dataset(config.data), detect_best_device("cuda:0")

    def log(metrics: dict[str, float], step: int) -> None:
        losses.update({step: metrics["train/loss"]} if "train/loss" in metrics else {})

    if processes == 1:
        return trainer.train(make_plan(config, device, data), folder=folder, log=log), losses
    job = Job(config, data, PastRuns(), folder, resumes=False)
    return train_in_processes(job, device, processes=processes, restarts=0, log=log), losses


@needs_two
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_gpus_learn_what_one_learns(tmp_path: Path, parallel: str) -> None:
    one, losses = _train(tmp_path / "one", 1)
    two, theirs = _train(tmp_path / "two", 2, parallel=parallel)
    assert theirs == pytest.approx(losses, rel=5e-3)
    assert two.metrics["val/loss"] == pytest.approx(one.metrics["val/loss"], rel=2e-2)
    assert two.tags["ranks"] == "2" and len(two.tags["ranks.devices"].split(", ")) == 2
    assert two.metrics["ranks/leaked_mib_most"] < 0.001
