"""Loops of others that go on where memory runs out, through the account and the adapters: the
weights are those of a training for which it never did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headroom import account
from tests.run.faults import send_nothing

pytestmark = pytest.mark.filterwarnings("ignore")  # what frameworks warn of is theirs
ROWS, FIT = 24, 8


@pytest.fixture(autouse=True)
def alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with send_nothing(monkeypatch, counts_all=False):
        yield


class Net(nn.Module):
    """Raises for more rows than fit."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.most = most

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.training and len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        out = self.layers(x)
        return out if labels is None else {"loss": F.cross_entropy(out, labels), "logits": out}


def make_data() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(60, 8, generator=draw), torch.randint(0, 3, (60,), generator=draw)
    )


def are_close(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


def _train_own(most: int, *, accumulate: int = 1) -> tuple[nn.Module, account, list[float]]:
    torch.manual_seed(0)
    net = Net(most)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    with account(run_name="own", model=net, optimizer=opt, quiet=True) as run:
        step = run.protect(lambda x, y: F.cross_entropy(net(x), y))
        for at, (x, y) in enumerate(run.batches(DataLoader(make_data(), ROWS))):
            losses.append(step(x, y).item())
            if at % accumulate == accumulate - 1:
                opt.step()
                opt.zero_grad()
    return net, run, losses


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loop_of_ones_own_goes_on_in_parts(accumulate: int) -> None:
    whole, calm, losses = _train_own(ROWS, accumulate=accumulate)
    parts, run, others = _train_own(FIT, accumulate=accumulate)
    assert are_close(whole, parts) and losses == pytest.approx(others, rel=1e-5)
    assert (
        run.run["metrics"]["memory/ooms_recovered"] == 2 and run.run["tags"]["micro_batch"] == "6"
    )
    assert calm.run["metrics"]["memory/ooms_recovered"] == 0
    assert "micro_batch" not in calm.run["tags"]
    assert run.run["warnings"] == []
    assert (run.loop.done, run.loop.rows) == (calm.loop.done, calm.loop.rows)
    assert run.run["metrics"].keys() >= {"time/forward_ms", "time/backward_ms"}


def test_why_it_does_not_is_a_warning_of_the_run() -> None:
    net = nn.Sequential(Net(FIT), nn.BatchNorm1d(3))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    run = account(run_name="own", model=net, optimizer=opt, quiet=True)
    x, y = make_data().tensors
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"), run:
        run.protect(lambda x, y: F.cross_entropy(net(x), y))(x, y)
    (warning,) = (text for text in run.run["warnings"] if text.startswith("protect"))
    assert "batches are taken whole" in warning and "BatchNorm1d" in warning


def test_an_account_that_measures_nothing_still_goes_backward() -> None:
    net = Net(ROWS)
    x, y = make_data().tensors
    run = account(run_name="own", model=net, quiet=True)
    with run:
        run.take_error(LookupError("a fault of ours"))
        step = run.protect(lambda x, y: F.cross_entropy(net(x), y))
        assert step(x[:4], y[:4]) > 0
        assert all(p.grad is not None for p in net.parameters())


def _train_by_lightning(most: int, **more: Any) -> tuple[nn.Module, account, Any, list[Any]]:
    pl = pytest.importorskip("lightning.pytorch")
    from headroom.lightning import HeadroomCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(most)

        def training_step(self, batch: Any, at: int) -> dict[str, torch.Tensor]:
            out = self.net(batch[0])
            loss = F.cross_entropy(out, batch[1])
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            self.log("rows", float(len(out)), on_epoch=True, reduce_fx=sum)
            return {"loss": loss, "out": out.detach()}

        def on_train_batch_end(self, outputs: Any, batch: Any, at: int) -> None:
            seen.append((outputs["loss"].item(), len(outputs["out"])))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    seen: list[Any] = []
    callback = HeadroomCallback(quiet=True, protect=True)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **more,
    )
    module = Module()
    trainer.fit(module, DataLoader(make_data(), ROWS))
    assert callback.run is not None
    assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)
    return module.net, callback.run, trainer.callback_metrics, seen


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning_goes_on_in_parts_and_logs_the_batch(accumulate: int) -> None:
    whole, _, logged, seen = _train_by_lightning(ROWS, accumulate_grad_batches=accumulate)
    parts, run, others, too = _train_by_lightning(FIT, accumulate_grad_batches=accumulate)
    assert are_close(whole, parts)
    assert {k: v.item() for k, v in logged.items()} == pytest.approx(
        {k: v.item() for k, v in others.items()}, rel=1e-4
    )
    assert [n for _, n in seen] == [n for _, n in too] == [24, 24, 12, 24, 24, 12]
    assert [loss for loss, _ in seen] == pytest.approx([loss for loss, _ in too], rel=1e-4)
    assert run.run["metrics"]["memory/ooms_recovered"] == 2 and run.run["warnings"] == []


def _train_by_transformers(most: int, **more: Any) -> tuple[nn.Module, account, float]:
    transformers = pytest.importorskip("transformers")
    from headroom.transformers import HeadroomCallback

    torch.manual_seed(0)
    x, labels = make_data().tensors
    rows = [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]
    asked = transformers.TrainingArguments(
        output_dir="hf",
        max_steps=3,
        per_device_train_batch_size=ROWS,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        remove_unused_columns=False,
        learning_rate=1e-2,
        **more,
    )
    with HeadroomCallback(quiet=True) as told:
        trainer = transformers.Trainer(Net(most), asked, train_dataset=rows, callbacks=[told])
        told.protect(trainer)
        found = trainer.train()
    assert told.run is not None
    return trainer.model, told.run, found.training_loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_of_transformers_goes_on_in_parts(accumulate: int) -> None:
    whole, _, loss = _train_by_transformers(ROWS, gradient_accumulation_steps=accumulate)
    parts, run, other = _train_by_transformers(FIT, gradient_accumulation_steps=accumulate)
    assert are_close(whole, parts) and loss == pytest.approx(other, rel=1e-4)
    assert run.run["metrics"]["memory/ooms_recovered"] == 2 and run.run["warnings"] == []


def test_a_sum_over_the_words_of_several_batches_is_divided_once() -> None:
    """The models of transformers divide by num_items_in_batch, which is no mean of one batch."""
    transformers = pytest.importorskip("transformers")
    from headroom.transformers import HeadroomCallback

    class Language(nn.Module):
        def __init__(self, most: int) -> None:
            super().__init__()
            self.words, self.out, self.most = nn.Embedding(11, 8), nn.Linear(8, 11), most

        def forward(self, x: Any, labels: Any, num_items_in_batch: Any = None, **_: Any) -> Any:
            if self.training and len(x) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
            out = self.out(self.words(x)).flatten(0, 1)
            loss = F.cross_entropy(out, labels.flatten(), reduction="sum") / num_items_in_batch
            return {"loss": loss, "logits": out}

    def train(most: int) -> tuple[nn.Module, account]:
        torch.manual_seed(0)
        rows = []
        for length in range(1, 33):
            words = torch.randint(0, 11, (12,))
            labels = words.where(torch.arange(12) < length % 12, torch.tensor(-100))
            rows.append({"x": words, "labels": labels})
        asked = transformers.TrainingArguments(
            output_dir="hf",
            max_steps=2,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            remove_unused_columns=False,
            learning_rate=1e-2,
        )
        with HeadroomCallback(quiet=True) as told:
            trainer = transformers.Trainer(
                Language(most), asked, train_dataset=rows, callbacks=[told]
            )
            told.protect(trainer)
            trainer.train()
        assert told.run is not None
        return trainer.model, told.run

    (whole, _), (parts, run) = train(8), train(3)
    assert are_close(whole, parts)
    assert run.run["metrics"]["memory/ooms_recovered"] == 2 and run.run["warnings"] == []


def test_accelerate_goes_on_in_parts() -> None:
    accelerate = pytest.importorskip("accelerate")
    from headroom.accelerate import HeadroomTracker

    def train(most: int) -> tuple[nn.Module, account]:
        torch.manual_seed(0)
        net = Net(most)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        tracker = HeadroomTracker(model=net, optimizer=opt, quiet=True)
        does = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, log_with=tracker)
        model, optimizer, loader = does.prepare(net, opt, DataLoader(make_data(), ROWS))
        does.init_trackers("mine", config={})
        run = tracker.run
        step = run.protect(lambda x, y: F.cross_entropy(model(x), y), does.backward)
        with run:
            for x, y in run.batches(loader):
                with does.accumulate(model):
                    step(x, y)
                    optimizer.step()
                    optimizer.zero_grad()
        return net, run

    (whole, _), (parts, run) = train(ROWS), train(FIT)
    assert are_close(whole, parts)
    assert run.run["metrics"]["memory/ooms_recovered"] == 2 and run.run["warnings"] == []
