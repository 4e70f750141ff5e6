"""Takes forward and backward passes of somebody else's loop that go on where memory runs out: the
same batch in halves, with gradients equal to the whole batch's. That is proven with a few rows of
the batch before the first part is taken, and where it cannot be, the error is left as it came.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from headroom.base import nested
from headroom.base.import_paths import describe_error
from headroom.training.part_proof import prove_parts
from headroom.training.part_sizes import NotRepeatable, PartSizes
from headroom.training.part_sums import NotProven, Rule
from headroom.training.step_passes import StepPasses, TakePass
from headroom.watch.own_loop import OwnLoop


class ProtectedStep:
    """Takes the passes of a step, in parts where memory runs out."""

    def __init__(
        self,
        take: TakePass,
        loop: OwnLoop,
        *,
        tell: Callable[[str], None],
        beside: Mapping[str, Any] | None = None,
        ignored: Set[str] = frozenset(),
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """take: the passes of a batch. loop: knows its models and optimizers. tell: hears why
        parts of a batch are not taken. beside: what has state beside the models, by name. ignored:
        attributes of the models by which a framework knows them. begin: is called before each
        attempt, of which an earlier one came to nothing."""
        self._passes = StepPasses(take, loop, begin)
        self._loop, self._tell = loop, tell
        self._beside, self._ignored = dict(beside or {}), ignored
        self.refusal = ""  # why batches are taken whole, come what may
        self.micro: PartSizes | None = None
        self._calls = 0
        self._rule: Rule | None = None  # how parts add up, once that is proven

    @property
    def shares(self) -> list[float]:
        """How much of the batch that was taken last each part was."""
        return self._passes.shares

    @property
    def factor(self) -> float:
        """By what all gradients of the batch that was taken last were multiplied in the end."""
        return self._passes.factor

    def call(self, *batch: Any, **named: Any) -> Tensor | None:
        """Return the loss of what a step of the user's own is given."""
        return self((batch, named))

    def __call__(self, batch: Any) -> Tensor | None:
        """Return the loss of the batch, detached; None where its pass has weighed none."""
        if not self._calls and not self.refusal:
            self._refuse_at_start()
        self._calls += 1
        if not self.refusal:
            try:
                self._prepare(batch)
            except Exception as error:
                self._refuse(f"an error of the account's own ({describe_error(error)})")
        if self.refusal:
            return self._passes.take_plainly(batch)
        assert self.micro is not None
        try:
            return self.micro.fit(self._attempt, batch)
        except NotRepeatable as lost:
            self._refuse(str(lost))
            raise torch.OutOfMemoryError(lost.failure) from None
        except NotProven as unproven:
            why = str(unproven)
        self._refuse(why)
        self.micro.start_again()
        return self._passes.take_plainly(batch)  # and the error comes as it would have come

    def make_metrics(self) -> dict[str, float]:
        """Return what has come of it, under the names of the record."""
        return {"memory/ooms_recovered": float(self.micro.recovered if self.micro else 0)}

    def make_tags(self) -> dict[str, str]:
        """Return the tags of the record: the rows of a part, where one was taken."""
        micro = self.micro
        return {"micro_batch": str(micro.rows)} if micro and micro.recovered else {}

    def _refuse_at_start(self) -> None:
        group = torch.distributed
        if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
            self._refuse(
                "several processes train this model, and one that runs out of memory would leave "
                "the others waiting for its gradients"
            )
        elif not self._loop.models:
            self._refuse("no model is watched; give it to the account (model=...)")

    def _refuse(self, why: str) -> None:
        self.refusal = why
        self._tell(f"protect: batches are taken whole, and errors are left as they come: {why}")

    def _prepare(self, batch: Any) -> None:
        if self.micro is None:
            models = self._loop.models
            beside = {f"model {i}": m for i, m in enumerate(models[1:], start=2)}
            self.micro = PartSizes(self._loop, self._beside | beside, self._prove, self._ignored)
        self._passes.list_gradients()

    def _attempt(self, batch: Any, rows: int) -> Tensor | None:
        """Return the loss of the batch, in parts of so many rows."""
        assert self.micro is not None
        whole = self.micro.batch_rows
        if self._rule is None or rows >= whole:
            return self._passes.take_whole(batch)
        parts = nested.split_batch(batch, rows, whole=whole)
        return self._passes.take_parts(parts, self._rule, self.micro.keep_slots())

    def _prove(self, batch: Any) -> None:
        """Find how parts of the batch add up to it, once. Raises NotProven."""
        if self._rule is None:
            assert self.micro is not None
            self._rule = prove_parts(batch, self._passes, self.micro)
