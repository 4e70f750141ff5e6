"""A logged model is found by every name that MLflow gives it, and nothing else is taken for one."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlflow
import numpy as np
import pytest
from mlflow import MlflowClient

from headroom.base.facts import ModelFacts
from headroom.data.source_data import DataError
from headroom.models import builtin, predictor
from headroom.tracking import ask_mlflow, mlflow_store, model_finder, model_sender
from headroom.tracking.run_sender import SendingState
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings
from tests.tracking.test_model_sender import SPECS

ROOT = Path(__file__).parent.parent.parent
SPEC = {**SPECS["rows"], "feature_names": None}


@dataclass(frozen=True)
class Store:
    """Runs by name: old and new are FINISHED with a model, deleted was too; bare has none."""

    where: TrackingSettings
    client: MlflowClient
    runs: dict[str, str]
    models: dict[str, str]

    def found(self, run: str) -> dict[str, str]:
        return model_finder.locate_model(self.client, self.where, run, "unused")

    def refused(self, run: str, where: TrackingSettings | None = None) -> str:
        with pytest.raises(TrackingError) as caught:
            model_finder.locate_model(self.client, where or self.where, run, "unused")
        return str(caught.value)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("store")
    where = TrackingSettings(
        tracking_uri=f"sqlite:///{folder}/mlflow.db", artifacts=f"{folder}/a rt", experiment="mine"
    )
    spec = SPEC
    model = builtin.build_model(
        spec["model"], input_shape=spec["input_shape"], outputs=spec["outputs"], args=spec["args"]
    )
    predictor.save(model, spec, folder / "model")
    np.save(folder / "model" / "example.npy", np.zeros((2, 2), np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", where.tracking_uri)
        client, experiment_id = mlflow_store.open_experiment(where)
        runs, ids = {}, {}
        for name in ("old", "new", "deleted", "failed", "bare"):
            runs[name] = client.create_run(experiment_id).info.run_id
            if name != "bare":
                state = SendingState(runs[name], experiment_id)
                state.model_id = model_sender.create_model(client, state, folder)
                model_sender.send_model_files(client, state, folder)
                run = client.get_run(runs[name])
                ids[name] = run.outputs.model_outputs[0].model_id
            client.set_terminated(runs[name], "FAILED" if name == "failed" else "FINISHED")
        client.delete_run(runs["deleted"])
        yield Store(where, client, runs, ids)


def test_latest_is_the_newest_finished_run_that_has_a_model(store: Store) -> None:
    found = store.found("latest")
    assert found["run_id"] == store.runs["new"] and found["model_id"] == store.models["new"]
    assert json.loads((Path(found["folder"]) / "spec.json").read_text()) == SPEC


def test_a_run_and_a_model_are_found_by_their_ids(store: Store) -> None:
    assert store.found(store.runs["old"])["model_id"] == store.models["old"]
    assert store.found(f"models:/{store.models['old']}")["run_id"] == store.runs["old"]


def test_a_registered_model_is_found_by_alias_and_version(store: Store) -> None:
    for name in ("new", "old"):
        mlflow.register_model(f"models:/{store.models[name]}", "my churn")
    store.client.set_registered_model_alias("my churn", "best", "1")
    assert store.found("models:/my churn@best")["run_id"] == store.runs["new"]
    assert store.found("models:/my churn/2")["run_id"] == store.runs["old"]
    assert store.refused("models:/my churn/3").startswith("run: MLflow has no model models:/my")
    assert store.refused("models:/my churn@x").startswith("run: MLflow has no model models:/my")


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("0" * 32, f"run: MLflow has no run {'0' * 32}; name another"),
        ("models:/none@x", "run: MLflow has no model models:/none@x; register it"),
        ("models:/none/1", "run: MLflow has no model models:/none/1; register it"),
        (f"models:/m-{'0' * 32}", "run: MLflow has no model models:/m-0000"),
    ],
)
def test_what_is_not_there_is_one_sentence(store: Store, run: str, said: str) -> None:
    assert store.refused(run).startswith(said)


def test_a_run_without_a_model_says_how_it_ended(store: Store) -> None:
    run_id = store.runs["bare"]
    assert store.refused(run_id).startswith(f"run: {run_id} (FINISHED) has no model; a run has")


def test_an_experiment_without_a_model_is_named(store: Store) -> None:
    other = store.where.model_copy(update={"experiment": "other"})
    assert "run of the experiment 'other' has a model; train one" in store.refused("latest", other)
    store.client.create_experiment("other")
    assert "run of the experiment 'other' has a model; train one" in store.refused("latest", other)


def test_somebody_elses_model_is_not_loaded(store: Store, tmp_path: Path) -> None:
    """Its files may be pickles, which would run when loaded."""
    experiment = store.client.get_experiment_by_name("mine").experiment_id
    foreign = store.client.create_logged_model(experiment, name="foreign")
    (tmp_path / "model.pkl").write_bytes(b"x")
    store.client.log_model_artifacts(foreign.model_id, str(tmp_path))
    store.client.finalize_logged_model(foreign.model_id, "READY")
    said = store.refused(f"models:/{foreign.model_id}")
    assert "was not logged by `python -m flows.train`, or its files are gone" in said


def test_the_answer_comes_from_a_process_of_its_own(store: Store, tmp_path: Path) -> None:
    ask_mlflow.warm_up()
    found = ask_mlflow.find_logged_model(store.runs["old"], store.where, folder=tmp_path)
    assert found.model_id == store.models["old"]
    with pytest.raises(TrackingError, match="^run: MLflow has no run 0000"):
        ask_mlflow.find_logged_model("0" * 32, store.where, folder=tmp_path)


def test_latest_is_the_newest_that_fits_the_rows_and_says_what_it_skipped(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest was taken, whatever it was trained on."""

    def check(model: ModelFacts) -> None:
        if model.run_id != store.runs["old"]:
            raise DataError("input: rows.csv has no column 'a'\ninput: nor 'b'")

    with caplog.at_level(logging.INFO):
        found = ask_mlflow.find_logged_model("latest", store.where, folder=tmp_path, check=check)
    new, old = store.runs["new"], store.runs["old"]
    assert found.run_id == old and caplog.messages == [
        f"latest: run {new} does not fit these rows and is skipped: input: rows.csv has no column "
        "'a'",
        f"latest: run {old}, model {store.models['old']}",
    ]
    with pytest.raises(DataError, match="^input: of new\nrun: none of the 2 newest models fits"):
        ask_mlflow.find_logged_model("latest", store.where, folder=tmp_path, check=_refuses(store))


def _refuses(store: Store) -> Callable[[ModelFacts], None]:
    names = {run_id: name for name, run_id in store.runs.items()}

    def check(model: ModelFacts) -> None:
        raise DataError(f"input: of {names[model.run_id]}")

    return check


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    where = TrackingSettings(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(TrackingError, match="^run: nothing was trained yet: there is no .*mlflow"):
        ask_mlflow.find_logged_model("latest", where, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_process_that_answers_ends_with_the_one_that_asks() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "headroom.tracking.model_finder"],
        stdin=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 0
