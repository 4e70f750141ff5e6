"""What `keep_days` removes from MLflow, on a real SQLite one, and what it leaves."""

import shutil
import socket
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput, Metric
from sqlalchemy.exc import OperationalError

from headroom.base.file_lock import FileLock
from headroom.tracking import old_runs
from headroom.tracking.mlflow_store import open_experiment
from headroom.tracking.old_runs import OldRun, remove_old_runs
from headroom.tracking.tracking_settings import TrackingSettings
from tests.run_folders import append_lines, make_line, write_end, write_start

DAY_MS = 24 * 60 * 60 * 1000


@pytest.fixture
def where(where: TrackingSettings) -> TrackingSettings:
    return where.model_copy(update={"keep_days": 30})


@pytest.fixture
def client(where: TrackingSettings) -> MlflowClient:
    return open_experiment(where)[0]


def _make_run(
    client: MlflowClient,
    where: TrackingSettings,
    name: str,
    *,
    days: float = 40,
    status: str = "FINISHED",
    host: str = "",
    **tags: str,
) -> str:
    """A run that ended so many days ago, with a point, a file and a folder of its own."""
    at_ms = int(time.time() * 1000 - days * DAY_MS)
    all_tags = {"host": host or socket.gethostname(), "journal": name, **tags}
    experiment = client.get_experiment_by_name(where.experiment)
    run_id = client.create_run(
        experiment.experiment_id, start_time=at_ms - 1000, tags=all_tags, run_name=name
    ).info.run_id
    client.log_batch(run_id, metrics=[Metric("train/loss", 0.5, at_ms, 1)])
    client.log_text(run_id, "x" * 1000, "report.html")
    if status != "RUNNING":
        client.set_terminated(run_id, status, end_time=at_ms)
    folder = Path(where.runs) / name
    folder.mkdir(parents=True)
    write_start(folder, run_id, name=name)
    write_end(folder, {"status": status}, is_sent=True)
    return str(run_id)


def _add_model(client: MlflowClient, run_id: str) -> str:
    experiment_id = client.get_run(run_id).info.experiment_id
    model = client.create_logged_model(experiment_id, name="m", source_run_id=run_id)
    client.log_outputs(run_id, models=[LoggedModelOutput(model.model_id, 0)])
    folder = Path(model.artifact_location.removeprefix("file://"))
    folder.mkdir(parents=True)
    (folder / "weights.pt").write_bytes(b"x" * 2000)
    return str(model.model_id)


def _remove(client: MlflowClient, where: TrackingSettings, *, does: bool = True) -> list[OldRun]:
    return [*remove_old_runs(client, where, _list_ids(client), does=does)]


def _list_names(where: TrackingSettings) -> set[str]:
    with closing(sqlite3.connect(str(where.database))) as opened:
        return {name for (name,) in opened.execute("SELECT name FROM runs")}


def test_an_old_run_goes_with_its_points_its_models_and_its_files(
    client: MlflowClient, where: TrackingSettings
) -> None:
    old = _make_run(client, where, "old")
    model = _add_model(client, old)
    _make_run(client, where, "new", days=20)
    (found,) = _remove(client, where, does=False)
    assert (found.name, found.run_id, found.problem) == ("old", old, "")
    assert found.size_bytes > 3000 and round(found.age_s / 86400) == 40
    assert _list_names(where) == {"old", "new"}
    (removed,) = _remove(client, where)
    assert removed.run_id == old and not removed.problem
    with closing(sqlite3.connect(str(where.database))) as opened:
        for table in ("runs", "metrics", "latest_metrics", "tags"):
            asked = f"SELECT count(*) FROM {table} WHERE run_uuid = ?"
            assert opened.execute(asked, (old,)).fetchone() == (0,)
        assert opened.execute("SELECT count(*) FROM logged_models").fetchone() == (0,)
    files = [path for path in Path(where.artifacts).rglob("*") if old in str(path)]
    files += [path for path in Path(where.artifacts).rglob("*") if model in str(path)]
    assert [path for path in files if path.is_file()] == []
    assert [folder.name for folder in Path(where.runs).iterdir() if folder.is_dir()] == ["new"]
    assert _remove(client, where) == []


def test_nothing_is_removed_where_nobody_says_how_long(
    client: MlflowClient, where: TrackingSettings
) -> None:
    _make_run(client, where, "old", days=4000)
    assert TrackingSettings().keep_days == 0
    assert _remove(client, where.model_copy(update={"keep_days": 0})) == []
    assert _list_names(where) == {"old"}


def test_what_goes_on_is_anothers_or_is_built_upon_stays(
    client: MlflowClient, where: TrackingSettings
) -> None:
    _make_run(client, where, "runs", status="RUNNING")
    _make_run(client, where, "of another host", host="elsewhere")
    client.delete_tag(_make_run(client, where, "not ours"), "journal")
    registered = _make_run(client, where, "registered")
    client.create_registered_model("best")
    client.create_model_version("best", client.get_run(registered).info.artifact_uri, registered)
    _make_run(client, where, "older of a key", days=60, **{"run.key": "nights"})
    _make_run(client, where, "newest of a key", **{"run.key": "nights"})
    level = {"gate": "new", "gate.of": "kind"}
    _make_run(client, where, "level", **level)
    _make_run(client, where, "level of nothing", **{**level, "gate.of": "other"})
    _make_run(client, where, "judged by the level", days=1, **{**level, "gate": "passed"})
    before = _list_names(where)
    assert {old.name for old in _remove(client, where)} == {"older of a key", "level of nothing"}
    assert before - _list_names(where) == {"older of a key", "level of nothing"}


def test_a_folder_that_is_in_use_or_not_sent_whole_keeps_its_run(
    client: MlflowClient, where: TrackingSettings
) -> None:
    for name in ("training", "unsent"):
        _make_run(client, where, name)
    append_lines(Path(where.runs) / "unsent", make_line({"train/loss": 0.5}, 2, unix_ms=1))
    with FileLock(Path(where.runs) / "training" / "training.lock") as lock:
        assert lock.take()
        assert _remove(client, where) == []
    assert [old.name for old in _remove(client, where)] == ["training"]


def test_the_run_of_a_comparison_goes_after_the_last_that_it_holds(
    client: MlflowClient, where: TrackingSettings
) -> None:
    whole, part = (_make_run(client, where, n, days=50, comparison="2") for n in ("whole", "part"))
    for parent, name, days in ((whole, "a", 40), (part, "b", 40), (part, "c", 20)):
        _make_run(client, where, name, days=days, **{"mlflow.parentRunId": parent})
    assert {old.name for old in _remove(client, where, does=False)} == {"a", "b", "whole"}
    assert {old.name for old in _remove(client, where)} == {"a", "b", "whole"}
    assert _list_names(where) == {"part", "c"}


def test_what_people_have_deleted_themselves_stays_where_they_can_restore_it(
    client: MlflowClient, where: TrackingSettings
) -> None:
    deleted = _make_run(client, where, "deleted")
    model = _add_model(client, deleted)
    experiment = client.create_experiment("deleted")
    client.delete_experiment(experiment)
    client.delete_logged_model(model)
    client.delete_run(deleted)
    _make_run(client, where, "old")
    assert [old.name for old in _remove(client, where)] == ["old"]
    client.restore_run(deleted)
    client.restore_experiment(experiment)
    with closing(sqlite3.connect(str(where.database))) as opened:
        assert opened.execute("SELECT count(*) FROM logged_models").fetchone() == (1,)


STEPS = {  # of a removal, by what does them; `client` and `store` stand for those of the test
    "set_tag": "client",
    "delete_run": "client",
    "delete_logged_model": "client",
    "remove_folder": "old_runs",
    "_hard_delete_logged_model": "store",
    "_hard_delete_run": "store",
}


class Killed(BaseException):
    """No `except Exception` sees it, as a kill -9."""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_removal_that_is_cut_off_is_completed_by_the_next(
    client: MlflowClient, where: TrackingSettings, moment: str
) -> None:
    """A run that was deleted, and not yet freed, was found by nobody any more."""
    owners = {"client": client, "old_runs": old_runs, "store": client._tracking_client.store}
    new = _make_run(client, where, "new", days=1)
    for step, owner in STEPS.items():
        run_id = _make_run(client, where, step)
        model = _add_model(client, run_id)
        true = getattr(owners[owner], step)

        def cut_off(*args: object, true: Callable[..., object] = true) -> None:
            if moment == "after":
                true(*args)
            raise Killed

        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            patch.setattr(owners[owner], step, cut_off)
            _remove(client, where)
        is_listed = any(r.info.run_id == run_id for r in client.search_runs(_list_ids(client)))
        folder = Path(where.runs) / step
        assert not is_listed or (client.get_logged_model(model) and (folder / "sent.json").exists())
        assert [old.problem for old in _remove(client, where)] == (
            [] if (step, moment) == ("_hard_delete_run", "after") else [""]
        )
        assert not folder.exists() and _list_names(where) == {"new"}
        with closing(sqlite3.connect(str(where.database))) as opened:
            assert opened.execute("SELECT count(*) FROM logged_models").fetchone() == (0,)
        files = [path for path in Path(where.artifacts).rglob("*") if path.is_file()]
        assert all(new in str(path) for path in files)
    assert _remove(client, where) == []


def test_half_a_folder_keeps_no_run(client: MlflowClient, where: TrackingSettings) -> None:
    """Cut off in the middle of its folder, it could no longer say that all of it was sent."""
    _make_run(client, where, "old")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(old_runs, "remove_folder", _cut_off_in_folder)
        _remove(client, where)
    assert [old.name for old in _remove(client, where)] == ["old"]
    assert _list_names(where) == set() and not (Path(where.runs) / "old").exists()


def _cut_off_in_folder(folder: Path) -> None:
    for name in ("events.jsonl", "sent.json"):
        (folder / name).unlink()
    raise Killed


def test_what_another_removal_has_removed_meanwhile_is_no_problem(
    client: MlflowClient, where: TrackingSettings
) -> None:
    """Of two that ran at once, one ended with the error of a run that is not there."""
    for name in ("a", "b"):
        _make_run(client, where, name)
        shutil.rmtree(Path(where.runs) / name)  # nor does a lock keep them apart
    first = remove_old_runs(client, where, _list_ids(client), does=True)
    assert next(first).name == "a"
    assert [old.name for old in _remove(client, where)] == ["b"]
    assert [*first] == [] and _list_names(where) == set()


def test_of_a_store_that_goes_away_one_sentence_is_told(
    client: MlflowClient, where: TrackingSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for each of the runs again, and each said so."""
    for name in ("a", "b", "c"):
        _make_run(client, where, name)

    def away(*_: object) -> None:
        raise OperationalError("UPDATE runs", {}, sqlite3.OperationalError("database is locked"))

    with monkeypatch.context() as patch:
        patch.setattr(client, "delete_run", away)
        with pytest.raises(OperationalError):
            _remove(client, where)
    assert {old.name for old in _remove(client, where)} == {"a", "b", "c"}


def _list_ids(client: MlflowClient) -> list[str]:
    return [experiment.experiment_id for experiment in client.search_experiments()]


def test_tidy_tells_of_old_runs_and_removes_them_only_with_yes(
    client: MlflowClient,
    where: TrackingSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from flows.cli.tidy_command import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADROOM_LEASES", str(tmp_path / "leases"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", where.tracking_uri)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    settings = f"artifacts: {where.artifacts}\nruns: {where.runs}\nkeep_days: 30\n"
    Path("mlflow.yaml").write_text(settings)
    old = _make_run(client, where, "old")
    assert main([]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"would remove old ({old[:8]}): ended 960 h 00 min ago, over keep_days")
    assert _list_names(where) == {"old"}
    assert main(["--yes"]) == 0
    assert capsys.readouterr().out.startswith(f"removed old ({old[:8]}): ")
    assert _list_names(where) == set()
