"""The task that gives memory back: what it returns, says and raises."""

import logging
import pickle
from dataclasses import replace

import pytest
import torch
from prefect.cache_policies import NO_CACHE
from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

from headroom.device.detection import detect_best_device
from headroom.watch.leaks import LeakError, take_baseline
from tasks.release_memory import release_memory

KEPT = []
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_stays():
    with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}):
        yield
    KEPT.clear()


@pytest.fixture
def before():
    return take_baseline(CPU).bytes


def release(before, on_leak="fail"):
    return release_memory.fn(
        replace(detect_best_device("cpu"), baseline_bytes=before), on_leak=on_leak
    )


def test_its_arguments_are_never_hashed_for_a_cache():
    assert release_memory.cache_policy == NO_CACHE


def test_a_clean_release_returns_its_facts_and_says_nothing(before, caplog):
    with caplog.at_level(logging.INFO):
        facts = release(before)
    assert facts.ok
    assert caplog.records == []


def test_fail_raises_the_owners_with_rule_value_and_remedy(before):
    KEPT.append(torch.ones(3, 1024, 1024))
    with pytest.raises(LeakError) as caught:
        release(before)
    assert str(caught.value) == (
        "memory.on_leak: 12.0 MiB were not given back: Tensor (3, 1024, 1024) float32, held by "
        f"list in module {__name__}, name 'KEPT'. Let go of it there, or set memory.on_leak to warn"
    )
    assert caught.value.facts.leaked_bytes == 12 * 2**20


def test_warn_logs_the_owners_once(before, caplog):
    KEPT.extend(torch.ones(4) for _ in range(5))
    facts = release(before, on_leak="warn")
    assert not facts.ok
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert facts.owners[0].held_by in record.getMessage()
    assert record.getMessage().startswith(
        "memory.on_leak: 80 bytes were not given back: Tensor (4,)"
    )
    assert record.getMessage().endswith("; and 2 more")


def test_a_leak_error_keeps_no_tensor(before):
    KEPT.append(torch.ones(4))
    with pytest.raises(LeakError) as caught:
        release(before)
    KEPT.clear()
    assert release(before).ok
    assert caught.value.__traceback__ is not None


def test_a_leak_error_survives_being_stored(before):
    KEPT.append(torch.ones(4))
    with pytest.raises(LeakError) as caught:
        release(before)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.facts == caught.value.facts
    assert str(again) == str(caught.value)


def test_a_broken_device_is_told_and_hides_no_reason(monkeypatch, caplog):
    """The device's own error took the place of the one that had ended the run."""
    monkeypatch.setattr("headroom.watch.leaks.is_broken", lambda device: True)
    with caplog.at_level(logging.WARNING):
        facts = release(0, on_leak="fail")
    assert not facts.ok and facts.broken == caplog.messages[0]
    assert "cpu answers nothing but errors" in facts.broken
