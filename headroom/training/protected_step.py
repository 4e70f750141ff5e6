"""Takes forward and backward passes of somebody else's loop that go on where memory runs out: the
same batch in halves, with gradients equal to the whole batch's. That is proven with a few rows of
the batch before the first part is taken, and where it cannot be, the error is left as it came.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headroom.base import nested
from headroom.base.import_paths import describe_error
from headroom.base.seeds import get_random_state
from headroom.training.loss_counts import CountWatch, DrawKeeper, SeenCount
from headroom.training.micro_batches import (
    AttemptState,
    MemoryExhausted,
    MicroBatches,
    extract_message,
)
from headroom.training.state_changes import (
    ChangeFinder,
    KeptState,
    Slot,
    StateChanges,
    StateKeeper,
    list_restorable,
)
from headroom.watch.out_of_memory import is_oom
from headroom.watch.own_loop import OwnLoop

log = logging.getLogger(__name__)
T = TypeVar("T")
B = TypeVar("B")


class Weigh(Protocol):
    """Weighs the loss of a part, between its forward and its backward pass."""

    def __call__(self, loss: Tensor, weight: Any = None) -> Tensor:
        """Return what to go backward from. weight: what the loss is the mean over, if told."""


TakePass = Callable[[Any, Weigh], None]  # forward, weigh and backward, of a batch or of a part
ROWS = 6  # that prove how the loss of a batch comes of its parts: as a whole, and as 1 + 2 + 3
LEARN = 3  # calls after which it is known whether a step draws from Python's or numpy's numbers
TF32_CLOSE = 5e-3  # where a GPU may compute float32 with ten bits
CLOSE = 1e-4  # of a count: what float32 sums of some million labels round off


class NotProven(Exception):
    """Parts of the batch do not add up to the batch, for all that is known; the text says why."""


class NotRepeatable(NotProven):
    """The attempt that failed has changed what cannot be put back."""

    failure = ""  # in the device's own words


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
        self.shares: list[float] = [1.0]  # of the batch that was taken last, by part
        self.factor = 1.0  # by which all of it was multiplied in the end
        self._begin = begin
        self._take, self._loop, self._tell = take, loop, tell
        self._beside, self._ignored = dict(beside or {}), ignored
        self.refusal = ""  # why batches are taken whole, come what may
        self.micro: _PartSizes | None = None
        self._calls = 0
        self._gradients = _Gradients([])
        self._known: tuple[int, ...] = ()  # sizes of what the gradients are listed of
        self._rule: _Rule | None = None  # how parts add up, once that is proven
        # Of the pass that is under way:
        self._share: Callable[[float | None], Any] | None = None
        self._weight: Any = None
        self._loss: Tensor | None = None
        self._watching = ExitStack()
        self._watch: CountWatch | None = None
        # Of a trial: sees a loss with its graph, and makes all gradients smaller.
        self._look: Callable[[Tensor], None] | None = None
        self._shrink = 1.0

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
            return self._take_plainly(batch)
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
        return self._take_plainly(batch)  # and the error comes as it would have come

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
        loop = self._loop
        if self.micro is None:
            beside = {f"model {i}": m for i, m in enumerate(loop.models[1:], start=2)}
            self.micro = _PartSizes(loop, self._beside | beside, self._prove, self._ignored)
        groups = [g for optimizer in loop.optimizers for g in optimizer.param_groups]
        known = (len(loop.models), *(len(group["params"]) for group in groups))
        if known != self._known:
            of_models = [p for model in loop.models for p in model.parameters()]
            listed = [*of_models, *(p for group in groups for p in group["params"])]
            self._gradients = _Gradients(list({id(p): p for p in listed}.values()))
            self._known = known

    def _attempt(self, batch: Any, rows: int) -> Tensor | None:
        """Return the loss of the batch, in parts of so many rows."""
        assert self.micro is not None
        whole = self.micro.batch_rows
        if self._rule is None or rows >= whole:
            return self._take_whole(batch)
        parts = nested.split_batch(batch, rows, whole=whole)
        return self._take_parts(parts, self._rule)

    def _take_plainly(self, batch: Any) -> Tensor | None:
        self._begin()
        self.shares, self.factor = [1.0], 1.0
        self._take(batch, self._keep_loss)
        loss, self._loss = self._loss, None
        return loss

    def _keep_loss(self, loss: Tensor, weight: Any = None) -> Tensor:
        self._loss = loss.detach()
        return loss

    def _take_whole(self, batch: Any) -> Tensor | None:
        self._share = None
        self._begin()
        self.shares, self.factor = [1.0], 1.0
        try:
            self._take(batch, self._weigh)
        except BaseException:
            self._gradients.bring_back()
            self._loss = None
            self._loop.drop_pass()
            raise
        self._gradients.join()
        loss, self._loss = self._loss, None
        return loss

    def _weigh(self, loss: Tensor, weight: Any = None) -> Tensor:
        """Return the loss times its share. Called between forward and backward."""
        self._watching.close()
        self._gradients.put_aside()
        self._loss = loss.detach()
        if self._look is not None:
            self._look(loss)
        if self._share is None:
            self._weight = weight
            return loss if self._shrink == 1.0 else loss * self._shrink
        share = self._share(None if weight is None else float(weight)) * self._shrink
        # A mean over nothing is no number, and neither are its gradients.
        return loss * share if share else torch.zeros_like(loss, requires_grad=True)

    def _take_parts(
        self,
        parts: list[Any],
        rule: _Rule,
        *,
        repeat: Callable[[int], AbstractContextManager[None]] | None = None,
        seen: list[list[SeenCount]] | None = None,
    ) -> Tensor:
        """Return the loss of the batch of these parts. repeat: returns the context in which the
        part of this number draws what it drew in the batch. seen: gets what each divides by."""
        rows = [nested.count_rows(part) for part in parts]
        assert self.micro is not None
        begun = self.micro.keep_slots()
        self._begin()
        adder = _PartAdder(rule, rows)
        try:
            for i, part in enumerate(parts):
                if i:
                    begun.restore(but=rule.adding)
                with nullcontext() if repeat is None else repeat(i):
                    self._take_part(part, adder)
            loss, self.factor = adder.finish()
            self.shares = adder.make_shares()
            if seen is not None:
                seen += adder.seen
        except BaseException:
            self._gradients.bring_back()
            self._loss = None
            self._loop.drop_pass()
            raise
        self._gradients.join(self.factor)
        return loss

    def _take_part(self, part: Any, adder: _PartAdder) -> None:
        self._loss, self._watch = None, CountWatch() if adder.rule.is_watched else None
        self._share = self._make_share(adder)
        with self._watching:
            if self._watch is not None:
                self._watching.enter_context(self._watch)
            self._take(part, self._weigh)
        if self._loss is None:
            raise NotProven("its passes were not seen")
        adder.add(self._loss)
        self._loss = None

    def _make_share(self, adder: _PartAdder) -> Callable[[float | None], float]:
        watch = self._watch
        return lambda weight: adder.weigh(weight, watch)

    def _prove(self, batch: Any) -> None:
        """Find how parts of the batch add up to it. Raises NotProven."""
        if self._rule is not None:
            return
        assert self.micro is not None
        whole, failure = nested.count_rows(batch), ""
        self._refuse_by_kind(batch, whole)
        with self._loop.ignore_passes():
            for rows in dict.fromkeys((min(ROWS, max(2, whole // 2)), 2)):
                if rows >= whole:
                    break
                try:
                    self._rule = self._find_rule(nested.take_first_rows(batch, rows), rows)
                    return
                except NotProven:
                    raise
                except Exception as error:
                    if not is_oom(error):
                        why = describe_error(error)
                        raise NotProven(f"the step fails with a few rows ({why})") from None
                    failure = f" ({extract_message(error)})"
        raise NotProven(
            f"there is no room to prove with a few rows that parts of a batch add up{failure}"
        )

    def _refuse_by_kind(self, batch: Any, whole: int) -> None:
        """Raise NotProven where what is seen of models and batch is enough to."""
        if whole < 2:
            raise NotProven("nothing in the batch tells its rows")
        for tensor in nested.find_tensors(batch):
            if tensor.dim() and len(tensor) != whole and not tensor.is_floating_point():
                raise NotProven(
                    f"the batch holds tensors of {whole} and of {len(tensor)} rows, so that nobody "
                    "knows what belongs to a part of it"
                )
        for model in self._loop.models:
            for path, layer in model.named_modules():
                if _mixes_rows(layer):
                    raise NotProven(
                        f"{path or 'the model'} ({type(layer).__name__}) computes with the mean of "
                        "all rows of a batch; GroupNorm and LayerNorm don't, nor does eval()"
                    )
        if any(map(_has_hooks, self._gradients.parameters)):
            raise NotProven("hooks of its parameters act on the gradients of each backward pass")

    def _find_rule(self, batch: Any, rows: int) -> _Rule:
        """Return how parts of these rows add up to them. Raises NotProven."""
        assert self.micro is not None
        sizes = [1, 2, 3] if rows == ROWS else [1, rows - 1]
        trial = _Trial(self, batch, sizes)
        before = self._gradients.take()
        try:
            for kernels in (nullcontext(), sdpa_kernel(SDPBackend.MATH)):
                with kernels:
                    rule = trial.find_rule()
                if rule is not None or not trial.draws.is_hidden:
                    break
        finally:
            self._gradients.put(before)
            self._look, self._shrink = None, 1.0
            self.micro.start_again()
        if rule is None:
            raise NotProven(trial.reasons[0])
        self.micro.learn(trial.changes)
        return rule


class _Rule(NamedTuple):
    """How the loss of a batch comes of its parts: as the mean over what each counts."""

    kind: str  # rows, told (by the step itself), counted (by what is divided by), sum
    counts: tuple[int, ...] = ()  # what is divided by that goes with the rows, by its number
    of: int = 0  # how often something is divided by in a pass
    is_watched: bool = False
    adding: frozenset[Slot] = frozenset()  # state that parts add up as the batch would


class _PartAdder:
    """Adds up the losses of the parts of one batch."""

    def __init__(self, rule: _Rule, rows: Sequence[int]) -> None:
        self.rule, self._rows = rule, rows
        self._unit: float | None = None  # what shares are of: the whole, as the first part promises
        self._losses: list[Tensor] = []
        self._weights: list[float] = []
        self.seen: list[list[SeenCount]] = []

    def weigh(self, weight: float | None, watch: CountWatch | None) -> float:
        """Return the share of the next part, whose loss is the mean over `weight`."""
        rows, whole = self._rows[len(self._weights)], sum(self._rows)
        if watch is not None:
            self.seen.append(watch.counts)
        if self.rule.kind == "sum":
            self._weights.append(1.0)
            return 1.0
        found = float(rows)
        if self.rule.kind == "told":
            found = -1.0 if weight is None else weight
        elif self.rule.kind == "counted":
            assert watch is not None
            found = watch.counts[self.rule.counts[0]].value if self._is_alike(watch) else -1.0
        if not 0 <= found < math.inf:
            raise NotProven("not each part of a batch tells what its loss is the mean over")
        if self.rule.kind == "rows":
            self._unit = float(whole)
        elif self._unit is None and found:
            self._unit = found / rows * whole
        self._weights.append(found)
        return found / self._unit if self._unit else 0.0

    def add(self, loss: Tensor) -> None:
        """Add the loss of the part that was weighed last."""
        self._losses.append(loss)

    def finish(self) -> tuple[Tensor, float]:
        """Return the loss of the batch, and by what its gradients are to be multiplied. Raises
        NotProven where the parts divide by what does not go together."""
        total = sum(self._weights)
        if self.rule.kind == "sum":
            return torch.stack(self._losses).sum(), 1.0
        for number in self.rule.counts if self.rule.is_watched else ():
            counts = [seen[number].value for seen in self.seen if number < len(seen)]
            if not self._go_together(counts, total):
                raise NotProven(
                    "its loss divides by several things that are not in proportion in each part; "
                    "let it return (loss, weight), the weight what the loss is the mean over"
                )
        counted = [(n, x) for n, x in zip(self._weights, self._losses, strict=True) if n]
        if not counted:
            return self._losses[0], 1.0
        loss = torch.stack([x * (n / total) for n, x in counted]).sum()
        return loss, (self._unit or total) / total

    def make_shares(self) -> list[float]:
        """Return how much of the batch each part was."""
        weights = self._rows if self.rule.kind == "sum" else self._weights
        return [weight / (sum(weights) or 1.0) for weight in weights]

    def _is_alike(self, watch: CountWatch) -> bool:
        return len(watch.counts) == self.rule.of

    def _go_together(self, counts: list[float], total: float) -> bool:
        whole = sum(counts)
        return len(counts) == len(self._weights) and all(
            abs(count * total - weight * whole) <= CLOSE * abs(total * whole)
            for count, weight in zip(counts, self._weights, strict=True)
        )


class _Trial:
    """A few rows, as a whole and in parts."""

    def __init__(self, step: ProtectedStep, batch: Any, sizes: list[int]) -> None:
        self._step, self._batch, self._sizes = step, batch, sizes
        assert step.micro is not None
        self._micro, self._gradients = step.micro, step._gradients
        self._parts = nested.split_by_sizes(batch, sizes)
        self.draws = DrawKeeper()
        self.changes = StateChanges()
        self.reasons: list[str] = []

    def find_rule(self) -> _Rule | None:
        """Return how the parts add up to the whole; None where they do not, for `reasons`. Raises
        NotProven."""
        self._take_whole()
        if self._step._weight is not None:
            rules = [_Rule("told")]
        else:
            if self._step._loop.has_compiled:
                raise NotProven(
                    "nobody can see what compiled code divides by; let the step return (loss, "
                    "weight), the weight what the loss is the mean over, as len(x)"
                )
            rules = self._list_rules()
        self.reasons = []
        for rule in rules:
            found = self._try_rule(rule)
            if found is not None:
                return found
        return None

    def _take_whole(self) -> None:
        """Take all rows; keep what came of them."""
        step, micro = self._step, self._micro
        for step._shrink in (1.0, 2.0**-16):  # a scale that is too large yet gives no numbers
            self.draws, step._look = DrawKeeper(), self._refuse_strangers
            finder, kept = micro.make_finder(), micro.begin_again()
            watch = step._watch = None if step._loop.has_compiled else CountWatch()
            with self.draws.record(), step._watching:
                if watch is not None:
                    step._watching.enter_context(watch)
                loss = step._take_whole(self._batch)
            step._look = None
            if loss is None:
                raise NotProven("its passes were not seen")
            self.changes, lost = finder.find_changes(), kept.find_lost()
            if lost:
                raise NotProven(f"each pass changes {lost}")
            self._keeper = micro.make_keeper(self.changes)
            self._state, self._loss = self._keeper.read(), float(loss)
            self._wanted = self._gradients.take()
            self._counts = watch.counts if watch is not None else []
            self._is_dynamic = watch is not None and watch.is_dynamic
            finite = [_get_values(g).isfinite().all() for g in self._wanted if g is not None]
            if all(map(bool, finite)) and math.isfinite(self._loss):
                break
        else:
            raise NotProven("the loss or the gradients of a few rows are not finite")
        if not any(bool(_get_values(g).any()) for g in self._wanted if g is not None):
            raise NotProven("a few rows give no gradients that could be compared")

    def _take_parts(self, rule: _Rule) -> tuple[float, list[list[SeenCount]]]:
        """Take the rows in parts; return their loss and what each of them divides by."""
        self._micro.begin_again()
        seen: list[list[SeenCount]] = []
        loss = self._step._take_parts(self._parts, rule, repeat=self._repeat_draws, seen=seen)
        return float(loss), seen

    @contextmanager
    def _repeat_draws(self, number: int) -> Iterator[None]:
        start = sum(self._sizes[:number])
        self._micro.begin_draws_again()
        with self.draws.repeat(start, start + self._sizes[number], sum(self._sizes)):
            yield

    def _list_rules(self) -> list[_Rule]:
        """Return how they might add up, by what whole and parts divide by."""
        whole = self._counts
        _, seen = self._take_parts(_Rule("rows", is_watched=True))
        self._gradients.take()
        if any(len(each) != len(whole) for each in seen):
            raise NotProven("with fewer rows it divides by other things")
        shares = [size / sum(self._sizes) for size in self._sizes]
        groups: dict[tuple[float, ...], list[int]] = {_round(shares): []}
        for number, count in enumerate(whole):
            parts = [each[number].value for each in seen]
            is_same = all(abs(part - count.value) <= CLOSE * abs(count.value) for part in parts)
            adds = abs(sum(parts) - count.value) <= CLOSE * abs(count.value)
            if count.value > 0 and adds and not is_same and min(parts) >= 0:
                key = _round([part / count.value for part in parts])
                groups.setdefault(key, []).append(number)
        rules = []
        for key, numbers in groups.items():
            told = [n for n in numbers if not whole[n].is_static]
            if told:
                of_all = (told[0], *(n for n in numbers if n != told[0]))
                rules.append(_Rule("counted", of_all, len(whole), is_watched=True))
            elif key == _round(shares):
                is_watched = self._is_dynamic and bool(numbers)
                rules.append(_Rule("rows", tuple(numbers), len(whole), is_watched))
        return [*rules, _Rule("sum")]

    def _try_rule(self, rule: _Rule) -> _Rule | None:
        """Return the rule, with the state that adds up; None where it is not this one."""
        for _ in range(2):
            loss, _ = self._take_parts(rule)
            state, gradients = self._keeper.read(), self._gradients.take()
            if problem := self._compare(loss, gradients):
                self.reasons.append(problem)
                return None
            others = {
                slot
                for slot, value in self._state.items()
                if not self._is_close(value, state.get(slot))
            }
            others |= self._state.keys() ^ state.keys()
            if not others:
                return rule
            if rule.adding:
                return self._refuse_state(rule, others)
            rule = rule._replace(adding=frozenset(others))
        return self._refuse_state(rule, others)

    def _refuse_state(self, rule: _Rule, others: Set[Slot]) -> _Rule:
        strict = sorted(others & (self.changes.lasting | self.changes.written))
        if strict:
            name = ".".join(filter(None, strict[0]))
            raise NotProven(f"each pass changes {name} by the rows that it is given")
        # What a pass leaves behind, and none begins with.
        return rule._replace(adding=rule.adding - others)

    def _compare(self, loss: float, gradients: list[Tensor | None]) -> str:
        """Return what of the parts is not as of the whole; empty where nothing is."""
        tolerance = self._find_tolerance()
        names = self._micro.name_parameters(self._gradients.parameters)
        pairs = [
            (name, *_make_dense(one, other))
            for name, one, other in zip(names, self._wanted, gradients, strict=True)
            if one is not None or other is not None
        ]
        sizes = [float(one.abs().max()) if one.numel() else 0.0 for _, one, _ in pairs]
        least = 1e-2 * max(sizes, default=0.0)  # what is small beside others may be rounding alone
        for (name, one, other), size in zip(pairs, sizes, strict=True):
            apart = float((one - other).abs().max()) if one.numel() else 0.0
            if not apart <= tolerance * max(size, least):
                return (
                    "the gradients of its parts do not add up to those of the batch "
                    f"({apart / max(size, least):.2g} of the largest number apart in {name}), as "
                    "where a loss compares rows with one another, or is the mean over something "
                    "that nobody told: then let the step return (loss, weight)"
                )
        if not abs(loss - self._loss) <= tolerance * max(abs(self._loss), abs(loss)):
            return (
                f"the losses of its parts come to {loss:g}, and that of the batch is {self._loss:g}"
            )
        return ""

    def _find_tolerance(self) -> float:
        is_tf32 = self._step._loop.device.type == "cuda" and torch.backends.cudnn.allow_tf32
        return max(self.draws.tolerance, TF32_CLOSE if is_tf32 else 0.0)

    def _is_close(self, one: Any, other: Any) -> bool:
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return type(one) is type(other) and bool(one == other)
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not one.is_floating_point() or not one.numel():
            return torch.equal(one, other)
        apart = (one.float() - other.float()).abs().max()
        return bool(apart <= self._find_tolerance() * one.float().abs().max())

    def _refuse_strangers(self, loss: Tensor) -> None:
        """Raise NotProven where the loss has a gradient for what nobody knows."""
        known, rows = {id(p) for p in self._gradients.parameters}, sum(self._sizes)
        known |= self._micro.list_given()
        waiting: list[Any] = [loss.grad_fn]
        seen: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            waiting += [inner for inner, _ in node.next_functions]
            leaf = getattr(node, "variable", None)
            if leaf is None or id(leaf) in known:
                continue
            is_input = leaf.dim() > 0 and len(leaf) == rows  # as of a penalty on gradients
            if isinstance(leaf, nn.Parameter) or not is_input:
                raise NotProven(
                    f"it has gradients for a tensor of shape {tuple(leaf.shape)} that belongs to "
                    "no model or optimizer that the account watches"
                )


class _Gradients:
    """The gradients that parameters have of earlier batches, out of the way of those of this one:
    an attempt that fails in its backward pass has added to some of them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self._before: list[tuple[Tensor, Tensor]] | None = None

    def put_aside(self) -> None:
        """Begin with none, unless that was done already."""
        if self._before is None:
            self._before = [(p, g) for p in self.parameters if (g := p.grad) is not None]
            for parameter, _ in self._before:
                parameter.grad = None

    @torch.no_grad()
    def join(self, factor: float = 1.0) -> None:
        """Add what has come, times the factor, to what was there before."""
        before, self._before = self._before or [], None
        if factor != 1.0:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)
        sums: list[tuple[Tensor, Tensor]] = []
        for parameter, old in before:
            new, parameter.grad = parameter.grad, old
            if new is not None and (old.is_sparse or new.is_sparse):
                parameter.grad = old + new
            elif new is not None:
                sums.append((old, new))
        if sums:
            torch._foreach_add_([old for old, _ in sums], [new for _, new in sums])

    def bring_back(self) -> None:
        """Be as before, without what has come."""
        if self._before is None:  # no backward pass has begun
            return
        before, self._before = self._before, None
        self.take()
        for parameter, old in before:
            parameter.grad = old

    def take(self) -> list[Tensor | None]:
        """Return all gradients, which the parameters have no longer."""
        gradients = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def put(self, gradients: list[Tensor | None]) -> None:
        """Give the parameters these gradients."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient


class _NoRecorder:
    """Records nothing: the last attempt is left to whoever records the loop."""

    def start(self) -> None:
        pass

    def write(self) -> None:
        pass

    def read_allocator(self) -> dict[str, int]:
        return {}


class _PartSizes(MicroBatches):
    """Micro-batches of a loop whose batches may be of any size, halved only where that is proven
    to change nothing. What cannot be taken in parts fails as it would without."""

    def __init__(
        self,
        loop: OwnLoop,
        beside: Mapping[str, Any],
        prove: Callable[[Any], None],
        ignored: Set[str],
    ) -> None:
        """prove: raises NotProven."""
        self._model, self._others = loop.models[0], beside
        super().__init__(
            1,
            whole=1,
            what="training",
            device=loop.device,
            model=self._model,
            accounts=loop.accounts.phases.accounts,
            witness=_NoRecorder(),
            changes=StateChanges(own=True, slots=list_restorable(self._model, beside)),
            beside=beside,
        )
        self._prove, self._ignored = prove, ignored
        self._batch: Any = None
        self.batch_rows = 0  # of this batch
        self._begun: AttemptState | None = None
        self._draws_python, self._fits = False, 0
        self._learnt: StateChanges | None = None  # what a pass changes

    def fit(self, attempt: Callable[[B, int], T], batch: B) -> T:
        """Return what `attempt(batch, rows)` returns, for the largest number of rows that fits.

        Raises NotProven, with the state as it began, and whatever attempt raises."""
        self.batch_rows = whole = nested.count_rows(batch)
        if whole == 1:
            return attempt(batch, whole)
        if whole > self._whole:
            self.rows, self._whole = whole if self.rows == self._whole else self.rows, whole
        finder = self.make_finder() if self._learnt is None else None
        self._batch = batch
        try:
            done = super().fit(attempt, batch)
        finally:
            self._batch = None
        begun, self._begun = self._begun, None
        self._fits += 1
        if begun is not None and begun.random is not None and self._fits <= LEARN:
            self._draws_python |= not _is_same_state(begun.random, _read_python_state())
        if finder is not None and self._learnt is None:
            self.learn(finder.find_changes())
        return done

    def make_finder(self) -> ChangeFinder:
        """Return what finds the changes of a pass from now on."""
        return ChangeFinder(self._model, (), self._others, is_light=True, ignored=self._ignored)

    def make_keeper(self, changes: StateChanges) -> StateKeeper:
        """Return what keeps these changes."""
        return StateKeeper(self._model, changes, self._others)

    def learn(self, changes: StateChanges) -> None:
        """Keep what a pass changes, and that alone."""
        if self._learnt is not None:
            changes = replace(
                changes,
                slots=changes.slots | self._learnt.slots,
                mutated=changes.mutated | self._learnt.mutated,
                trained=changes.trained | self._learnt.trained,
            )
        self._learnt, self._keeper = changes, self.make_keeper(changes)

    def keep_slots(self) -> KeptState:
        """Return the state of now, but for random numbers."""
        return self._keeper.keep()

    def begin_again(self) -> KeptState:
        """Go back to where this batch began; return that state."""
        assert self._begun is not None
        self._restore(self._begun)
        return self._begun.kept

    def begin_draws_again(self) -> None:
        """Let the next numbers that are drawn be those that the batch began with."""
        assert self._begun is not None
        self._restore_draws(self._begun)

    def list_given(self) -> set[int]:
        """Return the tensors of the batch, by their ids."""
        return {id(tensor) for tensor in nested.find_tensors(self._batch)}

    def start_again(self) -> None:
        """Go back to where this batch began, if it has begun."""
        if self._begun is not None:
            self._restore(self._begun)

    def name_parameters(self, parameters: list[Tensor]) -> list[str]:
        """Return the names of these parameters, as their models have them."""
        models = (self._model, *(m for m in self._others.values() if isinstance(m, nn.Module)))
        names = {id(p): name for model in models for name, p in model.named_parameters()}
        return [names.get(id(p), "a parameter") for p in parameters]

    def _copy_state(self) -> AttemptState:
        is_asked = self._draws_python or self._fits < LEARN  # 200 us, where nobody draws
        python = _read_python_state() if is_asked else None
        self._begun = AttemptState(self._keeper.keep(), python, get_random_state(self._device))
        return self._begun

    def _halve(self, why: str) -> None:
        self._prove(self._batch)
        self.rows = min(self.rows, nested.count_rows(self._batch))
        super()._halve(why)

    def _refuse_unrepeatable(
        self, batch: Any, before: list[int], state: AttemptState, failure: str
    ) -> None:
        try:
            super()._refuse_unrepeatable(batch, before, state, failure)
        except MemoryExhausted as error:
            lost = NotRepeatable(str(error.failure.unrepeated))
        else:
            return
        lost.failure = failure
        raise lost

    def _attempt_watched(self, attempt: Callable[[], T], text: str, *, phase: str, batch: Any) -> T:
        if not nested.count_rows(batch):
            self._prove(batch)
        done = attempt()  # or else the error goes on as it comes
        self.recovered += 1
        return done


def _read_python_state() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _is_same_state(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    numbers = [(state[1][1].tobytes(), state[1][2:]) for state in (one, other)]
    return one[0] == other[0] and numbers[0] == numbers[1]


def _round(shares: list[float]) -> tuple[float, ...]:
    return tuple(round(share, 4) for share in shares)


def _mixes_rows(layer: nn.Module) -> bool:
    """Return whether this computes with statistics of the batch that it is given."""
    if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
        return False
    return layer.training or layer.running_mean is None


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _get_values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _make_dense(one: Tensor | None, other: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return both as float32 or more exact numbers; one that is not there as zeros."""
    made = [None if t is None else t.to_dense() if t.is_sparse else t for t in (one, other)]
    like = next(t for t in made if t is not None)
    wide = torch.float64 if like.dtype is torch.float64 else torch.float32
    first, second = (torch.zeros_like(like) if t is None else t for t in made)
    return first.to(wide), second.to(wide)


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
