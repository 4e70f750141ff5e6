"""These tests run on a GPU, or on a stand-in for one: PyTorch's CUDA build on host memory, which
sets FAKE_CUDA. It has no speed of its own and no compiled kernels."""

import gc
import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands import PyTorch themselves: a driver may read its settings then."""
    monkeypatch.setenv("TESTS_COLD", "1")


@pytest.fixture(autouse=True)
def collected() -> None:
    """What an earlier test has left to the garbage collector is no longer on the device."""
    gc.collect()


@pytest.fixture
def memory_given_back() -> Iterator[None]:
    """After the test the process may have all of the device again; its cache is empty."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@pytest.fixture
def limit_mib(memory_given_back: None) -> int:
    """What this process may take beside what it has reserved already."""
    torch.cuda.empty_cache()
    total, room = torch.cuda.get_device_properties().total_memory, 64
    limit_bytes = torch.cuda.memory_reserved() + room * 2**20
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total)
    return room


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = item.get_closest_marker("real_gpu")
    if needed is not None and os.environ.get("FAKE_CUDA"):
        pytest.skip(f"needs a real GPU: {needed.args[0]}")


def beside_libraries(mib: float) -> float:
    """Return a limit that leaves this much beside what cuBLAS takes, which is more on Hopper: 32
    MiB for each of two threads in place of 8."""
    is_hopper = torch.cuda.get_device_capability() >= (9, 0)
    return mib + 50 if is_hopper else mib
