"""What the memory record says on a real CUDA or ROCm GPU, and that it is given back there."""

import gc

import pytest
import torch
from torch import nn

from headroom.watch.allocation_log import AllocationLog
from headroom.watch.leaks import release_device_memory, take_baseline
from headroom.watch.memory_meter import MIB, MemoryMeter, count_allocated_bytes
from headroom.watch.out_of_memory import clear_frames, is_oom
from headroom.watch.simulated_allocator import read_rules

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
KEPT = []
SERIES = {
    "memory/allocated_mib",
    "memory/reserved_mib",
    "memory/peak_allocated_mib",
    "memory/peak_reserved_mib",
    "memory/free_mib",
    "memory/host_rss_mib",
}


@pytest.fixture
def before():
    torch.ones(1, device=GPU)  # the context is not the run's
    gc.collect()
    yield take_baseline(GPU).bytes
    KEPT.clear()
    gc.collect()
    torch.cuda.empty_cache()


def trained(steps=3):
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10)).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(128, 256, device=GPU)).square().mean().backward()
        optimizer.step()
    return model


def test_the_series_of_a_log_point_is_complete_and_consistent(before):
    meter = MemoryMeter(GPU)
    kept = torch.empty(8 * MIB, dtype=torch.uint8, device=GPU)
    torch.empty(64 * MIB, dtype=torch.uint8, device=GPU)
    first, second = meter.end_window(), meter.end_window()
    assert set(first) == SERIES
    assert first["memory/peak_allocated_mib"] >= first["memory/allocated_mib"] + 64
    assert second["memory/peak_allocated_mib"] == second["memory/allocated_mib"]
    assert first["memory/peak_reserved_mib"] >= first["memory/peak_allocated_mib"]
    assert 0 < first["memory/free_mib"] < torch.cuda.get_device_properties(GPU).total_memory / MIB
    assert kept.numel() == 8 * MIB


def test_phase_peaks_are_told_apart_and_the_run_keeps_the_highest(before):
    meter = MemoryMeter(GPU)
    torch.empty(64 * MIB, dtype=torch.uint8, device=GPU)
    meter.end_phase("forward")
    torch.empty(16 * MIB, dtype=torch.uint8, device=GPU)
    meter.end_phase("backward")
    summary = meter.summarize()
    assert summary["memory/peak_forward_mib"] - summary["memory/peak_backward_mib"] == 48
    assert summary["memory/run_peak_allocated_mib"] == summary["memory/peak_forward_mib"]
    assert summary["memory/alloc_retries"] == 0
    assert 0 <= summary["memory/fragmentation_pct"] <= 100
    total_mib = torch.cuda.get_device_properties(GPU).total_memory / MIB
    assert 0 < summary["memory/headroom_mib"] < total_mib - 64
    assert meter.read_stats()["allocated_bytes.all.current"] == count_allocated_bytes(GPU)


def test_saved_activations_match_what_the_allocator_counts(before):
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(512, 512), nn.ReLU())]).to(GPU)
    x = torch.randn(4096, 512, device=GPU)
    model(x).sum().backward()
    start = count_allocated_bytes(GPU)
    ledger = AllocationLog(GPU, block=read_rules().round_up)
    ledger.own("parameters", model.parameters())  # else their views would be activations
    ledger.own("batch", [x])
    with ledger.count_allocations():
        out = model(x).sum()
        ledger.end_phase("forward")
    # x was there before; four layers' outputs came of it.
    assert ledger.sum_owners_at_peak()["activations"] == pytest.approx(4 * x.nbytes, rel=0.02)
    assert count_allocated_bytes(GPU) - start == pytest.approx(4 * x.nbytes, rel=0.02)
    out.backward()


def test_a_training_gives_back_all_but_a_residual(before):
    trained()
    facts = release_device_memory(GPU, baseline_bytes=before)
    assert facts.ok, facts
    assert facts.leaked_bytes == 0
    assert facts.residual_bytes <= MIB, facts  # cuBLAS workspaces are cleared
    assert facts.released_bytes > 0


def test_a_second_training_hides_nothing_behind_the_firsts_workspaces(before):
    trained()
    second = take_baseline(GPU).bytes
    KEPT.append(torch.ones(MIB, device=GPU))
    facts = release_device_memory(GPU, baseline_bytes=second)
    assert facts.leaked_bytes == 4 * MIB
    (owner,) = facts.owners
    assert owner.held_by == f"list in module {__name__}, name 'KEPT'"


def test_a_kept_model_is_a_leak_with_gradients_and_names(before):
    KEPT.append(trained())
    facts = release_device_memory(GPU, baseline_bytes=before)
    sizes = sum(p.nbytes + p.grad.nbytes for p in KEPT[0].parameters())
    assert facts.leaked_bytes == sizes
    assert any("'weight' of Linear" in owner.held_by for owner in facts.owners)
    assert facts.residual_bytes <= MIB, facts


def test_what_a_kept_loss_keeps_for_its_backward_is_a_leak_not_a_residual(before):
    x = torch.randn(MIB, device=GPU, requires_grad=True)
    KEPT.append((x.exp() * x.sin()).sum())
    del x
    facts = release_device_memory(GPU, baseline_bytes=before)
    assert facts.leaked_bytes == 3 * 4 * MIB + 4
    assert facts.residual_bytes < 1024


def test_release_returns_to_baseline_after_oom(before):
    def too_much():
        batch = torch.ones(32 * MIB, dtype=torch.uint8, device=GPU)
        free, _ = torch.cuda.mem_get_info(GPU)
        return torch.empty(2 * free, dtype=torch.uint8, device=GPU), batch

    with pytest.raises(torch.OutOfMemoryError) as caught:
        too_much()
    assert is_oom(caught.value)
    held = release_device_memory(GPU, baseline_bytes=before)
    assert held.leaked_bytes == 32 * MIB
    assert "traceback in OutOfMemoryError" in held.owners[0].held_by
    clear_frames(caught.value)
    facts = release_device_memory(GPU, baseline_bytes=before)
    assert (facts.ok, facts.after_bytes) == (True, before)


def test_pinned_memory_is_no_leak_of_the_device(before):
    pinned = torch.ones(MIB, pin_memory=True)
    facts = release_device_memory(GPU, baseline_bytes=before)
    assert facts.ok
    assert pinned.is_pinned()
    if hasattr(torch.cuda, "host_memory_stats"):
        (kept,) = [one for one in facts.kept if one.name == "pinned host memory"]
        assert kept.bytes >= pinned.nbytes


def test_the_drivers_own_count_agrees_that_all_was_given_back(before):
    free_before, _ = torch.cuda.mem_get_info(GPU)
    trained()
    facts = release_device_memory(GPU, baseline_bytes=before)
    free_after, _ = torch.cuda.mem_get_info(GPU)
    assert facts.reserved_bytes == 0
    told = sum(one.bytes for one in facts.kept if "driver" in one.name)
    assert told >= free_before - free_after - MIB  # kernels that were loaded, on a real GPU
