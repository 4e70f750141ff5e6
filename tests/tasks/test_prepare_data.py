"""The task around preparation: facts and never arrays, and refusals in the data's own words."""

import logging
from dataclasses import replace

import pytest
from prefect.cache_policies import NO_CACHE

from headroom.data.source_data import DataError
from headroom.settings.run_config import DataConfig
from tasks.prepare_data import prepare_data


@pytest.fixture(autouse=True)
def _no_prefect_handlers(monkeypatch):
    """Prefect, once imported, warns of each line that is logged outside a flow."""
    monkeypatch.setattr(logging.getLogger("headroom"), "handlers", [])


def test_task_gives_facts_and_says_when_they_were_prepared_earlier(tmp_path):
    config = DataConfig(source="synthetic", cache=str(tmp_path), args={"rows": 60})
    facts = prepare_data.fn(config)
    assert (facts.source, facts.train_rows, facts.val_rows) == ("synthetic", 48, 12)
    assert prepare_data.fn(config) == replace(facts, reused=True)


def test_task_is_named_as_its_file_and_never_cached():
    assert (prepare_data.name, prepare_data.cache_policy) == ("prepare_data", NO_CACHE)


def test_task_refuses_data_that_is_not_there(tmp_path):
    config = DataConfig(source="csv", path=str(tmp_path / "none.csv"), cache=str(tmp_path))
    with pytest.raises(DataError, match="^data.path: .* does not exist"):
        prepare_data.fn(config)
