"""Finds a logged model in MLflow and brings its files to this machine, in a process of its
own, as everything that imports mlflow. Questions come as lines of JSON on standard input,
the answers go back on standard output, until the process that asks is done. It creates
nothing in MLflow.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import unquote, urlsplit

# As in mlflow_sender.py: MLflow's defaults wait four minutes for a server that is away.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")

import mlflow  # noqa: E402 (it reads the environment when it is imported)
from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import LoggedModel  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402

from headroom.base.units import make_printable  # noqa: E402
from headroom.tracking.answer_limits import make_client  # noqa: E402
from headroom.tracking.mlflow_store import explain_error  # noqa: E402
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings  # noqa: E402

PAGE = 50  # models asked for at once
MODEL_ID = re.compile("m-[0-9a-f]{32}")
NEWEST = [{"field_name": "creation_timestamp", "ascending": False}]


def locate_model(
    client: MlflowClient,
    where: TrackingSettings,
    run: str,
    folder: str,
    skipped: Collection[str] = (),
) -> dict[str, str]:
    """Return folder, run and id of the model that `run` names.

    It is downloaded to `folder` if need be. skipped: ids of models that latest is not.
    Raises TrackingError where there is no such model.
    """
    if run == "latest":
        model = _find_latest(client, where, skipped)
    elif run.startswith("models:/"):
        model = _find_registered_model(client, run)
    else:
        model = _find_run_model(client, run)
    data = _provide_files(model, where, folder) / "data"
    if not all((data / name).is_file() for name in ("spec.json", "weights.pt")):
        raise TrackingError(
            f"run: the model {model.model_id} of {run} was not logged by `python -m flows.train`, "
            "or its files are gone; choose another run"
        )
    return {
        "folder": str(data),
        "run_id": model.source_run_id or "",
        "model_id": model.model_id,
    }


def _find_latest(
    client: MlflowClient, where: TrackingSettings, skipped: Collection[str]
) -> LoggedModel:
    experiment = client.get_experiment_by_name(where.experiment)
    token = None
    while experiment is not None:
        page = client.search_logged_models(
            [experiment.experiment_id],
            filter_string="name = 'model'",
            max_results=PAGE,
            order_by=NEWEST,
            page_token=token,
        )
        for model in page:
            if model.model_id not in skipped and _is_whole(client, model):
                return model
        token = page.token
        if not token:
            break
    raise TrackingError(
        f"run: no finished run of the experiment {where.experiment!r} has a model; train one, or "
        "name another experiment"
    )


def _is_whole(client: MlflowClient, model: LoggedModel) -> bool:
    if not model.source_run_id:
        return False
    run = client.get_run(model.source_run_id).info
    is_kept = run.lifecycle_stage == "active" and run.status == "FINISHED"
    return is_kept and str(model.status) == "READY"


def _find_run_model(client: MlflowClient, run_id: str) -> LoggedModel:
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise TrackingError(
            f"run: MLflow has no run {run_id}; name another, or set tracking_uri in mlflow.yaml"
        ) from None
    logged = run.outputs.model_outputs if run.outputs else []
    if not logged:
        raise TrackingError(
            f"run: {run_id} ({run.info.status}) has no model; a run has one when it is FINISHED"
        )
    return client.get_logged_model(logged[-1].model_id)


def _find_registered_model(client: MlflowClient, uri: str) -> LoggedModel:
    named = uri.removeprefix("models:/")
    name, at, alias = named.partition("@")
    try:
        if at:
            version = client.get_model_version_by_alias(name, alias)
        elif "/" in named:
            name, _, number = named.partition("/")
            version = client.get_model_version(name, number)
        else:
            return client.get_logged_model(named)
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise TrackingError(f"run: MLflow has no model {uri}; register it, or name a run") from None
    named = str(version.source).removeprefix("models:/")  # its model_id is absent in databases
    if not MODEL_ID.fullmatch(named):
        raise TrackingError(f"run: {uri} is no logged model of a run; name the run itself")
    return client.get_logged_model(named)


def _provide_files(model: LoggedModel, where: TrackingSettings, folder: str) -> Path:
    """Return the model's folder, on this machine or where it was downloaded to."""
    address = urlsplit(model.artifact_location)
    if address.scheme in ("", "file") and address.netloc in ("", "localhost"):
        return Path(unquote(address.path))
    if not MODEL_ID.fullmatch(model.model_id):  # it names a folder: ../ would leave this one
        raise TrackingError(
            f"run: the server calls a model {make_printable(model.model_id, limit=60)!r}, which is "
            "no id of MLflow's; do not trust it"
        )
    from mlflow.artifacts import download_artifacts

    uri = f"models:/{model.model_id}"
    apart = f"{folder}/{model.model_id}"  # from one that was skipped
    return Path(download_artifacts(uri, dst_path=apart, tracking_uri=where.tracking_uri))


def _answer_question(question: dict[str, Any]) -> dict[str, str]:
    where = TrackingSettings(**question["where"])
    try:
        path = where.database
        if path is not None and not path.is_file():
            raise TrackingError(f"run: nothing was trained yet: there is no {path}; train first")
        # Where a model's files lie is asked there, whatever the download is given.
        mlflow.set_tracking_uri(where.tracking_uri)
        client = make_client(where.tracking_uri)
        return locate_model(client, where, question["run"], question["folder"], question["skipped"])
    except Exception as error:  # whatever it is, the process that asked has to hear of it
        return {"error": explain_error(error, where)}


def _read_questions(questions: SimpleQueue[str]) -> None:
    for line in iter(sys.stdin.readline, ""):
        questions.put(line)
    os._exit(0)  # who asked has done, or is gone; there is nothing to clear up


def main() -> None:
    """Answer the questions on standard input: where, run, folder, skipped."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is not an answer
    questions: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read_questions, args=(questions,), daemon=True).start()
    while True:
        print(json.dumps(_answer_question(json.loads(questions.get()))), file=answers, flush=True)


if __name__ == "__main__":
    main()
