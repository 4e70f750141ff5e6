"""The accounts of frameworks' loops on a GPU: memory by owner is what the tensors take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.flows.test_adapters import BATCH, FRAMEWORKS, TRAIN, YOLO, Job, train_yolo
from tests.flows.test_adapters import alone as alone

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_training_on_a_gpu_comes_to_the_same_bits_and_its_memory_is_what_it_takes(
    framework: str,
) -> None:
    torch.manual_seed(0)
    plain, _, _ = TRAIN[framework](Job(is_told=False, is_gpu=True))
    torch.manual_seed(0)
    net, optimizer, run = TRAIN[framework](Job(is_gpu=True))
    assert run is not None and run.run["tags"]["device"] == "cuda:0"
    for one, other in zip(plain.parameters(), net.parameters(), strict=True):
        assert torch.equal(one, other)
    found = run.run["metrics"]
    state = [t for each in optimizer.state.values() for k, t in each.items() if k != "step"]
    for owner, tensors in (("parameters", list(net.parameters())), ("optimizer_state", state)):
        assert found[f"memory/{owner}_mib"] * 2**20 == pytest.approx(
            sum(t.nbytes for t in tensors), rel=0.01
        )
    batch = BATCH * (16 * 4 + 8)
    assert found["memory/batch_mib"] * 2**20 == pytest.approx(batch, rel=0.01)
    assert {f"time/{p}_ms" for p in ("forward", "backward", "optimizer")} <= set(found)


@pytest.mark.skipif(not YOLO.is_dir(), reason="make test-cuda installs ultralytics")
def test_the_memory_of_yolo_is_what_its_tensors_take(place: Path) -> None:
    told = train_yolo(place, "told", "gpu")
    assert told["ended"] == "FINISHED"
    of_two = float(told["memory/parameters_mib"]), float(told["memory/optimizer_state_mib"])
    assert of_two[0] == pytest.approx(2_590_035 * 4 / 2**20, rel=0.01)
    assert of_two[1] == pytest.approx(2 * of_two[0], rel=0.01)  # AdamW's, of two moments
    assert all(float(told[f"time/{p}_ms"]) > 0 for p in ("forward", "backward"))
