"""Runs that were left behind by a process or by a store that failed, on a real SQLite MLflow."""

import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from headroom.models import builtin, predictor
from headroom.run.known_runs import list_known_runs
from headroom.tracking import orphaned_runs, run_sender
from headroom.tracking.journal import Journal, RunGone
from headroom.tracking.mlflow_store import open_experiment
from headroom.tracking.tracking_settings import TrackingSettings
from tests.run_folders import (
    LOG,
    SENDING_LOCK,
    append_lines,
    is_sent,
    make_event,
    make_line,
    read_end,
    write_start,
)
from tests.tracking.conftest import send_left
from tests.tracking.test_model_sender import SPECS

END = {"status": "FINISHED", "name": "n", "params": {}, "tags": {}, "metrics": {}}
# A training whose store takes its end, and neither its metrics nor anything after them.
UNLUCKY = """
import json, sqlite3, sys
from pathlib import Path
from headroom.tracking.journal import Journal, RunGone
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings
where = TrackingSettings.model_validate_json(sys.argv[1])
with Journal(where, Path(where.runs) / "unlucky") as journal:
    journal.open(None)
    journal.create(name="unlucky", params={}, tags=json.loads(sys.argv[2]))
    with sqlite3.connect(where.database) as broken:
        broken.execute("ALTER TABLE metrics RENAME TO gone")
    journal.log({"train/loss": 0.5}, 1)
    try:
        journal.close(json.loads(sys.argv[3]))
    except TrackingError:
        print(journal.run_id)
"""


@pytest.fixture
def where(where: TrackingSettings) -> TrackingSettings:
    return where.model_copy(update={"give_up_s": 0.1, "send_later_s": 0})


def _left(where: TrackingSettings, host: str) -> tuple[MlflowClient, str, Path]:
    """A run that MLflow calls FINISHED and knows nothing else of; the store works again."""
    tags = {"host": host, "pid": "4194304", "process.started_at": "1.0"}
    command = [sys.executable, "-c", UNLUCKY, where.model_dump_json()]
    command += [json.dumps(tags), json.dumps(END)]
    warm = {**os.environ, "TESTS_WARM_KIND": "mlflow"}
    done = subprocess.run(command, env=warm, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    folder = Path(where.runs) / "unlucky"
    # Its sending process tries once more when the training has gone, and then lets the lock go.
    with open(folder / SENDING_LOCK) as lock:
        flock(lock, LOCK_EX)
    with closing(sqlite3.connect(str(where.database))) as mended, mended:
        mended.execute("ALTER TABLE gone RENAME TO metrics")
    client, run_id = MlflowClient(where.tracking_uri), done.stdout.strip()
    run = client.get_run(run_id)
    assert (run.info.status, run.data.metrics) == ("FINISHED", {})
    return client, run_id, folder


def test_what_an_earlier_run_could_not_send_is_sent_by_the_next(where: TrackingSettings) -> None:
    client, run_id, folder = _left(where, socket.gethostname())
    with Journal(where, Path(where.runs) / "next") as journal:
        journal.open(None)
        journal.create(name="next", params={}, tags={})
        journal.close(END)
    until = time.monotonic() + 60
    while not json.loads((folder / "sent.json").read_text())["closed"]:
        assert time.monotonic() < until
        time.sleep(0.1)
    run = client.get_run(run_id)
    assert (run.info.status, run.data.metrics["train/loss"]) == ("FINISHED", 0.5)
    assert "report.html" in {file.path for file in client.list_artifacts(run_id)}
    assert SENDING_LOCK not in {file.path for file in client.list_artifacts(run_id)}


def test_a_run_of_another_host_is_left_to_it(where: TrackingSettings) -> None:
    client, run_id, _ = _left(where, "elsewhere")
    send_left(client, where)
    assert client.get_run(run_id).data.metrics == {}


def test_two_do_not_send_one_folder(where: TrackingSettings) -> None:
    client, run_id, folder = _left(where, socket.gethostname())
    command = [sys.executable, "-m", "headroom.tracking.mlflow_sender", str(folder)]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": where.tracking_uri}
    with open(folder / SENDING_LOCK) as lock:
        flock(lock, LOCK_EX)
        send_left(client, where)
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 1
        assert "not sent: another process is sending it" in done.stderr
        assert client.get_run(run_id).data.metrics == {}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert client.get_run(run_id).data.metrics["train/loss"] == 0.5


def test_how_a_run_ended_is_not_forgotten_with_its_notes(where: TrackingSettings) -> None:
    """On a full disk the log has no end, and only MLflow knows."""
    client, run_id, folder = _left(where, socket.gethostname())
    client.set_terminated(run_id, "FAILED")
    lines = (folder / LOG).read_bytes().splitlines(keepends=True)
    assert lines[-1].startswith(b'{"end":')
    (folder / LOG).write_bytes(b"".join(lines[:-1]))
    send_left(client, where)
    run = client.get_run(run_id)
    assert (run.info.status, run.data.metrics["train/loss"]) == ("FAILED", 0.5)


def _begun(where: TrackingSettings, **tags: str) -> Path:
    """The folder of a run of which MLflow has not been told."""
    folder = Path(where.runs) / "20260101-000000-begun"
    folder.mkdir(parents=True)
    here = {"host": socket.gethostname(), "pid": "4194304", "process.started_at": "1.0"}
    begin = {"name": "n", "params": {"a": "1"}, "tags": {"alike": "", **here, **tags}}
    first = make_event("begin", {**begin, "start_ms": 7, "experiment": "begun"}, unix_ms=7)
    (folder / LOG).write_bytes(first + make_line({"train/loss": 0.5}, 1, unix_ms=8))
    os.utime(folder / LOG, (1e9, 1e9))
    return folder


def test_a_process_that_died_before_mlflow_was_told_has_a_run_all_the_same(
    where: TrackingSettings,
) -> None:
    """Its folder says how it began; who sends it says how it ended, when it was last heard of."""
    folder, client = _begun(where), open_experiment(where)[0]
    write_start(folder, name="n")
    send_left(client, where)
    experiment = client.get_experiment_by_name("begun")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.start_time, run.info.end_time) == ("KILLED", 7, 10**12)
    assert (run.data.params, run.data.metrics["train/loss"]) == ({"a": "1"}, 0.5)
    end = read_end(folder)
    assert (end["status"], end["error"]) == ("KILLED", "its process was gone") and is_sent(folder)
    assert (folder / LOG).stat().st_mtime == 1e9
    (known,) = list_known_runs(Path(where.runs))
    assert (known.state, known.run_id) == ("KILLED", run.info.run_id)


def test_tags_of_a_process_that_died_are_those_that_it_told_last(where: TrackingSettings) -> None:
    """What MLflow had of them before took the place of what the log said since."""
    folder, client = _begun(where), open_experiment(where)[0]
    sender = orphaned_runs.begin_run(client, where, folder)
    for text in ("one", "one\ntwo"):
        with open(folder / LOG, "ab") as log:
            log.write(make_event("tags", {"alerts": text}, unix_ms=9))
        if text == "one":
            sender.flush()
            assert client.get_run(sender.state.run_id).data.tags["alerts"] == "one"
    send_left(client, where)
    run = client.get_run(sender.state.run_id)
    assert (run.info.status, run.data.tags["alerts"]) == ("KILLED", "one\ntwo")
    assert read_end(folder)["tags"]["alerts"] == "one\ntwo"


def test_a_run_that_goes_on_here_is_ended_by_nobody(where: TrackingSettings) -> None:
    """Between its begin in the log and that in MLflow its process of before is the one that MLflow
    knows, and that is gone."""
    client, experiment_id = open_experiment(where)
    me = {"pid": str(os.getpid()), "process.started_at": str(psutil.Process().create_time())}
    folder = _begun(where, **me)
    before = (folder / LOG).read_bytes()
    gone = {"host": socket.gethostname(), "pid": "4194304", "journal": folder.name}
    run_id = client.create_run(experiment_id, tags=gone).info.run_id
    dead = run_sender.Sender(client, where, folder, run_sender.SendingState(run_id, experiment_id))
    assert not orphaned_runs.send_rest(dead)
    assert send_left(client, where) == send_left(client, where, does=False) == []
    assert (folder / LOG).read_bytes() == before
    assert client.get_run(run_id).info.status == "RUNNING"


@pytest.mark.parametrize("sends", ["after it", "within it", "no more"])
def test_an_end_that_was_told_is_not_guessed_by_who_has_not_the_folder(
    sends: str, where: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another project of this host found it without a process while the rest was on its way: it
    said for ever that its process was gone, or KILLED, where both ended it in one instant."""
    client, folder = open_experiment(where)[0], _begun(where)
    sender = orphaned_runs.begin_run(client, where, folder)
    append_lines(folder, make_event("end", END, unix_ms=9))
    run_id, end = sender.state.run_id, MlflowClient.set_terminated

    def end_within(self: MlflowClient, ended_id: str, status: str, *more: Any) -> None:
        if status == "KILLED":
            sender.close({**END})
        end(self, ended_id, status, *more)

    if sends == "within it":
        monkeypatch.setattr(MlflowClient, "set_terminated", end_within)
    if sends == "no more":
        sender.tags[run_sender.END_STATUS] = "FINISHED"
        sender.flush()
        shutil.rmtree(folder)
    elsewhere = where.model_copy(update={"runs": str(tmp_path / "elsewhere")})
    found = send_left(client, elsewhere)
    if sends == "after it":
        run = client.get_run(run_id)
        assert (run.info.status, run.data.tags["end.reason"]) == ("KILLED", "its process was gone")
        send_left(client, where)
    assert len(found) == (sends != "within it")
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED" and "end.reason" not in run.data.tags


def test_of_a_run_that_was_taken_back_another_is_made(where: TrackingSettings) -> None:
    """Who took it back was killed before its folder was gone, and what trained there next was told
    to a deleted run. One that a person deleted stays deleted."""
    client, _ = open_experiment(where)
    folder = _begun(where)
    ids = []
    for reason in (orphaned_runs.TAKEN_BACK, "a person's"):
        run_id = ids[-1] if ids else ""
        ids.append(orphaned_runs.begin_run(client, where, folder, run_id=run_id).state.run_id)
        client.set_tag(ids[-1], "end.reason", reason)
        client.delete_run(ids[-1])
    assert ids[0] != ids[1]
    for run_id in ids:  # whichever the folder names
        with pytest.raises(RunGone, match=f"its run {ids[1]} was deleted"):
            orphaned_runs.begin_run(client, where, folder, run_id=run_id)


def test_a_folder_knows_its_marks_by_its_log_too(where: TrackingSettings) -> None:
    """A power cut took start.json's newest, and MLflow had it as another copy's."""
    client, _ = open_experiment(where)
    folder = _begun(where)
    run_id = orphaned_runs.begin_run(client, where, folder).state.run_id
    for marks in (["a"], ["b"]):  # the second time start.json had lost the first
        claim = {"marks": marks, "by": f"somebody as {marks}"}
        begin = {"start_ms": 9, "experiment": "begun", "claim": claim, "tags": {}}
        append_lines(folder, make_event("begin", begin, unix_ms=9))
        orphaned_runs.begin_run(client, where, folder, run_id=run_id)
    tags = client.get_run(run_id).data.tags
    assert {tag for tag in tags if tag.startswith("resumed.by.")} == {"resumed.by.b"}
    client.set_tag(run_id, "resumed.by.c", "another host")
    append_lines(folder, make_event("begin", begin, unix_ms=9))
    with pytest.raises(RunGone, match="gone on with since by another host"):
        orphaned_runs.begin_run(client, where, folder, run_id=run_id)


def test_what_has_ended_is_sent_while_its_process_lives(where: TrackingSettings) -> None:
    """A notebook whose account had ended while MLflow was away was sent when its kernel went."""
    client = open_experiment(where)[0]
    me = {"pid": str(os.getpid()), "process.started_at": str(psutil.Process().create_time())}
    folder = _begun(where, **me)
    assert send_left(client, where) == []
    append_lines(folder, make_event("end", END, unix_ms=9))
    (found,) = send_left(client, where, does=False)
    assert (found.verb, found.name, found.run_id) == ("send", "n", "") and not is_sent(folder)
    (sent,) = send_left(client, where)
    assert (sent.verb, sent.problem) == ("send", "") and is_sent(folder)
    assert send_left(client, where) == []


def test_who_still_sends_a_part_leaves_the_next_to_its_own_sender(where: TrackingSettings) -> None:
    """It would have called the run whole, with the end of before."""
    client, experiment_id = open_experiment(where)
    folder = _begun(where)
    log = (folder / LOG).read_bytes()
    sender = orphaned_runs.begin_run(client, where, folder, experiment_id=experiment_id)
    part, first = make_event("end", END, unix_ms=9), log.split(b"\n")[0] + b"\n"
    (folder / LOG).write_bytes(log + part + first + make_line({"train/loss": 9.0}, 2, unix_ms=9))
    sender.close(END)
    assert sender.state.offset == len(log + part) and not is_sent(folder)
    assert client.get_run(sender.state.run_id).data.metrics["train/loss"] == 0.5
    send_left(client, where)
    run = client.get_run(sender.state.run_id)
    assert (run.info.status, run.data.metrics["train/loss"]) == ("KILLED", 9.0)
    assert is_sent(folder)


def test_a_model_is_logged_once_however_often_the_rest_is_sent(
    where: TrackingSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, experiment_id = open_experiment(where)
    folder = tmp_path / "runs" / "one"
    spec = {**SPECS["rows"], "feature_names": None}
    shape = {"input_shape": spec["input_shape"], "outputs": spec["outputs"]}
    predictor.save(
        builtin.build_model(spec["model"], **shape, args=spec["args"]), spec, folder / "model"
    )
    np.save(folder / "model" / "example.npy", np.zeros((2, 2), np.float32))
    sender = run_sender.create_run(
        client, where, experiment_id=experiment_id, folder=folder, name="n", params={}, tags={}
    )

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(client, "log_model_artifacts", full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                sender.close(END)
    sender.close(END)
    with monkeypatch.context() as patch:  # all is there by now, its model too
        patch.setattr(client, "log_model_artifacts", full)
        sender.close(END)
    logged = client.search_logged_models([experiment_id])
    assert [(m.source_run_id, str(m.status)) for m in logged] == [(sender.state.run_id, "READY")]
    outputs = client.get_run(sender.state.run_id).outputs.model_outputs
    assert [output.model_id for output in outputs] == [logged[0].model_id]


def test_a_folder_that_mlflow_does_not_know_is_passed_over(where: TrackingSettings) -> None:
    client, _ = open_experiment(where)
    for name, text in (("a", "{"), ("b", "[]"), ("c", '{"run_id": "0", "experiment_id": "1"}')):
        folder = Path(where.runs) / name
        folder.mkdir(parents=True)
        (folder / "sent.json").write_text(text)
        (folder / LOG).write_bytes(make_line({"train/loss": 0.5}, 1, unix_ms=8))  # without a begin
    found = send_left(client, where)
    assert [left.name for left in found] == ["a", "b", "c"]
    assert all("MLflow has no run of this journal" in left.problem for left in found)
    with pytest.raises(MlflowException):
        client.get_run("0")


def _sent_json(folder: Path, **more: Any) -> None:
    said = json.loads((folder / "sent.json").read_text())
    (folder / "sent.json").write_text(json.dumps({**said, **more}))


def _cut(folder: Path) -> None:
    (folder / "sent.json").write_text((folder / "sent.json").read_text()[:-20])


def _odd_line(folder: Path) -> None:
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"metrics", b"metrisc")
    (folder / "events.jsonl").write_bytes(b"".join(lines))


def test_what_is_damaged_in_a_dead_run_costs_no_other_and_no_whole_line(
    where: TrackingSettings,
) -> None:
    """A flipped bit in a dead run's journal stopped the sending of the healthy ones."""
    client, experiment_id = open_experiment(where)
    dead = {"host": socket.gethostname(), "pid": "4194304", "process.started_at": "1.0"}
    lines = [make_line({"train/loss": 1 / step}, step, unix_ms=step) for step in range(1, 5)]

    def died(name: str) -> tuple[str, Path]:
        """Half of it was sent."""
        folder = Path(where.runs) / name
        folder.mkdir(parents=True)
        ids = {"experiment_id": experiment_id, "folder": folder}
        sender = run_sender.create_run(client, where, **ids, name=name, params={}, tags=dead)
        (folder / "events.jsonl").write_bytes(b"".join(lines[:2]))
        sender.flush()
        (folder / "events.jsonl").write_bytes(b"".join(lines))
        return sender.state.run_id, folder

    other, _ = died("other")
    damages: dict[str, Callable[[Path], None]] = {
        "a line": _odd_line,
        "half a line": lambda f: os.truncate(f / "events.jsonl", len(b"".join(lines)) - 9),
        "sent.json": _cut,
        "beyond the file": lambda f: _sent_json(f, offset=10**9),
        "into a line": lambda f: _sent_json(f, offset=len(lines[0]) + 9),
        "further than what MLflow has": lambda f: _sent_json(f, offset=len(b"".join(lines))),
        "closed": lambda f: _sent_json(f, closed=True),
        "of another run": lambda f: _sent_json(f, run_id=other, offset=len(b"".join(lines))),
    }
    ids = {}
    for name, damage in damages.items():
        ids[name], folder = died(name)
        damage(folder)
    with Journal(where, Path(where.runs) / "healthy") as journal:
        journal.open(None)
        journal.create(name="healthy", params={}, tags={})
        journal.log({"train/loss": 0.5}, 1)
        until = time.monotonic() + 240
        while any(client.get_run(i).info.status == "RUNNING" for i in [other, *ids.values()]):
            assert time.monotonic() < until, (Path(where.runs) / "tracking.log").read_text()
            time.sleep(0.1)
        journal.close(END)
    healthy = client.get_run(journal.run_id)
    assert (healthy.info.status, healthy.data.metrics["train/loss"]) == ("FINISHED", 0.5)
    lost = {"a line": {3}, "half a line": {4}}
    for name, run_id in {"other": other, **ids}.items():
        steps = {m.step for m in client.get_metric_history(run_id, "train/loss")}
        assert steps == {1, 2, 3, 4} - lost.get(name, set()), name
        told = client.get_run(run_id).data.tags.get("journal.damaged_lines")
        assert told == ("1" if name in lost else None), name
