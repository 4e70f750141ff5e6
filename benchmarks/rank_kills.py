"""Whether a training of four processes that loses one of them again and again comes out as if
nothing had happened: whole commands, of which a random rank is killed every 20 s on average,
whatever it does then, for half an hour; in turns with the whole model on each (DDP) and with
shares of it (FSDP2). Each training is held against an undisturbed one: its end and its status in
MLflow, each step's loss there once and equal to the bit, the weights equal to the bit.

`python -m benchmarks.rank_kills [MINUTES [SEED]]`
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from benchmarks.conditions import publish

MINUTES = 30.0
PROCESSES = 4
BETWEEN_S = (5.0, 35.0)  # from one kill to the next, drawn evenly: 20 s on average
RANK_MODULE = "headroom.launch.rank"  # in the command line of each rank
TOO_LONG_S = 1800.0
EPOCHS = 50
MODEL = """
import time

import torch
from torch import nn

torch.set_num_threads(1)


class Model(nn.Module):
    # Dropout draws random numbers, which have to go on where they were; a step takes so long that
    # what is left of a core is enough for four.
    def __init__(self, outputs):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 256), nn.ReLU(),
            nn.Linear(256, outputs),
        )

    def forward(self, x):
        if self.training:
            time.sleep(0.02)
        return self.layers(x.flatten(1))
"""
SETTINGS = (
    *("--launch.processes", str(PROCESSES), "--run.retries", "1000"),
    *("--model.name", "slow_model:Model", "--train.deterministic", "true"),
    *("--train.batch_size", "64", "--train.epochs", str(EPOCHS)),
    *("--checkpoint.every", "25steps", "--train.log_every", "1"),
)


@dataclass
class Training:
    """One training as a command in a folder of its own, and what came of it."""

    parallel: str
    folder: Path
    kills: list[int] = field(default_factory=list)  # of which rank
    took_s: float = 0.0
    code: int = -1

    def run(self, drawn: random.Random | None) -> Training:
        """Train; with random numbers, ranks are killed meanwhile."""
        self.folder.mkdir(parents=True)
        (self.folder / "slow_model.py").write_text(MODEL)
        began_s = time.monotonic()
        with open(self.folder / "printed", "wb") as printed:
            command = subprocess.Popen(
                [sys.executable, "-m", "flows.train", *SETTINGS, "--train.parallel", self.parallel],
                cwd=self.folder,
                env=_make_environment(),
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
            next_s = began_s + (drawn.uniform(*BETWEEN_S) if drawn else TOO_LONG_S)
            while command.poll() is None:
                time.sleep(0.1)
                if drawn and time.monotonic() >= next_s and self._kill_one(command.pid, drawn):
                    next_s = time.monotonic() + drawn.uniform(*BETWEEN_S)
                if time.monotonic() - began_s > TOO_LONG_S:
                    command.send_signal(signal.SIGTERM)
                    command.wait(timeout=120)
        self.took_s, self.code = time.monotonic() - began_s, command.returncode
        return self

    def _kill_one(self, command: int, drawn: random.Random) -> bool:
        """Kill one of its ranks; return False where there is none now."""
        ranks = {}
        for child in psutil.Process(command).children(recursive=True):
            with suppress(psutil.Error, KeyError):
                if RANK_MODULE in child.cmdline():
                    ranks[int(child.environ()["RANK"])] = child
        if not ranks:
            return False
        number = drawn.choice(sorted(ranks))
        with suppress(psutil.Error):
            ranks[number].kill()
            self.kills.append(number)
        return True

    def query(self, text: str) -> list[tuple[object, ...]]:
        """Return the rows that MLflow's database has for this."""
        with closing(sqlite3.connect(self.folder / "mlflow.db")) as database:
            return database.execute(text).fetchall()

    def read_losses(self) -> dict[int, list[float]]:
        """Return the values of the loss that MLflow has, by step."""
        losses: dict[int, list[float]] = {}
        for step, value in self.query("select step, value from metrics where key = 'train/loss'"):
            losses.setdefault(int(str(step)), []).append(float(str(value)))
        return losses

    def read_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights that it has trained."""
        (file,) = self.folder.glob(".headroom/runs/*/model/weights.pt")
        weights: dict[str, torch.Tensor] = torch.load(file)
        return weights

    def find_faults(self, whole: Training) -> list[str]:
        """Return in words what is not as in the undisturbed training."""
        if self.code != 0:
            return [f"it ended with {self.code}; see {self.folder}/printed"]
        faults = []
        statuses = [status for (status,) in self.query("select status from runs")]
        if statuses != ["FINISHED"]:
            faults.append(f"MLflow has {statuses}")
        losses, expected = self.read_losses(), whole.read_losses()
        doubled = sum(len(values) > 1 for values in losses.values())
        if doubled:
            faults.append(f"{doubled} steps are in MLflow twice")
        if losses.keys() != expected.keys():
            faults.append(f"{len(losses.keys() ^ expected.keys())} steps are lost or too many")
        if any(losses[step] != expected[step] for step in losses.keys() & expected.keys()):
            faults.append("losses differ")
        weights, right = self.read_weights(), whole.read_weights()
        if weights.keys() != right.keys() or not all(
            torch.equal(weights[name], right[name]) for name in right
        ):
            faults.append("weights differ")
        return faults


def _make_environment() -> dict[str, str]:
    ours = ("PREFECT_", "MLFLOW_", "HEADROOM_")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)} | {
        "PYTHONPATH": str(Path(__file__).parents[1])
    }


def main(minutes: float, seed: int) -> None:
    """Train, kill, compare, print, keep."""
    publish("rank-kills", "Four processes that lose one of them", _lines(minutes, seed))


def _lines(minutes: float, seed: int) -> Iterator[str]:
    low, high = BETWEEN_S
    yield f"""
- {PROCESSES} processes that talk by gloo, {EPOCHS} epochs of digits in batches of 64, a checkpoint
  every 25 steps, train.deterministic; for {minutes:.0f} minutes a random rank is killed (SIGKILL)
  after each {low:.0f} to {high:.0f} s, drawn evenly, also while it starts, writes or ends.
  Seed {seed}.
- Equal: exit code 0, one run in MLflow that is FINISHED, each step's loss there once and to the
  bit as in the undisturbed training, the weights to the bit.

| training | processes | kills | took s | undisturbed s | result |
|:--|:--|--:|--:|--:|:--|"""
    drawn = random.Random(seed)
    place = Path(tempfile.mkdtemp(prefix="rank-kills-"))
    whole = {
        parallel: Training(parallel, place / f"{parallel}-whole").run(None)
        for parallel in ("ddp", "fsdp")
    }
    until_s = time.monotonic() + 60 * minutes
    trainings: list[tuple[Training, list[str]]] = []
    while time.monotonic() < until_s:
        parallel = "fsdp" if len(trainings) % 2 else "ddp"
        folder = place / f"{parallel}-{len(trainings)}"
        training = Training(parallel, folder).run(drawn)
        faults = training.find_faults(whole[parallel])
        trainings.append((training, faults))
        name = {"ddp": "DDP", "fsdp": "FSDP2"}[parallel]
        yield (
            f"| {len(trainings)} | {name} | {len(training.kills)} | {training.took_s:.0f} | "
            f"{whole[parallel].took_s:.0f} | {'; '.join(faults) or 'equal'} |"
        )
    kills = sum(len(training.kills) for training, _ in trainings)
    equal = sum(not faults for _, faults in trainings)
    yield f"\n{equal} of {len(trainings)} trainings equal, {kills} ranks killed."
    if equal == len(trainings):
        shutil.rmtree(place)


if __name__ == "__main__":
    main(
        float(sys.argv[1]) if len(sys.argv) > 1 else MINUTES,
        int(sys.argv[2]) if len(sys.argv) > 2 else 0,
    )
