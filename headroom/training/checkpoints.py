"""Decides when to write checkpoints of a training, and resumes from the newest. The training
thread only copies; a second thread writes, and what can't be written is logged and costs the
training nothing. It refuses to begin where the first checkpoint would find no room.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from headroom.base.units import format_mebibytes
from headroom.ranks.ranks import Ranks, is_lost_peer
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import CheckpointConfig
from headroom.training import checkpoint_files
from headroom.training.checkpoint_files import (
    Checkpoint,
    DamagedCheckpoint,
    UnsavableState,
    flatten_state,
)
from headroom.training.compatibility import describe_changed_code, refuse_other_training
from headroom.training.kept_steps import list_steps
from headroom.training.sharded_files import (
    RankPart,
    select_rank_part,
    write_sharded_checkpoint,
)
from headroom.training.stateful import HostCopies

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MIB = 1024**2
# At a best epoch one is written where the last one cost at most this share of the time since; the
# first is taken to cost what it is to copy and write so many bytes a second.
COST_SHARE, BYTES_PER_S = 0.01, 2**30
ASK_EVERY = 10  # steps, after which several ranks ask the lead whether it is time
log = logging.getLogger(__name__)


# Made at every step: a frozen dataclass takes three times as long.
class TrainingPosition(NamedTuple):
    """How far a training is. epoch, batch: of the next one, from 0."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    rows: int = 0  # trained on, each as often as it was


class Training(Protocol):
    """A training whose state can be kept and restored; see stateful.Stateful."""

    position: TrainingPosition

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, in dicts, lists and tuples, by the names of its parts.
        The tensors are copied before the training goes on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to where `state` was taken. Raises StateMismatch."""


class Checkpoints:
    """The checkpoints of one training, in one folder. It is handed the training at each call, and
    keeps none: in a ring of references, a model would stay until the next collection."""

    def __init__(
        self,
        folder: Path,
        chosen: CheckpointConfig,
        copies: HostCopies,
        *,
        about: Mapping[str, Any],
        size_bytes: int = 0,
        resumes: bool = False,
        ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
        mesh: DeviceMesh | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """about: what the next one to go on has to match. size_bytes: of one, about. resumes:
        whether to go on from what is there. ranks: the lead says when, since the random numbers of
        each are kept; it writes and reads, and tells the others. mesh: that the model is shared
        out over; then each writes and reads its share."""
        self.folder, self._chosen, self._copies = folder, chosen, copies
        self._every_s, self._every_steps = self._chosen.every_s, self._chosen.every_steps
        self._ranks, self._mesh = ranks, mesh
        self._writers = Ranks() if mesh is None else ranks.make_side_group()
        self._about, self._resumes, self._now_s = dict(about), resumes, now_s
        self._writer: threading.Thread | None = None
        self._saved_at, self._saved_step = now_s(), -1
        self._cost_s = size_bytes / BYTES_PER_S  # of the last one, on both threads
        self._best_step: int | None = None
        self._failed = ""
        self._resumed: dict[str, str] = {}
        self.warnings: tuple[str, ...] = ()  # what a person should doubt who goes on from one
        self.written = 0
        self.copy_s = 0.0  # that the training thread has spent, in sum

    @staticmethod
    def make_disabled() -> Checkpoints:
        """Return the checkpoints of a training that keeps none."""
        off = CheckpointConfig(every=None)
        return Checkpoints(Path(), off, HostCopies(torch.device("cpu")), about={})

    def resume(self, training: Training) -> None:
        """Restore the training from the newest intact checkpoint; it stays as it is where there is
        none. Raises StateMismatch and NewerCheckpoint, and DamagedCheckpoint where there are only
        damaged ones."""
        checkpoint = None
        if self._resumes and self._mesh is not None:
            checkpoint = read_newest(self.folder, self._ranks, self._mesh)
        elif self._resumes:
            checkpoint = self._ranks.broadcast(
                read_newest(self.folder) if self._ranks.is_lead else None
            )
        if checkpoint is None:
            return
        changed = refuse_other_training(checkpoint.about, self._about)
        training.load_state_dict(checkpoint.state)
        training.position = position = TrainingPosition(**checkpoint.about["position"])
        self._saved_step, self._best_step = position.step, checkpoint.about["best_step"]
        self._resumed = {"resumed_from_step": str(position.step)}
        if code := describe_changed_code(checkpoint.about, self._about):
            log.warning("%s", code)
            self.warnings = (code,)
        if changed:
            self._resumed["resumed.changed"] = "; ".join(changed)
        log.info(
            "going on from the checkpoint of step %s%s",
            f"{position.step:,}",
            "".join(f"; {text}" for text in changed),
        )

    def end_step(self, training: Training) -> None:
        """Write a checkpoint, if it is time to; this step is done."""
        every = self._every_steps
        step = training.position.step
        is_due = every is not None and step % every == 0
        may_be_late = self._every_s is not None and (self._ranks.is_alone or step % ASK_EVERY == 0)
        if is_due or (may_be_late and self._ranks.broadcast_flag(self._is_late())):
            self.save(training)

    def end_epoch(self, training: Training, *, is_best: bool) -> None:
        """Write a checkpoint, if it is time to; this epoch and its evaluation are done."""
        is_cheap = self._cost_s <= COST_SHARE * (self._now_s() - self._saved_at)
        if is_best and self._chosen.is_on and self._ranks.broadcast_flag(is_cheap):
            self.save(training, is_best=True)
        else:
            self.end_step(training)

    def save(self, training: Training, *, is_best: bool = False, last: bool = False) -> None:
        """Write a checkpoint now. While another one is being written this one is passed over;
        the last one is waited for."""
        if not self._chosen.is_on:
            return
        if last:
            self._wait()
        is_busy = self._writer is not None and self._writer.is_alive()
        is_due = not is_busy and training.position.step != self._saved_step
        if self._ranks.broadcast_flag(is_due):
            self._wait()
            self._save(training, is_best=is_best)
        if last:
            self._wait()

    def make_tags(self) -> dict[str, str]:
        """Return the tags, under the names of the run record."""
        return self._resumed

    def make_metrics(self) -> dict[str, float]:
        """Return the metrics, under the names of the run record."""
        if not self.written:
            return {}
        return {"checkpoint/written": float(self.written), "time/checkpoint_copy_s": self.copy_s}

    def finish(self, training: Training) -> None:
        """Write a checkpoint at the end, and remove the others."""
        self.save(training, last=True)
        step = training.position.step
        if self._saved_step == step and self._ranks.is_lead:
            checkpoint_files.remove_other_steps(self.folder, {step})

    def let_go_on(self) -> None:
        """Wait, on the device, before the next step changes what is being copied."""
        self._copies.let_go_on()

    def close(self) -> None:
        """Return when nothing is being written any more."""
        self._wait()

    def _is_late(self) -> bool:
        every_s = self._every_s
        return every_s is not None and self._now_s() - self._saved_at >= every_s

    def _save(self, training: Training, *, is_best: bool) -> None:
        began_s, position = self._now_s(), training.position
        tensors: dict[str, Any] = {}
        state = training.state_dict()  # of all ranks, of which some is gathered
        if self._mesh is None and not self._ranks.is_lead:
            return
        try:
            plain = flatten_state(state, tensors)
        except UnsavableState as error:
            self._warn_once(
                f"no checkpoint can be written: {error}, which only pickling could keep"
            )
            self._saved_at = self._now_s()
            return
        part = select_rank_part(tensors, is_lead=self._ranks.is_lead)
        part = replace(part, tensors=self._copies.take(part.tensors))
        self._saved_at, self._saved_step = self._now_s(), position.step
        self.copy_s += self._saved_at - began_s
        best_step = position.step if is_best else self._best_step
        about = {**self._about, "position": position._asdict(), "best_step": best_step}

        def write() -> None:
            with suppress(OSError, AttributeError):  # what trains goes first
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
            self._copies.wait()
            try:
                self._write(position.step, about=about, plain=plain, part=part)
            except (OSError, RuntimeError) as error:
                if not isinstance(error, OSError) and not is_lost_peer(error):
                    raise
                self._saved_step = -1
                reason = getattr(error, "strerror", None) or error
                self._warn_once(f"a checkpoint could not be written ({reason})")
                return
            self._best_step, self.written = best_step, self.written + 1
            if self._ranks.is_lead:
                kept = set(list_steps(self.folder)[: self._chosen.keep])
                checkpoint_files.remove_other_steps(
                    self.folder, kept | {position.step, best_step or 0}
                )
            self._cost_s = self._now_s() - began_s

        here = copy_context()  # Prefect knows by it which run's log this is
        self._writer = threading.Thread(
            target=here.run, args=(write,), name="checkpoint", daemon=True
        )
        self._writer.start()

    def _write(self, step: int, *, about: Mapping[str, Any], plain: Any, part: RankPart) -> None:
        if self._mesh is None:
            tensors = part.tensors
            checkpoint_files.write_checkpoint(
                self.folder, step=step, about=about, plain=plain, tensors=tensors
            )
        else:
            write_sharded_checkpoint(
                self.folder, self._writers, step=step, about=about, plain=plain, part=part
            )

    def _warn_once(self, text: str) -> None:
        """Warn once for each reason: the training goes on, and the checkpoints before stay."""
        if text != self._failed:
            self._failed = text
            log.warning("checkpoint: %s; the training goes on", text)

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None


def read_newest(
    folder: Path,
    ranks: Ranks = Ranks(),  # noqa: B008 (frozen)
    mesh: DeviceMesh | None = None,
) -> Checkpoint | None:
    """Read the newest checkpoint that is intact; None where none was written. ranks, mesh: who
    reads it together, and what it is then sharded over.

    Raises DamagedCheckpoint where all are damaged, and NewerCheckpoint.
    """
    problem = None
    for step in ranks.broadcast(list_steps(folder)):
        try:
            if mesh is None and not checkpoint_files.is_sharded(folder, step):
                return checkpoint_files.read_checkpoint(folder, step)
            # torch.distributed.checkpoint costs a second.
            from headroom.training.sharded_reader import read_sharded_checkpoint

            return read_sharded_checkpoint(folder, step, ranks, mesh=mesh)
        except DamagedCheckpoint as error:
            problem = problem or error
            log.warning("checkpoint: %s; going on from the one before", error)
    if problem is not None:
        raise problem
    return None


class NoRoom(ConfigError):
    """The disk has no room for a checkpoint."""


def refuse_no_room(folder: Path, need_bytes: int) -> None:
    """Before the first step: the old checkpoint stays until the new one is whole.

    Raises NoRoom.
    """
    there = next(p for p in (folder, *folder.parents) if p.is_dir())
    free_bytes = shutil.disk_usage(there).free
    if need_bytes > free_bytes:
        raise NoRoom(
            f"checkpoint.every: a checkpoint takes about {format_mebibytes(need_bytes / MIB)} "
            f"and {folder} has {format_mebibytes(free_bytes / MIB)} left; make room there, or set "
            "it to none"
        )
