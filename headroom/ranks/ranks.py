"""The processes (ranks) that train one model together: how they exchange plain values, what a
failing one stores for the others, and who did not come to an exchange. A training of one process
has `Ranks()`, whose methods return its own values. It is the time-out of PyTorch's process group
that ends a wait; the store, which all can reach, tells whom it was for.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headroom.base.import_paths import get_error_message
from headroom.settings.read_settings import ConfigError

log = logging.getLogger(__name__)
T = TypeVar("T")
ASK_EVERY_S = 0.1
WAITED_S = 30.0  # until it is told whom the others wait for
STORE_S = 5.0  # for an answer of the store
FAILURE_WAIT_S = (
    3.0  # for the word of another rank's failure, which comes beside the broken connection
)
_FAILURE, _SMALLER, _HERE, _WAITING = "failure", "smaller", "here", "waiting"
_joined = count()  # how often this process has
# What is heard where the process at the other end is gone, or does not come: by gloo, NCCL and the
# store. NCCL has one class of errors for that and for all else, such as two ranks on one GPU.
_GONE = re.compile(
    r"connection (was likely )?(closed|reset|refused)|broken pipe|recvValue|ncclRemoteError"
    r"|remote process exit|communicator was aborted|timed? ?out|socket closed"
    r"|no route to host|unreachable|failed to (recv|send)",
    re.IGNORECASE,
)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)  # of a rank that is there and does not come
_THEIRS = re.compile(r"gloo|NCCL|TCPStore|c10d", re.IGNORECASE)
_FRAMES = "\nException raised from "  # PyTorch's own, in C++
WORDS = 600  # characters of an error


class RestartableError(Exception):
    """This rank failed in a way that ends all ranks, and that may not happen again when they
    restart."""


class LostRank(RestartableError):
    """Another rank is gone without a word, or does not come."""

    def __init__(self, text: str, missing: Sequence[int] = ()) -> None:
        """missing: who has not come, as far as that is known."""
        super().__init__(text)
        self.missing = tuple(missing)


class LostProcess(RuntimeError):
    """Processes of the training were lost more often than it may begin again."""


class FailedRank(RuntimeError):
    """Another rank failed, in these words: its error itself is there."""


@dataclass(frozen=True)
class Ranks:
    """One of `size` processes; `local` is its number on this host, None where nobody has said."""

    rank: int = 0
    size: int = 1
    local: int | None = 0
    group: Any = None  # that they agree in; None: that of all collectives

    @property
    def is_lead(self) -> bool:
        """Return whether this is rank 0, which logs and writes."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. All must call it, in the same order."""
        if self.is_alone:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def make_side_group(self) -> Ranks:
        """Return the same ranks with a process group of their own, so that another thread can
        call `all_gather` beside the training without mixing up messages. All must call it."""
        return self if self.is_alone else replace(self, group=dist.new_group(backend="gloo"))

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on all ranks. All must call it."""
        if self.is_alone:
            return value
        holder = [value]
        dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def broadcast_flag(self, is_so: bool) -> bool:
        """Return rank 0's `is_so` on all ranks. All must call it; it takes a tenth of a
        millisecond."""
        if self.is_alone:
            return is_so
        flag = torch.tensor(is_so, dtype=torch.uint8)
        dist.broadcast(flag, src=0)
        return bool(flag)

    def mean(self, tensor: Tensor) -> Tensor:
        """Average the tensor over the ranks, in place, in the device's stream. All must call it."""
        if not self.is_alone:
            dist.all_reduce(tensor)
            tensor /= self.size
        return tensor

    def sum_over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sums over the ranks of values of the same names. All must call it."""
        by_rank = self.all_gather(dict(values))
        return {name: sum(of[name] for of in by_rank) for name in values}

    @torch.no_grad()
    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give all ranks the buffers of rank 0: running statistics differ, since each saw other
        rows."""
        if not self.is_alone:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)

    def count_most_rows(self, rows: int) -> int:
        """Return the largest number of rows that a rank gets of so many."""
        return -(-rows // self.size)


def read_ranks_from_environment(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return the ranks that a launcher such as torchrun has set; alone where none has.

    SLURM's number of a process on its host is taken where it is of this very process: a command
    that runs inside of an allocation has that of the shell.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return Ranks()
    rank, local = environment["RANK"], environment.get("LOCAL_RANK")
    if local is None and environment.get("SLURM_PROCID") == rank:
        local = environment.get("SLURM_LOCALID")
    return Ranks(int(rank), int(environment["WORLD_SIZE"]), None if local is None else int(local))


@dataclass(frozen=True)
class Meeting:
    """What ranks that have joined leave for each other."""

    ranks: Ranks = Ranks()
    store: Any = None  # no other thread of this process may wait at it

    def explain_loss(self, error: Exception) -> FailedRank | LostRank:
        """Return what ends this rank after an error that another one is gone: the words of a rank
        that failed, where it stored some; else who did not come. All who are left call it."""
        said = describe_peer_error(error)
        until_s, missing = time.monotonic() + FAILURE_WAIT_S, list(range(self.ranks.size))
        try:
            self.store.set(f"{_WAITING}/{self.ranks.rank}", "")
            while missing and time.monotonic() < until_s:
                if self.store.check([_FAILURE]):
                    failure = json.loads(self.store.get(_FAILURE))
                    return FailedRank(f"rank {failure['rank']}: {failure['text']}")
                missing = [r for r in missing if not self.store.check([f"{_WAITING}/{r}"])]
                time.sleep(0.05)
            if _LATE.search(said) is None:  # it is gone: whoever started it says how it ended
                return LostRank(f"another rank was lost ({said})")
            named = "; ".join(f"rank {r} ({self._locate(r)}) did not come" for r in missing)
        except RuntimeError:
            keeper = "the launcher" if _is_kept_by_launcher() else "rank 0"
            return LostRank(f"{keeper} does not answer ({said})")
        return LostRank(f"{named or 'a rank did not come'} ({said})", missing)

    def _locate(self, rank: int) -> str:
        """Return the host and the process of a rank, as it stored them when it joined."""
        return str(self.store.get(f"{_HERE}/{rank}").decode())


@contextmanager
def join_ranks(
    ranks: Ranks, device: torch.device, *, wait_s: float, timeout_s: float
) -> Iterator[Meeting]:
    """Inside, the ranks hear each other: tensors by what the device has, plain values by gloo.
    wait_s: for all to come. timeout_s: for one that does not come later on.

    Raises LostRank where one does not come, and ConfigError where they cannot meet there.
    """
    if ranks.is_alone:
        yield Meeting()
        return
    # Here: not every PyTorch is built with them.
    from torch.distributed.distributed_c10d import PrefixStore

    # The launcher's store still holds what lost processes and trainings before this one left there.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"headroom/{next(_joined)}"
    backend = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}.get(device.type, "gloo")
    try:
        tcp = _open_store(ranks, wait_s)
        store = PrefixStore(attempt, PrefixStore(prefix, tcp))
        _wait_for_all(store, ranks, wait_s)
        dist.init_process_group(
            backend,
            store=store,
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        if is_lost_peer(error):
            raise LostRank(
                f"another rank was lost at the start: {describe_peer_error(error)}"
            ) from None
        raise shorten_peer_error(error) from None
    own = tcp.clone()  # at the other one threads of PyTorch's wait
    own.set_timeout(timedelta(seconds=STORE_S))
    try:
        yield Meeting(ranks, PrefixStore(attempt, PrefixStore(prefix, own)))
    finally:
        dist.destroy_process_group()


def _is_kept_by_launcher() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_store(ranks: Ranks, wait_s: float) -> Any:
    """Return where the ranks meet: kept by their launcher, else by the first of them."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = ranks.is_lead and not _is_kept_by_launcher()
    try:
        return TCPStore(
            *place,
            ranks.size,
            serves,
            timedelta(seconds=wait_s),
            wait_for_workers=False,  # it would not say who is missing
            multi_tenant=True,
        )
    except dist.DistNetworkError as error:
        if serves:
            raise ConfigError(
                f"MASTER_PORT: {_meeting_place()} cannot be opened "
                f"({describe_peer_error(error)}); choose another"
            ) from None
        raise LostRank(
            f"launch.timeout_s: rank 0 did not come to {_meeting_place()} within {wait_s:g} s"
        ) from None


def _meeting_place() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _wait_for_all(store: Any, ranks: Ranks, wait_s: float) -> None:
    """Return when all have come. Raises LostRank with the names of those who have not."""
    store.set(f"{_HERE}/{ranks.rank}", f"{platform.node()}, process {os.getpid()}")
    began_s, is_told = time.monotonic(), False
    while missing := [r for r in range(ranks.size) if not store.check([f"{_HERE}/{r}"])]:
        waited_s = time.monotonic() - began_s
        text = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
        if waited_s > wait_s:
            raise LostRank(
                f"launch.timeout_s: {text} of {ranks.size} did not come to {_meeting_place()} "
                f"within {wait_s:g} s",
                missing,
            )
        if not is_told and waited_s > WAITED_S:
            log.warning("%s of %d: waited for, up to %g s", text, ranks.size, wait_s)
            is_told = True
        time.sleep(ASK_EVERY_S)


def refuse_different(ranks: Ranks, things: Mapping[str, Any]) -> None:
    """Raise ConfigError on all ranks where they were not started with the same things, by name."""
    by_rank = ranks.all_gather(dict(things))
    for name, ours in by_rank[0].items():
        for rank, theirs in enumerate(by_rank):
            if theirs.get(name) != ours:
                difference = f"{ours!r:.80} on rank 0 and {theirs.get(name)!r:.80} on rank {rank}"
                raise ConfigError(
                    f"{name}: is {difference}; start all processes of a training alike"
                )


def store_micro_batch(store: Any, rows: int) -> None:
    """Store the micro-batch rows that the processes should try after their restart, behind
    those stored before."""
    store = store.underlying_store
    store.set(f"{_SMALLER}/{store.add(_SMALLER, 1)}", str(rows))


def read_micro_batches(store: Any) -> list[int]:
    """Return the micro-batch rows that processes stored before their restarts, in order."""
    if store is None:
        return []
    store = store.underlying_store
    count = store.add(_SMALLER, 0)
    return [int(store.get(f"{_SMALLER}/{n}")) for n in range(1, count + 1)]


def store_failure(store: Any, ranks: Ranks, text: str) -> None:
    """Store for the other ranks why this one fails."""
    if store is not None:
        store.set(_FAILURE, json.dumps({"rank": ranks.rank, "text": text}))


def is_lost_peer(error: BaseException) -> bool:
    """Return whether this is the error that a rank gets when another one is gone."""
    if isinstance(error, (LostRank, dist.DistStoreError)):
        return True
    text = get_error_message(error)
    if isinstance(error, (dist.DistNetworkError, dist.DistBackendError)):
        return _GONE.search(text) is not None
    is_plain = type(error) is RuntimeError and _THEIRS.search(text) is not None
    return is_plain and _GONE.search(text) is not None


def describe_peer_error(error: BaseException) -> str:
    """Return what an error of gloo, NCCL or the store says, in a line and without places in C++."""
    text = " ".join(get_error_message(error).partition(_FRAMES)[0].split())
    # As DistributedDataParallel wraps it.
    text = re.sub(
        r"Got the following error when running the callback: \w+: (.*?) At: .*", r"\1", text
    )
    return re.sub(r"\[\S+\.\w+:\d+\] ", "", text)[:WORDS]


def shorten_peer_error(error: RuntimeError) -> RuntimeError:
    """Return the same error in such words, where it is one of theirs."""
    return type(error)(describe_peer_error(error)) if isinstance(error, dist.DistError) else error
