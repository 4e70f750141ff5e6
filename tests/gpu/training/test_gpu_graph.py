"""Steps that are recorded and replayed on CUDA: what they keep, give back, and are told by."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from headroom.base.names import OWNERS
from headroom.data.batch import Batch
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import OptimConfig, RunConfig
from headroom.training import build, optim, shared_model, trainer
from headroom.training.cuda_graph import GraphedStep, GraphError, use_own_stream
from headroom.training.micro_batches import SingleAttempt
from headroom.training.optimizer_step import Step
from headroom.training.plan import make_plan
from headroom.watch.leaks import release_device_memory, take_baseline
from headroom.watch.phases import Watched
from tests.gpu.training.short_memory import Short

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
MIB = 2**20
GPU = torch.device("cuda:0")


def _train(tmp_path: Path, **train):
    """A training of digits that is long enough to be recorded, and what it logged."""
    config = RunConfig.model_validate(
        {
            "data": {"cache": str(tmp_path / "data")},
            "device": {"name": "cuda"},
            "train": {"precision": "fp32", "epochs": 12, **train},
        }
    )
    logged: list[dict[str, float]] = []
    facts = trainer.train(
        make_plan(config, detect_best_device("cuda"), prepare_dataset(config.data)),
        folder=tmp_path,
        log=lambda metrics, step: logged.append(metrics),
    )
    release_device_memory(GPU, baseline_bytes=0)
    return facts, logged


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory):
    for _ in range(5):  # on a busy host the plain step may seem faster
        facts, logged = _train(tmp_path_factory.mktemp("replayed"))
        if "graph" in facts.tags["compiled"]:
            return facts, logged
    raise AssertionError(facts.tags)


@pytest.mark.parametrize("log_every", [1, 9])
def test_any_step_may_be_the_one_that_is_recorded(tmp_path: Path, log_every: int) -> None:
    """A timed step that was recorded took events into the recording; reading them ended the run."""
    facts, _ = _train(tmp_path, log_every=log_every)
    assert facts.metrics["val/accuracy"] > 0.9


def test_a_recording_is_given_up_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph kept a second set of activations to the end, while micro-batches were halved."""
    before = torch.cuda.memory_reserved(GPU)
    short = Short(lambda call: call == 10)  # by then steps are replayed
    monkeypatch.setattr(
        shared_model, "make_model", short.in_model("register_forward_hook", training=False)
    )
    for run in range(5):  # on a busy host the plain step may seem faster
        facts, _ = _train(tmp_path / str(run))
        if facts.metrics.get("time/replay_ms"):
            break
        short.calls = 0
    assert short.failed and facts.tags["compiled"] == "no", facts.tags
    assert "the graph was given up" in facts.tags["compiled.reason"]
    assert facts.metrics["memory/ooms_recovered"] == 1 and facts.tags["micro_batch"] == "64"
    assert facts.metrics["val/accuracy"] > 0.9
    assert torch.cuda.memory_reserved(GPU) <= before


def test_plain_recorded_and_replayed_steps_share_their_libraries_workspaces(replayed) -> None:
    """Each warm-up step had a stream of its own, and each stream two workspaces: 81 MiB here."""
    major = torch.cuda.get_device_capability(GPU)[0]
    workspaces_mib = 2 * (32 if major >= 9 else 8.125)
    assert replayed[0].metrics["memory/libraries_mib"] <= workspaces_mib + 2


def test_owners_sum_to_the_peak_with_libraries_and_the_recording_among_them(replayed) -> None:
    """A run that held 82 MiB said 0.9 by owner, and a rest of 0.0."""
    metrics = replayed[0].metrics
    owners = {o: metrics.get(f"memory/{o}_mib", 0.0) for o in OWNERS}
    peak_mib = metrics["memory/run_peak_allocated_mib"]
    assert sum(owners.values()) == pytest.approx(peak_mib, rel=0.01)
    assert owners["graph"] >= owners["parameters"]  # its own gradients
    assert owners["rest"] <= 0.05 * peak_mib
    assert metrics["memory/predicted_peak_mib"] == pytest.approx(peak_mib, rel=0.05)
    reserved_mib = metrics["memory/run_peak_reserved_mib"]
    assert metrics["memory/predicted_reserved_mib"] == pytest.approx(reserved_mib, rel=0.1)


def test_replayed_steps_are_told_by_their_own_time(replayed) -> None:
    """2.75 ms a step stood beside 1,072 steps a second."""
    metrics = replayed[0].metrics
    assert {"time/replay_ms", "time/forward_ms", "time/data_wait_ms"} <= metrics.keys()
    step_ms = metrics["time/replay_ms"] + metrics["time/data_wait_ms"]
    # No bar for time: a step told by the phases of a plain one was several times the true one.
    assert step_ms < 3 * 1000 / metrics["speed/steps_per_s"]


def test_no_window_is_told_a_speed_that_is_not_its_own(replayed) -> None:
    """The last window of an epoch was told 8,135,184 samples a second at 618 real ones."""
    metrics, logged = replayed[0].metrics, replayed[1]
    speeds = [m["speed/samples_per_s"] for m in logged if "speed/samples_per_s" in m]
    assert speeds and max(speeds) < 50 * metrics["speed/samples_per_s"]


def _step(model: nn.Module, loss) -> Step:
    return Step(
        compute=lambda x, y: loss(model(x), y),
        optimizer=optim.AdamW(model.parameters(), lr=0.05, weight_decay=0, beta1=0.9, beta2=0.99),
        scaler=torch.amp.GradScaler("cuda", enabled=False),
        autocast=nullcontext,
        clip_norm=None,
        micro=SingleAttempt(16),
        mark=lambda phase: None,
    )


def _reads_the_device(outputs, targets):
    big = torch.ones(40 * MIB, dtype=torch.uint8, device=GPU)
    loss = (outputs - targets).square().mean()
    return loss if loss.item() == big[0].item() else loss * 2  # a value in a recording: refused


def _runs_out(outputs, targets):
    big = torch.ones(40 * MIB, dtype=torch.uint8, device=GPU)
    if torch.cuda.is_current_stream_capturing():
        big = torch.empty(1 << 42, dtype=torch.uint8, device=GPU)
    return (outputs - targets).square().mean() * big[0]


def _failed_recording(loss) -> None:
    with use_own_stream(GPU):
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(GPU)
        step = GraphedStep(_step(model, loss))
        x = torch.ones(16, 8, device=GPU)
        for _ in range(3):
            step(Batch(x, x, len(x)), norm=False, watched=Watched.NOT)
        with pytest.raises(GraphError, match="cannot be recorded as a graph"):
            step(Batch(x, x, len(x)), norm=False, watched=Watched.NOT)
        step.step(Batch(x, x, len(x)), norm=False, watched=Watched.NOT)  # the plain step goes on


@pytest.mark.parametrize("loss", [_reads_the_device, _runs_out])
def test_a_recording_that_failed_gives_its_pool_back(loss) -> None:
    """88 MiB stayed reserved, and the release said OK. Where memory ran out, the pool was given
    back twice, which ended the process; before PyTorch 2.12 a dropout after it ended the run."""
    before = take_baseline(GPU)
    _failed_recording(loss)
    facts = release_device_memory(GPU, baseline_bytes=before.bytes)
    assert facts.ok and facts.reserved_bytes == 0, facts


def test_a_recording_that_somebody_keeps_is_told_by_name_and_is_not_ok() -> None:
    before = take_baseline(GPU)
    kept = []
    with use_own_stream(GPU):
        step = GraphedStep(_step(nn.Linear(8, 8).to(GPU), nn.functional.mse_loss))
        x = torch.ones(16, 8, device=GPU)
        for _ in range(5):
            step(Batch(x, x, len(x)), norm=False, watched=Watched.NOT)
        kept.append(step._replay)
        del step, x
    facts = release_device_memory(GPU, baseline_bytes=before.bytes)
    assert not facts.ok and facts.reserved_bytes
    assert "private pools of graphs" in {one.name for one in facts.kept}
    kept.clear()
    assert release_device_memory(GPU, baseline_bytes=before.bytes).ok


def test_replayed_steps_know_the_rates_of_parts_and_the_average() -> None:
    """Rates that are set later are read at each replay, and weights that are exchanged for their
    averages and back are found where they were."""
    reached = []
    for replays in (False, True):
        torch.manual_seed(0)
        with use_own_stream(GPU):
            model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(GPU)
            made = OptimConfig.model_validate(
                {"lr": 0.1, "ema_decay": 0.9, "groups": {"2": {"lr": 0.01, "weight_decay": 0.5}}}
            )
            plain = replace(
                _step(model, nn.functional.mse_loss), optimizer=build.make_optimizer(made, model)
            )
            step = GraphedStep(plain) if replays else plain
            drawn = torch.Generator().manual_seed(1)
            x = torch.empty(16, 8, device=GPU)
            for count in range(12):
                x.copy_(torch.randn(16, 8, generator=drawn))
                plain.optimizer.set_lr(0.1 / (1 + count))
                step(Batch(x, x, len(x)), norm=False, watched=Watched.NOT)
                with plain.optimizer.use_averages():
                    averaged = [p.detach().clone() for p in model.parameters()]
            if replays:
                assert step.replays == 9
            reached.append([p.detach().cpu() for p in (*model.parameters(), *averaged)])
            torch.cuda.synchronize()
            del step, plain, model, averaged
    for one, other in zip(*reached, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
