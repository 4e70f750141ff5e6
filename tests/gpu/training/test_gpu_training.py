"""The CUDA parts of the run record, and training on a real GPU; skipped where there is none."""

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.models import predictor
from headroom.settings.model_args import ModelError
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.choose_step import CompileError
from headroom.training.plan import make_plan
from headroom.watch import leaks
from headroom.watch.step_metrics import Diverged

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

MIB = 2**20
SERIES = {
    "memory/allocated_mib",
    "memory/reserved_mib",
    "memory/peak_allocated_mib",
    "memory/peak_reserved_mib",
    "memory/free_mib",
    "memory/host_rss_mib",
}
SUMMARY = {
    "memory/run_peak_allocated_mib",
    "memory/run_peak_reserved_mib",
    "memory/headroom_mib",
    "memory/fragmentation_pct",
    "memory/alloc_retries",
    "memory/peak_forward_mib",
    "memory/peak_backward_mib",
    "memory/peak_optimizer_mib",
    "memory/peak_eval_mib",
    "memory/parameters_mib",
    "memory/gradients_mib",
    "memory/optimizer_state_mib",
    "memory/activations_mib",
    "time/first_step_s",
    "time/data_wait_ms",
    "time/forward_ms",
    "time/backward_ms",
    "time/optimizer_ms",
    "time/unaccounted_pct",
    "time/timed_steps",
}


def _train(tmp_path: Path, **sections):
    config = RunConfig.model_validate(
        {"data": {"cache": str(tmp_path / "data")}, "device": {"name": "cuda"}, **sections}
    )
    logged: list[dict[str, float]] = []
    device, data = detect_best_device("cuda"), prepare_dataset(config.data)
    facts = trainer.train(
        make_plan(config, device, data),
        folder=tmp_path,
        log=lambda metrics, step: logged.append(metrics),
    )
    return facts, logged, data


def test_a_run_on_cuda_leaves_its_whole_record(tmp_path: Path) -> None:
    ooms = torch.cuda.memory_stats().get("num_ooms", 0)  # of this process
    facts, logged, _ = _train(tmp_path)
    assert facts.metrics["val/accuracy"] >= 0.97
    readings = [m for m in logged if "speed/samples_per_s" in m]
    assert readings and all(set(m) >= SERIES for m in readings)
    assert set(facts.metrics) >= SUMMARY
    assert facts.metrics["memory/run_peak_allocated_mib"] > facts.metrics["memory/parameters_mib"]
    assert facts.metrics["memory/headroom_mib"] > 0
    assert facts.stats["num_ooms"] == ooms
    peaks = [facts.stats[f"{name}_bytes.all.peak"] / MIB for name in ("allocated", "reserved")]
    names = ("memory/run_peak_allocated_mib", "memory/run_peak_reserved_mib")
    assert peaks == [facts.metrics[name] for name in names]
    assert facts.tags["data.residency"] == "device"


@pytest.mark.parametrize(("log_every", "timed"), [(1, 4), (10, 4)])  # of five, one is counted
def test_a_run_of_six_steps_knows_its_phases(tmp_path: Path, log_every: int, timed: int) -> None:
    """It knew none, or those of one step."""
    facts, _, _ = _train(tmp_path, train={"max_steps": 6, "log_every": log_every})
    phases = ("data_wait", "forward", "backward", "optimizer")
    assert all(facts.metrics[f"time/{phase}_ms"] >= 0 for phase in phases)
    assert facts.metrics["time/forward_ms"] > 0
    assert facts.metrics["time/timed_steps"] == timed


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("model", "epochs"),
    [({"name": "mlp"}, 10), ({"name": "cnn", "args": {"width": 4}}, 6)],
    ids=["mlp", "cnn"],
)
def test_every_precision_learns_digits(
    tmp_path: Path, precision: str, model: dict[str, Any], epochs: int
) -> None:
    facts, _, _ = _train(
        tmp_path,
        train={"precision": precision, "epochs": epochs},
        model=model,
        optim={"lr": 0.01},
    )
    assert facts.metrics["val/accuracy"] >= 0.9
    assert facts.tags["precision"] == precision


def test_clipping_and_accumulation_work_under_a_scaler(tmp_path: Path) -> None:
    facts, logged, _ = _train(
        tmp_path,
        train={"precision": "fp16", "accumulate": 3, "log_every": 1, "epochs": 5},
        optim={"clip_norm": 1.0},
    )
    assert facts.metrics["val/accuracy"] >= 0.9
    assert all(math.isfinite(m["train/grad_norm"]) for m in logged[20:] if "train/loss" in m)


@pytest.mark.real_gpu("a stand-in has no compiler of kernels")
def test_a_compiled_model_reaches_the_same(tmp_path: Path) -> None:
    facts, _, _ = _train(tmp_path, train={"compile": "default", "epochs": 10})
    assert facts.tags["compiled"] in ("default", "default+graph")
    assert facts.metrics["val/accuracy"] >= 0.95


@pytest.mark.parametrize("settings", [{}, {"accumulate": 3}])
def test_a_recorded_step_reaches_what_the_plain_one_reaches(tmp_path: Path, settings) -> None:
    """Long enough for the trial to record, with a last, shorter batch in each epoch."""
    reached = {}
    for mode in ("auto", "off"):
        facts, _, _ = _train(
            tmp_path, train={"compile": mode, "precision": "fp32", "epochs": 20, **settings}
        )
        reached[mode] = facts
    # Which of the two was faster, a stand-in cannot tell: both run on a host that others share.
    is_graph = reached["auto"].tags["compiled"] == "graph"
    assert is_graph or os.environ.get("FAKE_CUDA"), reached["auto"].tags
    assert reached["off"].tags["compiled"] == "no"
    auto, off = (reached[mode].metrics for mode in ("auto", "off"))
    assert auto["val/loss"] == pytest.approx(off["val/loss"], rel=0.02)


def test_a_transformer_learns_on_a_gpu_and_knows_its_share_of_the_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sheet = SimpleNamespace(fp32=1e6, source="a sheet that lists this device")
    name = torch.cuda.get_device_name(0)
    monkeypatch.setattr("headroom.watch.throughput._SHEETS", {name: sheet})
    facts, _, _ = _train(
        tmp_path,
        data={"cache": str(tmp_path / "data"), "source": "text", "args": {"context": 64}},
        model={"name": "transformer", "args": {"layers": 1, "heads": 2, "width": 32}},
        train={"epochs": 1, "precision": "fp32"},  # slow in bf16 on many a CPU
        optim={"lr": 0.01},
    )
    assert facts.metrics["val/perplexity"] < 20
    assert 0 < facts.metrics["speed/mfu"] < 1 and facts.tags["device.peak_source"] == sheet.source


def test_deterministic_runs_repeat_bit_for_bit(tmp_path: Path) -> None:
    weights = []
    for attempt in "ab":
        settings = {"deterministic": True, "epochs": 1, "precision": "fp32"}
        _train(tmp_path / attempt, train=settings, model={"name": "cnn"})
        weights.append(torch.load(tmp_path / attempt / "model" / "weights.pt", weights_only=True))
    for a, b in zip(weights[0].values(), weights[1].values(), strict=True):
        assert torch.equal(a, b)


def test_the_gpu_is_given_back_after_success_and_after_failure(tmp_path: Path) -> None:
    device = torch.device("cuda:0")
    before = leaks.take_baseline(device)
    _train(tmp_path, train={"epochs": 2})
    after = leaks.release_device_memory(device, baseline_bytes=before.bytes)
    assert after.ok, after
    with pytest.raises(Exception, match="train.loss: became"):
        _train(tmp_path, optim={"lr": 1000.0, "name": "sgd"}, train={"epochs": 5})
    assert leaks.release_device_memory(device, baseline_bytes=before.bytes).ok


def test_data_that_does_not_fit_is_streamed_through_pinned_memory(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"data": {"cache": str(tmp_path / "data")}})
    data = prepare_dataset(config.data)
    from headroom.data.dataset_batches import draw_row_order, place_rows
    from headroom.data.preparation import load_arrays

    arrays = load_arrays(data)
    fed = place_rows(arrays.train_x, arrays.train_y, device=torch.device("cuda"), room_bytes=0)
    assert fed.residency == "pinned"
    order = draw_row_order(len(fed), seed=0, epoch=0)
    seen = torch.cat([y for _, y, *_ in fed.iterate_shuffled(100, order, lambda phase: None)])
    assert seen.is_cuda and len(seen) == data.train_rows


def test_the_model_trained_on_a_gpu_predicts_on_a_cpu(tmp_path: Path) -> None:
    _, _, data = _train(tmp_path, train={"epochs": 2})
    loaded = predictor.load(tmp_path / "model")
    assert loaded.outputs(torch.zeros(3, *data.input_shape).numpy()).shape == (3, 10)


@pytest.mark.parametrize(
    ("made", "used", "said"),
    [
        ("self.wave = torch.randn(3, 3)", "x = self.first(x @ self.wave.to(x.device))", "wave"),
        ("self.norm = nn.BatchNorm1d(3)", "x = self.first(self.norm(x))", ""),
    ],
)
def test_a_model_trained_on_a_gpu_is_held_there_against_what_is_loaded_again(
    own, tmp_path: Path, made: str, used: str, said: str
) -> None:
    from tests.training.test_reload_check import _trained

    if not said:
        assert _trained(own, tmp_path, made, used, device="cuda").steps
        return
    with pytest.raises(ModelError, match=f"apart\\): it computes with {said}, which it does not"):
        _trained(own, tmp_path, made, used, device="cuda")


def test_a_row_that_is_no_number_is_named_though_the_host_is_ahead_of_it(own, tmp_path) -> None:
    from tests.training.test_own_training import MINE, NUMBERS

    own("mine", MINE + NUMBERS)
    sections = {"model": {"name": "mine:Wide"}, "data": {"source": "mine:sick"}}
    config = RunConfig.model_validate(sections | {"train": {"epochs": 1, "batch_size": 16}})
    data, device = prepare_dataset(config.data, batch_size=16), detect_best_device("cuda")
    said = r"^data.source: the loss became nan at step 3 .*inputs\['b'\]\[0\] holds .* in row 6 of"
    with pytest.raises(Diverged, match=said):
        trainer.train(
            make_plan(config, device, data), folder=tmp_path / "run", log=lambda m, s: None
        )


def test_a_compilation_that_failed_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frames kept 85,800 bytes of a digits model, as the error of the run keeps them."""

    def refuses(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no kernels here")

    before = leaks.take_baseline("cuda:0").bytes
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile(f, backend=refuses))
    caught = None
    try:
        _train(tmp_path, train={"epochs": 1, "compile": "default"})
    except CompileError as error:
        caught = error
    assert caught is not None and "cannot compile this model" in str(caught)
    facts = leaks.release_device_memory("cuda:0", baseline_bytes=before)
    assert facts.ok and facts.after_bytes == before, facts
