"""The whole flow, in this process, on a real Prefect server and a real SQLite MLflow."""

import errno
import json
import os
import signal
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Run
from prefect.client.orchestration import get_client
from prefect.utilities.callables import parameter_schema

from flows.train import train
from headroom.data.source_data import DataError
from headroom.models import predictor
from headroom.models.builtin import build_model
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.tracking.journal import JournalError
from headroom.tracking.tracking_settings import read_tracking_settings
from headroom.watch.leaks import LeakError
from headroom.watch.oom_report import OutOfMemory
from headroom.watch.step_metrics import Diverged

pytestmark = pytest.mark.usefixtures("prefect_api", "place")
QUICK = {"train": {"epochs": 2}}


def _client() -> MlflowClient:
    return MlflowClient(read_tracking_settings().tracking_uri)


def _runs() -> list[Run]:
    client = _client()
    return client.search_runs([e.experiment_id for e in client.search_experiments()])


def _train(**sections: Any) -> dict[str, Any]:
    return train(RunConfig.model_validate(sections))


def test_a_run_on_digits_leaves_every_group_of_the_record(place: Path) -> None:
    made = _train(run={"experiment": "mine", "name": "my run"})
    client = _client()
    run = client.get_run(made["run_id"])
    metrics, tags, params = run.data.metrics, run.data.tags, run.data.params

    assert run.info.status == "FINISHED" and run.info.end_time > run.info.start_time
    assert run.info.run_name == "my run"
    assert client.get_experiment(run.info.experiment_id).name == "mine"
    assert params["optim.lr"] == "0.002" and params["data.source"] == "digits"
    assert set(params) < set(RunConfig().flat())
    assert all(params.values()) and "run.name" not in params and tags["run.name"] == "my run"
    assert not {"data.args.context", "data.args.rows", "data.args.drop", "data.args"} & set(
        params
    ), "mean nothing"

    assert tags["device"] == "cpu" and tags["device.kind"] == "cpu"
    assert tags["device.reason"].startswith("cpu")
    assert tags["torch.version"] == torch.__version__
    assert tags["precision"] == "fp32" and tags["compiled"] == "no"
    assert tags["data.residency"] == "device" and tags["data.fingerprint"]
    assert {"host", "pid", "process.started_at", "prefect.flow_run_id", "micro_batch"} <= set(tags)
    assert (
        "val/accuracy" in tags["mlflow.note.content"] or "accuracy" in tags["mlflow.note.content"]
    )

    assert metrics["val/accuracy"] >= 0.97
    assert {"train/loss", "val/loss", "train/lr", "train/grad_norm", "train/epoch"} <= set(metrics)
    assert {"speed/samples_per_s", "speed/steps_per_s"} <= set(metrics)
    stages = ("detect_device", "prepare_data", "train_model", "release_memory", "total")
    for stage in stages:
        assert 0 < metrics[f"time/{stage}_s"] <= metrics["time/total_s"]
    for phase in ("data_wait", "forward", "backward", "optimizer"):
        assert metrics[f"time/{phase}_ms"] > 0
    for part in ("first_step_s", "eval_s", "checkpoint_s", "log_s", "unaccounted_pct"):
        assert metrics[f"time/{part}"] >= 0
    assert metrics["time/unaccounted_pct"] < 30
    assert metrics["memory/parameters_mib"] > 0
    assert metrics["memory/gradients_mib"] == pytest.approx(metrics["memory/parameters_mib"])
    assert metrics["memory/optimizer_state_mib"] >= 2 * metrics["memory/parameters_mib"]
    assert metrics["memory/activations_mib"] > 0
    assert metrics["memory/host_rss_peak_mib"] >= metrics["memory/host_rss_mib"] > 0
    assert metrics["memory/release_ok"] == 1 and metrics["memory/leaked_mib"] == 0
    assert metrics["memory/released_mib"] > 3 * metrics["memory/parameters_mib"]
    assert metrics["memory/residual_mib"] == 0 and "memory/baseline_mib" in metrics
    assert 0 < metrics["memory/peak_forward_mib"] <= metrics["memory/run_peak_allocated_mib"]
    pool = {"memory/reserved_mib", "memory/free_mib", "memory/headroom_mib"}
    assert not pool & set(metrics), "a CPU has no torch.cuda pool: absent, never zero"

    for name in ("run_peak_allocated_mib", "leaked_mib", "activations_mib", "host_rss_peak_mib"):
        (point,) = client.get_metric_history(made["run_id"], f"memory/{name}")
        assert point.step == 0, f"{name}: of a later step MLflow draws a curve of one dot"
    (mean,) = client.get_metric_history(made["run_id"], "speed/samples_per_s")
    curve = client.get_metric_history(made["run_id"], "speed/recent_samples_per_s")
    assert mean.step == 0 and len(curve) > 2, "the mean of the run ended the curve"
    assert not client.get_metric_history(made["run_id"], "memory/peak_allocated_mib"), "two dots"
    (took,) = client.get_metric_history(made["run_id"], "time/total_s")
    assert took.step == 0
    trained, judged = run.inputs.dataset_inputs
    assert [i.tags[0].value for i in (trained, judged)] == ["training", "validation"]
    assert trained.dataset.name == "digits" and judged.dataset.name == "digits (val)"
    assert trained.dataset.digest == tags["data.fingerprint"]
    assert json.loads(trained.dataset.profile) == {"num_rows": 1438}
    assert "[-1, 1, 8, 8]" in trained.dataset.schema

    files = {f.path for f in client.list_artifacts(made["run_id"])}
    wanted = {"report.html", "config.yaml", "environment.txt", "device.json", "events.jsonl"}
    assert wanted | {"plots"} <= files
    plots = {f.path for f in client.list_artifacts(made["run_id"], "plots")}
    assert {"plots/loss.png", "plots/time.png", "plots/memory.png"} <= plots
    steps = [m.step for m in client.get_metric_history(made["run_id"], "train/loss")]
    assert steps == [*range(10, 461, 10)]
    (layers,) = (place / ".headroom" / "runs").glob("*/memory/layers.json")
    told = json.loads(layers.read_text())
    weights = sum(held.get("parameters", 0) for held in told["layers"].values())
    assert (
        weights == told["owners"]["parameters"] == made["metrics"]["memory/parameters_mib"] * 2**20
    )
    assert {f.path for f in client.list_artifacts(made["run_id"], "memory")} >= {
        "memory/layers.json"
    }
    (file,) = (place / ".headroom" / "runs").glob("*/device.json")
    facts = json.loads(file.read_text())
    assert facts["name"] == "cpu" and len(facts["checks"]) >= 3

    with get_client(sync_client=True) as prefect:
        reports = prefect.read_artifacts()
        flow_run = prefect.read_flow_run(tags["prefect.flow_run_id"])
    (report,) = (a for a in reports if str(a.flow_run_id) == tags["prefect.flow_run_id"])
    assert report.key == "report-my-run", "a run's id is too long for the title of a card"
    assert flow_run.name == made["name"] == "my run"
    assert flow_run.state_name == "Completed"
    assert flow_run.state is not None and report.description in str(flow_run.state.message)
    assert report.description and report.description.startswith("val/accuracy 0.")


def test_a_run_is_found_by_one_name_in_prefect_and_mlflow(place: Path) -> None:
    made = train({"data.args.rows": 100, "data.source": "synthetic"}, overrides={"train.epochs": 1})
    assert made["name"] == "mlp-synthetic rows=100 epochs=1"
    with get_client(sync_client=True) as prefect:
        flow_run = prefect.read_flow_run(made["tags"]["prefect.flow_run_id"])
    assert flow_run.name == made["name"]
    assert _client().get_run(made["run_id"]).info.run_name == made["name"]


def test_the_form_shows_the_limits_and_the_groups_and_overrides_first() -> None:
    """`prefect deploy` asks the flow's signature alone: names and limits never came to the form."""
    form = parameter_schema(train).model_dump()
    assert [
        p["title"] for p in sorted(form["properties"].values(), key=lambda p: p["position"])
    ] == [
        "overrides",
        "resume",
        "config",
    ]
    assert form["properties"]["overrides"]["type"] == "object"  # a field to type in, at once
    sections = form["properties"]["config"]["properties"]
    assert sections["optim"]["title"] == "optim"
    assert sections["optim"]["description"] == "how it learns"
    lr = sections["optim"]["properties"]["lr"]
    assert lr["title"] == "optim.lr"
    assert lr["description"] == "Peak learning rate. Above 0, at most 1,000. Default: 0.002."
    group = sections["optim"]["properties"]["groups"]["additionalProperties"]
    assert set(group["properties"]) == {"lr", "weight_decay"}
    assert "$ref" not in str(form), "no service came up: a kind within a kind was not found"


def test_the_logged_model_predicts_what_the_training_process_would(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _train(**QUICK)
    (logged,) = _client().search_logged_models([made["experiment_id"]])
    assert logged.source_run_id == made["run_id"] and logged.status == "READY"
    # mlflow.set_tracking_uri() would reach into os.environ, and the next test.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", read_tracking_settings().tracking_uri)
    loaded = mlflow.pyfunc.load_model(f"models:/{logged.model_id}")
    assert loaded.metadata.signature.inputs and loaded.metadata.signature.outputs
    example = loaded.input_example
    assert example.shape[1:] == (1, 8, 8)
    (folder,) = (place / ".headroom" / "runs").glob("*/model")
    own = predictor.load(folder)
    rows = np.random.default_rng(0).integers(0, 17, (50, 1, 8, 8)).astype(np.float32)
    assert loaded.predict(rows)["prediction"].tolist() == own.predict(rows)["prediction"].tolist()


def test_a_second_run_reuses_the_prepared_data_and_gives_the_same_bits(place: Path) -> None:
    weights = []
    for _ in range(2):
        _train(**QUICK)
    for folder in sorted((place / ".headroom" / "runs").glob("*/model")):
        weights.append(torch.load(folder / "weights.pt", weights_only=True))
    assert len(weights) == 2
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    first, second = (run.data.tags["data.fingerprint"] for run in _runs())
    assert first == second


def test_the_best_epoch_is_what_is_logged_and_what_is_doubtful_is_said(place: Path) -> None:
    """A run on noise ended with its last epoch, the worst, FINISHED and green."""
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 8)).astype(np.float32)
    y = random.normal(size=200)
    np.savez(place / "noise.npz", x=np.r_[x, x[:20]], y=np.r_[y, y[:20]])
    made = _train(
        data={"source": "npz", "path": str(place / "noise.npz"), "cache": str(place / "data")},
        optim={"lr": 0.05},
        train={"epochs": 8, "batch_size": 16},
    )
    client = _client()
    run = client.get_run(made["run_id"]).data
    history = client.get_metric_history(made["run_id"], "val/loss")
    losses = {m.step: m.value for m in sorted(history, key=lambda m: -m.timestamp)}
    assert run.metrics["val/loss"] == min(losses.values()) < losses[max(losses)]
    epoch = int(run.metrics["train/best_epoch"])
    assert losses[sorted(losses)[epoch - 1]] == min(losses.values())
    assert "are training rows too" in run.tags["warnings"]
    assert f"those of epoch {epoch} of 8" in run.tags["mlflow.note.content"]
    assert "are training rows too" in run.tags["mlflow.note.content"]
    report = Path(client.download_artifacts(made["run_id"], "report.html", str(place)))
    assert "are training rows too" in report.read_text()


def test_overrides_reach_into_sections_that_a_deployment_set() -> None:
    made = train(RunConfig(), overrides={"train.epochs": 1, "optim.lr": 0.01})
    assert made["params"]["train.epochs"] == 1 and made["params"]["optim.lr"] == 0.01


def test_a_loss_that_explodes_fails_the_run_and_gives_the_memory_back() -> None:
    with pytest.raises(Diverged, match="train.loss: became"):
        _train(optim={"lr": 1000.0, "name": "sgd"}, train={"epochs": 3, "precision": "fp32"})
    (run,) = _runs()
    assert run.info.status == "FAILED" and run.info.end_time
    assert run.data.tags["end.reason"].startswith("train.loss: became")
    assert run.data.metrics["memory/release_ok"] == 1
    assert "memory/parameters_mib" not in run.data.metrics


SMALL_CNN = {"model": {"name": "cnn", "args": {"width": 8}}, "train": {"epochs": 1}}


def test_a_run_without_memory_fails_with_its_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    # Let in, as where somebody else takes the memory after the admission.
    admitted = SimpleNamespace(
        predicted_bytes=None, source="", micro_batch=64, reason="let in", told=None, fits_graph=True
    )
    monkeypatch.setattr("headroom.training.place.admit_training", lambda *_, **__: admitted)
    with pytest.raises(OutOfMemory, match="memory ran out on cpu in the forward pass of step 1"):
        _train(**SMALL_CNN, memory={"limit_mib": 0.04})
    (run,) = _runs()
    client = _client()
    assert run.info.status == "FAILED"
    assert "raise memory.limit_mib" in run.data.tags["end.reason"]
    assert "Ran out" in run.data.tags["mlflow.note.content"]
    assert "in 1 tensors, the largest" in run.data.tags["mlflow.note.content"].replace("\\", "")
    files = {file.path for file in client.list_artifacts(run.info.run_id, "memory")}
    assert files == {"memory/oom.json", "memory/snapshot.html"}
    assert run.data.metrics["memory/release_ok"] == 1


def test_a_limited_run_is_foretold() -> None:
    _train(**SMALL_CNN, memory={"limit_mib": 4.0})
    (run,) = _runs()
    measured = run.data.metrics
    assert measured["memory/predicted_peak_mib"] == pytest.approx(
        measured["memory/run_peak_allocated_mib"], rel=0.1
    )
    assert measured["memory/ooms_recovered"] == 0


def test_a_run_starts_with_the_micro_batch_that_the_last_one_alike_ended_with() -> None:
    for _ in range(2):
        _train(**SMALL_CNN, memory={"limit_mib": 0.3})
    second, first = _runs()
    assert "by a dry step" in first.data.tags["memory.admission"]
    assert "by what runs alike have taken" in second.data.tags["memory.admission"]
    assert first.data.tags["micro_batch"] == second.data.tags["micro_batch"] != "64"
    took = first.data.metrics["memory/run_peak_allocated_mib"]
    assert second.data.metrics["memory/predicted_peak_mib"] == took


def test_an_interrupted_run_is_killed_and_gives_the_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        for _ in range(2):  # the second does not wait for the end of a step
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("headroom.training.trainer.fit_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _train(**QUICK)
    (run,) = _runs()
    assert run.info.status == "KILLED" and run.info.end_time
    assert run.data.metrics["memory/release_ok"] == 1


KEPT: list[torch.Tensor] = []


@pytest.mark.parametrize("on_leak", ["warn", "fail"])
def test_a_leak_is_found_and_its_owner_named(on_leak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def leaky(settings: Any, data: Any, device: Any) -> torch.nn.Module:
        shapes = {"input_shape": data.input_shape, "outputs": data.outputs}
        model = build_model(settings.name, args=settings.args, **shapes)
        KEPT.append(next(model.parameters()))
        return model

    monkeypatch.setattr("headroom.training.shared_model.make_model", leaky)
    try:
        if on_leak == "fail":
            with pytest.raises(LeakError, match="memory.on_leak: .* held by .*KEPT"):
                _train(**QUICK, memory={"on_leak": "fail"})
        else:
            _train(**QUICK)
        (run,) = _runs()
        assert run.info.status == ("FAILED" if on_leak == "fail" else "FINISHED")
        assert run.data.metrics["memory/release_ok"] == 0
        assert run.data.metrics["memory/leaked_mib"] > 0
        assert "KEPT" in run.data.tags["mlflow.note.content"].replace("\\", "")
    finally:
        KEPT.clear()


@pytest.mark.parametrize(
    ("sections", "kind", "message"),
    [
        ({"model": {"name": "nowhere:Net"}}, ConfigError, "model.name: there is no module nowhere"),
        ({"data": {"source": "csv", "path": "no.csv"}}, DataError, "data.path: .*no.csv"),
        ({"train": {"batch_size": 5000}}, ConfigError, "train.batch_size: must be at most the 14"),
        ({"train": {"loss": "mse"}}, ConfigError, "train.loss: mse does not fit"),
        ({"train": {"precision": "tf32"}}, ValueError, "train.precision: "),
        ({"memory": {"limit_mib": 2.0**30}}, ValueError, "memory.limit_mib: "),
        ({"device": {"name": "cuda:3"}}, ValueError, "device.name: cuda:3"),
        ({"device": {"name": "gpu"}}, ValueError, "device.name: gpu is not here"),
    ],
)
def test_what_cannot_work_is_refused_before_a_run_exists(
    sections: dict[str, Any], kind: type[Exception], message: str, place: Path
) -> None:
    with pytest.raises(kind, match=message):
        _train(**sections)
    database = place / "mlflow.db"
    assert not database.exists() or _runs() == []
    assert not list((place / ".headroom" / "runs").glob("*/"))


@pytest.mark.parametrize("what", ["a full disk", "no room at all"])
def test_a_run_whose_journal_cannot_be_kept_is_failed_with_that_reason(
    place: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A full disk ended as bad input, and the run as KILLED, without what it had measured last."""

    def failing(file: FileIO, line: bytes) -> None:
        (folder,) = (place / ".headroom" / "runs").glob("*-*")
        said = json.loads(line)
        if "begin" in said or 0 < said.get("step", 0) < 20:  # at 0 is what it leaves at its end
            file.write(line)
        elif what == "a full disk" and not (folder / "reserve").is_file():
            file.write(line)  # the room that was kept
        else:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("headroom.tracking.journal.append_line", failing)
    words = "^runs: .* can't be written .No space left on device.; make room there$"
    with pytest.raises(JournalError, match=words):
        _train(**QUICK)
    assert not issubclass(JournalError, ValueError)  # bad input, of which the exit code is 2
    (run,) = _runs()
    assert run.info.status == "FAILED"
    assert "No space left on device" in run.data.tags["end.reason"]
    assert ("memory/release_ok" in run.data.metrics) == (what == "a full disk")


def test_a_setting_given_as_an_argument_is_told_how_it_is_given() -> None:
    """It was a TypeError of a function that its user had not called."""
    with pytest.raises(ConfigError) as refused:
        train(epochs=1, lr=0.1, colour=3)
    assert str(refused.value) == (
        "train() takes config, overrides and resume, not epochs, lr, colour: settings are given by "
        "their dotted names, as in train(overrides={'train.epochs': 1, 'optim.lr': 0.1})"
    )
