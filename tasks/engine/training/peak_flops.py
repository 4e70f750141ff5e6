"""How fast a device can multiply at best, for the share of it that a training uses. The figures are
those of the vendors' data sheets, without sparsity, and count for the device with exactly that
name: none is guessed from a name that looks alike. What no sheet tells can be measured on the spot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from tasks.engine.base import host_memory
from tasks.engine.base.facts import DeviceFacts
from tasks.engine.base.timing import wait
from tasks.engine.device.precision import AMP, matmul_mode
from tasks.engine.memory.allocator_stats import allocator, give_back

AIM_S = 0.01  # of one product: long against the launch and the wait, short for a person
BUDGET_S = 0.15  # for the products that count; a slow device gets fewer
SMALLEST, LARGEST, STEP = 128, 16384, 64  # side lengths; tensor cores like multiples of 64
ROOM_SHARE = 1 / 64  # of the free memory, for three matrices
UNKNOWN_FREE_BYTES = 1 << 30  # where the device does not tell

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Peak:
    """The most floating-point operations a second, a multiply-add counted as two."""

    flops_per_s: float
    source: str


@dataclass(frozen=True)
class _Sheet:
    """TFLOPS of a data sheet, dense. fp32 without tensor cores; None: the device has no such."""

    source: str
    fp32: float
    tf32: float | None
    bf16: float | None
    fp16: float


_HALVED = "with sparsity, halved"
_H100 = f"NVIDIA H100 Tensor Core GPU datasheet ({_HALVED})"
_H200 = f"NVIDIA H200 Tensor Core GPU datasheet ({_HALVED})"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet"
_V100 = "NVIDIA V100 Tensor Core GPU datasheet"
_ADA = "NVIDIA Ada GPU architecture whitepaper (FP32 accumulate)"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper (FP32 accumulate)"

# By the name that torch.cuda.get_device_properties() reports. fp16 and bf16 accumulate in fp32, as
# PyTorch asks for: on GeForce cards half the rate of fp16 that accumulates in fp16.
_SHEETS = {
    "NVIDIA B200": _Sheet(f"NVIDIA HGX B200 datasheet ({_HALVED})", 75, 1100, 2250, 2250),
    "NVIDIA H200": _Sheet(_H200, 67, 494.5, 989.5, 989.5),
    "NVIDIA H200 NVL": _Sheet(_H200, 60, 417.5, 835.5, 835.5),
    "NVIDIA H100 80GB HBM3": _Sheet(_H100, 67, 494.5, 989.5, 989.5),
    "NVIDIA H100 NVL": _Sheet(_H100, 60, 417.5, 835.5, 835.5),
    "NVIDIA H100 PCIe": _Sheet(_H100, 51, 378, 756.5, 756.5),
    "NVIDIA A100-SXM4-80GB": _Sheet(_A100, 19.5, 156, 312, 312),
    "NVIDIA A100-SXM4-40GB": _Sheet(_A100, 19.5, 156, 312, 312),
    "NVIDIA A100 80GB PCIe": _Sheet(_A100, 19.5, 156, 312, 312),
    "NVIDIA A100-PCIE-40GB": _Sheet(_A100, 19.5, 156, 312, 312),
    "NVIDIA A40": _Sheet("NVIDIA A40 datasheet", 37.4, 74.8, 149.7, 149.7),
    "NVIDIA L40S": _Sheet("NVIDIA L40S datasheet", 91.6, 183, 362.05, 362.05),
    "NVIDIA L40": _Sheet("NVIDIA L40 datasheet", 90.5, 90.5, 181.05, 181.05),
    "NVIDIA L4": _Sheet(f"NVIDIA L4 datasheet ({_HALVED})", 30.3, 60, 121, 121),
    "NVIDIA GeForce RTX 4090": _Sheet(_ADA, 82.6, 82.6, 165.2, 165.2),
    "NVIDIA GeForce RTX 3090": _Sheet(_GA102, 35.6, 35.6, 71, 71),
    "Tesla T4": _Sheet("NVIDIA T4 datasheet", 8.1, None, None, 65),
    "Tesla V100-SXM2-16GB": _Sheet(_V100, 15.7, None, None, 125),
    "Tesla V100-SXM2-32GB": _Sheet(_V100, 15.7, None, None, 125),
    "AMD Instinct MI300X": _Sheet("AMD Instinct MI300X data sheet", 163.4, 653.7, 1307.4, 1307.4),
}


def peak(facts: DeviceFacts, precision: str) -> Peak | None:
    """The data sheet's figure for this device and arithmetic; None where none is known."""
    sheet = _SHEETS.get(facts.model or "")
    tflops: float | None = getattr(sheet, precision) if sheet else None
    if sheet is None or tflops is None:
        return None
    return Peak(tflops * 1e12, sheet.source)


def measured(device: torch.device, precision: str) -> Peak | None:
    """The rate of a large matrix product on the device as it is now; None where it fails.

    A lower bound of the peak, with the threads that PyTorch has on a CPU. What it allocates is at
    most a 64th of the free memory, and given back; caches of others on a GPU are emptied with it.
    """
    try:
        with matmul_mode(precision), torch.inference_mode():
            found = _best(device, AMP.get(precision, torch.float32))
        give_back(device)
    except (RuntimeError, TypeError, MemoryError) as error:  # TypeError: no such dtype on MPS
        log.debug("the peak of %s in %s could not be measured: %s", device, precision, error)
        return None
    return found


def _best(device: torch.device, dtype: torch.dtype) -> Peak:
    """Of several products of a size that takes some 10 ms, the fastest."""
    side = SMALLEST
    took_s = min(_products_s(side, device, dtype, budget_s=AIM_S))
    most = _largest_side(device, dtype)
    while took_s < AIM_S and side < most:
        # At least twice the work: a busy machine may take 5 ms for any.
        grown = side * min(4.0, max(1.26, (AIM_S / took_s) ** (1 / 3)))
        side = min(most, STEP * round(grown / STEP + 0.5))
        took_s = min(_products_s(side, device, dtype, budget_s=AIM_S))
    best_s = min(_products_s(side, device, dtype, budget_s=BUDGET_S))
    source = f"measured by a matrix product of {side} x {side} x {side}"
    return Peak(2 * side**3 / best_s, source)


def _products_s(
    side: int, device: torch.device, dtype: torch.dtype, *, budget_s: float
) -> Iterator[float]:
    """Seconds of each product: one, and more while they fit in the budget."""
    # A generator of its own: the run's random numbers stay as they were.
    drawn = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.rand(side, side, generator=drawn, device=device, dtype=dtype) for _ in range(2)
    )
    out = torch.empty_like(left)
    _product_s(left, right, out)  # loads the kernel, and wakes the clocks
    spent_s = 0.0
    while True:
        took_s = _product_s(left, right, out)
        yield took_s
        spent_s += took_s
        if spent_s + took_s > budget_s:
            return


def _product_s(left: Tensor, right: Tensor, out: Tensor) -> float:
    wait(left.device)
    began = perf_counter()
    torch.mm(left, right, out=out)
    wait(left.device)
    return perf_counter() - began


def _largest_side(device: torch.device, dtype: torch.dtype) -> int:
    """The largest side of three square matrices that fit in the share of the free memory."""
    if device.type == "cpu":
        free_bytes = host_memory.free_bytes()
    else:
        space = allocator(device).space()
        free_bytes = (space and space.free_bytes) or UNKNOWN_FREE_BYTES
    room = (free_bytes * ROOM_SHARE / (3 * dtype.itemsize)) ** 0.5
    return max(SMALLEST, min(LARGEST, STEP * int(room / STEP)))
