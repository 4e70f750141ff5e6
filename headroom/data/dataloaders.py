"""Reads the batches of a user's own loader: counts them, tells what is wrong with one and in which
row, and gives each rank of a training its own part of every batch, in the order of one process.
Their targets are checked on the host and brought into the types that losses take before they are
sent to a device, where a label out of range would make CUDA fail for the rest of the process. It
refuses labels that no class has, numbers that are not finite, and a loader that several processes
cannot share.
"""

from __future__ import annotations

import copy
import logging
import random
import re
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from threading import current_thread, main_thread
from traceback import walk_tb
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from headroom.base import nested
from headroom.base.import_paths import describe_error, get_error_message
from headroom.base.raw_inputs import LABELS
from headroom.base.units import format_mebibytes
from headroom.data.batch import Batch
from headroom.data.prefetch import Mark
from headroom.data.source_data import DataError
from headroom.watch.out_of_memory import is_oom
from headroom.watch.pinned_memory import PINNING

IGNORED = -100  # the label that PyTorch's losses skip by default
REMEDY = "set data.task to own, and train.loss to a function of yours"


def find_task(requested: str, inputs: Any, targets: Any) -> str:
    """Return data.task, or the task that the targets of a first batch imply; own, where these stand
    among the inputs and imply none: a model that takes them may give its loss itself. Raises
    DataError."""
    if requested != "auto":
        return requested
    is_taken = isinstance(inputs, Mapping) and any(name in inputs for name in LABELS)
    if is_taken and not isinstance(targets, Tensor):
        return "own"
    if not isinstance(targets, Tensor):
        raise DataError(
            f"data.task: targets that are a {type(targets).__name__} do not tell the task; {REMEDY}"
        )
    few = targets.dim() == 2 and targets.shape[1] > 1
    binary = few and bool(((targets == 0) | (targets == 1)).all())
    if targets.is_floating_point():
        return "multilabel" if binary else "regression"
    if targets.dim() <= 1 or (targets.dim() == 2 and targets.shape[1] == 1):
        return "classification"
    first = next(nested.find_tensors(inputs), None)
    if first is not None and targets.dtype != torch.bool and first.shape == targets.shape:
        return "tokens"
    if binary:
        return "multilabel"
    if is_taken:  # of two axes they are rows of tokens, also where the inputs are none
        return "tokens" if targets.dim() == 2 and targets.dtype != torch.bool else "own"
    raise DataError(
        f"data.task: targets of shape {tuple(targets.shape)} and type {_describe_tensor(targets)} "
        f"do not tell the task; {REMEDY}"
    )


@dataclass(frozen=True)
class TargetConverter:
    """Converts a batch's targets to what a loss takes. outputs: classes; 0 where unknown.

    is_own: for a loss of the user's own, which takes them as they are.
    """

    task: str
    outputs: int
    part: str  # training or validation
    is_own: bool = False

    def __call__(self, targets: Any, batch: int) -> Any:
        """batch: from 1, for the message. Raises DataError."""
        if not isinstance(targets, Tensor):
            return targets
        if self.task in ("classification", "tokens") and not self.is_own:
            return self._convert_classes(targets, batch)
        if self.task == "own":
            return targets
        if _is_on_host(targets):
            self._refuse_unfinite(targets, batch)
        if self.is_own:
            return targets
        if targets.dim() <= 1:
            targets = targets.reshape(len(targets), -1)
        return targets.float()

    def _convert_classes(self, targets: Tensor, batch: int) -> Tensor:
        if targets.is_floating_point():
            raise DataError(
                f"data.source: {self._name_batch(batch)}: the labels of {self._name_task()} must "
                f"be whole numbers (got {_describe_tensor(targets)}); return them as int64, or set "
                "data.task to regression"
            )
        if self.task == "classification" and targets.dim() == 2 and targets.shape[1] == 1:
            targets = targets[:, 0]
        wide = targets.long()
        if _is_on_host(wide):
            self._refuse_unknown(wide, batch)
        return wide

    def _refuse_unknown(self, wide: Tensor, batch: int) -> None:
        skipped = wide == IGNORED if self.task == "tokens" else torch.zeros_like(wide).bool()
        bad = (wide < 0) & ~skipped
        if self.outputs:
            bad |= wide >= self.outputs
        if bool(bad.any()):
            at = bad.nonzero()[0].tolist()
            raise DataError(self._describe_unknown(int(wide[tuple(at)]), at, batch))

    def _describe_unknown(self, label: int, at: list[int], batch: int) -> str:
        most = f"0 to {self.outputs - 1}" if self.outputs else "0 on"
        column = f", position {at[1] + 1}" if len(at) > 1 else ""
        why = ", the label that losses skip" if label == IGNORED else ""
        return (
            f"data.source: {self._name_batch(batch)}, row {at[0] + 1}{column}: a label must be "
            f"from {most} (got {label}{why}); mend or drop such rows"
        )

    def _refuse_unfinite(self, targets: Tensor, batch: int) -> None:
        bad = ~targets.isfinite()
        if bool(bad.any()):
            at = bad.nonzero()[0].tolist()
            raise DataError(
                f"data.source: {self._name_batch(batch)}, row {at[0] + 1}: a target must be a "
                f"finite number (got {targets[tuple(at)].item()}); mend or drop such rows"
            )

    def _name_batch(self, batch: int) -> str:
        return f"batch {batch} of the {self.part} loader"

    def _name_task(self) -> str:
        return "tokens" if self.task == "tokens" else "a classification"


def _is_on_host(targets: Tensor) -> bool:
    """Return whether a look at the values waits for no device."""
    return targets.device.type == "cpu"


def _describe_tensor(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


_END = object()


@dataclass(frozen=True)
class BatchShare:
    """A rank's part of each batch: parts lie side by side, and differ by one row at most."""

    rank: int
    size: int

    def find_slice(self, rows: int) -> slice:
        """Return this rank's slice of a batch of that many rows; the first row, to fill in,
        where no row is left for it."""
        first, last = (self._begin(rank, rows) for rank in (self.rank, self.rank + 1))
        return slice(first, last) if last > first else slice(0, 1)

    def compute_weight(self, rows: int) -> float:
        """Return how much this part counts in the mean over the ranks; 0 where it only fills in."""
        own = self._begin(self.rank + 1, rows) - self._begin(self.rank, rows)
        return own * self.size / max(1, rows)

    def _begin(self, rank: int, rows: int) -> int:
        return rank * (rows // self.size) + min(rank, rows % self.size)


class RankBatchSampler:
    """A batch sampler that gives this rank's part of what another one draws.

    What that one draws of the global random numbers of PyTorch, Python and NumPy comes from
    `generator` instead: those of the ranks part ways, as their models and rows draw from them.
    """

    def __init__(self, whole: Any, share: BatchShare, *, seed: int) -> None:
        self._whole, self._share = whole, share
        self.batch_size = getattr(whole, "batch_size", None)
        self.generator = torch.Generator().manual_seed(seed % 2**63)
        # Rows of each whole batch that is on its way, of several ranks: it is read ahead.
        self.drawn: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._whole)

    def __iter__(self) -> Iterator[Any]:
        self.drawn.clear()
        seed = int(torch.randint(2**32, (), generator=self.generator))
        of_epoch = random.Random(seed).getstate(), np.random.MT19937(seed)
        drawn, of_python = self._draw(partial(iter, self._whole), *of_epoch)
        return self._iterate_parts(drawn, of_python, of_epoch[1])

    def _iterate_parts(
        self, batches: Iterator[Any], of_python: Any, of_numpy: np.random.MT19937
    ) -> Iterator[Any]:
        while True:
            batch, of_python = self._draw(partial(next, batches, _END), of_python, of_numpy)
            if batch is _END:
                return
            if self._share.size > 1:
                batch = batch if hasattr(batch, "__getitem__") else list(batch)
                self.drawn.append(len(batch))
                batch = batch[self._share.find_slice(len(batch))]
            yield batch

    def _draw(
        self, draw: Callable[[], Any], of_python: Any, of_numpy: np.random.MT19937
    ) -> tuple[Any, Any]:
        """Return what it gives, with the state of Python's numbers then."""
        kept = torch.get_rng_state(), random.getstate(), mtrand.get_bit_generator()
        torch.set_rng_state(self.generator.get_state())
        random.setstate(of_python)
        mtrand.set_bit_generator(of_numpy)  # 0.3 us, where its state would take 100
        try:
            return draw(), random.getstate()
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(kept[0])
            random.setstate(kept[1])
            mtrand.set_bit_generator(kept[2])


def share_loader(loader: Any, *, rank: int, size: int, seed: int) -> Any:
    """Return the loader with this rank's part of each batch; of one process with all of it, in
    the same order.

    One that cannot be split is left as it is in one process; of several it raises DataError.
    """
    what, remedy = _find_split_obstacle(loader)
    if what and size == 1:
        return loader
    if what:
        raise DataError(f"data.source: {what} cannot be split over {size} processes; {remedy}")
    # A copy: it keeps its class, its workers and all else, and a loader takes no other sampler.
    shared = copy.copy(loader)
    batches = RankBatchSampler(loader.batch_sampler, BatchShare(rank, size), seed=seed)
    object.__setattr__(shared, "batch_sampler", batches)
    shared._iterator = None  # of workers that stay, which know the other sampler
    shared.in_order = loader.in_order or size > 1  # as the rows of its batches are counted
    return shared


def _find_split_obstacle(loader: Any) -> tuple[str, str]:
    """Return what about a loader is in the way of splitting it, with the remedy; nothing where it
    can."""
    remedy = "return a Dataset with __getitem__ and __len__, or train in one process"
    if not isinstance(loader, DataLoader):
        return f"a loader that is a {type(loader).__name__} and no DataLoader", remedy
    if isinstance(loader.dataset, IterableDataset):
        return "a loader over an IterableDataset", remedy
    if type(loader).__iter__ is not DataLoader.__iter__:
        return (
            f"a {type(loader).__name__}, which has an __iter__ of its own,",
            "return a plain DataLoader, or train in one process",
        )
    batches = loader.batch_sampler
    if batches is None:
        return "a loader with batch_size=None", "set batch_size, or give it a batch_sampler"
    if isinstance(getattr(batches, "sampler", loader.sampler), DistributedSampler):
        return (
            "a loader with a DistributedSampler, which has split it already,",
            "drop the sampler, and set shuffle=True where it shuffles: Headroom splits each batch",
        )
    try:
        len(loader)
    except TypeError:
        return "a loader without a length", "give its batch_sampler a __len__"
    return "", ""


ENDLESS = sys.maxsize  # steps of an epoch that nobody knows the end of
WORKER_DEATHS: list[str] = []  # what PyTorch said of workers that ended, not told yet
WORKER_END_S = 5.0  # at most, from its broken connection to the end of a worker's process

SHARED = "/dev/shm"
# What PyTorch says of a file that finds no room there, and of a worker that has written past it.
NO_SHARED_MEMORY = re.compile(
    r"unable to (allocate|open) shared memory|killed by signal: Bus error"
)

log = logging.getLogger(__name__)
TargetCheck = Callable[[Any, int], Any]  # the targets of a batch and its number: what losses take


class LoaderBatches:
    """Batches of a loader, each (inputs, targets): tensors, or tuples, lists and dicts of them; or
    one dict with an entry labels, which are its targets. A dict without gets the numbers of its
    rows for targets: its model gives its loss itself.

    Rows of one epoch are those that the loader announces until a whole epoch was counted.
    """

    residency = "loader"
    begins_again = False
    copy_s = None  # copies run in the stream that computes, where the h2d phase shows them

    def __init__(
        self,
        loader: Any,
        device: torch.device,
        *,
        look: TargetCheck = lambda targets, batch: targets,
    ) -> None:
        """look: at the targets of each batch, on the host."""
        self._loader, self._device, self._look = loader, device, look
        self._done = 0  # batches of the epoch
        self.has_targets = True  # of the batch given last: from the loader, no numbers of rows
        self._random: Tensor | None = None  # numbers to draw from, once the loader iterates
        self._batches = _count_batches(loader)
        self.batch_size = _find_batch_size(loader)
        self._rows = _count_announced_rows(loader, self._batches, self.batch_size)
        self._pinned = bool(getattr(loader, "pin_memory", False)) and device.type in PINNING
        workers = self.workers = getattr(loader, "num_workers", 0)
        self.reason = (
            f"a loader of its own: batches of {self.batch_size} from "
            f"{f'{workers} worker processes' if workers else 'this process'}, "
            f"{'pinned' if self._pinned else 'not pinned'}"
        )

    def __len__(self) -> int:
        return self._rows

    def count_steps(self, batch_size: int) -> int:
        """Return the loader's own number of batches, whatever the size asked for; ENDLESS
        without one."""
        return self._batches

    def draw_order(self, *, seed: int, epoch: int) -> Tensor:
        """Return no order: the loader has its own."""
        return torch.empty(0, dtype=torch.int64)

    def iterate_shuffled(self, batch_size: int, order: Tensor, mark: Mark) -> Iterator[Batch]:
        """Yield the loader's batches in its own order and of its own size."""
        return self._read(mark)

    def iterate_in_order(self, batch_size: int) -> Iterator[Batch]:
        return self._read(lambda phase: None)

    def state(self) -> dict[str, Any]:
        generators = [g.get_state() for g in self._list_generators()]
        state: dict[str, Any] = {"generators": generators, "done": self._done}
        if self._done and hasattr(self._loader, "state_dict"):
            state["loader"] = self._loader.state_dict()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        for generator, kept in zip(self._list_generators(), state["generators"], strict=False):
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

    def _list_generators(self) -> list[torch.Generator]:
        names = ("sampler", "batch_sampler")
        held = (self._loader, *(getattr(self._loader, name, None) for name in names))
        generators = [getattr(holder, "generator", None) for holder in held]
        return [g for g in generators if isinstance(g, torch.Generator)]

    def list_tensors(self) -> tuple[Tensor, ...]:
        return ()

    def give_back(self) -> bool:
        return False

    def close(self) -> None:
        """End the worker processes of a loader that outlive an epoch (persistent_workers)."""
        # Private names, since PyTorch has no public way but to drop the loader, which is not ours.
        kept = getattr(self._loader, "_iterator", None)
        if kept is not None and hasattr(kept, "_shutdown_workers"):
            kept._shutdown_workers()
            self._loader._iterator = None

    def _read(self, mark: Mark) -> Iterator[Batch]:
        # Held by this frame alone: worker processes end with the iterator.
        batches = _explain_errors(iter(self._loader))
        _defer_worker_deaths()
        sampler = getattr(self._loader, "batch_sampler", None)
        rows, done = 0, self._done if self._random is not None else 0
        if self._random is not None:
            torch.set_rng_state(self._random)
            self._random = None
        for number, batch in enumerate(batches, start=1 + done):
            mark("data_wait")
            inputs, targets = _split_pair(batch)
            self.has_targets = inputs is not batch or any(name in batch for name in LABELS)
            inputs, targets = self._move(inputs), self._move(self._look(targets, number))
            if self._device.type != "cpu":
                mark("h2d")
            whole = _count_rows(targets)
            if isinstance(sampler, RankBatchSampler) and sampler.drawn:
                whole = sampler.drawn.popleft()
            rows += whole
            self._done = number
            yield Batch(inputs, targets, whole)
        self._done, self.begins_again = 0, False
        if rows == 0 and not done:
            raise DataError("data.source: the loader gave no rows; give it at least one")
        if not done:
            self._rows = rows

    def _move(self, part: Any) -> Any:
        return nested.map_tensors(
            part, lambda tensor: tensor.to(self._device, non_blocking=self._pinned)
        )


def _explain_errors(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the same batches; what the user's code raises is told in one sentence."""
    while True:
        try:
            if WORKER_DEATHS:
                raise RuntimeError(WORKER_DEATHS[0])
            batch = next(batches)
        except StopIteration as error:
            row = _find_stopped_row(error)
            if row is None:
                return
            sentence = (
                f"{describe_error(error)}{row}, which would end the epoch there; raise another "
                "error"
            )
            died = ""
        except Exception as error:
            if is_oom(error):
                raise
            sentence, died = (
                describe_error(error),
                WORKER_DEATHS[0] if WORKER_DEATHS else get_error_message(error),
            )
            WORKER_DEATHS.clear()
            workers = getattr(batches, "_workers", ())
            if isinstance(error, ConnectionError) and workers:
                _wait_for_worker_end(workers)
                died = "DataLoader worker ended while it sent a batch"
            elif died.endswith("exited unexpectedly") and _hit_bus_error(workers):
                died = "DataLoader worker is killed by signal: Bus error"  # as PyTorch tells it
        else:
            yield batch
            continue
        if NO_SHARED_MEMORY.search(died):
            raise DataError(
                f"data.source: the worker processes of the loader hand batches over in {SHARED}, "
                f"which is too small for them{_describe_size(SHARED)}; give it more (docker run "
                "--shm-size=2g), take fewer num_workers or smaller batches, or num_workers=0"
            )
        if died.startswith("DataLoader worker"):  # by no word of the data
            raise RuntimeError(
                f"data.source: a worker process of the loader has died ({' '.join(died.split())}), "
                "as where memory ran out on this host; take fewer num_workers, or 0 to see an "
                "error of its code"
            )
        raise DataError(f"data.source: the loader raised: {sentence}")


def _describe_size(folder: str) -> str:
    """Return its size in words, where it is known."""
    try:
        return f" (it has {format_mebibytes(shutil.disk_usage(folder).total / 1024**2)})"
    except OSError:
        return ""


def _defer_worker_deaths() -> None:
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
            WORKER_DEATHS.append(str(error))

    signal.signal(signal.SIGCHLD, keep)


def _find_stopped_row(error: StopIteration) -> str | None:
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


def _wait_for_worker_end(workers: Sequence[BaseProcess]) -> None:
    """Until the worker whose connection broke has ended: PyTorch raises from the signal of its end
    wherever this thread is then, and amid a lock of the loader's queues that lock stays held."""
    ended = connection.wait([worker.sentinel for worker in workers], WORKER_END_S)
    for worker in workers:
        if worker.sentinel in ended:
            worker.join()


def _hit_bus_error(workers: Sequence[BaseProcess]) -> bool:
    """Return whether a worker wrote past the end of its shared memory. PyTorch's handler of SIGCHLD
    tells it, which another event loop may have replaced, or whoever waited for the worker first."""
    number = getattr(signal, "SIGBUS", None)  # not on Windows
    return number is not None and any(worker.exitcode == -number for worker in workers)


def _count_batches(loader: Any) -> int:
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


def _find_batch_size(loader: Any) -> int:
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    if not isinstance(size, int) or size < 1:
        raise DataError(
            f"data.source: the loader must tell its batch size (got {size}); set batch_size, or "
            "give its batch_sampler an attribute batch_size: the rows of its largest batch"
        )
    return size


def _count_announced_rows(loader: Any, batches: int, batch_size: int) -> int:
    if batches == ENDLESS:
        return batch_size
    most = batches * batch_size
    try:
        return min(most, len(loader.sampler))
    except (AttributeError, TypeError):  # no sampler, or an endless one
        return most


def _split_pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, Mapping):
        labels = next((name for name in LABELS if name in batch), None)
        if labels is not None:
            return batch, batch[labels]
        if rows := nested.count_rows(batch):
            return batch, torch.arange(rows)
    got = type(batch).__name__
    if isinstance(batch, (tuple, list)):
        got += f" of {len(batch)}"
    raise DataError(
        "data.source: a batch of the loader must be a pair of inputs and targets, or a dict with "
        f"labels (got a {got}); return (inputs, targets) from its data set or collate_fn"
    )


def _count_rows(targets: Any) -> int:
    """Return the rows of the targets, 1 where they are single numbers."""
    if nested.is_list_of_rows(targets):
        return len(targets)
    dimensions = [tensor.dim() for tensor in nested.find_tensors(targets)]
    if not dimensions:
        raise DataError(
            "data.source: the targets of a batch must be a tensor, or hold one "
            f"(got {_describe_type(targets)}); return tensors from the data set or collate_fn"
        )
    return nested.count_rows(targets) if any(dimensions) else 1


def _describe_type(targets: Any) -> str:
    while isinstance(targets, (tuple, list)) and targets:
        targets = targets[0]
    return type(targets).__name__
