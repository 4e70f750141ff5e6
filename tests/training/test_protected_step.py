"""Batches of somebody else's loop that go on in parts: which losses that is proven of, and that
gradients, state and random numbers are then those of the whole batch."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headroom.training.micro_batches import GROW_AFTER
from headroom.training.protected_step import ProtectedStep
from headroom.training.step_passes import make_pass
from headroom.watch.own_loop import OwnLoop

ROWS, FIT, WORDS = 24, 8, 11
Compute = Callable[..., Any]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an earlier test has compiled is none of these loops'."""
    monkeypatch.setattr("headroom.watch.own_loop.has_compiled", lambda: False)


class Narrow(nn.Module):
    """A model for which more rows than fit are too many."""

    def __init__(self, inner: nn.Module, most: int = FIT) -> None:
        super().__init__()
        self.inner, self.most = inner, most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        out: Tensor = self.inner(x)
        return out


class Protected:
    """A step that is protected, and what was said of it."""

    def __init__(self, model: nn.Module, compute: Compute, **more: Any) -> None:
        self.model, self.said = model, list[str]()
        self.loop = OwnLoop("cpu", log=lambda lines: None)
        self.loop.watch(model)
        backward = more.pop("backward", Tensor.backward)
        self.step = ProtectedStep(
            make_pass(lambda *batch: compute(model, *batch), backward),
            self.loop,
            tell=self.said.append,
            **more,
        )

    def take(self, *batch: Any) -> Tensor:
        try:
            loss = self.step.call(*batch)
        finally:
            self.loop.end()
        assert loss is not None
        return loss


def mlp(*norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *norm, nn.Tanh(), nn.Linear(16, 5))


class Language(nn.Module):
    """Words in, words out."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.out = nn.Linear(16, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.layer(self.words(x)))
        return out


class Drops(nn.Module):
    """Draws as layers, functions and by the row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 5)
        self.layer = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        path = x.new_empty((len(x), 1)).bernoulli_(0.7)
        hidden = F.dropout(
            torch.tanh(self.first(x + 0.1 * torch.randn_like(x))), 0.2, self.training
        )
        out: Tensor = self.last(path * self.layer(hidden))
        return out


class Counts(nn.Module):
    """Counts its calls, and the rows that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = mlp(), 0
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.passes += 1
        self.rows += len(x)
        out: Tensor = self.layers(x)
        return out


class Follows(nn.Module):
    """Keeps a running mean of what it is given, which nothing is computed from yet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        out: Tensor = self.layers(x)
        return out


def make_rows() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 8), torch.randint(0, 5, (ROWS,))


def make_images() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 8, 6), torch.randint(0, 5, (ROWS,))


def make_texts() -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (ROWS, 12))
    labels = words.clone()
    for i in range(ROWS):
        labels[i, 3 + i % 9 :] = -100
    return words, labels


def make_full_texts() -> tuple[Tensor, Tensor]:
    words = torch.randint(0, WORDS, (ROWS, 12))
    return words, words.clone()


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def predict_next(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten())


def tell_weight(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return predict_next(model, x, y), (y[:, 1:] != -100).sum()


def mask_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    losses = F.cross_entropy(model(x).transpose(1, 2), x, reduction="none")
    return losses[y != -100].sum() / (y != -100).sum().item()


def choose_by_mask(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).transpose(1, 2), x, reduction="none")[y != -100].mean()


def compare_with_rows(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(model(x), dim=-1)
    return F.cross_entropy(z @ z.T * 5, torch.arange(len(x)))


def mix_up(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(0.7 * x + 0.3 * x[torch.randperm(len(x))]), y)


def balance(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=1 / (torch.bincount(y, minlength=5) + 1.0))


def even_out(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(out, y) + out.mean(0).square().sum()


def add_two_means(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return predict_next(model, x, y) + 0.3 * model(x).square().mean()


def penalize_gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + gradient.square().sum(1).mean()


def square(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), F.one_hot(y, 5).float())


def add_up(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="sum") / 32


def weigh_classes(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, weight=torch.arange(1.0, 6.0), label_smoothing=0.1)


def take_hardest(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none").topk(len(x) // 2 + 1).values.mean()


ADDS_UP: list[tuple[Callable[[], nn.Module], Compute, Callable[[], Any]]] = [
    (mlp, classify, make_rows),
    (mlp, square, make_rows),
    (mlp, add_up, make_rows),
    (mlp, weigh_classes, make_rows),
    (mlp, penalize_gradients, make_rows),
    (lambda: mlp(nn.LayerNorm(16)), classify, make_rows),
    (lambda: mlp(nn.BatchNorm1d(16).eval()), classify, make_rows),
    (lambda: nn.Sequential(nn.Conv1d(8, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 5)),
     classify, make_images),
    (Language, predict_next, make_texts),
    (Language, predict_next, make_full_texts),
    (Language, tell_weight, make_texts),
    (Language, mask_by_hand, make_texts),
    (Language, choose_by_mask, make_texts),
    (Counts, classify, make_rows),
]  # fmt: skip
REFUSED: list[tuple[Callable[[], nn.Module], Compute, Callable[[], Any], str]] = [
    (lambda: mlp(nn.BatchNorm1d(16)), classify, make_rows, r"inner\.1 \(BatchNorm1d\)"),
    (Follows, classify, make_rows, r"each pass changes inner\.mean"),
    (mlp, compare_with_rows, make_rows, "do not add up"),
    (mlp, mix_up, make_rows, "IndexError"),
    (mlp, balance, make_rows, "do not add up"),
    (mlp, even_out, make_rows, "do not add up"),
    (mlp, take_hardest, make_rows, "do not add up"),
    (Language, add_two_means, make_texts, "do not add up"),
    (Language, lambda m, x, y: (predict_next(m, x, y), len(x)), make_texts, "do not add up"),
    (mlp, lambda m, x, y: classify(m, x.x, y), lambda: (Box(), torch.zeros(())), "tells its rows"),
    (mlp, classify, lambda: (make_rows()[0], torch.arange(5)), "tensors of 24 and of 5 rows"),
]


class Box:
    """Rows that nobody can split."""

    def __init__(self) -> None:
        self.x = torch.randn(ROWS, 8)


def train(make: Callable[[], nn.Module], compute: Compute, rows: Any, *, most: int) -> Protected:
    torch.manual_seed(0)
    model = Narrow(make(), most)
    torch.manual_seed(1)
    batch = rows()
    protected = Protected(model, compute)
    torch.manual_seed(2)
    protected.loss = protected.take(*batch)  # type: ignore[attr-defined]
    return protected


@pytest.mark.parametrize(("make", "compute", "rows"), ADDS_UP)
def test_gradients_of_parts_are_those_of_the_whole_batch(
    make: Callable[[], nn.Module], compute: Compute, rows: Callable[[], Any]
) -> None:
    whole, parts = (train(make, compute, rows, most=most) for most in (ROWS, FIT))
    assert not parts.said and parts.step.make_tags() == {"micro_batch": "6"}
    torch.testing.assert_close(parts.loss, whole.loss)  # type: ignore[attr-defined]
    for one, other in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)
    for one, other in zip(parts.model.buffers(), whole.model.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("make", "compute", "rows", "why"), REFUSED)
def test_what_is_not_proven_leaves_the_error_as_it_came(
    make: Callable[[], nn.Module], compute: Compute, rows: Callable[[], Any], why: str
) -> None:
    torch.manual_seed(0)
    protected = Protected(Narrow(make()), compute)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1.00 GiB") as caught:
        protected.take(*rows())
    assert caught.traceback[-1].name == "forward"  # where it came
    (said,) = protected.said
    assert "batches are taken whole" in said
    assert re.search(why, said)
    assert all(p.grad is None for p in protected.model.parameters())


def test_parts_draw_what_a_loop_over_them_would_draw() -> None:
    torch.manual_seed(0)
    model, other = Narrow(Drops()), Narrow(Drops(), ROWS)
    other.load_state_dict(model.state_dict())
    x, y = make_rows()
    torch.manual_seed(2)
    Protected(model, classify).take(x, y)
    after = torch.get_rng_state()
    torch.manual_seed(2)
    for part, labels in zip(x.split(6), y.split(6), strict=True):
        (classify(other, part, labels) / 4).backward()
    assert torch.equal(after, torch.get_rng_state())
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)


class _FailBackward(torch.autograd.Function):
    """Runs out of memory in the backward pass, as where activations are computed anew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if len(gradient) > FIT:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return gradient


def _fail_between(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model[2](model[1](_FailBackward.apply(model[0](x)))), y)


@pytest.mark.parametrize("is_proven", [True, False])
def test_gradients_of_earlier_batches_stay_as_they_are(is_proven: bool) -> None:
    torch.manual_seed(0)
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    earlier, (x, y) = make_rows(), make_rows()
    for each in (model, other):
        classify(each, *earlier).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    compute = _fail_between if is_proven else lambda m, x, y: _fail_between(m, x - x.mean(0), y)
    protected = Protected(model, compute)
    if not is_proven:
        with pytest.raises(torch.OutOfMemoryError):
            protected.take(x, y)
        # The layers behind had theirs already; a pass that is not protected would leave them.
        assert protected.said
        assert torch.equal(before[0], model[0].weight.grad)  # type: ignore[arg-type]
        return
    protected.take(x, y)
    classify(other, x, y).backward()
    assert not protected.said
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)


def test_the_numbers_of_python_go_on_as_if_nothing_had_failed() -> None:
    def jitter(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        drawn.append(random.random())
        return drawn[-1] * classify(model, x, y)

    drawn: list[float] = []
    random.seed(3)
    expected = [random.random() for _ in range(4)]
    random.seed(3)
    torch.manual_seed(0)
    Protected(Narrow(mlp()), jitter).take(*make_rows())
    assert drawn[-4:] == expected and random.random() not in expected


def test_a_scale_and_lower_precision_change_nothing_of_it() -> None:
    def compute(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return classify(model, x, y)

    gradients = []
    for most in (ROWS, FIT):
        torch.manual_seed(0)
        model = Narrow(mlp(), most)
        scaler = torch.amp.GradScaler("cpu")
        protected = Protected(
            model,
            compute,
            backward=lambda loss: scaler.scale(loss).backward(),  # noqa: B023 (called while it is)
        )
        protected.take(*make_rows())
        assert not protected.said
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler.unscale_(optimizer)
        gradients.append([p.grad for p in model.parameters()])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=3e-2, atol=1e-3)


def test_the_size_is_kept_and_grown_back() -> None:
    torch.manual_seed(0)
    model = Narrow(mlp())
    seen: list[int] = []
    model.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    protected = Protected(model, classify)
    x, y = make_rows()
    protected.step.call(x, y)
    del seen[:]
    protected.step.call(x, y)
    assert seen == [6, 6, 6, 6]
    protected.step.call(x[:5], y[:5])
    assert seen[4:] == [5]
    model.most = ROWS
    for _ in range(2 * GROW_AFTER):
        protected.step.call(x, y)
    assert seen[-1] == ROWS and protected.step.make_metrics() == {"memory/ooms_recovered": 2.0}
    protected.loop.end()


def test_means_that_come_apart_later_are_seen_then() -> None:
    """While all texts are as long, the mean over words is that over rows."""

    def add(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        labels = F.cross_entropy(out[:, :-1].flatten(0, 1), y[:, 1:].flatten())
        return labels + 0.3 * out.square().sum() / torch.tensor(float(len(x)))

    torch.manual_seed(0)
    protected = Protected(Narrow(Language()), add)
    protected.step.call(*make_full_texts())
    assert not protected.said
    before = [p.grad.clone() for p in protected.model.parameters() if p.grad is not None]
    with pytest.raises(torch.OutOfMemoryError):
        protected.take(*make_texts())
    (said,) = protected.said
    assert "not in proportion" in said
    after = [p.grad for p in protected.model.parameters() if p.grad is not None]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_a_batch_that_was_written_to_is_not_taken_again() -> None:
    def compute(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return classify(model, x.div_(2), y)

    torch.manual_seed(0)
    protected = Protected(Narrow(mlp()), compute)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        protected.take(*make_rows())
    assert "the rows of the batch" in protected.said[0]


def test_where_not_even_one_row_fits_the_error_comes_as_it_does() -> None:
    torch.manual_seed(0)
    protected = Protected(Narrow(mlp(), most=0), classify)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        protected.take(*make_rows())
    assert "no room to prove" in protected.said[0]


def test_several_processes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    torch.manual_seed(0)
    protected = Protected(Narrow(mlp()), classify)
    seen: list[int] = []
    protected.model.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    with pytest.raises(torch.OutOfMemoryError):
        protected.take(*make_rows())
    assert seen == [ROWS] and "several processes" in protected.said[0]


def test_compiled_code_needs_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headroom.watch.own_loop.has_compiled", lambda: True)
    torch.manual_seed(0)
    protected = Protected(Narrow(mlp()), lambda m, x, y: (classify(m, x, y), len(x)))
    protected.take(*make_rows())
    assert not protected.said
    protected = Protected(Narrow(mlp()), classify)
    with pytest.raises(torch.OutOfMemoryError):
        protected.take(*make_rows())
    assert "(loss, weight)" in protected.said[0]


def test_what_is_no_loss_is_refused() -> None:
    with pytest.raises(TypeError, match="protect: the step must return its loss"):
        Protected(mlp(), lambda model, x: None).take(torch.zeros(3, 8))
