import copy
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import OptimConfig
from headroom.training import build, optim

ARGS: dict[str, dict[str, Any]] = {"adamw": {"betas": [0.9, 0.99]}, "sgd": {"momentum": 0.9}}


def _twins() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    two = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    two.load_state_dict(one.state_dict())
    return one, two


def _train(model: nn.Module, optimizer, *, steps: int) -> None:
    torch.manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(8, 6), torch.randn(8, 2)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["adamw", "sgd", "sgd without momentum"])
def test_steps_are_those_of_torch_optim(name: str, weight_decay: float) -> None:
    mine, theirs = _twins()
    momentum = 0.0 if "without" in name else 0.9
    made = optim.make_fused_optimizer(
        name.split()[0],
        mine.parameters(),
        lr=0.05,
        weight_decay=weight_decay,
        args={"betas": (0.9, 0.99)} if name == "adamw" else {"momentum": momentum},
    )
    if name == "adamw":
        reference = torch.optim.AdamW(
            theirs.parameters(), lr=0.05, betas=(0.9, 0.99), weight_decay=weight_decay
        )
    else:
        reference = torch.optim.SGD(
            theirs.parameters(),
            lr=0.05,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=momentum > 0,
        )
    _train(mine, made, steps=25)
    _train(theirs, reference, steps=25)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Mixed(nn.Module):
    """One of each kind of parameter, a norm over several axes and a tied one among them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.norm = nn.LayerNorm((3, 6))
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 5)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.norm(self.embedding(tokens))))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_norms_biases_and_embeddings_have_no_weight_decay(name: str) -> None:
    torch.manual_seed(0)
    mine = Mixed()
    theirs = copy.deepcopy(mine)
    made = optim.make_fused_optimizer(
        name,
        mine.parameters(),
        lr=0.05,
        weight_decay=0.5,
        args=ARGS[name],
        undecayed=optim.list_undecayed(mine),
    )
    decayed = [theirs.hidden.weight]
    rest = [p for p in theirs.parameters() if p is not theirs.hidden.weight]
    groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    reference: torch.optim.Optimizer
    if name == "adamw":
        reference = torch.optim.AdamW(groups, lr=0.05, betas=(0.9, 0.99), weight_decay=0.5)
    else:
        reference = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.5, nesterov=True)
    tokens = torch.randint(5, (8, 3))
    for _ in range(6):
        for model, optimizer in ((mine, made), (theirs, reference)):
            optimizer.zero_grad()
            model(tokens).logsumexp(-1).square().mean().backward()
            optimizer.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([used, unused], lr=0.1, weight_decay=0.1, beta1=0.9, beta2=0.99)
    used.sum().backward()
    optimizer.step()
    assert unused.tolist() == [1, 1, 1]
    assert used.tolist() != [1, 1, 1]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_with_infinite_gradients_changes_nothing_under_a_scaler(name: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = optim.make_fused_optimizer(
        name, [weight], lr=0.1, weight_decay=0.1, args=ARGS[name]
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale((weight * math.inf).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [1, 1, 1]
    assert all(not state.any() for state in optimizer.list_state_tensors())
    assert scaler.get_scale() == 2.0


@pytest.mark.parametrize("unscaled_before", [True, False])
def test_scaled_gradients_give_the_step_of_unscaled_ones(unscaled_before: bool) -> None:
    mine, theirs = _twins()
    results = []
    for model, enabled in ((mine, True), (theirs, False)):
        optimizer = optim.AdamW(model.parameters(), lr=0.1, weight_decay=0, beta1=0.9, beta2=0.99)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
        scaler.scale(model(torch.ones(2, 6)).square().sum()).backward()
        if unscaled_before:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        results.append([p.detach() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_first_step_imports_no_compiler() -> None:
    import subprocess
    import sys

    code = (
        "import sys, torch\n"
        "from headroom.training import optim\n"
        "p = torch.nn.Parameter(torch.ones(2)); p.sum().backward()\n"
        "o = optim.make_fused_optimizer("
        "'adamw', [p], lr=.1, weight_decay=0., args={})\n"
        "o.step(); o.zero_grad()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_parameter_that_misses_a_gradient_misses_a_count_too() -> None:
    """All share one count, until one of them goes its own way: as in torch.optim."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(3)) for _ in range(2)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    mine = optim.AdamW(ours, lr=0.1, weight_decay=0.01, beta1=0.9, beta2=0.99)
    reference = torch.optim.AdamW(theirs, lr=0.1, betas=(0.9, 0.99), weight_decay=0.01)
    for present in ((0, 1), (0,), (0, 1), (1,), (0, 1)):
        for i in range(2):
            gradient = torch.randn(3) if i in present else None
            ours[i].grad, theirs[i].grad = gradient, gradient
        mine.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_step_that_failed_between_two_decays_goes_on_where_it_failed(monkeypatch, name) -> None:
    """Each weight decay is a call of the kernel, and one that was made is not made again."""
    torch.manual_seed(0)
    start = [torch.randn(3) for _ in range(3)]
    ours, theirs = ([nn.Parameter(p.clone()) for p in start] for _ in range(2))
    how = {"lr": 0.1, "weight_decay": 0.3, "args": ARGS[name]}
    mine = optim.make_fused_optimizer(name, ours, **how, undecayed=ours[:2])
    groups = [{"params": theirs[:2], "weight_decay": 0.0}, {"params": theirs[2:]}]
    reference: torch.optim.Optimizer
    if name == "adamw":
        reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.99), weight_decay=0.3)
    else:
        reference = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.3, nesterov=True)
    kernel, calls = getattr(torch, f"_fused_{name}_"), []

    def second_fails(*args, **kwargs) -> None:
        calls.append(kwargs["weight_decay"])
        if len(calls) in (2, 5):  # of the first step, and of the second
            raise RuntimeError("CUDA out of memory.")
        kernel(*args, **kwargs)

    monkeypatch.setattr(torch, f"_fused_{name}_", second_fails)
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn(3)
        b.grad = a.grad.clone()
    with pytest.raises(RuntimeError, match="out of memory"):
        mine.step()
    mine.step()
    reference.step()
    assert calls == [0.0, 0.3, 0.3]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(RuntimeError, match="out of memory"):
        mine.step()
    mine.zero_grad()
    for a, b in zip(ours, theirs, strict=True):
        a.grad = b.grad.clone()
    mine.step()
    assert calls[3:] == [0.0, 0.3, 0.0, 0.3], "gradients anew are a step anew"


def test_one_count_is_kept_for_all_parameters_while_each_gets_its_gradient() -> None:
    model, _ = _twins()
    optimizer = optim.AdamW(model.parameters(), lr=0.1, weight_decay=0, beta1=0.9, beta2=0.99)
    assert optimizer.list_state_tensors() == []
    _train(model, optimizer, steps=3)
    *moments, count = optimizer.list_state_tensors()
    assert len(moments) == 2 * len(list(model.parameters())) and count.item() == 3
    optimizer.params[0].grad = None
    optimizer.step()
    counts = optimizer.list_state_tensors()[len(moments) :]
    assert [count.item() for count in counts] == [3, 4, 4, 4]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_new_rate_holds_from_the_next_step_and_fills_a_tensor_in_place(name: str) -> None:
    """Steps that are replayed read the rate there."""
    torch.manual_seed(0)
    start = torch.randn(3)
    given = [nn.Parameter(start.clone()) for _ in range(3)]
    how = {"lr": 0.1, "weight_decay": 0.0, "args": ARGS[name]}
    plain, replayed = (optim.make_fused_optimizer(name, [p], **how) for p in given[:2])
    rate = replayed.lr = torch.tensor(0.1)
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    more = {"betas": (0.9, 0.99)} if name == "adamw" else {"momentum": 0.9, "nesterov": True}
    reference = kinds[name]([given[2]], lr=0.1, weight_decay=0, **more)
    for lr in (0.1, 0.4, 0.2):
        for p in given:
            p.grad = torch.full((3,), lr)
        for mine in (plain, replayed):
            mine.set_lr(lr)
            mine.step()
        reference.param_groups[0]["lr"] = lr
        reference.step()
    assert replayed.lr is rate and rate.item() == pytest.approx(0.2) and plain.lr == 0.2
    for p in given[:2]:
        torch.testing.assert_close(p, given[2])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_scaler_leaves_the_skipping_of_a_step_to_the_kernel(monkeypatch, name: str) -> None:
    """What it would do itself waits for the device in every step."""

    def waits(*_: object, **__: object) -> None:
        raise AssertionError("the host reads whether a gradient was infinite")

    monkeypatch.setattr(torch.amp.GradScaler, "_maybe_opt_step", waits)
    weight = nn.Parameter(torch.ones(3))
    optimizer = optim.make_fused_optimizer(name, [weight], lr=0.1, weight_decay=0, args=ARGS[name])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    assert (weight < 1).all()


@pytest.mark.parametrize("parameters", [1, 2, 3])
@pytest.mark.parametrize("present", ["all", "some", "none yet"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_restored_optimizer_takes_the_same_next_step(name, present, parameters) -> None:
    """What is counted once for all parameters is kept, and counted, once again."""
    torch.manual_seed(0)
    how = {"lr": 0.1, "weight_decay": 0.1, "args": ARGS[name]}
    first = [nn.Parameter(torch.randn(3)) for _ in range(parameters)]
    old = optim.make_fused_optimizer(name, first, **how)
    for step in range(0 if present == "none yet" else 3):
        for p in first:
            p.grad = torch.randn(3)
        if present == "some" and step == 1 < parameters:
            first[-1].grad = None
        old.step()
    then = [nn.Parameter(p.detach().clone()) for p in first]
    new = optim.make_fused_optimizer(name, then, **how)
    new.restore(copy.deepcopy(old.state()))
    assert len(new.list_state_tensors()) == len(old.list_state_tensors())
    assert not any(tensor.requires_grad for tensor in new.list_state_tensors())
    for p, other in zip(first, then, strict=True):
        p.grad = torch.randn(3)
        other.grad = p.grad.clone()
    old.step()
    new.step()
    assert all(torch.equal(p, other) for p, other in zip(first, then, strict=True))
    counts = {"all": 1, "none yet": 1, "some": parameters}[present]
    if name == "adamw":
        assert len(old.state()["steps"]) == len(new.state()["steps"]) == counts


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_complex_weights_take_the_steps_of_torch_optim(name: str) -> None:
    """The fused kernels have none for complex numbers."""
    torch.manual_seed(0)
    start = torch.randn(6, 5, dtype=torch.cfloat)
    mine, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    made = optim.make_fused_optimizer(name, [mine], lr=0.05, weight_decay=0.1, args=ARGS[name])
    other = (
        torch.optim.AdamW([theirs], lr=0.05, weight_decay=0.1, betas=(0.9, 0.99))
        if name == "adamw"
        else torch.optim.SGD([theirs], lr=0.05, weight_decay=0.1, momentum=0.9, nesterov=True)
    )
    for step in range(5):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).cfloat()
        for weight, optimizer in ((mine, made), (theirs, other)):
            optimizer.zero_grad()
            (x @ weight).abs().square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(mine.data, theirs.data)
    again = optim.make_fused_optimizer(name, [mine], lr=0.05, weight_decay=0.1, args=ARGS[name])
    again.restore(made.state())
    assert all(map(torch.equal, again.list_state_tensors(), made.list_state_tensors()))


def _parts() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(
            encoder=nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)),
            act=nn.Tanh(),
            head=nn.Linear(5, 2),
        )
    )


GROUPS = {
    "encoder": {"lr": 0.01, "weight_decay": 0.5},
    "head.*": {"lr": 0.1},
    "*.bias": {"weight_decay": 0.7},  # none is left, and biases have no decay anyway
}


@pytest.mark.parametrize("decay", [0.1, 0.0])
@pytest.mark.parametrize("name", ["adamw", "sgd", "NAdam"])
def test_parts_with_their_own_rate_take_the_steps_of_torch_optim(name: str, decay: float) -> None:
    """Their rates follow the schedule in proportion; a decay of their own is none for norms and
    biases, and counts also where all others have none."""
    o = OptimConfig.model_validate(
        {"name": name, "lr": 0.05, "weight_decay": decay, "args": ARGS.get(name, ARGS["adamw"]),
         "groups": {k: GROUPS[k] for k in ("encoder", "head.*")}}
    )  # fmt: skip
    mine, theirs = _parts(), _parts()
    made = build.make_optimizer(o, mine)
    encoder, head = theirs.encoder, theirs.head
    groups = [
        {"params": [encoder[0].weight], "lr": 0.01, "weight_decay": 0.5},
        {"params": [encoder[0].bias, *encoder[1].parameters()], "lr": 0.01, "weight_decay": 0.0},
        {"params": [head.weight], "lr": 0.1, "weight_decay": decay},
        {"params": [head.bias], "lr": 0.1, "weight_decay": 0.0},
    ]
    reference: torch.optim.Optimizer
    if name == "sgd":
        reference = torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)
    else:
        reference = getattr(torch.optim, name.replace("adamw", "AdamW"))(
            groups, lr=0.05, betas=(0.9, 0.99)
        )
    falls = torch.optim.lr_scheduler.LambdaLR(reference, lambda step: 1 / (1 + step))
    torch.manual_seed(1)
    for step in range(12):
        made.set_lr(0.05 / (1 + step))
        x, y = torch.randn(8, 6), torch.randn(8, 2)
        for model, optimizer in ((mine, made), (theirs, reference)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        falls.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        (
            {"hed.*": {"lr": 0.1}},
            r"optim\.groups: 'hed\.\*' matches no parameter of the model; did you mean head",
        ),
        (GROUPS, r"optim\.groups: '\*\.bias' has no parameter of its own: those it matches are"),
    ],
)
def test_a_pattern_that_means_no_parameter_is_refused(groups, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build.make_optimizer(OptimConfig.model_validate({"groups": groups}), _parts())


def test_an_optimizer_that_takes_no_weight_decay_is_given_none_for_a_part() -> None:
    o = OptimConfig.model_validate({"name": "Rprop", "groups": {"head": {"weight_decay": 0.1}}})
    with pytest.raises(ConfigError, match=r"optim\.groups: Rprop takes no weight_decay; drop it"):
        optim.check_optimizer(o, steps=9, epochs=1)


def test_frozen_parts_keep_their_bits_and_have_no_state() -> None:
    model = _parts()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("encoder.0.", "head.b")))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = build.make_optimizer(OptimConfig(lr=0.1), model)
    _train(model, made, steps=3)
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert changed == ["encoder.1.weight", "encoder.1.bias", "head.weight"]
    held = {tuple(t.shape) for t in made.list_state_tensors()}
    assert held == {(5,), (2, 5), ()} and model.encoder[0].weight.grad is None


@pytest.mark.parametrize("name", ["adamw", "sgd", "RMSprop"])
def test_averaged_weights_are_those_of_torch_to_the_bit(name: str) -> None:
    """Of AveragedModel with get_ema_multi_avg_fn, also after a checkpoint and while they are in
    use."""
    model = _parts()
    o = OptimConfig(name=name, lr=0.05, ema_decay=0.8)
    made = build.make_optimizer(o, model)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    with made.use_averages():  # before the first step: nothing to use
        pass
    torch.manual_seed(1)
    for _ in range(7):
        x, y = torch.randn(8, 6), torch.randn(8, 2)
        made.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        made.step()
        theirs.update_parameters(model)
        kept = copy.deepcopy(made.state())
        made = build.make_optimizer(o, model)
        made.restore(kept)
        now = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ZeroDivisionError), made.use_averages():
            assert all(map(torch.equal, model.parameters(), theirs.module.parameters()))
            raise ZeroDivisionError
        assert all(map(torch.equal, model.parameters(), now))
    assert len(made.averages) == 6 <= len(made.list_state_tensors())


def test_a_step_whose_average_found_no_memory_is_not_taken_again(monkeypatch) -> None:
    model, twin = _parts(), _parts()
    made, other = (build.make_optimizer(OptimConfig(ema_decay=0.5), m) for m in (model, twin))
    for m, optimizer in ((model, made), (twin, other)):
        _train(m, optimizer, steps=2)
        m(torch.ones(2, 6)).sum().backward()
    other.step()
    lerp = torch._foreach_lerp_
    monkeypatch.setattr(torch, "_foreach_lerp_", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.step()
    monkeypatch.setattr(torch, "_foreach_lerp_", lerp)
    made.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert all(map(torch.equal, made.averages, other.averages))
