"""The whole flow on a CUDA device: what MLflow tells of runs that went well, were ended from
outside, or broke the device; and that none of a hundred leaves anything on it."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Run

from flows.train import train
from headroom.base.names import OWNERS
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.tracking.tracking_settings import read_tracking_settings
from headroom.training import trainer
from headroom.training.plan import make_plan
from headroom.watch import leaks
from tests.base.recorded_names import list_unknown_metrics, list_unknown_tags
from tests.conftest import ROOT
from tests.flows.cli.test_train_command import LONG, Desk, _ask, _until
from tests.gpu.conftest import beside_libraries

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)

Own = Callable[[str, str], None]
GPU = torch.device("cuda:0")
STEP = ("forward", "backward", "optimizer")
TAGS = {
    *("device", "device.kind", "device.model", "device.uuid", "device.reason", "device.total_mib"),
    *("torch.version", "accelerator.runtime", "driver.version", "host"),
    *("precision", "compiled", "data.residency", "data.fingerprint"),
    *("pid", "process.started_at", "git.commit", "git.dirty", "prefect.flow_run_id"),
    *("micro_batch", "memory.admission", "mlflow.note.content"),
}
# What no training on CUDA can leave at zero.
POSITIVE = {
    *("train/loss", "val/loss", "train/grad_norm", "train/epoch"),
    *("speed/samples_per_s", "speed/steps_per_s"),
    *(f"time/{s}_s" for s in ("detect_device", "prepare_data", "train_model", "release_memory")),
    *(f"time/{s}_s" for s in ("total", "open_run", "setup", "first_step", "eval", "log")),
    *("time/checkpoint_s", "time/data_wait_ms", *(f"time/{phase}_ms" for phase in STEP)),
    *(f"memory/{name}_mib" for name in ("allocated", "reserved", "free", "headroom")),
    *(f"memory/{name}_mib" for name in ("peak_allocated", "peak_reserved", "predicted_peak")),
    *(f"memory/{name}_mib" for name in ("run_peak_allocated", "run_peak_reserved", "released")),
    *(f"memory/peak_{phase}_mib" for phase in (*STEP, "eval")),
    *("memory/parameters_mib", "memory/optimizer_state_mib"),
    *("memory/host_rss_mib", "memory/host_rss_peak_mib", "memory/micro_batch"),
    *("gpu/power_w", "gpu/temperature_c"),
}
MAY_BE_ZERO = {
    *("train/lr", "time/unaccounted_pct", "memory/fragmentation_pct", "memory/alloc_retries"),
    *("memory/ooms_recovered", "memory/baseline_mib", "memory/residual_mib", "memory/leaked_mib"),
    *(
        "gpu/utilization_pct",
        "gpu/energy_j",
        *(
            f"memory/{owner}_mib" for owner in OWNERS if owner not in ("graph", "best_weights")
        ),  # a host's
    ),
}
FILES = {"report.html", "plots", "config.yaml", "environment.txt", "device.json", "events.jsonl"}


@pytest.fixture(scope="module")
def here(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One folder, and so one MLflow, for all flows of this process."""
    folder = tmp_path_factory.mktemp("flows")
    shutil.copy(ROOT / "mlflow.yaml", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def _trained(**sections: Any) -> Run:
    """The run in MLflow of a training that went well, its record complete."""
    config = RunConfig.model_validate({"device": {"name": "cuda"}, **sections})
    made = train(config)
    client = MlflowClient(read_tracking_settings().tracking_uri)
    run = client.get_run(made["run_id"])
    metrics, tags = run.data.metrics, run.data.tags
    assert run.info.status == "FINISHED"
    params = {".".join(name.split(".")[:2]) for name in run.data.params}
    asked = {f"{section}.{name}" for section, given in sections.items() for name in given}
    assert asked <= params <= set(config.flat())
    assert tags["device"] == "cuda:0" and tags["device.kind"] == "cuda"
    assert not TAGS - set(tags), TAGS - set(tags)
    absent = (POSITIVE | MAY_BE_ZERO) - set(metrics)
    assert not absent, absent
    assert not list_unknown_metrics(metrics) and not list_unknown_tags(tags)
    assert not [key for key in POSITIVE if not metrics[key] > 0]
    assert metrics["memory/release_ok"] == 1 and metrics["memory/leaked_mib"] == 0
    _assert_memory_adds_up(metrics)
    assert client.get_logged_model(run.outputs.model_outputs[0].model_id).status == "READY"
    assert not FILES - _files(run) and "memory/stats.json" in _files(run, "memory")
    return run


def _assert_memory_adds_up(metrics: dict[str, float]) -> None:
    peak = metrics["memory/run_peak_allocated_mib"]
    highest = max(metrics[f"memory/peak_{phase}_mib"] for phase in (*STEP, "eval"))
    assert highest <= peak == pytest.approx(highest, abs=0.1)  # a little may come between them
    assert peak <= metrics["memory/run_peak_reserved_mib"]
    assert metrics["memory/predicted_peak_mib"] == pytest.approx(peak, rel=0.25)
    owned = sum(metrics.get(f"memory/{owner}_mib", 0) for owner in OWNERS)  # of a graph, if any
    assert owned == pytest.approx(peak, rel=0.02)


def _files(run: Run, folder: str | None = None) -> set[str]:
    found = MlflowClient(read_tracking_settings().tracking_uri).list_artifacts(
        run.info.run_id, folder
    )
    return {file.path for file in found}


@pytest.mark.usefixtures("here")
def test_fp32_step_by_step_with_the_history_of_its_memory() -> None:
    run = _trained(
        train={"precision": "fp32", "epochs": 3, "compile": "off"}, memory={"snapshot": True}
    )
    assert run.data.tags["precision"] == "fp32" and run.data.tags["compiled"] == "no"
    assert run.data.tags["data.residency"] == "device" and "time/h2d_ms" not in run.data.metrics
    assert run.data.metrics["val/accuracy"] > 0.8
    for owner in ("gradients", "activations", "batch", "data"):
        assert run.data.metrics[f"memory/{owner}_mib"] > 0
    assert {"memory/snapshot.pickle", "memory/snapshot.html"} <= _files(run, "memory")


@pytest.mark.usefixtures("here")
def test_bf16_as_a_graph() -> None:
    run = _trained(train={"precision": "bf16", "epochs": 20})
    assert run.data.tags["precision"] == "bf16"
    # Which of the two was faster, a stand-in cannot tell: both run on a host that others share.
    assert run.data.tags["compiled"] == "graph" or os.environ.get("FAKE_CUDA")
    assert run.data.metrics["val/accuracy"] > 0.9
    assert "memory/snapshot.pickle" not in _files(run, "memory")


@pytest.mark.usefixtures("here")
def test_fp16_of_rows_that_take_more_than_they_may() -> None:
    limit_mib = beside_libraries(64.0)
    run = _trained(
        data={"source": "synthetic", "args": {"rows": 20_000, "features": 1024}},
        train={"precision": "fp16", "epochs": 1, "batch_size": 256},
        optim={"lr": 1e-4},
        memory={"limit_mib": limit_mib},
    )
    assert run.data.tags["precision"] == "fp16" and run.data.tags["data.residency"] == "pinned"
    assert run.data.metrics["memory/run_peak_reserved_mib"] <= limit_mib
    assert run.data.metrics["time/h2d_ms"] > 0


@pytest.mark.usefixtures("here")
def test_a_transformer_on_the_text_that_is_here() -> None:
    run = _trained(
        data={"source": "text", "args": {"context": 32}},
        model={"name": "transformer", "args": {"layers": 1, "heads": 2, "width": 16}},
        train={"epochs": 1, "batch_size": 512},
        optim={"lr": 0.01},
    )
    assert run.data.metrics["val/perplexity"] < 100
    assert run.data.metrics["speed/tokens_per_s"] > run.data.metrics["speed/samples_per_s"]


def test_runs_that_are_ended_on_a_gpu_say_so(prefect_api: str, desk: Desk, place: Path) -> None:
    begun = "SELECT COUNT(DISTINCT run_uuid) FROM metrics WHERE key = 'train/loss'"
    for number, code, runs in ((signal.SIGTERM, 143, 1), (signal.SIGKILL, -9, 2)):
        process = desk(*LONG, "--device.name", "cuda", home=Path(os.environ["PREFECT_HOME"]))
        _until(partial(lambda wanted: _ask(place, begun) == [(wanted,)], runs))
        os.kill(process.pid, number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code and "Traceback" not in err, err
    _until(lambda: _ask(place, "SELECT status FROM runs") == [("KILLED",)] * 2, timeout_s=60)
    released = "SELECT value FROM latest_metrics WHERE key = 'memory/release_ok'"
    assert _ask(place, released) == [(1.0,)]


THEIRS = """
import torch
from torch import nn

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient): raise ValueError("in their backward")

class Net(nn.Module):
    def __init__(self, input_shape, outputs, way=""):
        super().__init__()
        self.body, self.table = nn.Linear(64, outputs), nn.Embedding(17, outputs)
        self.way, self.steps = way, 0
    def forward(self, x):
        self.steps += self.training and x.is_cuda
        way = self.way if self.steps > 5 else ""
        x = x.flatten(1)
        if way == "forward": raise ValueError("in their forward")
        if way == "stop": raise KeyboardInterrupt
        if way == "memory": torch.empty(10**12, device=x.device)
        if way == "shape": x = x[:, :3]
        if way == "device": x = x + torch.ones(64)
        rows = torch.full(x.shape[:1], 99 if way == "index" else 0, device=x.device)
        x = self.body(x) + self.table(rows)
        return Backward.apply(x) if way == "backward" else x
"""


def test_an_index_out_of_range_breaks_the_device_and_not_the_record(
    prefect_api: str, desk: Desk, place: Path
) -> None:
    """PyTorch ended the process where it then freed pinned memory: KILLED, "its process was
    gone"."""
    (place / "theirs.py").write_text(THEIRS)
    process = desk(
        *("--device.name", "cuda", "--model.name", "theirs:Net", "--model.args", "{way: index}"),
        *("--data.source", "synthetic", "--data.args.rows", "300000"),
        *("--memory.limit_mib", str(beside_libraries(48.0))),
        home=Path(os.environ["PREFECT_HOME"]),
    )
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    *_, broken, reason = (line for line in err.splitlines() if not line.startswith("[W"))
    assert "answers nothing but errors" in broken
    assert reason.startswith("model.name: an index or a label is out of range on the GPU")
    _until(lambda: _ask(place, "SELECT status FROM runs") == [("FAILED",)], timeout_s=60)
    tags = dict(_ask(place, "SELECT key, value FROM tags"))
    assert tags["end.reason"] == reason and tags["memory.release"] == broken
    release = "SELECT key, value FROM latest_metrics WHERE key LIKE 'memory/re%s%'"
    released = dict(_ask(place, release))
    assert released["memory/release_ok"] == 0 and "memory/released_mib" not in released


WAYS = ("forward", "stop", "memory", "shape", "device", "backward", "loss")


@pytest.mark.filterwarnings("ignore:memory allocation failed")
def test_a_hundred_trainings_of_which_half_fail_leave_nothing(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own("theirs", THEIRS)
    device, data = detect_best_device("cuda"), prepare_dataset(RunConfig().data)
    first = leaks.take_baseline(GPU)
    plain = {"device": {"name": "cuda"}, "train": {"epochs": 1, "batch_size": 128}}
    trainer.train(  # what libraries load once, the driver keeps
        make_plan(RunConfig.model_validate(plain), device, data),
        folder=tmp_path,
        log=lambda metrics, step: None,
    )
    assert leaks.release_device_memory(GPU, baseline_bytes=first.bytes).ok
    before = leaks.take_baseline(GPU)
    reserved, used = torch.cuda.memory_reserved(GPU), _ask_driver()
    failed: dict[str, int] = {}
    for number in range(100):
        way = WAYS[number // 2 % len(WAYS)] if number % 2 else ""
        config = RunConfig.model_validate(
            {
                "device": {"name": "cuda"},
                "model": {"name": "mlp"}
                if way in ("", "loss")
                else {"name": "theirs:Net", "args": {"way": way}},
                "optim": {"lr": 1000.0, "name": "sgd"} if way == "loss" else {},
                "train": {
                    "epochs": 1,
                    "batch_size": 128,
                    "precision": ("bf16", "fp16", "fp32")[number % 3],
                },
            }
        )
        try:
            trainer.train(
                make_plan(config, device, data), folder=tmp_path, log=lambda metrics, step: None
            )
        except (Exception, KeyboardInterrupt) as error:
            assert way, error
            failed[f"{way}: {type(error).__name__}"] = failed.get(way, 0) + 1
        else:
            assert not way, f"{way} did not fail"
    assert len(failed) == len(WAYS), failed
    after = leaks.release_device_memory(GPU, baseline_bytes=before.bytes)
    assert after.ok and after.after_bytes == before.bytes, after
    assert torch.cuda.memory_reserved(GPU) == reserved
    assert _ask_driver() == used


def _ask_driver() -> int:
    """Return the bytes that the driver says this process holds; of a stand-in, which has no
    processes, what is not free."""
    free, total = torch.cuda.mem_get_info(GPU)
    if "FAKE_CUDA" in os.environ:
        return total - free
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(GPU).uuid}")
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    (used,) = [one.usedGpuMemory for one in processes if one.pid == os.getpid()]
    return used
