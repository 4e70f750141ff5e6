"""What the account of somebody else's loop costs a step, and how far what it says is from what
PyTorch says: a hand-written loop whose step takes about a millisecond, and a GAN with two
optimizers. Each is trained with and without, in turns.

`python -m benchmarks.accounts [TURNS]` prints the tables and keeps them in benchmarks/results.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.conditions import publish
from benchmarks.turns import in_turns, median_ratio, spread
from flows.account import account
from tasks.run.account import Account

TURNS, STEPS = 20, 600
BAR, START_BAR_S = 0.98, 0.3  # a step without over one with; the start of an account
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIB = 2**20
NOTES = f"""
- A turn trains {STEPS} steps, of which the median counts, from its batch to the next one's: the
  account's readings, at few of the steps, are in the mean.
- by hand: an MLP, its steps and its forward marked, its loss logged each step. GAN: two models and
  two optimizers, nothing marked. bare: the MLP with nothing but `account` around it.
- ratio: a step without the account over one with it, the median over the turns.
"""


def main(turns: int) -> None:
    """Measure, print, keep."""
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        publish("accounts", "What the account of a loop costs, and says", _report(turns))


def _report(turns: int) -> Iterator[str]:
    yield NOTES.rstrip()
    yield from ("", f"| loop | turns | ratio | bar | us a step with | of {turns} | without | |")
    yield "|:--|--:|--:|--:|--:|:--|--:|:--|"
    for name, play in {"by hand": _by_hand, "GAN": _gan, "bare": _bare}.items():
        found = in_turns(
            {with_it: partial(_time, play, with_it) for with_it in (True, False)}, turns
        )
        mine, plain = ([each[0] for each in found[on]] for on in (True, False))
        means = [[each[1] for each in found[on]] for on in (True, False)]
        ratio, of_means = median_ratio(plain, mine), median_ratio(means[1], means[0])
        cells = (spread(mine, digits=0), spread(plain, digits=0))
        told = f"{ratio:.3f} (of the means {of_means:.3f})"
        yield f"| {name} | {turns} | {told} | {BAR} | {' | '.join(cells)} |"
    starts = [_time_start() for _ in range(5)]
    yield from ("", f"The start of an account, s: {spread(starts, digits=3)} (bar {START_BAR_S})")
    yield from ("", "| of the MLP | the account says | PyTorch says | difference |")
    yield "|:--|--:|--:|--:|"
    yield from _compare()


def _make_mlp() -> nn.Sequential:
    layers = [nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers).to(DEVICE)


def _by_hand(run: Account | None) -> Iterator[None]:
    net, x = _make_mlp(), torch.randn(128, 256, device=DEVICE)
    y = torch.randint(0, 10, (128,), device=DEVICE)
    optimizer = torch.optim.AdamW(net.parameters())
    if run is not None:
        run.watch(net, optimizer)
    rows = ((x, y) for _ in range(STEPS))
    for a, b in rows if run is None else run.batches(rows):
        with nullcontext() if run is None else run.step():
            with nullcontext() if run is None else run.phase("forward"):
                loss = nn.functional.cross_entropy(net(a), b)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if run is not None:
            run.log({"train/loss": loss})
        yield


def _bare(run: Account | None) -> Iterator[None]:
    yield from _by_hand(None)


def _gan(run: Account | None) -> Iterator[None]:
    maker, judge = _make_mlp(), nn.Sequential(nn.Linear(10, 256), nn.ReLU(), nn.Linear(256, 1))
    judge.to(DEVICE)
    of_judge, of_maker = (torch.optim.Adam(net.parameters()) for net in (judge, maker))
    if run is not None:
        run.watch(maker, judge, of_judge, of_maker)
    real = torch.randn(128, 10, device=DEVICE)
    for _ in range(STEPS):
        made: Tensor = maker(torch.randn(128, 256, device=DEVICE))
        told = judge(real).mean() - judge(made.detach()).mean()
        of_judge.zero_grad()
        told.backward()
        of_judge.step()
        of_maker.zero_grad()
        judge(made).mean().backward()
        of_maker.step()
        yield


def _time(play: Callable[[Account | None], Iterator[None]], with_it: bool) -> tuple[float, float]:
    """Microseconds of the median step, and of the mean one."""
    with account(run_name="turn", quiet=True, device=DEVICE) if with_it else nullcontext() as run:
        times, began = [], time.perf_counter()
        for _ in play(run):
            now = time.perf_counter()
            times.append(now - began)
            began = now
        if DEVICE.type != "cpu":
            torch.accelerator.synchronize(DEVICE)
    counted = times[STEPS // 10 :]
    return 1e6 * median(counted), 1e6 * sum(counted) / len(counted)


def _time_start() -> float:
    """Seconds of `begin` in a process of its own, which has imported the account."""
    code = (
        "import time, torch\nfrom flows.account import account\nfrom torch import nn\n"
        "net = nn.Linear(1, 1)\nbegan = time.perf_counter()\n"
        "run = account(model=net, quiet=True).begin()\n"
        "print(time.perf_counter() - began)\nrun.end()"
    )
    project = str(Path(__file__).parent.parent)
    env = {**os.environ, "PYTHONPATH": project}
    done = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


def _compare() -> Iterator[str]:
    """What the account says of memory and time, beside what PyTorch's own tensors and clock say."""
    peak = 0.0
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        _keep_gradients(None)
        peak = torch.cuda.memory_stats()["allocated_bytes.all.peak"] / MIB
    with account(run_name="said", quiet=True, device=DEVICE) as run:
        net, optimizer, times = _keep_gradients(run)
    told = run.run["metrics"]
    state = [t for each in optimizer.state.values() for t in each.values()]
    said = {
        "memory/parameters_mib": _sum_mib(list(net.parameters())),
        "memory/gradients_mib": _sum_mib([p.grad for p in net.parameters()]),
        "memory/optimizer_state_mib": _sum_mib(state),
        **({"memory/run_peak_allocated_mib": peak} if DEVICE.type == "cuda" else {}),
    }
    for name, value in said.items():
        yield _row(name, told[name], value)
    if DEVICE.type == "cpu":  # elsewhere a step is not done when its call returns
        phases = (f"time/{p}_ms" for p in ("forward", "backward", "optimizer", "other"))
        whole = sum(told.get(name, 0.0) for name in phases)
        yield _row("phases of a step, ms", whole, sum(times[2:]) / len(times[2:]))


def _keep_gradients(run: Account | None) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """The MLP, trained with gradients that stay, so that their size can be asked; ms of each step."""
    net, times = _make_mlp(), []
    optimizer = torch.optim.AdamW(net.parameters())
    if run is not None:
        run.watch(net, optimizer)
    for _ in range(STEPS):
        began = time.perf_counter()
        with nullcontext() if run is None else run.step():
            optimizer.zero_grad(set_to_none=False)
            net(torch.randn(128, 256, device=DEVICE)).square().mean().backward()
            optimizer.step()
        times.append(1000 * (time.perf_counter() - began))
    return net, optimizer, times


def _sum_mib(tensors: list[Any]) -> float:
    return sum(t.nbytes for t in tensors if t is not None and t.device.type == DEVICE.type) / MIB


def _row(name: str, mine: float, theirs: float) -> str:
    return f"| {name} | {mine:.4f} | {theirs:.4f} | {100 * abs(mine / theirs - 1):.2f} % |"


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else TURNS)
