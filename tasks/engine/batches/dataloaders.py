"""A DataLoader of the user's own, seen by the loop like any other rows: its batches moved to the
device, its order and batch size left to it. It refuses a loader that is empty, and a batch that is
not a pair of inputs and targets.
"""

from __future__ import annotations

import logging
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from threading import current_thread, main_thread
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from tasks.engine.base import nested
from tasks.engine.base.import_paths import said, told_of
from tasks.engine.base.units import mebibytes
from tasks.engine.batches.pinned_staging import PINNING, Mark
from tasks.engine.batches.shared_loader import IndexBatches
from tasks.engine.files.source_data import DataError
from tasks.engine.memory.memory_meter import is_oom
from tasks.engine.models.structured_inputs import LABELS

ENDLESS = sys.maxsize  # steps of an epoch that nobody knows the end of
DEATHS: list[str] = []  # what PyTorch said of workers that ended, not told yet
WORKER_END_S = 5.0  # at most, from its broken connection to the end of a worker's process

SHARED = "/dev/shm"
# What PyTorch says of a file that finds no room there, and of a worker that has written past it.
NO_SHARED_MEMORY = re.compile(
    r"unable to (allocate|open) shared memory|killed by signal: Bus error"
)

log = logging.getLogger(__name__)
Look = Callable[[Any, int], Any]  # the targets of a batch and its number: what losses take


class Loaded:
    """Batches of a loader, each (inputs, targets): tensors, or tuples, lists and dicts of them; or
    one dict with an entry labels, which are its targets.

    Rows of one epoch are those that the loader announces until a whole epoch was counted.
    """

    residency = "loader"
    begins_again = False
    weight, rows_of_whole = 1.0, None
    copy_s = None  # copies run in the stream that computes, where the h2d phase shows them

    def __init__(
        self, loader: Any, device: torch.device, *, look: Look = lambda targets, batch: targets
    ) -> None:
        """look: at the targets of each batch, on the host."""
        self._loader, self._device, self._look = loader, device, look
        self._done = 0  # batches of the epoch
        self.batch_rows = 0  # of the batch given last, those of the other ranks with them
        self._random: Tensor | None = None  # numbers to draw from, once the loader iterates
        self._batches = _length(loader)
        self.batch_size = _batch_size(loader)
        self._rows = _announced_rows(loader, self._batches, self.batch_size)
        self._pinned = bool(getattr(loader, "pin_memory", False)) and device.type in PINNING
        workers = getattr(loader, "num_workers", 0)
        self.reason = (
            f"a loader of its own: batches of {self.batch_size} from "
            f"{f'{workers} worker processes' if workers else 'this process'}, "
            f"{'pinned' if self._pinned else 'not pinned'}"
        )

    def __len__(self) -> int:
        return self._rows

    def steps(self, batch_size: int) -> int:
        """The loader's own number of batches, whatever the size asked for; ENDLESS without one."""
        return self._batches

    def order(self, *, seed: int, epoch: int) -> Tensor:
        """None: the loader has its own."""
        return torch.empty(0, dtype=torch.int64)

    def shuffled(self, batch_size: int, order: Tensor, mark: Mark) -> Iterator[tuple[Any, Any]]:
        """The loader's batches in its own order and of its own size."""
        return self._read(mark)

    def in_order(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        return self._read(lambda phase: None)

    def state(self) -> dict[str, Any]:
        generators = [g.get_state() for g in self._generators()]
        state: dict[str, Any] = {"generators": generators, "done": self._done}
        if self._done and hasattr(self._loader, "state_dict"):
            state["loader"] = self._loader.state_dict()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        for generator, kept in zip(self._generators(), state["generators"], strict=False):
            generator.set_state(kept)
        if "loader" in state and hasattr(self._loader, "load_state_dict"):
            self._loader.load_state_dict(state["loader"])
            self._done = state["done"]
            # A DataLoader that begins to iterate draws a number, as it had done by then.
            self._random = torch.get_rng_state()
        elif state["done"]:
            self.begins_again = True
            log.warning(
                "data.source: this loader has no state_dict: its epoch, of which %s batches were "
                "done, begins again",
                f"{state['done']:,}",
            )

    def _generators(self) -> list[torch.Generator]:
        names = ("sampler", "batch_sampler")
        held = (self._loader, *(getattr(self._loader, name, None) for name in names))
        found = [getattr(holder, "generator", None) for holder in held]
        return [g for g in found if isinstance(g, torch.Generator)]

    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def give_back(self) -> bool:
        return False

    def close(self) -> None:
        """End the processes of a loader whose workers outlive an epoch (persistent_workers)."""
        # Private names, since PyTorch has no public way but to drop the loader, which is not ours.
        kept = getattr(self._loader, "_iterator", None)
        if kept is not None and hasattr(kept, "_shutdown_workers"):
            kept._shutdown_workers()
            self._loader._iterator = None

    def _read(self, mark: Mark) -> Iterator[tuple[Any, Any]]:
        # Held by this frame alone: worker processes end with the iterator.
        found = _told(iter(self._loader))
        _keep_deaths()
        sampler = getattr(self._loader, "batch_sampler", None)
        rows, done = 0, self._done if self._random is not None else 0
        if self._random is not None:
            torch.set_rng_state(self._random)
            self._random = None
        for number, batch in enumerate(found, start=1 + done):
            mark("data_wait")
            inputs, targets = _pair(batch)
            inputs, targets = self._moved(inputs), self._moved(self._look(targets, number))
            if self._device.type != "cpu":
                mark("h2d")
            self.batch_rows = _rows(targets)
            if isinstance(sampler, IndexBatches) and sampler.drawn:
                self.batch_rows = sampler.drawn.popleft()
            rows += self.batch_rows
            self._done = number
            yield inputs, targets
        self._done, self.begins_again = 0, False
        if rows == 0 and not done:
            raise DataError("data.source: the loader gave no rows; give it at least one")
        if not done:
            self._rows = rows

    def _moved(self, part: Any) -> Any:
        return nested.mapped(
            part, lambda tensor: tensor.to(self._device, non_blocking=self._pinned)
        )


def _told(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches; what the user's code raises is told in one sentence."""
    while True:
        try:
            if DEATHS:
                raise RuntimeError(DEATHS[0])
            batch = next(batches)
        except StopIteration as error:
            row = _row_that_stopped(error)
            if row is None:
                return
            told = f"{told_of(error)}{row}, which would end the epoch there; raise another error"
            died = ""
        except Exception as error:
            if is_oom(error):
                raise
            told, died = told_of(error), DEATHS[0] if DEATHS else said(error)
            DEATHS.clear()
            if isinstance(error, ConnectionError) and (workers := getattr(batches, "_workers", ())):
                _await_an_end(workers)
                died = "DataLoader worker ended while it sent a batch"
        else:
            yield batch
            continue
        if NO_SHARED_MEMORY.search(died):
            raise DataError(
                f"data.source: the worker processes of the loader hand batches over in {SHARED}, "
                f"which is too small for them{_size_of(SHARED)}; give it more (docker run "
                "--shm-size=2g), take fewer num_workers or smaller batches, or num_workers=0"
            )
        if died.startswith("DataLoader worker"):  # by no word of the data
            raise RuntimeError(
                f"data.source: a worker process of the loader has died ({' '.join(died.split())}), "
                "as where memory ran out on this host; take fewer num_workers, or 0 to see an "
                "error of its code"
            )
        raise DataError(f"data.source: the loader raised: {told}")


def _size_of(folder: str) -> str:
    """Its size in words, where it is known."""
    try:
        return f" (it has {mebibytes(shutil.disk_usage(folder).total / 1024**2)})"
    except OSError:
        return ""


def _keep_deaths() -> None:
    """Let the death of a worker be told where batches are read: PyTorch raises it from its handler
    of SIGCHLD, inside of whatever runs then, such as the making of a file that then stays. While
    it waits for a batch it looks for itself, every 5 s."""
    if not hasattr(signal, "SIGCHLD") or current_thread() is not main_thread():
        return
    raises = signal.getsignal(signal.SIGCHLD)
    if getattr(raises, "__module__", "") != signal_handling.__name__ or not callable(raises):
        return

    def keep(number: int, frame: FrameType | None) -> None:
        try:
            raises(number, frame)
        except RuntimeError as error:
            DEATHS.append(str(error))

    signal.signal(signal.SIGCHLD, keep)


def _row_that_stopped(error: StopIteration) -> str | None:
    """Which row of a data set that is read by index raised this, as " at row 7", empty where it
    is not known; None where it is the end of the loader, for which PyTorch takes both."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if any(frame.f_code.co_name == "reraise" for frame in frames):
        return ""  # raised in a worker process
    for frame in frames:
        if isinstance(frame.f_locals.get("self"), _MapDatasetFetcher):
            index = next((f.f_locals["idx"] for f in reversed(frames) if "idx" in f.f_locals), None)
            return f" at row {index}" if isinstance(index, int) else ""
    return None


def _await_an_end(workers: Sequence[BaseProcess]) -> None:
    """Until the worker whose connection broke has ended: PyTorch raises from the signal of its end
    wherever this thread is then, and amid a lock of the loader's queues that lock stays held."""
    ended = connection.wait([worker.sentinel for worker in workers], WORKER_END_S)
    for worker in workers:
        if worker.sentinel in ended:
            worker.join()


def _length(loader: Any) -> int:
    try:
        batches = len(loader)
    except TypeError:  # its data set has none
        return ENDLESS
    if batches < 1:
        raise DataError(
            f"data.source: the loader must have at least one batch (got {batches}); "
            "give it more rows, a smaller batch_size, or drop_last=False"
        )
    return batches


def _batch_size(loader: Any) -> int:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(size, int) or size < 1:
        raise DataError(
            f"data.source: the loader must tell its batch size (got {size}); set batch_size, or "
            "give its batch_sampler an attribute batch_size: the rows of its largest batch"
        )
    return size


def _announced_rows(loader: Any, batches: int, batch_size: int) -> int:
    if batches == ENDLESS:
        return batch_size
    most = batches * batch_size
    try:
        return min(most, len(loader.sampler))
    except (AttributeError, TypeError):  # no sampler, or an endless one
        return most


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        labels = next((name for name in LABELS if name in batch), None)
        if labels is not None:
            return batch, batch[labels]
    got = type(batch).__name__
    if isinstance(batch, (tuple, list)):
        got += f" of {len(batch)}"
    raise DataError(
        "data.source: a batch of the loader must be a pair of inputs and targets, or a dict with "
        f"labels (got a {got}); return (inputs, targets) from its data set or collate_fn"
    )


def _rows(targets: Any) -> int:
    """Rows of the first tensor found in the targets."""
    first = next(nested.tensors(targets), None)
    if first is None:
        raise DataError(
            "data.source: the targets of a batch must be a tensor, or hold one "
            f"(got {_kind(targets)}); return tensors from the data set or collate_fn"
        )
    return len(first) if first.dim() else 1


def _kind(targets: Any) -> str:
    while isinstance(targets, (tuple, list)) and targets:
        targets = targets[0]
    return type(targets).__name__
