"""Models in the registry of MLflow: `models:/NAME@champion` always loads, and is the best."""

import threading
from pathlib import Path
from typing import Any

import mlflow
import mlflow.pyfunc
import numpy as np
import pytest
from mlflow import MlflowClient

from headroom.models import builtin, predictor
from headroom.tracking import mlflow_store
from headroom.tracking.run_sender import REGISTERED, Sender, create_run
from headroom.tracking.tracking_settings import TrackingSettings
from tests.tracking.test_model_sender import SPECS

# Of MLflow, which asks pandas for the schema of the example.
pytestmark = pytest.mark.filterwarnings("ignore:Operation with range")


def _ready(where: TrackingSettings, name: str) -> Sender:
    client, experiment = mlflow_store.open_experiment(where)
    folder = Path(where.runs) / name
    folder.mkdir(parents=True)
    model = builtin.build_model("mlp", input_shape=(2,), outputs=3, args={"hidden": [4]})
    predictor.save(model, SPECS["rows"] | {"requirements": []}, folder / "model")
    np.save(folder / "model" / "example.npy", np.zeros((2, 2), "float32"))
    return create_run(
        client, where, experiment_id=experiment, folder=folder, name=name, params={}, tags={}
    )


def _close(sender: Sender, value: float | None, *, passed: bool = True, **more: Any) -> str:
    """The end of a run with this accuracy; what became of its model."""
    asked = {"name": "it's mine", "metric": "val/accuracy", "value": value, "lower": False}
    run = {"status": "FINISHED", "name": "n", "params": {}, "tags": {}, "metrics": {}}
    sender.close({**run, "register": {**asked, "passed": passed, **more}})
    return str(sender.client.get_run(sender.state.run_id).data.tags[REGISTERED])


def _champion(where: TrackingSettings) -> str:
    """Its version, once it has been loaded and has predicted."""
    mlflow.set_tracking_uri(where.tracking_uri)
    try:
        model = mlflow.pyfunc.load_model("models:/it's mine@champion")
        assert len(model.predict({"a": [1.0], "b": [2.0]})) == 1
    finally:
        mlflow.set_tracking_uri(None)
    client = MlflowClient(where.tracking_uri)
    return str(client.get_model_version_by_alias("it's mine", "champion").version)


def test_the_champion_is_the_best_and_always_loads(where: TrackingSettings) -> None:
    """After a failed gate, a worse run, and a version that somebody deleted."""
    first = "it's mine version 1 @champion"
    assert _close(_ready(where, "a"), 0.90, passed=False) == first
    assert _champion(where) == "1"
    assert _close(_ready(where, "b"), 0.95) == "it's mine version 2 @challenger @champion"
    assert _close(_ready(where, "c"), 0.93) == "it's mine version 3 @challenger"
    assert _close(_ready(where, "d"), None) == "it's mine version 4 @challenger"
    assert _close(_ready(where, "e"), 0.99, passed=False) == "it's mine version 5"
    assert _champion(where) == "2"
    client = MlflowClient(where.tracking_uri)
    client.delete_model_version("it's mine", "2")
    assert _close(_ready(where, "f"), 0.50, passed=False) == "it's mine version 6"
    assert _champion(where) == "3"
    assert str(client.get_model_version_by_alias("it's mine", "challenger").version) == "4"


def test_two_that_end_at_once_leave_the_better_one(where: TrackingSettings) -> None:
    senders = {0.8: _ready(where, "a"), 0.9: _ready(where, "b"), 0.7: _ready(where, "c")}
    threads = [threading.Thread(target=_close, args=(s, value)) for value, s in senders.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client = MlflowClient(where.tracking_uri)
    champion = client.get_model_version_by_alias("it's mine", "champion")
    assert champion.run_id == senders[0.9].state.run_id
    _champion(where)


def test_a_run_that_is_sent_twice_is_one_version(where: TrackingSettings) -> None:
    sender = _ready(where, "a")
    assert _close(sender, 0.9) == _close(sender, 0.9).replace(" @champion", "") + " @champion"
    assert len(sender.client.search_model_versions("run_id != ''")) == 1


def test_without_a_registry_the_run_is_kept(
    where: TrackingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise NotImplementedError("this store has no registry")

    monkeypatch.setattr(MlflowClient, "create_registered_model", broken)
    sender = _ready(where, "a")
    assert _close(sender, 0.9) == "not registered as it's mine: this store has no registry"
    assert sender.client.get_run(sender.state.run_id).info.status == "FINISHED"
    assert sender.state.has_model
