"""The choice of a device and its reason, on machines that are written down instead of at hand."""

import re
from dataclasses import replace

import pytest
import torch

from headroom.device import detection
from headroom.device.checks import Adapter, Driver, Gpu, Holder, Machine
from headroom.device.detection import (
    Refusal,
    choose_device,
    detect_best_device,
    find_name_problem,
    try_gpus,
)
from headroom.device.leases import Leases

GIB = 1024**3
NVIDIA = Adapter("NVIDIA", "NVIDIA H200")


def gpu(index, free_gib, *holders, kind="cuda"):
    total = 80 * GIB
    return Gpu(
        name="mps" if kind == "mps" else f"{'cuda' if kind == 'rocm' else kind}:{index}",
        kind=kind,
        index=None if kind == "mps" else index,
        model="Test GPU",
        total_bytes=total,
        free_bytes=int(free_gib * GIB),
        holders=holders,
        bf16=True,
        tf32=kind == "cuda",
    )


def machine(*gpus, kind="cuda", **seen):
    facts = {"torch_version": "2.13.0+test", "built": {kind: "13.0.1"}, "cpu_model": "Test CPU"}
    return Machine(**{**facts, "gpus": gpus, **seen})


def tried(gpus, *, name="auto", broken=None, **seen):
    """A machine whose GPUs were tried; those in `broken` raise what it says."""

    def try_gpu(gpu):
        error = (broken or {}).get(gpu.name, "")
        return replace(gpu, computes=not error, error=error)

    return try_gpus(machine(*gpus, **seen), name, try_gpu=try_gpu)


def test_auto_takes_the_gpu_with_the_most_free_memory_and_names_who_holds_the_other():
    seen = tried([gpu(0, 2, Holder(123, "python")), gpu(1, 70.1)])
    facts = choose_device(seen, "auto")
    assert (facts.name, facts.kind, facts.index) == ("cuda:1", "cuda", 1)
    assert facts.reason == (
        "cuda:1, the GPU with the most free memory (70.1 of 80.0 GiB; "
        "cuda:0 has 2.0 GiB free, held by pid 123 python)"
    )
    assert not facts.fell_back


def test_only_as_many_gpus_are_tried_as_needed():
    seen = tried([gpu(0, 2), gpu(1, 70)])
    assert [g.computes for g in seen.gpus] == [None, True]


def test_auto_takes_the_next_best_where_the_best_does_not_compute():
    seen = tried([gpu(0, 20), gpu(1, 70)], broken={"cuda:1": "no kernel image"})
    facts = choose_device(seen, "auto")
    assert facts.reason == (
        "cuda:0, the GPU with the most free memory of those that compute (20.0 of 80.0 GiB; "
        "cuda:1 failed to compute: no kernel image)"
    )
    assert [c.ok for c in facts.checks if c.name == "compute cuda:1"] == [False]


def test_auto_falls_back_to_the_cpu_where_no_gpu_computes_and_says_what_each_raised():
    facts = choose_device(
        tried([gpu(0, 70)], broken={"cuda:0": "unspecified launch failure"}), "auto"
    )
    assert (facts.name, facts.fell_back, facts.runtime) == ("cpu", True, None)
    assert "cpu, because cuda:0 failed a small product: unspecified launch" in facts.reason


def test_full_gpu_is_the_reason_rather_than_the_error_it_causes():
    full = gpu(0, 0.1, Holder(123, "python"))
    facts = choose_device(tried([full], broken={"cuda:0": "CUDA out of memory"}), "auto")
    assert facts.reason.startswith(
        "cpu, because cuda:0 has 0.1 of 80.0 GiB free, held by pid 123 python; end the"
    )


def test_single_gpu_is_the_only_one():
    facts = choose_device(tried([gpu(0, 79)], drivers={"NVIDIA": Driver(version="580.1")}), "auto")
    assert facts.reason == "cuda:0, the only GPU here (79.0 of 80.0 GiB free)"
    assert (facts.runtime, facts.driver_version) == ("CUDA 13.0", "580.1")


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"built": {}}, "cpu, because no NVIDIA driver is loaded; install the NVIDIA driver"),
        (
            {"built": {}, "drivers": {"NVIDIA": Driver(answers=True)}},
            r"cpu, because this PyTorch \(2.13.0\+test\) was built without CUDA; install a CUDA",
        ),
        (
            {"drivers": {"NVIDIA": Driver(answers=True)}, "driver_cuda": (12, 4)},
            "cpu, because this PyTorch's CUDA 13.0.1 is newer than the driver's CUDA 12.4; update",
        ),
        (
            {
                "drivers": {"NVIDIA": Driver(answers=True)},
                "env": {"CUDA_VISIBLE_DEVICES": ""},
                "uuids": ("GPU-1",),
            },
            "cpu, because CUDA_VISIBLE_DEVICES='' hides every GPU; unset",
        ),
        (
            {"drivers": {"NVIDIA": Driver(answers=True)}, "torch_error": "CUDA unknown error"},
            "cpu, because PyTorch sees no GPU: CUDA unknown error; see",
        ),
    ],
)
def test_gpu_that_cannot_be_used_is_named_in_the_reason_with_its_remedy(seen, reason):
    facts = choose_device(machine(adapters=(NVIDIA,), **seen), "auto")
    assert facts.fell_back
    assert re.match(reason, facts.reason)


def test_no_gpu_at_all_is_no_fall_back():
    facts = choose_device(machine(built={}), "auto")
    assert facts.reason == "cpu, since no NVIDIA, AMD, Intel or Apple GPU was found"
    assert (facts.fell_back, facts.model, facts.bf16) == (False, "Test CPU", False)


def test_named_gpu_is_taken_though_another_has_more_free_memory():
    seen = tried([gpu(0, 20), gpu(1, 70)], name="cuda:0")
    assert choose_device(seen, "cuda:0").reason == (
        "cuda:0, as device.name asks (20.0 of 80.0 GiB free)"
    )
    assert seen.gpus[1].computes is None


def test_rocm_is_cuda_to_torch_and_found_under_both_names():
    for name in ("auto", "rocm", "rocm:0", "cuda:0"):
        facts = choose_device(
            tried([gpu(0, 70, kind="rocm")], name=name, kind="rocm", built={"rocm": "7.1.5"}), name
        )
        assert (facts.name, facts.kind, facts.runtime) == ("cuda:0", "rocm", "ROCm 7.1")
    assert facts.reason.startswith("rocm:0, as device.name asks")


def test_mps_has_no_index_and_runs_on_metal():
    seen = tried([gpu(0, 70, kind="mps")], name="mps", built={"mps": ""})
    facts = choose_device(seen, "mps")
    assert (facts.name, facts.index, facts.runtime) == ("mps", None, "Metal")


def test_xpu_tells_its_own_driver_version():
    card = replace(gpu(1, 70, kind="xpu"), driver_version="1.6.31")
    facts = choose_device(tried([card], name="xpu", built={"xpu": "20250302"}), "xpu")
    assert (facts.name, facts.runtime, facts.driver_version) == (
        "xpu:1", "oneAPI 20250302", "1.6.31",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "seen", "said"),
    [
        ("cuda:3", tried([gpu(0, 9), gpu(1, 9)]), "cuda:3 is not here; .* has cuda:0, cuda:1$"),
        (
            "cuda:1",
            tried([gpu(0, 9)], env={"CUDA_VISIBLE_DEVICES": "5"}),
            r".* has cuda:0 \(with CUDA_VISIBLE_DEVICES=5, which renumbers them\)$",
        ),
        ("mps", tried([gpu(0, 9)]), "mps is not here; this machine has cuda:0$"),
        ("rocm", tried([gpu(0, 9)]), "rocm is not here; this machine has cuda:0$"),
        (
            "cuda",
            machine(built={}, adapters=(NVIDIA,), drivers={"NVIDIA": Driver(answers=True)}),
            r"cuda is not here; this machine has only the cpu: this PyTorch \(2.13.0\+test\) was "
            r"built without CUDA. Install a CUDA build \(https",
        ),
        (
            "cuda:0",
            tried([gpu(0, 9)], name="cuda:0", broken={"cuda:0": "ECC error"}),
            "cuda:0 is here but does not compute: .*ECC error. Try again in a new process",
        ),
    ],
)
def test_named_device_that_cannot_be_had_says_what_can(name, seen, said):
    refusal = choose_device(seen, name)
    assert isinstance(refusal, Refusal) and refusal.checks
    assert re.match(f"device.name: {said}", refusal.text)


@pytest.mark.parametrize(
    "name", ["", "gpu:0", "cpu:3", "mps:0", "cuda:", "cuda:-1", "cuda:abc", "cuda:\u00b2", "meta"]
)
def test_name_of_no_known_form_is_refused(name):
    assert re.match(r"device.name: must be auto, gpu, cuda, .* \(got ", find_name_problem(name))


def test_whichever_gpu_is_never_the_cpu_and_says_why():
    broken = tried([gpu(0, 70)], broken={"cuda:0": "ECC error"})
    said = "device.name: gpu is here but does not compute: .*ECC error. Try again"
    assert re.match(said, choose_device(broken, "gpu").text)
    assert choose_device(broken, "auto").name == "cpu"
    two = [gpu(0, 70), gpu(1, 80)]
    assert choose_device(tried(two), "gpu") == choose_device(tried(two), "auto")


def test_several_gpus_are_leased_together_and_a_broken_one_is_none_of_them(monkeypatch, tmp_path):
    seen = machine(gpu(0, 60), gpu(1, 70), gpu(2, 50))
    works = {"cuda:0": True, "cuda:1": False}
    monkeypatch.setattr(detection, "probe_machine", lambda env, touch: seen)
    monkeypatch.setattr(detection, "try_gpu", lambda one: replace(one, computes=works[one.name]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (1, 2))
    leases = Leases(tmp_path, wait_s=0, holder="it")
    for count, beside in ((1, ()), (2, ("cuda:2",)), (None, ("cuda:2",)), (4, ())):
        facts = detect_best_device("cuda", leases=leases, count=count)
        assert (facts.name, facts.beside) == ("cuda:0", beside)
        assert leases.devices == [facts.name, *beside]
