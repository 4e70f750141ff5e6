"""What a step frees is kept for the next one, and given back at the end."""

import platform
import subprocess
import sys

import pytest
import torch

from headroom.watch import allocators

CPU, META = torch.device("cpu"), torch.device("meta")

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

# In a process of its own: what ran there before has its part in how a heap lies.
STEPS = """
import resource
import psutil, torch
from headroom.watch.allocators import keep_heap, release_cached_memory
MIB, STEPS = 64, 10
PAGES = STEPS * MIB * 2**20 // resource.getpagesize()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(STEPS):
        torch.ones(MIB * 2**20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def rss_mib():
    return psutil.Process().memory_info().rss / 2**20

cpu = torch.device("cpu")
with keep_heap(cpu):
    faults()  # small blocks settle between the large ones at first
    kept, kept_mib = faults() / PAGES, rss_mib()
release_cached_memory(cpu)
print(kept, kept_mib - rss_mib())
"""


@glibc
def test_what_a_step_frees_is_kept_for_the_next_and_given_back_at_the_end() -> None:
    # Freed at each step and mapped anew, a cnn's activations cost it half of its time.
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kept, given_back_mib = map(float, done.stdout.split())
    assert kept < 0.25 and given_back_mib > 32


@glibc
def test_other_devices_leave_the_heap_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Untouchable:
        def mallopt(self, *words: int) -> int:
            raise AssertionError("the heap of another device")

    monkeypatch.setattr(allocators, "_load_glibc", Untouchable)
    with allocators.keep_heap(META):
        pass


def test_without_glibc_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocators, "_load_glibc", lambda: None)
    with allocators.keep_heap(CPU):
        allocators.trim_heap()
