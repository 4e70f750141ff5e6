"""Running out of memory on a real GPU: its words are understood, its history is kept, and who held
what is told."""

import pickle
from functools import partial

import pytest
import torch

from headroom.settings.run_config import RunConfig
from headroom.watch.allocation_log import MIB, AllocationLog
from headroom.watch.allocators import make_allocator
from headroom.watch.oom_report import find_setting, make_explanation, parse_oom_message
from headroom.watch.out_of_memory import MemoryFailure, clear_frames, is_oom
from headroom.watch.simulated_allocator import read_rules
from headroom.watch.snapshot import SNAPSHOT_FILE, make_history, record_history

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("memory_given_back")]
GPU = torch.device("cuda:0")


def too_much():
    free, _ = torch.cuda.mem_get_info(GPU)
    return torch.empty(2 * free, dtype=torch.uint8, device=GPU)


def test_the_error_of_this_gpu_tells_what_was_asked_and_what_was_free():
    free, _ = torch.cuda.mem_get_info(GPU)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        too_much()
    told = parse_oom_message(str(caught.value))
    assert told.asked_bytes == pytest.approx(2 * free, rel=0.01)
    assert told.free_bytes == pytest.approx(free, rel=0.05)
    assert told.idle_bytes is not None


def test_under_a_limit_the_free_memory_is_the_limits_and_not_the_gpus(limit_mib):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(128 * MIB, dtype=torch.uint8, device=GPU)
    told = parse_oom_message(str(caught.value))
    assert told.asked_bytes == 128 * MIB
    assert told.free_bytes is not None and told.free_bytes <= (limit_mib + 1) * MIB


def test_the_ledger_remembers_what_was_held_when_the_gpu_refused():
    ledger = AllocationLog(GPU, block=read_rules().round_up)
    with ledger.count_allocations():
        kept = torch.zeros(MIB, dtype=torch.uint8, device=GPU)
        with pytest.raises(torch.OutOfMemoryError):
            too_much()
    assert [entry.bytes for entry in ledger.list_at_failure()] == [MIB]
    assert kept.numel() == MIB


def test_the_ledger_and_the_allocator_agree_to_the_block():
    torch.cuda.empty_cache()  # a cached block may be larger than what is asked of it
    before = torch.cuda.memory_allocated(GPU)
    ledger = AllocationLog(GPU, block=read_rules().round_up)
    with ledger.count_allocations():
        kept = [torch.zeros(n, device=GPU) for n in (1, 1000, 12_345, 3 * MIB)]
        assert ledger.allocated_bytes == torch.cuda.memory_allocated(GPU) - before
        del kept[1]
        assert ledger.allocated_bytes == torch.cuda.memory_allocated(GPU) - before


def test_the_history_of_the_last_attempt_is_kept_with_its_python_lines(tmp_path):
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        record_history(GPU, folder=tmp_path, on=False) as recorder,
    ):
        recorder.start()
        torch.empty(MIB, dtype=torch.uint8, device=GPU)
        too_much()
    assert is_oom(caught.value)
    clear_frames(caught.value)
    # Written by this very test: reading it back is safe here, and nowhere in the product.
    found = pickle.loads((tmp_path / SNAPSHOT_FILE).read_bytes())
    events = [event for trace in found["device_traces"] for event in trace]
    assert {"alloc", "oom"} <= {event["action"] for event in events}
    files = {frame["filename"] for event in events for frame in event.get("frames", ())}
    assert any(name.endswith("test_gpu_oom.py") for name in files)


def test_the_history_ends_with_the_run(tmp_path):
    with record_history(GPU, folder=tmp_path, on=True):
        torch.empty(MIB, dtype=torch.uint8, device=GPU)
    torch.empty(3 * MIB, dtype=torch.uint8, device=GPU)
    later = tmp_path / "later.pickle"
    make_history(GPU).write(later)
    found = pickle.loads(later.read_bytes())
    sizes = {event.get("size") for trace in found["device_traces"] for event in trace}
    assert 3 * MIB not in sizes


def test_what_did_not_fit_is_explained_with_what_was_held(limit_mib):
    ledger = AllocationLog(GPU, block=read_rules().round_up)
    with ledger.count_allocations(), pytest.raises(torch.OutOfMemoryError) as refused:
        held = torch.zeros(8 * MIB, dtype=torch.uint8, device=GPU)
        torch.zeros(2 * limit_mib * MIB, dtype=torch.uint8, device=GPU)
    failure = MemoryFailure(str(refused.value), "training", allocator=make_allocator(GPU).read())
    why = make_explanation(
        failure,
        ledger,
        find_remedy=partial(find_setting, config=RunConfig(), precision="bf16"),
        device="cuda:0",
    )
    assert why.phase == "forward" and held.nbytes == 8 * MIB
    assert why.message.asked_bytes == 2 * limit_mib * MIB
    assert why.message.free_bytes is not None and why.message.free_bytes <= limit_mib * MIB
    assert why.holdings[0].bytes == 8 * MIB
    assert why.holdings[0].line.startswith("test_gpu_oom.py:")
