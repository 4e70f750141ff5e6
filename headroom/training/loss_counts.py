"""Sees what a loss is the mean over, while it is computed: rows, labels that are not skipped, what
a mask lets through. And lets a few rows draw the random numbers that they drew as part of more, so
that a batch can be compared with its parts. Both look at the operations of PyTorch, not at code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headroom.base import nested

ops = torch.ops.aten
# Of their inputs the one whose numbers the result is the mean of, by default or where asked for.
_MEANS = (
    *(ops.mean, ops.mse_loss, ops.smooth_l1_loss, ops.huber_loss, ops.soft_margin_loss),
    *(ops.binary_cross_entropy, ops.multi_margin_loss, ops.multilabel_margin_loss_forward),
)
_LABEL_MEANS = (ops.nll_loss_forward, ops.nll_loss2d_forward)  # give the sum of weights beside it
_DIVISIONS = (ops.div, ops.div_, ops.reciprocal, ops.true_divide)
_TAKES_INDICES = {ops.index: 1, ops.index_select: 2, ops.embedding: 1, ops.gather: 2}
# Attention whose kernels draw by themselves, so that nobody can have them draw the same again.
_HIDDEN_DRAWS = (
    *(ops._scaled_dot_product_flash_attention, ops._scaled_dot_product_efficient_attention),
    *(ops._scaled_dot_product_cudnn_attention,),
)
# By the least exact type among the numbers: how far the sum of parts may be off, of the largest.
TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


@dataclass(frozen=True)
class SeenCount:
    """Something that a loss may have been divided by. is_static: it goes by shapes alone."""

    value: float
    is_static: bool


class CountWatch(TorchDispatchMode):
    """Notes what is divided by in a forward pass. It waits for the device at each of them."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[SeenCount] = []
        self.is_dynamic = False  # shapes went by what the data holds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func, args, result)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        packet = getattr(func, "overloadpacket", None)
        if packet in _LABEL_MEANS:
            if args[3] == 1:  # the mean
                self.counts.append(SeenCount(float(result[1]), is_static=False))
        elif packet in _MEANS:
            if isinstance(result, Tensor) and not result.dim() and not _is_sum(func, args):
                self.counts.append(SeenCount(float(args[0].numel()), is_static=True))
        elif packet in _DIVISIONS:
            divisor = args[-1] if packet is not ops.reciprocal else args[0]
            if isinstance(divisor, Tensor) and not divisor.dim():
                self.counts.append(SeenCount(float(divisor), is_static=False))
        elif packet is ops._local_scalar_dense:
            if isinstance(result, (int, float)):
                self.counts.append(SeenCount(float(result), is_static=False))
        elif torch.Tag.dynamic_output_shape in func.tags and _chooses(packet, args):
            self.is_dynamic = True
            if isinstance(result, Tensor) and result.is_floating_point() and result.dim() == 1:
                self.counts.append(SeenCount(float(result.numel()), is_static=False))


def _is_sum(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the loss was asked for the sum of its rows, not for their mean."""
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)).get("reduction", 1) != 1


def _chooses(packet: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the shape of the result goes by values, as that of a mask's."""
    if packet is not ops.index:
        return True
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


class DrawKeeper:
    """The random numbers that some rows have drawn, in their order, and how exact they counted."""

    def __init__(self) -> None:
        self.draws: list[list[Tensor]] = []
        self.least_exact = torch.float64
        self.is_hidden = False  # kernels have drawn that nobody can ask

    @property
    def tolerance(self) -> float:
        """Return how far, of the largest number, two ways to compute the same may be apart."""
        return TOLERANCES.get(self.least_exact, 3e-2)

    def record(self) -> TorchDispatchMode:
        """Return a context in which the draws of all rows are kept."""
        return _DrawMode(self, self._keep)

    def repeat(self, start: int, stop: int, whole: int) -> TorchDispatchMode:
        """Return a context in which the rows from start to stop, of so many, draw the same again.
        Raises IndexError there for an index to a row that is none of them."""
        draws = iter(self.draws)

        def take(drawn: list[Tensor]) -> None:
            for tensor, kept in zip(drawn, next(draws, ()), strict=False):
                _copy_rows(tensor, kept, start / whole, stop / whole)

        return _DrawMode(self, take, guards=True)

    def _keep(self, drawn: list[Tensor]) -> None:
        self.draws.append([tensor.detach().clone() for tensor in drawn])


def _copy_rows(tensor: Tensor, kept: Tensor, start: float, stop: float) -> None:
    """Copy what the rows had, of a tensor in which one axis is theirs, or none is."""
    if tensor.dim() != kept.dim() or tensor.dtype != kept.dtype:
        return
    others = [i for i in range(kept.dim()) if tensor.shape[i] != kept.shape[i]]
    if len(others) > 1:
        return
    if others:
        (axis,) = others
        whole = kept.shape[axis]
        first, last = start * whole, stop * whole
        if abs(last - first - tensor.shape[axis]) > 1e-6 or abs(first - round(first)) > 1e-6:
            return
        kept = kept.narrow(axis, round(first), tensor.shape[axis])
    tensor.copy_(kept)


class _DrawMode(TorchDispatchMode):
    """Hands each draw of random numbers on. guards: indices are looked at before they are used: on
    a GPU one that is too large ends the process."""

    supports_higher_order_operators = True

    def __init__(
        self, keeper: DrawKeeper, take: Callable[[list[Tensor]], None], *, guards: bool = False
    ) -> None:
        super().__init__()
        self._keeper, self._take, self._guards = keeper, take, guards

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "overloadpacket", None)
        if self._guards and packet in _TAKES_INDICES:
            _refuse_index(packet, args)
        result = func(*args, **(kwargs or {}))
        for tensor in nested.find_tensors(result):
            self._note_dtype(tensor)
        if packet in _HIDDEN_DRAWS:
            self._keeper.is_hidden |= _has_dropout(func, args, kwargs or {})
        elif torch.Tag.nondeterministic_seeded in func.tags:
            return self._share_draws(packet, args, result)
        return result

    def _share_draws(self, packet: Any, args: tuple[Any, ...], result: Any) -> Any:
        if packet is ops.native_dropout:
            values, mask = result
            self._take([mask])
            kept_share = 1 - args[1] if args[1] < 1 else 1.0
            return args[0] * mask / kept_share if args[2] is not False else values, mask
        self._take([t for t in nested.find_tensors(result) if not t.is_meta])
        return result

    def _note_dtype(self, tensor: Tensor) -> None:
        if tensor.is_floating_point():
            now, is_exact = tensor.dtype, torch.finfo(tensor.dtype).eps
            if is_exact > torch.finfo(self._keeper.least_exact).eps:
                self._keeper.least_exact = now


def _has_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p"))


def _refuse_index(packet: Any, args: tuple[Any, ...]) -> None:
    """Raise IndexError for an index beyond the end. Waits for the device."""
    for size, indices in _iterate_indices(packet, args):
        if indices.dtype in (torch.int64, torch.int32) and indices.numel():
            least, most = indices.aminmax()
            if int(most) >= size or int(least) < -size:
                raise IndexError(f"index {int(most)} of {size}")


def _iterate_indices(packet: Any, args: tuple[Any, ...]) -> Iterator[tuple[int, Tensor]]:
    """Yield the size of what is looked into, and the indices."""
    if packet is ops.index:
        for axis, indices in enumerate(args[1]):
            if indices is not None:
                yield args[0].shape[axis], indices
    elif packet is ops.embedding:
        yield args[0].shape[0], args[1]
    elif args[0].dim():
        yield args[0].shape[args[1]], args[2]
