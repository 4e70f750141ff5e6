"""The model of a training that several processes train: whole on each, or sharded
(train.parallel), and gathered where one of them logs it; its micro-batches, which have as many
rows on each rank as fit on all; and what the ranks have measured: least, median and most of
each figure. The micro-batches are found before the first step, since a rank that runs out of
memory in the middle of it leaves the others waiting: all then begin again, with less. Sharding
is imported only for a run that asks for it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from headroom.base.names import Place, list_shown
from headroom.base.python_state import keep_values
from headroom.ranks.ranks import Ranks, RestartableError
from headroom.ranks.sharding import (
    ParallelModel,
    ShardedModel,
    gather_full_state,
    recompute_activations,
    shard_model,
)
from headroom.settings.run_config import TrainConfig
from headroom.training.build import make_model
from headroom.training.micro_batches import (
    MemoryExhausted,
    MicroBatches,
    extract_message,
)
from headroom.training.plan import Plan
from headroom.watch import leaks
from headroom.watch.out_of_memory import MemoryFailure, is_oom

T = TypeVar("T")
B = TypeVar("B")


class MicroBatchTooLarge(RestartableError):
    """A micro-batch did not fit, where a rank cannot try again without the others."""

    def __init__(self, rows: int, why: str) -> None:
        super().__init__(
            f"short of memory with micro-batches of {rows} rows: all begin again with "
            f"{-(-rows // 2)}, from the last checkpoint ({'. '.join(why.split('. ')[:2])})"
        )
        self.smaller = -(-rows // 2)
        self._arguments = rows, why

    def __reduce__(self) -> tuple[type[MicroBatchTooLarge], tuple[int, str]]:
        """A process sends it to the one that has started it."""
        return type(self), self._arguments


class FixedMicroBatches(MicroBatches):
    """Micro-batches of one size, of a sharded model: to try again, a rank needs the others."""

    def fit(self, attempt: Callable[[B, int], T], batch: B) -> T:
        """Return what `attempt(batch, rows)` returns. Raises MicroBatchTooLarge."""
        before = self._count_writes(batch)
        try:
            done = attempt(self._copy_batch(batch), self.rows)
            self._refuse_written(batch, before)
            return done
        except (RuntimeError, MemoryError) as error:
            if self.rows == 1 or not is_oom(error):
                raise
            why = extract_message(error)
        raise MicroBatchTooLarge(self.rows, why)

    def restore(self, state: list[Any]) -> None:
        """Go back to where `state` was taken, with no more rows than these."""
        rows = self.rows
        super().restore(state)
        self.rows = min(rows, self.rows)

    def ease(self, why: str) -> None:
        """Do nothing: all ranks would have to take less together."""


class AgreedMicroBatches(FixedMicroBatches):
    """Micro-batches of the size that fits on every rank, kept to the end of this process."""

    def __init__(
        self,
        rows: int,
        *,
        ranks: Ranks,
        together: Callable[[], None],
        **others: Any,
    ) -> None:
        """others: of MicroBatches. together: from there on the ranks wait for each other."""
        super().__init__(rows, **others)
        self._ranks, self._together, self._is_agreed = ranks, together, False

    def fit(self, attempt: Callable[[B, int], T], batch: B) -> T:
        """Return what `attempt(batch, rows)` returns. Raises MemoryExhausted on all ranks,
        where one of them has no room for a row."""
        if not self._is_agreed:
            self._agree(attempt, batch)
        return super().fit(attempt, batch)

    def _agree(self, attempt: Callable[[B, int], T], batch: B) -> None:
        before, failure = self._copy_state(), None
        try:
            with keep_values(self._keeper.list_mutated()):
                MicroBatches.fit(self, attempt, batch)
        except MemoryExhausted as error:
            failure = error.failure
        self._restore(before)
        by_rank: list[tuple[int, MemoryFailure | None]] = self._ranks.all_gather(
            (self.rows, failure)
        )
        for rank, (_, exhaustion) in enumerate(by_rank):
            if exhaustion is not None:
                raise MemoryExhausted(
                    replace(exhaustion, text=f"on rank {rank}: {exhaustion.text}")
                )
        self.rows = min(rows for rows, _ in by_rank)
        self._together()
        self._is_agreed = True


@dataclass(frozen=True)
class RankFacts:
    """Metrics and tags of the ranks, under the names of the run record."""

    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


def summarize_ranks(ranks: Ranks, device: str, measured: Mapping[str, float]) -> RankFacts:
    """Summarize what all ranks measured of the metrics that are told of each. All must call it."""
    if ranks.is_alone:
        return RankFacts()
    names = list_shown(Place.RANKS)
    ours = {name: measured[name] for name in names if name in measured}
    by_rank = ranks.all_gather((f"{platform.node()} {device}", ours))
    metrics: dict[str, float] = {}
    tags = {"ranks": str(ranks.size)}
    if device != "cpu" or len({where for where, _ in by_rank}) > 1:
        tags["ranks.devices"] = ", ".join(
            f"{rank}: {where}" for rank, (where, _) in enumerate(by_rank)
        )
    for name in names:
        phase = name.partition("/")[2]
        values = [of[name] for _, of in by_rank if name in of]
        if len(values) == ranks.size:
            spread = {"least": min(values), "median": median(values), "most": max(values)}
            metrics |= {f"ranks/{phase}_{which}": value for which, value in spread.items()}
            if spread["most"] > spread["least"]:
                tags[f"ranks.{phase}_most"] = f"rank {values.index(spread['most'])}"
    return RankFacts(metrics, tags)


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def build_model_on_device(plan: Plan, ranks: Ranks) -> nn.Module:
    """Return the model on its device, whole or this rank's share of it. Raises ConfigError."""
    device, recompute = plan.torch_device, plan.settings.memory.recompute
    model = make_model(plan.settings.model, plan.data, device)
    if is_shared_out(plan.settings.train, ranks):
        model = shard_model(model, device=device, recompute=recompute)
        if (mesh := find_mesh(model)) is not None:
            leaks.ignore_tensor(mesh.mesh)  # in what PyTorch remembers of each operation
        return model
    if recompute:
        recompute_activations(model)
    return model


def is_shared_out(train: TrainConfig, ranks: Ranks) -> bool:
    return train.parallel == "fsdp" and not ranks.is_alone


def find_mesh(model: nn.Module) -> DeviceMesh | None:
    """Return the device mesh that the model is sharded over; None where it is whole."""
    mesh: DeviceMesh | None = getattr(next(model.parameters()), "device_mesh", None)
    return mesh


def share_steps(
    model: nn.Module, ranks: Ranks, *, device: torch.device, mark: Callable[[str], None]
) -> ParallelModel:
    """Return the model as a step of several processes calls it."""
    if find_mesh(model) is None:
        return ParallelModel(model, ranks, device=device, mark=mark)
    return ShardedModel(model, ranks, device=device, mark=mark)


def gather_whole(model: nn.Module, plan: Plan, ranks: Ranks) -> nn.Module:
    """Return the model with all its weights, on the lead; all ranks call it."""
    if find_mesh(model) is None:
        return model
    state = gather_full_state(model)
    if not ranks.is_lead:
        return model
    whole = make_model(plan.settings.model, plan.data, plan.torch_device)
    whole.load_state_dict(state)
    return whole
