"""Keeps, of each step of a training, what shows later whether it was taken in the same way again: a
digest of 8 bytes for the loss, for each gradient, weight and buffer, and for each tensor of the
optimizer's state and of the random numbers. The digests are computed where the tensors are, the
same by the host and by a device, and read from there many steps at once. They go to files beside
the checkpoints, of a bounded size: the first steps and the newest stay.

A digest is a sum over 64-bit words, so it is the same in whatever order a device adds. Each place
has a weight of its own, an odd random number, and the upper half of a word counts in the lower one,
too: a change within 4 bytes of a tensor of up to 65,536 bytes always shows, and of all others one
in 2**32 does not at worst, where only highest bits differ, and one in 2**63 as a rule. A larger
tensor is summed before, twice, by the places modulo each of two periods: two words that change are
never in one sum both times, but where they lie 134 MB apart; four at the corners of a rectangle of
these periods may cancel out.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, compress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from headroom.base.event_log import CHECK, append_line, is_whole_line, make_event
from headroom.base.seeds import get_random_state
from headroom.training.checkpoint_files import UnsavableState, flatten_state
from headroom.training.optim import Optimizer

log = logging.getLogger(__name__)

DIGESTS = "digests"  # their folder, in that of a run
FIRST, BEFORE, NEWEST = "first.jsonl", "before.jsonl", "newest.jsonl"
MOST_BYTES = 16 * 2**20  # of each of these files
FLUSH_STEPS = 64
# Of so many first steps each has digests, and then each tenth: they may cost as much as the step.
FIRST_STEPS, EVERY = 1000, 10
VERSION = 2  # of what a digest is
PERIODS = (4093, 4099)  # words; prime, so that two places are alike by both only far apart
ROWS_AT_A_TIME = 32  # 1 MiB, which stays in a processor's cache for the second period
MOST_WORDS = sum(PERIODS)  # of a tensor that is not summed before
SIDE_BY_SIDE = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
)
OF_NUMPY = {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8}
VARIABLES = (
    *("CUBLAS_WORKSPACE_CONFIG", "MKL_CBWR", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    *("ATEN_CPU_CAPABILITY", "NVIDIA_TF32_OVERRIDE", "PYTORCH_CUDA_ALLOC_CONF"),
)


class Trained(Protocol):
    """What a step changes."""

    model: nn.Module
    optimizer: Optimizer


def name_tensors(state: Trained, loss: Tensor) -> dict[str, Tensor]:
    """Return what a step has come to, by names in the order in which it came to be: loss,
    gradients, weights, buffers, optimizer, random numbers. The tensors are the training's own."""
    parameters = dict(state.model.named_parameters())
    named = {"loss": loss.detach()}
    named |= {f"gradient/{n}": p.grad for n, p in parameters.items() if p.grad is not None}
    named |= {f"weight/{n}": p.detach() for n, p in parameters.items()}
    named |= {f"buffer/{n}": b for n, b in state.model.named_buffers()}
    with suppress(UnsavableState):  # what could only be pickled has no bits to compare
        flatten_state(state.optimizer.state(), named, "optimizer")
    device = next(iter(parameters.values())).device
    for place, drawn in zip(("torch", device.type), get_random_state(device), strict=False):
        named[f"random/{place}"] = drawn
    _, keys, *rest = np.random.get_state()
    named["random/numpy"] = torch.from_numpy(_join(keys, rest))
    _, words, spare = random.getstate()
    named["random/python"] = torch.from_numpy(_join(words, [spare or 0.0]))
    return named


def _join(keys: Any, rest: Any) -> np.ndarray:
    """Return keys and numbers as one row of int64, the floats among them bit for bit."""
    plain = [np.float64(r).view(np.int64) if isinstance(r, float) else int(r) for r in rest]
    return np.concatenate([np.asarray(keys, np.int64), np.asarray(plain, np.int64)])


@dataclass(frozen=True)
class Layout:
    """Where the words of tensors that are laid side by side begin and end, on their device."""

    weights: Tensor  # of each word, by its place in its tensor; before them a zero
    ends: Tensor  # of each tensor, in words, behind a zero
    sizes: Tensor  # of each tensor, in bytes
    back: Tensor  # where the tensors of the order asked for lie


@lru_cache(maxsize=1)
def draw_weights() -> np.ndarray:
    """Return the weights of the places, which are the same for ever."""
    drawn = np.random.PCG64(40).random_raw(MOST_WORDS)  # a stream that numpy promises to keep
    return (drawn | 1).view(np.int64)


def make_layout(
    counts: tuple[int, ...], sizes: tuple[int, ...], order: tuple[int, ...], device: torch.device
) -> Layout:
    """Return the layout of tensors of so many words and bytes; order: their numbers in the order
    asked for."""
    weights = [np.zeros(1, np.int64), *(draw_weights()[:count] for count in counts)]
    return Layout(
        weights=torch.from_numpy(np.concatenate(weights)).to(device),
        ends=torch.tensor((0, *accumulate(counts)), device=device),
        sizes=torch.tensor(sizes, device=device),
        back=torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=device),
    )


MakeLayout = Callable[[tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.device], Layout]


def compute_digests(tensors: Sequence[Tensor], make_layout: MakeLayout = make_layout) -> Tensor:
    """Return 64 bits of each of these tensors of one device, as a row of int64 on it: of the words
    that `fold_words` makes of its bytes a sum, each word by a weight of its place, and its size."""
    if tensors[0].device.type == "cpu":
        return torch.tensor([*map(_compute_on_host, tensors)])
    return compute_device_digests(tensors, make_layout)


def compute_digest(tensor: Tensor) -> Tensor:
    """Return the digest of one tensor."""
    return compute_digests([tensor])[0]


def _compute_on_host(tensor: Tensor) -> int:
    """Return the digest of a tensor of the host. It is computed by NumPy, in this thread: PyTorch
    would share the work with threads that others keep busy, and wait for them each time."""
    if tensor.dtype in OF_NUMPY and tensor.layout == torch.strided:
        octets = tensor.detach().numpy().reshape(-1).view(np.uint8)
        size = len(octets)
        if size % 8:
            octets = np.concatenate([octets, np.zeros(-size % 8, np.uint8)])
        words = octets.view(np.int64)
    else:
        size, viewed = view_words(tensor)
        words = viewed.numpy()
    if len(words) > MOST_WORDS:
        words = _fold_on_host(words)
    mixed = words >> 32
    mixed += words
    mixed *= draw_weights()[: len(mixed)]
    return int(mixed.sum(initial=size))  # wraps around, as that of tensors does


def _fold_on_host(words: np.ndarray) -> np.ndarray:
    """Return what `fold_words` does."""
    tables = [words[: len(words) // period * period].reshape(-1, period) for period in PERIODS]
    sums = [np.zeros(period, np.int64) for period in PERIODS]
    for row in range(0, len(tables[0]), ROWS_AT_A_TIME):
        for table, total in zip(tables, sums, strict=True):
            total += table[row : row + ROWS_AT_A_TIME].sum(0)
    for table, total in zip(tables, sums, strict=True):
        rest = words[table.size :]
        total[: len(rest)] += rest
    return np.concatenate(sums)


@torch.no_grad()
def compute_device_digests(
    tensors: Sequence[Tensor], make_layout: MakeLayout = make_layout
) -> Tensor:
    """Return the same, computed by the device, without waiting for it. Tensors are laid side by
    side and taken at once: one by one, the calls would take longer than the work."""
    small: dict[torch.dtype, list[int]] = {}
    order: list[int] = []
    sizes: list[int] = []
    rows: list[Tensor] = []
    for i, tensor in enumerate(tensors):
        if (
            tensor.dtype in SIDE_BY_SIDE
            and not tensor.is_sparse
            and tensor.nbytes <= 8 * MOST_WORDS
        ):
            small.setdefault(tensor.dtype, []).append(i)
        else:
            size, words = view_words(tensor)
            order.append(i)
            sizes.append(size)
            rows.append(fold_words(words))
    counts = [len(row) for row in rows]
    for of in small.values():
        rows.append(_lay_side_by_side([tensors[i] for i in of]))
        counts += [-(-tensors[i].nbytes // 8) for i in of]
        sizes += [tensors[i].nbytes for i in of]
        order += of
    layout = make_layout(tuple(counts), tuple(sizes), tuple(order), tensors[0].device)
    mixed = spread_bits(torch.cat([layout.ends[:1], *rows])).mul_(layout.weights)
    return (mixed.cumsum_(0)[layout.ends].diff() + layout.sizes)[layout.back]


def spread_bits(words: Tensor) -> Tensor:
    """Return words whose upper half counts in the lower one, too. By a weight alone, of two highest
    bits no weight would be left: 2**63 times each odd number is the same."""
    return (words >> 32).add_(words)


def fold_words(words: Tensor) -> Tensor:
    """Return the words of a tensor, which are few, or of more the sums of those whose places are
    the same modulo each period. A change of two words cancels out in neither of them, or in one:
    where their places are the same by both periods, they lie 16 million words apart."""
    if len(words) <= MOST_WORDS:
        return words
    return torch.cat([_fold(words, period) for period in PERIODS])


def _fold(words: Tensor, period: int) -> Tensor:
    rows = len(words) // period
    sums = words[: rows * period].view(rows, period).sum(0)
    rest = words[rows * period :]
    sums[: len(rest)] += rest
    return sums


def _lay_side_by_side(tensors: list[Tensor]) -> Tensor:
    """Return the words of 8 bytes of tensors of one type; zeros fill up the last of each."""
    in_word = 8 // tensors[0].element_size()
    parts: list[Tensor] = []
    for tensor in tensors:
        parts.append(tensor.reshape(-1))
        if short := -tensor.numel() % in_word:
            parts.append(tensor.new_zeros(short))
    return torch.cat(parts).view(torch.int64)


def view_words(tensor: Tensor) -> tuple[int, Tensor]:
    """Return how many bytes a tensor has, and these as whole numbers of 8 bytes each; behind the
    last stand zeros."""
    if tensor.is_sparse:  # a gradient of an embedding
        tensor = tensor.coalesce()
        (of_places, places), (of_values, values) = map(
            view_words, (tensor.indices(), tensor.values())
        )
        return of_places + of_values, torch.cat([places, values])
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = octets.numel()
    if size % 8:
        octets = torch.cat([octets, octets.new_zeros(-size % 8)])
    elif octets.storage_offset() % 8:
        octets = octets.clone()  # a view of wider words has to begin at one
    return size, octets.view(torch.int64)


class StepDigests:
    """Writes the digests of a training's steps to the folder of its run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / DIGESTS
        self._names: list[str] = []
        self._steps: list[int] = []
        self._rows: list[list[Tensor]] = []  # of each step, those of the device and of the host
        self._is_there = np.array([])  # which of the names are the device's
        self._written = ""  # the file whose head says these names
        self._is_off = False
        # Sent to the device again at each step, its numbers would make it wait.
        self._make_layout = lru_cache(maxsize=64)(make_layout)

    def end_step(self, state: Trained, step: int, loss: Tensor) -> None:
        """Take the digests of this step, which is done, if it is one that has some."""
        if self._is_off or (step > FIRST_STEPS and step % EVERY):
            return
        named = name_tensors(state, loss)
        if self._names != [*named]:
            self.flush()
            self._names, self._written = [*named], ""
        is_there = [tensor.device == loss.device for tensor in named.values()]
        # Sent to the device, those of the host would make it wait.
        parts = (
            [*compress(named.values(), map(place.__eq__, is_there))] for place in (True, False)
        )
        self._is_there = np.array(is_there)
        self._steps.append(step)
        self._rows.append([compute_digests(part, self._make_layout) for part in parts if part])
        if len(self._steps) >= FLUSH_STEPS:
            self.flush()

    def flush(self) -> None:
        """Write what was taken. Where that can't be done the training goes on without."""
        if not self._steps:
            return
        rows = np.empty((len(self._steps), len(self._names)), "<i8")
        for part, places in zip(
            zip(*self._rows, strict=True), (self._is_there, ~self._is_there), strict=False
        ):
            rows[:, places] = torch.stack(part).cpu().numpy()
        content = {"steps": self._steps, "rows": base64.b64encode(rows.tobytes()).decode()}
        self._steps, self._rows = [], []
        try:
            self._append(content)
        except OSError as error:
            self._is_off = True
            log.warning("digests of steps: %s; the training goes on without them", error)

    def _append(self, content: dict[str, Any]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = NEWEST if _measure(self._folder / FIRST) >= MOST_BYTES else FIRST
        if name == NEWEST and _measure(self._folder / NEWEST) >= MOST_BYTES:
            os.replace(self._folder / NEWEST, self._folder / BEFORE)
            self._written = ""
        lines = b""
        if self._written != name:
            head = {"version": VERSION, "names": self._names}
            head |= {"environment": describe_environment()}
            lines = make_event("digests", head, unix_ms=int(time.time() * 1000))
        lines += make_event("digests", content, unix_ms=int(time.time() * 1000))
        with open(self._folder / name, "ab", buffering=0, opener=_open_private) as file:
            append_line(file, lines)
        self._written = name


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _measure(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def describe_environment() -> dict[str, str]:
    """Return what may change the last bit of a step, beside settings, data and code."""
    cudnn = None
    with suppress(RuntimeError):  # one that does not go with PyTorch is no matter of a digest
        cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cpu.instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        **({"cuda": str(torch.version.cuda), "cudnn": str(cudnn)} if cudnn else {}),
        **{name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


@dataclass(frozen=True)
class KeptDigests:
    """What a run has kept of its steps."""

    steps: Mapping[int, Mapping[str, int]]  # by step and name
    environment: Mapping[str, str]  # that they were last computed in
    others: bool = False  # whether some are of another version, which can't be compared


def read_digests(folder: Path) -> KeptDigests:
    """Return the digests that this run has kept, the newest of each step. Lines that are damaged
    are left out."""
    steps: dict[int, dict[str, int]] = {}
    environment: dict[str, str] = {}
    names: list[str] = []
    others = is_other = False
    for content in _iterate_lines(folder / DIGESTS):
        if "names" in content:
            names, environment = content["names"], content["environment"]
            is_other = content.get("version") != VERSION
            others |= is_other
            continue
        rows = np.frombuffer(base64.b64decode(content["rows"]), "<i8")
        if rows.size == len(names) * len(content["steps"]) and not is_other:
            table = rows.reshape(len(content["steps"]), len(names)).tolist()
            for step, row in zip(content["steps"], table, strict=True):
                steps[step] = dict(zip(names, row, strict=True))
    return KeptDigests(steps, environment, others)


def _iterate_lines(folder: Path) -> Iterator[Mapping[str, Any]]:
    for name in (FIRST, BEFORE, NEWEST):
        with suppress(FileNotFoundError), open(folder / name, "rb") as lines:
            for line in lines:
                if CHECK in line and is_whole_line(line):
                    yield json.loads(line)["digests"]
