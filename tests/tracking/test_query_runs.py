"""What a comparison asks of a store that does not answer as it should: one sentence, each time."""

import gc
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient

from headroom.tracking.ask_mlflow import read_past_metrics
from headroom.tracking.query_runs import ExperimentRuns
from headroom.tracking.tracking_settings import TrackingError, read_tracking_settings


@pytest.fixture
def comparisons(place: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentRuns:
    monkeypatch.chdir(place)
    return ExperimentRuns(read_tracking_settings())


def test_a_database_that_takes_nothing_more_is_told(
    comparisons: ExperimentRuns, place: Path
) -> None:
    with closing(sqlite3.connect(place / "mlflow.db")) as opened:
        opened.execute(
            "CREATE TRIGGER full BEFORE INSERT ON runs "
            "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END"
        )
    with pytest.raises(TrackingError, match=r"^tracking_uri: .*full$"):
        comparisons.begin("", name="compare", count=2, tags={})


def test_a_run_that_is_missing_is_another_thing_than_a_server_that_is_away(
    comparisons: ExperimentRuns,
) -> None:
    with pytest.raises(TrackingError, match=r"--runs abc: no such run in .*mlflow\.db"):
        comparisons.read_runs(["abc"])
    comparisons.client = MlflowClient("http://127.0.0.1:9")
    with pytest.raises(TrackingError, match="^tracking_uri: .* is away"):
        comparisons.read_runs(["abc"])


def test_few_runs_are_read_where_few_are_wanted_and_garbage_waits(
    comparisons: ExperimentRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the last two of 1,000 all were read: 6 s, most of them spent on garbage."""
    client, asked = comparisons.client, []
    for number in range(30):
        made = client.create_run(comparisons.experiment_id, run_name=f"{number}")
        client.log_metric(made.info.run_id, "speed/samples_per_s", float(number))
    search = client.search_runs

    def count(*args, max_results: int, **named):
        asked.append((max_results, gc.isenabled()))
        return search(*args, max_results=max_results, **named)

    monkeypatch.setattr(client, "search_runs", count)
    assert [run["name"] for run in comparisons.read_newest(last=2)] == ["28", "29"]
    ((most, is_collecting),) = asked
    assert most < 30 and not is_collecting and gc.isenabled()
    with pytest.raises(TrackingError, match="--filter nonsense"):
        comparisons.read_newest(last=None, query="nonsense")
    assert gc.isenabled()


def test_the_past_is_that_of_finished_runs_alike(place: Path) -> None:
    client = MlflowClient(read_tracking_settings().tracking_uri)
    experiment = client.create_experiment(read_tracking_settings().experiment)
    for tag, status, value in (
        ("a", "FINISHED", 1.0),
        ("a", "FAILED", 2.0),
        ("b", "FINISHED", 3.0),
    ):
        run = client.create_run(experiment, tags={"alike": tag}).info.run_id
        client.log_metric(run, "memory/x_mib", value)
        client.set_terminated(run, status)
    assert read_past_metrics(read_tracking_settings(), "a", ["memory/x_mib", "memory/y_mib"]) == {
        "memory/x_mib": 1.0
    }
