"""The line a person watches: what it says, how often, and that no terminal can stop a training."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headroom.run import progress
from headroom.run.progress import Progress

METRICS = {
    "train/loss": 0.412,
    "speed/samples_per_s": 41_200.0,
    "memory/peak_allocated_mib": 6246.0,
}


class Clock:
    """A time that passes when told."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


def test_one_that_goes_on_begins_at_its_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """It said "epoch 1/200" of one that went on in the 14th."""
    clock = Clock()
    with Progress(4600, 200, stream=io.StringIO(), at=322, now_s=clock) as shown:
        clock.s += 60
        shown.tell_if_silent()
    assert caplog.messages[0].startswith("epoch 14/200")


class Terminal(io.StringIO):
    """A terminal that keeps what it was sent, and may go away or show only ASCII."""

    fault: Exception | None = None

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.fault is not None:
            raise self.fault
        return super().write(text)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    caplog.set_level(logging.INFO, logger="headroom.run.progress")


def _plain(clock: Clock, total_steps: int = 100, epochs: int = 10) -> Progress:
    return Progress(total_steps, epochs, io.StringIO(), now_s=clock)


def test_a_line_says_epoch_loss_speed_peak_and_time_left(caplog: Any) -> None:
    clock = Clock()
    with _plain(clock) as progress:
        progress.update(METRICS, 20)
        clock.s += 6
        progress.update(METRICS, 30)
        assert caplog.messages == [
            "epoch 3/10  loss 0.412  41,200 samples/s  peak 6.10 GiB  0:42 left"
        ]


def test_a_resumed_run_is_paced_by_its_own_steps(caplog: Any) -> None:
    clock = Clock()
    with _plain(clock) as progress:
        progress.update({}, 80)
        clock.s += 10
        progress.update({}, 90)
        assert caplog.messages == ["epoch 9/10  0:10 left"]


def test_plain_lines_come_at_most_every_five_seconds(caplog: Any) -> None:
    clock = Clock()
    with _plain(clock, epochs=100) as progress:
        for step in range(1, 101):
            clock.s += 1
            progress.update(METRICS, step)
    assert [m.split("  ")[0] for m in caplog.messages] == [
        f"epoch {n}/100" for n in range(5, 101, 5)
    ]


def test_a_long_epoch_has_a_plain_line_every_half_minute(caplog: Any) -> None:
    """There was one line an epoch, were it hours long."""
    clock = Clock()
    with _plain(clock, total_steps=100, epochs=1) as progress:
        for step in range(1, 101):
            clock.s += 6
            progress.update(METRICS, step)
    ends = [message.split("  ")[-1] for message in caplog.messages]
    assert ends[1:4] == ["9:24 left", "8:54 left", "8:24 left"] and len(ends) == 21


def test_a_step_of_minutes_has_a_line_every_half_minute_too(caplog: Any) -> None:
    clock = Clock()
    with _plain(clock) as progress:
        for _ in range(14):
            clock.s += 5
            progress.tell_if_silent()
        assert caplog.messages == ["epoch 1/10  0:30 so far", "epoch 1/10  1:00 so far"]
        progress.update(METRICS, 20)
        clock.s += 29
        progress.tell_if_silent()
        assert len(caplog.messages) == 3


def test_where_no_step_comes_any_more_no_time_left_is_told(caplog: Any) -> None:
    """While a rank hung the line said "59:03 left"."""
    clock = Clock()
    with _plain(clock) as progress:
        for step in (10, 20):
            progress.update({"train/loss": 0.412}, step)
            clock.s += 5
        clock.s += 60
        progress.tell_if_silent()
        assert caplog.messages[-1].endswith("no step for 1:05")


def test_a_peak_of_which_not_all_was_seen_is_called_at_least_that(caplog: Any) -> None:
    with _plain(Clock()) as progress:
        progress.update({**METRICS, "memory/peak_is_lower_bound": 1.0}, 100)
        progress.update({"val/accuracy": 0.9833, "train/epoch": 10.0}, 100)
    assert "  peak at least 6.10 GiB  " in caplog.messages[-1]


def test_the_last_line_always_comes_and_tells_how_long_it_took(caplog: Any) -> None:
    clock = Clock()
    with _plain(clock) as progress:
        progress.update(METRICS, 100)
        clock.s += 1.5
        progress.update({"val/accuracy": 0.9833, "train/epoch": 10.0}, 100)
    assert caplog.messages == [
        "epoch 10/10  loss 0.412  val accuracy 0.9833  41,200 samples/s  peak 6.10 GiB  1.50 s"
    ]


def test_of_rows_nearly_all_of_one_class_the_balanced_accuracy_is_told(caplog: Any) -> None:
    with _plain(Clock()) as progress:
        scores = {"val/accuracy": 0.999, "val/balanced_accuracy": 0.5}
        progress.update({**scores, "val/largest_class_share": 0.999, "train/epoch": 1.0}, 100)
    assert "val balanced accuracy 0.5" in caplog.text and "0.999" not in caplog.text


def test_the_last_line_comes_after_an_exception_and_promises_nothing(caplog: Any) -> None:
    clock = Clock()
    with pytest.raises(RuntimeError, match="the loss is nan"), _plain(clock) as progress:
        progress.update(METRICS, 20)
        clock.s += 2
        progress.update({"train/loss": float("nan")}, 30)
        raise RuntimeError("the loss is nan")
    assert caplog.messages == [
        "epoch 3/10  loss nan  41,200 samples/s  peak 6.10 GiB  2.00 s",
    ]


def test_a_cpu_run_tells_the_memory_of_its_process_and_calls_it_so(caplog: Any) -> None:
    clock = Clock()
    with _plain(clock) as progress:
        progress.update({"memory/host_rss_mib": 412.0}, 100)
    assert caplog.messages == ["epoch 10/10  host 412 MiB  0 ms"]


def test_nothing_is_said_of_a_training_that_never_logged(caplog: Any) -> None:
    with _plain(Clock()):
        pass
    assert not caplog.messages


@pytest.mark.parametrize("metrics", [{"train/epoch": float("nan")}, {"train/epoch": -1.0}, {}])
def test_odd_numbers_are_shown_and_not_stumbled_over(metrics: dict[str, float]) -> None:
    with Progress(0, 1, io.StringIO(), now_s=Clock()) as progress:
        progress.update({**metrics, "speed/samples_per_s": float("inf")}, 0)
        progress.update(metrics, 7)


def test_a_terminal_gets_one_live_line_and_is_left_clean(caplog: Any) -> None:
    clock, terminal, stdout = Clock(), Terminal(), sys.stdout
    with Progress(100, 10, terminal, now_s=clock) as progress:
        for step in (20, 30):
            clock.s += 6
            progress.update(METRICS, step)
        assert "epoch 3/10  loss 0.412  41,200 samples/s  peak 6.10 GiB  0:42 left" in (
            terminal.getvalue()
        )
    assert sys.stdout is stdout
    assert terminal.getvalue().endswith("\x1b[1A\x1b[2K")  # up to the line and clear it
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1
    assert not caplog.messages


def test_a_narrow_terminal_keeps_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    clock, terminal = Clock(), Terminal()
    with Progress(100, 10, terminal, now_s=clock) as progress:
        for step in (20, 30):
            clock.s += 6
            progress.update(METRICS, step)
    assert "epoch 3/10  loss 0.412  0:42 left" in terminal.getvalue()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_interrupted_training_leaves_the_cursor_and_stdout_as_they_were(
    interruption: type[BaseException],
) -> None:
    terminal, streams = Terminal(), (sys.stdout, sys.stderr)
    with pytest.raises(interruption), Progress(100, 10, terminal) as progress:
        progress.update(METRICS, 20)
        raise interruption
    assert (sys.stdout, sys.stderr) == streams
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")


FAULTS = [
    BrokenPipeError("gone"),
    OSError(5, "Input/output error"),
    ValueError("I/O operation on closed file"),
    UnicodeEncodeError("ascii", "\u2501", 0, 1, "ordinal not in range(128)"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_terminal_that_goes_away_gets_plain_lines_and_stops_nothing(
    fault: Exception, caplog: Any
) -> None:
    clock, terminal, streams = Clock(), Terminal(), (sys.stdout, sys.stderr)
    with Progress(100, 10, terminal, now_s=clock) as progress:
        progress.update(METRICS, 20)
        terminal.fault = fault
        clock.s += 6
        progress.update(METRICS, 30)
        assert (sys.stdout, sys.stderr) == streams
        progress.update(METRICS, 40)
    assert caplog.messages[-1].startswith("epoch 4/10  loss 0.412")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_terminal_broken_from_the_start_or_at_the_end_stops_nothing(fault: Exception) -> None:
    streams = (sys.stdout, sys.stderr)
    broken = Terminal()
    broken.fault = fault
    with Progress(100, 10, broken) as progress:
        progress.update(METRICS, 20)
    late = Terminal()
    with Progress(100, 10, late) as progress:
        progress.update(METRICS, 20)
        late.fault = fault
    assert (sys.stdout, sys.stderr) == streams


def _closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [_closed, io.StringIO], ids=["closed", "a file"])
def test_what_is_no_terminal_gets_plain_lines(make: Callable[[], Any], caplog: Any) -> None:
    with Progress(100, 10, make()) as progress:
        progress.update(METRICS, 20)
    assert len(caplog.messages) == 1


def test_a_process_without_stderr_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with Progress(100, 10) as progress:
        progress.update(METRICS, 20)
    assert len(caplog.messages) == 1


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    with Progress(100, 10, terminal) as progress:
        progress.update(METRICS, 20)
    assert terminal.getvalue() == "" and len(caplog.messages) == 1


CHILD = """
import sys
from headroom.run.progress import Progress
with Progress(100, 10) as progress:
    progress.update({"train/loss": 0.412}, 20)
    print("ready", flush=True)
    sys.stdin.readline()
    progress.update({"train/loss": 0.400}, 100)
print("trained", flush=True)
"""


def test_a_real_terminal_closed_in_the_midst_does_not_stop_the_training() -> None:
    near, far = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TERM": "xterm"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=far,
        text=True,
    )
    os.close(far)
    with child:
        seen = b""
        while b"epoch 2/10" not in seen:
            seen += os.read(near, 4096)
        os.close(near)
        out, _ = child.communicate("go\n", timeout=60)
    assert out == "ready\ntrained\n" and child.returncode == 0


def test_a_stage_without_a_progress_has_a_line_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A large file was read in silence."""
    monkeypatch.setattr(progress, "LISTEN_EVERY_S", 0.01)
    monkeypatch.setattr(progress, "QUIET_S", 0.03)
    caplog.set_level(logging.INFO, logger="headroom.run.progress")
    over = threading.Event()
    progress.log_during_silence(over, lambda: None, lambda: "prepare data")
    until = time.monotonic() + 20
    while "prepare data: 0:00 so far" not in caplog.messages and time.monotonic() < until:
        time.sleep(0.01)
    over.set()
    assert "prepare data: 0:00 so far" in caplog.messages
