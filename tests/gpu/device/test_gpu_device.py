"""What detection says of a real CUDA or ROCm GPU, and that a limit on it holds."""

import gc
import os
import subprocess
import sys

import pytest
import torch

from headroom.device.detection import (
    DeviceError,
    cap_device_memory,
    detect_best_device,
    explain_choice,
    resolve_precision,
)

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
GIB = 1024**3


def in_a_process(env, code):
    """What a new process prints; CUDA reads its variables once a process."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.strip()


def test_auto_takes_a_gpu_that_computed():
    facts = detect_best_device()
    assert facts.kind in ("cuda", "rocm") and not facts.fell_back
    assert next(c for c in facts.checks if c.name.startswith("compute") and c.ok)
    assert not [c for c in facts.checks if c.ok is False and "memory" not in c.name]
    assert facts.reason.startswith(f"{facts.kind}:{facts.index}, the ")


def test_facts_are_those_of_the_device():
    facts = detect_best_device()
    props = torch.cuda.get_device_properties(facts.index)
    assert facts.model == props.name
    assert facts.total_bytes == torch.cuda.mem_get_info(facts.index)[1]
    assert 0 < facts.free_bytes <= facts.total_bytes
    assert str(props.uuid) in facts.uuid
    assert facts.runtime.startswith(("CUDA ", "ROCm "))
    with torch.cuda.device(facts.index):
        assert facts.bf16 == torch.cuda.is_bf16_supported(including_emulation=False)


@pytest.mark.skipif(torch.version.cuda is None, reason="NVML is NVIDIA's")
def test_driver_and_memory_come_from_nvml_where_it_is():
    pynvml = pytest.importorskip("pynvml")
    pynvml.nvmlInit()
    try:
        assert detect_best_device().driver_version == pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    assert detect_best_device().uuid.startswith(("GPU-", "MIG-"))


def test_auto_precision_is_the_fastest_native_one():
    facts = detect_best_device()
    wanted = "bf16" if facts.bf16 else "tf32" if facts.tf32 else "fp32"
    assert resolve_precision("auto", facts) == wanted


def test_index_that_is_not_here_is_refused_with_those_that_are():
    with pytest.raises(DeviceError, match=r"^device.name: cuda:99 is not here; .* has .*:0"):
        detect_best_device("cuda:99")
    assert explain_choice("cuda:99")[-1].ok is False


def test_hidden_gpus_are_the_reason_for_the_cpu():
    code = (
        "from headroom.device.detection import detect_best_device as d; "
        "print(d().fell_back, d().reason)"
    )
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    if torch.version.cuda:
        del hidden["HIP_VISIBLE_DEVICES"]
    said = in_a_process(hidden, code)
    assert said.startswith("True cpu, because ")
    assert "VISIBLE_DEVICES='' hides every GPU" in said


def test_asking_for_the_cpu_leaves_the_gpu_asleep():
    code = (
        "import torch; from headroom.device.detection import detect_best_device as detect; "
        "detect('cpu'); "
        "print(torch.cuda.is_initialized())"
    )
    assert in_a_process({}, code) == "False"


def test_limit_holds_and_can_be_lifted():
    facts = detect_best_device()
    if facts.free_bytes < 2 * GIB:
        pytest.skip("needs 2 GiB of free memory")
    torch.cuda.empty_cache()
    lift = cap_device_memory(facts, 256)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(GIB, dtype=torch.uint8, device=facts.name)
    finally:
        lift()
    gc.collect()
    assert torch.empty(GIB, dtype=torch.uint8, device=facts.name).numel() == GIB
    torch.cuda.empty_cache()


def test_a_limit_below_what_is_cached_is_kept():
    """2 MiB were "held" at a peak of 17: the caches of the detection were given out again."""
    facts = detect_best_device("cuda")
    torch.empty(32 * 1024**2, dtype=torch.uint8, device=facts.name)
    lift = cap_device_memory(facts, 2)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * 1024**2, dtype=torch.uint8, device=facts.name)
    finally:
        lift()
