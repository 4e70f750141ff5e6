"""Says how two tensors differ, bit for bit: how many elements, which one the most, by how much and
in how many units in the last place. Finds which single bit explains that a tensor has another
digest, and flips one for a test.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headroom.settings.read_settings import ConfigError
from headroom.training.step_digests import (
    PERIODS,
    compute_digest,
    draw_weights,
    fold_words,
    spread_bits,
    view_words,
)

INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def describe_difference(was: Tensor, now: Tensor) -> str:
    """Return how the tensors differ in words; empty where they are the same to the bit."""
    was, now = (t.detach().to_dense().cpu() for t in (was, now))
    if was.shape != now.shape or was.dtype != now.dtype:
        return f"it was {was.dtype} {tuple(was.shape)} and is {now.dtype} {tuple(now.shape)}"
    if was.is_complex():
        was, now = torch.view_as_real(was), torch.view_as_real(now)
    shape = tuple(was.shape)
    was, now = was.contiguous().reshape(-1), now.contiguous().reshape(-1)
    mine, other = _view_integers(was), _view_integers(now)
    (places,) = torch.nonzero(mine != other, as_tuple=True)
    if not len(places):
        return ""
    far = (was[places].double() - now[places].double()).abs()
    at = int(places[int(torch.nan_to_num(far, nan=float("inf")).argmax())])
    first, second = was[at].item(), now[at].item()
    element = list(map(int, np.unravel_index(at, shape))) if shape else []
    text = f"{len(places):,} of {was.numel():,} elements differ, most at {element}: "
    text += f"{first!r} was, {second!r} is"
    bits = int(mine[at]) ^ int(other[at])
    if bits.bit_count() == 1 or bits == -(2 ** (8 * was.element_size() - 1)):
        text += (
            f", one bit (bit {(bits & (2**64 - 1)).bit_length() - 1 if bits > 0 else _top(was)})"
        )
    if was.is_floating_point():
        text += f", {abs(_order(int(mine[at]), was) - _order(int(other[at]), was)):,} ULP"
    return text


def _top(tensor: Tensor) -> int:
    return 8 * tensor.element_size() - 1


def _view_integers(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8).view(INTEGERS[flat.element_size()])


def _order(integer: int, tensor: Tensor) -> int:
    """Return the place of a float among all floats of its kind, 0 of zero: between two neighbours
    lies one unit in the last place."""
    return integer if integer >= 0 else -(integer & (2 ** _top(tensor) - 1))


def explain_by_one_bit(now: Tensor, digest: int) -> str:
    """Return in words which bit of the tensor, flipped, gives that digest; empty where none does.
    To take another one's for it has a chance of one in 2**32 at most for each bit that there is."""
    if now.is_sparse:  # its digest is of places, too
        return ""
    now = now.detach().cpu()
    size, words = view_words(now)
    missing = torch.tensor(digest) - compute_digest(now)
    for bit in range(64):
        (places,) = torch.nonzero(_compute_changes(words, bit) == missing, as_tuple=True)
        places = places[places * 64 + bit < size * 8]  # not of the zeros behind the last
        if len(places) > 1:
            which = (int(places[0]) * 64 + bit) % (8 * now.element_size())
            return f"one bit: bit {which} of one of {len(places):,} elements"
        if len(places):
            return _name_bit(now, int(places[0]) * 64 + bit)
    return ""


def _compute_changes(words: Tensor, bit: int) -> Tensor:
    """Return by how much the digest changes where this bit of a word is flipped, for each word."""
    one = torch.tensor(1, dtype=torch.int64) << bit  # int64 wraps around, as the digest does
    is_set = (words >> bit) & 1 == 1
    sums, weights = fold_words(words), torch.from_numpy(draw_weights())
    places, changes, begin = torch.arange(len(words)), torch.zeros_like(words), 0
    for period in PERIODS if len(sums) < len(words) else (len(words),):
        part, weight = (row[begin : begin + period] for row in (sums, weights))
        more, less = ((spread_bits(part + d) - spread_bits(part)) * weight for d in (one, -one))
        changes += torch.where(is_set, less[places % period], more[places % period])
        begin += period
    return changes


def _name_bit(now: Tensor, at: int) -> str:
    """Return which bit this is, counted from the first of the tensor, and what it changes."""
    size = 8 * now.element_size()
    element, bit = divmod(at, size)
    flat = now.contiguous().reshape(-1)
    value = flat[element].item()
    then = flat.clone()
    _flip_at(then, element, bit)
    place = list(map(int, np.unravel_index(element, tuple(now.shape)))) if now.dim() else []
    values = f"{then[element].item()!r} in the run, {value!r} here"
    return f"one bit: bit {bit} of element {place}, {values}"


def _flip_at(flat: Tensor, element: int, bit: int) -> None:
    """Flip a bit of an element of a row, in place."""
    octets = flat.view(torch.uint8)
    octets[element * flat.element_size() + bit // 8] ^= 1 << (bit % 8)


@torch.no_grad()
def flip_bit(named: dict[str, Tensor], name: str, element: int, bit: int) -> None:
    """Flip a bit of the tensor of this name; the first weight where it is empty. Raises ConfigError
    where there is no such bit."""
    name = name or next(n for n in named if n.startswith("weight/"))
    if name not in named:
        raise ConfigError(f"--flip: no tensor is called {name}; there are {', '.join(named)}")
    tensor = named[name]
    if not (0 <= element < tensor.numel() and 0 <= bit < 8 * tensor.element_size()):
        raise ConfigError(
            f"--flip: {name} has {tensor.numel():,} elements of {8 * tensor.element_size()} bits"
        )
    flat = tensor.detach().contiguous().reshape(-1).clone()
    _flip_at(flat, element, bit)
    changed = flat.reshape(tensor.shape)
    match name:
        case "loss":
            named[name] = changed
        case "random/torch":
            torch.set_rng_state(changed)
        case "random/numpy":
            keys = changed[:624].numpy().astype(np.uint32)
            kept: Any = np.random.get_state()
            np.random.set_state(("MT19937", keys, *kept[2:]))
        case "random/python":
            version, _, spare = random.getstate()
            random.setstate((version, tuple(map(int, changed[:625])), spare))
        case _:
            tensor.copy_(changed)
