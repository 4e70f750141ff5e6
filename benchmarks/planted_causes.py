"""Loops that are slow for a reason that was put there: each is trained with its cause or without,
and says by clocks of its own, which know nothing of Headroom, where its time went. It imports
nothing of this project but `headroom.account`, so that it is run by its path against any checkout:

`python -P benchmarks/planted_causes.py NAME --out FILE [--without] [--watch told|plain|traceml]`

told: the loop marks its batches, its steps and what is beside them. plain: nothing but the context
of the account is around it. FILE gets the truth, and the run as Headroom has it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

SECONDS, STEPS, MOST = 8.0, 60, 2.0  # a loop ends when it has had both, or so often the seconds
WATCHES = ("told", "plain", "traceml", "nothing")
BATCH = 16
Compute = Callable[[nn.Module, Any], Tensor]


@dataclass
class Truth:
    """What a loop says of itself by its own clocks."""

    steps: int = 0
    rows: int = 0
    loop_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)  # they do not overlap
    planted_s: float = 0.0  # within or beside the parts
    first_ms: float = 0.0  # a step in the first and in the last tenth of the steps
    last_ms: float = 0.0
    cores: float = 0.0  # that the process and its children kept busy on average
    others: float = 0.0  # that others did meanwhile


class Watch:
    """Nobody looks at the loop."""

    def batches(self, loader: Any) -> Any:
        return loader

    def step(self, net: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()

    def part(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext()


class Told(Watch):
    """Headroom does, and the loop tells it what it does."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def batches(self, loader: Any) -> Any:
        return self.run.batches(loader)

    def step(self, net: nn.Module) -> AbstractContextManager[Any]:
        step: AbstractContextManager[Any] = self.run.step()
        return step

    def part(self, name: str) -> AbstractContextManager[Any]:
        part: AbstractContextManager[Any] = self.run.phase(name)
        return part


class Traced(Watch):
    """TraceML does, as its own pages say."""

    def __init__(self) -> None:
        self._traceml: Any = import_module("traceml_ai")
        self._traceml.init(mode="auto")

    def batches(self, loader: Any) -> Any:
        is_patched = isinstance(loader, DataLoader)  # by its `init`
        return loader if is_patched else self._traceml.wrap_dataloader_fetch(loader)

    def step(self, net: nn.Module) -> AbstractContextManager[Any]:
        step: AbstractContextManager[Any] = self._traceml.trace_step(net)
        return step


class Play:
    """One loop with its clocks. A cause is a function of it."""

    def __init__(self, watch: str, *, is_planted: bool, seconds: float, name: str) -> None:
        self.truth, self.is_planted, self.name = Truth(), is_planted, name
        self.run: dict[str, Any] = {}
        self._kind, self.seconds = watch, seconds
        self._watch = Watch()
        self._steps, self._ends = 0, list[float]()

    @property
    def is_training(self) -> bool:
        """Return whether the loop has begun and not ended."""
        return bool(self._ends) and not self.truth.loop_s

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time within to this part of the loop."""
        began = perf_counter()
        try:
            yield
        finally:
            parts = self.truth.parts_s
            parts[name] = parts.get(name, 0.0) + perf_counter() - began

    @contextmanager
    def planted(self, phase: str = "") -> Iterator[None]:
        """Count the time within to the cause; a loop that tells says that it is this phase."""
        began = perf_counter()
        with self._watch.part(phase) if phase else nullcontext():
            yield
        self.truth.planted_s += perf_counter() - began

    def train(
        self,
        loader: Iterable[Any],
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        compute: Compute | None = None,
        inside: Callable[[int], None] | None = None,
        after: Callable[[int], None] | None = None,
        steps: int = 0,
    ) -> None:
        """Train until the time is up, whole epochs or not. compute: the loss of a batch. inside:
        what is done at the end of a step. after: what is done between two steps. steps: that many,
        whatever they take."""
        compute, self._steps = compute or _classify, steps
        with self._begin(net, optimizer):
            before = _read_busy_s()
            self._ends.append(perf_counter())
            while not self._is_over():
                self._train_epoch(loader, net, optimizer, compute, inside, after)
            loop_s = self.truth.loop_s = perf_counter() - self._ends[0]
            own_s, all_s = (b - a for a, b in zip(before, _read_busy_s(), strict=True))
            self.truth.cores, self.truth.others = own_s / loop_s, (all_s - own_s) / loop_s
        self._note_trend()

    def _train_epoch(
        self,
        loader: Iterable[Any],
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        compute: Compute,
        inside: Callable[[int], None] | None,
        after: Callable[[int], None] | None,
    ) -> None:
        with self.part("data"):
            batches = iter(self._watch.batches(loader))
        while True:
            with self.part("data"):
                batch = next(batches, None)
            if batch is None:
                return
            with self._watch.step(net):
                with self.part("forward"):
                    loss = compute(net, batch)
                with self.part("backward"):
                    loss.backward()
                with self.part("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
                if inside is not None:
                    with self.part("beside"):
                        inside(self.truth.steps)
            if after is not None:
                with self.part("beside"):
                    after(self.truth.steps)
            self.truth.steps += 1
            self.truth.rows += len(batch[0])
            self._ends.append(perf_counter())
            if self._is_over():
                return

    def _is_over(self) -> bool:
        if self._steps:
            return self.truth.steps >= self._steps
        gone_s = perf_counter() - self._ends[0]
        is_enough = self.truth.steps >= STEPS and gone_s >= self.seconds
        return is_enough or gone_s >= MOST * self.seconds

    @contextmanager
    def _begin(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        if self._kind == "traceml":
            self._watch = Traced()
            yield
        elif self._kind == "nothing":
            yield
        else:
            from headroom import account

            with account(run_name=self.name, model=net, optimizer=optimizer, quiet=True) as run:
                if self._kind == "told":
                    self._watch = Told(run)
                yield
            self.run = run.run

    def _note_trend(self) -> None:
        steps = [b - a for a, b in zip(self._ends, self._ends[1:], strict=False)]
        tenth = max(1, len(steps) // 10)
        self.truth.first_ms = 1000 * statistics.median(steps[:tenth])
        self.truth.last_ms = 1000 * statistics.median(steps[-tenth:])


def _read_busy_s() -> tuple[float, float]:
    """Return the seconds that cores were busy with this process and its children, and with all."""
    ended = os.times()
    own_s = time.process_time() + ended.children_user + ended.children_system
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            own_s += sum(child.cpu_times()[:2])
    now = psutil.cpu_times()
    return own_s, sum(now) - now.idle - getattr(now, "iowait", 0.0)


def _classify(net: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(net(x), y)


class Rows(Dataset[tuple[Tensor, int]]):
    """Made-up images, and what is done to get each of them."""

    def __init__(self, count: int, load: Callable[[], object] | None = None) -> None:
        self._images, self._load = torch.randn(64, 3, 32, 32), load
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        if self._load is not None:
            self._load()
        return self._images[at % 64], at % 10


def compute_in_python(rounds: int) -> int:
    """Keep a core busy for some 0.05 ms a thousand rounds."""
    return sum(i * i for i in range(rounds))


def make_cnn(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


def _adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-3)


def _repeat(batch: Any, times: int = 1000) -> list[Any]:
    """The same batch again and again: data that takes no time."""
    return [batch] * times


def _images(rows: int = BATCH) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 32, 32), torch.arange(rows) % 10


# Causes. Each trains on one thread of PyTorch where its cause is none of threads or cores, so that
# what else runs on the machine disturbs it less.


def slow_dataset(play: Play) -> None:
    """A data set whose rows come from a slow store, 1.5 ms each."""

    def wait() -> None:
        with play.planted():
            time.sleep(0.0015)

    net = make_cnn()
    rows = Rows(50 * BATCH, wait if play.is_planted else None)
    play.train(DataLoader(rows, BATCH, shuffle=True), net, _adamw(net))


def slow_collate(play: Play) -> None:
    """A collate_fn that pads and sorts in Python, row by row."""
    collate = torch.utils.data.default_collate

    def pad(rows: list[Any]) -> Any:
        if play.is_planted:
            with play.planted():
                compute_in_python(400_000)
        return collate(rows)

    net = make_cnn()
    play.train(DataLoader(Rows(50 * BATCH), BATCH, collate_fn=pad), net, _adamw(net))


def many_workers(play: Play) -> None:
    """Sixteen workers on two cores, which are started anew at each of many short epochs."""
    net = make_cnn()
    workers = 16 if play.is_planted else 0
    loader = DataLoader(Rows(24 * BATCH), BATCH, shuffle=True, num_workers=workers)
    play.train(loader, net, _adamw(net))


def few_workers(play: Play) -> None:
    """No worker, rows that take a processor to make, and a core that has nothing to do."""
    net = make_cnn()
    rows = Rows(200 * BATCH, lambda: compute_in_python(12_000))
    more = {} if play.is_planted else {"num_workers": 1, "persistent_workers": True}
    loader: DataLoader[Any] = DataLoader(rows, BATCH, shuffle=True, **more)  # type: ignore[arg-type]
    play.train(loader, net, _adamw(net))


def tiny_kernels(play: Play) -> None:
    """Forty narrow layers and two rows in a batch: calls, and hardly any arithmetic."""
    layers = [part for _ in range(40) for part in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())]
    net = nn.Sequential(*layers, nn.Linear(16, 10))
    rows = 2 if play.is_planted else 1024
    optimizer = torch.optim.Adam(net.parameters(), fused=True)  # itself one call
    play.train(_repeat((torch.randn(rows, 16), torch.arange(rows) % 10)), net, optimizer)


def python_between(play: Play) -> None:
    """Statistics in Python between two steps."""
    net = make_cnn()

    def count(step: int) -> None:
        if play.is_planted:
            with play.planted():
                compute_in_python(400_000)

    play.train(_repeat(_images()), net, _adamw(net), after=count)


class _Node:
    def __init__(self) -> None:
        self.me, self.others = self, [self]


def garbage(play: Play) -> None:
    """Thousands of objects in cycles, made at each step, and all garbage collected at each tenth
    since they would not go away."""
    began = [0.0]

    def time_collection(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            began[0] = perf_counter()
        elif play.is_training:
            play.truth.planted_s += perf_counter() - began[0]

    def make(step: int) -> None:
        if play.is_planted:
            [_Node() for _ in range(3000)]
            if step % 10 == 0:
                gc.collect()

    net = make_cnn()
    gc.callbacks.append(time_collection)
    play.train(_repeat(_images()), net, _adamw(net), after=make)
    gc.callbacks.remove(time_collection)


def logging_each_step(play: Play) -> None:
    """The loss and a histogram of all weights, written to a file at each step."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 10))

    with Path("histograms.jsonl").open("w") as file:

        def write(step: int) -> None:
            if not play.is_planted:
                return
            with play.planted("log"):
                told: dict[str, Any] = {"step": step}
                for name, p in net.named_parameters():
                    told[name] = p.detach().histc(1000).tolist()
                    told[f"{name}.norm"] = p.norm().item()
                file.write(json.dumps(told) + "\n")
                file.flush()

        play.train(_repeat(_images(256)), net, _adamw(net), after=write)


def checkpoints(play: Play) -> None:
    """A checkpoint of model and optimizer at every second step."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)

    def save(step: int) -> None:
        if play.is_planted and step % 2:
            with play.planted("checkpoint"):
                torch.save({"net": net.state_dict(), "opt": optimizer.state_dict()}, "last.pt")

    play.train(_repeat(_images(128)), net, optimizer, after=save)


def evaluations(play: Play) -> None:
    """An evaluation on thirty batches at every tenth step."""
    net, held = make_cnn(), [_images() for _ in range(30)]

    def evaluate(step: int) -> None:
        if play.is_planted and step % 10 == 9:
            with play.planted("eval"), torch.no_grad():
                net.eval()
                sum(_classify(net, batch).item() for batch in held)
                net.train()

    play.train(_repeat(_images()), net, _adamw(net), after=evaluate)


class SlowAdam(torch.optim.Optimizer):
    """Adam as a tutorial writes it, one parameter after the other."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["step"] += 1
                state["m"] = 0.9 * state["m"] + 0.1 * p.grad
                state["v"] = 0.999 * state["v"] + 0.001 * p.grad**2
                m = state["m"] / (1 - 0.9 ** state["step"])
                v = state["v"] / (1 - 0.999 ** state["step"])
                p -= group["lr"] * m / (v.sqrt() + 1e-8)


class _ManyScales(nn.Module):
    """A net with hundreds of small parameters, of which a pass takes one sum."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(300)])
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        scored: Tensor = self.last(x * torch.stack([*self.scales]).mean(0))
        return scored


def slow_optimizer(play: Play) -> None:
    """A loop over three hundred parameters in Python, where PyTorch has a fused update."""
    net = _ManyScales()
    params = list(net.parameters())
    optimizer: torch.optim.Optimizer = (
        SlowAdam(params, 1e-3) if play.is_planted else torch.optim.Adam(params, fused=True)
    )
    play.train(_repeat((torch.randn(64, 64), torch.arange(64) % 10)), net, optimizer)


def many_threads(play: Play) -> None:
    """Eight threads on two cores."""
    torch.set_num_threads(8 if play.is_planted else 2)
    net = make_cnn()
    play.train(_repeat(_images()), net, _adamw(net))


# Starts processes that compute as long as another one lives, and that are nobody's children.
OTHERS_CODE = r"""
import os, subprocess, sys
code = f"import os\nwhile True: os.kill({sys.argv[1]}, 0); sum(range(300000))"
for _ in range(int(sys.argv[2])):
    none = subprocess.DEVNULL
    print(subprocess.Popen([sys.executable, "-c", code], stdout=none, stderr=none).pid)
"""


def contention(play: Play) -> None:
    """Four other processes that compute, on two cores."""
    started = subprocess.run(
        [sys.executable, "-c", OTHERS_CODE, str(os.getpid()), str(4 * play.is_planted)],
        stdout=subprocess.PIPE,
        check=True,
    )
    net = make_cnn()
    try:
        play.train(_repeat(_images()), net, _adamw(net))
    finally:
        for other in started.stdout.split():
            os.kill(int(other), signal.SIGKILL)


class _WithPenalty(nn.Module):
    """Gives its scores, and a term that a loss may have and that is only looked at here."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(256, 512), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        return self.last(hidden.relu()), hidden.square().mean()


def host_leak(play: Play) -> None:
    """A number of each step, kept for a plot with the graph that it came from."""
    history: list[Any] = []

    def compute(net: nn.Module, batch: Any) -> Tensor:
        scores, penalty = net(batch[0])
        history.append(penalty if play.is_planted else penalty.item())
        return nn.functional.cross_entropy(scores, batch[1])

    net = _WithPenalty()
    rows = _repeat((torch.randn(128, 256), torch.arange(128) % 10))
    play.train(rows, net, _adamw(net), compute=compute)


def slow_rank(play: Play) -> None:
    """Two processes, of which one takes 15 ms longer for the forward pass of each step."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    net = make_cnn()
    shared = nn.parallel.DistributedDataParallel(net)

    def compute(net: nn.Module, batch: Any) -> Tensor:
        if play.is_planted and rank == 1:
            with play.planted():
                time.sleep(0.015)
        return _classify(net, batch)

    # As many steps for both: by its own clock the one that ends first would leave the other.
    steps = int(25 * play.seconds)
    play.train(_repeat(_images(), steps), shared, _adamw(net), compute=compute, steps=steps)
    torch.distributed.destroy_process_group()


def longer_sequences(play: Play) -> None:
    """Sequences that grow, from 8 to 128 tokens."""
    net = _Reader()

    def make() -> Iterator[Any]:
        for step in range(100_000):
            longest = 8 + min(120, step // 2) if play.is_planted else 8
            yield torch.randint(0, 100, (64, longest)), torch.arange(64) % 10

    play.train(make(), net, _adamw(net))


class _Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(100, 128), nn.GRU(128, 128, batch_first=True)
        self.last = nn.Linear(128, 10)

    def forward(self, ids: Tensor) -> Tensor:
        scored: Tensor = self.last(self.read(self.embed(ids))[0][:, -1])
        return scored


def growing_list(play: Play) -> None:
    """A list of all losses, walked through at each step for a running mean."""
    net, history = make_cnn(), [0.0]

    def walk(step: int) -> None:
        with play.planted():
            history.extend([float(step)] * (2000 if play.is_planted else 0))
            sum(value * 0.5 for value in history)

    play.train(_repeat(_images()), net, _adamw(net), after=walk)


def healthy(play: Play) -> None:
    """A convolutional net, and nothing to find but that it computes."""
    net = make_cnn(32)
    rows = Rows(200 * BATCH)
    play.train(DataLoader(rows, BATCH, shuffle=True), net, _adamw(net))


# The same on a GPU, which works on while the host does something else: where a cause takes time,
# the truth is what is gained without it.

WIDE = 2048  # a step of six such layers takes some 6 ms on an H100


def _make_wide(layers: int = 6) -> nn.Sequential:
    pairs = [part for _ in range(layers) for part in (nn.Linear(WIDE, WIDE), nn.ReLU())]
    return nn.Sequential(*pairs, nn.Linear(WIDE, 10)).cuda()


def _wide_batch(rows: int = WIDE, width: int = WIDE) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width, device="cuda"), torch.arange(rows, device="cuda") % 10


def _fuse(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)


def gpu_healthy(play: Play) -> None:
    """Wide layers, and the loss read after each step, as tutorials do; without: never."""
    net, losses = _make_wide(), list[Tensor]()

    def compute(net: nn.Module, batch: Any) -> Tensor:
        losses[:] = [_classify(net, batch)]
        return losses[0]

    def read(step: int) -> None:
        if play.is_planted:
            losses[0].item()

    play.train(_repeat(_wide_batch()), net, _fuse(net), compute=compute, after=read)


class _Batches(Dataset[Any]):
    """Batches that are on the device, each after a wait."""

    def __init__(self, batch: Any, wait_s: float) -> None:
        self._batch, self._wait_s = batch, wait_s

    def __len__(self) -> int:
        return 200

    def __getitem__(self, at: int) -> Any:
        time.sleep(self._wait_s)
        return self._batch


def gpu_dataset(play: Play) -> None:
    """Batches that take 15 ms to get, while the device works on the one before."""
    net = _make_wide()
    rows = _Batches(_wide_batch(), 0.015 if play.is_planted else 0.0)
    play.train(DataLoader(rows, batch_size=None), net, _fuse(net))


def gpu_python(play: Play) -> None:
    """Statistics in Python between two steps."""
    net = _make_wide()

    def count(step: int) -> None:
        if play.is_planted:
            compute_in_python(400_000)

    play.train(_repeat(_wide_batch()), net, _fuse(net), after=count)


def gpu_logging(play: Play) -> None:
    """A histogram and the norm of all weights, read and written at each step."""
    net = _make_wide()

    with Path("histograms.jsonl").open("w") as file:

        def write(step: int) -> None:
            if play.is_planted:
                with play.planted("log"):
                    told = {
                        n: p.detach().histc(1000, -1, 1).tolist() for n, p in net.named_parameters()
                    }
                    told["norms"] = [p.norm().item() for p in net.parameters()]
                    file.write(json.dumps(told) + "\n")
                    file.flush()

        play.train(_repeat(_wide_batch()), net, _fuse(net), after=write)


def gpu_checkpoints(play: Play) -> None:
    """A checkpoint of model and optimizer at each twentieth step."""
    net = _make_wide()
    optimizer = _fuse(net)

    def save(step: int) -> None:
        if play.is_planted and step % 20 == 19:
            with play.planted("checkpoint"):
                torch.save({"net": net.state_dict(), "opt": optimizer.state_dict()}, "last.pt")

    play.train(_repeat(_wide_batch()), net, optimizer, after=save)


def gpu_evaluations(play: Play) -> None:
    """An evaluation on thirty batches at every tenth step."""
    net, batch = _make_wide(), _wide_batch()

    def evaluate(step: int) -> None:
        if play.is_planted and step % 10 == 9:
            with play.planted("eval"), torch.no_grad():
                sum(_classify(net, batch).item() for _ in range(30))

    play.train(_repeat(batch), net, _fuse(net), after=evaluate)


def gpu_optimizer(play: Play) -> None:
    """A loop over three hundred parameters in Python."""
    net = _ManyScales().cuda()
    params = list(net.parameters())
    optimizer: torch.optim.Optimizer = (
        SlowAdam(params, 1e-3) if play.is_planted else torch.optim.Adam(params, fused=True)
    )
    play.train(_repeat(_wide_batch(64, 64)), net, optimizer)


def gpu_tiny(play: Play) -> None:
    """Forty layers on two rows; without: on sixteen thousand."""
    layers = [part for _ in range(40) for part in (nn.Linear(512, 512), nn.LayerNorm(512))]
    net = nn.Sequential(*layers, nn.Linear(512, 10)).cuda()
    play.train(_repeat(_wide_batch(2 if play.is_planted else 16_384, 512)), net, _fuse(net))


def device_leak(play: Play) -> None:
    """Outputs of each step that stay on the device."""
    net = make_cnn().cuda()
    history: list[Tensor] = []

    def compute(net: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        hidden = net[0](x.cuda())  # type: ignore[index]
        if play.is_planted:
            history.append(hidden.detach())
        return nn.functional.cross_entropy(net[1:](hidden), y.cuda())  # type: ignore[index]

    play.train(_repeat(_images()), net, _adamw(net), compute=compute)


def copies(play: Play) -> None:
    """Large rows that are copied to the device, of which the model reads a few."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)).cuda()
    wide = torch.randn(64, 512 * 1024) if play.is_planted else torch.randn(64, 3072)
    target = (torch.arange(64) % 10).cuda()

    def compute(net: nn.Module, batch: Any) -> Tensor:
        with play.planted("h2d"):
            x = batch[0].to("cuda")
            torch.cuda.synchronize()
        return nn.functional.cross_entropy(net(x[:, :3072]), target)

    play.train(_repeat((wide, target)), net, _adamw(net), compute=compute)


@dataclass(frozen=True)
class Cause:
    """What a verdict has to say of a loop. words: those that are right, the best one first. says:
    a pattern of what the sentence must name. of: where its time shows by the loop's own clocks,
    `planted`, a part, or what is gained without the cause. ranks: processes. patience: as many
    times as long as others it is trained, since it is seen by how the run changes."""

    play: Callable[[Play], None]
    words: tuple[str, ...]
    says: str = ""
    of: str = "planted"
    ranks: int = 1
    patience: float = 1.0
    device: str = "cpu"


CAUSES = {
    "slow_dataset": Cause(slow_dataset, ("data", "workers"), r"__getitem__|data ?set", "data"),
    "slow_collate": Cause(slow_collate, ("data", "workers"), r"collate", "data"),
    "many_workers": Cause(many_workers, ("workers",), r"16|fewer|persistent", "data"),
    "few_workers": Cause(few_workers, ("workers", "data"), r"no workers?|num_workers", "data"),
    "tiny_kernels": Cause(tiny_kernels, ("launch",), r"batch|compile|graph", "gain"),
    "python_between": Cause(python_between, ("python",), r"line|between|\.py"),
    "garbage": Cause(garbage, ("python",), r"garbage|gc"),
    "logging": Cause(logging_each_step, ("logging",), r"log"),
    "checkpoints": Cause(checkpoints, ("checkpoint",), r"checkpoint|save"),
    "evaluations": Cause(evaluations, ("eval",), r"evaluat"),
    "slow_optimizer": Cause(
        slow_optimizer, ("optimizer",), r"foreach|fused|tensors|loop", "optimizer"
    ),
    "many_threads": Cause(many_threads, ("threads",), r"8 threads|threads", "gain"),
    "contention": Cause(contention, ("contention",), r"other", "gain"),
    "host_leak": Cause(host_leak, ("host_leak",), r"graph|grow|grew|list", "", patience=2.5),
    "slow_rank": Cause(slow_rank, ("slow_rank",), r"rank 1", "gain", ranks=2),
    "longer_sequences": Cause(
        longer_sequences, ("slowing",), r"grow|shape|long|slower", "gain", patience=2.5
    ),
    "growing_list": Cause(
        growing_list, ("slowing", "python"), r"grow|slower", "planted", patience=2.5
    ),
    "healthy": Cause(healthy, ("compute",), r"comput", "compute"),
    "gpu_healthy": Cause(gpu_healthy, ("compute",), r"comput|work", "", device="cuda"),
    "gpu_dataset": Cause(gpu_dataset, ("data",), r"data ?set", "gain", device="cuda"),
    "gpu_python": Cause(gpu_python, ("python",), r"between|\.py", "gain", device="cuda"),
    "gpu_logging": Cause(gpu_logging, ("logging",), r"log", "gain", device="cuda"),
    "gpu_checkpoints": Cause(
        gpu_checkpoints, ("checkpoint",), r"checkpoint", "gain", device="cuda"
    ),
    "gpu_evaluations": Cause(gpu_evaluations, ("eval",), r"evaluat", "gain", device="cuda"),
    "gpu_optimizer": Cause(gpu_optimizer, ("optimizer",), r"foreach|fused", "gain", device="cuda"),
    "gpu_tiny": Cause(gpu_tiny, ("launch",), r"batch|compile|graph", "", device="cuda"),
    "device_leak": Cause(device_leak, ("device_leak",), r"grow|grew|shape", "", device="cuda"),
    "copies": Cause(copies, ("transfer",), r"cop", device="cuda"),
}


def main() -> None:
    """Train one loop and write what it says."""
    asked = argparse.ArgumentParser()
    asked.add_argument("name", choices=CAUSES)
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--watch", choices=WATCHES, default="told")
    asked.add_argument("--without", action="store_true")
    asked.add_argument("--seconds", type=float, default=SECONDS)
    given = asked.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cause = CAUSES[given.name]
    play = Play(
        given.watch,
        is_planted=not given.without,
        seconds=given.seconds * cause.patience,
        name=given.name,
    )
    cause.play(play)
    rank = os.environ.get("RANK", "0")
    out = given.out if rank == "0" else given.out.with_suffix(f".rank{rank}.json")
    out.write_text(json.dumps({"truth": asdict(play.truth), "run": play.run}, default=str))


if __name__ == "__main__":
    main()
