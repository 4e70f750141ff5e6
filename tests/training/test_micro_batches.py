"""Memory that runs out for real: a ledger with a limit counts the bytes of the tensors on a CPU."""

import math
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headroom.data.batch import Batch
from headroom.training import micro_batches, optim
from headroom.training.micro_batches import (
    MemoryExhausted,
    MicroBatches,
    SingleAttempt,
    name_oom_phase,
)
from headroom.training.optimizer_step import Step
from headroom.watch.out_of_memory import MemoryFailure
from headroom.watch.phases import Watched
from tests.watch.loop_watch import make_owners

CPU = torch.device("cpu")
ROWS, WIDTH = 32, 16


class _Witness:
    """What was done to see the last attempt."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def start(self) -> None:
        self.seen.append("start")

    def write(self) -> None:
        self.seen.append("write")

    def read_allocator(self) -> dict[str, int]:
        return {"allocated": 7}


class _Training:
    """A small training whose activations are most of its memory."""

    def __init__(
        self,
        *,
        limit_bytes: int | None = None,
        micro_rows: int = ROWS,
        dropout: float = 0.0,
        fixed: bool = False,
        adam: bool = False,
        scaled: bool = False,
        clip_norm: float | None = None,
    ) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(3):
            layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if dropout else nn.Identity()]
            layers += [nn.Tanh(), nn.Dropout(dropout)]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, 3))
        optimizer = optim.make_fused_optimizer(
            "adamw" if adam else "sgd",
            self.model.parameters(),
            lr=0.01,
            weight_decay=0.0,
            args={} if adam else {"momentum": 0.0},  # which has no state
        )
        accounts = make_owners(
            lambda: {
                "parameters": self.model.parameters(),
                "optimizer_state": optimizer.list_state_tensors(),
            },
            limit_bytes=limit_bytes,
        )
        self.ledger = accounts.ledger
        self.witness = _Witness()
        self.micro = MicroBatches(
            micro_rows,
            whole=ROWS,
            what="training",
            device=CPU,
            model=self.model,
            accounts=accounts,
            witness=self.witness,
        )
        self.phases: list[str] = []
        self.step = Step(
            compute=lambda x, y: nn.functional.cross_entropy(self.model(x), y),
            optimizer=optimizer,
            scaler=torch.amp.GradScaler("cpu", enabled=scaled, growth_interval=2),
            autocast=nullcontext,
            clip_norm=clip_norm,
            micro=SingleAttempt(micro_rows) if fixed else self.micro,
            mark=self.phases.append,
        )

    def train(self, steps: int = 2) -> list[float]:
        draw = torch.Generator().manual_seed(1)
        torch.manual_seed(2)
        losses = []
        self.ledger.own("parameters", (*self.model.parameters(), *self.model.buffers()))
        for _ in range(steps):
            x = torch.randn(ROWS, WIDTH, generator=draw)
            y = torch.randint(3, (ROWS,), generator=draw)
            self.ledger.own("batch", [x, y])
            with self.ledger.count_allocations():
                losses.append(
                    self.step(Batch(x, y, len(y)), norm=False, watched=Watched.NOT).loss.item()
                )
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()


@cache
def _peak(*, steps: int = 2, **how) -> int:
    """The most that a training without a limit holds, at the size that it starts with."""
    training = _Training(**how)
    training.micro._patience = 10**9
    training.train(steps)
    return training.ledger.peak_bytes


def _assert_equal(one: _Training, other: _Training) -> None:
    for a, b in zip(one.state().values(), other.state().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("micro_rows", [16, 8, 4, 2, 1])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_running_out_gives_the_bits_of_a_run_that_never_did(micro_rows, dropout) -> None:
    # A batch norm makes its running means from each micro-batch: they must not see one twice. It
    # needs two rows.
    if dropout and micro_rows == 1:
        pytest.skip("a batch norm cannot train on one row")
    spared = _Training(micro_rows=micro_rows, dropout=dropout, fixed=True)
    expected = spared.train()
    limited = _Training(limit_bytes=_peak(micro_rows=micro_rows, dropout=dropout), dropout=dropout)
    assert limited.train() == expected
    assert limited.micro.rows == micro_rows
    assert limited.micro.recovered == int(math.log2(ROWS // micro_rows))
    _assert_equal(limited, spared)


@settings(max_examples=12, deadline=None)
@given(share=st.floats(0.0, 1.0), start=st.integers(1, ROWS))
def test_whatever_the_limit_it_trains_within_it_or_says_so(share: float, start: int) -> None:
    least, most = _peak(micro_rows=1), _peak()
    limit = int(0.8 * least + share * (most - 0.8 * least))
    training = _Training(limit_bytes=limit, micro_rows=start)
    if limit < least:
        with pytest.raises(MemoryExhausted, match="memory ran out in training"):
            training.train()
    else:
        assert all(math.isfinite(loss) for loss in training.train())
        assert training.ledger.peak_bytes - ROWS * WIDTH * 4 * 2 <= limit


@pytest.mark.parametrize("at", ["forward", "backward", "optimizer"])
def test_each_phase_may_run_out(at: str) -> None:
    """An operation of that phase finds no memory, once."""
    training, spared = _Training(), _Training(fixed=True)
    training.train(1), spared.train(1)
    failures = iter([True])

    def fail_once(*_: object) -> None:
        if next(failures, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    if at == "forward":
        training.model[4].register_forward_hook(fail_once)
    elif at == "backward":
        training.model[4].register_full_backward_hook(fail_once)
    else:
        real = training.step.optimizer.step
        training.step.optimizer.step = lambda: (fail_once(), real())[1]
    training.train(1), spared.train(1)
    assert training.micro.recovered == 1
    assert training.micro.rows == (ROWS if at == "optimizer" else ROWS // 2)
    for a, b in zip(training.state().values(), spared.state().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def _fails_once_a_step(monkeypatch, owner: object, name: str) -> list[str]:
    """Every second call of a function finds no memory, the first one first."""
    real, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) % 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.mark.parametrize("at", ["unscale", "norm", "scale", "step", "kernel"])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("adam", [False, True])
def test_an_update_that_failed_and_was_repeated_is_that_of_a_run_that_never_failed(
    monkeypatch, adam: bool, clip_norm: float | None, at: str
) -> None:
    """The scale that a failed step left behind was multiplied into the next one's, and a step of
    AdamW counted twice: silently wrong weights."""
    if clip_norm is None and at in ("unscale", "norm"):
        pytest.skip("nothing is unscaled beside the step")
    spared = _Training(adam=adam, scaled=True, clip_norm=clip_norm, fixed=True)
    expected = spared.train(4)
    training = _Training(adam=adam, scaled=True, clip_norm=clip_norm)
    owner, name = {
        "unscale": (training.step.scaler, "unscale_"),
        "norm": (nn.utils, "clip_grad_norm_"),
        "scale": (training.step.scaler, "_get_scale_async"),
        "step": (training.step.optimizer, "step"),
        "kernel": (torch, "_fused_adamw_" if adam else "_fused_sgd_"),
    }[at]
    calls = _fails_once_a_step(monkeypatch, owner, name)
    assert training.train(4) == expected
    monkeypatch.undo()
    assert len(calls) == 8 and training.micro.recovered == 4
    assert training.micro.rows == ROWS, "the activations are gone: fewer rows don't help"
    _assert_equal(training, spared)
    state, wanted = (t.step.optimizer.list_state_tensors() for t in (training, spared))
    assert all(torch.equal(a, b) for a, b in zip(state, wanted, strict=True))
    assert training.step.scaler.state_dict() == spared.step.scaler.state_dict()


def test_the_optimizer_state_is_made_whole_or_not_at_all() -> None:
    training = _Training(
        limit_bytes=_peak(micro_rows=1, adam=True, steps=1) - 1, micro_rows=1, adam=True
    )
    with pytest.raises(MemoryExhausted, match="memory ran out in optimizer"):
        training.train(1)
    assert training.witness.seen == ["start", "write"]
    made = len(training.step.optimizer.list_state_tensors())
    assert made in (0, 2 * len(training.step.optimizer.params) + 1)


def test_what_failed_is_let_go_of_before_it_is_tried_again() -> None:
    """Otherwise not even the peak of the size that fits would fit beside it."""
    training = _Training(limit_bytes=_peak(micro_rows=8))
    training.train()
    assert training.micro.tried == [32, 16] and training.micro.fitted == 8


def test_it_grows_back_when_there_is_room_and_waits_longer_when_there_is_none(monkeypatch) -> None:
    monkeypatch.setattr(micro_batches, "GROW_AFTER", 3)
    training = _Training()
    training.micro._patience = 3
    training.micro.ease("the allocator had to free its cache twice")
    assert training.micro.rows == ROWS // 2
    training.train(3)
    assert training.micro.rows == ROWS // 2
    training.train(1)
    assert training.micro.rows == ROWS
    limited = _Training(limit_bytes=_peak(micro_rows=ROWS // 2))
    limited.micro._patience = 3
    limited.train(1)
    limited.train(3)
    assert limited.micro.tried == [ROWS, ROWS] and limited.micro._patience == 6
    limited.train(5)
    assert limited.micro.tried == [ROWS, ROWS]


def test_what_only_saves_time_is_given_back_where_not_even_one_row_fits(caplog) -> None:
    """A batch that was read ahead held the room that a step lacked. Each halving was told with
    all that PyTorch says about memory."""
    told = "CUDA out of memory. Tried to allocate 2.00 MiB"
    text = f"{told}. GPU 0 has a total capacity of 23.6 GiB of which 1.2 GiB is free. See also"
    training, spared, ahead = _Training(dropout=0.3), _Training(dropout=0.3, fixed=True), [1]

    def too_much(module: nn.Module, *_: object) -> None:
        if ahead:
            raise torch.OutOfMemoryError(text)

    training.model[0].register_forward_hook(too_much)
    training.micro._give_back = lambda: bool(ahead and ahead.pop())
    assert training.train(2) == spared.train(2)
    assert training.micro.tried == [32, 16, 8, 4]  # a batch norm needs two rows
    assert training.micro.rows == ROWS and training.micro.recovered == 5
    for message, rows in zip(caplog.messages, training.micro.tried, strict=False):
        assert message.endswith(f"{rows} rows: going on with {rows // 2} ({told})")
    _assert_equal(training, spared)


def test_other_errors_are_not_repeated() -> None:
    training = _Training()
    calls = []

    def wrong(*_: object) -> None:
        calls.append(1)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    training.model[0].register_forward_hook(wrong)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        training.train(1)
    assert len(calls) == 1


# Of what is tried, without a training


class _Tried:
    """Fits up to so many rows, and keeps which were tried."""

    def __init__(
        self, whole: int, most: int, *, rows: int | None = None, dropout: float = 0.0
    ) -> None:
        self.most, self.rows = most, []
        self.batch = torch.zeros(whole, 3)
        model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(dropout))
        accounts = make_owners()
        self.micro = MicroBatches(
            rows or whole,
            whole=whole,
            what="training",
            device=CPU,
            model=model,
            accounts=accounts,
            witness=_Witness(),
        )

    def attempt(self, x: torch.Tensor, rows: int) -> int:
        self.rows.append(rows)
        if rows > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        return rows

    def fit(self, times: int = 1) -> list[int]:
        """The rows tried in so many batches."""
        self.rows = []
        for _ in range(times):
            self.micro.fit(self.attempt, self.batch)
        return self.rows


def test_each_size_is_half_of_the_last_rounded_up() -> None:
    tried = _Tried(11, 1)
    assert tried.fit() == [11, 6, 3, 2, 1]
    assert (tried.micro.recovered, tried.micro.fitted, tried.micro.tried) == (4, 1, [11, 6, 3, 2])
    assert tried.fit(2) == [1, 1] and tried.micro.recovered == 4
    assert _Tried(8, 8, rows=20).micro.rows == 8, "no more than a batch has"


def test_what_did_not_fit_even_by_one_row_is_told_with_all_that_was_tried() -> None:
    tried = _Tried(5, 0)
    with pytest.raises(MemoryExhausted) as ended:
        tried.fit()
    assert tried.rows == [5, 3, 2, 1, 1], "the last once more, for the witness"
    assert ended.value.failure == MemoryFailure(
        text="CUDA out of memory. Tried to allocate 2.00 MiB",
        phase="training",
        batch_shape=(5, 3),
        tried=(5, 3, 2, 1),
        allocator={"allocated": 7},
    )
    assert tried.micro.recovered == 3


def test_one_row_that_fits_when_it_is_counted_is_a_recovery() -> None:
    tried = _Tried(1, 0)

    def once(x: torch.Tensor, rows: int) -> int:
        try:
            return tried.attempt(x, rows)
        finally:
            tried.most = 1

    assert tried.micro.fit(once, tried.batch) == 1
    assert (tried.micro.recovered, tried.micro.tried) == (1, [1])


def test_a_larger_size_is_tried_again_after_a_hundred_batches_and_then_after_twice_as_many() -> (
    None
):
    tried = _Tried(12, 6)
    assert tried.fit(100) == [12] + [6] * 100
    assert tried.fit(1) == [12, 6], "what failed again is tried again later"
    assert 12 not in tried.fit(198) and tried.fit(2) == [6, 12, 6]
    tried.most = 12
    assert 12 not in tried.fit(398) and tried.fit(3) == [6, 12, 12]
    assert (tried.micro.fitted, tried.micro.rows) == (12, 12)
    assert set(tried.fit(1000)) == {12}, "there is no more than a batch"


def test_a_whole_batch_that_fails_after_long_was_not_tried_again_too_soon() -> None:
    tried = _Tried(12, 12)
    tried.fit(150)
    tried.most = 6
    assert tried.fit(100) == [12] + [6] * 100 and tried.fit() == [12, 6]


@pytest.mark.parametrize(("calm", "waits"), [(99, 400), (100, 200)])
def test_a_failure_after_a_hundred_calm_batches_is_none_of_the_larger_size(calm, waits) -> None:
    tried = _Tried(12, 6)
    tried.fit(100)
    assert tried.fit() == [12, 6], "which doubled what it waits"
    tried.fit(calm - 1)
    tried.most = 3
    assert tried.fit(waits) == [6] + [3] * waits
    assert tried.fit() == [6, 3]


def test_it_grows_to_twice_the_rows_and_at_most_to_those_of_a_batch() -> None:
    tried = _Tried(11, 3)
    assert tried.fit(100) == [11, 6] + [3] * 100
    tried.most = 11
    assert tried.fit(101) == [6] * 100 + [11]
    assert _Tried(8, 8, rows=4).fit(102) == [4] * 100 + [8, 8], "counted from the first"


@pytest.mark.parametrize(("device", "named"), [("cuda:1", ("cuda:1",)), ("mps", ())])
def test_the_random_numbers_of_the_device_are_begun_anew_too(monkeypatch, device, named) -> None:
    """Of Apple's there is one, and it takes no name."""
    calls: list[tuple] = []

    class Module:
        def get_rng_state(self, *of: torch.device) -> str:
            calls.append(("get", *map(str, of)))
            return "as it was"

        def set_rng_state(self, state: str, *of: torch.device) -> None:
            calls.append(("set", state, *map(str, of)))

    monkeypatch.setattr(torch, "get_device_module", lambda of: Module())
    monkeypatch.setattr(micro_batches, "drop_cache", lambda of: None)
    tried = _Tried(4, 2, dropout=0.1)
    tried.micro._device = torch.device(device)
    assert tried.fit() == [4, 2]
    assert calls == [("get", *named), ("set", "as it was", *named)]
    tried = _Tried(4, 2)
    tried.micro._device = torch.device(device)
    assert tried.fit() == [4, 2] and len(calls) == 2, "a model that draws none needs none"


def test_easing_is_no_failure_and_one_row_is_not_halved() -> None:
    tried = _Tried(3, 3)
    for rows in (2, 1, 1):
        tried.micro.ease("the allocator is about to fail")
        assert (tried.micro.rows, tried.micro.recovered) == (rows, 0)
    assert tried.micro.tried == [3, 2]
    assert tried.fit(100) == [1] * 100
    assert tried.fit(101) == [2] * 100 + [3], "nothing failed: no patience was lost"


def test_what_is_done_again_is_done_twice_and_not_a_third_time() -> None:
    tried, calls = _Tried(4, 4), []

    def fails(times: int) -> int:
        calls.append(times)
        if len(calls) <= times:
            raise MemoryError
        return 9

    assert tried.micro.retry_once(lambda: fails(1)) == 9
    assert (tried.micro.recovered, len(calls)) == (1, 2)
    calls.clear()
    with pytest.raises(MemoryExhausted, match="in optimizer: MemoryError") as ended:
        tried.micro.retry_once(lambda: fails(2))
    assert ended.value.failure == MemoryFailure(
        text="MemoryError", phase="optimizer", allocator={"allocated": 7}
    )
    for wrong in (
        tried.micro.retry_once,
        lambda attempt: tried.micro.fit(lambda *_: attempt(), ()),
    ):
        with pytest.raises(ZeroDivisionError):
            wrong(lambda: 1 / 0)
        with pytest.raises(RuntimeError, match="^not about it$"):
            wrong(lambda: _raise(RuntimeError("not about it")))


def _raise(error: BaseException) -> None:
    raise error


def test_running_out_is_told_with_the_innermost_phase_and_the_step() -> None:
    with pytest.raises(MemoryExhausted) as ended, name_oom_phase("training", step=lambda: 3):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert ended.value.failure == MemoryFailure("CUDA out of memory.", "training", step=3)
    with (
        pytest.raises(MemoryExhausted) as ended,
        name_oom_phase("training", step=lambda: 3),
        name_oom_phase("sending", step=lambda: 2),
        name_oom_phase("eval"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert ended.value.failure == MemoryFailure("CUDA out of memory.", "eval", step=2)
    with pytest.raises(RuntimeError, match="^not about it$"), name_oom_phase("training"):
        raise RuntimeError("not about it")
    assert MemoryFailure("", "").step == 0


def test_the_fixed_size_never_recovers() -> None:
    assert SingleAttempt(3).fit(lambda x, rows: (x, rows), 5) == (5, 3)
    assert SingleAttempt(3).recovered == 0
