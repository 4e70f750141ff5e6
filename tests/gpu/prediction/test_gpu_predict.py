"""A prediction on a GPU: the CPU's predictions, memory that runs out, and all of it given back."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headroom.base.facts import ModelFacts, PredictFacts
from headroom.device.detection import detect_best_device
from headroom.models import builtin, predictor
from headroom.prediction import prediction
from headroom.prediction.prediction import NoRoom
from headroom.prediction.request import make_order
from headroom.watch.leaks import release_device_memory, take_baseline

MIB = 2**20

pytestmark = pytest.mark.gpu
SPEC: dict[str, Any] = {
    "model": "cnn",
    "args": {"width": 16},
    "task": "classification",
    "source": "npy",
    "input_shape": [3, 32, 32],
    "outputs": 10,
    "class_names": [str(i) for i in range(10)],
    "feature_names": None,
    "offset": [0.0],
    "scale": [1.0],
}


@pytest.fixture
def model(tmp_path: Path) -> ModelFacts:
    torch.manual_seed(0)
    net = builtin.build_model("cnn", input_shape=[3, 32, 32], outputs=10, args=SPEC["args"])
    predictor.save(net, SPEC, tmp_path / "model")
    x = np.random.default_rng(0).normal(size=(1000, 3, 32, 32)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    return ModelFacts(str(tmp_path / "model"), "0" * 32, "m-" + "0" * 32)


def _predict(model: ModelFacts, device: str, limit_mib: float | None = None) -> PredictFacts:
    folder = Path(model.folder).parent
    wanted = make_order(
        input=str(folder / "x.npy"), output=str(folder / f"{device}.npy"), limit_mib=limit_mib
    )
    return prediction.predict(
        wanted, detect_best_device(device), model, show_progress=lambda rows, done: None
    )


def test_a_gpu_predicts_what_the_cpu_does_and_gives_all_back(model: ModelFacts) -> None:
    before = take_baseline("cuda:0")
    done = _predict(model, "cuda")
    facts = release_device_memory("cuda:0", baseline_bytes=before.bytes, held_bytes=done.held_bytes)
    assert done.held_bytes > 0 and facts.ok and facts.leaked_bytes == 0
    _predict(model, "cpu")
    folder = Path(model.folder).parent
    on_gpu, on_cpu = np.load(folder / "cuda.npy"), np.load(folder / "cpu.npy")
    assert (on_gpu["prediction"] == on_cpu["prediction"]).mean() > 0.999
    np.testing.assert_allclose(on_gpu["probability"], on_cpu["probability"], atol=2e-3)


def test_a_gpu_without_room_halves_the_rows_and_goes_on(
    model: ModelFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "MOST_BYTES", 2**30)
    before = take_baseline("cuda:0")
    _predict(model, "cuda:0")  # cuDNN tries its ways of a convolution once, with room for each
    (Path(model.folder).parent / "cuda:0.npy").unlink()
    assert release_device_memory("cuda:0", baseline_bytes=before.bytes).ok
    torch.cuda.reset_peak_memory_stats()
    whole = _predict(model, "cuda:0")
    # The least that the first convolution takes for all rows: under a limit, cuDNN does without
    # what it takes beside.
    least_bytes = 1000 * 32 * 32 * (3 + SPEC["args"]["width"]) * 4
    assert torch.cuda.max_memory_allocated() >= whole.held_bytes + least_bytes
    limit_mib = (whole.held_bytes + 0.8 * least_bytes) / MIB
    assert release_device_memory("cuda:0", baseline_bytes=before.bytes).ok
    torch.cuda.reset_peak_memory_stats()
    done = _predict(model, "cuda", limit_mib=limit_mib)
    assert torch.cuda.max_memory_reserved() <= limit_mib * MIB
    assert whole.recovered == 0 and whole.rows == done.rows == 1000
    assert done.recovered >= 1 and done.rows_at_once < 1000
    folder = Path(model.folder).parent
    first, second = np.load(folder / "cuda:0.npy"), np.load(folder / "cuda.npy")
    assert (first["prediction"] == second["prediction"]).mean() > 0.999


def test_a_gpu_without_room_for_a_row_is_one_sentence_and_all_is_given_back(
    model: ModelFacts,
) -> None:
    before = take_baseline("cuda:0")
    with pytest.raises(NoRoom, match=r"^memory: cuda:0 has no room within the limit of 2 MiB for"):
        _predict(model, "cuda", limit_mib=2)
    assert not (Path(model.folder).parent / "cuda.npy").exists()
    assert release_device_memory("cuda:0", baseline_bytes=before.bytes).leaked_bytes == 0
