"""The same small training as a loop of one's own and by each framework: it keeps checkpoints, may
be ended at a step, and goes on from the newest checkpoint where there is one. `python -m` runs it
in a process that may be killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headroom import account

STEPS, EVERY, STOP_AT = 24, 8, 13  # of all; of an epoch, which ends with a checkpoint; its end
EPOCHS = STEPS // EVERY
FRAMEWORKS = ("own", "lightning", "transformers", "accelerate")


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Numbers, each its own target."""

    def __len__(self) -> int:
        return EVERY * 4

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(at)
        return {"x": torch.randn(8, generator=draw), "labels": torch.randn(1, generator=draw)}


class Net(nn.Module):
    """One layer, which ends its training in mid-step where it is asked to."""

    def __init__(self, end: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.end, self.steps = nn.Linear(8, 1), end, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps += 1
        if self.end and self.steps == STOP_AT:
            end_by(self.end)
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def end_by(how: str) -> None:
    """End this training."""
    if how == "error":
        raise ValueError("no such thing")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM}[how])


def train(framework: str, *, end: str = "", key: str = "", is_told: bool = True) -> Any:
    """Train, from the newest checkpoint of this folder on; return the account, once it has ended.
    is_told: else nobody accounts for it."""
    asked = {"key": key, "quiet": True, "run_name": "again"}
    return TRAIN[framework](end, asked, is_told)


def train_own(end: str, asked: dict[str, Any], is_told: bool) -> Any:
    net, kept = Net(end), Path("kept.pt")
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    left = torch.load(kept) if kept.exists() else None
    if left is not None:
        net.load_state_dict(left["net"])
    done = left["step"] if left is not None else 0
    with account(model=net, optimizer=opt, **asked) if is_told else nullcontext() as run:
        if left is not None and run is not None:
            run.load_state_dict(left["run"])
        batches = (batch for _ in range(EPOCHS) for batch in DataLoader(Rows(), 4))
        for step, batch in enumerate(islice(batches, done, None), start=done + 1):
            loss = net(**batch)["loss"]
            loss.backward()
            opt.step()
            opt.zero_grad()
            if run is not None:
                run.log({"train/loss": loss})
            if step % EVERY == 0:
                of_run = {} if run is None else run.state_dict()
                torch.save({"net": net.state_dict(), "step": step, "run": of_run}, kept)
    return run


def train_by_lightning(end: str, asked: dict[str, Any], is_told: bool) -> Any:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from headroom.lightning import HeadroomCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(end)

        def training_step(self, batch: Any, at: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    told = HeadroomCallback(**asked)
    keeps = ModelCheckpoint("kept", save_last=True)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[told, keeps] if is_told else [keeps],
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = Path("kept/last.ckpt")
    trainer.fit(Module(), DataLoader(Rows(), 4), ckpt_path=last if last.exists() else None)
    return told.run


def train_by_transformers(end: str, asked: dict[str, Any], is_told: bool) -> Any:
    import transformers

    from headroom.transformers import HeadroomCallback

    told = HeadroomCallback(**asked)
    wanted = transformers.TrainingArguments(
        output_dir="kept",
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        save_steps=EVERY,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        Net(end), wanted, train_dataset=Rows(), callbacks=[told] if is_told else []
    )
    with told:
        trainer.train(resume_from_checkpoint=any(Path("kept").glob("checkpoint-*")) or None)
    return told.run


def train_by_accelerate(end: str, asked: dict[str, Any], is_told: bool) -> Any:
    import accelerate

    from headroom.accelerate import HeadroomTracker

    net, kept = Net(end), Path("kept")
    opt = torch.optim.SGD(net.parameters(), lr=0.01)
    tracker = HeadroomTracker(model=net, optimizer=opt, **asked)
    does = accelerate.Accelerator(cpu=True, log_with=tracker if is_told else None)
    model, optimizer, loader = does.prepare(net, opt, DataLoader(Rows(), 4))
    done = 0
    if is_told:
        tracker.add_to(does)
        does.init_trackers("again")
        does.log({})
    if (kept / "step.json").exists():
        does.load_state(str(kept))
        done = json.loads((kept / "step.json").read_text())
    with tracker.run if tracker.run is not None else nullcontext():
        batches = (batch for _ in range(done, STEPS, EVERY) for batch in loader)
        for step, batch in enumerate(batches, start=done + 1):
            loss = model(**batch)["loss"]
            does.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            does.log({"train/loss": loss.item()})
            if step % EVERY == 0:
                does.save_state(str(kept))
                (kept / "step.json").write_text(str(step))
    does.end_training()
    return tracker.run


TRAIN = {
    "own": train_own,
    "lightning": train_by_lightning,
    "transformers": train_by_transformers,
    "accelerate": train_by_accelerate,
}


if __name__ == "__main__":
    train(sys.argv[1], end=sys.argv[2], key=sys.argv[3])
