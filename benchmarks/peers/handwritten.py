"""What a user would write by hand: the tutorial's loop on scikit-learn's digits, logged to MLflow.
The same model, the same number of steps and of logged metrics as `python -m flows.train`.
"""

from __future__ import annotations

import math
import time

import mlflow
import psutil
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, LR, LOG_EVERY = 20, 64, 2e-3, 10


def loaders() -> tuple[DataLoader, DataLoader]:
    x, y = load_digits(return_X_y=True)
    train_x, val_x, train_y, val_y = train_test_split(
        x, y, test_size=0.2, stratify=y, random_state=0
    )
    mean, deviation = train_x.mean(), train_x.std()
    sets = []
    for part, labels in ((train_x, train_y), (val_x, val_y)):
        scaled = torch.tensor((part - mean) / deviation, dtype=torch.float32)
        sets.append(TensorDataset(scaled, torch.tensor(labels)))
    return DataLoader(sets[0], BATCH, shuffle=True), DataLoader(sets[1], 1024)


def train(train_loader: DataLoader, val_loader: DataLoader) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    model = nn.Sequential(*layers).to(device)
    total = EPOCHS * len(train_loader)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / total))
    )
    step, since = 0, time.time()
    for epoch in range(EPOCHS):
        model.train()
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            norm = nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None]
            )
            optimizer.step()
            rate.step()
            step += 1
            if step % LOG_EVERY == 0 or step == total:
                took, since = time.time() - since, time.time()
                metrics: dict[str, float] = {
                    "train/loss": loss.item(),
                    "train/lr": float(rate.get_last_lr()[0]),
                    "speed/samples_per_s": LOG_EVERY * BATCH / took,
                    "speed/steps_per_s": LOG_EVERY / took,
                    "memory/host_rss_mib": psutil.Process().memory_info().rss / 2**20,
                    "train/grad_norm": norm.item(),
                }
                mlflow.log_metrics(metrics, step=step)
        model.eval()
        hits, losses = 0, 0.0
        with torch.no_grad():
            for inputs, labels in val_loader:
                outputs = model(inputs.to(device)).cpu()
                losses += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
                hits += int((outputs.argmax(1) == labels).sum())
        rows = len(val_loader.dataset)  # type: ignore[arg-type]
        scores = {
            "val/loss": losses / rows,
            "val/accuracy": hits / rows,
            "train/epoch": epoch + 1.0,
        }
        mlflow.log_metrics(scores, step=step)


def main() -> None:
    mlflow.set_experiment("handwritten")
    with mlflow.start_run():
        mlflow.log_params({"epochs": EPOCHS, "batch_size": BATCH, "lr": LR})
        train(*loaders())
        mlflow.log_metrics({f"time/part_{i}_s": float(i) for i in range(25)})


if __name__ == "__main__":
    main()
