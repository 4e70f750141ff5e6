"""Whether parts of a batch add up to it: a few rows of it are taken as a whole and in parts, with
the same random numbers for the same rows, and losses, gradients and state are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headroom.base import nested
from headroom.base.import_paths import describe_error
from headroom.training.loss_counts import DrawKeeper, SeenCount
from headroom.training.micro_batches import extract_message
from headroom.training.part_sizes import PartSizes
from headroom.training.part_sums import CLOSE, NotProven, Rule
from headroom.training.state_changes import Slot, StateChanges
from headroom.training.step_passes import StepPasses
from headroom.watch.out_of_memory import is_oom

ROWS = 6  # that prove how the loss of a batch comes of its parts: as a whole, and as 1 + 2 + 3
TF32_CLOSE = 5e-3  # where a GPU may compute float32 with ten bits


def prove_parts(batch: Any, passes: StepPasses, part_sizes: PartSizes) -> Rule:
    """Return how parts of the batch add up to it. Raises NotProven."""
    whole, failure = nested.count_rows(batch), ""
    _refuse_by_kind(batch, whole, passes)
    with passes.loop.ignore_passes():
        for rows in dict.fromkeys((min(ROWS, max(2, whole // 2)), 2)):
            if rows >= whole:
                break
            try:
                return _find_rule(nested.take_first_rows(batch, rows), rows, passes, part_sizes)
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


def _refuse_by_kind(batch: Any, whole: int, passes: StepPasses) -> None:
    """Raise NotProven where what is seen of models and batch is enough to."""
    if whole < 2:
        raise NotProven("nothing in the batch tells its rows")
    for tensor in nested.find_tensors(batch):
        if tensor.dim() and len(tensor) != whole and not tensor.is_floating_point():
            raise NotProven(
                f"the batch holds tensors of {whole} and of {len(tensor)} rows, so that nobody "
                "knows what belongs to a part of it"
            )
    for model in passes.loop.models:
        for path, layer in model.named_modules():
            if _mixes_rows(layer):
                raise NotProven(
                    f"{path or 'the model'} ({type(layer).__name__}) computes with the mean of "
                    "all rows of a batch; GroupNorm and LayerNorm don't, nor does eval()"
                )
    if any(map(_has_hooks, passes.gradients.parameters)):
        raise NotProven("hooks of its parameters act on the gradients of each backward pass")


def _find_rule(batch: Any, rows: int, passes: StepPasses, part_sizes: PartSizes) -> Rule:
    """Return how parts of these rows add up to them. Raises NotProven."""
    sizes = [1, 2, 3] if rows == ROWS else [1, rows - 1]
    trial = PartTrial(passes, part_sizes, batch, sizes)
    before = passes.gradients.take()
    try:
        for kernels in (nullcontext(), sdpa_kernel(SDPBackend.MATH)):
            with kernels:
                rule = trial.find_rule()
            if rule is not None or not trial.draws.is_hidden:
                break
    finally:
        passes.gradients.put(before)
        passes.look, passes.shrink = None, 1.0
        part_sizes.start_again()
    if rule is None:
        raise NotProven(trial.reasons[0])
    part_sizes.learn(trial.changes)
    return rule


class PartTrial:
    """A few rows, as a whole and in parts."""

    def __init__(
        self, passes: StepPasses, part_sizes: PartSizes, batch: Any, sizes: list[int]
    ) -> None:
        self._passes, self._part_sizes, self._batch, self._sizes = passes, part_sizes, batch, sizes
        self._gradients = passes.gradients
        self._parts = nested.split_by_sizes(batch, sizes)
        self.draws = DrawKeeper()
        self.changes = StateChanges()
        self.reasons: list[str] = []

    def find_rule(self) -> Rule | None:
        """Return how the parts add up to the whole; None where they do not, for `reasons`. Raises
        NotProven."""
        self._take_whole()
        if self._passes.weight is not None:
            rules = [Rule("told")]
        else:
            if self._passes.loop.has_compiled:
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
        passes, part_sizes = self._passes, self._part_sizes
        is_watched = not passes.loop.has_compiled
        for passes.shrink in (1.0, 2.0**-16):  # a scale that is too large yet gives no numbers
            self.draws, passes.look = DrawKeeper(), self._refuse_strangers
            finder, kept = part_sizes.make_finder(), part_sizes.begin_again()
            with self.draws.record(), passes.watch_counts(is_watched) as watch:
                loss = passes.take_whole(self._batch)
            passes.look = None
            if loss is None:
                raise NotProven("its passes were not seen")
            self.changes, lost = finder.find_changes(), kept.find_lost()
            if lost:
                raise NotProven(f"each pass changes {lost}")
            self._keeper = part_sizes.make_keeper(self.changes)
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

    def _take_parts(self, rule: Rule) -> tuple[float, list[list[SeenCount]]]:
        """Take the rows in parts; return their loss and what each of them divides by."""
        begun = self._part_sizes.begin_again()
        seen: list[list[SeenCount]] = []
        loss = self._passes.take_parts(
            self._parts, rule, begun, repeat=self._repeat_draws, seen=seen
        )
        return float(loss), seen

    @contextmanager
    def _repeat_draws(self, number: int) -> Iterator[None]:
        start = sum(self._sizes[:number])
        self._part_sizes.begin_draws_again()
        with self.draws.repeat(start, start + self._sizes[number], sum(self._sizes)):
            yield

    def _list_rules(self) -> list[Rule]:
        """Return how they might add up, by what whole and parts divide by."""
        whole = self._counts
        _, seen = self._take_parts(Rule("rows", is_watched=True))
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
                rules.append(Rule("counted", of_all, len(whole), is_watched=True))
            elif key == _round(shares):
                is_watched = self._is_dynamic and bool(numbers)
                rules.append(Rule("rows", tuple(numbers), len(whole), is_watched))
        return [*rules, Rule("sum")]

    def _try_rule(self, rule: Rule) -> Rule | None:
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

    def _refuse_state(self, rule: Rule, others: Set[Slot]) -> Rule:
        strict = sorted(others & (self.changes.lasting | self.changes.written))
        if strict:
            name = ".".join(filter(None, strict[0]))
            raise NotProven(f"each pass changes {name} by the rows that it is given")
        # What a pass leaves behind, and none begins with.
        return rule._replace(adding=rule.adding - others)

    def _compare(self, loss: float, gradients: list[Tensor | None]) -> str:
        """Return what of the parts is not as of the whole; empty where nothing is."""
        tolerance = self._find_tolerance()
        names = self._part_sizes.name_parameters(self._gradients.parameters)
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
        is_tf32 = self._passes.loop.device.type == "cuda" and torch.backends.cudnn.allow_tf32
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
        known |= self._part_sizes.list_given()
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
