"""Says whether a training came out further from another than rounding drives two of them apart:
where operations need not come out the same each time, no bit says it any more, but a size does. The
measure is a pair of trainings here: of one of them the weights are moved behind each step by about
what rounding moves. Whatever the device itself does otherwise each time is in it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import inf, isfinite, isnan
from pathlib import Path

import torch
from torch import Tensor, nn

from headroom.training.checkpoint_files import flatten_state, read_checkpoint
from headroom.training.kept_steps import CHECKPOINTS, list_steps

# What has a size; an accuracy jumps by a row, a rate by a patience.
SIZES = ("train/loss", "train/grad_norm", "val/loss")
# How far apart, relative, such a thing may be whatever the pair says: rounding also decides whether
# a unit is switched on, and in which direction Adam takes its first steps.
LEAST = 0.1
PARTS = {"model": LEAST, "optimizer": LEAST, "random": 0.0}  # of a checkpoint
# Relative to a weight, by the precision that it is trained in: the last bit of what it becomes.
NUDGES = {"fp32": 2**-23, "tf32": 2**-11, "bf16": 2**-8, "fp16": 2**-11}
TIMES = 100  # as far apart as the pair is no rounding any more; honest ones: benchmarks/verify.py
FEW = 8  # elements of a tensor; so few are near to one another by chance
SEED = 40


Values = Mapping[tuple[str, int], float]  # logged, by name and step


@dataclass(frozen=True)
class Outcome:
    """What came of a training, here or then."""

    values: Values
    folder: Path | None  # of its checkpoints


@dataclass(frozen=True)
class Excess:
    """What is further apart than rounding explains."""

    step: int
    name: str
    apart: float  # relative
    pair: float  # how far apart the pair was, at most, up to there


class WeightNudges:
    """Moves each weight that is trained up or down by what rounding in this precision moves."""

    def __init__(self, precision: str) -> None:
        self._size = NUDGES[precision]
        self._drawing = torch.Generator().manual_seed(SEED)

    @torch.no_grad()
    def move(self, model: nn.Module) -> None:
        """Move them once more."""
        for weight in model.parameters():
            if weight.requires_grad and weight.is_floating_point():
                size = max(self._size, torch.finfo(weight.dtype).eps)
                signs = torch.randint(0, 2, weight.shape, generator=self._drawing) * 2 - 1
                weight.mul_(1 + (signs * size).to(weight.device, weight.dtype))


def find_excess(
    then: Outcome, now: Outcome, *, plain: Outcome, nudged: Outcome, begin: int, end: int
) -> Excess | None:
    """Return the first thing of two trainings that is further apart than the pair by so many
    times; None where there is none."""
    bounds = _measure_pair(plain.values, nudged.values, begin + 1)
    for name, step in _select_sizes(then.values, now.values):
        if step in bounds:
            gap = _compare(then.values[name, step], now.values[name, step])
            if gap > max(TIMES * bounds[step], LEAST):
                return Excess(step, name, gap, bounds[step])
    found = [one.folder for one in (then, now, plain, nudged) if one.folder is not None]
    folders = [folder for folder in found if end in list_steps(folder / CHECKPOINTS)]
    return _find_in_states(folders, end) if len(folders) == 4 else None


def _measure_pair(plain: Values, nudged: Values, moved_at: int) -> dict[int, float]:
    """Return how far apart they have been up to each step. Up to the first that the weights were
    moved behind, they take the first distance after it: their own may be none."""
    far: dict[int, float] = {}
    for name, step in _select_sizes(plain, nudged):
        gap = _compare(plain[name, step], nudged[name, step])
        far[step] = max(far.get(step, 0.0), gap)
    first = next((gap for step, gap in far.items() if step > moved_at), 0.0)
    return dict(zip(far, accumulate(far.values(), max, initial=first), strict=False))


def _select_sizes(*values: Values) -> list[tuple[str, int]]:
    """Return what all of them have logged that has a size, the earliest first."""
    common = set[tuple[str, int]].intersection(*({*one} for one in values))
    return sorted(
        (at for at in common if at[0] in SIZES), key=lambda at: (at[1], SIZES.index(at[0]))
    )


def _compare(one: float, other: float) -> float:
    """Return how far apart two numbers are, relative to the larger one."""
    if one == other or (isnan(one) and isnan(other)):
        return 0.0
    gap = abs(one - other) / max(abs(one), abs(other))
    return gap if isfinite(gap) else inf


def _find_in_states(folders: list[Path], end: int) -> Excess | None:
    checkpoints = [read_checkpoint(folder / CHECKPOINTS, end) for folder in folders]
    positions = [one.about["position"] for one in checkpoints]
    is_alike = all(position == positions[0] for position in positions)
    for part, least in PARTS.items():
        states: list[dict[str, Tensor]] = [{} for _ in checkpoints]
        texts = [
            repr(flatten_state(one.state.get(part), tensors, part))
            for one, tensors in zip(checkpoints, states, strict=True)
        ]
        if part == "random" and not is_alike:
            continue
        if part == "random" and texts[0] != texts[1] and texts[2] == texts[3]:
            return Excess(end, f"checkpoint {part}", inf, 0.0)
        then, now, plain, nudged = states
        pairs = {name: _compare_tensors(plain.get(name), nudged.get(name)) for name in then}
        most = max(pairs.values(), default=0.0)
        for name, tensor in then.items():
            gap = _compare_tensors(tensor, now.get(name))
            bound = most if tensor.numel() < FEW else pairs[name]
            if gap > max(TIMES * bound, least):
                return Excess(end, f"checkpoint {name}", gap, bound)
    return None


def _compare_tensors(one: Tensor | None, other: Tensor | None) -> float:
    """Return how far apart two tensors are as vectors, relative to the longer one."""
    if one is None or other is None or one.shape != other.shape:
        return inf
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = (tensor.to_dense().flatten().to(wide) for tensor in (one, other))
    if torch.equal(one, other):
        return 0.0
    gap = float((one - other).norm()) / max(float(one.norm()), float(other.norm()))
    return gap if isfinite(gap) else inf
