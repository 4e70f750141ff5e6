"""The peak of a device is a vendor's figure for exactly that device, or not known."""

from dataclasses import replace
from pathlib import Path

import pytest

from headroom.base.facts import DeviceFacts
from headroom.data.preparation import prepare_dataset
from headroom.settings.run_config import DataConfig
from headroom.watch.throughput import (
    PeakFlops,
    find_peak_flops,
    make_peak_tags,
    make_rates,
)

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


def test_a_share_of_a_peak_that_is_not_known_is_not_told(tmp_path: Path) -> None:
    """A row of 1,000 multiply-adds takes 6,000 operations to train on."""
    text = prepare_dataset(DataConfig(source="text", cache=str(tmp_path), args={"context": 64}))
    known = make_rates(text, work=1000, peak=PeakFlops(6e9, "a sheet"))
    assert known(250_000.0) == {"speed/tokens_per_s": 16_000_000.0, "speed/mfu": 0.25}
    assert make_rates(text, work=1000, peak=None)(10.0) == {"speed/tokens_per_s": 640.0}
    assert make_rates(replace(text, task="regression"), work=1000, peak=None)(10.0) == {}
    assert make_peak_tags(None) == {}
