"""Compute how fast a training was beside its samples a second: in tokens, and as a share of the
device's peak. The peaks are those of the vendors' data sheets, without sparsity, and count for the
device with exactly that name: none is guessed from a name that looks alike. What is not known of a
device is absent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headroom.base.facts import DataFacts, DeviceFacts


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
    """Return the data sheet's figure for this device and arithmetic; None where none is known."""
    sheet = _SHEETS.get(facts.model or "")
    tflops: float | None = getattr(sheet, precision) if sheet else None
    if sheet is None or tflops is None:
        return None
    return PeakFlops(tflops * 1e12, sheet.source)


def make_rates(
    data: DataFacts, *, work: int, peak: PeakFlops | None
) -> Callable[[float], dict[str, float]]:
    """Return a function that computes more speeds from the samples a second: tokens, and the
    model's share of the device's peak where that is known.

    work: multiply-adds of a row's forward pass. A training step takes six floating-point
    operations for each: two forwards, and twice that backwards (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B).
    """

    def at(samples_per_s: float) -> dict[str, float]:
        rates = {}
        if data.task == "tokens":
            # Of a loader those that are learnt: what goes in may be no tokens.
            shape = data.input_shape if data.batch is None else data.batch["of"][1]["shape"]
            rates["speed/tokens_per_s"] = samples_per_s * shape[0]
        if peak is not None:
            rates["speed/mfu"] = 6 * work * samples_per_s / peak.flops_per_s
        return rates

    return at


def make_peak_tags(peak: PeakFlops | None) -> dict[str, str]:
    """Return the tags of the peak, under the names of the run record."""
    if peak is None:
        return {}
    return {
        "device.peak_tflops": f"{peak.flops_per_s / 1e12:.4g}",
        "device.peak_source": peak.source,
    }
