"""The processes that train one model together, each by its rank: what they tell each other in plain
values, and what is left for the others by one that fails. A training of one process has `Ranks()`,
which agrees with itself.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.engine.base.import_paths import said
from tasks.engine.settings.read_settings import ConfigError

T = TypeVar("T")
PATIENCE_S = 600.0  # for the others at a collective: a data set may be prepared meanwhile
TOLD_S = 3.0  # for the word of another rank's failure, which comes beside the broken connection
_FAILURE, _SMALLER = "failure", "smaller"
_joined = count()  # how often this process has
# Of gloo, NCCL and the store, where the process at the other end is gone.
_LOST = re.compile(
    r"gloo|Connection (closed|reset|refused)|Broken pipe|NCCL|ncclRemoteError|Socket|"
    r"recvValue|TCPStore|Timed out",
    re.IGNORECASE,
)


class BeginAgain(Exception):
    """What ends this rank ends all, and may not come again where they begin anew."""


@dataclass(frozen=True)
class Ranks:
    """One of `size` processes; `local` is its number on this host, of `on_host`."""

    rank: int = 0
    size: int = 1
    local: int = 0
    on_host: int = 1
    group: Any = None  # that they agree in; None: that of all collectives

    @property
    def is_lead(self) -> bool:
        """Whether it is the one that logs and writes."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def all_of(self, value: T) -> list[T]:
        """What each rank gave, by rank. All must call it, in the same order."""
        if self.is_alone:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def apart(self) -> Ranks:
        """The same, to agree beside the training: what a thread of its own asks with `all_of` is
        not mixed up with what the training sends. All must call it."""
        return self if self.is_alone else replace(self, group=dist.new_group(backend="gloo"))

    def of_lead(self, value: T) -> T:
        """What the lead gave. All must call it."""
        if self.is_alone:
            return value
        found = [value]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def lead_says(self, is_so: bool) -> bool:
        """Whether it is so for the lead. All must call it; a tenth of a millisecond."""
        if self.is_alone:
            return is_so
        flag = torch.tensor(is_so, dtype=torch.uint8)
        dist.broadcast(flag, src=0)
        return bool(flag)

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over the ranks, in place, in the device's stream. All must call it."""
        if not self.is_alone:
            dist.all_reduce(tensor)
            tensor /= self.size
        return tensor

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sums over the ranks of values of the same names. All must call it."""
        found = self.all_of(dict(values))
        return {name: sum(of[name] for of in found) for name in values}

    @torch.no_grad()
    def same_buffers(self, model: nn.Module) -> None:
        """Give all ranks the lead's buffers: running statistics are those of each one's rows."""
        if not self.is_alone:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def largest_share(self, rows: int) -> int:
        """The most rows that a rank gets of so many."""
        return -(-rows // self.size)


def asked(environment: Mapping[str, str] = os.environ) -> Ranks:
    """The ranks that a launcher such as torchrun has set; alone where none has."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return Ranks()
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    local = int(environment.get("LOCAL_RANK", rank))
    return Ranks(rank, size, local, int(environment.get("LOCAL_WORLD_SIZE", size)))


@contextmanager
def joined(ranks: Ranks, device: torch.device) -> Iterator[Any]:
    """Inside, the ranks hear each other: tensors by what the device has, plain values by gloo.

    Yields where a failure is left for the others. Raises RuntimeError where they don't come.
    """
    if ranks.is_alone:
        yield None
        return
    # Here: not every PyTorch is built with them.
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    # The launcher's store still holds what lost processes and trainings before this one left there.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(attempt, PrefixStore(f"headroom/{next(_joined)}", store))
    backend = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}.get(device.type, "gloo")
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE_S),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield store
    finally:
        dist.destroy_process_group()


def refuse_different(ranks: Ranks, things: Mapping[str, Any]) -> None:
    """All ranks must have been started with the same things, by name.

    Raises ConfigError on each of them.
    """
    found = ranks.all_of(dict(things))
    for name, ours in found[0].items():
        for rank, theirs in enumerate(found):
            if theirs.get(name) != ours:
                told = f"{ours!r:.80} on rank 0 and {theirs.get(name)!r:.80} on rank {rank}"
                raise ConfigError(f"{name}: is {told}; start all processes of a training alike")


def tell_smaller(store: Any, rows: int) -> None:
    """Leave for the processes that begin again that so many rows of a micro-batch are to be tried,
    once more than before."""
    store = store.underlying_store
    store.set(f"{_SMALLER}/{store.add(_SMALLER, 1)}", str(rows))


def told_smaller(store: Any) -> list[int]:
    """The rows that were left by those before, one after the other."""
    if store is None:
        return []
    store = store.underlying_store
    count = store.add(_SMALLER, 0)
    return [int(store.get(f"{_SMALLER}/{n}")) for n in range(1, count + 1)]


def tell_failure(store: Any, ranks: Ranks, text: str) -> None:
    """Leave for the others why this rank fails."""
    if store is not None:
        store.set(_FAILURE, json.dumps({"rank": ranks.rank, "text": text}))


def told_failure(store: Any) -> str | None:
    """Which rank failed, and why; None where none has said so: it was lost."""
    until_s = time.monotonic() + TOLD_S
    while store is not None and time.monotonic() < until_s:
        try:
            if store.check([_FAILURE]):
                told = json.loads(store.get(_FAILURE))
                return f"rank {told['rank']}: {told['text']}"
        except RuntimeError:  # the host that kept it is gone
            return None
        time.sleep(0.05)
    return None


def is_lost_peer(error: BaseException) -> bool:
    """Whether this is what a rank hears when another one is gone."""
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)):
        return True
    return type(error) is RuntimeError and _LOST.search(said(error)) is not None
