"""Memory that runs out in every phase of a training on a real GPU: what failed is done again, the
weights are those of a run that never ran out, and all of the memory is given back."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headroom.base.facts import TrainFacts
from headroom.training import optim, shared_model
from tests.gpu.training.short_memory import (
    Short,
    as_if_nothing_had_happened,
    is_odd,
    train_mlp,
)
from tests.gpu.training.short_memory import admitted as admitted

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
Spared = Callable[..., TrainFacts]


@pytest.fixture(scope="module")
def spared(tmp_path_factory: pytest.TempPathFactory) -> Spared:
    """A training that never runs out of memory."""

    @cache
    def train(**how: Any) -> TrainFacts:
        return train_mlp(tmp_path_factory.mktemp("spared"), train=how)

    return train


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
    short = Short(accumulate.__eq__)
    monkeypatch.setattr(shared_model, "make_model", short.in_model(hook, training=True))
    with as_if_nothing_had_happened(expected) as done:
        done.append(train_mlp(tmp_path, train=train))
    assert done[0].metrics["memory/ooms_recovered"] == short.failed == 1


UPDATES = {
    "norm": (nn.utils, "clip_grad_norm_", is_odd),
    "step": (optim.AdamW, "step", is_odd),
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
    short = Short(fails, getattr(owner, name))
    monkeypatch.setattr(owner, name, short.function())
    with as_if_nothing_had_happened(expected) as done:
        done.append(train_mlp(tmp_path, train=train))
    assert done[0].metrics["memory/ooms_recovered"] == short.failed == done[0].steps


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_evaluation_that_ran_out_goes_on_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spared: Spared, precision: str
) -> None:
    expected = spared(precision=precision)
    short = Short(is_odd)
    made = short.in_model("register_forward_hook", training=False)
    monkeypatch.setattr(shared_model, "make_model", made)
    with as_if_nothing_had_happened(expected) as done:
        done.append(train_mlp(tmp_path, train={"precision": precision}))
    # Its last failure: the model that is loaded again is then not held against the trained one.
    assert done[0].metrics["memory/ooms_recovered"] == short.failed - 1 >= 2


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_host_without_memory_to_pin_copies_by_other_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """A checkpoint ended the training with "make the model smaller"; so did the first batch."""
    monkeypatch.setattr("headroom.data.dataset_batches.RESIDENT_SHARE", share)
    expected = train_mlp(tmp_path / "one", checkpoint={"every": "2steps"})
    refused = []

    def made(real: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("pin_memory"):
            refused.append(real)
            raise torch.AcceleratorError("CUDA error: out of memory")
        return real(*args, **kwargs)

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, partial(made, getattr(torch, name)))
    with as_if_nothing_had_happened(expected) as done:
        done.append(train_mlp(tmp_path / "two", checkpoint={"every": "2steps"}))
    assert refused and done[0].tags["data.residency"] == ("device" if share else "host")
    saved = [sorted(p.name for p in (tmp_path / n).rglob("*.pt")) for n in ("one", "two")]
    assert saved[0] == saved[1]
