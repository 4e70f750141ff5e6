"""Brings the numbers of the steps to the log. They stay on the device until a log point, are
packed there into one tensor, and are read one reading late, so that the host never waits for
the step it has just enqueued. It refuses to go on after a loss that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from headroom.ranks.ranks import Ranks
from headroom.watch.phases import Phases, Stopwatch, make_event
from headroom.watch.pinned_memory import copy_to_host
from headroom.watch.trends import Trends

Log = Callable[[dict[str, float], int], None]
AGE_S = "age_s"  # among what is logged of a step: how long ago it was taken; no metric
Blame = Callable[[], tuple[str, str] | None]  # the setting to blame and the sentence about it

# Log points closer than this are read together: a reading costs the host about 0.1 ms.
READ_EVERY_S = 0.05
LEAST_AGE_S = 0.001  # as times are logged in milliseconds


def blame_nobody() -> None:
    """Return that nothing is known to be to blame for a loss that is no number."""


class Diverged(RuntimeError):
    """The loss became NaN or infinite; the text says where, and the last good values."""


@dataclass(frozen=True)
class _LogPoint:
    """A log point: the step, and how many losses and norms had been kept by then."""

    step: int
    lr: float | None  # None where nobody tells it
    losses: int
    norm: int | None
    taken_s: float = math.inf  # by the host's clock; of a process before this one nobody knows


@dataclass(frozen=True)
class _OwnMetrics:
    """Metrics of a step under names of somebody else's; those on the device are tensors."""

    step: int
    metrics: dict[str, float | Tensor]

    def list_tensors(self) -> list[Tensor]:
        return [value for value in self.metrics.values() if isinstance(value, Tensor)]


@dataclass(frozen=True)
class _PackedReading:
    stacked: Tensor  # the losses, then the norms, on their device
    values: Tensor  # the same on the host, once `ready`
    ready: Any
    first_step: int
    losses: int
    points: list[_LogPoint]
    began: Any  # where the window's first step began
    timed: tuple[int, int]  # steps and rows that the speed counts
    epoch: int
    blame: list[Blame]  # of each step
    own: Sequence[Tensor]  # losses of this rank's rows, where there are others
    entries: list[_OwnMetrics]  # their tensors are the last of the values


class StepMetrics:
    """Collects the losses and norms since the last reading, and the one reading that is on its
    way."""

    def __init__(
        self,
        device: torch.device,
        *,
        phases: Phases,
        watch: Stopwatch,
        rate: Callable[[int], float | None],
        speeds: Callable[[float], dict[str, float]],
        last_step: int,
        log: Log,
        trends: Trends | None = None,
        ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
    ) -> None:
        """rate: learning rate of step 0, 1, ... speeds: more of them, from the samples a second.
        last_step: where a speed is told of the whole run, by another. trends: keeps how the run
        changes."""
        self._trends = trends or Trends()
        self._last_step = last_step
        self._device, self._phases, self._watch = device, phases, watch
        self._rate, self._speeds, self._log, self._ranks = rate, speeds, log, ranks
        self._losses: list[Tensor] = []
        self._own: list[Tensor] = []  # of this rank, since all were asked for theirs
        self._norms: list[Tensor] = []
        self._points: list[_LogPoint] = []
        self._blames: list[Blame] = []
        self._entries: list[_OwnMetrics] = []
        self._local: list[Tensor] = []  # the same losses as in _losses, of this rank's rows
        self._timed = (0, 0)  # steps and rows since the last reading
        self._began: Any = None
        self._step = 0
        self._on_its_way: _PackedReading | None = None
        self._epoch = 0
        self._read_s = perf_counter()  # when the host last read
        self.read_every_s: float | None = None  # seconds; None: READ_EVERY_S
        self._speed_from = (0.0, 0, 0)  # seconds of steps, steps and rows since the last speed
        self._open: list[float] = []  # losses read since the last log point
        self._last_good: tuple[int, float] | None = None

    def begin(self, epoch: int) -> None:
        """Begin the steps of this epoch, after something else."""
        self._epoch, self._began = epoch, self._mark()

    def add(
        self,
        loss: Tensor | None,
        *,
        rows: int,
        blame: Blame = blame_nobody,
        is_timed: bool = True,
    ) -> None:
        """One more step was taken, whose loss may not be known. blame: what is to blame if the loss
        is no number. is_timed: it is in the speeds."""
        self._step += 1
        if loss is not None:
            (self._losses if self._ranks.is_alone else self._own).append(loss)
            self._blames.append(blame)
        if is_timed:
            self._timed = (self._timed[0] + 1, self._timed[1] + rows)

    def add_plain_steps(self, steps: int, *, rows: int) -> None:
        """So many more steps were taken, whose losses nobody tells."""
        self._step += steps
        self._timed = (self._timed[0] + steps, self._timed[1] + rows)

    def add_metrics(self, metrics: dict[str, float | Tensor], step: int) -> None:
        """Log these metrics of a step, whatever they are called, once their tensors are read."""
        self._entries.append(_OwnMetrics(step, metrics))

    def add_log_point(self, norm: Tensor | None) -> None:
        """Note that the step just added is a log point, of this norm of all gradients together.
        Reads, when the last reading is long enough ago."""
        self._agree()
        if norm is not None:
            self._norms.append(norm)
        at = None if norm is None else len(self._norms) - 1
        self._points.append(
            _LogPoint(self._step, self._rate(self._step - 1), len(self._losses), at, perf_counter())
        )
        # Several ranks read at the same points: then all find a loss that is no number.
        every_s = READ_EVERY_S if self.read_every_s is None else self.read_every_s
        if not self._ranks.is_alone or perf_counter() - self._read_s >= every_s:
            self.read()

    def read(self) -> None:
        """Send what there is, and log what was sent before; on a CPU both are the same.

        Raises Diverged.
        """
        packed = self._pack()
        if self._device.type == "cpu":
            self._take(packed)
        else:
            waiting, self._on_its_way = self._on_its_way, packed
            self._take(waiting)
        self._read_s = perf_counter()

    def drain(self) -> None:
        """Wait for the device and log all there is. Raises Diverged."""
        self._agree()
        self.read()
        waiting, self._on_its_way = self._on_its_way, None
        self._take(waiting)

    def state(self) -> dict[str, Any]:
        """Return what is not logged yet. Reads first: then only what is on its way is left."""
        self.read()
        sent = self._on_its_way
        return {
            "step": self._step,
            "open": list(self._open),
            "last_good": self._last_good,
            "values": sent.stacked if sent is not None else torch.empty(0),
            "losses": sent.losses if sent is not None else 0,
            "points": [(p.step, p.lr, p.losses, p.norm) for p in sent.points] if sent else [],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, and log what was on its way then."""
        self._step, self._open = state["step"], list(state["open"])
        self._last_good = state["last_good"]
        values = state["values"].tolist()
        self._tell([_LogPoint(*point) for point in state["points"]], values, state["losses"])

    def go_on_after(self, step: int) -> None:
        """Number the steps as those that follow this one."""
        self._step = step

    def restart(self) -> None:
        """Leave the first step, which holds warm-up and compilation, out of the speeds."""
        self._timed = (0, 0)
        self._began = self._mark()

    def _agree(self) -> None:
        """Losses of the ranks become those of the whole batches."""
        if self._own:
            own, self._own = torch.stack([loss.float() for loss in self._own]), []
            self._local.append(own)
            self._losses += self._ranks.mean(own.clone()).unbind()

    def _mark(self) -> Any:
        """A timed event where the device is now; nothing on a CPU, whose clock is the host's."""
        if self._device.type == "cpu":
            return None
        event = make_event(self._device, timed=True)
        event.record()
        return event

    def _pack(self) -> _PackedReading | None:
        if not (self._losses or self._points or self._entries):
            return None
        tensors = [tensor for one in self._entries for tensor in one.list_tensors()]
        scalars = [scalar.float() for scalar in (*self._losses, *self._norms, *tensors)]
        stacked = torch.stack(scalars) if scalars else torch.empty(0)
        values = copy_to_host(stacked)
        ready = self._mark()
        first = self._step - len(self._losses) + 1
        packed = _PackedReading(
            stacked,
            values,
            ready,
            first,
            len(self._losses),
            self._points,
            self._began,
            self._timed,
            self._epoch,
            self._blames,
            self._local,
            self._entries,
        )
        self._began = ready
        self._losses, self._norms, self._points, self._timed = [], [], [], (0, 0)
        self._blames, self._local, self._entries = [], [], []
        return packed

    def _take(self, packed: _PackedReading | None) -> None:
        if packed is None:
            return
        if packed.ready is not None:
            packed.ready.synchronize()
        cpu_s = -self._watch.cpu_seconds["steps"]
        step_s = self._watch.lap("steps")
        cpu_s += self._watch.cpu_seconds["steps"]
        if packed.ready is not None:
            # A reading comes one window late: the host's time would be that of another window.
            step_s = packed.began.elapsed_time(packed.ready) / 1000
        self._trends.add_steps(packed.timed[0], step_s, cpu_s)
        before_s, steps, rows = self._speed_from
        self._speed_from = before_s + step_s, steps + packed.timed[0], rows + packed.timed[1]
        values = packed.values.tolist()
        self._refuse_unfinite(values[: packed.losses], packed)
        self._tell(packed.points, values, packed.losses)
        self._tell_entries(packed.entries, values)
        self._phases.clock.collect()
        self._watch.lap("log")

    def _tell(self, points: list[_LogPoint], values: list[float], count: int) -> None:
        """Log the points of a reading: `count` losses, then the norms."""
        losses, norms, begin = values[:count], values[count:], 0
        now_s = perf_counter()
        for point in points:
            part = self._open + losses[begin : point.losses]
            begin, self._open = point.losses, []
            metrics = {"train/loss": sum(part) / len(part)} if part else {}
            if point.lr is not None:
                metrics["train/lr"] = point.lr
            if point.norm is not None:
                metrics["train/grad_norm"] = norms[point.norm]
            if point is points[-1]:
                memory = self._phases.meter.end_window()
                self._trends.add_memory(
                    point.step,
                    memory["memory/host_rss_mib"],
                    memory.get("memory/allocated_mib", 0.0),
                )
                metrics |= memory
                if point.step != self._last_step:
                    metrics |= self._compute_speed()
            if now_s - point.taken_s >= LEAST_AGE_S:
                metrics[AGE_S] = now_s - point.taken_s
            self._log(metrics, point.step)
        self._open += losses[begin:]

    def _tell_entries(self, entries: list[_OwnMetrics], values: list[float]) -> None:
        read = iter(values[len(values) - sum(len(one.list_tensors()) for one in entries) :])
        for one in entries:
            metrics = {
                k: next(read) if isinstance(v, Tensor) else v for k, v in one.metrics.items()
            }
            self._log(metrics, one.step)

    def _compute_speed(self) -> dict[str, float]:
        wall_s, steps, rows = self._speed_from
        if not steps:
            return {}
        self._speed_from = (0.0, 0, 0)
        metrics = {"speed/steps_per_s": steps / max(wall_s, 1e-9)}
        if not rows:  # nobody has counted them
            return metrics
        per_s = rows / max(wall_s, 1e-9)
        return {"speed/samples_per_s": per_s, **metrics, **self._speeds(per_s)}

    def _refuse_unfinite(self, losses: list[float], packed: _PackedReading) -> None:
        for step, loss in enumerate(losses, start=packed.first_step):
            if not math.isfinite(loss):
                at = step - packed.first_step
                diverged = self._describe_divergence(step, loss, packed.epoch, packed.blame[at])
                raise Diverged(self._name_first_rank(diverged, packed.own, at))
            self._last_good = (step, loss)

    def _name_first_rank(self, diverged: str, own: Sequence[Tensor], at: int) -> str:
        """The same, of the first rank whose own loss is no number. All ranks are here."""
        if self._ranks.is_alone:
            return diverged
        is_mine = not torch.cat([*own])[at].isfinite().item()
        by_rank = self._ranks.all_gather((is_mine, diverged))
        bad = [rank for rank, (is_bad, _) in enumerate(by_rank) if is_bad]
        if not bad:
            return diverged
        named = "rank" if len(bad) == 1 else "ranks"
        return (
            f"{by_rank[bad[0]][1]} (seen by {named} {', '.join(map(str, bad))} of {len(by_rank)})"
        )

    def _describe_divergence(self, step: int, loss: float, epoch: int, blame: Blame) -> str:
        good = "no step was good"
        if self._last_good is not None:
            good = f"the last good loss was {self._last_good[1]:.6g} at step {self._last_good[0]}"
        when = f"at step {step} (epoch {epoch + 1}, optim.lr then {self._rate(step - 1):.3g}); "
        blamed = blame()
        if blamed:
            return f"{blamed[0]}: the loss became {loss} {when}{good}. {blamed[1]}"
        advice = "Lower optim.lr, set optim.clip_norm, or use train.precision fp32"
        if step == 1:
            advice = (
                "No weight was changed by then: look for a division by 0, a log or a root of less "
                "in the model and the loss, or use train.precision fp32"
            )
        return f"train.loss: became {loss} {when}{good}. {advice}"
