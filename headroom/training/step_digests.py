"""Keeps, of each step of a training, what shows later whether it was taken in the same way again: a
digest of 8 bytes for the loss, for each gradient, weight and buffer, and for each tensor of the
optimizer's state and of the random numbers. One flipped bit always changes a digest. The digests
are computed where the tensors are, and read from there many steps at once. They go to files beside
the checkpoints, of a bounded size: the first steps and the newest stay.
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
from functools import lru_cache
from itertools import accumulate, chain, compress
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
# The first is odd and the second even: a flip of bit k changes the sum by an odd multiple of 2**k.
OF_SUM, OF_SQUARES = 0x9E3779B97F4A7C15 - 2**64, 0x2545F4914F6CDD1E
SIDE_BY_SIDE = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
)
MOST_SMALL = 2**16  # elements
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


def send_numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return these numbers on a device."""
    return torch.tensor(numbers, device=device)


Send = Callable[[tuple[int, ...], torch.device], Tensor]


@torch.no_grad()
def compute_digests(tensors: Sequence[Tensor], send: Send = send_numbers) -> Tensor:
    """Return the digest of each of these tensors of one device, in a row on it. Small ones are laid
    side by side and taken at once: one by one, the calls would take longer than the work."""
    small: dict[torch.dtype, list[int]] = {}
    order: list[int] = []
    large: list[Tensor] = []
    for i, tensor in enumerate(tensors):
        is_plain = tensor.dtype in SIDE_BY_SIDE and not tensor.is_sparse
        if is_plain and 0 < tensor.numel() <= MOST_SMALL:
            small.setdefault(tensor.dtype, []).append(i)
        else:
            order.append(i)
            large.append(compute_digest(tensor))
    rows = [torch.stack(large)] if large else []
    if small:
        of_types = [[tensors[i] for i in of] for of in small.values()]
        rows.append(_digest_side_by_side(of_types, send))
    order += chain.from_iterable(small.values())
    back = tuple(sorted(range(len(order)), key=order.__getitem__))
    return torch.cat(rows)[send(back, tensors[0].device)]


def _digest_side_by_side(types: list[list[Tensor]], send: Send) -> Tensor:
    """Return the digests of tensors that are not empty, those of one type after another."""
    sizes = [tensor.nbytes for tensors in types for tensor in tensors]
    words = [_lay_side_by_side(tensors) for tensors in types]
    mixed = torch.cat([words[0].new_zeros(1), *words])
    mixed.mul_(mixed * OF_SQUARES + OF_SUM)
    ends = (0, *accumulate(-(-size // 8) for size in sizes))
    device = mixed.device
    return mixed.cumsum_(0)[send(ends, device)].diff() + send(tuple(sizes), device)


def _lay_side_by_side(tensors: list[Tensor]) -> Tensor:
    """Return the words of 8 bytes of tensors of one type; zeros fill up the last of each."""
    in_word = 8 // tensors[0].element_size()
    parts: list[Tensor] = []
    for tensor in tensors:
        parts.append(tensor.reshape(-1))
        if short := -tensor.numel() % in_word:
            parts.append(tensor.new_zeros(short))
    return torch.cat(parts).view(torch.int64)


@torch.no_grad()
def compute_digest(tensor: Tensor) -> Tensor:
    """Return 64 bits of a tensor, as an int64 on its device: of its bits, read as whole numbers x
    of 8 bytes, a sum of x and of x squared, and its size. It never waits for the device."""
    size, words = view_words(tensor)
    squares = torch.dot(words, words) if words.device.type == "cpu" else (words * words).sum()
    return words.sum() * OF_SUM + squares * OF_SQUARES + size


def view_words(tensor: Tensor) -> tuple[int, Tensor]:
    """Return how many bytes a tensor has, and these as whole numbers of 8 bytes each; behind the
    last stand zeros."""
    if tensor.is_sparse:  # a gradient of an embedding
        tensor = tensor.coalesce().values()
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
        # Sent to the device again at each step, numbers would make it wait.
        self._send = lru_cache(maxsize=64)(send_numbers)

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
        self._rows.append([compute_digests(part, self._send) for part in parts if part])
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
            head = {"names": self._names, "environment": describe_environment()}
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


def read_digests(folder: Path) -> tuple[dict[int, dict[str, int]], dict[str, str]]:
    """Return the digests by step and name that this run has kept, the newest of each step, and the
    environment that they were last computed in. Lines that are damaged are left out."""
    steps: dict[int, dict[str, int]] = {}
    environment: dict[str, str] = {}
    names: list[str] = []
    for content in _iterate_lines(folder / DIGESTS):
        if "names" in content:
            names, environment = content["names"], content["environment"]
            continue
        rows = np.frombuffer(base64.b64decode(content["rows"]), "<i8")
        if rows.size == len(names) * len(content["steps"]):
            table = rows.reshape(len(content["steps"]), len(names)).tolist()
            for step, row in zip(content["steps"], table, strict=True):
                steps[step] = dict(zip(names, row, strict=True))
    return steps, environment


def _iterate_lines(folder: Path) -> Iterator[Mapping[str, Any]]:
    for name in (FIRST, BEFORE, NEWEST):
        with suppress(FileNotFoundError), open(folder / name, "rb") as lines:
            for line in lines:
                if CHECK in line and is_whole_line(line):
                    yield json.loads(line)["digests"]
