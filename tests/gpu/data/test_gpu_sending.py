"""A batch without room on a real GPU is sent again, whole or in parts, or is told of in words."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.data.prefetch import PinnedStaging
from headroom.watch import leaks
from headroom.watch.oom_report import OutOfMemory
from tests.gpu.training.short_memory import (
    GPU,
    ROWS,
    Short,
    as_if_nothing_had_happened,
    is_odd,
    train_mlp,
)
from tests.gpu.training.short_memory import admitted as admitted

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("at", [1, 2, 5, 6, 7])
def test_a_batch_without_room_is_sent_when_the_one_before_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The first, one that is sent ahead, the short last one, and those of an evaluation: sending
    was tried once, and ended runs whose training had fitted."""
    monkeypatch.setattr("headroom.data.dataset_batches.RESIDENT_SHARE", 0.0)
    expected = train_mlp(tmp_path)
    short = Short(at.__eq__, PinnedStaging._send)
    monkeypatch.setattr(PinnedStaging, "_send", short.function())
    with as_if_nothing_had_happened(expected) as done:
        done.append(train_mlp(tmp_path))
    assert short.failed == 1 and done[0].tags["data.residency"] == "pinned"


@pytest.mark.parametrize("training_too", [True, False])
def test_the_next_batch_is_given_back_where_the_step_of_this_one_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training_too: bool
) -> None:
    """It stayed beside a step that not even one row of fitted."""
    monkeypatch.setattr("headroom.data.dataset_batches.RESIDENT_SHARE", 0.0)
    expected = train_mlp(tmp_path)
    reading: list[PinnedStaging] = []
    real = PinnedStaging.read

    def read(lane: PinnedStaging, *args: Any) -> Any:
        reading[:] = [lane]
        return real(lane, *args)

    monkeypatch.setattr(PinnedStaging, "read", read)
    short = Short(lambda call: reading[0].is_ahead)
    hooked = short.in_model("register_forward_hook", training=training_too)
    monkeypatch.setattr("headroom.training.shared_model.make_model", hooked)
    with as_if_nothing_had_happened(expected) as done:
        done.append(train_mlp(tmp_path))
    # Halved to one row, then whole again.
    assert done[0].metrics["memory/micro_batch"] == ROWS and short.failed >= 6


def test_an_evaluation_that_cannot_be_read_whole_is_read_in_smaller_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headroom.data.dataset_batches.RESIDENT_SHARE", 0.0)
    expected = train_mlp(tmp_path)
    real, sizes = PinnedStaging._send, []

    def send(lane: PinnedStaging, filled: Any) -> Any:
        sizes.append(len(filled[1][0]))
        if sizes[-1] > ROWS:
            Short(is_odd)()
        return real(lane, filled)

    monkeypatch.setattr(PinnedStaging, "_send", send)
    with as_if_nothing_had_happened(expected) as done:
        done.append(train_mlp(tmp_path))
    assert max(sizes) == 38 and sizes[-3:-1] == [19, 19]  # the last are two rows for the model


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
    short = Short(rows.__lt__, PinnedStaging._send)
    monkeypatch.setattr(PinnedStaging, "_send", short.function())
    with pytest.raises(OutOfMemory, match=f"^{re.escape(told)}.* asked for") as ended:
        train_mlp(tmp_path)
    written = json.loads((tmp_path / "memory" / "oom.json").read_text())
    assert written["sentence"] == str(ended.value)
    assert leaks.release_device_memory(GPU, baseline_bytes=before.bytes).after_bytes == before.bytes
