"""What is said when memory ran out: every library's words are understood, and the remedy fits the
owner that holds most."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from headroom.settings.run_config import RunConfig
from headroom.watch.allocation_log import MIB, AllocationLog
from headroom.watch.oom_report import (
    OomMessage,
    find_part,
    find_setting,
    make_explanation,
    parse_oom_message,
)
from headroom.watch.out_of_memory import MemoryFailure

CPU = torch.device("cpu")
GIB = 1024 * MIB
TEXTS = {
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.11 GiB of "
    "which19.50 MiB is free. Including non-PyTorch memory, this process has 22.09 GiB memory in "
    "use. Of the allocated memory 21.75 GiB is allocated by PyTorch, and 13.75 MiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting ...": (
        2 * GIB,
        19.5 * MIB,
        13.75 * MIB,
    ),
    # A limit: what the driver has free is not the run's.
    "CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a total capacity of 139.72 GiB of "
    "which 138.50 GiB is free. 64.00 MiB allowed; Of the allocated memory 40.00 MiB is allocated "
    "by PyTorch, with 4.00 MiB allocated in private pools (e.g., CUDA Graphs), and 4.00 MiB is "
    "reserved by PyTorch but unallocated.": (32 * MIB, 20 * MIB, 4 * MIB),
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB of "
    "which 7.00 GiB is free. 64.00 MiB allowed; Of the allocated memory 66.00 MiB is allocated by "
    "PyTorch, and 0 bytes is reserved by PyTorch but unallocated.": (20 * MIB, 0, 0),
    "HIP out of memory. Tried to allocate 432.00 MiB. GPU 0 has a total capacity of 15.92 GiB of "
    "which 0 bytes is free. Of the allocated memory 8.00 GiB is allocated by PyTorch, and 321.50 "
    "MiB is reserved by PyTorch but unallocated.": (432 * MIB, 0, 321.5 * MIB),
    "XPU out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity of 11.59 GiB of "
    "which 9.00 GiB is free. Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes "
    "is reserved by PyTorch but unallocated. Please use `empty_cache` ...": (32 * GIB, 9 * GIB, 0),
    "XPU out of memory. Tried to allocate 1.50 GiB (GPU 0; 15.50 GiB total capacity; 176.00 MiB "
    "already allocated; 180.00 MiB reserved in total by PyTorch)": (1.5 * GIB, None, 4 * MIB),
    "CUDA out of memory. Tried to allocate 12.50 MiB (GPU 0; 10.00 GiB total capacity; 8.50 MiB "
    "already allocated; 9.25 GiB free; 10.50 MiB reserved in total by PyTorch)": (
        12.5 * MIB,
        9.25 * GIB,
        2 * MIB,
    ),
    "MPS backend out of memory (MPS allocated: 9.50 GiB, other allocations: 17.25 GiB, max "
    "allowed: 27.00 GiB). Tried to allocate 292.50 MiB on private pool. Use PYTORCH_MPS_...": (
        292.5 * MIB,
        0.25 * GIB,
        None,
    ),
    "MPS backend out of memory (MPS allocated: 18.00 GB, other allocations: 128.00 MB, max "
    "allowed: 18.25 GB). Tried to allocate 256 bytes on shared pool.": (256, 128 * MIB, None),
    "MPS backend out of memory (MPS allocated: 1.49 GiB, other allocations: 67108914.49 GiB, max "
    "allowed: 30.19 GiB). Tried to allocate 9.00 MiB on private pool.": (9 * MIB, None, None),
    "Invalid buffer size: 5.50 GiB": (5.5 * GIB, None, None),
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 4000000000 bytes. Error code 12 (Cannot allocate memory)": (
        4_000_000_000,
        None,
        None,
    ),
    "Unable to allocate 7.50 GiB for an array with shape (1, 2) and data type float64": (
        7.5 * GIB,
        None,
        None,
    ),
    "CUDA error: out of memory": (None, None, None),
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": (None,) * 3,
}


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:40])
def test_every_library_is_understood(text):
    assert replace(parse_oom_message(text), others_bytes=None) == OomMessage(*TEXTS[text])


@pytest.mark.parametrize(
    ("free", "own", "idle", "others_mib", "is_theirs"),
    [
        ("2.00 MiB", "10.00 GiB", "8.00 MiB", 68 * 1024 - 10, True),
        ("2.00 MiB", "78.50 GiB", "8.00 MiB", 0, False),  # the rest is what a context takes
        ("2.00 MiB", "77.98 GiB", "8.00 MiB", 10.48, False),  # too little to be of help
    ],
)
def test_the_others_part_is_told_by_what_is_neither_free_nor_ours(
    free: str, own: str, idle: str, others_mib: float, is_theirs: bool
) -> None:
    """In a container PyTorch's text takes this process for another one, or the other way round."""
    told = parse_oom_message(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.00 GiB "
        f"of which {free} is free. Process 4242 has 78.00 GiB memory in use. Of the allocated "
        f"memory {own} is allocated by PyTorch, and {idle} is reserved by PyTorch but unallocated."
    )
    assert told.others_bytes == pytest.approx(others_mib * MIB, abs=MIB)
    assert told.is_held_by_others is is_theirs


def test_the_ledgers_own_words_are_understood():
    ledger = AllocationLog(CPU, limit_bytes=3 * MIB)
    with ledger.count_allocations():
        kept = torch.zeros(MIB, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError) as refused:
            kept.new_zeros(4 * MIB)
    assert parse_oom_message(str(refused.value)) == OomMessage(4 * MIB, 2 * MIB, None)


def explained(ledger, text="CUDA error: out of memory", settings=None, device="cpu", **more):
    config = RunConfig.model_validate(settings or {})
    failure = MemoryFailure(
        text, **{"phase": "training", "step": 3, "batch_shape": (4, 8), "tried": (4, 2, 1), **more}
    )
    find = partial(find_setting, config=config, precision="fp32")
    return make_explanation(failure, ledger, find_remedy=find, device=device)


def failed(limit_bytes, hidden=32, rows=16):
    """A forward and backward pass under a limit, up to where it is refused."""
    model = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.Tanh())
    ledger = AllocationLog(CPU, limit_bytes=limit_bytes)
    x = torch.zeros(rows, 8)
    ledger.own("parameters", model.parameters())
    ledger.own("batch", [x])
    ledger.begin_step()
    with pytest.raises(torch.OutOfMemoryError) as refused, ledger.count_allocations():
        loss = model(x).square().sum()
        ledger.end_phase("forward")
        loss.backward()
    return ledger, str(refused.value)


def test_a_forward_pass_that_failed_holds_activations_by_their_line():
    ledger, text = failed(limit_bytes=50_000, hidden=16, rows=500)
    why = explained(ledger, text, device="cpu")
    assert why.phase == "forward"
    assert max(why.owners, key=why.owners.get) == "activations"
    assert sum(why.owners.values()) == sum(entry.bytes for entry in ledger.list_at_failure())
    assert why.holdings[0].line.startswith("test_oom_report.py:")
    assert sum(holding.bytes for holding in why.holdings) <= sum(why.owners.values())
    assert why.message == parse_oom_message(text)
    assert why.sentence == (
        "model.args: memory ran out on cpu in the forward pass of step 3 (a batch of 4x8), with "
        "micro-batches of 4, 2 and 1 rows (none fits); 0.03 MiB asked for and 336 B free; most "
        "is held by activations: 0.03 MiB of 0.05 MiB; make the model smaller by model.args, or "
        "set train.precision to bf16 (got fp32)"
    )


def test_a_backward_pass_that_failed_is_told_from_a_forward_pass():
    fits = AllocationLog(CPU)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh())
    fits.own("parameters", model.parameters())
    x = torch.zeros(16, 8)
    fits.own("batch", [x])
    with fits.count_allocations():
        loss = model(x).square().sum()
    ledger, text = failed(limit_bytes=fits.peak_bytes)
    why = explained(ledger, text)
    assert loss.requires_grad
    assert (why.phase, why.message.asked_bytes is None) == ("backward", False)


@pytest.mark.parametrize(
    ("owner", "settings", "setting", "words"),
    [
        ("parameters", {}, "model.args", "make the model smaller by model.args"),
        ("gradients", {}, "model.args", "make the model smaller"),
        ("optimizer_state", {}, "optim.name", "set optim.name to sgd"),
        (
            "optimizer_state",
            {"optim": {"name": "sgd"}},
            "optim.args.momentum",
            "set optim.args.momentum to 0, which needs no state",
        ),
        (
            "optimizer_state",
            {"optim": {"name": "sgd", "args": {"momentum": 0}}},
            "model.args",
            "smaller",
        ),
        ("activations", {}, "model.args", "set train.precision to bf16 (got fp32)"),
        (
            "activations",
            {
                "data": {"source": "text", "args": {"context": 512}},
                "model": {"name": "transformer"},
            },
            "data.args.context",
            "shorten data.args.context (got 512)",
        ),
        ("data", {"data": {"source": "synthetic"}}, "data.args.rows", "fewer rows"),
        ("data", {"data": {"source": "npy", "path": "x.npy"}}, "data.path", "fewer rows"),
        ("rest", {"memory": {"limit_mib": 64}}, "model.args", "raise memory.limit_mib (got 64)"),
    ],
)
def test_the_remedy_shrinks_what_holds_most(owner, settings, setting, words):
    ledger = AllocationLog(CPU)
    with ledger.count_allocations():
        large, small = torch.zeros(1000), torch.zeros(10)
        ledger.own(owner, [large])
        ledger.own("buffers", [small])
        ledger.end_phase("between")
        with pytest.raises(RuntimeError):
            large.view(3)
    why = explained(ledger, settings=settings, phase="optimizer")
    assert why.setting == setting
    assert words in why.remedy
    assert why.sentence.startswith(f"{setting}: ")
    assert "train.accumulate" not in why.remedy and "batch_size" not in why.remedy


def test_smaller_micro_batches_are_the_remedy_only_while_there_are_smaller_ones():
    why = explained(AllocationLog(CPU), settings={"train": {"batch_size": 100}}, tried=(100, 50))
    assert (why.setting, why.remedy) == (
        "train.accumulate",
        "set train.accumulate to 4 (got 1)",
    )
    late = explained(AllocationLog(CPU), tried=(100, 50), phase="optimizer", fitted=25)
    assert late.setting == "model.args"
    assert "(25 fitted before)" in late.sentence


def test_memory_that_lies_in_pieces_is_said_and_what_to_do_about_it():
    text = next(text for text in TEXTS if "13.75 MiB" in text).replace("2.00 GiB", "8.00 MiB")
    pool = {"reserved": 400, "allocated": 100, "inactive_split": 100}
    why = explained(AllocationLog(CPU), text, device="cuda:0", allocator=pool)
    assert "PYTORCH_ALLOC_CONF to expandable_segments:True" in why.remedy
    assert why.fragmentation_pct == 25
    silent = explained(AllocationLog(CPU), allocator=pool)
    assert silent.message.idle_bytes == 300
    assert "ALLOC_CONF" not in silent.remedy


def test_what_nobody_told_is_not_said():
    why = explained(AllocationLog(CPU), tried=())
    assert (why.owners, why.holdings, why.fragmentation_pct) == ({}, (), None)
    for word in ("asked", "free", "held", "None", "micro"):
        assert word not in why.sentence


def test_the_explanation_is_small_plain_json():
    ledger, text = failed(limit_bytes=50_000, hidden=16, rows=500)
    for entry in ledger.list_at_failure():
        entry.line = "a|b.py:1 forward\n" + 2000 * "x"
    why = explained(ledger, text)
    told = json.loads(why.to_json())
    assert told["sentence"] == why.sentence
    assert told["owners"] == dict(why.owners)
    assert "\n" not in why.sentence
    assert len(told["holdings"]) == len(why.holdings) <= 5


@pytest.mark.parametrize("find_remedy", [find_part, None])
def test_what_no_python_object_holds_is_the_rest_of_what_the_allocator_counts(find_remedy):
    """Of a training it was left out: owners came to less than the device held."""
    ledger = AllocationLog(torch.device("meta"))
    weight = torch.zeros(1000, device="meta")
    ledger.own("parameters", [weight])
    ledger.note_failure()
    find_remedy = find_remedy or partial(find_setting, config=RunConfig(), precision="fp32")
    failure = MemoryFailure("CUDA error: out of memory", "forward", allocator={"allocated": 4096})
    why = make_explanation(failure, ledger, find_remedy=find_remedy, device="cuda:0")
    assert why.owners == {"parameters": weight.nbytes, "rest": 4096 - weight.nbytes}
