"""What a user would write with Lightning: digits by its Trainer and its MLFlowLogger. The same
model, the same number of steps and about as many logged metrics as `python -m flows.train`.
"""

from __future__ import annotations

import math
import time
from typing import Any

import psutil
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import MLFlowLogger
from torch import Tensor, nn

from benchmarks.peers import handwritten


class Digits(LightningModule):
    def __init__(self, total_steps: int) -> None:
        super().__init__()
        layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        self.model = nn.Sequential(*layers)
        self._total_steps = total_steps
        self._since = time.time()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.log("train/loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        now = time.time()
        took_s, self._since = now - self._since, now
        self.log_dict(
            {
                "train/lr": float(optimizer.param_groups[0]["lr"]),
                "train/grad_norm": nn.utils.get_total_norm(grads),
                "speed/steps_per_s": 1 / took_s,
                "memory/host_rss_mib": psutil.Process().memory_info().rss / 2**20,
            }
        )

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, labels = batch
        outputs = self.model(inputs)
        scores = {
            "val/loss": nn.functional.cross_entropy(outputs, labels),
            "val/accuracy": (outputs.argmax(1) == labels).float().mean(),
        }
        self.log_dict(scores, batch_size=len(inputs))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=handwritten.LR)
        rate = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / self._total_steps))
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": rate, "interval": "step"},
        }


def main() -> None:
    torch.manual_seed(0)
    train_loader, val_loader = handwritten.loaders()
    logger = MLFlowLogger("lightning")
    logger.log_hyperparams(
        {
            "epochs": handwritten.EPOCHS,
            "batch_size": handwritten.BATCH,
            "lr": handwritten.LR,
        }
    )
    trainer = Trainer(
        devices=1,
        max_epochs=handwritten.EPOCHS,
        logger=logger,
        log_every_n_steps=handwritten.LOG_EVERY,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = Digits(total_steps=handwritten.EPOCHS * len(train_loader))
    trainer.fit(model, train_loader, val_loader)
    logger.log_metrics({f"time/part_{i}_s": float(i) for i in range(25)})


if __name__ == "__main__":
    main()
