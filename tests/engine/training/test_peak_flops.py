"""The peak of a device is a vendor's figure for exactly that device, or measured, or not known."""

import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch

from tasks.engine.accounts import throughput
from tasks.engine.accounts.throughput import PeakFlops, find_peak_flops, measure_peak_flops
from tasks.engine.base.facts import DeviceFacts

CPU = torch.device("cpu")
FACTS = DeviceFacts(
    name="cuda:0",
    kind="cuda",
    index=0,
    model="NVIDIA H200",
    uuid=None,
    reason="",
    total_bytes=None,
    free_bytes=None,
    torch_version="",
    runtime=None,
    driver_version=None,
    bf16=True,
    tf32=True,
)
# Multiprocessors (compute units), dense bf16 or fp16 operations of each in a clock, boost GHz: from
# the architecture whitepapers, another way to the same figures.
BUILT = {
    "NVIDIA H200": (132, 4096, 1.83),
    "NVIDIA H200 NVL": (132, 4096, 1.545),
    "NVIDIA H100 80GB HBM3": (132, 4096, 1.83),
    "NVIDIA H100 NVL": (132, 4096, 1.545),
    "NVIDIA H100 PCIe": (114, 4096, 1.62),
    "NVIDIA A100-SXM4-80GB": (108, 2048, 1.41),
    "NVIDIA A100-SXM4-40GB": (108, 2048, 1.41),
    "NVIDIA A100 80GB PCIe": (108, 2048, 1.41),
    "NVIDIA A100-PCIE-40GB": (108, 2048, 1.41),
    "NVIDIA A40": (84, 1024, 1.74),
    "NVIDIA L40S": (142, 1024, 2.52),
    "NVIDIA L40": (142, 512, 2.49),
    "NVIDIA L4": (58, 1024, 2.04),
    "NVIDIA GeForce RTX 4090": (128, 512, 2.52),
    "NVIDIA GeForce RTX 3090": (82, 512, 1.695),
    "Tesla T4": (40, 1024, 1.59),
    "Tesla V100-SXM2-16GB": (80, 1024, 1.53),
    "Tesla V100-SXM2-32GB": (80, 1024, 1.53),
    "AMD Instinct MI300X": (304, 2048, 2.1),
}


def of(model: str | None, precision: str) -> PeakFlops | None:
    return find_peak_flops(replace(FACTS, model=model), precision)


def test_the_peak_is_the_data_sheets_in_operations_a_second() -> None:
    found = of("NVIDIA H200", "bf16")
    assert found == PeakFlops(
        989.5e12, "NVIDIA H200 Tensor Core GPU datasheet (with sparsity, halved)"
    )
    assert of("NVIDIA A100 80GB PCIe", "tf32") == PeakFlops(
        156e12, "NVIDIA A100 Tensor Core GPU datasheet"
    )
    assert of("NVIDIA GeForce RTX 4090", "bf16").flops_per_s == 165.2e12


@pytest.mark.parametrize(
    "model",
    [
        None,
        "",
        "NVIDIA H2000",
        "NVIDIA H20",
        "NVIDIA H100",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "nvidia h200",
        "NVIDIA L4 ",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "AMD Instinct MI300A",
        "Intel(R) Xeon(R) Platinum 8488C",
    ],
)
def test_a_name_that_only_looks_alike_has_no_peak(model: str | None) -> None:
    assert all(of(model, precision) is None for precision in ("fp32", "tf32", "bf16", "fp16"))


def test_an_arithmetic_that_the_device_lacks_has_no_peak() -> None:
    assert of("Tesla T4", "bf16") is None and of("Tesla V100-SXM2-32GB", "tf32") is None
    assert of("Tesla T4", "fp16") == PeakFlops(65e12, "NVIDIA T4 datasheet")


@pytest.mark.parametrize("model", BUILT)
def test_the_figures_agree_with_how_the_chips_are_built(model: str) -> None:
    units, per_clock, gigahertz = BUILT[model]
    half = of(model, "fp16").flops_per_s
    assert half == pytest.approx(units * per_clock * gigahertz * 1e9, rel=0.015)
    for precision in ("tf32", "bf16"):
        found = of(model, precision)
        share = 2 if precision == "tf32" else 1
        assert found is None or found.flops_per_s == pytest.approx(half / share, rel=0.015)
    assert of(model, "fp32").flops_per_s <= half / 2 * 1.015


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_measured_peak_says_that_it_is(precision: str) -> None:
    state = torch.get_rng_state()
    mode = torch.get_float32_matmul_precision()
    found = measure_peak_flops(CPU, precision)
    assert found is not None and 1e6 < found.flops_per_s < 1e15
    assert found.source.startswith("measured by a matrix product of ")
    assert torch.equal(torch.get_rng_state(), state), "the run's random numbers are its own"
    assert torch.get_float32_matmul_precision() == mode


def test_the_product_is_as_large_as_the_device_is_fast(monkeypatch) -> None:
    monkeypatch.setattr(
        throughput, "_time_product", lambda left, right, out: 2 * len(left) ** 3 / 1e12 + 1e-6
    )
    found = measure_peak_flops(CPU, "fp32")
    assert found.flops_per_s == pytest.approx(1e12, rel=0.01)
    side = int(found.source.split()[-1])
    assert 1 <= 2 * side**3 / 1e12 / throughput.AIM_S < 2.5


def test_the_product_takes_a_small_share_of_the_free_memory(monkeypatch) -> None:
    free_bytes = 64 * 3 * 4 * 320**2
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free_bytes))
    monkeypatch.setattr(throughput, "_time_product", lambda left, right, out: 1e-6)
    found = measure_peak_flops(CPU, "fp32")
    assert found.source == "measured by a matrix product of 320 x 320 x 320"
    assert math.isfinite(found.flops_per_s)


def test_a_peak_that_cannot_be_measured_is_not_known(monkeypatch, caplog) -> None:
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(throughput.torch, "mm", fail)
    with caplog.at_level(logging.DEBUG, logger="tasks.engine.accounts.throughput"):
        assert measure_peak_flops(CPU, "fp32") is None
    assert "the peak of cpu in fp32 could not be measured: CUDA out of memory" in caplog.text
