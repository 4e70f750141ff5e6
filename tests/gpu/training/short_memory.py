"""Memory of a real GPU that runs out where a test wants it, and trainings that go on after it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headroom.base.facts import TrainFacts
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.training import place, shared_model, trainer
from headroom.training.admission import Admission
from headroom.training.plan import Plan, make_plan
from headroom.watch import leaks

MIB = 2**20
GPU = torch.device("cuda:0")
MODEL = shared_model.make_model
ROWS = 32  # of a batch; 152 rows are four of them and a short one


class Short:
    """Memory that runs out at some calls of a function, in earnest: more is asked for than is."""

    def __init__(self, at: Callable[[int], bool], real: Callable[..., Any] | None = None) -> None:
        self._at, self._real, self.calls, self.failed = at, real, 0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self._at(self.calls):
            self.failed += 1
            held = torch.zeros(MIB, device=GPU)  # what a failed attempt leaves in its frames
            free, _ = torch.cuda.mem_get_info(GPU)
            torch.empty(2 * free + held.nbytes, dtype=torch.uint8, device=GPU)
        return self._real(*args, **kwargs) if self._real else None

    def function(self) -> Callable[..., Any]:
        """This, where a method is looked for."""
        return lambda *args, **kwargs: self(*args, **kwargs)

    def in_model(self, hook: str, *, training: bool) -> Callable[..., nn.Module]:
        """Makes the model of a run, whose last layer calls this."""

        def call(module: nn.Module, *_: Any) -> None:
            if module.training == training:
                self()

        def made(*args: Any) -> nn.Module:
            model = MODEL(*args)
            last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
            getattr(last, hook)(call)
            return model

        return made


def train_mlp(folder: Path, **sections: dict[str, Any]) -> TrainFacts:
    given = {
        "data": {
            "source": "synthetic",
            "cache": str(folder / "data"),
            "args": {"rows": 190, "features": 8},
        },
        "device": {"name": "cuda"},
        "model": {"name": "mlp", "args": {"hidden": [16], "dropout": 0.2}},
        "optim": {"clip_norm": 0.5, "lr": 0.05},
    }
    train = {"epochs": 2, "batch_size": ROWS, "log_every": 2, "compile": "off"}
    config = RunConfig.model_validate(
        {**given, **sections, "train": {**train, **sections.get("train", {})}}
    )
    return trainer.train(
        make_plan(config, detect_best_device("cuda"), prepare_dataset(config.data)),
        folder=folder,
        log=lambda metrics, step: None,
    )


def read_weights(facts: TrainFacts) -> dict[str, torch.Tensor]:
    return torch.load(Path(facts.model_folder) / "weights.pt", weights_only=True)


@pytest.fixture(autouse=True)
def admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every training is let in, as where somebody else takes the memory after that."""

    def let_in(plan: Plan, **_: Any) -> Admission:
        return Admission(None, "", plan.micro_batch, "let in by a test")

    monkeypatch.setattr(place, "admit_training", let_in)
    # Micro-batches are also halved where caches were given back in two windows running, and when a
    # window ends depends on the clock.
    thrashing = "headroom.watch.memory_meter.MemoryMeter.is_thrashing"
    monkeypatch.setattr(thrashing, lambda meter: False)


@contextmanager
def as_if_nothing_had_happened(expected: TrainFacts) -> Iterator[list[TrainFacts]]:
    """Appended inside: a training with the weights of `expected`, which gave its memory back."""
    before = leaks.take_baseline(GPU)
    done: list[TrainFacts] = []
    yield done
    (facts,) = done
    wanted = read_weights(expected)
    for name, tensor in read_weights(facts).items():
        assert torch.equal(tensor, wanted[name]), name
    assert facts.metrics["val/loss"] == pytest.approx(expected.metrics["val/loss"], rel=1e-5)
    released = leaks.release_device_memory(
        GPU, baseline_bytes=before.bytes, held_bytes=facts.held_bytes
    )
    assert released.ok and released.after_bytes == before.bytes, released


def is_odd(call: int) -> bool:
    return call % 2 == 1
