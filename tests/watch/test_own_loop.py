"""The accounts of a loop that somebody else wrote: nothing of it changes, and they tell it."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from headroom.watch.oom_report import explain_out_of_memory, find_part
from headroom.watch.out_of_memory import is_oom
from headroom.watch.own_loop import OwnLoop, find_device
from tests.conftest import PYTHON

State = dict[str, Tensor]
Loop = Callable[[OwnLoop | None], list[State]]
MIB = 2**20


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an earlier test of this process has compiled."""
    monkeypatch.setattr("headroom.watch.own_loop.has_compiled", lambda: False)
    monkeypatch.setattr("headroom.watch.own_loop.COUNT_SHARE", float("inf"))  # of short loops, too


def _net(*, width: int = 64) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, width), nn.ReLU(), nn.Dropout(0.2), nn.BatchNorm1d(width), nn.Linear(width, 4)
    )


def _loader(rows: int = 480) -> DataLoader[Any]:
    x = torch.randn(rows, 16)
    return DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=32, shuffle=True)


@contextmanager
def _asked(loop: OwnLoop | None) -> Iterator[None]:
    if loop is not None:
        loop.begin_step()
    yield
    if loop is not None:
        loop.end_step()


def _by_hand(loop: OwnLoop | None) -> list[State]:
    """Marked steps and a named phase, a schedule and an evaluation in between."""
    net, loader = _net(), _loader()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if loop is not None:
        loop.watch(net, optimizer)
    for _ in range(2):
        for x, y in loop.iterate_batches(loader) if loop else loader:
            with _asked(loop):
                loss = nn.functional.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if loop is not None:
                loop.log({"train/loss": loss})
        net.eval()
        with torch.no_grad():
            net(torch.randn(8, 16))
        net.train()
    return [net.state_dict()]


def _gan(loop: OwnLoop | None) -> list[State]:
    """Two models and two optimizers, nothing marked; the generator's is the last."""
    maker, judge = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 16)), _net()
    of_judge = torch.optim.Adam(judge.parameters(), betas=(0.5, 0.9))
    of_maker = torch.optim.Adam(maker.parameters(), betas=(0.5, 0.9))
    if loop is not None:
        loop.watch([maker, judge], [of_judge, of_maker])
    for real, _ in _loader():
        made = maker(torch.randn(len(real), 4))
        told = judge(real).mean() - judge(made.detach()).mean()
        of_judge.zero_grad()
        told.backward()
        of_judge.step()
        of_maker.zero_grad()
        judge(made).mean().backward()
        of_maker.step()
    return [maker.state_dict(), judge.state_dict()]


def _accumulated(loop: OwnLoop | None) -> list[State]:
    """Several passes a step, each computed twice, an output that is changed in place, clipping."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if loop is not None:
        loop.watch(net, optimizer)
    for at, (x, y) in enumerate(_loader()):
        x.requires_grad_()
        out = checkpoint(net, x, use_reentrant=False).mul_(0.5)
        (nn.functional.cross_entropy(out, y) / 3).backward()
        if at % 3 == 2:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return [net.state_dict()]


def _with_closure(loop: OwnLoop | None) -> list[State]:
    """The optimizer calls the model."""
    net = _net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    if loop is not None:
        loop.watch(net, optimizer)
    for x, y in _loader(160):

        def compute(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            return loss

        optimizer.step(compute)  # type: ignore[no-untyped-call]
    return [net.state_dict()]


LOOPS: list[Loop] = [_by_hand, _gan, _accumulated, _with_closure]
STEPS = {_by_hand: 30, _gan: 15, _accumulated: 5, _with_closure: 5}


def _log_nothing(found: Any) -> None:
    pass


@pytest.mark.parametrize("train", LOOPS)
def test_a_loop_comes_to_the_same_bits_with_and_without_its_accounts(train: Loop) -> None:
    torch.manual_seed(3)
    plain = train(None)
    random = torch.rand(4)
    torch.manual_seed(3)
    loop = OwnLoop("cpu", log=_log_nothing)
    told = train(loop)
    assert torch.equal(random, torch.rand(4)), "a random number was drawn"
    loop.close()
    for one, other in zip(plain, told, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert loop.done == STEPS[train]
    assert {
        "memory/parameters_mib",
        "time/forward_ms",
        "time/backward_ms",
    } <= loop.summarize().keys()


def test_the_phases_of_a_step_sum_to_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    net = _net(width=2048)
    optimizer = torch.optim.AdamW(net.parameters())
    loop, times = OwnLoop("cpu", log=_log_nothing), []
    loop.watch(net, optimizer)
    end_step, own = loop.end_step, [0.0]  # seconds that the account itself takes

    def end_step_timed() -> None:
        began = time.perf_counter()
        end_step()
        own.append(time.perf_counter() - began)

    monkeypatch.setattr(loop, "end_step", end_step_timed)
    batches = iter(loop.iterate_batches(_loader(32 * 20)))
    for at in range(20):
        began = time.perf_counter()
        x, y = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        time.sleep(0.004)  # of the loop's own
        optimizer.step()
        if at not in (0, 1):  # the first, and the one that is counted; all others are timed
            times.append(time.perf_counter() - began - own[-1])
        time.sleep(0.003)  # between two steps
    loop.close()
    found = loop.summarize()
    parts = [v for k, v in found.items() if k in {f"time/{p}_ms" for p in PHASES_OF_A_LOOP}]
    assert len(parts) == 5
    assert sum(parts) == pytest.approx(1000 * sum(times) / len(times), rel=0.05)
    assert found["time/other_ms"] >= 4


class _LateLoader:
    """Its workers take long to start, as where each imports PyTorch."""

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        time.sleep(0.05)
        return iter([list(batch) for batch in _loader(32)])


def test_the_start_of_the_workers_is_a_wait_for_data() -> None:
    """It was before the wait began: with 16 workers half of the loop was nobody's."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loop = OwnLoop("cpu", log=_log_nothing)
    loop.watch(net, optimizer)
    for _ in range(6):
        for x, y in loop.iterate_batches(_LateLoader()):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    loop.close()
    assert loop.done == 6
    assert loop.summarize()["time/data_wait_ms"] > 40


PHASES_OF_A_LOOP = ("data_wait", "forward", "backward", "optimizer", "other")


def test_what_others_do_at_the_end_of_a_backward_is_part_of_it() -> None:
    """DDP waits there for the gradients of other ranks: that was told as the step's other time."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters())
    engine = torch.autograd.Variable._execution_engine

    def queue_wait(_: torch.Tensor) -> None:
        engine.queue_callback(lambda: time.sleep(0.05))

    loop = OwnLoop("cpu", log=_log_nothing)
    loop.watch(net, optimizer)
    for _ in range(5):
        loss = net(torch.randn(8, 16)).mean()
        next(net.parameters()).register_hook(queue_wait)
        loss.backward()
        optimizer.step()
    loop.close()
    assert loop.summarize()["time/backward_ms"] >= 50


def test_what_the_loop_names_wins_over_what_hooks_tell() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters())
    heard: list[str] = []
    loop = OwnLoop("cpu", log=_log_nothing, tell=heard.append)
    loop.watch(net, optimizer)
    for _ in range(6):
        loop.begin_step()
        loop.begin_phase("h2d")
        net(torch.randn(8, 16)).mean()
        time.sleep(0.005)
        loop.end_phase()
        loop.end_step()
    loop.close()
    found = loop.summarize()
    assert found["time/h2d_ms"] > 5
    assert "time/forward_ms" not in found
    assert not heard
    loop = OwnLoop("cpu", log=_log_nothing, tell=heard.append)
    loop.begin_phase("teacher")
    loop.end_phase()
    loop.end_phase()  # once more than it was begun
    assert heard[0].startswith("phase: is one of data_wait, ") and "got 'teacher'" in heard[0]
    assert not loop.is_deaf


def test_an_evaluation_that_the_loop_names_is_no_part_of_its_steps() -> None:
    logged: dict[str, float] = {}
    loop = OwnLoop(
        "cpu", log=lambda found: [logged.update(metrics) for metrics, _ in found] and None
    )
    for _ in range(5):
        loop.begin_step()
        loop.end_step(rows=8)
    loop.begin_phase("eval")
    time.sleep(0.05)
    loop.end_phase()
    loop.close()
    found = loop.summarize()
    assert found["time/eval_s"] >= 0.05
    assert "time/checkpoint_s" not in found, "nobody knows of one"
    assert found["speed/samples_per_s"] > 8 * 5 / 0.05


@pytest.mark.parametrize("is_named", [True, False])
def test_rows_of_an_evaluation_are_no_rows_of_a_step(is_named: bool) -> None:
    """They were counted to the next step of the training: 1.7 times its samples a second."""
    net, loader = _net(), _loader(96)
    optimizer = torch.optim.SGD(net.parameters())
    loop = OwnLoop("cpu", log=_log_nothing)
    loop.watch(net, optimizer)
    for _ in range(2):
        for x, y in loop.iterate_batches(loader):
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        if is_named:
            loop.begin_phase("eval")
        with torch.no_grad():
            for x, _ in loop.iterate_batches(loader):
                net(x)
        if is_named:
            loop.end_phase()
    loop.close()
    assert (loop.done, loop.rows) == (6, 192)
    assert loop.summarize()["time/eval_s"] > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_within_a_step_leaves_the_loop_as_it_was(mode: Any) -> None:
    """The mode that counts memory was left within inference mode, which brought half of it back:
    every operation after it failed."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters())
    loop = OwnLoop("cpu", log=_log_nothing)
    loop.watch(net, optimizer)
    for _ in range(6):
        loop.begin_step()
        net(torch.randn(8, 16)).mean().backward()
        with mode():
            loop.begin_phase("eval")
            net(torch.randn(8, 16))
            loop.end_phase()
        net(torch.randn(8, 16)).mean().backward()
        optimizer.step()
        loop.end_step(rows=16)
    loop.close()
    assert torch.ones(1).isfinite()
    assert (loop.done, loop.rows) == (6, 96)
    assert {"time/eval_s", "memory/parameters_mib"} <= set(loop.summarize())


def test_a_loop_that_tells_nothing_has_no_speed_and_no_phases() -> None:
    loop = OwnLoop("cpu", log=_log_nothing)
    loop.close()
    found = loop.summarize()
    assert "memory/host_rss_peak_mib" in found
    assert not [name for name in found if name.startswith(("time/", "speed/"))]


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_is_before_an_optimizer_is_its_steps_where_no_pass_was_seen(is_whole: bool) -> None:
    """Of a model that was called by its parts, its passes were told as code between the steps."""
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loop = OwnLoop("cpu", log=_log_nothing)
    loop.watch(net, optimizer)
    x, y = torch.randn(32, 16), torch.zeros(32, dtype=torch.long)
    after_ms = 0.0
    for _ in range(12):
        out = net(x) if is_whole else net[1:](net[0](x))
        nn.functional.cross_entropy(out, y).backward()
        time.sleep(0.02)
        optimizer.step()
        began_s = time.perf_counter()
        time.sleep(0.02)
        after_ms += 1000 * (time.perf_counter() - began_s) / 12
    loop.close()
    found = loop.summarize()
    assert loop.done == 12
    if is_whole:
        assert found["time/other_ms"] >= 20
        assert 20 <= found["time/between_ms"] < after_ms + 20
    else:
        assert "time/between_ms" not in found and found["time/other_ms"] >= 40


def test_rows_that_nobody_counted_are_absent_from_the_speed() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters())
    loop = OwnLoop("cpu", log=_log_nothing)
    loop.watch(net, optimizer)
    for _ in range(3):
        net(torch.randn(8, 16)).mean().backward()
        optimizer.step()
    loop.close()
    found = loop.summarize()
    assert found["speed/steps_per_s"] > 0
    assert "speed/samples_per_s" not in found


@pytest.mark.parametrize("steps", [1, 3, 15, 20])
def test_the_last_step_is_a_log_point_once_though_nobody_knew_that_it_is_the_last(
    steps: int,
) -> None:
    """A loop of 15 steps was shown at step 10."""
    net, lines = _net(), []
    optimizer = torch.optim.SGD(net.parameters())
    loop = OwnLoop("cpu", log=lines.extend)
    loop.watch(net, optimizer)
    for _ in range(steps):
        net(torch.randn(8, 16)).mean().backward()
        optimizer.step()
    loop.close()
    points = [step for metrics, step in lines if "train/lr" in metrics]
    assert points[-1] == steps
    assert len(points) == len({*points})


def test_a_batch_is_a_step_where_nothing_else_tells() -> None:
    loop = OwnLoop("cpu", log=_log_nothing)
    for _ in loop.iterate_batches(_loader(96)):
        pass
    loop.close()
    assert (loop.done, loop.rows) == (3, 96)


def test_a_loop_with_a_watched_optimizer_steps_with_it_and_not_with_its_batches() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters())
    loop = OwnLoop("cpu", log=_log_nothing)
    loop.watch(net, optimizer)
    for at, (x, _) in enumerate(loop.iterate_batches(_loader(128))):
        net(x).mean().backward()
        if at % 2:
            optimizer.step()
    loop.close()
    assert (loop.done, loop.rows) == (2, 128)


def test_metrics_are_logged_at_the_step_they_are_of() -> None:
    logged: list[tuple[dict[str, float], int]] = []
    loop = OwnLoop("cpu", log=logged.extend)
    loop.begin_step()
    loop.log({"inside": 1})
    loop.end_step()
    loop.log({"train/loss": torch.tensor(0.5, requires_grad=True), "n": True})
    loop.log({"late": 2.0}, step=70)
    loop._keep_lines(at_once=True)
    assert logged == [({"inside": 1.0}, 1), ({"train/loss": 0.5, "n": 1.0}, 1), ({"late": 2.0}, 70)]


@pytest.mark.parametrize(
    ("given", "kept", "told"),
    [
        ({"mAP@0.5": 0.25}, {"mAP_0.5": 0.25}, "log: 'mAP@0.5' is called mAP_0.5 here"),
        ({"f1(macro)": 1.0}, {"f1_macro": 1.0}, "'f1(macro)' is called f1_macro"),
        ({"loss[0]": 1, "loss(0)": 2}, {"loss_0": 1.0, "loss_0_2": 2.0}, "is called loss_0_2"),
        ({"../a": 1.0, "": 2.0, 3: 4.0}, {"a": 1.0, "unnamed": 2.0, "3": 4.0}, "'' is called"),
        (
            {"loss": torch.zeros(3)},
            {},
            "loss is no number, and left out (got a tensor of shape (3,",
        ),
        ({"loss": None, "n": {"a": 1}, "c": 1j}, {}, "n is no number, and left out (got dict)"),
        ({"big": 10**400, "x": 1}, {"x": 1.0}, "big is no number"),
    ],
)
def test_whatever_is_logged_is_made_fit_and_told_once(
    given: dict[Any, Any], kept: dict[str, float], told: str
) -> None:
    """Names that every library of metrics uses ended the training."""
    lines: list[tuple[dict[str, float], int]] = []
    heard: list[str] = []
    loop = OwnLoop("cpu", log=lines.extend, tell=heard.append)
    for _ in range(3):
        loop.log(given)
    loop.close()
    assert [metrics for metrics, _ in lines] == [kept] * 3
    assert len(heard) == len({*heard}) and any(told in text for text in heard)


def test_a_word_that_is_logged_is_a_tag() -> None:
    tags: dict[str, str] = {}
    loop = OwnLoop("cpu", log=_log_nothing, tag=tags.__setitem__)
    loop.log({"stage": "warm-up", "loss": 1.0}, step="first")  # type: ignore[arg-type]
    assert tags == {"log.stage": "warm-up"}


def test_what_cannot_be_watched_is_told_and_the_loop_goes_on() -> None:
    heard: list[str] = []
    loop = OwnLoop("cpu", log=_log_nothing, tell=heard.append)
    loop.watch(lambda: None)
    assert heard[0].startswith("watch: takes models") and "(got function)" in heard[0]
    assert not loop.is_deaf


class Odd(list[Any]):
    """A batch that is nobody's to ask: neither its truth, nor its length, nor if it is equal."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__((first, second))

    def __bool__(self) -> bool:
        raise RuntimeError("its truth")

    def __len__(self) -> int:
        raise RuntimeError("its length")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("if it is equal")


BATCHES = {
    "a tensor": lambda: torch.randn(4, 16),
    "a list": lambda: [torch.randn(4, 16)],
    "a dict": lambda: {"x": torch.randn(4, 16), "name": "y"},
    "nothing": lambda: None,
    "a number": lambda: torch.tensor(1.0),
    "an object of its own": lambda: Odd(torch.randn(4, 16), 1),
    "a nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)]),
    "no rows": lambda: torch.randn(0, 16),
    "words": lambda: ["a", "b"],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_asked", [True, False])
@pytest.mark.parametrize("kind", BATCHES)
def test_whatever_the_batch_is_the_loop_goes_on(kind: str, is_asked: bool) -> None:
    """A batch that is a bare tensor was asked for its truth."""
    given = nn.Linear(16, 4)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = given

        def forward(self, batch: Any, **_: Any) -> Tensor:
            return self.inner(torch.ones(2, 16))

    net, heard = Net(), list[str]()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loop = OwnLoop("cpu", log=_log_nothing, tell=heard.append)
    loop.watch(net, optimizer)
    for batch in loop.iterate_batches([BATCHES[kind]() for _ in range(5)]):
        with _asked(loop if is_asked else None):
            net(batch, more=batch).mean().backward()
            optimizer.step()
    loop.close()
    assert (heard, loop.done) == ([], 5)


def test_a_copy_of_a_watched_model_is_not_watched_and_is_read_without_this_project() -> None:
    """An average of the weights is a deep copy; its passes are no passes of the loop's."""
    net = _net()
    loop = OwnLoop("cpu", log=_log_nothing)
    loop.watch(net)
    twin = copy.deepcopy(net)
    twin(torch.randn(4, 16)).mean().backward()
    assert loop.stage == "", "nothing has begun"
    file = io.BytesIO()
    torch.save(net, file)
    code = (
        "import io, sys, torch; net = torch.load(io.BytesIO(sys.stdin.buffer.read()), "
        "weights_only=False); print(net(torch.randn(4, 16)).shape, 'headroom' in sys.modules)"
    )
    done = subprocess.run([PYTHON, "-c", code], input=file.getvalue(), capture_output=True, cwd="/")
    assert done.stdout.split() == b"torch.Size([4, 4]) False".split(), done.stderr.decode()


def test_models_are_let_go_of_at_the_end() -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters())
    loop = OwnLoop("cpu", log=_log_nothing)
    loop.watch(net, optimizer, net, [optimizer])
    assert (len(net._forward_hooks), len(loop.optimizers)) == (1, 1), "each is watched once"
    loop.close()
    assert not net._forward_hooks and not net._forward_pre_hooks
    net(torch.randn(4, 16)).mean().backward()
    optimizer.step()
    assert loop.done == 0


def test_passes_of_another_thread_are_not_the_loops() -> None:
    """A copy of the model for each device is called in a thread of its own, with its hooks."""
    net = _net()
    loop = OwnLoop("cpu", log=_log_nothing)
    loop.watch(net)
    thread = threading.Thread(target=lambda: net(torch.randn(4, 16)))
    thread.start()
    thread.join()
    assert loop.stage == ""


def test_a_step_that_failed_does_not_count_and_the_next_one_does() -> None:
    loop = OwnLoop("cpu", log=_log_nothing)
    for failed in (False, True, True, False):  # the second is counted by owner
        loop.begin_step()
        if failed:
            loop.drop_step()
        else:
            loop.end_step()
    loop.close()
    assert loop.done == 2
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


class _Full(nn.Module):
    """Finds no memory at its last layer, like a device that is full."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 512))

    def forward(self, x: Tensor) -> Tensor:
        kept = self.body(x)
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate 3.00 GiB. {tuple(kept.shape)}"
        )


@pytest.mark.parametrize("is_counted", [False, True])
def test_memory_that_ran_out_is_told_with_owners_and_phase(tmp_path: Any, is_counted: bool) -> None:
    """In the first step nobody counts: who holds what is then read off what is alive."""
    gc.collect()  # graphs of other tests
    net, plain = _Full(), _net()
    loop = OwnLoop("cpu", log=_log_nothing)
    optimizer = torch.optim.Adam([*net.parameters(), *plain.parameters()])
    loop.watch(net, plain, optimizer)
    x = torch.randn(2048, 16)
    if is_counted:
        plain(x).mean().backward()
        optimizer.step()
    with pytest.raises(torch.OutOfMemoryError) as ran_out:
        net(x)
    assert is_oom(ran_out.value)
    why = explain_out_of_memory(
        loop.note_failure(ran_out.value),
        loop.accounts.phases.accounts.ledger,
        find_remedy=find_part,
        device="cpu",
        folder=tmp_path,
    )
    loop.close()
    assert (why.phase, why.step, why.batch_shape) == ("forward", 1 + is_counted, (2048, 16))
    known = why.owners.keys() - {"rest"}  # which is also what other tests hold
    assert max(known, key=lambda owner: why.owners[owner]) == "activations"
    assert why.owners["activations"] == pytest.approx(2048 * (4096 + 512) * 4, rel=0.01)
    weights = sum(p.nbytes for p in (*net.parameters(), *plain.parameters()))
    assert why.owners["parameters"] == weights
    assert why.owners["batch"] == x.nbytes
    assert why.sentence.startswith(
        f"batch: memory ran out on cpu in the forward pass of step {1 + is_counted} "
        "(a batch of 2048x16), in the layer _Full; 3.00 GiB asked for; most is held by "
        f"{max(why.owners, key=lambda owner: why.owners[owner])}: "
    )
    in_layers = [held.get("parameters", 0) for held in why.layers.values()]
    assert sum(in_layers) == weights
    assert (tmp_path / "memory" / "oom.json").is_file()


def test_memory_by_owner_is_what_the_tensors_take() -> None:
    net = _net(width=512)
    optimizer = torch.optim.Adam(net.parameters())
    loop = OwnLoop("cpu", log=_log_nothing)
    loop.watch(net, optimizer)
    for _ in range(4):
        optimizer.zero_grad(set_to_none=False)
        net(torch.randn(64, 16)).square().mean().backward()
        optimizer.step()
    loop.close()
    found = loop.summarize()
    of = {
        "parameters": list(net.parameters()),
        "gradients": [p.grad for p in net.parameters() if p.grad is not None],
        "optimizer_state": [t for s in optimizer.state.values() for t in s.values()],
    }
    for owner, tensors in of.items():
        assert found[f"memory/{owner}_mib"] * MIB == pytest.approx(
            sum(t.nbytes for t in tensors), rel=0.01
        )
    assert "memory/data_mib" not in found  # it was told as 0, which nobody knew


def test_a_compiled_model_is_not_counted_operation_by_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Below the eyes of a count, what was compiled is computed plainly, with other rounding."""
    monkeypatch.setattr("headroom.watch.own_loop.has_compiled", lambda: True)
    loop = OwnLoop("cpu", log=_log_nothing)
    for _ in range(4):
        loop.begin_step()
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        loop.end_step()
    loop.close()
    assert "memory/parameters_mib" not in loop.summarize()


def test_a_step_after_a_counted_one_is_not_counted_too() -> None:
    """What was measured of the step before stood for one that is not measured."""
    loop, counted = OwnLoop("cpu", log=_log_nothing), []
    loop.accounts.phases._count_every = 30
    for step in range(1, 100):
        loop.begin_step()
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            counted.append(step)
        loop.end_step(rows=1)
    loop.close()
    assert counted == [2, 40, 70]


def test_the_device_is_where_the_model_is_or_as_asked() -> None:
    net = nn.Linear(1, 1)
    assert find_device(None, [[net]]) == ("cpu", "where the model is")
    assert find_device(None, [None, torch.optim.SGD(net.parameters())])[1].startswith("where the p")
    assert find_device("cpu", [net]) == ("cpu", "as the account was asked for")
    assert find_device("cpu:0", [net])[0] == "cpu", "what transformers calls it under torchrun"
    assert find_device(None, [])[0] == "cpu"


def test_a_loop_that_was_compiled_counts_the_steps_of_its_optimizer() -> None:
    """Its hooks are compiled away: it had 0 steps, and was FINISHED without a word."""
    for compile_net in (lambda net: torch.compile(net, backend="eager"), _compile_in_place):
        for is_given in (True, False):
            net, heard = _net(), list[str]()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            loop = OwnLoop("cpu", log=_log_nothing, tell=heard.append)
            loop.watch(net, optimizer if is_given else None)
            fast = compile_net(net)
            for x, _ in _loader(160):
                fast(x).mean().backward()
                optimizer.step()
            loop.close()
            assert (loop.done, heard) == (5, [])
            assert loop.summarize()["speed/steps_per_s"] > 0
            torch._dynamo.reset()


def _compile_in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="eager")
    return net


def test_a_compiled_model_is_one_graph_with_its_hooks() -> None:
    """A hook that a compiler reads would make it compile again whenever the account goes on."""
    net, graphs = nn.Sequential(nn.Linear(16, 4), nn.ReLU()), list[Any]()

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loop = OwnLoop("cpu", log=_log_nothing)
    loop.watch(net, optimizer)
    fast = torch.compile(net, backend=backend)
    for _ in range(25):
        fast(torch.randn(8, 16)).mean().backward()
        optimizer.step()
    loop.close()
    torch._dynamo.reset()
    assert (len(graphs), loop.done) == (1, 25)


def test_an_optimizer_that_nobody_gave_is_found_by_its_first_step() -> None:
    net, other, heard = _net(), _net(), list[str]()
    loop = OwnLoop("cpu", log=_log_nothing, tell=heard.append)
    loop.watch(net)
    optimizer, stranger = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, other))
    for at, (x, _) in enumerate(_loader(192)):
        other(x).mean().backward()
        stranger.step()
        net(x).mean().backward()  # two of them are one step
        if at % 2:
            optimizer.step()
    loop.close()
    assert (loop.done, heard, loop.optimizers) == (3, [], [optimizer])


def test_a_model_without_an_optimizer_steps_with_its_backward_passes_and_says_so() -> None:
    """Stochastic gradient descent by hand had 0 steps, and not a word."""
    net, heard = _net(), list[str]()
    loop = OwnLoop("cpu", log=_log_nothing, tell=heard.append)
    loop.watch(net)
    for x, _ in _loader(32 * 45):
        net.zero_grad()
        net(x).mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad  # type: ignore[operator]
        net.eval()
        with torch.no_grad():
            net(x)
        net.train()
    loop.close()
    assert loop.done == 45
    assert heard == [
        "steps: no optimizer of PyTorch was seen; each backward pass counts as a step, unless "
        "`with run.step():` says what is one"
    ]


def test_a_run_whose_optimizers_stepped_while_it_counted_none_says_so() -> None:
    net, late, heard = _net(), _net(), list[str]()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, late)]
    loop = OwnLoop("cpu", log=_log_nothing, tell=heard.append)
    loop.watch(net, optimizers)
    for x, _ in _loader(96):
        net(x).mean().backward()
        optimizers[0].step()  # the other would end the step
    loop.close()
    assert loop.done == 0
    assert heard[0].startswith("steps: optimizers stepped 3 times and no step was counted")


def test_an_optimizer_without_groups_has_no_rate() -> None:
    """Lightning puts one in the place of none."""

    class Mock(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([torch.zeros(1)], {})
            self.param_groups = []

        def step(self, closure: Any = None) -> None:
            pass

    mock, lines, heard = Mock(), list[Any](), list[str]()
    loop = OwnLoop("cpu", log=lines.extend, tell=heard.append)
    loop.watch(mock)
    for _ in range(12):
        loop.begin_step()
        mock.step()
        loop.end_step()
    loop.close()
    assert (loop.done, heard) == (12, [])
    assert not [line for line, _ in lines if "train/lr" in line]


@pytest.mark.parametrize("share", [0.0, float("inf")])
def test_a_step_is_counted_where_that_is_little_of_the_training(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one counted step cost as much as twelve, and stood in the speed of a training of 39."""
    monkeypatch.setattr("headroom.watch.own_loop.COUNT_SHARE", share)
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loop = OwnLoop("cpu", log=_log_nothing)
    loop.watch(net, optimizer)
    for _ in range(30):
        net(torch.randn(8, 16)).mean().backward()
        optimizer.step()
    loop.close()
    found = loop.summarize()
    assert ("memory/parameters_mib" in found) == ("time/counted_step_s" in found) == (share > 1)


def test_a_counted_step_is_no_part_of_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    net, lines = _net(), list[tuple[dict[str, float], int]]()
    count_step = OwnLoop._count

    def count_slowly(loop: OwnLoop) -> None:
        count_step(loop)
        if loop._counting is not None:
            time.sleep(0.3)

    monkeypatch.setattr(OwnLoop, "_count", count_slowly)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loop = OwnLoop("cpu", log=lines.extend)
    loop._metrics.read_every_s = 0.0
    loop.watch(net, optimizer)
    began_s = time.perf_counter()
    for _ in range(20):
        net(torch.randn(8, 16)).mean().backward()
        time.sleep(0.002)
        optimizer.step()
    loop.close()
    took_s = time.perf_counter() - began_s
    found = loop.summarize()
    assert found["time/counted_step_s"] >= 0.3
    assert found["time/steps_s"] <= took_s - found["time/counted_step_s"]
    plain = 19 / (found["time/first_step_s"] + found["time/steps_s"])
    assert found["speed/steps_per_s"] == pytest.approx(plain)
    assert abs(found["time/unaccounted_pct"]) < 50
    speeds = [line["speed/steps_per_s"] for line, _ in lines if "speed/steps_per_s" in line]
    assert speeds and all(1 < speed < 1 / 0.002 for speed in speeds)


def test_where_counting_fails_the_operations_of_the_loop_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs inside of each operation of a counted step, and its error was the operation's."""
    heard: list[str] = []

    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("a fault of ours")

    torch.manual_seed(3)
    plain = _by_hand(None)
    for name in ("_find_entry", "note_failure", "end_phase", "begin_step", "_sweep"):
        heard.clear()
        loop = OwnLoop("cpu", log=_log_nothing, tell=heard.append)
        monkeypatch.setattr(f"headroom.watch.allocation_log.AllocationLog.{name}", fail)
        torch.manual_seed(3)
        told = _by_hand(loop)
        loop.end()
        monkeypatch.undo()
        monkeypatch.setattr("headroom.watch.own_loop.COUNT_SHARE", float("inf"))
        monkeypatch.setattr("headroom.watch.own_loop.has_compiled", lambda: False)
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
        for one, other in zip(plain, told, strict=True):
            assert all(torch.equal(one[key], other[key]) for key in one)
        assert len(heard) == (0 if name == "note_failure" else 1), name
