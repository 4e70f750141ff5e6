"""Names the operations of a training that need not come out the same to the bit when they are done
again on their device, as those that add in whatever order the threads of a GPU arrive. PyTorch
itself names the ones that it has no deterministic kind of. Of the others, whose deterministic kind
it takes only where it is asked to, there is a list here, from its documentation.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_BY_PYTORCH = re.compile(r"^(\S+) .*does not have a deterministic implementation")
# By the names that they have below autograd, so that those of a backward pass are among them.
_ON_CUDA = {
    *("index_add", "index_copy", "index_put", "scatter", "scatter_add", "scatter_reduce"),
    *("convolution", "convolution_backward", "max_pool3d_with_indices_backward"),
    *(f"replication_pad{n}d_backward" for n in (1, 2, 3)),
    *("upsample_linear1d_backward", "upsample_bilinear2d_backward"),
    *("upsample_bicubic2d_backward", "upsample_trilinear3d_backward"),
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
}
_ON_CPU = {"index_put", "index_copy", "put"}


class UnrepeatableOperations(TorchDispatchMode):
    """Collects their names while it is entered, of this thread and of autograd's. They are right as
    long as deterministic ones have not been asked for: then others take their place."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry an operation out, and note its name where it may come out otherwise."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__.removesuffix("_").removeprefix("_unsafe_")
        device = next((a.device.type for a in args if isinstance(a, Tensor)), "")
        listed = {"cuda": _ON_CUDA, "cpu": _ON_CPU}.get(device, set())
        if name in listed and not _is_repeatable(name, device, args, kwargs):
            self.names.add(name)
        return func(*args, **kwargs)


def _is_repeatable(name: str, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this call comes out the same each time, though the operation need not."""
    match name:
        case "scatter":  # one number to each place
            return not isinstance(args[-1], Tensor)
        case "put":
            return not (args[3:] or kwargs.get("accumulate"))
        case "index_put":
            adds = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
            is_mask = all(i is None or i.dtype in (torch.bool, torch.uint8) for i in args[1])
            return is_mask or (adds and device == "cuda")  # which sorts them first
    return False


@contextmanager
def collect_unrepeatable() -> Iterator[set[str]]:
    """Yield a set; behind the block it has the names of such operations in it. Those that PyTorch
    names are among them where `ask_pytorch` asks for them."""
    names: set[str] = set()
    with warnings.catch_warnings(record=True) as caught, UnrepeatableOperations() as seen:
        warnings.simplefilter("always")
        yield names
    found = (_BY_PYTORCH.match(str(one.message)) for one in caught)
    names |= seen.names | {match[1] for match in found if match}


def ask_pytorch(asks: bool) -> None:
    """Have PyTorch warn of each operation that it has no deterministic kind of, or no longer."""
    torch.use_deterministic_algorithms(asks, warn_only=True)
