"""The ledger counts storages as a plain model of them does: a dict from each that lives to its
bytes and its owner."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headroom.watch.allocation_log import ACTIVATIONS, MIB, REST, AllocationLog

CPU = torch.device("cpu")
OWNERS = ("parameters", "data")
ACTIONS = st.one_of(
    st.tuples(st.just("make"), st.integers(1, 1000)),
    st.tuples(st.sampled_from(["view", "in_place", "drop", *OWNERS]), st.integers(0, 9)),
)


class Model:
    """What the ledger should know, kept without looking at storages."""

    def __init__(self, block):
        self.block, self.held, self.step_peak, self.at_peak = block, {}, 0, {}

    def total(self):
        return sum(size for size, _ in self.held.values())

    def make(self, key, floats):
        self.held[key] = [-(-4 * floats // self.block) * self.block, REST]
        if self.total() > self.step_peak:
            self.step_peak, self.at_peak = self.total(), dict(self.held)

    def sum_owners_at_peak(self):
        found = {}
        for size, owner in self.at_peak.values():
            found[owner] = found.get(owner, 0) + size
        return found


@settings(max_examples=60, deadline=None)
@given(actions=st.lists(ACTIONS, min_size=1, max_size=40), block=st.sampled_from([1, 512]))
def test_the_ledger_agrees_with_a_plain_model_of_storages(actions, block):
    ledger = AllocationLog(CPU, block=lambda size: -(-size // block) * block)
    model, tensors = Model(block), {}
    ledger.begin_step()
    totals = [0]
    with ledger.count_allocations():
        for at, (what, number) in enumerate(actions):
            key = sorted(tensors)[number % len(tensors)] if tensors else None
            if what == "make":
                tensors[at] = [torch.zeros(number)]
                model.make(at, number)
                totals.append(model.total())
            elif key is None:
                continue
            elif what == "view":
                tensors[key].append(tensors[key][0].view(-1)[:1])
            elif what == "in_place":
                tensors[key][0].add_(1)
            elif what == "drop":
                del tensors[key], model.held[key]
            else:
                ledger.own(what, tensors[key])
                model.held[key][1] = what
            assert ledger.allocated_bytes == model.total()
    assert ledger.peak_bytes == ledger.step_peak_bytes == model.step_peak
    assert ledger.sum_owners_at_peak() == model.sum_owners_at_peak()
    told = [sum(owners.values()) for _, owners in ledger.compute_timeline()]
    assert max(told, default=0) == model.step_peak
    assert told[-1:] == ([model.total()] if told else [])
    assert set(totals[1:]) <= set(told)


def test_a_step_forgets_what_died_before_it_and_keeps_what_lives():
    ledger = AllocationLog(CPU)
    with ledger.count_allocations():
        kept = torch.zeros(100)
        dead = torch.zeros(9000)
        del dead
        ledger.begin_step()
        made = torch.zeros(50)
    assert (kept.nbytes, made.nbytes) == (400, 200)
    assert ledger.step_peak_bytes == 600
    assert ledger.peak_bytes == 36_400
    assert [sum(owners.values()) for _, owners in ledger.compute_timeline()] == [400, 600]


def test_what_the_forward_pass_leaves_alive_are_activations_and_phases_have_their_ends():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    ledger = AllocationLog(CPU)
    ledger.own("parameters", model.parameters())
    x = torch.zeros(16, 8)
    ledger.own("batch", [x])
    ledger.begin_step()
    with ledger.count_allocations():
        loss = model(x).square().sum()
        ledger.end_phase("forward")
        loss.backward()
        ledger.end_phase("backward")
    ledger.own("gradients", [p.grad for p in model.parameters()])
    at_peak = ledger.sum_owners_at_peak()
    assert at_peak["parameters"] == sum(p.nbytes for p in model.parameters())
    assert at_peak["batch"] == x.nbytes
    # The peak lies in the backward pass: of the forward's outputs the ReLU's and the loss are left.
    assert at_peak[ACTIVATIONS] == 4 * (16 * 32 + 1)
    assert sum(at_peak.values()) == ledger.step_peak_bytes
    (forward, first), (backward, second) = ledger.list_phases()
    assert (first, second) == ("forward", "backward")
    assert forward < backward
    lines = {entry.line for entry in ledger.list_at_peak() if entry.owner == ACTIVATIONS}
    assert all(line.startswith("test_allocation_log.py:") for line in lines), lines


def test_a_limit_refuses_as_a_device_would_and_what_was_refused_is_not_held():
    ledger = AllocationLog(CPU, limit_bytes=3 * MIB)
    with ledger.count_allocations():
        kept = torch.zeros(2 * MIB, dtype=torch.uint8)
        ledger.own("data", [kept])
        with pytest.raises(torch.OutOfMemoryError) as refused:
            torch.zeros(2 * MIB, dtype=torch.uint8)
        assert str(refused.value) == (
            "CPU out of memory. Tried to allocate 2.00 MiB; 1.00 MiB of the limit of 3.00 MiB "
            "are free"
        )
        assert [(e.owner, e.bytes) for e in ledger.list_at_failure()] == [("data", 2 * MIB)]
        assert ledger.peak_bytes == 2 * MIB
        # The error still lives, and keeps nothing that would count.
        fits = torch.zeros(MIB, dtype=torch.uint8)
        del kept
        after = torch.zeros(2 * MIB, dtype=torch.uint8)
    assert ledger.allocated_bytes == fits.nbytes + after.nbytes == 3 * MIB


def test_several_outputs_of_one_operation_are_refused_together():
    ledger = AllocationLog(CPU, limit_bytes=1500)
    with ledger.count_allocations():
        x = torch.zeros(100)
        # 400 bytes of values would fit beside the 400 of x, and 800 of indices would.
        with pytest.raises(torch.OutOfMemoryError, match="allocate 1.17 KiB; 1.07 KiB of"):
            x.sort()
    assert ledger.peak_bytes == 400


def test_what_failed_inside_an_operation_is_remembered_until_the_next_step():
    ledger = AllocationLog(CPU)
    with ledger.count_allocations():
        kept = torch.zeros(10)
        with pytest.raises(RuntimeError):
            kept.view(3)
    assert [entry.bytes for entry in ledger.list_at_failure()] == [40]
    ledger.begin_step()
    assert ledger.list_at_failure() == []


def test_other_devices_and_layouts_do_not_count():
    ledger = AllocationLog(CPU)
    with ledger.count_allocations():
        kept = torch.empty(100, device="meta"), torch.eye(3).to_sparse()
    dense = sum(e.bytes for e in ledger.list_at_peak() if e.what.startswith("eye"))
    assert dense == 36
    assert kept[0].device.type == "meta"
    assert all("meta" not in entry.what for entry in ledger.list_at_peak())
