"""The arithmetic of the forward pass, set for the length of a run and put back after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch

AMP = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """What to open around a forward pass; nothing for fp32 and tf32."""
    if precision not in AMP:
        return nullcontext
    return partial(torch.autocast, device.type, dtype=AMP[precision])


@contextmanager
def matmul_mode(precision: str) -> Iterator[None]:
    """Matrix products and convolutions of float32 run in TF32 for tf32, in full for the others.

    cuDNN's own default is TF32, so that fp32 has to be asked for.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
