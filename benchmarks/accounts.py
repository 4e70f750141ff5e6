"""What the account of somebody else's loop costs a step, and how far what it says is from what
PyTorch says: a hand-written loop whose step takes about a millisecond, a GAN with two optimizers,
and the loops of Lightning, the HF Trainer and accelerate. Each is trained with and without, in
turns of a few steps, or of a whole training where a framework has the loop: a shared machine is
faster and slower for seconds at a time.

`python -m benchmarks.accounts [TURNS]` prints the tables and keeps them in benchmarks/results.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.conditions import publish
from headroom import account
from headroom.run.account import Account
from headroom.watch import own_loop

TURNS, STEPS = 200, 20
FITS, LONG, WARM = 10, 400, 50  # turns of a framework's whole trainings; their steps
BAR, START_BAR_S = 0.98, 0.3  # a step without over one with; the start of an account
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MIB = 2**20
NOTES = f"""
- Two loops alike take turns of {STEPS} steps in one process, with one thread: one has its account,
  which is open all the time, with its readings and its sending process; the other is bare.
- by hand: an MLP, its steps and its forward marked, its loss logged each step. hooks: the same loop
  with nothing but `account` around it, which watches model and optimizer. GAN: two models and two
  optimizers, nothing marked.
- Lightning, HF Trainer, accelerate: trainings of {LONG} steps of the same MLP in turns, the first
  {WARM} steps left out, each with its adapter and without.
- ratio: a step without the account over one with it, the median over the turns.
"""
Play = Callable[[Account | None], Iterator[None]]


def main(turns: int) -> None:
    """Measure, print, keep."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        publish("accounts", "What the account of a loop costs, and says", _report(turns))


def _report(turns: int) -> Iterator[str]:
    yield NOTES.rstrip()
    yield from ("", "| loop | turns | ratio | its quartiles | bar | us a step with | without |")
    yield "|:--|--:|--:|:--|--:|--:|--:|"
    for name, play in {"by hand": _by_hand, "hooks": _hooks, "GAN": _gan}.items():
        mine, plain = _take_turns(play, turns)
        ratios = [b / a for a, b in zip(mine, plain, strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        cells = f"{middle:.3f} | {low:.3f} to {high:.3f} | {BAR}"
        yield f"| {name} | {turns} | {cells} | {median(mine):.0f} | {median(plain):.0f} |"
    for name, fit in {
        "Lightning": _fit_by_lightning,
        "HF Trainer": _fit_by_transformers,
        "accelerate": _fit_by_accelerate,
    }.items():
        found: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(FITS):
            for is_told in (True, False) if turn % 2 else (False, True):
                found[is_told].append(fit(is_told))
        ratios = [b / a for a, b in zip(found[True], found[False], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        cells = f"{middle:.3f} | {low:.3f} to {high:.3f} | {BAR}"
        with_us, without_us = median(found[True]), median(found[False])
        yield f"| {name} | {FITS} | {cells} | {with_us:.0f} | {without_us:.0f} |"
    starts = [_time_start() for _ in range(5)]
    least, most = min(starts), max(starts)
    told = f"{median(starts):.3f} ({least:.3f} to {most:.3f}, bar {START_BAR_S})"
    yield from ("", f"- the start of an account, of five processes, s: {told}")
    yield from ("", "| of the MLP | the account says | PyTorch says | difference |")
    yield "|:--|--:|--:|--:|"
    yield from _compare()


def _take_turns(play: Play, turns: int) -> tuple[list[float], list[float]]:
    """Microseconds of a step in each turn, with the account and without."""
    found: tuple[list[float], list[float]] = ([], [])
    with account(run_name="turns", quiet=True, device=DEVICE) as run:
        loops = (play(run), play(None))
        for turn in range(-1, turns):
            for which in (0, 1) if turn % 2 else (1, 0):
                began = time.perf_counter()
                for _ in range(STEPS):
                    next(loops[which])
                if DEVICE.type != "cpu":
                    torch.accelerator.synchronize(DEVICE)
                if turn >= 0:  # one more before, which does not count
                    found[which].append(1e6 * (time.perf_counter() - began) / STEPS)
    return found


def _make_mlp() -> nn.Sequential:
    layers = [nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers).to(DEVICE)


def _by_hand(run: Account | None) -> Iterator[None]:
    net, x = _make_mlp(), torch.randn(128, 256, device=DEVICE)
    y = torch.randint(0, 10, (128,), device=DEVICE)
    optimizer = torch.optim.AdamW(net.parameters())
    if run is not None:
        run.watch(net, optimizer)
    rows = itertools.repeat((x, y))
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


def _hooks(run: Account | None) -> Iterator[None]:
    net, x = _make_mlp(), torch.randn(128, 256, device=DEVICE)
    y = torch.randint(0, 10, (128,), device=DEVICE)
    optimizer = torch.optim.AdamW(net.parameters())
    if run is not None:
        run.watch(net, optimizer)
    while True:
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def _gan(run: Account | None) -> Iterator[None]:
    maker, judge = _make_mlp(), nn.Sequential(nn.Linear(10, 256), nn.ReLU(), nn.Linear(256, 1))
    judge.to(DEVICE)
    of_judge, of_maker = (torch.optim.Adam(net.parameters()) for net in (judge, maker))
    if run is not None:
        run.watch(maker, judge, of_judge, of_maker)
    real = torch.randn(128, 10, device=DEVICE)
    while True:
        made: Tensor = maker(torch.randn(128, 256, device=DEVICE))
        told = judge(real).mean() - judge(made.detach()).mean()
        of_judge.zero_grad()
        told.backward()
        of_judge.step()
        of_maker.zero_grad()
        judge(made).mean().backward()
        of_maker.step()
        yield


class _Named(nn.Module):
    """The MLP with its loss, as frameworks call it; it keeps when each step began."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.began = _make_mlp(), [0.0]

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.began.append(time.perf_counter())
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}

    def compute_step_us(self) -> float:
        """Return the microseconds from one step to the next, the fastest tenth and the slowest
        quarter left out, in which a shared machine did something else."""
        steps = sorted(b - a for a, b in itertools.pairwise(self.began[WARM:]))
        return 1e6 * median(steps[len(steps) // 10 : -len(steps) // 4])


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Whole batches, so that a loader has little to do."""

    def __init__(self) -> None:
        self.row = {"x": torch.randn(128, 256), "labels": torch.randint(0, 10, (128,))}

    def __len__(self) -> int:
        return LONG

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        return self.row


def _take_first(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return rows[0]


def _load() -> torch.utils.data.DataLoader[dict[str, Tensor]]:
    return torch.utils.data.DataLoader(_Rows(), collate_fn=_take_first)


def _fit_by_lightning(is_told: bool) -> float:
    import lightning.pytorch as pl

    from headroom.lightning import HeadroomCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _Named()

        def training_step(self, batch: Any, at: int) -> Tensor:
            loss: Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    module = Module()
    pl.Trainer(
        max_epochs=1,
        accelerator="auto",
        callbacks=[HeadroomCallback(quiet=True)] if is_told else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, _load())
    return module.net.compute_step_us()


def _fit_by_transformers(is_told: bool) -> float:
    from transformers import Trainer, TrainingArguments

    from headroom.transformers import HeadroomCallback

    asked = TrainingArguments(
        output_dir="hf",
        num_train_epochs=1,
        per_device_train_batch_size=1,
        save_strategy="no",
        logging_steps=50,
        report_to=[],
        disable_tqdm=True,
        use_cpu=DEVICE.type == "cpu",
        remove_unused_columns=False,
    )
    net, told = _Named(), HeadroomCallback(quiet=True)
    Trainer(
        model=net,
        args=asked,
        train_dataset=_Rows(),
        data_collator=_take_first,
        callbacks=[told] if is_told else [],
    ).train()
    return net.compute_step_us()


def _fit_by_accelerate(is_told: bool) -> float:
    from accelerate import Accelerator

    from headroom.accelerate import HeadroomTracker

    net = _Named()
    made = torch.optim.AdamW(net.parameters())
    tracker = HeadroomTracker(model=net, optimizer=made, quiet=True)
    does = Accelerator(cpu=DEVICE.type == "cpu", **({"log_with": tracker} if is_told else {}))
    model, optimizer, loader = does.prepare(net, made, _load())
    if is_told:
        does.init_trackers("mine", config={"lr": 1e-3})
    for batch in loader if tracker.run is None else tracker.run.batches(loader):
        does.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    does.end_training()
    return net.compute_step_us()


def _time_start() -> float:
    """Seconds of `begin` in a process of its own, which has imported the account."""
    code = (
        "import time, torch\nfrom headroom import account\nfrom torch import nn\n"
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
    own_loop.COUNT_SHARE = 1.0  # this loop is too short for a counted step to be affordable
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
        # The first is apart, and the one that is counted takes several times as long.
        yield _row("phases of a step, ms", whole, median(times[1:]))


def _keep_gradients(run: Account | None) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """The MLP, trained with gradients that stay, so that their size shows; ms of each step."""
    net, times = _make_mlp(), []
    optimizer = torch.optim.AdamW(net.parameters())
    if run is not None:
        run.watch(net, optimizer)
    for _ in range(STEPS):  # of more, only some would be timed
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
