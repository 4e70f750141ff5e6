"""The view of the experiment that our addresses open: written once, and never in anybody's way."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from tasks.tracking import mlflow_pages
from tasks.tracking.mlflow_store import open_experiment
from tasks.tracking.tracking_settings import read_tracking_settings

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
