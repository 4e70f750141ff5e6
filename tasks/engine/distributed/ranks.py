"""The processes (ranks) that train one model together: how they exchange plain values, what a
failing one stores for the others, and by their heartbeats who has not come. A training of one
process has `Ranks()`, whose methods return its own values. Heartbeats end nothing: that is for the
time-out of PyTorch's process group.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.engine.base.import_paths import get_error_message
from tasks.engine.settings.read_settings import ConfigError

BEAT_S = 5.0
TELL_AFTER_S = 30.0  # of silence; then after twice as long, and so on
BEATS = 3  # that one who lives may miss: its interpreter may be held, or its host be busy
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beat:
    """What a rank last told of itself."""

    number: int  # how often it has
    calls: int  # collectives that it has come to
    who: str  # host and process
    place: str  # where the code of its main thread is

    def write(self) -> str:
        return json.dumps([self.number, self.calls, self.who, self.place])


class Heartbeats:
    """A thread beside the training of one rank, until the `with` block ends."""

    def __init__(
        self,
        store: Any,
        *,
        keeper: str,
        rank: int,
        size: int,
        calls: Callable[[], int],
        timeout_s: float,
    ) -> None:
        """store: where all of them tell, kept by `keeper`; no other thread of this process may wait
        at it. calls: the collectives that this rank has come to."""
        self._store, self._keeper, self._rank, self._size = store, keeper, rank, size
        self._calls, self._timeout_s = calls, timeout_s
        self._beat_s = min(BEAT_S, timeout_s / 10)
        self._tell_after_s = min(TELL_AFTER_S, timeout_s / 2)
        self._number, self._last = 0, -1
        self._moved_s = time.monotonic()  # when this rank last came to a collective
        self._seen: dict[int, tuple[int, float]] = {}  # number of the last beat, and when it came
        self._beats: list[Beat] = []
        self._over = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(self._beat_s)  # a store that has gone may keep it longer

    def describe_silence(self) -> str:
        """Return who has not come, and for how long nothing has gone on: "no step for 60 s: rank 1
        has not come"; empty where nobody is known to be missing."""
        silent_s = time.monotonic() - self._moved_s
        if silent_s < self._tell_after_s:
            return ""
        if self._is_quiet(self._rank):
            return f"no step for {silent_s:.0f} s, and {self._keeper} does not answer"
        named = "; ".join(map(self._describe, self.missing()))
        return f"no step for {silent_s:.0f} s: {named}" if named else ""

    def _run(self) -> None:
        tell_at_s, is_over = self._tell_after_s, False
        while not is_over:  # at once: one that stops before it has told of itself has no name
            try:
                self._exchange()
            except RuntimeError as error:  # who keeps the store is gone, or stopped
                log.debug("no heartbeat: %s", error)
            silent_s = time.monotonic() - self._moved_s
            if silent_s < self._tell_after_s:
                tell_at_s = self._tell_after_s
            elif silent_s >= tell_at_s and self._tells() and (told := self.describe_silence()):
                tell_at_s = 2 * silent_s
                log.warning("%s (given up after %g s: launch.timeout_s)", told, self._timeout_s)
            is_over = self._over.wait(self._beat_s)

    def _exchange(self) -> None:
        """Tell of this rank, and read what the others have told where nothing goes on."""
        calls, now_s = self._calls(), time.monotonic()
        if calls != self._last:
            self._last, self._moved_s = calls, now_s
        self._number += 1
        beat = Beat(self._number, calls, f"{platform.node()}, process {os.getpid()}", self._place())
        self._store.set(f"beat/{self._rank}", beat.write())
        # So early that it is known of each, when it is told of, whether it still tells anything.
        if now_s - self._moved_s < self._tell_after_s - (BEATS + 2) * self._beat_s:
            self._seen, self._beats = {}, []
            return
        keys = [f"beat/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):  # they have just begun
            return
        self._beats = [Beat(*json.loads(text)) for text in self._store.multi_get(keys)]
        for rank, one in enumerate(self._beats):
            if self._seen.get(rank, (-1, 0.0))[0] != one.number:
                self._seen[rank] = one.number, now_s

    def _is_quiet(self, rank: int) -> bool:
        """Whether it tells nothing of itself any more."""
        _, seen_s = self._seen.get(rank, (0, time.monotonic()))
        return time.monotonic() - seen_s > BEATS * self._beat_s

    def missing(self) -> list[int]:
        """Return the ranks that have not come to what the first of them has come to."""
        most = max((beat.calls for beat in self._beats), default=0)
        return [r for r, beat in enumerate(self._beats) if beat.calls < most or self._is_quiet(r)]

    def _tells(self) -> bool:
        """Whether it is this rank that tells: the first one that still could."""
        return all(map(self._is_quiet, range(self._rank)))

    def _describe(self, rank: int) -> str:
        beat = self._beats[rank]
        what = "tells nothing any more" if self._is_quiet(rank) else f"is at {beat.place}"
        return f"rank {rank} has not come ({beat.who}; it {what})"

    def _place(self) -> str:
        """Where the main thread is, as far as that is not PyTorch's own code."""
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            if not str(frame.f_globals.get("__name__", "")).startswith("torch"):
                code = frame.f_code
                return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}, {code.co_name}"
            frame = frame.f_back
        return "its end"


T = TypeVar("T")
ASK_EVERY_S = 0.1
WAITED_S = 30.0  # until it is told whom the others wait for
STORE_S = 5.0  # for an answer of the store
FAILURE_WAIT_S = (
    3.0  # for the word of another rank's failure, which comes beside the broken connection
)
_FAILURE, _SMALLER = "failure", "smaller"
_joined = count()  # how often this process has
# What is heard where the process at the other end is gone, or does not come: by gloo, NCCL and the
# store. NCCL has one class of errors for that and for all else, such as two ranks on one GPU.
_GONE = re.compile(
    r"connection (was likely )?(closed|reset|refused)|broken pipe|recvValue|ncclRemoteError"
    r"|remote process exit|communicator was aborted|timed? ?out|socket closed"
    r"|no route to host|unreachable|failed to (recv|send)",
    re.IGNORECASE,
)
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
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def make_side_group(self) -> Ranks:
        """Return the same ranks with a process group of their own, so that another thread can
        call `all_gather` beside the training without mixing up messages. All must call it."""
        return self if self.is_alone else replace(self, group=dist.new_group(backend="gloo"))

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on all ranks. All must call it."""
        if self.is_alone:
            return value
        found = [value]
        dist.broadcast_object_list(found, src=0)
        return found[0]

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
        found = self.all_gather(dict(values))
        return {name: sum(of[name] for of in found) for name in values}

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

    store: Any = None  # where a failure is left
    heartbeats: Heartbeats | None = None

    def lost(self, error: Exception) -> LostRank:
        """Return what ends this rank where it heard this error, and another one is gone."""
        silence = self.heartbeats.describe_silence() if self.heartbeats is not None else ""
        missing = self.heartbeats.missing() if self.heartbeats is not None and silence else ()
        return LostRank(
            f"{silence or 'another rank was lost'} ({describe_peer_error(error)})", missing
        )


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
    with Heartbeats(
        PrefixStore(attempt, PrefixStore(prefix, own)),
        keeper="the launcher" if _is_kept_by_launcher() else "rank 0",
        rank=ranks.rank,
        size=ranks.size,
        calls=_count_calls(device),
        timeout_s=timeout_s,
    ) as heartbeats:
        try:
            yield Meeting(store, heartbeats)
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
            f"launch.wait_s: rank 0 did not come to {_meeting_place()} within {wait_s:g} s"
        ) from None


def _meeting_place() -> str:
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def _wait_for_all(store: Any, ranks: Ranks, wait_s: float) -> None:
    """Return when all have come. Raises LostRank with the names of those who have not."""
    store.set(f"here/{ranks.rank}", "")
    began_s, is_told = time.monotonic(), False
    while missing := [r for r in range(ranks.size) if not store.check([f"here/{r}"])]:
        waited_s = time.monotonic() - began_s
        text = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
        if waited_s > wait_s:
            raise LostRank(
                f"launch.wait_s: {text} of {ranks.size} did not come to {_meeting_place()} within "
                f"{wait_s:g} s",
                missing,
            )
        if not is_told and waited_s > WAITED_S:
            log.warning("%s of %d: waited for, up to %g s", text, ranks.size, wait_s)
            is_told = True
        time.sleep(ASK_EVERY_S)


def _count_calls(device: torch.device) -> Callable[[], int]:
    """Return what tells how many collectives this rank has come to, by PyTorch's own count."""
    group = dist.distributed_c10d._get_default_group()
    kinds = {"cpu"} | ({device.type} & {"cuda"})
    backends: list[Any] = [group._get_backend(torch.device(kind)) for kind in sorted(kinds)]
    return lambda: sum(backend._get_sequence_number_for_group() for backend in backends)


def refuse_different(ranks: Ranks, things: Mapping[str, Any]) -> None:
    """Raise ConfigError on all ranks where they were not started with the same things, by name."""
    found = ranks.all_gather(dict(things))
    for name, ours in found[0].items():
        for rank, theirs in enumerate(found):
            if theirs.get(name) != ours:
                told = f"{ours!r:.80} on rank 0 and {theirs.get(name)!r:.80} on rank {rank}"
                raise ConfigError(f"{name}: is {told}; start all processes of a training alike")


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


def read_failure(store: Any) -> str | None:
    """Return which rank failed, and why; None where none has stored it: that rank was lost."""
    until_s = time.monotonic() + FAILURE_WAIT_S
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
