"""What a step frees is kept for the next one, and given back at the end."""

import platform
import resource
from collections.abc import Callable

import psutil
import pytest
import torch

from tasks.engine import heap
from tasks.engine.allocators import give_back

CPU, META = torch.device("cpu"), torch.device("meta")
BYTES = 64 * 2**20
STEPS = 10
PAGES = BYTES // resource.getpagesize()

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def _faults(work: Callable[[], object]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _steps() -> None:
    for _ in range(STEPS):
        torch.ones(BYTES, dtype=torch.uint8)


@glibc
def test_what_a_step_frees_is_kept_for_the_next_and_given_back_at_the_end() -> None:
    # Freed at each step and mapped anew, a cnn's activations cost it half of its time.
    process = psutil.Process()
    with heap.kept(CPU):
        _steps()  # small blocks settle between the large ones at first
        assert _faults(_steps) < STEPS * PAGES / 4
        kept_bytes = process.memory_info().rss
    give_back(CPU)
    assert process.memory_info().rss < kept_bytes - BYTES / 2


@glibc
def test_other_devices_leave_the_heap_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Untouchable:
        def mallopt(self, *words: int) -> int:
            raise AssertionError("the heap of another device")

    monkeypatch.setattr(heap, "_glibc", Untouchable)
    with heap.kept(META):
        pass


def test_without_glibc_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_glibc", lambda: None)
    with heap.kept(CPU):
        heap.give_back()
