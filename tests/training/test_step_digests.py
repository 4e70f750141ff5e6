"""Digests of steps: how they are computed, and what a full disk does to them."""

import base64
import errno
import gc
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headroom.training import step_digests
from tests.run_folders import make_event

KNOWN = [-1090260135307116524, 6376747736170929526, -4982493331775601815]


def test_digests_are_the_same_by_the_host_and_by_a_device() -> None:
    whole = torch.arange(70_003)
    tensors = [whole[:0], whole[1:4].to(torch.uint8), whole.float(), whole[:3].bool()]
    tensors += [whole[k : k + 7].to(t) for k in (0, 5) for t in (torch.float32, torch.bfloat16)]
    tensors += [whole[:12].double().view(3, 4).T, torch.tensor(1.5), whole[:5].to(torch.complex64)]
    tensors += [torch.eye(3).to_sparse(), whole[:70_000].double().view(200, 350).T, -whole]
    assert step_digests.compute_device_digests(tensors).tolist() == [
        int(step_digests.compute_digest(tensor)) for tensor in tensors
    ]


@pytest.mark.parametrize("size", [5, 40_000])
def test_the_sign_of_a_zero_and_the_bits_of_a_nan_change_the_digest(size: int) -> None:
    """They compare as equal, or never do."""
    whole = torch.zeros(size)
    nan, other = (torch.tensor(bits, dtype=torch.int32) for bits in (0x7FC00000, 0x7FC00001))
    values = [torch.tensor(-0.0), nan.view(torch.float32), other.view(torch.float32)]
    for compute in (step_digests.compute_digests, step_digests.compute_device_digests):
        changed = [whole.index_fill(0, torch.tensor([3]), value) for value in values]
        assert len({*compute([whole, *changed]).tolist()}) == 4


@pytest.mark.parametrize("size", [9, 5_000, 40_000, 300_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_two_equal_changes_of_a_tensor_do_not_cancel_out(size: int, dtype: torch.dtype) -> None:
    """Two sign bits did."""
    whole = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype)
    for bit in {0, 15, 8 * whole.element_size() - 2, 8 * whole.element_size() - 1}:
        for first, second in ((0, 1), (1, 3), (2, 6), (0, size - 1), (size // 2, size // 2 + 4)):
            changed = whole.clone()
            raw, byte = changed.view(torch.uint8).view(size, -1), bit // 8  # little-endian
            raw[[first, second], byte] ^= 1 << bit % 8
            digests = step_digests.compute_digests([whole, changed]).tolist()
            assert digests[0] != digests[1], (bit, first, second)


@pytest.mark.parametrize("size", [600, 40_000])
def test_elements_that_change_places_change_the_digest(size: int) -> None:
    whole = torch.randn(size, generator=torch.Generator().manual_seed(1))
    rows = whole.view(-1, 20)
    others = [whole.flip(0), rows.roll(1, 0), rows[:, [1, 0, *range(2, 20)]], -whole]
    digests = step_digests.compute_digests([whole, *others]).tolist()
    assert len({*digests}) == len(digests)


def test_a_digest_is_the_same_for_ever() -> None:
    """Runs of another day are compared by it."""
    tensors = [torch.arange(5.0), torch.arange(50_000.0), torch.tensor([True, False])]
    assert step_digests.compute_digests(tensors).tolist() == KNOWN


def test_digests_of_another_version_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "digests").mkdir()
    head, rows = {"names": ["loss"], "environment": {}}, base64.b64encode(bytes(8)).decode()
    lines = [make_event("digests", one, unix_ms=1) for one in (head, {"steps": [1], "rows": rows})]
    (tmp_path / "digests" / "first.jsonl").write_bytes(b"".join(lines))
    kept = step_digests.read_digests(tmp_path)
    assert kept.others and not kept.steps


def test_a_full_disk_ends_the_digests_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_digests, "append_line", fail_for_want_of_space)
    digests = step_digests.StepDigests(tmp_path)
    optimizer: Any = SimpleNamespace(state=dict)
    state: Any = SimpleNamespace(model=torch.nn.Linear(2, 2), optimizer=optimizer)
    for step in (1, 2):
        digests.end_step(state, step, torch.tensor(1.0))
        digests.flush()
    assert caplog.text.count("digests of steps: [Errno 28] No space left on device; ") == 1
    assert not step_digests.read_digests(tmp_path).steps


def fail_for_want_of_space(file: Any, lines: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_nothing_on_the_device_outlives_the_digests(tmp_path: Path) -> None:
    """Numbers that were kept for the next step were told as a leak of each such run."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    trained: Any = SimpleNamespace(model=model, optimizer=SimpleNamespace(state=dict))
    before = {id(one) for one in gc.get_objects() if type(one) is torch.Tensor}
    digests = step_digests.StepDigests(tmp_path)
    digests.end_step(trained, 1, torch.ones(()))
    digests.flush()
    del digests
    gc.collect()
    left = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    assert not [one for one in left if id(one) not in before]


def test_of_later_steps_each_tenth_has_digests(tmp_path: Path) -> None:
    """They may cost as much as a small step does."""
    model = torch.nn.Linear(2, 2)
    trained: Any = SimpleNamespace(model=model, optimizer=SimpleNamespace(state=dict))
    digests = step_digests.StepDigests(tmp_path)
    for step in range(995, 1031):
        digests.end_step(trained, step, torch.ones(()))
    digests.flush()
    there = step_digests.read_digests(tmp_path).steps
    assert sorted(there) == [995, 996, 997, 998, 999, 1000, 1010, 1020, 1030]
