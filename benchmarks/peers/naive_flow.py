"""What a user would write first with Prefect: four tasks around the hand-written script, with no
server running and MLflow's fluent interface.
"""

from __future__ import annotations

import mlflow
import torch
from prefect import flow, task
from torch.utils.data import DataLoader

from benchmarks.peers import handwritten


@task
def detect_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@task
def prepare_data() -> tuple[DataLoader, DataLoader]:
    return handwritten.loaders()


@task
def train_model(loaders: tuple[DataLoader, DataLoader]) -> None:
    handwritten.train(*loaders)


@task
def release_memory(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()


@flow
def naive() -> None:
    mlflow.set_experiment("naive")
    with mlflow.start_run():
        mlflow.log_params(
            {
                "epochs": handwritten.EPOCHS,
                "batch_size": handwritten.BATCH,
                "lr": handwritten.LR,
            }
        )
        device = detect_device()
        train_model(prepare_data())
        release_memory(device)
        mlflow.log_metrics({f"time/part_{i}_s": float(i) for i in range(25)})


if __name__ == "__main__":
    naive()
