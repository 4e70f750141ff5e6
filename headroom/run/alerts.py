"""Alerts of a run while it trains: a loss that jumps, a loss or a gradient norm on its way to no
number, memory that will not last as long as the steps do, and a step that does not come. Each is
told once a run. The rules are meant to stay silent in a healthy run: what they cannot tell apart
from one, they leave out. A log point costs some microseconds; the rest is a thread's, which looks
every few seconds.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from math import isfinite, log
from pathlib import Path
from statistics import median
from time import monotonic
from typing import NamedTuple

import psutil

from headroom.base.facts import DeviceFacts
from headroom.base.units import format_clock, format_mebibytes, format_number
from headroom.watch import host_memory
from headroom.watch.stack_samples import Place, is_own_code, list_positions
from headroom.watch.trends import estimate_slope, select_rising

SPIKE, RUNAWAY = "loss spike", "NaN ahead"
HOST, DEVICE = "host memory creeps", "device memory creeps"
SILENCE = "no step"

# The names of what is looked at, as this project and the frameworks log it; of several, the first.
LOSSES = ("train/loss", "train_loss", "loss", "training_loss")
NORMS = ("train/grad_norm", "grad_norm", "train_grad_norm")
HOST_MIB, DEVICE_MIB = "memory/host_rss_mib", "memory/allocated_mib"
PEAK_MIB = "memory/peak_allocated_mib"

WINDOW, FEWEST = 50, 20  # log points that a new one is held against; nothing is said before
MAD_TO_SD = 1.4826  # of normal values, the standard deviation by the median absolute deviation
# Where trainings are scored by their spikes, one is seven standard deviations and more (OLMo 2,
# arXiv:2501.00656, 2025). Here it is eight, by figures that an outlier does not move, since losses
# of small batches have heavier tails than those of large ones.
SPIKE_SD, SPIKE_TIMES = 8.0, 2.0
SPIKE_LOG_SD = 4.0  # the same of the logarithms: heavy tails are no spikes
SPIKE_SHARE = 0.01  # of the loss at the beginning; below that nothing that matters has happened
# Gradients of single steps up to a thousand times the usual are found in trainings that come to a
# good end (SPAM, arXiv:2501.06842, 2025). Those that stay so high are not.
NORM_TIMES, FIRST_NORM_TIMES = 100.0, 10.0
AHEAD, LOSS_TIMES = 10, 1000.0  # in so many log points; noise does not, and no warm-up of a loss
# A polynomial of the third degree, as parts of a loss are faded in, grows by less within the
# second half of any time; what doubles with each log point, by more.
SECOND_HALF_TIMES = 10.0

MOST_READINGS = 64  # of memory; of more, every second is kept
CREEP_SHARE, CREEP_MIB = 0.1, 256.0  # growth that is worth telling
# Times the steps so far, where nobody knows how many there will be. So a quarter of what was free
# is taken by then: caches that fill in the first epoch mostly take less.
FURTHER = 4
MIB = 1024**2

LOOK_EVERY_S = 5.0
SILENT_S, SILENT_TIMES = 60.0, 20.0  # the times are of the longest gap between log points
BESIDE_S = 600.0  # the same where a step is not what the thread is at
MOST_LINES = 8  # of a stack
_STEPS = "/headroom/training/loop.py"
_BESIDE = (
    *("/headroom/training/evaluation.py", "/headroom/training/checkpoints.py"),
    *("/torch/_dynamo/", "/torch/_inductor/", "/torch/serialization.py"),
    "/torch/distributed/checkpoint/",
)

logger = logging.getLogger(__name__)


class Series:
    """The newest values of a metric at log points, and what is known of those before."""

    def __init__(self) -> None:
        self.window: deque[float] = deque(maxlen=WINDOW)  # before the newest
        self.first = 0.0  # median of the first ones, once there are enough
        self.highest = 0.0  # of all but the newest half of what AHEAD spans
        self.count = 0
        self.times = 0  # that the rule held, running

    def add(self, value: float) -> None:
        self.window.append(value)
        self.count += 1
        if self.count == FEWEST:
            self.first = median(self.window)
        if self.count > AHEAD // 2:
            older = self.window[-1 - AHEAD // 2]
            self.highest = older if self.count == AHEAD // 2 + 1 else max(self.highest, older)


def is_spike(value: float, before: Sequence[float], first: float) -> bool:
    """Return whether a loss is far above those before: eight standard deviations, and twice their
    median. first: what the losses were at the beginning."""
    if len(before) < FEWEST:
        return False
    middle = median(before)
    if value - middle <= (SPIKE_TIMES - 1) * abs(middle):
        return False
    if value < SPIKE_SHARE * abs(first):
        return False
    if not _is_above(value, before, middle, SPIKE_SD):
        return False
    if min(before) <= 0:  # no logarithms: then twice as far as any
        return value - middle > 2 * (max(before) - middle)
    logs = [log(loss) for loss in before]
    return _is_above(log(value), logs, median(logs), SPIKE_LOG_SD)


def _is_above(value: float, before: Iterable[float], middle: float, deviations: float) -> bool:
    spread = MAD_TO_SD * median(abs(one - middle) for one in before)
    # Where more than half are the same, as losses of a margin are 0, nothing is known of the rest.
    return spread > 0 and value > middle + deviations * spread


def is_running_away(values: Sequence[float], highest: float) -> bool:
    """Return whether a loss has grown a thousandfold within ten log points, most of that in the
    second half of them, and still grows. values: the newest, the last one included. highest: of all
    before that half."""
    if len(values) <= AHEAD or not values[-1] > values[-2] > values[-3] > values[-4]:
        return False
    last, begin = values[-1], values[-1 - AHEAD]
    return begin > 0 and last > LOSS_TIMES * begin and last > SECOND_HALF_TIMES * highest


def is_exploding(norm: float, before: Sequence[float], first: float) -> bool:
    """Return whether the norm of the gradients is a hundred times its median. first: what the norms
    were at the beginning; at the end they are small, and no reason to fear before they are as
    large again, ten times."""
    if len(before) < FEWEST:
        return False
    middle = median(before)
    return middle > 0 and norm > max(NORM_TIMES * middle, FIRST_NORM_TIMES * first)


class Creep(NamedTuple):
    """Memory that grows: from how much by how much (in MiB, and with 99 % at least), over which
    steps, and the step at which none is left if it goes on so."""

    first_mib: float
    grown_mib: float
    begin: int
    end: int
    ends_at: int


def find_creep(
    readings: Sequence[tuple[int, float]], room_mib: float, horizon: float
) -> Creep | None:
    """Return how memory creeps, where that is beyond chance and ends before the horizon, a step.

    readings: step and MiB; the first fifth is left out, in which a process gets warm. room_mib:
    that is left."""
    kept = select_rising(readings)
    if not kept:
        return None
    while len(kept) > MOST_READINGS:
        kept = kept[1::2]
    slope = estimate_slope([float(step) for step, _ in kept], [size for _, size in kept])
    if slope is None or slope.low <= 0:
        return None
    begin, end, first = kept[0][0], kept[-1][0], kept[0][1]
    if slope.low * (end - begin) <= max(CREEP_MIB, CREEP_SHARE * first):
        return None
    if end + room_mib / slope.low > horizon:
        return None
    ends_at = end + max(0.0, room_mib) / slope.value
    return Creep(first, slope.value * (end - begin), begin, end, round(ends_at))


def is_within_step(positions: Sequence[Place]) -> bool:
    """Return whether a training of this project is at a step, by its stack: not at an evaluation, a
    checkpoint, or compiling."""
    files = [position.file.replace("\\", "/") for position in positions]
    return any(file.endswith(_STEPS) for file in files) and not is_beside(positions)


def is_beside(positions: Iterable[Place]) -> bool:
    """Return whether the stack goes through what takes long by itself."""
    return any(part in position.file for position in positions for part in _BESIDE)


def describe_stack(positions: Sequence[Place]) -> str:
    """Return at most eight lines of a stack in one: the user's, the innermost first, or where none
    is, those of libraries. There are no values in it."""
    own = [position for position in positions if is_own_code(position)]
    return ", called from ".join(place.describe() for place in (own or positions)[:MOST_LINES])


class Alerts:
    """What a run is to be alerted of. `add` is called at log points by the thread that trains,
    `look` by another one, and `tell` with what there is to tell, as a cause and a sentence."""

    def __init__(
        self, tell: Callable[[str, str], None], *, now_s: Callable[[], float] = monotonic
    ) -> None:
        self._tell, self._now_s = tell, now_s
        self.steps: int | None = None  # that are to be taken; None where nobody knows
        self.epochs = 1
        self.device_mib: float | None = None  # that this run may have of the device
        # Whether a step has begun that has not come to its end, by the stack of its thread.
        self.is_within_step: Callable[[Sequence[Place]], bool] = is_within_step
        self._causes: set[str] = set()
        self._loss, self._norm = Series(), Series()
        self._loss_name = self._norm_name = ""
        self._step = 0
        self._memory: dict[str, list[tuple[int, float]]] = {HOST: [], DEVICE: []}
        self._peak_mib = 0.0  # of the device, since the log point before
        self._looked_at: dict[str, int] = {}  # how many readings there were
        self._files_mib: float | None = None  # mapped into the process, at the first look
        self._added_s: float | None = None
        self._longest_s = 0.0
        self._thread = 0  # that trains
        self._is_over = threading.Event()
        self._watcher: threading.Thread | None = None

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a log point."""
        if self._is_over.is_set():
            return
        try:
            self._add(metrics, step)
        except Exception as error:  # it is beside the run, and no reason for anything
            self._is_over.set()
            logger.debug("alerts are looked for no more", exc_info=error)

    def _add(self, metrics: Mapping[str, float], step: int) -> None:
        now_s = self._now_s()
        if self._added_s is not None:
            self._longest_s = max(self._longest_s, now_s - self._added_s)
        self._added_s, self._thread = now_s, threading.get_ident()
        self._step = max(self._step, step)
        if not self._loss_name:
            self._loss_name = _find(LOSSES, metrics)
        if not self._norm_name:
            self._norm_name = _find(NORMS, metrics)
        loss, norm = metrics.get(self._loss_name), metrics.get(self._norm_name)
        if loss is not None and isfinite(loss):
            self._judge_loss(loss, step)
        if norm is not None and isfinite(norm):
            self._judge_norm(norm, step)
        host_mib, device_mib = metrics.get(HOST_MIB), metrics.get(DEVICE_MIB)
        if host_mib is not None:
            self._keep_memory(HOST, step, host_mib)
        if device_mib is not None and self.device_mib is not None:
            # It is at its peak that memory runs out, and what is left at a log point that creeps.
            self._peak_mib = max(device_mib, metrics.get(PEAK_MIB, 0.0))
            self._keep_memory(DEVICE, step, device_mib)

    def _judge_loss(self, loss: float, step: int) -> None:
        series, name = self._loss, self._loss_name
        if SPIKE not in self._causes:
            is_one = is_spike(loss, series.window, series.first)
            series.times = series.times + 1 if is_one else 0
            if series.times == 2:
                middle = median(series.window)
                self._tell_once(
                    SPIKE,
                    f"{name} is {format_number(loss)} at step {step:,} and has jumped to "
                    f"{_describe_times(loss, middle)} of the last {len(series.window)} log points, "
                    f"{format_number(middle)}",
                )
        series.add(loss)
        if RUNAWAY not in self._causes and loss > series.highest:
            newest = [*series.window][-1 - AHEAD :]
            if is_running_away(newest, series.highest):
                self._tell_once(
                    RUNAWAY,
                    f"{name} has grown from {format_number(newest[0])} to {format_number(loss)} "
                    f"within {AHEAD} log points, at step {step:,}; a lower learning rate or a "
                    "limit on the norm of the gradients may keep it",
                )

    def _judge_norm(self, norm: float, step: int) -> None:
        series = self._norm
        if RUNAWAY not in self._causes:
            is_one = is_exploding(norm, series.window, series.first)
            series.times = series.times + 1 if is_one else 0
            if series.times == 2:
                middle = median(series.window)
                self._tell_once(
                    RUNAWAY,
                    f"{self._norm_name} is {format_number(norm)} at step {step:,} and stays above "
                    f"{format_number(NORM_TIMES)} times the median of the last "
                    f"{len(series.window)} log points, {format_number(middle)}; a lower learning "
                    "rate or a limit on the norm may keep the loss a number",
                )
        series.add(norm)

    def _keep_memory(self, cause: str, step: int, size_mib: float) -> None:
        readings = self._memory[cause]
        readings.append((step, size_mib))
        if len(readings) > 4 * MOST_READINGS:
            self._memory[cause] = readings[1::2]
            self._looked_at[cause] = 0

    def look(self) -> None:
        """Look at how memory grows, and whether steps still come."""
        self._look_at_memory(HOST, self._read_host_room_mib)
        self._look_at_memory(DEVICE, lambda: (self.device_mib or 0.0) - self._peak_mib)
        self._look_for_silence()

    def _look_at_memory(self, cause: str, read_room_mib: Callable[[], float]) -> None:
        readings = [*self._memory[cause]]
        if self._files_mib is None:
            self._files_mib = _read_files_mib()
        if cause in self._causes or len(readings) == self._looked_at.get(cause):
            return
        self._looked_at[cause] = len(readings)
        if not readings or readings[-1][1] - readings[0][1] < CREEP_MIB:
            return
        horizon = float(FURTHER * self._step)
        if self.steps is not None:
            horizon = float(self.steps)
        if self.steps is not None and self.epochs > 1:
            # What is cached in the first epoch grows no more in the next.
            epoch = self.steps / self.epochs
            if self._step <= epoch:
                horizon = epoch
            else:
                readings = [reading for reading in readings if reading[0] > epoch]
        creep = find_creep(readings, read_room_mib(), horizon)
        if creep is None:
            return
        # Pages of files that are mapped count to the process, and the kernel takes them back.
        files_mib = _read_files_mib() - self._files_mib if cause == HOST else 0.0
        if files_mib > creep.grown_mib / 2:
            return
        of_all = f" of {self.steps:,}" if self.steps is not None else ""
        self._tell_once(
            cause,
            f"{format_mebibytes(creep.grown_mib)} more within {creep.end - creep.begin:,} steps, "
            f"from {format_mebibytes(creep.first_mib)}; if that goes on, the run ends in out of "
            f"memory by about step {creep.ends_at:,}{of_all}",
        )

    def _read_host_room_mib(self) -> float:
        return host_memory.read_free_bytes() / MIB

    def _look_for_silence(self) -> None:
        added_s = self._added_s
        if added_s is None or not self._longest_s or SILENCE in self._causes:
            return
        silent_s = self._now_s() - added_s
        if silent_s <= max(SILENT_S, SILENT_TIMES * self._longest_s):
            return
        positions = list_positions(self._thread)
        is_step = not is_beside(positions) and self.is_within_step(positions)
        if not is_step and silent_s <= BESIDE_S:
            return
        is_ours = any(position.file.endswith(_STEPS) for position in positions)
        if not is_ours and not any(map(is_own_code, positions)):
            return  # a notebook whose cell has come to its end
        self._tell_once(
            SILENCE,
            f"nothing for {format_clock(silent_s)} after step {self._step:,}, where the longest "
            f"wait before was {format_clock(self._longest_s)}; it stands at "
            f"{describe_stack(positions)}",
        )

    def _tell_once(self, cause: str, text: str) -> None:
        if cause not in self._causes:
            self._causes.add(cause)
            self._tell(cause, f"{cause}: {text}")

    def start(self) -> None:
        """Look every few seconds, in a thread, until `stop`."""
        here = copy_context()  # Prefect knows by it which run's log this is
        self._watcher = threading.Thread(
            target=here.run, args=(self._run,), name="headroom-alerts", daemon=True
        )
        self._watcher.start()

    def stop(self) -> None:
        """Look no more, and tell nothing. It may be called again."""
        self._is_over.set()
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join(timeout=1)

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_EVERY_S):
            try:
                self.look()
            except Exception as error:  # as above
                logger.debug("alerts are looked for no more", exc_info=error)
                return


def find_device_mib(device: DeviceFacts, limit_mib: float | None = None) -> float | None:
    """Return what a run may have of its device; None of a CPU, whose memory is the host's."""
    if device.kind == "cpu" or device.total_bytes is None:
        return limit_mib if device.kind != "cpu" else None
    free_mib = (device.total_bytes - device.baseline_bytes) / MIB
    return free_mib if limit_mib is None else min(limit_mib, free_mib)


def _find(names: Iterable[str], metrics: Mapping[str, float]) -> str:
    return next((name for name in names if name in metrics), "")


def _describe_times(value: float, middle: float) -> str:
    return f"{format_number(value / middle)} times the median" if middle > 0 else "above the median"


def _read_files_mib() -> float:
    """Return the MiB of mapped files, and of memory that is shared, in this process; 0 where the
    system does not tell."""
    return float(getattr(psutil.Process().memory_info(), "shared", 0)) / MIB


def read_told(file: Path) -> dict[str, str]:
    """Return what a run was alerted of before, by its causes."""
    with suppress(OSError, ValueError):
        causes = json.loads(file.read_text())
        if isinstance(causes, dict):
            return {str(cause): str(text) for cause, text in causes.items()}
    return {}
