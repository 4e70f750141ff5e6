"""What every contender of one table is given: the same settings, prepared rows, device, precision
and MLflow database, and the same clock. Timed is one whole epoch after a warm-up, from before its
first batch until the device has done its last step; the validation after it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.workloads import Workload
from headroom.base.facts import DataFacts, DeviceFacts
from headroom.data import preparation as prepared
from headroom.device.detection import make_autocast, resolve_precision
from headroom.models import builtin
from headroom.settings.read_settings import override_config
from headroom.settings.run_config import RunConfig
from headroom.training.check_training import check_plan
from headroom.training.plan import Plan, make_plan
from headroom.watch.allocators import wait_for_device

T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """Seconds of a step in the timed epoch, and what it ran with: threads, for example."""

    step_s: float
    how: str


@dataclass(frozen=True)
class Trial:
    """One workload, made ready."""

    config: RunConfig
    device: DeviceFacts
    data: DataFacts
    warm_up: int  # steps before the timed epoch; this project takes a whole epoch for it
    tracking_uri: str | None  # None: nobody tracks

    @property
    def target(self) -> torch.device:
        return torch.device(self.device.name)

    @property
    def precision(self) -> str:
        return resolve_precision(self.config.train.precision, self.device)

    @property
    def steps(self) -> int:
        """Of the timed epoch; the last may be a short one."""
        return ceil(self.data.train_rows / self.config.train.batch_size)

    @property
    def adamw(self) -> dict[str, Any]:
        """The arguments that all contenders give to AdamW."""
        return {"lr": self.config.optim.lr, "weight_decay": self.config.optim.weight_decay}

    @property
    def plan(self) -> Plan:
        return make_plan(self.config, self.device, self.data)

    @property
    def work(self) -> int:
        """Multiply-adds of the forward pass of one batch."""
        check = check_plan(self.plan).model_check
        assert check is not None
        return self.config.train.batch_size * check.work

    def autocast(self) -> Callable[[], AbstractContextManager[object]]:
        return make_autocast(self.precision, self.target)

    def module(self) -> nn.Module:
        """The model on the device, with the same weights for everybody."""
        torch.manual_seed(self.config.train.seed)
        return builtin.build_model(
            self.config.model.name,
            input_shape=self.data.input_shape,
            outputs=self.data.outputs,
            args=self.config.model.args,
        ).to(self.target)

    def rows(self) -> tuple[Tensor, Tensor]:
        """The training rows and their targets, whole, in the host's memory."""
        arrays = prepared.load_arrays(self.data)
        x, y = np.array(arrays.train_x), np.array(arrays.train_y)
        # Tokens lie on disk as narrow as they can; an embedding is looked up by int64.
        return tuple(  # type: ignore[return-value] # of two
            torch.from_numpy(part.astype(np.int64) if part.dtype.kind in "ui" else part)
            for part in (x, y)
        )


def ready(
    workload: Workload, device: DeviceFacts, *, scratch: Path, tracking_uri: str | None
) -> Trial:
    """The workload with its rows on disk."""
    w = workload
    config = RunConfig.model_validate(
        {
            "data": {**w.data(scratch), "cache": str(scratch / "data")},
            "model": {"name": w.model, "args": w.args},
            # Constant, since the other loops have no schedule.
            "optim": {"lr": 1e-3, "schedule": "constant", "warmup": 0.0},
            "train": {"epochs": 2, "batch_size": w.batch_size, "compile": w.compile},
        }
    )
    data = prepared.prepare_dataset(config.data)
    trial = Trial(config, device, data, w.warm_up, tracking_uri)
    # A log point in the warm-up at least: the first one counts the memory of its step by owner,
    # which is due again 500 steps later.
    log_every = min(config.train.log_every, trial.steps)
    return replace(trial, config=override_config(config, {"train.log_every": log_every}))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of classes, (rows, classes), or of tokens, (rows, context, vocabulary)."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Span:
    """The clock of a loop of one's own: it waits for the device before and after the timed epoch,
    and nowhere else."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._at: list[float] = []

    def timed(self, epoch: Callable[[], Iterable[T]]) -> Iterator[T]:
        """The batches of a warm-up, then those of the timed epoch."""
        yield from islice(epoch(), self._trial.warm_up)
        self.mark()
        yield from epoch()
        self.mark()

    def mark(self) -> None:
        """The timed epoch begins, or ends, here."""
        wait_for_device(self._trial.target)
        self._at.append(perf_counter())

    def reading(self) -> Reading:
        began, ended = self._at
        return Reading((ended - began) / self._trial.steps, f"threads {torch.get_num_threads()}")


@contextmanager
def tracked(uri: str | None) -> Iterator[Callable[[str, float, int], object]]:
    """mlflow.log_metric(name, value, step) of a run of its own; nothing where nobody tracks."""
    if uri is None:
        yield lambda name, value, step: None
        return
    import mlflow  # which may not be here

    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient(uri)
    experiment = mlflow.set_experiment("tutorial").experiment_id
    run_id = client.create_run(experiment).info.run_id
    yield partial(mlflow.log_metric, run_id=run_id)
    client.set_terminated(run_id)  # mlflow.end_run() would sleep for a second
