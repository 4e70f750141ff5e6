"""Memory that runs out in every phase of a training on a real GPU: what failed is done again, the
weights are those of a run that never ran out, and all of the memory is given back."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headroom.base.facts import TrainFacts
from headroom.data.prefetch import PinnedStaging
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import RunConfig
from headroom.training import optim, place, shared_model, trainer
from headroom.training.admission import Admission
from headroom.training.plan import Plan, make_plan
from headroom.watch import leaks
from headroom.watch.oom_report import OutOfMemory

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
MIB = 2**20
GPU = torch.device("cuda:0")
MODEL = shared_model.make_model
Spared = Callable[..., TrainFacts]
ROWS = 32  # of a batch; 152 rows are four of them and a short one


class _Short:
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


def _train(folder: Path, **sections: dict[str, Any]) -> TrainFacts:
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


def _weights(facts: TrainFacts) -> dict[str, torch.Tensor]:
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


@pytest.fixture(scope="module")
def spared(tmp_path_factory: pytest.TempPathFactory) -> Spared:
    """A training that never runs out of memory."""

    @cache
    def train(**how: Any) -> TrainFacts:
        return _train(tmp_path_factory.mktemp("spared"), train=how)

    return train


@contextmanager
def _as_if_nothing_had_happened(expected: TrainFacts) -> Iterator[list[TrainFacts]]:
    """Appended inside: a training with the weights of `expected`, which gave its memory back."""
    before = leaks.take_baseline(GPU)
    done: list[TrainFacts] = []
    yield done
    (facts,) = done
    wanted = _weights(expected)
    for name, tensor in _weights(facts).items():
        assert torch.equal(tensor, wanted[name]), name
    assert facts.metrics["val/loss"] == pytest.approx(expected.metrics["val/loss"], rel=1e-5)
    released = leaks.release_device_memory(
        GPU, baseline_bytes=before.bytes, held_bytes=facts.held_bytes
    )
    assert released.ok and released.after_bytes == before.bytes, released


def _every_other(call: int) -> bool:
    return call % 2 == 1


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_full_backward_hook"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_pass_that_ran_out_leaves_the_weights_of_a_run_of_half_the_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spared: Spared,
    precision: str,
    accumulate: int,
    hook: str,
) -> None:
    """To the bit, with dropout; it fails in the last micro-batch of the first step."""
    train = {"precision": precision, "accumulate": accumulate}
    expected = spared(**{**train, "accumulate": 2 * accumulate})
    short = _Short(accumulate.__eq__)
    monkeypatch.setattr(shared_model, "make_model", short.in_model(hook, training=True))
    with _as_if_nothing_had_happened(expected) as done:
        done.append(_train(tmp_path, train=train))
    assert done[0].metrics["memory/ooms_recovered"] == short.failed == 1


UPDATES = {
    "norm": (nn.utils, "clip_grad_norm_", _every_other),
    "step": (optim.AdamW, "step", _every_other),
    # Once for what has weight decay, once for what has none: the first call fails, or the second.
    "kernel": (torch, "_fused_adamw_", lambda call: call % 3 == 1),
    "second kernel": (torch, "_fused_adamw_", lambda call: call % 3 == 2),
}


@pytest.mark.parametrize("at", UPDATES)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_update_that_ran_out_leaves_the_weights_of_a_run_that_did_not(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spared: Spared,
    precision: str,
    accumulate: int,
    at: str,
) -> None:
    """Each one does, and is repeated: in fp16 the scale of the failed one stayed behind."""
    train = {"precision": precision, "accumulate": accumulate}
    expected = spared(**train)
    owner, name, fails = UPDATES[at]
    short = _Short(fails, getattr(owner, name))
    monkeypatch.setattr(owner, name, short.function())
    with _as_if_nothing_had_happened(expected) as done:
        done.append(_train(tmp_path, train=train))
    assert done[0].metrics["memory/ooms_recovered"] == short.failed == done[0].steps


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_evaluation_that_ran_out_goes_on_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spared: Spared, precision: str
) -> None:
    expected = spared(precision=precision)
    short = _Short(_every_other)
    made = short.in_model("register_forward_hook", training=False)
    monkeypatch.setattr(shared_model, "make_model", made)
    with _as_if_nothing_had_happened(expected) as done:
        done.append(_train(tmp_path, train={"precision": precision}))
    # Its last failure: the model that is loaded again is then not held against the trained one.
    assert done[0].metrics["memory/ooms_recovered"] == short.failed - 1 >= 2


@pytest.mark.parametrize("at", [1, 2, 5, 6, 7])
def test_a_batch_without_room_is_sent_when_the_one_before_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The first, one that is sent ahead, the short last one, and those of an evaluation: sending
    was tried once, and ended runs whose training had fitted."""
    monkeypatch.setattr("headroom.data.dataset_batches.RESIDENT_SHARE", 0.0)
    expected = _train(tmp_path)
    short = _Short(at.__eq__, PinnedStaging._send)
    monkeypatch.setattr(PinnedStaging, "_send", short.function())
    with _as_if_nothing_had_happened(expected) as done:
        done.append(_train(tmp_path))
    assert short.failed == 1 and done[0].tags["data.residency"] == "pinned"


@pytest.mark.parametrize("training_too", [True, False])
def test_the_next_batch_is_given_back_where_the_step_of_this_one_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training_too: bool
) -> None:
    """It stayed beside a step that not even one row of fitted."""
    monkeypatch.setattr("headroom.data.dataset_batches.RESIDENT_SHARE", 0.0)
    expected = _train(tmp_path)
    reading: list[PinnedStaging] = []
    real = PinnedStaging.read

    def read(lane: PinnedStaging, *args: Any) -> Any:
        reading[:] = [lane]
        return real(lane, *args)

    monkeypatch.setattr(PinnedStaging, "read", read)
    short = _Short(lambda call: reading[0].is_ahead)
    hooked = short.in_model("register_forward_hook", training=training_too)
    monkeypatch.setattr(shared_model, "make_model", hooked)
    with _as_if_nothing_had_happened(expected) as done:
        done.append(_train(tmp_path))
    # Halved to one row, then whole again.
    assert done[0].metrics["memory/micro_batch"] == ROWS and short.failed >= 6


def test_an_evaluation_that_cannot_be_read_whole_is_read_in_smaller_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headroom.data.dataset_batches.RESIDENT_SHARE", 0.0)
    expected = _train(tmp_path)
    real, sizes = PinnedStaging._send, []

    def send(lane: PinnedStaging, filled: Any) -> Any:
        sizes.append(len(filled[1][0]))
        if sizes[-1] > ROWS:
            _Short(_every_other)()
        return real(lane, filled)

    monkeypatch.setattr(PinnedStaging, "_send", send)
    with _as_if_nothing_had_happened(expected) as done:
        done.append(_train(tmp_path))
    assert max(sizes) == 38 and sizes[-3:-1] == [19, 19]  # the last are two rows for the model


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_host_without_memory_to_pin_copies_by_other_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """A checkpoint ended the training with "make the model smaller"; so did the first batch."""
    monkeypatch.setattr("headroom.data.dataset_batches.RESIDENT_SHARE", share)
    expected = _train(tmp_path / "one", checkpoint={"every_steps": 2})
    refused = []

    def made(real: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("pin_memory"):
            refused.append(real)
            raise torch.AcceleratorError("CUDA error: out of memory")
        return real(*args, **kwargs)

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, partial(made, getattr(torch, name)))
    with _as_if_nothing_had_happened(expected) as done:
        done.append(_train(tmp_path / "two", checkpoint={"every_steps": 2}))
    assert refused and done[0].tags["data.residency"] == ("device" if share else "host")
    saved = [sorted(p.name for p in (tmp_path / n).rglob("*.pt")) for n in ("one", "two")]
    assert saved[0] == saved[1]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (0, "train.batch_size: memory ran out on cuda:0 in the sending of a batch of step 1; "),
        (4, "train.batch_size: memory ran out on cuda:0 in the sending of a batch of step 4; "),
        (5, "model.args: memory ran out on cuda:0 in the evaluation of step 5; "),
    ],
)
def test_what_can_never_be_sent_is_told_with_its_phase_and_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, told: str
) -> None:
    """All of it was told as the set-up of step 0."""
    monkeypatch.setattr("headroom.data.dataset_batches.RESIDENT_SHARE", 0.0)
    before = leaks.take_baseline(GPU)
    short = _Short(rows.__lt__, PinnedStaging._send)
    monkeypatch.setattr(PinnedStaging, "_send", short.function())
    with pytest.raises(OutOfMemory, match=f"^{re.escape(told)}.* asked for") as ended:
        _train(tmp_path)
    written = json.loads((tmp_path / "memory" / "oom.json").read_text())
    assert written["sentence"] == str(ended.value)
    assert leaks.release_device_memory(GPU, baseline_bytes=before.bytes).after_bytes == before.bytes
