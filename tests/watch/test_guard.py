"""What goes wrong in a hook of a loop's account ends no loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headroom.watch import guard
from headroom.watch.own_loop import OwnLoop
from tests.run.faults import break_function


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only step of each loop is counted."""
    monkeypatch.setattr("headroom.watch.own_loop.has_compiled", lambda: False)
    monkeypatch.setattr("headroom.watch.own_loop.COUNT_SHARE", float("inf"))


def test_an_error_in_each_hook_ends_no_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch calls them within a forward, a backward, a step of an optimizer."""
    hooks: dict[str, Any] = {}
    make = guard.Hook.__init__

    def note(hook: Any, owner: Any, call: Any) -> None:
        hooks[call.__name__] = call
        make(hook, owner, call)

    def train(is_told: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))
        rows, opt = torch.randn(6, 4, 8), torch.optim.AdamW(net.parameters(), lr=0.1)
        loop = OwnLoop("cpu", log=lambda found: None)
        if is_told:
            loop.watch(net)
            loop.count_rows_of(net)
        for x in rows:
            net(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
        loop.close()
        return [p.detach().clone() for p in net.parameters()]

    with monkeypatch.context() as watched:
        watched.setattr(guard.Hook, "__init__", note)
        plain = train(is_told=True)
    assert {*hooks} >= {"_begin_forward", "_end_forward", "_begin_backward", "_end_backward"}
    assert {*hooks} >= {"_begin_update", "_end_update", "_adopt", "_count_given"}
    for name, call in hooks.items():
        caplog.clear()
        with monkeypatch.context() as broken:
            break_function(broken, call)
            told = train(is_told=True)
        assert all(torch.equal(one, other) for one, other in zip(plain, told, strict=True)), name
        assert [record for record in caplog.records if record.exc_info], name
    assert all(torch.equal(a, b) for a, b in zip(plain, train(is_told=False), strict=True))
