"""What an MLflow server answers leads to no file outside the folder that a model is brought to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.conftest import ROOT

RUN, MODEL = "a" * 32, f"m-{'1' * 32}"
FILES = {"": ["data/"], "data": ["data/spec.json", "data/weights.pt"]}


@contextmanager
def _serve(model: str, files: dict[str, list[str]]) -> Iterator[str]:
    """A server that has one run, with one model by this id and with these files by folder."""
    info = {"run_id": RUN, "run_uuid": RUN, "experiment_id": "1", "status": "FINISHED"}
    info |= {"artifact_uri": "mlflow-artifacts:/x", "lifecycle_stage": "active"}
    logged = {"model_id": model, "experiment_id": "1", "name": "model", "source_run_id": RUN}
    logged |= {"artifact_uri": "mlflow-artifacts:/x", "status": "LOGGED_MODEL_READY"}
    logged |= {"creation_timestamp_ms": 1, "last_updated_timestamp_ms": 1}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            path, query = unquote(url.path), parse_qs(url.query).get("path", [""])[0]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(self._answer(path, query)).encode())

        def _answer(self, path: str, query: str) -> Any:
            if path.endswith("/runs/get"):
                outputs = {"model_outputs": [{"model_id": model, "step": 0}]}
                return {"run": {"info": info, "data": {}, "outputs": outputs}}
            if path.endswith("/artifacts"):
                named = files.get(query.removeprefix("x").strip("/"), [])
                found = [
                    {"path": f.rstrip("/").rpartition("/")[2] if f in FILES["data"] else f}
                    for f in named
                ]
                for one, name in zip(found, named, strict=True):
                    one |= {"is_dir": name.endswith("/"), "file_size": 2}
                    one["path"] = one["path"].rstrip("/")
                return {"files": found}
            return {} if "/artifacts/" in path else {"model": {"info": logged}}

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _find(uri: str, place: Path) -> dict[str, str]:
    """Ask for the run's model as `flows.predict` does where mlflow.yaml alone names the server."""
    (place / "one" / "two").mkdir(parents=True)
    where = {"tracking_uri": uri, "experiment": "mine"}
    question = {"where": where, "run": RUN, "folder": str(place / "one" / "two"), "skipped": []}
    env = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    with subprocess.Popen(
        [sys.executable, "-m", "headroom.tracking.model_finder"],
        env={**env, "PYTHONPATH": str(ROOT), "TESTS_COLD": "1"},
        cwd=place,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as asked:
        assert asked.stdin and asked.stdout
        asked.stdin.write(json.dumps(question) + "\n")
        asked.stdin.flush()
        return json.loads(asked.stdout.readline())  # it ends once nothing more can come


def test_a_model_is_brought_from_a_server_that_mlflow_yaml_names(tmp_path: Path) -> None:
    """Without MLFLOW_TRACKING_URI a new database was asked where its files lie."""
    with _serve(MODEL, FILES) as uri:
        found = _find(uri, tmp_path)
    assert "error" not in found, found
    assert (Path(found["folder"]) / "weights.pt").is_file()
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize(
    ("model", "name", "says"),
    [
        ("../../escaped", "MLmodel", "no id of MLflow's"),
        ("m-1/../../../escaped", "MLmodel", "no id of MLflow's"),
        (MODEL, "../../../escaped", "Invalid path"),
        (MODEL, "/tmp/escaped", "Invalid path"),
        (MODEL, "%2e%2e/%2e%2e/escaped", "Invalid path"),
    ],
)
def test_a_name_of_a_server_leads_out_of_no_folder(
    tmp_path: Path, model: str, name: str, says: str
) -> None:
    """An id with ../ made a folder beside the one that it was to be brought to."""
    with _serve(model, {"": [name]}) as uri:
        found = _find(uri, tmp_path)
    assert says in found["error"]
    assert not [file for file in tmp_path.rglob("*escaped*")]
    assert {file.name for file in tmp_path.iterdir()} == {"one"}
