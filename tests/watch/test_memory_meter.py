"""The meter's numbers, who owns bytes, and which errors say that memory ran out."""

import gc
import os
import sys
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch

from headroom.watch import host_memory
from headroom.watch.allocators import (
    NoAllocator,
    PoolAllocator,
    Space,
    make_allocator,
    release_cached_memory,
)
from headroom.watch.host_memory import HostMemory
from headroom.watch.memory_meter import MIB, MemoryMeter, count_allocated_bytes
from headroom.watch.out_of_memory import clear_frames, is_oom

CPU = torch.device("cpu")


class Recorded:
    """A reader of statistics that plays back what an allocator could have said."""

    def __init__(self, *readings, space=None):
        self.readings = list(readings)
        self.space_now = space
        self.resets = 0

    def read(self):
        return dict(self.readings.pop(0) if len(self.readings) > 1 else self.readings[0])

    def reset_peaks(self):
        self.resets += 1

    def read_space(self):
        return self.space_now

    def read_stats(self):
        last = {"allocated_bytes.all.peak": 1, "active_bytes.all.peak": 1}
        return {"allocated_bytes.all.current": 1, **last}


def mib(**values):
    found = {name: value * MIB for name, value in values.items() if name != "retries"}
    return {**found, **({"retries": values["retries"]} if "retries" in values else {})}


def test_a_cpu_record_holds_the_host_only():
    meter = MemoryMeter(CPU)
    meter.end_phase("forward")
    assert set(meter.end_window()) == {"memory/host_rss_mib"}
    assert set(meter.summarize()) == {"memory/host_rss_peak_mib"}
    assert meter.read_stats() == {}


def test_host_memory_is_this_process_and_its_peak_at_least_that():
    meter = MemoryMeter(CPU)
    assert 10 < meter.end_window()["memory/host_rss_mib"] < 100_000
    assert (
        meter.summarize()["memory/host_rss_peak_mib"] >= meter.end_window()["memory/host_rss_mib"]
    )


@pytest.mark.skipif(sys.platform == "win32", reason="no record of the process's peak")
def test_host_peak_sees_what_came_and_went_between_two_samples():
    host = HostMemory()
    record = host._record_before
    more = record - host.read_rss_bytes() + 64 * MIB
    block = bytearray(os.urandom(1)) * more
    del block
    assert host.read_peak_bytes() >= record + 32 * MIB


def test_window_peak_is_of_the_window_and_run_peak_of_the_run():
    meter = MemoryMeter(
        CPU,
        Recorded(
            mib(allocated=1, reserved=4, peak_allocated=1, peak_reserved=4),
            mib(allocated=2, reserved=9, peak_allocated=7, peak_reserved=9),
            mib(allocated=2, reserved=9, peak_allocated=3, peak_reserved=9),
        ),
    )
    first, second = meter.end_window(), meter.end_window()
    assert first["memory/peak_allocated_mib"] == 7
    assert first["memory/allocated_mib"] == 2
    assert second["memory/peak_allocated_mib"] == 3
    assert meter.summarize()["memory/run_peak_allocated_mib"] == 7
    assert meter.summarize()["memory/run_peak_reserved_mib"] == 9


def test_a_phase_resets_the_peak_but_the_window_and_the_run_keep_it():
    source = Recorded(
        mib(allocated=1, peak_allocated=1),
        mib(allocated=1, peak_allocated=8),  # forward
        mib(allocated=1, peak_allocated=5),  # backward
        mib(allocated=1, peak_allocated=6),  # a second forward, lower than the first
        mib(allocated=1, peak_allocated=2),
    )
    meter = MemoryMeter(CPU, source)
    for phase in ("forward", "backward", "forward"):
        meter.end_phase(phase)
    assert meter.end_window()["memory/peak_allocated_mib"] == 8
    assert source.resets == 5
    summary = meter.summarize()
    assert summary["memory/peak_forward_mib"] == 8
    assert summary["memory/peak_backward_mib"] == 5
    assert "memory/peak_eval_mib" not in summary


def test_headroom_counts_other_processes_and_the_highest_reserve():
    source = Recorded(
        mib(allocated=1, reserved=10, peak_allocated=1, peak_reserved=30),
        space=Space(total_bytes=100 * MIB, free_bytes=70 * MIB),  # 20 are other processes'
    )
    meter = MemoryMeter(CPU, source)
    assert meter.end_window()["memory/free_mib"] == 70
    source.space_now = Space(total_bytes=100 * MIB, free_bytes=90 * MIB)
    assert meter.summarize()["memory/headroom_mib"] == 50


def test_headroom_where_the_driver_tells_no_free_memory_is_of_this_process():
    source = Recorded(mib(allocated=1, reserved=10), space=Space(100 * MIB, None))
    meter = MemoryMeter(CPU, source)
    series = meter.end_window()
    assert "memory/free_mib" not in series
    assert "memory/peak_allocated_mib" not in series
    summary = meter.summarize()
    assert summary["memory/headroom_mib"] == 90
    assert "memory/run_peak_allocated_mib" not in summary


def test_retries_are_of_this_run_and_fragmentation_of_where_most_was_in_use():
    """It was of a log point, where the cache lies idle between steps: 7 to 57 % in sound runs."""
    meter = MemoryMeter(
        CPU,
        Recorded(
            mib(retries=3),
            mib(peak_allocated=5, peak_reserved=10, inactive_split=5, retries=3),
            mib(peak_allocated=9, peak_reserved=10, inactive_split=1, retries=3),
            mib(peak_allocated=2, peak_reserved=10, inactive_split=8, retries=5),
        ),
    )
    meter.end_phase("forward")
    meter.end_phase("backward")
    meter.end_window()
    summary = meter.summarize()
    assert summary["memory/fragmentation_pct"] == pytest.approx(10)
    assert summary["memory/alloc_retries"] == 2


def test_raw_statistics_have_the_peaks_of_the_run():
    """They had those of the last window."""
    meter = MemoryMeter(
        CPU, Recorded(mib(), mib(peak_allocated=9, peak_reserved=10), mib(peak_allocated=2))
    )
    meter.end_phase("forward")
    meter.end_window()
    assert meter.read_stats() == {
        "allocated_bytes.all.current": 1,
        "allocated_bytes.all.peak": 9 * MIB,
        "reserved_bytes.all.peak": 10 * MIB,
    }
    assert MemoryMeter(CPU).read_stats() == {}


def test_a_limit_on_the_hosts_memory_is_told_once_when_it_is_near(monkeypatch, caplog):
    """The kernel killed the training, and nothing had said that memory was running out."""
    free = [500 * MIB, 40 * MIB, 39 * MIB]
    monkeypatch.setattr(host_memory, "find_limit_bytes", lambda: 1000 * MIB)
    monkeypatch.setattr(host_memory, "read_total_bytes", lambda: 1000 * MIB)
    monkeypatch.setattr(host_memory, "read_free_bytes", lambda: free.pop(0))
    now = iter([100, 120, 160, 170, 400])
    info = lambda self: SimpleNamespace(rss=next(now) * MIB)  # noqa: E731
    monkeypatch.setattr(psutil.Process, "memory_info", info)
    kept = HostMemory()
    assert [kept.read_rss_bytes() // MIB for _ in range(4)] == [120, 160, 170, 400]
    (told,) = [r.getMessage() for r in caplog.records]
    assert told.startswith("memory: 40.0 MiB are free of the 0.98 GiB of this memory cgroup; a ")


def test_an_allocator_that_retries_in_two_windows_running_is_thrashing():
    counts = [0, 1, 1, 2, 3, 4, 5, 5]
    meter = MemoryMeter(CPU, Recorded(*(mib(retries=count) for count in counts)))
    found = []
    for _ in counts[1:]:
        meter.end_window()
        found.append(meter.is_thrashing())
    # Grown: yes, no, yes, yes, yes, yes, no. It tells at the second in a row, and starts anew.
    assert found == [False, False, False, True, False, True, False]


def test_nothing_reserved_has_no_fragmentation():
    summary = MemoryMeter(CPU, Recorded(mib(reserved=0, inactive_split=0))).summarize()
    assert "memory/fragmentation_pct" not in summary


def test_every_kind_of_device_has_its_reader():
    assert isinstance(make_allocator(CPU), NoAllocator)
    assert isinstance(make_allocator(torch.device("cuda:0")), PoolAllocator)
    assert isinstance(make_allocator(torch.device("xpu")), PoolAllocator)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here and may be in use")
@pytest.mark.parametrize("name", ["cuda:0", "xpu:0"])
def test_a_device_that_nobody_used_is_not_woken_and_nothing_is_invented(name):
    device = torch.device(name)
    release_cached_memory(device)
    assert count_allocated_bytes(device) == 0
    meter = MemoryMeter(device)
    assert set(meter.summarize()) == {"memory/host_rss_peak_mib"}
    assert meter.read_stats() == {}
    assert not torch.cuda.is_initialized()


def test_allocated_bytes_on_a_cpu_counts_a_shared_storage_once():
    gc.collect()
    before = count_allocated_bytes(CPU)
    base = torch.ones(1000)
    views = [base[:10], base.view(10, 100), base.detach()]
    assert count_allocated_bytes(CPU) - before == 4000
    del base, views
    assert count_allocated_bytes(CPU) == before


SAID_BY_ALLOCATORS = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.6 GiB",
    "HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity of 128.00 GiB",
    "XPU out of memory. Tried to allocate 4.66 GiB. GPU 0 has a total capacity of 5.65 GiB",
    "MPS backend out of memory (MPS allocated: 17.9 GB, other allocations: 64.0 KB)",
    "Invalid buffer size: 24.00 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA driver error: out of memory",
    "HIP error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 68719476736 bytes.",
]
NO_OOM = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376"),
    RuntimeError("the text ran out of memory of the war"),
    RuntimeError("Invalid buffer size for the given stride"),
    ValueError("CUDA out of memory"),
    OSError(28, "No space left on device"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("text", SAID_BY_ALLOCATORS)
def test_an_allocators_message_is_an_oom(text):
    assert is_oom(RuntimeError(text))


@pytest.mark.parametrize("error", NO_OOM, ids=lambda error: str(error)[:40])
def test_a_near_miss_is_no_oom(error):
    assert not is_oom(error)


def test_oom_types_need_no_message():
    assert is_oom(torch.OutOfMemoryError())
    assert is_oom(MemoryError())


def test_a_real_refusal_of_the_cpu_allocator_is_an_oom():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_oom(caught.value)


def test_an_oom_is_seen_behind_what_wraps_it():
    def wrapped(how):
        try:
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except RuntimeError as error:
                if how == "cause":
                    raise ValueError("the step failed") from error
                raise ValueError("the step failed")  # noqa: B904
        except ValueError as error:
            return error

    assert is_oom(wrapped("cause"))
    assert is_oom(wrapped("context"))
    assert is_oom(ExceptionGroup("workers", [ValueError(), MemoryError()]))


def test_a_cycle_of_causes_ends():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert not is_oom(one)


def failed(depth):
    """An error from some frames down, each of which holds a tensor."""
    held = torch.ones(10)
    if depth == 0:
        raise RuntimeError("failed")
    try:
        failed(depth - 1)
    except RuntimeError as error:
        raise ValueError(f"failed at {depth}, {held.shape}") from error


def caught(make):
    try:
        make()
    except Exception as error:
        return error


def test_clear_frames_empties_causes_contexts_and_groups():
    gc.collect()
    before = count_allocated_bytes(CPU)
    kept = [caught(lambda: failed(3)), ExceptionGroup("all", [caught(lambda: failed(1))])]
    assert count_allocated_bytes(CPU) - before == 6 * 40
    for error in kept:
        clear_frames(error)
    assert count_allocated_bytes(CPU) == before
    assert kept[0].__traceback__ is not None


def test_clear_frames_empties_what_a_debugger_read():
    """f_locals leaves a copy of the locals in the frame, which frame.clear() does not reach."""
    gc.collect()
    before = count_allocated_bytes(CPU)
    error = caught(lambda: failed(0))
    assert "held" in error.__traceback__.tb_next.tb_next.tb_frame.f_locals
    clear_frames(error)
    assert count_allocated_bytes(CPU) == before


def test_clear_frames_leaves_running_functions_alone():
    mine = torch.ones(3)
    try:
        failed(0)
    except RuntimeError as error:
        clear_frames(error)
    assert mine.sum() == 3
    alive = weakref.ref(mine)
    del mine
    assert alive() is None


def test_an_attribute_error_lets_go_of_the_object_that_lacked_it() -> None:
    def fails() -> None:
        module = torch.nn.Linear(3, 3)
        seen.append(weakref.ref(module))
        module.weigth  # noqa: B018 (the mistake itself)

    seen: list[weakref.ref[torch.nn.Module]] = []
    with pytest.raises(AttributeError, match="weigth") as caught:
        fails()
    clear_frames(caught.value)
    assert seen[0]() is None and "weigth" in str(caught.value)
