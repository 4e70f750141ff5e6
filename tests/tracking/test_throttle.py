"""A process beside a training works while a core is idle, and hardly where none is."""

import pytest

from headroom.tracking.run_sender import SHARE, Throttle


class Machine:
    """Its clock, and how many of its cores are idle."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.idle_s = 5000.0

    def pass_by(self, seconds: float, *, idle_cores: float) -> None:
        self.now_s += seconds
        self.idle_s += seconds * idle_cores


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def pace(machine: Machine) -> Throttle:
    return Throttle(now_s=lambda: machine.now_s, idle_s=lambda: machine.idle_s)


def test_while_a_core_is_idle_there_is_no_limit(machine: Machine, pace: Throttle) -> None:
    for _ in range(10):
        pace.record_work(5.0)
        machine.pass_by(2.0, idle_cores=0.9)
        assert pace.may_work() and pace.has_spare


def test_where_none_is_it_takes_a_small_share_of_one(machine: Machine, pace: Throttle) -> None:
    worked_s = 0.0
    for _ in range(10_000):
        machine.pass_by(0.6, idle_cores=0.1)
        if pace.may_work():
            assert not pace.has_spare
            worked_s += 0.01
            pace.record_work(0.01)
    assert worked_s == pytest.approx(6_000 * SHARE, rel=0.25)


def test_a_core_that_becomes_idle_ends_the_rest(machine: Machine, pace: Throttle) -> None:
    machine.pass_by(1.0, idle_cores=0.0)
    pace.record_work(1.0)
    assert not pace.may_work()
    machine.pass_by(1.0, idle_cores=1.5)
    assert pace.may_work()
    machine.pass_by(1.0, idle_cores=0.2)
    assert not pace.may_work()


def test_a_short_while_tells_nothing_of_idle_cores(machine: Machine, pace: Throttle) -> None:
    machine.pass_by(1.0, idle_cores=2.0)
    assert pace.may_work() and pace.has_spare
    machine.pass_by(0.05, idle_cores=0.0)
    assert pace.may_work() and pace.has_spare


def test_this_machine_says_how_long_it_was_idle() -> None:
    assert isinstance(Throttle().may_work(), bool)
