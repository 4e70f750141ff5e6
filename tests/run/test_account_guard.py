"""Whatever an account does wrong, the loop goes on; what the loop does wrong passes untouched."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headroom import account
from headroom.run.account import Account
from headroom.run.adapter import Adapter
from headroom.run.recording import Recording
from headroom.watch.own_loop import OwnLoop
from tests.conftest import PYTHON, desk_environment
from tests.run.faults import (
    break_function,
    end_open_accounts,
    fail,
    find_method,
    list_points,
    send_nothing,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # what frameworks warn of is theirs


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, place: Any) -> Iterator[None]:
    """Runs that nobody sends, and whose only step is counted."""
    with send_nothing(monkeypatch):
        yield


def _make() -> tuple[nn.Module, torch.optim.Optimizer, list[Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))
    rows = [torch.randn(4, 8) for _ in range(6)]
    return net, torch.optim.AdamW(net.parameters(), lr=0.1), rows


def _play(is_told: bool = True, *, asks: bool = False) -> list[Tensor]:
    """A loop that calls all there is."""
    net, opt, rows = _make()
    run = account(run_name="own", quiet=True) if is_told else None

    def train(x: Tensor) -> None:
        net(x).square().mean().backward()
        opt.step()
        opt.zero_grad()

    if run is None:
        for x in (*rows, *rows, *rows[:2], *rows, *rows, *rows):
            train(x)
        return [p.detach().clone() for p in net.parameters()]
    with run:
        run.watch(net, opt)
        run.warn("nothing")
        run.load_state_dict(run.state_dict())
        go_back = run.protect(lambda x: net(x).square().mean())
        for x in run.batches(rows):
            with run.step(), run.phase("other"):
                go_back(x)
                opt.step()
                opt.zero_grad()
            run.log({"train/loss": 0.5})
        with suppress(ZeroDivisionError), run.step(), run.phase("forward"):
            _ = 1 / 0
        if asks:
            run.forecast()
    run.log({"val/loss": 0.5})
    run.send_added()
    run.abandon()
    run.end()
    run = account(run_name="calls", model=net, optimizer=opt, quiet=True).begin()
    run.loop.go_on_after(6)
    for x in rows:
        run.loop.begin_wait()
        run.loop.end_wait(x)
        run.loop.begin_step()
        run.loop.begin_phase("forward")
        run.loop.end_phase()
        run.loop.mark("other")
        train(x)
        run.loop.end_step()
    run.loop.count_rows_of(net)
    run.loop.watch(net)
    run.loop.log({"a": 1.0})
    for x in run.loop.iterate_batches(rows[:2]):
        train(x)
    run.loop.drop_pass()
    with run.loop.ignore_passes():
        run.loop.drop_step()
    run.loop.begin_phase("eval")
    run.loop.drop_phase()
    for x in (
        *rows,
        *rows,
        *rows,
    ):  # most steps are plain by then
        with run.step(), run.phase("other"):
            train(x)
        run.log({"train/loss": 0.5})
    again = account(run_name="again", optimizer=opt, quiet=True).begin()
    run.end()
    again.end()
    return [p.detach().clone() for p in net.parameters()]


# What asks for something, and so says that it failed; and what makes contexts, and cannot.
ASKED = (
    *("close", "summarize", "measure_held", "list_owned", "note_failure", "take_error", "end"),
    *("find_layers", "settle", "make_step_block", "make_phase_block"),
)
HANDING_ON = ("step", "phase", "log")  # three lines each; what they call is broken instead
OF_LOOP = [
    *((Account, name) for name in list_points(Account, but=("begin", "forecast", *HANDING_ON))),
    *((OwnLoop, name) for name in list_points(OwnLoop, but=ASKED)),
]
# What the account itself does, at the start and at the end.
WITHIN = [
    *(
        (Account, name)
        for name in ("_begin", "_detect", "_open", "_follow_process", "_make_gate_key")
    ),
    *((Account, name) for name in ("_end_run", "_classify", "_prepare_end", "_measure_last")),
    *((Account, name) for name in ("_end", "_keep", "_add", "_leave_process")),
    *((Account, name) for name in ("_make_block", "_log_late")),
    *(
        (Recording, name)
        for name in ("_create", "_close", "_make_curves", "_make_page", "_compare")
    ),
    *((OwnLoop, name) for name in ("__init__", "close", "summarize", "measure_held", "list_owned")),
    *((OwnLoop, name) for name in ("_open", "_count", "_end_step", "_drain", "_keep_lines")),
    *((OwnLoop, name) for name in ("_begin_watched_step", "_end_plain_step")),
    (OwnLoop, "_settle_plain_steps"),
]


def _name(point: Any) -> str:
    return (
        f"{point[0].__module__.rpartition('.')[2]}-{point[1]}" if isinstance(point, tuple) else ""
    )


@pytest.mark.parametrize("point", [*OF_LOOP, *WITHIN], ids=_name)
def test_an_error_of_ours_wherever_it_comes_ends_no_loop(
    point: tuple[type, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = _play(is_told=False)
    with monkeypatch.context() as broken:
        break_function(broken, find_method(*point))
        told = _play(asks=point[1] == "forecast")
    end_open_accounts()
    assert all(torch.equal(one, other) for one, other in zip(plain, told, strict=True))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    traces = [record for record in caplog.records if record.exc_info]
    assert any("a fault of ours" in str(record.exc_info) for record in traces), "not told"


def test_a_fault_is_told_once_and_stands_in_the_record(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net, opt, rows = _make()
    with account(run_name="own", model=net, optimizer=opt, quiet=True) as run:
        for at, x in enumerate(run.batches(rows)):
            if at == 3:
                monkeypatch.setattr(OwnLoop, "_end_step", fail)
            net(x).mean().backward()
            opt.step()
            run.log({"train/loss": float(at)}, at)
    assert run.run["status"] == "FINISHED"
    told = [text for text in run.run["warnings"] if text.startswith("account: an error of its own")]
    assert len(told) == 1 and "at step 3" in told[0] and "LookupError: a fault of ours" in told[0]
    assert run.run["metrics"]["train/loss"] == 5.0, "what the loop logs is kept all the same"
    assert len([record for record in caplog.records if record.exc_info]) == 1


def _loader_fails() -> Iterator[Tensor]:
    yield torch.ones(4, 8)
    raise ValueError("no such row")


class _NoIterator:
    def __iter__(self) -> Iterator[Tensor]:
        raise ValueError("no such row")


@pytest.mark.parametrize("make", [_loader_fails, _NoIterator])
@pytest.mark.parametrize("is_evaluation", [True, False])
def test_an_error_of_the_loader_passes_as_it_came(
    make: Callable[[], Any], is_evaluation: bool
) -> None:
    net, opt, _ = _make()
    with (
        pytest.raises(ValueError, match="^no such row$"),
        account(model=net, optimizer=opt, quiet=True) as run,
        torch.set_grad_enabled(not is_evaluation),
    ):
        for x in run.batches(make()):
            net(x)
    assert run.run["status"] == "FAILED"
    assert run.run["tags"]["end.reason"] == "no such row"
    assert not [text for text in run.run["warnings"] if text.startswith("account:")]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_what_a_handler_of_a_signal_raises_within_ours_passes(error: BaseException) -> None:
    """A limit of time raises wherever the program stands, which may be in a hook of ours."""

    def interrupt(*_: Any) -> None:
        raise error

    before = signal.signal(signal.SIGUSR2, interrupt)
    net, opt, rows = _make()
    try:
        loop = OwnLoop("cpu", log=lambda found: os.kill(os.getpid(), signal.SIGUSR2))
        loop.watch(net, opt)
        with pytest.raises(type(error)):
            for x in rows:
                net(x).mean().backward()
                opt.step()
                loop.log({"a": 1})
                time.sleep(0.125)  # a quarter of the time between two readings
        assert not loop.is_deaf
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_method_that_a_user_derives_is_theirs() -> None:
    pytest.importorskip("transformers")
    from headroom.transformers import HeadroomCallback

    class Mine(HeadroomCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        Mine().on_log()


def test_opening_refuses_what_the_user_wrote_there() -> None:
    with pytest.raises(TypeError, match="nmae"):
        Adapter(nmae="x")
    with pytest.raises(TypeError, match="watch: takes models"):
        Adapter(model=3)
    with pytest.raises(ValueError, match="params: a name has letters"):
        Adapter(params={"lr (start)": 1})
    with pytest.raises(ValueError, match="device.name: cuda:7 is not here"):
        account(device="cuda:7").begin()


def test_neither_the_import_nor_a_run_draws_random_numbers() -> None:
    """rich draws some when it is imported, so that the shuffles of the loop were others."""
    code = (
        "import random; random.seed(3); before = random.getstate()\n"
        "from headroom import account\n"
        "assert random.getstate() == before, 'the import'\n"
        "with account(run_name='own') as run: run.log({'a': 1})\n"
        "assert random.getstate() == before, 'the run'\n"
    )
    done = subprocess.run(
        [PYTHON, "-c", code], env=desk_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    before = random.getstate()
    with account(run_name="own"):
        pass
    assert random.getstate() == before


def test_no_thread_of_ours_is_alive_when_a_run_has_ended() -> None:
    before, handlers = {*threading.enumerate()}, list(logging.getLogger("headroom").handlers)
    with account(quiet=True):
        pass
    assert {*threading.enumerate()} <= before
    assert logging.getLogger("headroom").handlers == handlers


def test_a_clock_that_the_tests_of_a_loop_have_put_in_place_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readers: list[str] = []

    def make_clock(name: str) -> Any:
        known = getattr(time, name)

        def read() -> Any:
            readers.append(sys._getframe(1).f_globals["__name__"])
            return known()

        return read

    for name in ("time", "time_ns", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, make_clock(name))
    _play()
    assert not [reader for reader in readers if reader.startswith("headroom.")]
