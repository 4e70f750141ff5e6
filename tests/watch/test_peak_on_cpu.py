"""The counted peak of a step on a CPU is what PyTorch's allocator tells, kernels included; where
that cannot be known it is called a lower bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, schedule

from headroom.watch.kernel_memory import KernelMemory
from headroom.watch.own_loop import OwnLoop

# PyTorch 2.11 warns of its own default, once a process.
pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")

MIB = 2**20
STEPS = 4


@pytest.fixture(autouse=True)
def every_loop_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones, too, and whatever an earlier test of this process has compiled."""
    monkeypatch.setattr("headroom.watch.own_loop.has_compiled", lambda: False)
    monkeypatch.setattr("headroom.watch.own_loop.COUNT_SHARE", float("inf"))


def _block(before: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.top, self.bottom = _block(3, 16), _block(16, 32)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 2, 2), _block(32, 16)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        top = self.top(x)
        up = self.up(self.bottom(F.max_pool2d(top, 2)))
        made: Tensor = self.out(self.last(torch.cat([up, top], 1)))
        return made


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(200, 32), nn.LSTM(32, 64, 2, batch_first=True)
        self.out = nn.Linear(64, 200)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(self.lstm(self.embed(x))[0])
        return made


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(200, 32), nn.Linear(32, 200)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.out(x)
        return made


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def _transposed() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(32, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "U-Net": (UNet, lambda: torch.randn(2, 3, 48, 48)),
    "LSTM": (Recurrent, lambda: torch.randint(0, 200, (8, 20))),
    "transposed convolutions": (_transposed, lambda: torch.randn(8, 32, 8, 8)),
    "mlp": (_mlp, lambda: torch.randn(64, 64)),
    "transformer": (Transformer, lambda: torch.randint(0, 200, (4, 24))),
}


class Training:
    """A loop whose peak an allocator of its own would tell."""

    def __init__(self, name: str = "mlp") -> None:
        make, batch = MODELS[name]
        self.net, self.x = make(), batch()
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.take_step()  # the state of the optimizer is there

    def take_step(self) -> None:
        self.net(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def read_profiled_peak(self) -> int:
        """Return the bytes at the peak of a step: what a profiler saw, above what was there."""
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        there = sum(
            t.nbytes for t in (*self.net.parameters(), *self.net.buffers(), *states, self.x)
        )
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            self.take_step()
        kind = torch._C._profiler._EventType.Allocation
        told: list[tuple[int, int]] = []

        def walk(events: list[Any]) -> None:
            for event in events:
                if event.typed[0] == kind:
                    told.append((event.start_time_ns, event.typed[1].alloc_size))
                walk(event.children)

        assert seen.profiler is not None
        walk(seen.profiler.kineto_results.experimental_event_tree())
        now = most = 0
        for _, size in sorted(told, key=lambda one: one[0]):
            now += size
            most = max(most, now)
        return there + most

    def count(self, *, step: Callable[[], None] | None = None) -> dict[str, float]:
        """Return what the account of some steps says."""
        loop = OwnLoop("cpu", log=lambda lines: None)
        loop.watch(self.net, self.optimizer)
        for _ in range(STEPS):
            (step or self.take_step)()
        loop.close()
        return loop.summarize()


@pytest.mark.parametrize("name", MODELS)
def test_the_counted_peak_is_the_allocators(name: str) -> None:
    """It left out what kernels take for themselves: 13 % of a U-Net's peak."""
    training = Training(name)
    peak = training.read_profiled_peak()
    told = training.count()
    assert told["memory/run_peak_allocated_mib"] * MIB == pytest.approx(peak, rel=0.01)
    assert "memory/peak_is_lower_bound" not in told


def test_without_what_kernels_take_it_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is held against sees more than tensors."""
    monkeypatch.setattr("headroom.watch.kernel_memory._find_means", lambda: None)
    training = Training("transposed convolutions")
    peak = training.read_profiled_peak()
    told = training.count()
    assert told["memory/run_peak_allocated_mib"] * MIB < 0.99 * peak
    assert told["memory/peak_is_lower_bound"] == 1


def test_while_a_profiler_of_the_loop_is_on_the_peak_is_a_lower_bound() -> None:
    training = Training()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        told = training.count()
    assert told["memory/peak_is_lower_bound"] == 1
    assert told["memory/run_peak_allocated_mib"] > 0
    assert {event.key for event in seen.key_averages()} >= {"aten::addmm", "aten::mm"}


def test_a_profiler_that_the_loop_begins_in_a_counted_step_works() -> None:
    """There may be only one in a thread."""
    training = Training()
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=1, repeat=1)
    ) as seen:

        def step() -> None:
            training.net(training.x).square().mean().backward()
            seen.step()
            training.optimizer.step()
            training.optimizer.zero_grad()

        training.count(step=step)
    assert "aten::addmm" in {event.key for event in seen.key_averages()}


def test_a_profiler_of_later_is_told_the_truth() -> None:
    """The allocator kept the size by the address, and told it of any later block there."""
    kept = KernelMemory().call(torch.ones, (10_000,), {}).out
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        del kept
    assert [e for e in seen.events() if e.name == "[memory]" and e.self_cpu_memory_usage] == []


def test_the_allocator_is_asked_to_forget_only_what_it_gave() -> None:
    """PyTorch printed a warning of a block of unknown size: there was none."""
    kernels, forgotten = KernelMemory(), list[int]()
    assert kernels._means is not None
    kernels._means = kernels._means._replace(forget=forgotten.append)
    old = torch.ones(4)
    kernels.call(torch.empty, (0,), {})
    kernels.call(torch.Tensor.view, (old, 2, 2), {})
    kernels.call(torch.Tensor.add_, (old, 1), {})
    assert forgotten == []
    made = kernels.call(torch.add, (old, 1), {}).out
    assert forgotten == [made.data_ptr()]


def test_an_operation_that_fails_leaves_no_profiler_on() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        KernelMemory().call(torch.mm, (torch.ones(2, 3), torch.ones(2, 3)), {})
    assert not torch._C._autograd._profiler_enabled()


def test_of_an_operation_the_most_that_it_had_at_once_is_known() -> None:
    def take(size: int) -> Tensor:
        torch.ones(2 * size)  # gone at once
        return torch.ones(3 * size)

    assert KernelMemory().call(take, (1000,), {}).most_bytes == 3 * 4 * 1000
    assert KernelMemory().call(lambda: torch.ones(5) + torch.ones(5).sum(), (), {}).most_bytes == 44
