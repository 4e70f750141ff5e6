"""Memory by layer: known sizes by the path of the module, sums that are the owners', and the same
bits whether it is counted or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import checkpoint

from headroom.watch.allocation_log import AllocationLog
from headroom.watch.layers import Layers, iterate_state
from headroom.watch.memory_by_owner import MemoryByOwner
from headroom.watch.own_loop import OwnLoop

CPU = torch.device("cpu")
MIB = 2**20
FLOAT = 4
SUMMED = ("parameters", "gradients", "optimizer_state", "buffers", "activations")


@pytest.fixture(autouse=True)
def every_loop_may_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones too, whatever an earlier test of this process has compiled."""
    monkeypatch.setattr("headroom.watch.own_loop.has_compiled", lambda: False)
    monkeypatch.setattr("headroom.watch.own_loop.COUNT_SHARE", float("inf"))


def _log_nothing(lines: Any) -> None:
    pass


def count_step(
    model: nn.Module, take: Callable[[Callable[[str], None]], Any], optimizer: Any = None
) -> dict[str, Any]:
    """What the layers hold at the peak of a step that is counted. take: the step, which gets a call
    that ends a phase."""
    optimizers = [] if optimizer is None else [optimizer]

    def owned() -> Any:
        return {
            "parameters": model.parameters(),
            "buffers": model.buffers(),
            "gradients": [p.grad for p in model.parameters() if p.grad is not None],
            "optimizer_state": [tensor for _, tensor in iterate_state(optimizers)],
        }

    accounts = MemoryByOwner(AllocationLog(CPU), owned)
    accounts.find_layers = partial(Layers, [model], partial(iterate_state, optimizers))
    with accounts.count_memory(()):
        take(accounts.ledger.end_phase)
    return accounts.describe_layers()


def assert_sums(told: dict[str, Any]) -> None:
    """Layers and what is outside of them come to the owners, and these to the peak."""
    for owner in {*SUMMED, *told["owners"]}:
        inside = sum(held.get(owner, 0) for held in told["layers"].values())
        assert inside + told["outside"].get(owner, 0) == told["owners"].get(owner, 0), owner
    assert all(size > 0 for size in told["outside"].values())
    assert sum(told["owners"].values()) == told["peak_bytes"]


def test_layers_of_known_sizes_hold_what_they_should() -> None:
    rows, net = 32, nn.Sequential(nn.Linear(8, 64), nn.Sigmoid(), nn.Linear(64, 16), nn.Tanh())
    x, kept = torch.randn(rows, 8), []

    def forward(end_phase: Callable[[str], None]) -> None:
        kept.append(net(x))
        end_phase("forward")
        torch.zeros(100_000)  # the peak lies here, when the forward pass is done

    told = count_step(net, forward)
    # A Linear's output is what a Sigmoid is made of, which saves its own output and not that.
    weights = [FLOAT * (8 * 64 + 64), FLOAT * (64 * 16 + 16)]
    assert told["layers"] == {
        "1": {"activations": FLOAT * rows * 64},
        "2": {"parameters": weights[1]},
        "0": {"parameters": weights[0]},
        "3": {"activations": FLOAT * rows * 16},
    }
    sizes = [sum(held.values()) for held in told["layers"].values()]
    assert sizes == sorted(sizes, reverse=True)
    assert told["outside"]["rest"] == 400_000
    assert_sums(told)


def test_gradients_and_state_lie_where_their_parameter_does() -> None:
    net = nn.ModuleDict({"first": nn.Linear(40, 50), "norm": nn.BatchNorm1d(50)})
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)

    def step(end_phase: Callable[[str], None]) -> None:
        loss = net["norm"](net["first"](torch.randn(4, 40))).square().sum()
        end_phase("forward")
        loss.backward()
        del loss
        end_phase("backward")
        optimizer.step()
        torch.zeros(100_000)
        end_phase("optimizer")

    told = count_step(net, step, optimizer)
    size = FLOAT * (40 * 50 + 50)
    # Of each parameter two moments, and a count of four bytes.
    wanted = {"parameters": size, "gradients": size, "optimizer_state": 2 * size + 2 * FLOAT}
    assert told["layers"]["first"] == wanted
    assert told["layers"]["norm"] == {
        "parameters": FLOAT * 100,
        "gradients": FLOAT * 100,
        "optimizer_state": FLOAT * (200 + 2),
        "buffers": FLOAT * 100 + 8,
    }
    assert_sums(told)


class _Block(nn.Module):
    def __init__(self, *, again: bool | None) -> None:
        super().__init__()
        self.up, self.down, self.again = nn.Linear(32, 256), nn.Linear(256, 32), again

    def forward(self, x: Tensor) -> Tensor:
        def compute(x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(x)))

        if self.again is None:
            return compute(x)
        return checkpoint(compute, x, use_reentrant=self.again)  # type: ignore[no-any-return]


@pytest.mark.parametrize("again", [None, True, False])
def test_a_backward_pass_belongs_to_the_layers_of_the_forward_one(again: bool | None) -> None:
    net = nn.Sequential(*[_Block(again=again) for _ in range(3)])
    x = torch.randn(64, 32, requires_grad=True)

    def step(end_phase: Callable[[str], None]) -> None:
        loss = net(x).square().sum()
        end_phase("forward")
        loss.backward()
        end_phase("backward")

    told = count_step(net, step)
    assert_sums(told)
    # The peak is in the backward pass of a block: what is there of it is the tanh's 64 x 256
    # numbers, kept or computed anew, their gradient and that of the tanh's input.
    size, peak_at = FLOAT * 64 * 256, "2" if again is None else "0"
    made = sum(
        held.get("rest", 0) + held.get("activations", 0)
        for path, held in told["layers"].items()
        if path.startswith(peak_at)
    )
    assert 3 * size <= made < 4 * size
    assert told["outside"].get("rest", 0) <= 2 * FLOAT * 64 * 32 + FLOAT


def test_what_several_layers_share_lies_in_what_has_them_all() -> None:
    flat = torch.zeros(30)
    net = nn.ModuleDict(
        {"a": nn.ModuleDict({"b": nn.Linear(2, 3), "c": nn.Linear(2, 3)}), "d": nn.Linear(2, 3)}
    )
    for at, linear in enumerate((net["a"]["b"], net["a"]["c"])):
        linear.weight.data = flat[6 * at : 6 * at + 6].view(3, 2)
    told = count_step(net, lambda end_phase: end_phase("forward"))
    assert told["layers"]["a"] == {"parameters": FLOAT * 30}
    assert told["layers"]["a.b"] == {"parameters": FLOAT * 3}
    assert_sums(told)


def test_an_error_in_a_layer_is_told_by_its_path_and_the_next_step_is_counted_right() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 50_000), nn.ReLU()))
    ledger = AllocationLog(CPU, limit_bytes=3 * MIB)
    accounts = MemoryByOwner(ledger, lambda: {"parameters": net.parameters()})
    accounts.find_layers = partial(Layers, [net])
    with pytest.raises(torch.OutOfMemoryError), accounts.count_memory(()):
        net(torch.zeros(64, 8))
    assert ledger.failed_layer == "1.0"
    with accounts.count_memory(()):
        made = torch.zeros(1000)
        ledger.end_phase("forward")
    told = accounts.describe_layers()
    assert told["outside"]["activations"] == made.nbytes == told["owners"]["activations"]
    assert_sums(told)


def test_several_models_begin_with_their_classes_and_wrappers_are_left_out() -> None:
    class DistributedDataParallel(nn.Module):  # what of it matters here
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    one, other, third = nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.ReLU()), nn.Linear(1, 1)
    wrapped = DistributedDataParallel(one)
    alone = Layers([wrapped]).paths
    assert (alone[id(wrapped)], alone[id(one)], alone[id(one[0])]) == ("", "", "0")
    paths = Layers([wrapped, other, third]).paths
    named = [paths[id(module)] for module in (wrapped, one[0], other[0], third)]
    assert named == ["Sequential-1", "Sequential-1.0", "Sequential-2.0", "Linear"]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
        ),
        (4, 6, 16),
    ),
    "lstm": (lambda: nn.LSTM(16, 24, num_layers=2, batch_first=True), (4, 6, 16)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
        ),
        (4, 3, 8, 8),
    ),
    "scripted": (lambda: torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU())), (4, 16)),
}


def _attend() -> nn.Module:
    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True, dropout=0.1)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]  # type: ignore[no-any-return]

    return Attend()


MODELS["attention"] = (_attend, (4, 6, 16))


def _train(name: str, loop: OwnLoop | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if loop is not None:
        loop.watch(model, optimizer)
    for _ in range(4):
        if loop is not None:
            loop.begin_step()  # some of these have no hooks
        out = model(torch.randn(shape))
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if loop is not None:
            loop.end_step()
        model.eval()
        with torch.no_grad():  # where PyTorch's own layers take a faster way, if nothing hooks them
            model(torch.randn(shape))
        model.train()
    return model.state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_a_counted_loop_has_the_same_bits_and_no_hook_is_left(name: str) -> None:
    loop = OwnLoop("cpu", log=_log_nothing)
    counted = _train(name, loop)
    loop.close()
    told = loop.accounts.describe_layers()
    assert_sums(told)
    assert sum(held.get("parameters", 0) for held in told["layers"].values()) > 0
    plain = _train(name, None)
    assert counted.keys() == plain.keys()
    assert all(torch.equal(counted[key], plain[key]) for key in plain)
    for table in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        assert not getattr(torch_modules, table)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in loop.models[0].modules())


def test_a_loop_that_is_not_counted_looks_at_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headroom.watch.own_loop.COUNT_SHARE", 0.0)
    monkeypatch.setattr("headroom.watch.own_loop.Layers", None)  # would fail
    loop = OwnLoop("cpu", log=_log_nothing)
    _train("convolutions", loop)
    loop.close()
    assert loop.done == 4
    assert loop.accounts.describe_layers() == {}
