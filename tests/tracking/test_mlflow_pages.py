"""The view of the experiment that our addresses open: written once, and never in anybody's way."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from headroom.tracking import mlflow_pages
from headroom.tracking.mlflow_store import open_experiment
from headroom.tracking.tracking_settings import read_tracking_settings

ANOTHER = "mlflow.sharedViewState.5f2c"


def _tags() -> dict[str, str]:
    client, experiment_id = open_experiment(read_tracking_settings())
    return dict(client.get_experiment(experiment_id).tags)


def test_the_address_of_the_runs_names_a_view_that_is_there(place: Path) -> None:
    _, _, key = mlflow_pages.make_experiment_path("1").partition("viewStateShareKey=")
    saved = json.loads(_tags()[f"mlflow.sharedViewState.{key}"])
    kind, _, packed = saved["state"].partition(";")
    state = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert (saved["name"], kind) == ("Headroom", "deflate")
    assert "tags.`device`" in state["selectedColumns"]
    assert [card.get("metricKey") for card in state["compareRunCharts"]][:2] == [
        "train/loss",
        "val/loss",
    ]
    sections = {section["uuid"] for section in state["compareRunSections"]}
    assert {card["metricSectionId"] for card in state["compareRunCharts"]} <= sections


def test_the_view_is_written_once_and_a_persons_own_views_are_left_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, experiment_id = open_experiment(read_tracking_settings())
    client.set_experiment_tag(experiment_id, ANOTHER, "mine")
    before = _tags()
    monkeypatch.setattr(MlflowClient, "set_experiment_tag", None)
    assert _tags() == before and before[ANOTHER] == "mine"


def test_an_experiment_of_an_older_version_gets_the_view_too(place: Path) -> None:
    client, experiment_id = open_experiment(read_tracking_settings())
    client.set_experiment_tag(experiment_id, mlflow_pages.VIEW_TAG, "that of before")
    assert _tags()[mlflow_pages.VIEW_TAG] == mlflow_pages.make_view_tag()


def test_a_server_that_refuses_tags_of_experiments_takes_runs_all_the_same(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise MlflowException("not allowed")

    monkeypatch.setattr(MlflowClient, "set_experiment_tag", refuse)
    client, experiment_id = open_experiment(read_tracking_settings())
    assert client.create_run(experiment_id).info.status == "RUNNING"
    assert "not allowed" in capsys.readouterr().err


def test_the_list_shows_the_runs_of_a_comparison_as_rows_and_the_settings_that_vary() -> None:
    """Sorted as MLflow does it by itself, twelve trainings were one closed row of dashes."""
    state = _unpack(mlflow_pages.make_view_tag())
    assert state["orderByKey"] not in ("", "attributes.start_time"), "that one nests children"
    assert {"params.`optim.lr`", "params.`train.batch_size`", "tags.`warnings`"} <= {
        *state["selectedColumns"]
    }
    assert "duration" in state["columnOrder"]


def test_a_comparison_has_a_view_of_its_own_that_its_address_names() -> None:
    """The address opened the page of the run that holds the others, which had no figure."""
    view = mlflow_pages.ComparisonView(
        "b7707186d6be4382" * 2, "mine", ["optim.lr"], "val/loss", True, is_grouped=True
    )
    key, value = view.make_tag()
    path = mlflow_pages.make_comparison_path("1", view.run_id)
    assert f"viewStateShareKey={key.removeprefix(mlflow_pages.VIEWS)}&" in path
    assert re.fullmatch("of-[0-9a-f]{8}", key.removeprefix(mlflow_pages.VIEWS)), "as no secret is"
    state = _unpack(value)
    assert view.run_id in state["searchFilter"]
    assert (state["orderByKey"], state["orderByAsc"]) == ("metrics.`val/loss`", True)
    assert state["groupBy"]["groupByKeys"] == [{"mode": "param", "groupByData": "optim.lr"}]
    assert len(value) < 5000, "more MLflow refuses"


def test_the_oldest_views_of_comparisons_go_and_no_others() -> None:
    many = {
        f"{mlflow_pages.VIEWS}{mlflow_pages.COMPARISONS}{i}": json.dumps({"createdAt": i})
        for i in range(mlflow_pages.MOST_COMPARISONS + 2)
    }
    old = mlflow_pages.find_old_comparisons({**many, ANOTHER: "mine", mlflow_pages.VIEW_TAG: ""})
    assert old == [*many][:2]


def _unpack(value: str) -> dict[str, Any]:
    packed = json.loads(value)["state"].partition(";")[2]
    state: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return state
