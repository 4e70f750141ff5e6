"""Takes the passes of a step of somebody else's loop: of a batch as a whole, or of its parts by the
rule that was proven. The gradients of earlier batches stay out of it until all has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from headroom.base import nested
from headroom.training.loss_counts import CountWatch, SeenCount
from headroom.training.part_sums import NotProven, PartAdder, Rule
from headroom.training.state_changes import KeptState
from headroom.training.step_gradients import StepGradients
from headroom.watch.own_loop import OwnLoop


class Weigh(Protocol):
    """Weighs the loss of a part, between its forward and its backward pass."""

    def __call__(self, loss: Tensor, weight: Any = None) -> Tensor:
        """Return what to go backward from. weight: what the loss is the mean over, if told."""


TakePass = Callable[[Any, Weigh], None]  # forward, weigh and backward, of a batch or of a part


class StepPasses:
    """The passes of a step, with the gradients that they make."""

    def __init__(self, take: TakePass, loop: OwnLoop, begin: Callable[[], None]) -> None:
        """take: the passes of a batch. loop: knows its models and optimizers. begin: is called
        before each attempt, of which an earlier one came to nothing."""
        self.loop, self._take, self._begin = loop, take, begin
        self.gradients = StepGradients([])
        self.shares: list[float] = [1.0]  # of the batch that was taken last, by part
        self.factor = 1.0  # by which all of it was multiplied in the end
        self.weight: Any = None  # what the step told that the loss of the whole is the mean over
        self.look: Callable[[Tensor], None] | None = None  # sees each loss with its graph
        self.shrink = 1.0  # makes all gradients smaller
        self._known: tuple[int, ...] = ()  # sizes of what the gradients are listed of
        # Of the pass that is under way:
        self._share: Callable[[float | None], float] | None = None
        self._loss: Tensor | None = None
        self._watching = ExitStack()

    def list_gradients(self) -> None:
        """Know the parameters of all models and optimizers that there are by now."""
        groups = [g for optimizer in self.loop.optimizers for g in optimizer.param_groups]
        known = (len(self.loop.models), *(len(group["params"]) for group in groups))
        if known != self._known:
            of_models = [p for model in self.loop.models for p in model.parameters()]
            listed = [*of_models, *(p for group in groups for p in group["params"])]
            self.gradients = StepGradients(list({id(p): p for p in listed}.values()))
            self._known = known

    def take_plainly(self, batch: Any) -> Tensor | None:
        """Return the loss of the batch, taken as it would be without a word of this."""
        self._begin()
        self.shares, self.factor = [1.0], 1.0
        self._take(batch, self._keep_loss)
        loss, self._loss = self._loss, None
        return loss

    def _keep_loss(self, loss: Tensor, weight: Any = None) -> Tensor:
        self._loss = loss.detach()
        return loss

    def take_whole(self, batch: Any) -> Tensor | None:
        """Return the loss of the batch; where it fails the gradients are as before."""
        self._share = None
        self._begin()
        self.shares, self.factor = [1.0], 1.0
        with self._undone_by_errors():
            self._take(batch, self._weigh)
        self.gradients.join()
        loss, self._loss = self._loss, None
        return loss

    def take_parts(
        self,
        parts: Sequence[Any],
        rule: Rule,
        begun: KeptState,
        *,
        repeat: Callable[[int], AbstractContextManager[None]] | None = None,
        seen: list[list[SeenCount]] | None = None,
    ) -> Tensor:
        """Return the loss of the batch of these parts; where one fails the gradients are as before.

        begun: what each part begins with. repeat: returns the context in which the part of this
        number draws what it drew in the batch. seen: gets what each divides by.
        """
        self._begin()
        adder = PartAdder(rule, [nested.count_rows(part) for part in parts])
        with self._undone_by_errors():
            for i, part in enumerate(parts):
                if i:
                    begun.restore(but=rule.adding)
                with nullcontext() if repeat is None else repeat(i):
                    self._take_part(part, adder)
            loss, self.factor = adder.finish()
            self.shares = adder.make_shares()
            if seen is not None:
                seen += adder.seen
        self.gradients.join(self.factor)
        return loss

    def _take_part(self, part: Any, adder: PartAdder) -> None:
        self._loss = None
        with self.watch_counts(adder.rule.is_watched) as watch:
            self._share = partial(adder.weigh, watch=watch)
            self._take(part, self._weigh)
        if self._loss is None:
            raise NotProven("its passes were not seen")
        adder.add(self._loss)
        self._loss = None

    @contextmanager
    def watch_counts(self, is_watched: bool) -> Iterator[CountWatch | None]:
        """See what a loss divides by, until it is weighed; None if not watched."""
        watch = CountWatch() if is_watched else None
        with self._watching:
            if watch is not None:
                self._watching.enter_context(watch)
            yield watch

    @contextmanager
    def _undone_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.gradients.bring_back()
            self._loss = None
            self.loop.drop_pass()
            raise

    def _weigh(self, loss: Tensor, weight: Any = None) -> Tensor:
        """Return the loss times its share. Called between forward and backward."""
        self._watching.close()
        self.gradients.put_aside()
        self._loss = loss.detach()
        if self.look is not None:
            self.look(loss)
        if self._share is None:
            self.weight = weight
            return loss if self.shrink == 1.0 else loss * self.shrink
        share = self._share(None if weight is None else float(weight)) * self.shrink
        # A mean over nothing is no number, and neither are its gradients.
        return loss * share if share else torch.zeros_like(loss, requires_grad=True)


def make_pass(compute: Callable[..., Any], backward: Callable[[Tensor], object]) -> TakePass:
    """Return the passes of a step of the user's own, whose batch is (arguments, by name)."""
    return partial(_take_own_pass, compute, backward)


def _take_own_pass(
    compute: Callable[..., Any], backward: Callable[[Tensor], object], batch: Any, weigh: Weigh
) -> None:
    arguments, named = batch
    backward(weigh(*read_loss(compute(*arguments, **named))))


def read_loss(result: Any) -> tuple[Tensor, Any]:
    """Return the loss that a step has returned, and what it is the mean over; None where that is
    not told. Raises TypeError."""
    weight = None
    if isinstance(result, (tuple, list)) and len(result) == 2:
        result, weight = result
    elif isinstance(result, Mapping):
        result = result.get("loss")
    elif not isinstance(result, Tensor):
        result = getattr(result, "loss", None)
    if not isinstance(result, Tensor):
        raise TypeError(
            "protect: the step must return its loss, a tensor of one number that is the mean over "
            "the rows; or (loss, weight), the weight what it is the mean over; or what has a `loss`"
        )
    return result, weight
