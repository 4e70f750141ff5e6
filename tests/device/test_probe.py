"""What is seen of a machine: the PCI bus, the kernel's drivers, NVML and PyTorch's properties."""

import os
import types
from pathlib import Path

import psutil
import pytest

from headroom.device.checks import Adapter, Holder, run_checks
from headroom.device.nvml import Nvml, read_nvml
from headroom.device.probe import find_drivers, find_pci_adapters, make_cuda_gpu, probe_machine

GIB = 1024**3


def test_pci_shows_display_controllers_and_amd_accelerators_only(tmp_path):
    devices = {
        "0000:01:00.0": ("0x10de", "0x030200"),
        "0000:01:00.1": ("0x10de", "0x040300"),  # its sound
        "0000:02:00.0": ("0x1002", "0x120000"),  # Instinct
        "0000:03:00.0": ("0x8086", "0x120000"),  # an NPU
        "0000:04:00.0": ("0x1a03", "0x030000"),  # a server's management chip
    }
    for name, (vendor, kind) in devices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    (tmp_path / "0000:05:00.0").mkdir()  # unplugged
    assert find_pci_adapters(tmp_path) == (
        Adapter("NVIDIA", "PCI 0000:01:00.0"),
        Adapter("AMD", "PCI 0000:02:00.0"),
    )


def test_driver_versions_are_read_from_the_kernel(tmp_path):
    nvidia = tmp_path / "proc/driver/nvidia"
    nvidia.mkdir(parents=True)
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC"
    (nvidia / "version").write_text(line)
    (tmp_path / "sys/module/amdgpu").mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").write_text("")
    found = find_drivers(tmp_path, Nvml(error="not here"))
    assert (found["NVIDIA"].version, found["NVIDIA"].loaded) == ("580.95.05", True)
    assert (found["AMD"].version, found["AMD"].loaded) == (None, True)
    assert list(found["AMD"].nodes.values()) == [True]
    assert not found["Intel"].loaded


class NVMLError(Exception):
    pass


def fake_nvml(**replaced):
    """Two GPUs; the second is held by this process's parent, by itself, and by one out of sight."""

    def no_mig(handle):
        raise NVMLError("Not Supported")

    pids = [os.getppid(), os.getpid(), 2**22 + 1]
    processes = [types.SimpleNamespace(pid=pid, usedGpuMemory=GIB) for pid in pids]
    calls = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda h: f"GPU-uuid-{h}",
        "nvmlDeviceGetName": lambda h: b"NVIDIA H200",  # bytes in older bindings
        "nvmlDeviceGetMemoryInfo": lambda h: types.SimpleNamespace(total=80 * GIB, free=h * GIB),
        "nvmlDeviceGetComputeRunningProcesses": lambda h: processes if h else [],
        "nvmlDeviceGetMaxMigDeviceCount": no_mig,
        "nvmlSystemGetCudaDriverVersion": lambda: 12040,
        "nvmlSystemGetDriverVersion": lambda: "550.54",
    }
    return types.SimpleNamespace(**{**calls, **replaced})


def test_nvml_names_the_other_processes_that_hold_a_gpu(monkeypatch):
    monkeypatch.setattr("headroom.device.nvml.HOST_PIDS", Path("/proc/self/ns/pid").readlink())
    found = read_nvml(fake_nvml())
    assert (found.error, found.driver_version, found.cuda) == ("", "550.54", (12, 4))
    parent, hidden = found.gpus[1].holders
    assert parent == Holder(os.getppid(), psutil.Process(os.getppid()).name(), GIB)
    assert hidden.name is None


@pytest.mark.parametrize("is_host", [True, False])
def test_in_a_container_the_pids_of_the_host_name_no_process_there(monkeypatch, is_host):
    """A stranger with the same number was named as the holder, or the run itself."""
    monkeypatch.setattr(
        "headroom.device.nvml.HOST_PIDS",
        Path("/proc/self/ns/pid").readlink() if is_host else "",
    )
    named = [holder.name for holder in read_nvml(fake_nvml()).gpus[1].holders]
    parent = psutil.Process(os.getppid()).name()
    assert named == ([parent, None] if is_host else ["of the host"] * 3)


def test_nvml_that_fails_is_an_answer_too():
    def lost(index):
        raise NVMLError("GPU is lost")

    assert read_nvml(fake_nvml(nvmlInit=lambda: lost(0))).error == "GPU is lost"
    assert read_nvml(fake_nvml(nvmlDeviceGetHandleByIndex=lost)).error == "GPU is lost"


def test_gpus_are_matched_with_nvml_by_uuid_and_never_by_index():
    props = types.SimpleNamespace(
        uuid="uuid-1", name="NVIDIA H200", major=9, minor=0, total_memory=79 * GIB
    )
    found = make_cuda_gpu(0, props, read_nvml(fake_nvml()), hip=False)
    assert (found.uuid, found.free_bytes, len(found.holders)) == ("GPU-uuid-1", GIB, 2)
    assert (found.arch, found.bf16, found.tf32, found.kind) == ("sm_90", True, True, "cuda")


@pytest.mark.parametrize(
    ("gfx", "bf16"), [("gfx942:sramecc+:xnack-", True), ("gfx906", False), ("gfx1100", True)]
)
def test_amd_computes_in_bf16_where_it_has_matrix_instructions_for_it(gfx, bf16):
    nvml = read_nvml(fake_nvml())
    props = types.SimpleNamespace(
        uuid="uuid-1", name="AMD", major=9, minor=4, total_memory=GIB, gcnArchName=gfx
    )
    found = make_cuda_gpu(0, props, nvml, hip=True)
    assert (found.bf16, found.tf32, found.kind) == (bf16, False, "rocm")
    assert found.arch == gfx.split(":")[0]


def test_only_the_variables_that_hide_gpus_are_kept():
    seen = probe_machine({"CUDA_VISIBLE_DEVICES": "0", "SECRET": "x"}, touch=False)
    assert seen.env == {"CUDA_VISIBLE_DEVICES": "0"}
    assert seen.gpus == () and run_checks(seen)
