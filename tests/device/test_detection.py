"""Detection for real on the machine that runs the tests; a device's arithmetic and limit."""

import os
from dataclasses import replace

import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headroom.device.checks import Machine
from headroom.device.detection import (
    DeviceError,
    cap_device_memory,
    check_memory_limit,
    choose_device,
    detect_best_device,
    explain_choice,
    find_compute_problem,
    resolve_precision,
)
from headroom.device.probe import probe_machine

GIB = 1024**3
CPU = choose_device(Machine("2.13.0+cpu", cpu_model="Test CPU", ram_total_bytes=16 * GIB), "cpu")
H200 = replace(CPU, name="cuda:0", kind="cuda", index=0, total_bytes=80 * GIB, bf16=True, tf32=True)
V100 = replace(H200, bf16=False, tf32=False, model="Tesla V100")
A770 = replace(H200, name="xpu:0", kind="xpu", tf32=False)
needs_cpu_only = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="says what a machine without a GPU says"
)


def test_cpu_asked_for_is_taken_without_a_look_at_gpus(monkeypatch):
    monkeypatch.delattr(torch.accelerator, "current_accelerator")  # whoever asks for a GPU fails
    facts = detect_best_device("cpu")
    assert (facts.name, facts.reason) == ("cpu", "cpu, as device.name asks")
    assert facts.total_bytes == psutil.virtual_memory().total
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert (facts.uuid, facts.runtime, facts.driver_version) == (None, None, None)
    assert facts.torch_version == torch.__version__


@needs_cpu_only
def test_this_machine_without_a_gpu_gets_the_cpu_for_a_true_reason():
    facts = detect_best_device()
    assert facts.name == "cpu"
    first = next(c for c in facts.checks if c.ok is not True)
    assert first.finding in facts.reason
    assert facts.fell_back == bool(probe_machine(os.environ).adapters)


@needs_cpu_only
@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build")
def test_cuda_on_a_cpu_build_says_that_the_build_is_the_problem():
    with pytest.raises(DeviceError, match="^device.name: cuda is not here; .* without CUDA.*build"):
        detect_best_device("cuda")


@needs_cpu_only
def test_detect_raises_what_the_choice_refuses():
    with pytest.raises(DeviceError, match="^device.name: must be auto, gpu, "):
        detect_best_device("cpu:3")
    with pytest.raises(DeviceError, match="^device.name: gpu is not here; .*only the cpu: "):
        detect_best_device("gpu")


@needs_cpu_only
def test_explain_ends_with_the_choice_and_does_not_raise_without_a_gpu():
    assert explain_choice()[:-1] == detect_best_device().checks
    assert explain_choice()[-1].name == "choice" and explain_choice()[-1].ok
    refused = explain_choice("cuda:7")[-1]
    assert refused.ok is False and refused.finding.startswith("device.name: cuda:7 is not here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_small_product_is_exact_in_every_dtype(dtype):
    assert find_compute_problem("cpu", dtype) == ""


class FirstProductWrong(TorchDispatchMode):
    """A broken adder: the first product is off by 2, the one to compare with is not."""

    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.products += 1
            return result + 2 if self.products == 1 else result
        return result


def test_device_that_computes_wrongly_is_not_believed():
    with FirstProductWrong():
        assert (
            find_compute_problem("cpu", torch.float32)
            == "its product of two 64x64 matrices is off by 2"
        )


@needs_cpu_only
def test_a_full_device_is_told_in_words_of_ours(monkeypatch):
    """It was PyTorch's paragraph, with the advice to look for a broken GPU."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has")

    monkeypatch.setattr(torch.Tensor, "to", full)
    assert find_compute_problem("cuda:0", torch.float32) == "its memory is full"


def test_device_that_cannot_compute_says_what_it_raised():
    assert "CUDA" in find_compute_problem("cuda:0", torch.float32)


@pytest.mark.parametrize(
    ("asked", "facts", "got"),
    [
        ("auto", H200, "bf16"),
        ("auto", replace(H200, bf16=False), "tf32"),
        ("auto", V100, "fp32"),
        ("auto", CPU, "fp32"),
        ("auto", replace(CPU, bf16=True), "fp32"),
        ("bf16", CPU, "bf16"),
        ("fp16", V100, "fp16"),
        ("tf32", H200, "tf32"),
        ("fp32", CPU, "fp32"),
    ],
)
def test_precision_is_what_the_device_computes_in(asked, facts, got):
    assert resolve_precision(asked, facts) == got


@pytest.mark.parametrize(
    ("asked", "facts", "said"),
    [
        ("tf32", CPU, r"tf32 is not for cpu \(Test CPU\); use auto or one of fp32, bf16$"),
        ("fp16", CPU, "fp16 is not for cpu"),
        ("bf16", V100, r"bf16 is not for cuda:0 \(Tesla V100\); use auto or one of fp32, fp16$"),
        ("tf32", A770, "tf32 is not for xpu:0"),
        ("fp8", H200, r"must be auto or fp32, tf32, bf16, fp16 \(got 'fp8'\)"),
    ],
)
def test_precision_that_the_device_lacks_is_refused(asked, facts, said):
    with pytest.raises(DeviceError, match=f"^train.precision: {said}"):
        resolve_precision(asked, facts)


@pytest.mark.parametrize(
    ("facts", "limit_mib", "said"),
    [
        (replace(CPU, total_bytes=2**30), 1025.0, r"must be above 0 and at most 1024, all of cpu"),
        (H200, 81921.0, r"must be above 0 and at most 81920, all of cuda:0 \(got 81921\)"),
        (H200, 0.0, r"must be above 0 .*\(got 0\)"),
        (replace(H200, total_bytes=None), 100.0, "the total memory of cuda:0 is not known"),
    ],
)
def test_limit_that_cannot_be_kept_is_refused(facts, limit_mib, said):
    with pytest.raises(DeviceError, match=f"^memory.limit_mib: {said}"):
        check_memory_limit(facts, limit_mib)


def test_no_limit_is_nothing_to_do_anywhere():
    for facts in (CPU, H200):
        check_memory_limit(facts, None)
        cap_device_memory(facts, None)()


@pytest.mark.parametrize(
    ("facts", "backend", "calls"),
    [
        (H200, torch.cuda, [(0.5, 0), (0.75, 0)]),
        (replace(H200, kind="rocm"), torch.cuda, [(0.5, 0), (0.75, 0)]),
        (A770, torch.xpu, [(0.5, 0), (0.75, 0)]),
        (replace(H200, kind="mps", index=None), torch.mps, [(0.5,), (1.7,)]),
    ],
    ids=["cuda", "rocm", "xpu", "mps"],
)
def test_limit_is_a_share_of_the_device_and_what_there_was_comes_back(
    monkeypatch, facts, backend, calls
):
    seen = []
    monkeypatch.setattr(
        backend, "get_per_process_memory_fraction", lambda index: 0.75, raising=False
    )
    name = "set_per_process_memory_fraction"
    monkeypatch.setattr(backend, name, lambda *args: seen.append(args), raising=False)
    cap_device_memory(facts, 40 * 1024.0)()
    assert [call[1:] for call in seen] == [call[1:] for call in calls]
    # Half a byte more than asked, see limit().
    assert [call[0] for call in seen] == pytest.approx([call[0] for call in calls], rel=1e-9)


def test_a_cpu_may_have_a_limit_which_its_allocator_does_not_keep():
    check_memory_limit(replace(CPU, total_bytes=2**30), 1024.0)
    cap_device_memory(replace(CPU, total_bytes=2**30), 1.0)()
