"""How fast a training is, in the names of the run record: tokens a second, and the share of the
device's peak that is used. What is not known of a device is absent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tasks.engine.base.facts import DataFacts, DeviceFacts
from tasks.engine.training.peak_flops import Peak, measured, peak


def rates(
    data: DataFacts, *, work: int, peak_flops_per_s: float | None
) -> Callable[[float], dict[str, float]]:
    """More speeds from the samples a second: tokens, and the model's share of the device's peak.

    work: multiply-adds of a row's forward pass. A training step takes six floating-point operations
    for each: two forwards, and twice that backwards (Chowdhery et al. 2022, arXiv:2204.02311,
    appendix B).
    """

    def at(samples_per_s: float) -> dict[str, float]:
        found = {}
        if data.task == "tokens":
            found["speed/tokens_per_s"] = samples_per_s * data.input_shape[0]
        if peak_flops_per_s is not None:
            found["speed/mfu"] = 6 * work * samples_per_s / peak_flops_per_s
        return found

    return at


def peak_of(device: DeviceFacts, precision: str, *, task: str) -> Peak | None:
    """The device's peak: of its data sheet, else measured; on a CPU only where a user asks for the
    share of it that tokens take, since measuring takes up to 0.2 s."""
    known = peak(device, precision)
    if known is not None or (device.kind == "cpu" and task != "tokens"):
        return known
    return measured(torch.device(device.name), precision)


def peak_tags(peak: Peak | None) -> dict[str, str]:
    """Under the names of the run record."""
    if peak is None:
        return {}
    return {
        "device.peak_tflops": f"{peak.flops_per_s / 1e12:.4g}",
        "device.peak_source": peak.source,
    }
