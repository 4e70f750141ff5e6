"""Each question about a GPU, fed with what it would have seen on machines that are not at hand."""

import re

import pytest

from headroom.device.checks import (
    FULL,
    Adapter,
    Driver,
    Gpu,
    Holder,
    Machine,
    check_architecture,
    check_build,
    check_compute,
    check_cuda_version,
    check_driver,
    check_gpu,
    check_memory,
    check_pytorch,
    check_visible,
    run_checks,
)

GIB = 1024**3
UUIDS = ("GPU-aaaa1111", "GPU-aaaa2222", "MIG-bbbb")
NVIDIA, AMD = Adapter("NVIDIA", "PCI 0000:01:00.0"), Adapter("AMD", "/dev/kfd")


def seen(env, vendor="NVIDIA", uuids=UUIDS, found=True):
    return check_visible(vendor, env, uuids=uuids, seen=found)


def visible(value, **options):
    return seen({"CUDA_VISIBLE_DEVICES": value}, **options)


def gpu_there(vendor, adapters, system="Linux", arch="x86_64"):
    return check_gpu(vendor, adapters, system=system, arch=arch)


def driver(vendor, known, found=False):
    return check_driver(vendor, known, seen=found)


def built(vendor, version, kinds):
    return check_build(vendor, version, kinds)


def cuda(version, driver_cuda, computes=False):
    return check_cuda_version(version, driver_cuda, computes=computes)


def arch(gpu_arch, *codes, computes=None):
    return check_architecture(Gpu("cuda:0", "cuda", 0, arch=gpu_arch, computes=computes), codes)


def memory(free_gib, *holders):
    gpu = Gpu("cuda:0", "cuda", 0, total_bytes=80 * GIB, free_bytes=int(free_gib * GIB))
    return check_memory(Gpu(**{**vars(gpu), "holders": holders}))


NODES = {"/dev/nvidia0": True}
SITUATIONS = [
    # Is there a GPU
    (gpu_there(None, ()), False, "no NVIDIA, AMD, Intel or Apple GPU was found"),
    (gpu_there(None, (NVIDIA,)), True, r"NVIDIA GPU \(PCI 0000:01:00.0\)"),
    (gpu_there("AMD", (NVIDIA,)), False, "no AMD GPU was found"),
    (gpu_there("Apple", ()), False, "no Apple GPU was found.*needs a Mac"),
    (gpu_there(None, (), "Darwin"), False, "Intel Mac, or a Python translated by Rosetta"),
    (gpu_there(None, (), "Windows"), None, "no NVIDIA, AMD, Intel or Apple GPU was found"),
    # Is there a driver
    (driver(None, Driver()), None, "there is no GPU"),
    (driver("Apple", Driver()), None, "Metal is part of macOS"),
    (driver("NVIDIA", Driver()), False, "no NVIDIA driver is loaded.*install the NVIDIA driver"),
    (driver("NVIDIA", Driver(True, "580.1")), False, "580.1 is loaded, but.*--gpus all"),
    (driver("AMD", Driver(True)), False, "device files are not here.*/dev/kfd"),
    (driver("AMD", Driver(True, nodes={"/dev/dri/renderD128": True})), False, "not here"),
    (driver("AMD", Driver(True, nodes={"/dev/kfd": False})), False, "/dev/kfd may not be.*render"),
    (driver("AMD", Driver(True, nodes={"/dev/kfd": True})), True, "version not known"),
    (driver("NVIDIA", Driver(True, "1", {"/dev/nvidia0": False})), False, "nvidia0 may not be"),
    (
        driver("NVIDIA", Driver(True, "1", NODES, error="Driver/library version mismatch")),
        False,
        "mismatch.*restart the machine",
    ),
    (driver("NVIDIA", Driver(True, "1", NODES, error="GPU is lost")), None, "GPU is lost"),
    (driver("NVIDIA", Driver(True, "580.1", answers=True)), True, "NVIDIA driver 580.1"),
    (driver("Intel", Driver(), found=True), True, "Intel driver"),
    # Was this PyTorch built for it
    (built(None, "2.13.0+cpu", {}), None, "built for the CPU only; there is no GPU"),
    (built("NVIDIA", "2.13.0+cpu", {}), False, r"\(2.13.0\+cpu\) was built without CUDA .*a CUDA"),
    (built("NVIDIA", "2.13.0", {"rocm": "7.1"}), False, "without CUDA, for ROCm 7.1"),
    (built("Intel", "2.13.0", {"cuda": "13.0"}), False, "without XPU.*install an XPU"),
    (built("Apple", "2.13.0", {}), False, "without MPS.*macOS on arm64"),
    (built("AMD", "2.13.0", {"rocm": "7.1"}), True, "built for ROCm 7.1"),
    (cuda("13.0", (12, 4)), False, "CUDA 13.0 is newer than the driver's CUDA 12.4.*for CUDA 12"),
    (cuda("13.0", (12, 4), computes=True), True, "driver CUDA 12.4"),  # cuda-compat
    (cuda("12.8", (12, 4)), True, "within one major version"),
    (cuda("12.4", (12, 4)), True, "driver CUDA 12.4$"),
    (cuda("12.10", (12, 9)), True, "within one major version"),  # 10 > 9, not "10" < "9"
    (cuda("12.4", (13, 0)), True, "PyTorch CUDA 12.4, driver CUDA 13.0$"),
    (cuda(None, (13, 0)), None, "built without CUDA"),
    (cuda("13.0", None), None, "not known"),
    # Does the environment hide it
    (seen({}), True, "CUDA_VISIBLE_DEVICES is not set"),
    (visible(""), False, "hides every GPU.*unset CUDA_VISIBLE_DEVICES"),
    (visible("-1"), False, "hides every GPU"),
    (visible("1"), True, "'1' is set"),
    (visible("0,-1"), True, "is set"),
    (visible("0,5,1"), False, "names '5', which is not here.*only 0 is left"),
    (visible("2"), False, "names '2', which is not here.*no GPU is left"),
    (visible("0,0"), False, "names 0 twice, which hides every GPU"),
    (visible("abc"), False, "names 'abc', which is not here"),
    (visible("1gpu"), True, "is set"),
    (visible("GPU-aaaa2"), True, "is set"),
    (visible("GPU-aaaa"), False, "names 'GPU-aaaa', which is not here"),  # begins two of them
    (visible("GPU-cccc"), False, "names 'GPU-cccc', which is not here"),
    (visible("MIG-bbbb"), True, "is set"),
    (visible("MIG-GPU-aaaa1111/1/0"), True, "is set"),
    (visible("MIG-cccc"), False, "names 'MIG-cccc', which is not here"),
    (visible("7", uuids=None, found=False), None, "is set"),
    (visible("GPU-cccc", uuids=None, found=True), True, "is set"),
    (seen({"HIP_VISIBLE_DEVICES": "-1"}, "AMD", None), False, "HIP_VISIBLE_DEVICES='-1' hides"),
    (seen({"HIP_VISIBLE_DEVICES": "5"}, "AMD"), True, "is set"),  # NVML's UUIDs are not AMD's
    (seen({"ROCR_VISIBLE_DEVICES": "1"}, "AMD", None, False), None, "is set"),
    (seen({"ZE_AFFINITY_MASK": "0.1"}, "Intel", None), True, "ZE_AFFINITY_MASK='0.1' is set"),
    (seen({"CUDA_VISIBLE_DEVICES": ""}, "Intel", None), True, "ZE_AFFINITY_MASK is not set"),
    (seen({}, None), None, "no GPU"),
    # Has this PyTorch code for its architecture
    (arch("sm_86", "sm_80"), True, "sm_86 runs code for sm_80"),
    (arch("sm_80", "sm_86"), False, "is sm_80; this PyTorch has code for sm_86 only"),
    (arch("sm_90", "sm_80"), False, "install a PyTorch build for sm_90"),
    (arch("sm_90", "compute_80"), True, "sm_90"),
    (arch("sm_70", "compute_80"), False, "sm_70"),
    (arch("sm_90", "sm_90a"), True, "sm_90"),
    (arch("sm_103", "sm_100a"), False, "sm_103"),
    (arch("sm_103", "sm_100f"), True, "sm_103"),
    (arch("sm_120", "sm_100", "compute_100f"), False, "sm_120"),
    (arch("sm_120", "sm_75", "sm_100", "sm_120"), True, "sm_120"),
    (arch("sm_90", "sm_80", computes=True), True, "sm_90"),
    (arch("gfx942", "gfx90a", "gfx942"), True, "gfx942"),
    (arch("gfx1103", "gfx90a", "gfx942"), False, "gfx1103"),
    (arch("gfx1103", "gfx11-generic"), None, "gfx1103 may run"),
    (arch(None, "sm_80"), None, "not known"),
    # Is its memory free, does it compute
    (memory(70), True, "cuda:0 has 70.0 of 80.0 GiB free$"),
    (
        memory(2, Holder(9, "tiny", GIB), Holder(123, "python", 76 * GIB), Holder(7)),
        False,
        "2.0 of 80.0 GiB free, held by pid 123 python, pid 9 tiny, pid 7.*choose another",
    ),
    (memory(2, *(Holder(n) for n in range(5))), False, "pid 2 and 2 more"),
    (check_memory(Gpu("xpu:0", "xpu", 0)), None, "free memory of xpu:0 is not known"),
    (check_compute(Gpu("cuda:0", "cuda", 0)), None, "was not tried"),
    (check_compute(Gpu("cuda:0", "cuda", 0, computes=True)), True, "equals the CPU's"),
    (
        check_compute(Gpu("cuda:0", "cuda", 0, computes=False, error="no kernel image")),
        False,
        "cuda:0 failed a small product: no kernel image.*new process",
    ),
    (
        # "End the processes that hold it" was told of a device of 64 MiB that nobody held.
        check_compute(Gpu("cuda:0", "cuda", 0, computes=False, error=FULL)),
        False,
        "its memory is full no process is seen to hold it, so it may be too small: choose another",
    ),
    (
        check_compute(
            Gpu("cuda:0", "cuda", 0, computes=False, error=FULL, holders=(Holder(9, "tiny"),))
        ),
        False,
        "cuda:0 failed a small product: its memory is full end the processes that hold it",
    ),
    # Does PyTorch see it
    (check_pytorch("NVIDIA", (), built=False, error=""), None, "see build"),
    (check_pytorch("NVIDIA", (), built=True, error="no device"), False, "no GPU: no device.*smi"),
    (check_pytorch("Apple", (), built=True, error=""), False, "update macOS"),
    (check_pytorch("AMD", (Gpu("cuda:0", "rocm", 0),), built=True, error=""), True, "rocm:0"),
]


@pytest.mark.parametrize(
    ("check", "ok", "said"), SITUATIONS, ids=[f"{s[0].name}-{s[2][:40]}" for s in SITUATIONS]
)
def test_check_gives_finding_and_remedy(check, ok, said):
    assert check.ok is ok
    assert re.search(said, f"{check.finding} {check.remedy}".rstrip())
    assert bool(check.remedy) == (ok is False) or ok is None, "a remedy where, and only where, bad"


def test_questions_are_about_the_vendor_that_pytorch_is_built_for():
    laptop = Machine("2.13.0", adapters=(NVIDIA, AMD), built={"rocm": "7.1"})
    build = next(c for c in run_checks(laptop) if c.name == "build")
    assert build.ok and "ROCm 7.1" in build.finding


def test_absent_gpu_has_no_driver_to_miss_but_a_build_when_asked_for():
    checks = {c.name: c.ok for c in run_checks(Machine("2.13.0+cpu"), "cuda")}
    assert checks == {
        "gpu": False,
        "driver": None,
        "build": False,
        "cuda version": None,
        "visibility": None,
        "pytorch": None,
    }


def test_every_gpu_is_asked_about_architecture_memory_and_compute():
    gpus = tuple(Gpu(f"cuda:{i}", "cuda", i) for i in range(2))
    names = [c.name for c in run_checks(Machine("2.13.0", gpus=gpus, built={"cuda": "13.0"}))]
    assert names[-6:] == [
        f"{what} cuda:{i}" for i in range(2) for what in ("architecture", "memory", "compute")
    ]
