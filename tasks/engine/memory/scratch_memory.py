"""The scratch memory of operations on CUDA, which no tensor shows. A sum over rows: a bias's
gradient of 2,048 rows and 1,024 columns takes 16 MiB for a moment, by setReduceConfig in PyTorch's
ATen/native/cuda/Reduce.cuh for a matrix that lies row by row; other sums take next to nothing. And
softmax, which attention takes where no fused kernel does: backwards it holds the product of
gradient and output (softmax_backward_cuda_out in ATen/native/cuda/SoftMax.cu), forwards a mask of
the rows that are all masked (_safe_softmax in ATen/native/SoftMax.cpp). nn.MultiheadAttention, when
it predicts: query, key and value twice (ATen/native/transformers/cuda/attention.cu).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

WARP, MOST_THREADS = 32, 512
LEAST_VALUES, MOST_VALUES = 16, 256  # that a thread adds up
ACCUMULATOR_BYTES = 4  # of a float32, also for bf16 and fp16


def scratch_of(device: torch.device) -> Callable[[Any, tuple[Any, ...]], tuple[int, ...]]:
    """What an operation with these arguments takes on the device for itself, in bytes of each."""
    if device.type != "cuda" or torch.version.hip or not torch.cuda.is_available():
        return lambda func, args: ()
    properties = torch.cuda.get_device_properties(device)
    processors, threads = (
        properties.multi_processor_count,
        properties.max_threads_per_multi_processor,
    )

    def scratch(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
        if func is torch.ops.aten._softmax_backward_data.default:
            return (int(args[0].nbytes),)
        if func is torch.ops.aten._safe_softmax.default:
            return (int(args[0].numel()),)  # booleans
        if func is torch.ops.aten._native_multi_head_attention.default:
            return (3 * int(args[0].nbytes),) * 2
        if func is not torch.ops.aten.sum.dim_IntList or not _is_over_rows(args[0], args[1]):
            return ()
        columns = args[0].shape[-1]
        rows = prod(args[0].shape[:-1])
        taken = column_sum_bytes(rows, columns, processors=processors, threads=threads)
        return (taken,) if taken else ()

    return scratch


def column_sum_bytes(rows: int, columns: int, *, processors: int, threads: int) -> int:
    """Bytes for the sums of the columns of a matrix; threads: that a processor runs at once."""
    vector = next(n for n in (4, 2, 1) if columns % n == 0)
    most = MOST_THREADS // vector
    across = _power(columns // vector, most)
    down = _power(rows, most)
    width = min(across, WARP)
    height = min(down, most // width)
    width = min(across, most // height)
    values = rows  # of a thread
    if values < min(16 * height, MOST_VALUES):
        return 0  # each warp has columns of its own
    values = -(-rows // height)
    grid = -(-(columns // vector) // width)
    target = processors * (threads // (width * height))
    if values < MOST_VALUES or grid > target:
        return 0
    parts = max(min(-(-target // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    return ACCUMULATOR_BYTES * columns * parts * width * vector if parts > 1 else 0


def _power(n: int, most: int) -> int:
    """The largest power of two in n, at most `most`."""
    return most if n >= most else 1 << (n.bit_length() - 1)


def _is_over_rows(tensor: Tensor, dims: Any) -> bool:
    kept = {d % tensor.dim() for d in dims or ()}
    return tensor.is_contiguous() and kept == set(range(tensor.dim() - 1)) and tensor.dim() > 1
