"""What is refused before anything is spent is looked at once for a command."""

import pytest

from headroom.run import preflight
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    for name in ("check_data", "check_imports"):
        monkeypatch.setattr(preflight, name, lambda given, name=name: calls.append(name))
    return calls


def test_a_flow_takes_settings_that_its_command_has_checked(looked_at: list[str]) -> None:
    """Data's head was read three times for one training, and each import path was looked up."""
    config = preflight.resolve_and_check(RunConfig(), {"train.epochs": 3})
    assert looked_at == ["check_imports", "check_data"]
    with preflight.mark_checked(config):
        assert preflight.resolve_and_check(config, None) == config
        assert len(looked_at) == 2
        preflight.resolve_and_check(config, {"train.epochs": 4})  # which nobody has looked at
        assert len(looked_at) == 4
    preflight.resolve_and_check(config, None)
    assert len(looked_at) == 6


def test_a_process_of_several_without_its_number_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call from Python too, as the command is by the launcher."""
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "29400")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="^RANK: is not set, while WORLD_SIZE is 2"):
        preflight.resolve_and_check(RunConfig(), None)
