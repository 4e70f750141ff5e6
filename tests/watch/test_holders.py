"""What grows from step to step is found by its name."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from torch import Tensor, nn

from headroom.watch.holders import find_growing_list

kept: list[Tensor] = []  # of a script


class _Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(300)])
        self.seen: dict[int, tuple[Tensor, float]] = {}


def test_a_list_of_losses_is_named_with_its_graphs() -> None:
    weight = torch.ones(512, requires_grad=True)
    history = deque((weight * at).sum() for at in range(64))
    losses = [torch.zeros(()) for _ in range(64)]
    found = find_growing_list(60)
    assert found is not None
    assert found.holder.startswith("deque in local 'history' of function test_a_list_of_losses")
    assert (found.tensors, found.shape, found.has_graphs) == (64, (), True)
    assert find_growing_list(65) is None and len(losses) == len(history)


def test_the_largest_is_told_and_not_what_a_model_has() -> None:
    model = _Keeper()
    names = {f"w{at}": torch.ones(4096) for at in range(70)}  # by name: no history
    model.seen.update({at: (torch.ones(3, 100), 0.0) for at in range(70)})
    small = [torch.ones(3) for _ in range(70)]
    found = find_growing_list(60)
    assert found is not None and len(names) == len(small)
    assert found.holder == "dict in attribute 'seen' of _Keeper"  # whoever holds that
    assert (found.tensors, found.shape, found.has_graphs) == (70, (3, 100), False)


def test_a_global_of_a_script_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.kept", [torch.ones(8) for _ in range(80)])
    found = find_growing_list(75)
    assert found is not None and found.holder.endswith("test_holders, name 'kept'")


def test_a_list_that_has_itself_is_no_trap() -> None:
    circle: list[object] = [0] * 100
    circle.append(circle)
    assert find_growing_list(100) is None
