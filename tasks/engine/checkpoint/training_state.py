"""What a training's next step depends on, part by part: weights, running statistics, the random
numbers of every library, the scaler of gradients. Optimizers, clocks and counters tell their own.
It refuses a state of other parameters than the model has.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tasks.engine.base.seeds import random_state, set_random_state
from tasks.engine.distributed.shards import placed
from tasks.engine.step.best_weights import tensors_of


class Stateful(Protocol):
    """A part of a training that can be left and gone on from."""

    def state(self) -> Any:
        """Tensors and plain values, in dicts, lists and tuples. Tensors are those of now, and are
        copied before the training goes on; no number is read back from the device."""

    def restore(self, state: Any) -> None:
        """Be as it was when `state` was taken."""


class Mismatch(ValueError):
    """A state is that of something else; the text says what differs."""


@dataclass(frozen=True)
class Weights:
    """Parameters and buffers, each once."""

    model: nn.Module

    def state(self) -> dict[str, Tensor]:
        return dict(tensors_of(self.model))

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        mine = dict(tensors_of(self.model))
        for name in sorted(mine.keys() ^ state.keys()):
            where = "the checkpoint" if name in state else "the model"
            raise Mismatch(f"model.name: only {where} has {name}")
        for name, tensor in mine.items():
            if tensor.shape != state[name].shape:
                was, now = tuple(state[name].shape), tuple(tensor.shape)
                if isinstance(tensor, nn.Parameter):
                    raise Mismatch(f"model.name: {name} was {was} and is {now}")
                tensor.data = state[name].to(tensor.device)  # a buffer that grows
            tensor.copy_(placed(state[name], tensor))


@dataclass(frozen=True)
class RandomNumbers:
    """Of PyTorch on the host and on the device, of numpy and of Python."""

    device: torch.device

    def state(self) -> dict[str, Any]:
        _, keys, *rest = np.random.get_state()
        return {
            "torch": random_state(self.device),
            "device": self.device.type,
            "numpy": [np.asarray(keys, dtype=np.int64), *rest],
            "python": random.getstate(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        is_alike = state["device"] == self.device.type  # another kind of device draws others anyway
        set_random_state(self.device, state["torch"] if is_alike else state["torch"][:1])
        keys, *rest = state["numpy"]
        np.random.set_state(("MT19937", keys.astype(np.uint32), *rest))
        random.setstate(state["python"])


@dataclass(frozen=True)
class Scaler:
    """The scale of fp16's gradients, which its own state_dict would wait for the device to tell."""

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
