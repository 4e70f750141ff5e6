"""How long a training may go on, by clocks that somebody sets and that go back once a year."""

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from tasks.engine.settings.read_settings import ConfigError
from tasks.engine.settings.run_config import TrainConfig
from tasks.engine.training.loop import TimeBudget, compute_end_time


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where clocks show 02:00 to 02:59 twice on 2026-10-25 and never on 2026-03-29."""
    with monkeypatch.context() as patch:
        patch.setitem(os.environ, "TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


def _utc(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("now", "until", "end"),
    [
        ("2026-10-25 00:30", "02:45", "2026-10-25 00:45"),  # 02:30 for the first time
        ("2026-10-25 01:30", "02:45", "2026-10-25 01:45"),  # for the second time
        ("2026-10-25 00:50", "02:45", "2026-10-25 01:45"),  # between them
        ("2026-10-25 01:50", "02:45", "2026-10-26 01:45"),
        ("2026-10-25 01:30", "2026-10-25 02:45", "2026-10-25 01:45"),
        ("2026-10-25 00:30", "06:30", "2026-10-25 05:30"),
        ("2026-03-29 00:30", "02:30", "2026-03-29 01:30"),  # there is none: 03:30
        ("2026-06-01 20:00", "06:30", "2026-06-02 04:30"),
    ],
)
def test_until_is_the_next_time_that_the_clock_shows_it(now: str, until: str, end: str) -> None:
    """In the hour that comes twice it had passed, an hour ago: the training ended at once."""
    assert compute_end_time(until, _utc(now)) == _utc(end)


def test_a_date_that_has_passed_is_refused() -> None:
    with pytest.raises(ConfigError, match="^train.until: 2026-10-25 02:45 has passed"):
        compute_end_time("2026-10-25 02:45", _utc("2026-10-25 01:46"))


def test_seconds_are_counted_though_the_clock_is_set() -> None:
    """A clock that was set back by an hour gave each night an hour more, and one that was set
    forward ended it at once."""
    passed_s, now_s = [100.0], [_utc("2026-06-01 20:00")]
    clocks = {"passed_s": lambda: passed_s[0], "now_s": lambda: now_s[0]}
    budget = TimeBudget(TrainConfig(max_s=60, until="06:30"), lambda: None, **clocks)
    for now_s[0] in (_utc("2026-06-01 19:00"), _utc("2026-06-02 03:00")):
        assert budget() is None
    passed_s[0] += 60
    stop = budget()
    assert stop is not None and stop.reason == "train.max_s: 60.0 s are over"
    passed_s[0] -= 60
    now_s[0] = _utc("2026-06-02 04:30")
    stop = budget()
    assert stop is not None and stop.reason == "train.until: it is 06:30"
