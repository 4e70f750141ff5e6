"""Memory that runs out on a device in somebody else's loop: the same batch goes on in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headroom import account
from tests.run.faults import send_nothing

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here", allow_module_level=True)
ROWS, WIDTH = 256, 8192  # 8 MiB for each activation


class Scale(nn.Module):
    """Keeps activations and computes next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.weight)


@pytest.fixture(autouse=True)
def alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with send_nothing(monkeypatch, counts_all=False):
        yield


def _train(
    *, is_scaled: bool = False, accumulate: int = 1, norm: nn.Module | None = None
) -> tuple[nn.Module, account]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [norm or nn.Identity(), *(Scale() for _ in range(12))]
    net = nn.Sequential(*layers, nn.Linear(WIDTH, 3)).cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=is_scaled, init_scale=2.0**10)
    draw = torch.Generator().manual_seed(1)
    with account(run_name="gpu", model=net, optimizer=opt, quiet=True) as run:

        def compute(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", torch.float16, enabled=is_scaled):
                return F.cross_entropy(net(x), y)

        step = run.protect(compute, lambda loss: scaler.scale(loss).backward())
        for at in range(4):
            x = torch.randn(ROWS, WIDTH, generator=draw).cuda()
            y = torch.randint(0, 3, (ROWS,), generator=draw).cuda()
            step(x, y)
            del x, y
            if at % accumulate == accumulate - 1:
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
    return net.cpu(), run


@pytest.mark.parametrize(
    ("is_scaled", "accumulate", "apart"), [(False, 1, 1e-4), (False, 2, 1e-4), (True, 1, 1e-2)]
)
def test_a_loop_goes_on_where_the_device_is_full(
    is_scaled: bool, accumulate: int, apart: float, request: pytest.FixtureRequest
) -> None:
    whole, calm = _train(is_scaled=is_scaled, accumulate=accumulate)
    assert calm.run["metrics"]["memory/ooms_recovered"] == 0
    request.getfixturevalue("limit_mib")
    parts, run = _train(is_scaled=is_scaled, accumulate=accumulate)
    assert run.run["metrics"]["memory/ooms_recovered"] > 0 and run.run["warnings"] == []
    assert int(run.run["tags"]["micro_batch"]) < ROWS
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=apart, atol=apart)
    found = run.run["metrics"]
    assert found["time/forward_ms"] > 0 and found["time/backward_ms"] > 0


def test_the_error_of_a_loop_that_mixes_rows_says_who_held_the_memory(limit_mib: int) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        _train(norm=nn.BatchNorm1d(WIDTH))
    torch.cuda.empty_cache()
