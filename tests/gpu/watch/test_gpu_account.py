"""The accounts of somebody else's loop on a GPU: the same bits, the memory that the allocator and
the tensors tell, and no wait for the device at a step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headroom.watch.oom_report import explain_out_of_memory, find_part
from headroom.watch.own_loop import OwnLoop

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
MIB = 2**20


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("headroom.watch.own_loop.COUNT_SHARE", float("inf"))  # so short
    monkeypatch.setattr("headroom.watch.own_loop.has_compiled", lambda: False)  # another test has
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()


def _net() -> nn.Sequential:
    layers = [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10)).to(GPU)


def _train(loop: OwnLoop | None, *, steps: int = 12) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters())
    if loop is not None:
        loop.watch(net, optimizer)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=False)
        loss = net(torch.randn(256, 512, device=GPU)).square().mean()
        loss.backward()
        optimizer.step()
        if loop is not None:
            loop.log({"train/loss": loss})
    return net, optimizer


def _log_nothing(found: Any) -> None:
    pass


def test_a_loop_on_a_gpu_comes_to_the_same_bits_with_its_accounts() -> None:
    plain, _ = _train(None)
    loop = OwnLoop("cuda:0", log=_log_nothing)
    told, _ = _train(loop)
    loop.close()
    for one, other in zip(plain.parameters(), told.parameters(), strict=True):
        assert torch.equal(one, other)


def test_owners_and_peak_are_what_the_tensors_and_the_allocator_say() -> None:
    torch.cuda.reset_peak_memory_stats(GPU)
    _train(None)
    plain_peak = torch.cuda.memory_stats(GPU)["allocated_bytes.all.peak"]
    gc.collect()
    loop = OwnLoop("cuda:0", log=_log_nothing)
    net, optimizer = _train(loop)
    loop.close()
    found = loop.summarize()
    assert found["memory/run_peak_allocated_mib"] * MIB == pytest.approx(plain_peak, rel=0.01)
    sizes = {
        "parameters": [p.nbytes for p in net.parameters()],
        "gradients": [p.grad.nbytes for p in net.parameters() if p.grad is not None],
        "optimizer_state": [
            t.nbytes
            for s in optimizer.state.values()
            for t in s.values()
            if t.device.type == "cuda"
        ],
    }
    for owner, parts in sizes.items():
        assert found[f"memory/{owner}_mib"] * MIB == pytest.approx(sum(parts), rel=0.01), owner
    owners = ("buffers", "data", "batch", "activations", "libraries", "rest", *sizes)
    whole = sum(found.get(f"memory/{owner}_mib", 0.0) for owner in owners)
    assert whole == pytest.approx(found["memory/run_peak_allocated_mib"], rel=0.01)
    for phase in ("forward", "backward", "optimizer"):
        assert 0 < found[f"memory/peak_{phase}_mib"] <= found["memory/run_peak_allocated_mib"]
        assert f"time/{phase}_ms" in found


def test_layers_of_known_sizes_hold_what_they_should_on_the_device() -> None:
    loop = OwnLoop("cuda:0", log=_log_nothing)
    net, _ = _train(loop)
    loop.close()
    told = loop.accounts.describe_layers()
    for owner in ("parameters", "gradients", "optimizer_state", "buffers", "activations"):
        inside = sum(held.get(owner, 0) for held in told["layers"].values())
        assert inside + told["outside"].get(owner, 0) == told["owners"].get(owner, 0), owner
    for path in ("0", "2", "4"):
        own = sum(p.nbytes for p in net.get_submodule(path).parameters())
        assert told["layers"][path]["parameters"] == own
    # What autograd's own thread makes belongs to a layer, too; what no layer has is small.
    assert sum(told["outside"].get(owner, 0) for owner in ("activations", "rest")) < MIB


def test_no_step_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of a training of ours is waited for, to know what it took."""
    loop = OwnLoop("cuda:0", log=_log_nothing)
    waits: list[str] = []

    def note(*_: Any, **__: Any) -> None:
        waits.append("synchronize")

    monkeypatch.setattr(torch.accelerator, "synchronize", note)
    monkeypatch.setattr(torch.cuda, "synchronize", note)
    item = torch.Tensor.item

    def read(tensor: torch.Tensor) -> Any:
        if tensor.device.type != "cpu":
            waits.append("item")
        return item(tensor)

    monkeypatch.setattr(torch.Tensor, "item", read)
    monkeypatch.setattr("headroom.watch.own_loop.READ_EVERY_S", 1e9)
    _train(loop, steps=9)
    assert not waits


def test_what_was_on_the_device_is_logged_at_its_step_and_with_its_value() -> None:
    logged: dict[int, float] = {}

    def keep(found: Any) -> None:
        for metrics, step in found:
            if "running" in metrics:
                logged[step] = metrics["running"]

    loop = OwnLoop("cuda:0", log=keep)
    running = torch.zeros((), device=GPU)
    for _ in range(25):
        loop.begin_step()
        running += 1  # in place, after it was logged
        loop.log({"running": running})
        loop.end_step()
    loop.close()
    assert logged == {step: float(step) for step in range(1, 26)}


def test_a_backward_that_finds_no_memory_is_told_with_its_owners(tmp_path: Path) -> None:
    """In the first step, before anything was counted."""
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters())
    loop = OwnLoop("cuda:0", log=_log_nothing)
    loop.watch(net, optimizer)
    x = torch.randn(4096, 512, device=GPU)
    total = torch.cuda.mem_get_info(GPU)[1]
    out = net(x)
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(GPU) + MIB) / total, GPU)
    try:
        with pytest.raises(torch.OutOfMemoryError) as ran_out:
            out.square().mean().backward()
        why = explain_out_of_memory(
            loop.note_failure(ran_out.value),
            loop.accounts.phases.accounts.ledger,
            find_remedy=find_part,
            device="cuda:0",
            folder=tmp_path,
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
    assert (why.phase, why.step, why.batch_shape) == ("backward", 1, (4096, 512))
    assert why.owners["parameters"] == sum(p.nbytes for p in net.parameters())
    assert why.owners["batch"] == x.nbytes
    # Of each of the two ReLUs its result; what the last layer gives is held by this test.
    assert why.owners["activations"] >= 2 * 4096 * 1024 * 4
    assert sum(why.owners.values()) == torch.cuda.memory_allocated(GPU)
    loop.close()


def test_what_the_loop_still_holds_is_no_leak() -> None:
    loop = OwnLoop("cuda:0", log=_log_nothing)
    net, optimizer = _train(loop)
    kept = torch.ones(4 * MIB, device=GPU)
    loop.close()
    held = loop.measure_held(baseline_bytes=0)
    of_state = [t for s in optimizer.state.values() for t in s.values()]
    mine = [*net.parameters(), *(p.grad for p in net.parameters()), *of_state]
    assert held.held_bytes is not None
    assert held.held_bytes[0] == sum(
        t.nbytes for t in mine if t is not None and t.device.type == "cuda"
    )
    # Tests before this one may have left some bytes to the process.
    assert kept.nbytes <= held.held_bytes[1] < kept.nbytes + MIB
    assert held.leaked_bytes == 0 and held.released_bytes > 0
    assert held.owners[0].bytes == kept.nbytes and "'kept'" in held.owners[0].held_by
