"""Loops as people publish them, each with something that PyTorch offers and that a hook could stand
in the way of: with the account and without they come to the same bits, and the account does nothing
wrong of its own."""

from __future__ import annotations

import copy
import io
import pickle
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from headroom import account
from tests.run.faults import send_nothing

pytestmark = pytest.mark.filterwarnings("ignore")  # what these ways warn of is theirs
Begin = Callable[..., account | None]  # the account of these models and optimizers, if there is one
Loop = Callable[[Begin], Any]
LOOPS: dict[str, Loop] = {}


def _loop(run: Loop) -> Loop:
    LOOPS[run.__name__.strip("_").replace("_", " ")] = run
    return run


def _make_net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 2)
    )


def _make_rows(count: int = 48) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, generator=draw)
    return [(row, (row.sum() > 0).long()) for row in x]


def _make_loader() -> DataLoader[Any]:
    return DataLoader(_make_rows(), 8, shuffle=True)  # type: ignore[arg-type]


def _adam(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.01)


def _step(net: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    opt.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    opt.step()
    return loss.detach()


def _epochs(net: Any, opt: Any, count: int = 2) -> None:
    for _ in range(count):
        for x, y in _make_loader():
            _step(net, opt, x, y)


@_loop
def _mean_weights(begin: Begin) -> Any:
    net = _make_net()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    mean, plan = AveragedModel(net), SWALR(opt, swa_lr=0.05)
    begin([net, mean], opt)
    for _ in range(3):
        _epochs(net, opt, 1)
        mean.update_parameters(net)
        plan.step()
    update_bn(_make_loader(), mean)
    return net, mean


@_loop
def _moving_mean_beside_an_evaluation(begin: Begin) -> Any:
    net = _make_net()
    opt = _adam(net)
    mean = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    begin(net, opt)
    found = []
    for _ in range(2):
        for x, y in _make_loader():
            _step(net, opt, x, y)
            mean.update_parameters(net)
        net.eval()
        with torch.inference_mode():
            found += [mean(x).sum() + net(x).sum() for x, _ in _make_loader()]
        net.train()
    return net, mean, found


@_loop
def _lbfgs(begin: Begin) -> Any:
    net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    opt = torch.optim.LBFGS(net.parameters(), lr=0.5, line_search_fn="strong_wolfe")
    begin(net, opt)
    losses = []
    for x, y in _make_loader():

        def close(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        losses.append(opt.step(close))
    return net, losses


@_loop
def _accumulation_with_a_scaler(begin: Begin) -> Any:
    net = _make_net()
    opt = _adam(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    begin(net, opt)
    for at, (x, y) in enumerate([*_make_loader()] * 2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(net(x), y) / 2
        if at == 5:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if at % 2:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
    return net, scaler.get_scale()


def _compiled(begin: Begin, *, in_place: bool) -> Any:
    torch._dynamo.reset()
    net = _make_net()
    opt = _adam(net)
    made: Any = net
    if in_place:
        net.compile(backend="aot_eager")
    else:
        made = torch.compile(net, backend="aot_eager")
    begin(made, opt)
    _epochs(made, opt)
    return net


LOOPS["compiled"] = partial(_compiled, in_place=False)
LOOPS["compiled in place"] = partial(_compiled, in_place=True)


@_loop
def _compiled_step_of_an_optimizer(begin: Begin) -> Any:
    torch._dynamo.reset()
    net = _make_net()
    opt = _adam(net)
    begin(net, opt)
    update = torch.compile(opt.step, backend="aot_eager")
    for x, y in _make_loader():
        nn.functional.cross_entropy(net(x), y).backward()
        update()
        opt.zero_grad()
    return net


@_loop
def _actor_and_critic(begin: Begin) -> Any:
    actor, critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opts = [_adam(actor), _adam(critic)]
    begin([actor, critic], opts)
    at = torch.zeros(4)
    for _ in range(5):
        seen, done, gains = [], [], []
        for _ in range(6):
            with torch.no_grad():
                choice = torch.distributions.Categorical(logits=actor(at)).sample()
            seen.append(at)
            done.append(choice)
            gains.append(float(choice) - 0.5)
            at = torch.tanh(at + (choice * 2 - 1) * 0.1 + torch.randn(4) * 0.1)
        states = torch.stack(seen)
        gain = torch.tensor(gains) - critic(states).squeeze(-1)
        opts[1].zero_grad()
        gain.square().mean().backward()
        opts[1].step()
        chances = torch.distributions.Categorical(logits=actor(states))
        opts[0].zero_grad()
        (-(chances.log_prob(torch.stack(done)) * gain.detach()).mean()).backward()
        opts[0].step()
    return actor, critic


@_loop
def _a_network_that_follows_another(begin: Begin) -> Any:
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    opt = _adam(net)
    begin(net, opt)
    other = copy.deepcopy(net).requires_grad_(False)
    kept: deque[Any] = deque(maxlen=32)
    for at in range(30):
        x = torch.randn(4)
        act = random.randrange(2) if random.random() < 0.2 else int(net(x).argmax())
        kept.append((x, act, float(x[act]), torch.randn(4)))
        if at < 8:
            continue
        xs, acts, gains, after = zip(*random.sample([*kept], 8), strict=True)
        best = torch.tensor(gains) + 0.9 * other(torch.stack(after)).amax(1)
        chosen = net(torch.stack(xs)).gather(1, torch.tensor(acts)[:, None]).squeeze(1)
        opt.zero_grad()
        nn.functional.smooth_l1_loss(chosen, best).backward()
        nn.utils.clip_grad_value_(net.parameters(), 1.0)
        opt.step()
        if not at % 5:
            other.load_state_dict(net.state_dict())
    return net, other


class _Stream(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        for at, (x, y) in enumerate(_make_rows(20)):
            yield {"x": x, "y": y, "about": {"at": at, "name": f"row {at}"}}


@_loop
def _a_stream_of_dicts(begin: Begin) -> Any:
    net = _make_net()
    opt = _adam(net)
    run = begin(net, opt)
    loader = DataLoader(_Stream(), 4, num_workers=1, persistent_workers=True)
    for _ in range(2):
        for batch in loader if run is None else run.batches(loader):
            _step(net, opt, batch["x"], batch["y"])
    return net


@_loop
def _in_a_thread(begin: Begin) -> Any:
    net = _make_net()
    opt = _adam(net)
    begin(net, opt)
    thread = threading.Thread(target=_epochs, args=(net, opt))
    thread.start()
    thread.join()
    return net


@_loop
def _copies_in_the_middle(begin: Begin) -> Any:
    net = _make_net()
    opt = _adam(net)
    run = begin(net, opt)
    loader = _make_loader() if run is None else run.batches(_make_loader())
    made: list[Any] = []
    for at, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        if at == 2:  # with gradients, in the middle of a step
            file = io.BytesIO()
            torch.save({"net": net, "opt": opt, "at": at}, file)
            file.seek(0)
            back = torch.load(file, weights_only=False)
            made += [back["net"], pickle.loads(pickle.dumps(net)), copy.deepcopy(net)]
            made += [copy.copy(net), pickle.loads(pickle.dumps((net, opt)))[0]]
            net, opt = copy.deepcopy((net, opt))  # one that goes on
        opt.step()
        opt.zero_grad()
        pickle.dumps(loader)
    return net, [[*each.state_dict().values()] for each in made]


@_loop
def _exports_in_the_middle(begin: Begin) -> Any:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    opt = _adam(net)
    begin(net, opt)
    found = []
    for x, y in _make_loader():
        _step(net, opt, x, y)
        with torch.no_grad():
            found += [torch.jit.trace(net, x)(x), torch.fx.symbolic_trace(net)(x)]
            found += [torch.export.export(net, (x,)).module()(x)]
    return net, found


@_loop
def _scripted(begin: Begin) -> Any:
    net = torch.jit.script(_make_net())
    opt = _adam(net)
    begin(net, opt)
    _epochs(net, opt)
    return net


@_loop
def _gradients_of_each_row(begin: Begin) -> Any:
    net = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    opt = _adam(net)
    begin(net, opt)

    def compute(params: Any, x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(net, params, (x[None],))
        return nn.functional.cross_entropy(out, y[None])

    for x, y in _make_loader():
        params = {name: p.detach() for name, p in net.named_parameters()}
        each = torch.func.vmap(torch.func.grad(compute), (None, 0, 0))(params, x, y)
        for name, p in net.named_parameters():
            p.grad = each[name].clamp(-0.1, 0.1).mean(0)
        opt.step()
    return net


@_loop
def _learning_to_learn(begin: Begin) -> Any:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    opt = _adam(net)
    begin(net, opt)
    for x, y in _make_loader():
        quick = dict(net.named_parameters())
        for _ in range(2):
            out = torch.func.functional_call(net, quick, (x[:4],))
            loss = nn.functional.cross_entropy(out, y[:4])
            slopes = torch.autograd.grad(loss, [*quick.values()], create_graph=True)
            quick = {n: p - 0.1 * g for (n, p), g in zip(quick.items(), slopes, strict=True)}
        out = torch.func.functional_call(net, quick, (x[4:],))
        opt.zero_grad()
        nn.functional.cross_entropy(out, y[4:]).backward()
        opt.step()
    return net


@_loop
def _a_penalty_on_gradients(begin: Begin) -> Any:
    judge, maker = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Linear(4, 8)
    of_judge, of_maker = _adam(judge), _adam(maker)
    begin([judge, maker], [of_judge, of_maker])
    for x, _ in _make_loader():
        made = maker(torch.randn(len(x), 4))
        between = (x * 0.5 + made.detach() * 0.5).requires_grad_()
        slope = torch.autograd.grad(judge(between).sum(), between, create_graph=True)[0]
        of_judge.zero_grad()
        loss = judge(made.detach()).mean() - judge(x).mean()
        (loss + 10 * (slope.norm(dim=1) - 1).square().mean()).backward(retain_graph=True)
        of_judge.step()
        of_maker.zero_grad()
        (-judge(made).mean()).backward()
        of_maker.step()
    return judge, maker


def _checkpointed(begin: Begin, *, reentrant: bool) -> Any:
    parts = nn.ModuleList([_make_net(), nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5))])
    opt = _adam(parts)
    begin([parts, *parts], opt)
    for x, y in _make_loader():
        x = x.requires_grad_()
        for part in parts:
            x = checkpoint(part, x, use_reentrant=reentrant)
        opt.zero_grad()
        nn.functional.cross_entropy(x, y).backward()
        opt.step()
    return parts


LOOPS["checkpointed"] = partial(_checkpointed, reentrant=False)
LOOPS["checkpointed anew"] = partial(_checkpointed, reentrant=True)


@_loop
def _optimizers_within_the_backward(begin: Begin) -> Any:
    net = _make_net()
    opts = {p: torch.optim.Adam([p], lr=0.01) for p in net.parameters()}
    begin(net, [*opts.values()])

    def update(p: Tensor) -> None:
        opts[p].step()  # type: ignore[index]
        opts[p].zero_grad()  # type: ignore[index]

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(update)
    for x, y in _make_loader():
        nn.functional.cross_entropy(net(x), y).backward()
    return net


@_loop
def _layers_that_learn_their_size(begin: Begin) -> Any:
    net = nn.Sequential(nn.LazyLinear(16), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
    run = begin(net)
    net(torch.zeros(2, 8))
    opt = _adam(net)
    if run is not None:
        run.watch(opt)
    _epochs(net, opt)
    return net


@_loop
def _packed_sequences(begin: Begin) -> Any:
    net, last = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)
    opt = torch.optim.RMSprop([*net.parameters(), *last.parameters()], lr=0.01)
    begin([net, last], opt)
    for x, y in _make_loader():
        rows = [row.repeat(1 + at % 3, 1) for at, row in enumerate(x)]
        packed = nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
        opt.zero_grad()
        nn.functional.cross_entropy(last(net(packed)[1][0][-1]), y).backward()
        opt.step()
    return net, last


@_loop
def _sparse_gradients(begin: Begin) -> Any:
    table, net = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 2)
    opts = [torch.optim.SparseAdam(table.parameters()), torch.optim.Adagrad(net.parameters())]
    begin([table, net], opts)
    for at, (_, y) in enumerate(_make_loader()):
        loss = nn.functional.cross_entropy(net(table(torch.arange(at, at + len(y)))), y)
        for opt in opts:
            opt.zero_grad()
        loss.backward()
        for opt in opts:
            opt.step()
    return table, net


@_loop
def _norms_pruning_and_parametrizations(begin: Begin) -> Any:
    net = _make_net()
    nn.utils.parametrizations.spectral_norm(net[0])
    nn.utils.parametrizations.weight_norm(net[4])
    opt = _adam(net)
    begin([net, *net], opt)
    _epochs(net, opt, 1)
    nn.utils.parametrize.remove_parametrizations(net[4], "weight")
    prune.l1_unstructured(net[4], "weight", 0.5)
    opt = _adam(net)
    _epochs(net, opt, 1)
    return net


class _Ahead(torch.optim.Optimizer):
    """Of the kind that wraps another and is made without what PyTorch makes of one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.base_optimizer, self.at = inner, 0
        self.param_groups = inner.param_groups
        self.state = defaultdict(dict)
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        found = self.base_optimizer.step(closure)
        self.at += 1
        if self.at % 3 == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, q in zip(group["params"], slow, strict=True):
                    q.lerp_(p.data, 0.5)
                    p.data.copy_(q)
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base_optimizer.zero_grad(set_to_none)


@_loop
def _an_optimizer_around_another(begin: Begin) -> Any:
    net = _make_net()
    opt = _Ahead(_adam(net))
    begin(net, opt)
    _epochs(net, opt)
    return net


@_loop
def _saved_tensors_elsewhere_below_a_profiler(begin: Begin) -> Any:
    net = _make_net()
    opt = _adam(net)
    begin(net, opt)
    with (
        torch.profiler.profile(profile_memory=True, record_shapes=True),
        torch.autograd.set_detect_anomaly(True),
    ):
        for x, y in _make_loader():
            with torch.autograd.graph.save_on_cpu():
                _step(net, opt, x, y)
    return net


@_loop
def _a_generator_that_is_left(begin: Begin) -> Any:
    net = _make_net()
    opt = _adam(net)
    begin(net, opt)

    def train() -> Iterator[Tensor]:
        for x, y in _make_loader():
            yield _step(net, opt, x, y)

    steps = train()
    found = [next(steps) for _ in range(3)]
    steps.close()
    return net, found


@_loop
def _on_no_device_at_first(begin: Begin) -> Any:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    run = begin(net)
    net.to_empty(device="cpu")
    for part in (net[0], net[2]):
        part.reset_parameters()
    opt = _adam(net)
    if run is not None:
        run.watch(opt)
    _epochs(net, opt)
    return net


def _spell(found: Any) -> Any:
    """The same, of words and bits that can be compared."""
    if isinstance(found, nn.Module):
        return _spell([*found.state_dict().items()])
    if isinstance(found, Tensor):
        return str(found.dtype), found.tolist()
    return [_spell(one) for one in found] if isinstance(found, (list, tuple)) else repr(found)


def _play(loop: Loop, *, is_told: bool) -> tuple[Any, account | None]:
    torch.manual_seed(0)
    random.seed(0)
    runs: list[account] = []

    def begin(model: Any, optimizer: Any = None) -> account | None:
        if is_told:
            runs.append(account(model=model, optimizer=optimizer, quiet=True).begin())
        return runs[0] if runs else None

    found = _spell(loop(begin)), random.getstate(), torch.get_rng_state().tolist()
    for run in runs:
        run.end()
    return found, runs[0] if runs else None


@pytest.fixture(params=[False, True], ids=["rarely counted", "counted"])
def counts(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, place: Path
) -> Iterator[bool]:
    """Runs that nobody sends, whose steps are counted by owner or not."""
    is_compiled = "compiled" in request.node.name
    with send_nothing(monkeypatch, counts_all=request.param, has_compiled=is_compiled):
        yield request.param


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_as_it_is_published_is_the_same(
    name: str, counts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = _play(LOOPS[name], is_told=False)
    caplog.clear()
    told, run = _play(LOOPS[name], is_told=True)
    assert told == plain
    assert run is not None and run.run["status"] == "FINISHED"
    traces = [record for record in caplog.records if record.name.startswith("headroom")]
    assert not [record.getMessage() for record in traces if record.exc_info]
    assert not [text for text in run.run["warnings"] if text.startswith("account:")]
    assert run.loop.done or any(text.startswith("steps:") for text in run.run["warnings"])
