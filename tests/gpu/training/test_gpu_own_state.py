"""What a user's model, loss or optimizer keeps is put back on a GPU too where memory ran out, or
ends the training in words."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headroom.watch.oom_report import OutOfMemory
from tests.training.test_own_state import LOST, RESTORED, read_weights, train_keeping

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
Own = Callable[[str, str], None]


@pytest.mark.parametrize("kind", RESTORED)
def test_what_a_model_keeps_is_put_back_before_a_batch_is_taken_again(
    own: Own, tmp_path: Path, kind: str
) -> None:
    short = train_keeping(own, tmp_path / "a", {"kind": kind, "short": 8}, device="cuda")
    spared = train_keeping(own, tmp_path / "b", {"kind": kind}, device="cuda", accumulate=2)
    assert short.metrics["memory/ooms_recovered"] == 1
    for a, b in zip(read_weights(short).values(), read_weights(spared).values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["center", "rebound", "steps", "called"])
def test_what_a_loss_keeps_is_put_back_too(own: Own, tmp_path: Path, name: str) -> None:
    short = train_keeping(own, tmp_path / "a", device="cuda", loss=f"mine:short_{name}")
    spared = train_keeping(own, tmp_path / "b", device="cuda", loss=f"mine:{name}", accumulate=2)
    assert short.metrics["memory/ooms_recovered"] == 1
    for a, b in zip(read_weights(short).values(), read_weights(spared).values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", LOST)
def test_what_cannot_be_put_back_ends_the_training_in_words(
    own: Own, tmp_path: Path, kind: str
) -> None:
    words = f"was not taken again: the attempt had changed ({LOST[kind]})\\b"
    with pytest.raises(OutOfMemory, match=words):
        train_keeping(own, tmp_path / "a", {"kind": kind, "short": 8}, device="cuda")
