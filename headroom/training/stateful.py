"""Saves and restores what a training's next step depends on, part by part: weights, running
statistics, the random numbers of every library, the scaler of gradients. Optimizers, clocks
and counters have methods of their own. Copies of the tensors are made on the host, in memory
that is kept for the next ones; from CUDA they go into pinned memory on a stream of their own,
so that the host waits for nothing. It refuses a state of other parameters than the model has.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from headroom.base.nested import shard_like
from headroom.base.seeds import get_random_state, set_random_state
from headroom.ranks.ranks import Ranks
from headroom.training.best_weights import iterate_tensors
from headroom.watch.pinned_memory import PINNING, allocate_pinned


class Stateful(Protocol):
    """A part of a training whose state can be saved and restored."""

    def state(self) -> Any:
        """Return tensors and plain values, in dicts, lists and tuples. The tensors are copied
        before the training goes on; no number is read back from the device."""

    def restore(self, state: Any) -> None:
        """Go back to where `state` was taken."""


class StateMismatch(ValueError):
    """A state is that of something else; the text says what differs."""


@dataclass(frozen=True)
class Weights:
    """Parameters and buffers of a model, each once."""

    model: nn.Module

    def state(self) -> dict[str, Tensor]:
        return dict(iterate_tensors(self.model))

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        mine = dict(iterate_tensors(self.model))
        for name in sorted(mine.keys() ^ state.keys()):
            where = "the checkpoint" if name in state else "the model"
            raise StateMismatch(f"model.name: only {where} has {name}")
        for name, tensor in mine.items():
            if tensor.shape != state[name].shape:
                was, now = tuple(state[name].shape), tuple(tensor.shape)
                if isinstance(tensor, nn.Parameter):
                    raise StateMismatch(f"model.name: {name} was {was} and is {now}")
                tensor.data = state[name].to(tensor.device)  # a buffer that grows
            tensor.copy_(shard_like(state[name], tensor))


@dataclass(frozen=True)
class RandomNumbers:
    """The random number generators of PyTorch on the host and on the device, of numpy and of
    Python, on each rank."""

    device: torch.device
    ranks: Ranks = Ranks()

    def state(self) -> list[dict[str, Any]]:
        return self.ranks.all_gather(self._read())

    def restore(self, state: list[dict[str, Any]]) -> None:
        if self.ranks.rank < len(state):  # else more ranks go on than there were
            self._set(state[self.ranks.rank])

    def _read(self) -> dict[str, Any]:
        _, keys, *rest = np.random.get_state()
        return {
            "torch": get_random_state(self.device),
            "device": self.device.type,
            "numpy": [np.asarray(keys, dtype=np.int64), *rest],
            "python": random.getstate(),
        }

    def _set(self, state: dict[str, Any]) -> None:
        is_alike = state["device"] == self.device.type  # another kind of device draws others anyway
        set_random_state(self.device, state["torch"] if is_alike else state["torch"][:1])
        keys, *rest = state["numpy"]
        np.random.set_state(("MT19937", keys.astype(np.uint32), *rest))
        random.setstate(state["python"])


@dataclass(frozen=True)
class Scaler:
    """The scale of fp16's gradients; its own state_dict would make the host wait for the device."""

    scaler: torch.amp.GradScaler

    def state(self) -> dict[str, Tensor]:
        if not self.scaler.is_enabled():
            return {}
        made = {"scale": self.scaler._scale, "growth_tracker": self.scaler._growth_tracker}
        return {name: tensor for name, tensor in made.items() if tensor is not None}

    def restore(self, state: dict[str, Tensor]) -> None:
        if state and self.scaler.is_enabled():
            now = self.scaler.state_dict()
            now |= {"scale": state["scale"].item()}
            now |= {"_growth_tracker": int(state["growth_tracker"].item())}
            self.scaler.load_state_dict(now)


class HostCopies:
    """Makes the host copies of one training, one set at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None

    @torch.inference_mode()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies under the same names; whole once `wait` has returned, until the next
        are taken."""
        if self._stream is None:
            with _disable_current_modes():  # memory of the host, and none that a limit counts
                copies = {name: self._copy_from(name, t) for name, t in tensors.items()}
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                copies = {name: self._copy_from(name, tensor) for name, tensor in tensors.items()}
                self._copied = torch.cuda.Event()
                self._copied.record(self._stream)
        self._kept = copies
        return copies

    def let_go_on(self) -> None:
        """Let the training change what was copied: the device waits for the copies, where they
        are still being made."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def wait(self) -> None:
        """Return when the copies are whole. For the thread that writes them."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy_from(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            pins = self._device.type in PINNING and tensor.device.type != "cpu"
            # Of the same strides: other ones would take memory of the device on the way.
            make = partial(torch.empty_like, tensor, device="cpu")
            kept = allocate_pinned(make) if pins else make()
        kept.copy_(tensor, non_blocking=kept.is_pinned() if tensor.device.type != "cpu" else False)
        return kept
