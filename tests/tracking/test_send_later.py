"""A run that has ended and of which MLflow has not got all: it says so wherever one looks, and what
is missing is sent without another run, by one process that stays."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from headroom.base.file_lock import FileLock
from headroom.run.known_runs import list_known_runs
from headroom.tracking import send_later
from headroom.tracking.journal import Journal
from headroom.tracking.left_folders import find_left_folders
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings
from tests.run_folders import is_held, write_end, write_start

GONE = {"host": socket.gethostname(), "pid": "4194304", "process.started_at": "1.0"}
END = {"status": "FINISHED", "name": "n", "params": {}, "tags": {}, "metrics": {}}


@pytest.fixture(autouse=True)
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_LEASES", str(tmp_path / "leases"))


def _until(what: Callable[[], object], *, timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


@pytest.mark.timeout(300)
def test_a_run_whose_files_were_not_sent_says_so_until_they_are_and_no_other_run_is_needed(
    where: TrackingSettings,
) -> None:
    """With the S3 store dead five runs were FINISHED without a model; a worker's log alone knew."""
    where = where.model_copy(update={"give_up_s": 0.2, "flush_s": 0.1, "send_later_s": 300})
    runs, store = Path(where.runs), Path(where.artifacts)
    store.write_text("no folder: nothing can be kept here")
    folder = runs / "20260101-000000-one"
    tags = {**GONE, "prefect.flow_run_id": "mine"}
    with Journal(where, folder) as journal:
        journal.open(None)
        journal.create(name="one", params={}, tags=tags)
        write_start(folder, journal.run_id, experiment_id=journal.experiment_id)
        journal.log({"train/loss": 0.5}, 1)
        with pytest.raises(TrackingError):
            journal.close({**END, "tags": tags})
    client = MlflowClient(where.tracking_uri)
    run = client.get_run(journal.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["unsent"].startswith(f"part of it is not in MLflow yet, but in {folder}: ")
    (known,) = list_known_runs(runs)
    assert (known.state, known.unsent) == ("FINISHED", run.data.tags["unsent"])
    assert json.loads((folder / "sent.json").read_text())["unsent"] == known.unsent

    _until(lambda: is_held(runs / send_later.STAYS))
    store.unlink()
    _until(lambda: json.loads((folder / "sent.json").read_text())["closed"])
    tags = client.get_run(journal.run_id).data.tags
    assert "unsent" not in tags
    assert "report.html" in {file.path for file in client.list_artifacts(journal.run_id)}
    assert list_known_runs(runs)[0].unsent == ""
    _until(lambda: not is_held(runs / send_later.STAYS))  # it leaves


def _kept(runs: Path, name: str, *, closed: bool) -> Path:
    (runs / name).mkdir(parents=True)
    write_end(runs / name, END, is_sent=closed)
    return runs / name


def test_what_nobody_sends_is_found_and_what_somebody_does_is_left(tmp_path: Path) -> None:
    left, training, sending = (_kept(tmp_path, name, closed=False) for name in "abc")
    whole, untold = (_kept(tmp_path, name, closed=True) for name in "de")
    write_end(untold, END)  # it went on since
    locks = [FileLock(training / "training.lock"), FileLock(sending / "sending.lock")]
    assert all(lock.take() for lock in locks)
    assert [*find_left_folders(tmp_path)] == [left, untold] and whole.is_dir()
    assert send_later.is_needed(tmp_path)
    with FileLock(tmp_path / send_later.STAYS) as stays:
        assert stays.take() and not send_later.is_needed(tmp_path)
    for lock in locks:
        lock.close()
    assert [*find_left_folders(tmp_path)] == [left, training, sending, untold]


def test_who_stays_is_taken_for_neither_the_flow_run_nor_a_part_of_a_service() -> None:
    """Its flow run would be shown as running for as long as it stays."""
    given = {"PREFECT__FLOW_RUN_ID": "a", "HEADROOM_SERVE_PART": "worker x", "HEADROOM_SERVE": "m"}
    env = send_later.make_environment({**os.environ, **given})
    assert env["HEADROOM_SERVE"] == "m" and not set(given) - {"HEADROOM_SERVE"} & env.keys()
