import torch
from torch import nn

from headroom.watch.allocation_log import MIB, AllocationLog
from headroom.watch.memory_by_owner import CountedAllocator, MemoryByOwner

CPU = torch.device("cpu")


def _training() -> tuple[nn.Module, torch.optim.Optimizer, MemoryByOwner, list[torch.Tensor]]:
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight  # tied: its bytes count once
    model = nn.Sequential(first, nn.Sigmoid(), second)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    batch = [torch.ones(500, 8)]
    accounts = MemoryByOwner(
        AllocationLog(CPU),
        lambda: {
            "parameters": model.parameters(),
            "gradients": [p.grad for p in model.parameters() if p.grad is not None],
            "optimizer_state": [t for kept in optimizer.state.values() for t in kept.values()],
        },
    )
    return model, optimizer, accounts, batch


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, accounts: MemoryByOwner, batch
) -> None:
    optimizer.zero_grad()
    loss = model(*batch).sum()
    accounts.ledger.end_phase("forward")
    loss.backward()
    accounts.ledger.end_phase("backward")
    optimizer.step()
    accounts.ledger.end_phase("optimizer")


def test_each_owner_has_its_bytes_at_the_peak() -> None:
    model, optimizer, accounts, batch = _training()
    _step(model, optimizer, accounts, batch)  # makes the optimizer's state
    with accounts.count_memory(batch):
        _step(model, optimizer, accounts, batch)
    owners = {k: v * MIB for k, v in accounts.make_metrics().items()}
    assert owners["memory/parameters_mib"] == 8 * 8 * 4
    assert owners["memory/optimizer_state_mib"] == 2 * 8 * 8 * 4 + 4
    assert owners["memory/batch_mib"] == 500 * 8 * 4
    # The sigmoid's output, which it and the layer after it save; the input is the batch.
    assert owners["memory/activations_mib"] >= 500 * 8 * 4
    assert sum(owners.values()) == accounts.ledger.step_peak_bytes


def test_the_highest_step_is_the_one_that_is_kept() -> None:
    model, optimizer, accounts, _ = _training()
    for rows in (10, 300, 20):
        batch = [torch.ones(rows, 8)]
        with accounts.count_memory(batch):
            _step(model, optimizer, accounts, batch)
    assert accounts.make_metrics()["memory/batch_mib"] * MIB == 300 * 8 * 4


def test_what_was_never_counted_has_no_owner() -> None:
    *_, accounts, _ = _training()
    assert accounts.make_metrics() == {}


def test_a_cpu_tells_what_was_counted_and_is_silent_about_the_rest() -> None:
    ledger = AllocationLog(CPU)
    allocator = CountedAllocator(ledger, None)
    assert allocator.read() == {} and allocator.read_space() is None
    with ledger.count_allocations():
        kept = torch.ones(1000)
        torch.ones(5000)
        inside = allocator.read()
    assert inside == {"allocated": 4000, "peak_allocated": 24000} and len(kept) == 1000
    allocator.reset_peaks()
    assert allocator.read() == {}  # nobody has looked since


def test_a_limit_is_the_space_of_a_cpu() -> None:
    ledger = AllocationLog(CPU, limit_bytes=10_000)
    allocator = CountedAllocator(ledger, 10_000)
    with ledger.count_allocations():
        kept = torch.ones(1000)
        space = allocator.read_space()
    assert space is not None and (space.total_bytes, space.free_bytes) == (10_000, 6_000)
    del kept
