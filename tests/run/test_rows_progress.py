"""The line of a prediction tells rows, speed and time left, on a terminal and off it."""

import io
import logging

import pytest

from headroom.run.progress import RowsProgress


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_last_line_tells_rows_speed_and_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = _Clock()
    with (
        caplog.at_level(logging.INFO, logger="headroom"),
        RowsProgress(1000, io.StringIO(), now_s=clock) as progress,
    ):
        clock.now_s = 2.0
        progress.show_rows(500, 1000)
    assert caplog.messages == ["500 rows  250 rows/s  2.00 s"]


def test_off_a_terminal_a_long_prediction_is_told_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = _Clock()
    with (
        caplog.at_level(logging.INFO, logger="headroom"),
        RowsProgress(100, io.StringIO(), now_s=clock) as progress,
    ):
        for percent in range(1, 101):
            clock.now_s += 1.0
            progress.show_rows(10 * percent, percent)
    assert 15 <= len(caplog.messages) <= 21
    assert caplog.messages[0] == "50 rows  10 rows/s  1:35 left"
    assert (
        caplog.messages[-1] == "1,000 rows  10 rows/s  100 s"
        or "1 min 40 s" in (caplog.messages[-1])
    )


def test_a_narrow_terminal_gets_less_of_it() -> None:
    progress = RowsProgress(100, io.StringIO(), now_s=_Clock())
    with progress:
        progress.show_rows(50, 50)
        assert progress._make_line(10.0) == "50 rows  5 rows/s  0:10 left"
        assert progress._make_line(10.0, columns=20) == "50 rows  5 rows/s"
        assert progress._make_line(10.0, columns=3) == "50 rows"


def test_nothing_to_do_is_over_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="headroom"),
        RowsProgress(0, io.StringIO(), now_s=_Clock()) as progress,
    ):
        progress.show_rows(0, 0)
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("0 rows")
