"""How long a training may go on, by clocks that somebody sets and that go back once a year."""

import math
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.training.loop import TimeBudget, compute_end_time


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
        ("2026-03-29 00:30", "02:30", "2026-03-29 01:00"),  # there is none: it is 03:00
        ("2026-03-29 01:10", "02:30", "2026-03-30 00:30"),  # at 03:10 it is over
        ("2026-06-01 20:00", "06:30", "2026-06-02 04:30"),
    ],
)
def test_the_end_is_the_next_time_that_the_clock_shows_it(now: str, until: str, end: str) -> None:
    """In the hour that comes twice it had passed, an hour ago: the training ended at once."""
    assert compute_end_time(until, _utc(now)) == _utc(end)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
@pytest.mark.parametrize("season", [3, 10])
def test_the_end_is_where_a_clock_that_is_watched_reaches_it(
    monkeypatch: pytest.MonkeyPatch, zone: str, season: int
) -> None:
    """At 03:10 in the night of spring 02:30 was yet to come, in 20 minutes; Lord Howe's clocks are
    moved by half an hour."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    begin = datetime(2026, season, 1, tzinfo=UTC)
    minutes = [begin + timedelta(minutes=n) for n in range(46 * 24 * 60)]
    shown = [at.astimezone(ZoneInfo(zone)).replace(tzinfo=None) for at in minutes]
    moved = [n for n in range(1, len(shown)) if shown[n] - shown[n - 1] != timedelta(minutes=1)]
    assert len(moved) == 1
    for now in range(moved[0] - 180, moved[0] + 180, 7):
        for until in (f"{hour:02}:{minute:02}" for hour in (1, 2, 3) for minute in (0, 20, 30)):
            sought = datetime.strptime(until, "%H:%M").time()
            reached = (
                n
                for n in range(now + 1, len(shown))
                if shown[n].time() == sought
                or (shown[n - 1].time() < sought < shown[n].time())  # passed over
            )
            found = compute_end_time(until, minutes[now].timestamp())
            assert found == minutes[next(reached)].timestamp(), (until, shown[now])


@pytest.mark.parametrize(
    ("end", "now"),
    [
        ("2026-10-25 02:45", "2026-10-25 01:46"),
        ("2026-03-29 02:30", "2026-03-29 01:10"),
    ],
)
def test_a_date_that_has_passed_is_refused(end: str, now: str) -> None:
    with pytest.raises(ConfigError, match=f"^train.end: {end} has passed"):
        compute_end_time(end, _utc(now))


def test_seconds_are_counted_though_the_clock_is_set() -> None:
    """A clock that was set back by an hour gave each night an hour more, and one that was set
    forward ended it at once."""
    passed_s, now_s = [100.0], [_utc("2026-06-01 20:00")]
    clocks = {"passed_s": lambda: passed_s[0], "now_s": lambda: now_s[0]}
    counted = TimeBudget(RunConfig(train={"end": "1min"}).train, lambda: None, **clocks)
    shown = TimeBudget(RunConfig(train={"end": "06:30"}).train, lambda: None, **clocks)
    for now_s[0] in (_utc("2026-06-01 19:00"), _utc("2026-06-02 03:00")):
        assert counted() is None and shown() is None
    assert counted.compute_left_s() == 60 and shown.compute_left_s() == 90 * 60
    assert TimeBudget(RunConfig().train, lambda: None).compute_left_s() == math.inf
    passed_s[0] += 60
    stop = counted()
    assert stop is not None and stop.reason == "train.end: 1min are over" and shown() is None
    now_s[0] = _utc("2026-06-02 04:30")
    stop = shown()
    assert stop is not None and stop.reason == "train.end: it is 06:30"
