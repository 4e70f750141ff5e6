"""The sender of one run, in this process, on a real SQLite MLflow."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.store.tracking.dbmodels.models import SqlDataset
from sqlalchemy import event

from headroom.tracking import journal, mlflow_sender, run_sender
from headroom.tracking.mlflow_store import open_experiment
from headroom.tracking.run_sender import Throttle
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings
from tests.run_folders import LOG, make_event, make_line

END = {"status": "FINISHED", "name": "n", "params": {}, "tags": {}, "metrics": {}}


def test_a_training_that_needs_all_cores_is_sent_in_pieces_and_whole_at_its_end(
    tmp_path: Path,
) -> None:
    where = TrackingSettings(
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
        artifacts=str(tmp_path / "artifacts"),
        runs=str(tmp_path / "runs"),
    )
    client, experiment_id = open_experiment(where)
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    sender = run_sender.create_run(
        client, where, experiment_id=experiment_id, folder=folder, name="n", params={}, tags={}
    )
    clock = [0.0]
    sender.pace = Throttle(now_s=lambda: clock[0], idle_s=lambda: 0.0)
    lines = [make_line({"train/loss": 1 / step}, step, unix_ms=step) for step in range(1, 3001)]
    (folder / "events.jsonl").write_bytes(b"".join(lines))

    def sent() -> int:
        return len(MlflowClient(where.tracking_uri).get_metric_history(run_id, "train/loss"))

    run_id = sender.state.run_id
    clock[0] = 1.0
    sender.flush_patiently()
    first = sent()
    assert 0 < first < 3000 and sender.state.offset < run_sender.PIECE_BYTES + 100
    sender.flush_patiently()  # it rests
    assert sent() == first
    clock[0] = 1000.0
    sender.flush_patiently()
    assert first < sent() < 3000
    sender.close(END)
    assert sent() == 3000


def test_the_energy_of_a_run_that_goes_on_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = TrackingSettings(
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", artifacts=str(tmp_path / "artifacts")
    )
    client, experiment_id = open_experiment(where)
    run_id = client.create_run(experiment_id).info.run_id
    client.log_metric(run_id, "gpu/energy_j", 42.0)
    begun: list[tuple[str | None, float]] = []
    monkeypatch.setattr(
        run_sender, "Telemetry", lambda uuid, energy_j=0.0: begun.append((uuid, energy_j))
    )
    run_sender.make_telemetry(client, run_id, {"device.kind": "cuda", "device.uuid": "GPU-1"})
    run_sender.make_telemetry(client, run_id, {"device.kind": "cpu"})
    assert begun == [("GPU-1", 42.0), (None, 0.0)]


def test_whoever_waits_for_a_long_end_hears_that_it_goes_on(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("headroom.base.event_log.BATCH", 10)
    where = TrackingSettings(
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
        artifacts=str(tmp_path / "artifacts"),
        runs=str(tmp_path / "runs"),
    )
    heard: list[dict] = []
    session = mlflow_sender.Session(heard.append)
    session.hear({"where": where.model_dump()})
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    begin = {"name": "n", "params": {}, "tags": {"alike": ""}, "start_ms": 1}
    lines = [make_event("begin", begin, unix_ms=1)]
    (folder / LOG).write_bytes(b"".join(lines))
    session.hear({"folder": str(folder), "wanted": []})
    lines += [make_line({"train/loss": 1 / step}, step, unix_ms=step) for step in range(1, 36)]
    lines.append(make_event("end", END, unix_ms=36))
    (folder / LOG).write_bytes(b"".join(lines))
    session.hear({"folder": str(folder)})
    answer = heard.pop()
    assert answer["closed"] and answer["times"]["time/close_s"] > 0
    assert [one["to"] for one in heard[:3]] == ["open", "open", "begin"]
    assert heard[3:] == [{"to": "close", "sending": True}] * 4
    assert session.sender is not None and session.sender.held is not None
    session.sender.held.close()


def test_the_end_waits_while_there_are_signs_of_it(tmp_path: Path, monkeypatch) -> None:
    where = TrackingSettings(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", give_up_s=0.2)
    monkeypatch.setattr(journal, "CLOSE_S", 0.1)
    kept = journal.Journal(where, tmp_path)
    kept.run_id, kept._log = "told", kept._open_log()

    def answers() -> None:
        for answer in [{"sending": True}] * 4 + [{"closed": True, "times": {}}]:
            time.sleep(0.15)  # longer than the time without a sign, all together
            kept._answers.put({"to": "close", **answer})

    monkeypatch.setattr(kept, "_tell", lambda what: threading.Thread(target=answers).start())
    kept.close(END)
    assert kept._answers.empty()
    monkeypatch.setattr(kept, "_tell", lambda what: None)
    with pytest.raises(TrackingError, match="no answer within"):
        kept.close(END)
    kept._log.close()


def test_data_that_another_run_tells_at_the_same_time_is_told_all_the_same(tmp_path: Path) -> None:
    """Each looks for it, finds none, and writes it: MLflow refuses all but the first."""
    where = TrackingSettings(
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", artifacts=str(tmp_path / "artifacts")
    )
    client, experiment_id = open_experiment(where)
    folders = [tmp_path / "runs" / name for name in ("one", "two")]
    senders = []
    for folder in folders:
        folder.mkdir(parents=True)
        how = {"experiment_id": experiment_id, "folder": folder, "name": "n"}
        senders.append(run_sender.create_run(client, where, **how, params={}, tags={}))
    both = threading.Barrier(2)

    def made(*_: object) -> None:
        """Of what is to be written, after none was found: both are here, or it is a later try."""
        with suppress(threading.BrokenBarrierError):
            both.wait(2)

    told = {"context": "training", "name": "houses.csv", "digest": "0a1b", "source": "{}"}
    told |= {"source_type": "local"}
    event.listen(SqlDataset, "init", made)
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda sender: sender.tell_data([told]), senders))
    finally:
        event.remove(SqlDataset, "init", made)
    for sender in senders:
        (found,) = client.get_run(sender.state.run_id).inputs.dataset_inputs
        assert found.dataset.name == "houses.csv"


def test_a_run_that_is_gone_on_with_knows_the_flow_runs_it_was_in(tmp_path: Path) -> None:
    """Else nobody could tell Prefect that what it calls crashed went on to the end."""
    where = TrackingSettings(
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", artifacts=str(tmp_path / "artifacts")
    )
    client, experiment_id = open_experiment(where)
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    how = {"experiment_id": experiment_id, "folder": folder, "name": "n", "params": {}}
    first = {"prefect.flow_run_id": "first", "unsent": "its model"}
    state = run_sender.create_run(client, where, **how, tags=first).state
    for flow_run in ("second", "second", "third"):
        tags = {"prefect.flow_run_id": flow_run}
        sender = run_sender.reopen_run(client, where, state=state, folder=folder, tags=tags)
        state = sender.state
    found = client.get_run(state.run_id).data.tags
    assert found["prefect.earlier_flow_runs"] == state.earlier == "first,second"
    assert "unsent" not in found
    assert json.loads((folder / "sent.json").read_text())["earlier"] == "first,second"
