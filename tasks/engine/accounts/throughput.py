"""Measures how fast a training was, in the names of the run record: where its time went,
samples and tokens a second, and what share of the device's peak that is. The peaks are those
of the vendors' data sheets, without sparsity, and count for the device with exactly that name:
none is guessed from a name that looks alike. What no sheet lists can be measured on the spot;
what is not known of a device is absent.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from tasks.engine.base import host_memory
from tasks.engine.base.facts import DataFacts, DeviceFacts
from tasks.engine.base.timing import wait_for_device
from tasks.engine.device.detection import AMP_DTYPES, set_matmul_precision
from tasks.engine.memory.allocator_stats import make_allocator, release_cached_memory

AIM_S = 0.01  # of one product: long against the launch and the wait, short for a person
BUDGET_S = 0.15  # for the products that count; a slow device gets fewer
SMALLEST, LARGEST, STEP = 128, 16384, 64  # side lengths; tensor cores like multiples of 64
ROOM_SHARE = 1 / 64  # of the free memory, for three matrices
UNKNOWN_FREE_BYTES = 1 << 30  # where the device does not tell

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeakFlops:
    """The most floating-point operations a second, a multiply-add counted as two."""

    flops_per_s: float
    source: str


@dataclass(frozen=True)
class _DataSheet:
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
    "NVIDIA B200": _DataSheet(f"NVIDIA HGX B200 datasheet ({_HALVED})", 75, 1100, 2250, 2250),
    "NVIDIA H200": _DataSheet(_H200, 67, 494.5, 989.5, 989.5),
    "NVIDIA H200 NVL": _DataSheet(_H200, 60, 417.5, 835.5, 835.5),
    "NVIDIA H100 80GB HBM3": _DataSheet(_H100, 67, 494.5, 989.5, 989.5),
    "NVIDIA H100 NVL": _DataSheet(_H100, 60, 417.5, 835.5, 835.5),
    "NVIDIA H100 PCIe": _DataSheet(_H100, 51, 378, 756.5, 756.5),
    "NVIDIA A100-SXM4-80GB": _DataSheet(_A100, 19.5, 156, 312, 312),
    "NVIDIA A100-SXM4-40GB": _DataSheet(_A100, 19.5, 156, 312, 312),
    "NVIDIA A100 80GB PCIe": _DataSheet(_A100, 19.5, 156, 312, 312),
    "NVIDIA A100-PCIE-40GB": _DataSheet(_A100, 19.5, 156, 312, 312),
    "NVIDIA A40": _DataSheet("NVIDIA A40 datasheet", 37.4, 74.8, 149.7, 149.7),
    "NVIDIA L40S": _DataSheet("NVIDIA L40S datasheet", 91.6, 183, 362.05, 362.05),
    "NVIDIA L40": _DataSheet("NVIDIA L40 datasheet", 90.5, 90.5, 181.05, 181.05),
    "NVIDIA L4": _DataSheet(f"NVIDIA L4 datasheet ({_HALVED})", 30.3, 60, 121, 121),
    "NVIDIA GeForce RTX 4090": _DataSheet(_ADA, 82.6, 82.6, 165.2, 165.2),
    "NVIDIA GeForce RTX 3090": _DataSheet(_GA102, 35.6, 35.6, 71, 71),
    "Tesla T4": _DataSheet("NVIDIA T4 datasheet", 8.1, None, None, 65),
    "Tesla V100-SXM2-16GB": _DataSheet(_V100, 15.7, None, None, 125),
    "Tesla V100-SXM2-32GB": _DataSheet(_V100, 15.7, None, None, 125),
    "AMD Instinct MI300X": _DataSheet(
        "AMD Instinct MI300X data sheet", 163.4, 653.7, 1307.4, 1307.4
    ),
}


def find_peak_flops(facts: DeviceFacts, precision: str) -> PeakFlops | None:
    """Return the data sheet's figure for this device and arithmetic; None where none is
    known."""
    sheet = _SHEETS.get(facts.model or "")
    tflops: float | None = getattr(sheet, precision) if sheet else None
    if sheet is None or tflops is None:
        return None
    return PeakFlops(tflops * 1e12, sheet.source)


def measure_peak_flops(device: torch.device, precision: str) -> PeakFlops | None:
    """Measure the rate of a large matrix product on the device as it is now; None where it
    fails.

    A lower bound of the peak, with the threads that PyTorch has on a CPU. What it allocates is
    at most a 64th of the free memory, and freed again; caches of others on a GPU are emptied
    with it.
    """
    try:
        with set_matmul_precision(precision), torch.inference_mode():
            found = _measure_best(device, AMP_DTYPES.get(precision, torch.float32))
        release_cached_memory(device)
    except (RuntimeError, TypeError, MemoryError) as error:  # TypeError: no such dtype on MPS
        log.debug("the peak of %s in %s could not be measured: %s", device, precision, error)
        return None
    return found


def _measure_best(device: torch.device, dtype: torch.dtype) -> PeakFlops:
    """Of several products of a size that takes some 10 ms, the fastest."""
    side = SMALLEST
    took_s = min(_time_products(side, device, dtype, budget_s=AIM_S))
    most = _find_largest_side(device, dtype)
    while took_s < AIM_S and side < most:
        # At least twice the work: a busy machine may take 5 ms for any.
        grown = side * min(4.0, max(1.26, (AIM_S / took_s) ** (1 / 3)))
        side = min(most, STEP * round(grown / STEP + 0.5))
        took_s = min(_time_products(side, device, dtype, budget_s=AIM_S))
    best_s = min(_time_products(side, device, dtype, budget_s=BUDGET_S))
    source = f"measured by a matrix product of {side} x {side} x {side}"
    return PeakFlops(2 * side**3 / best_s, source)


def _time_products(
    side: int, device: torch.device, dtype: torch.dtype, *, budget_s: float
) -> Iterator[float]:
    """Seconds of each product: one, and more while they fit in the budget."""
    # A generator of its own: the run's random numbers stay as they were.
    drawn = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.rand(side, side, generator=drawn, device=device, dtype=dtype) for _ in range(2)
    )
    out = torch.empty_like(left)
    _time_product(left, right, out)  # loads the kernel, and wakes the clocks
    spent_s = 0.0
    while True:
        took_s = _time_product(left, right, out)
        yield took_s
        spent_s += took_s
        if spent_s + took_s > budget_s:
            return


def _time_product(left: Tensor, right: Tensor, out: Tensor) -> float:
    wait_for_device(left.device)
    began = perf_counter()
    torch.mm(left, right, out=out)
    wait_for_device(left.device)
    return perf_counter() - began


def _find_largest_side(device: torch.device, dtype: torch.dtype) -> int:
    """The largest side of three square matrices that fit in the share of the free memory."""
    if device.type == "cpu":
        free_bytes = host_memory.free_bytes()
    else:
        space = make_allocator(device).space()
        free_bytes = (space and space.free_bytes) or UNKNOWN_FREE_BYTES
    room = (free_bytes * ROOM_SHARE / (3 * dtype.itemsize)) ** 0.5
    return max(SMALLEST, min(LARGEST, STEP * int(room / STEP)))


def make_rates(
    data: DataFacts, *, work: int, peak_flops_per_s: float | None
) -> Callable[[float], dict[str, float]]:
    """Return a function that computes more speeds from the samples a second: tokens, and the
    model's share of the device's peak.

    work: multiply-adds of a row's forward pass. A training step takes six floating-point
    operations for each: two forwards, and twice that backwards (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B).
    """

    def at(samples_per_s: float) -> dict[str, float]:
        found = {}
        if data.task == "tokens":
            found["speed/tokens_per_s"] = samples_per_s * data.input_shape[0]
        if peak_flops_per_s is not None:
            found["speed/mfu"] = 6 * work * samples_per_s / peak_flops_per_s
        return found

    return at


def choose_peak_flops(device: DeviceFacts, precision: str, *, task: str) -> PeakFlops | None:
    """Return the device's peak: of its data sheet, else measured; on a CPU only where a user
    asks for the share of it that tokens take, since measuring takes up to 0.2 s."""
    known = find_peak_flops(device, precision)
    if known is not None or (device.kind == "cpu" and task != "tokens"):
        return known
    return measure_peak_flops(torch.device(device.name), precision)


def make_peak_tags(peak: PeakFlops | None) -> dict[str, str]:
    """Return the tags of the peak, under the names of the run record."""
    if peak is None:
        return {}
    return {
        "device.peak_tflops": f"{peak.flops_per_s / 1e12:.4g}",
        "device.peak_source": peak.source,
    }
