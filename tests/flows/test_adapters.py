"""The account of a loop that a framework runs: the real frameworks, trained with and without."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headroom import account
from headroom.watch.own_loop import OwnLoop
from tests.conftest import ROOT, desk_environment, query

pytestmark = pytest.mark.filterwarnings("ignore")  # what frameworks warn of is theirs
FRAMEWORKS = ("lightning", "lightning by hand", "transformers", "accelerate")
ROWS, BATCH, EPOCHS = 96, 8, 2
PHASES = ("data_wait", "forward", "backward", "optimizer", "other")


@dataclass
class Job:
    """What a framework is to train."""

    accumulate: int = 1
    is_told: bool = True
    asked: dict[str, Any] = field(default_factory=dict)
    before_step: Callable[[int], None] = lambda step: (
        None
    )  # called in the forward of step 0, 1, ...
    wait_s: float = 0.0  # for each row
    is_gpu: bool = False


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Numbers and their classes, each row after a while."""

    def __init__(self, wait_s: float = 0.0) -> None:
        draw = torch.Generator().manual_seed(0)
        self.x, self.wait_s = torch.randn(ROWS, 16, generator=draw), wait_s
        self.labels = torch.randint(0, 2, (ROWS,), generator=draw)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        time.sleep(self.wait_s)
        return {"x": self.x[at], "labels": self.labels[at]}


class Net(nn.Module):
    """Two layers; its loss is a part of its forward, as the models of transformers have it."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
        self.before_step, self.seen = job.before_step, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += 1
            self.before_step(self.seen - 1)
        return {"loss": nn.functional.cross_entropy(out := self.layers(x), labels), "logits": out}


Trained = tuple[nn.Module, torch.optim.Optimizer, "account | None"]


def _train_by_lightning(job: Job, *, by_hand: bool = False) -> Trained:
    pl = pytest.importorskip("lightning.pytorch")
    from headroom.lightning import HeadroomCallback

    class Module(pl.LightningModule):
        def __init__(self, lr: float = 1e-2) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net, self.automatic_optimization = Net(job), not by_hand

        def training_step(self, batch: Any, at: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            self.log("train_loss", loss)
            if by_hand:
                self.manual_backward(loss / job.accumulate)
                if (at + 1) % job.accumulate == 0:
                    self.optimizers().step()
                    self.optimizers().zero_grad()
            return loss

        def validation_step(self, batch: Any, at: int) -> None:
            self.log("val_loss", self.net(**batch)["loss"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.made = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
            return self.made

    callback = HeadroomCallback(quiet=True, **job.asked)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="gpu" if job.is_gpu else "cpu",
        accumulate_grad_batches=1 if by_hand else job.accumulate,
        callbacks=[callback] if job.is_told else [],
        log_every_n_steps=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    data = Rows(job.wait_s)
    try:
        trainer.fit(module, DataLoader(data, BATCH, shuffle=True), DataLoader(data, BATCH))
    finally:
        JUST[:] = [callback.run]
    return module.net, module.made, callback.run


def _train_by_transformers(job: Job, *, callback: Any = None) -> Trained:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from headroom.transformers import HeadroomCallback

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def get_decay_parameter_names(self, model: Any) -> list[str]:
            return []

    around = callback is None
    callback = callback or HeadroomCallback(quiet=True, **job.asked)
    asked = transformers.TrainingArguments(
        output_dir="hf",
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=job.accumulate,
        learning_rate=1e-2,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=4,
        report_to=[],
        use_cpu=not job.is_gpu,
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_strategy="steps",
    )
    data = Rows(job.wait_s)
    trainer = Trainer(
        model=Net(job),
        args=asked,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[callback] if job.is_told else [],
    )
    try:
        with callback if around else nullcontext():
            trainer.train()
    finally:
        JUST[:] = [callback.run]
    return trainer.model, trainer.optimizer.optimizer, callback.run


def _train_by_accelerate(job: Job) -> Trained:
    accelerate = pytest.importorskip("accelerate")
    from headroom.accelerate import HeadroomTracker

    net = Net(job)
    made = torch.optim.AdamW(net.parameters(), lr=1e-2)
    tracker = HeadroomTracker(model=net, optimizer=made, quiet=True, run_name="loop", **job.asked)
    told = {"log_with": tracker} if job.is_told else {}
    does = accelerate.Accelerator(
        cpu=not job.is_gpu, gradient_accumulation_steps=job.accumulate, **told
    )
    data = Rows(job.wait_s)
    model, optimizer, train, val = does.prepare(
        net, made, DataLoader(data, BATCH, shuffle=True), DataLoader(data, BATCH)
    )
    if job.is_told:
        does.init_trackers("mine", config={"lr": 1e-2})
    run = tracker.run
    JUST[:] = [run]
    with run if run is not None else open(os.devnull):  # noqa: SIM115
        for _ in range(EPOCHS):
            for at, batch in enumerate(train if run is None else run.batches(train)):
                with does.accumulate(model):
                    loss = model(**batch)["loss"]
                    does.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if at % 4 == 3:
                    does.log({"train/loss": loss.item()})
            model.eval()
            with torch.no_grad():
                for batch in val if run is None else run.batches(val):
                    last = model(**batch)["loss"]
            does.log({"val/loss": last.item()})
            model.train()
        does.end_training()
    return net, made, run


YOLO = ROOT / ".venv" / "ultralytics"  # of its own, since its torchvision is built for CUDA
PREPARE_YOLO = """
import sys
import types
from pathlib import Path
import cv2
import numpy as np
try:
    import torchvision
except RuntimeError:  # this PyTorch is not: of it, a validation asks for one function
    torchvision = sys.modules["torchvision"] = types.ModuleType("torchvision")
    torchvision.__version__ = "0.28"
    torchvision.ops = types.SimpleNamespace(nms=lambda b, s, t: s.argsort(descending=True))

draw = np.random.default_rng(0)
for part in ("train", "val"):
    for kind in ("images", "labels"):
        Path(kind, part).mkdir(parents=True, exist_ok=True)
    for at in range(8):
        cv2.imwrite(f"images/{part}/{at}.png", draw.integers(0, 255, (64, 64, 3), dtype=np.uint8))
        Path(f"labels/{part}/{at}.txt").write_text("0 0.5 0.5 0.4 0.4\\n")
parts = f"path: {Path.cwd()}\\ntrain: images/train\\nval: images/val\\n"
Path("data.yaml").write_text(parts + "names: [x]\\n")
"""
CHECK_YOLO = """
from ultralytics import YOLO
from headroom.ultralytics import HeadroomCallback
from headroom.watch import own_loop

own_loop.COUNT_SHARE = float("inf")  # of so short a training, too
told, model = HeadroomCallback(run_name="yolo", quiet=True), YOLO("yolo11n.yaml")
if "told" in sys.argv:
    told.add_to(model)
if "error" in sys.argv:
    def fail(trainer):
        if trainer.epoch == 1:
            raise ValueError("no such thing")
    model.add_callback("on_train_batch_start", fail)
how = {"plots": False, "amp": False, "verbose": False, "workers": 0, "deterministic": True}
how |= {"epochs": 3, "imgsz": 64, "batch": 4, "nbs": 8, "project": str(Path.cwd() / "out")}
try:
    model.train(data="data.yaml", device=0 if "gpu" in sys.argv else "cpu", **how)
    print("weights", sum(p.double().sum().item() for p in model.model.parameters()))
finally:
    if told.run is not None:
        record = told.run.run
        print("ended", record["status"], record["tags"].get("end.reason", ""))
        print("steps", told.run.loop.done, told.run.loop.rows)
        for name, value in record["metrics"].items():
            print(name, value)
"""


def train_yolo(place: Path, *words: str) -> dict[str, str]:
    """Train a small one in a process of its own; return what that prints, by the first word."""
    code = CHECK_YOLO
    if "page" in words:
        [code] = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "frameworks.md").read_text(), re.S)
        code = code.replace("epochs=3", "epochs=1, imgsz=64, workers=0, plots=False, device='cpu'")
    (place / "train.py").write_text(PREPARE_YOLO + code)
    path = os.pathsep.join((os.environ.get("PYTHONPATH", ""), str(ROOT), str(YOLO)))
    env = {**os.environ, "PYTHONPATH": path, "YOLO_CONFIG_DIR": str(place / "yolo")}
    done = subprocess.run(
        [sys.executable, "train.py", *words], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == ("error" in words), done.stderr
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return {name: rest.strip() for name, _, rest in lines}


JUST: list[Any] = []  # the run of the newest training, also where that failed
TRAIN: dict[str, Callable[[Job], Trained]] = {
    "lightning": _train_by_lightning,
    "lightning by hand": lambda job: _train_by_lightning(job, by_hand=True),
    "transformers": _train_by_transformers,
    "accelerate": _train_by_accelerate,
}


@pytest.fixture(autouse=True)
def alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Frameworks keep states of the process: of accelerate its own, of Lightning handlers. And
    whatever an earlier test has compiled is none of theirs."""
    monkeypatch.setattr("headroom.watch.own_loop.has_compiled", lambda: False)
    monkeypatch.setattr(
        "headroom.watch.own_loop.COUNT_SHARE", float("inf")
    )  # of short trainings, too
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    torch.manual_seed(0)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if "accelerate" in sys.modules:
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_training_comes_to_the_same_bits_and_its_steps_are_those_of_its_optimizer(
    framework: str, accumulate: int
) -> None:
    torch.manual_seed(0)
    plain, _, nobody = TRAIN[framework](Job(accumulate, is_told=False))
    torch.manual_seed(0)
    told, optimizer, run = TRAIN[framework](Job(accumulate))
    assert nobody is None and run is not None
    for one, other in zip(plain.parameters(), told.parameters(), strict=True):
        assert torch.equal(one, other)
    steps = int(next(iter(optimizer.state.values()))["step"])
    assert (run.loop.done, run.loop.rows) == (steps, EPOCHS * ROWS)
    assert steps == EPOCHS * ROWS // BATCH // accumulate


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_record_has_what_the_framework_knows(framework: str) -> None:
    net, optimizer, run = TRAIN[framework](Job())
    assert run is not None
    record = run.run
    assert record["status"] == "FINISHED"
    params = {name.rpartition(".")[2]: str(value) for name, value in record["params"].items()}
    assert float(params.get("lr") or params["learning_rate"]) == 0.01
    assert params["world_size"] == "1"
    found = record["metrics"]
    assert {"train/loss", "train/lr", "val/loss", "time/eval_s"} <= set(found)
    assert found["speed/samples_per_s"] > 0
    assert ("time/checkpoint_s" in found) == (framework != "accelerate"), "nobody tells of one"
    state = [t for each in optimizer.state.values() for t in each.values()]
    for owner, tensors in (("parameters", list(net.parameters())), ("optimizer_state", state)):
        assert found[f"memory/{owner}_mib"] * 2**20 == pytest.approx(
            sum(t.nbytes for t in tensors), rel=0.01
        )
    assert found["memory/batch_mib"] > 0


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_phases_are_what_they_take(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headroom.watch.phases.TIME_FIRST", 1000)
    monkeypatch.setattr(
        "headroom.watch.own_loop.TIME_FIRST", 1000
    )  # each step, so that no one stands for eight
    monkeypatch.setattr("headroom.watch.phases._is_due", lambda *_: False)  # and none counts
    end_step, own_s = OwnLoop.end_step, [0.0]  # that the account itself takes

    def end_step_timed(loop: OwnLoop, **told: Any) -> None:
        began = time.perf_counter()
        end_step(loop, **told)
        own_s.append(time.perf_counter() - began)

    monkeypatch.setattr(OwnLoop, "end_step", end_step_timed)
    job, missing = Job(wait_s=0.001, before_step=lambda _: time.sleep(0.02)), []
    for _ in range(6):  # other work on this machine is waited for between the phases too
        own_s.clear()
        _, _, run = TRAIN[framework](job)
        assert run is not None
        found = run.run["metrics"]
        assert found["time/data_wait_ms"] >= BATCH
        assert found["time/forward_ms"] >= 20
        whole = 1000 * (found["time/steps_s"] - sum(own_s)) / (run.loop.done - 1)
        missing.append(abs(1 - sum(found[f"time/{phase}_ms"] for phase in PHASES) / whole))
        if missing[-1] <= 0.05:
            break
    assert min(missing) <= 0.05, missing


def _end(error: BaseException) -> Callable[[int], None]:
    def fail(step: int) -> None:
        if step == 3:
            raise error

    return fail


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ValueError("no such thing"), "FAILED", "no such thing"),
        (KeyboardInterrupt(), "KILLED", "interrupted"),
        (SystemExit(0), "FINISHED", "sys.exit(0)"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB."),
            "FAILED",
            "memory ran out on cpu in the forward pass of step 4 (a batch of 8x16)",
        ),
    ],
    ids=["error", "interrupt", "exit", "out of memory"],
)
def test_the_end_of_a_training_is_true(
    framework: str, error: BaseException, status: str, reason: str
) -> None:
    error = copy.copy(error)
    with pytest.raises((type(error), SystemExit)):  # Lightning exits after Ctrl-C
        TRAIN[framework](Job(before_step=_end(error)))
    [run] = JUST
    assert run.run["status"] == status
    assert reason in run.run["tags"]["end.reason"]


def test_a_training_whose_error_nobody_told_has_failed(place: Path) -> None:
    """Its caller caught the error, and the run was FINISHED."""
    pytest.importorskip("transformers")
    from headroom.transformers import HeadroomCallback

    callback = HeadroomCallback(quiet=True)
    with pytest.raises(ValueError, match="no such thing"):
        _train_by_transformers(
            Job(before_step=_end(ValueError("no such thing"))), callback=callback
        )
    first = callback.run
    _train_by_transformers(Job(), callback=callback)
    assert first is not None and first is not callback.run
    assert first.run["tags"]["end.reason"] == "its training was left"
    found = query(place, "select status from runs order by start_time")
    assert found == [("FAILED",), ("FINISHED",)]


BOTH = """
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from headroom.transformers import HeadroomCallback


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, labels):
        out = self.layer(x)
        return {"loss": nn.functional.cross_entropy(out, labels), "logits": out}


rows = [{"x": torch.ones(4) * at, "labels": at % 2} for at in range(16)]
asked = TrainingArguments("out", max_steps=4, logging_steps=1, report_to="mlflow", use_cpu=True,
                          run_name="theirs", save_strategy="no", disable_tqdm=True)
with HeadroomCallback(run_name="ours", quiet=True) as told:
    trainer = Trainer(Net(), asked, train_dataset=rows, eval_dataset=rows, callbacks=[told])
    trainer.train()
"""


def test_beside_the_mlflow_callback_of_transformers_there_are_two_true_runs(place: Path) -> None:
    """MLflow knows one active run of a process, and theirs is that one."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (place / "both.py").write_text(BOTH)
    where = {"MLFLOW_TRACKING_URI": f"sqlite:///{place}/mlflow.db"}
    done = subprocess.run(
        [sys.executable, "both.py"],
        env={**desk_environment(), **where, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found = query(place, "select name, status from runs order by name")
    assert found == [("ours", "FINISHED"), ("theirs", "FINISHED")]
    curves = query(
        place,
        "select name, key, count(*) from metrics join runs using (run_uuid) "
        "where key in ('loss', 'train/loss') group by name, key order by name",
    )
    assert curves == [("ours", "train/loss", 4), ("theirs", "loss", 4)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_whatever_an_account_is_asked_for_can_be_asked_of_the_adapter(framework: str) -> None:
    _, _, run = TRAIN[framework](Job(asked={"params": {"lr": "mine", "more": 1}}))
    assert run is not None
    assert run.run["params"]["lr"] == "mine" and run.run["params"]["more"] == 1


@pytest.mark.skipif(not YOLO.is_dir(), reason="make test-all installs ultralytics")
def test_yolo_comes_to_the_same_weights_and_its_end_is_true(place: Path) -> None:
    plain, told = train_yolo(place), train_yolo(place, "told")
    assert plain["weights"] == told["weights"]
    assert told["ended"] == "FINISHED"
    # Of batches of four pictures, ultralytics takes a step after two, and leaves an epoch's last.
    assert told["steps"] == "4 24"
    assert {"train/box_loss", "val/box_loss", "metrics/mAP50B", "speed/samples_per_s"} <= set(told)
    assert all(float(told[f"time/{p}_ms"]) > 0 for p in ("forward", "backward"))
    assert float(told["time/eval_s"]) > 0 and float(told["time/checkpoint_s"]) > 0
    assert train_yolo(place, "told", "error")["ended"] == "FAILED no such thing"


@pytest.mark.skipif(not YOLO.is_dir(), reason="make test-all installs ultralytics")
def test_the_example_of_the_page_works_as_written(place: Path) -> None:
    train_yolo(place, "page")
    assert query(place, "select status from runs where name = 'yolo'") == [("FINISHED",)]
