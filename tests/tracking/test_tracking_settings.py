import os
import stat
import subprocess
import tempfile
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from headroom.tracking import run_sender
from headroom.tracking.mlflow_store import open_experiment
from headroom.tracking.tracking_settings import (
    TrackingError,
    TrackingSettings,
    find_tracking_settings,
    read_tracking_settings,
)
from tests.conftest import PYTHON, ROOT


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.chdir(tmp_path)


def _where(text: str) -> TrackingSettings:
    Path("mlflow.yaml").write_text(text)
    return read_tracking_settings()


def test_paths_belong_to_the_folder_of_the_file(tmp_path: Path) -> None:
    chosen = _where("tracking_uri: sqlite:///a/b.db\nartifacts: kept\n")
    assert chosen.tracking_uri == f"sqlite:///{tmp_path}/a/b.db"
    assert chosen.artifacts == str(tmp_path / "kept")


def test_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "of the environment")
    chosen = _where("tracking_uri: sqlite:///a.db\nexperiment: of the file\n")
    assert (chosen.tracking_uri, chosen.experiment) == (
        "http://tracking:5000",
        "of the environment",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tracking_uri: sqlite:///\n", "tracking_uri: 'sqlite:///' is in memory and gone at exit"),
        ("tracking_uri: 'sqlite:///:memory:'\n", "is in memory and gone at exit"),
        ("tracking_uri: ./mlruns\n", "tracking_uri: must be one of sqlite://"),
        ("tracking_uri: file:///tmp/x\n", "MLflow no longer writes to plain folders"),
        ("tracking_uri: 'http://'\n", "tracking_uri: must be one of"),
        ("tracking_uri: 'http:///path'\n", "tracking_uri: must name a host"),
        ("tracking_uri: 'http://host:port'\n", "tracking_uri: must name a host"),
        ("tracking_urI: sqlite:///a.db\n", r"mlflow.yaml tracking_urI: Extra inputs"),
        ("flush_s: 0\n", r"mlflow.yaml flush_s: Input should be greater than 0 \(got 0\)"),
        ("flush_s: [\n", "mlflow.yaml:2 is not YAML: while parsing a flow node expected"),
        ("keep_runs: 1\nflush_s: 1\nkeep_runs: 2\n", "mlflow.yaml:3 keep_runs: is written twice"),
        ("x" * 2**18, "mlflow.yaml: must hold settings"),
        ("x" * (2**18 + 1), "mlflow.yaml: is larger than 256 KiB"),
        ("- a\n", "mlflow.yaml: must hold settings"),
        ("experiment: ''\n", "mlflow.yaml experiment"),
    ],
)
def test_a_place_that_would_lose_the_record_is_refused(text: str, message: str) -> None:
    with pytest.raises(TrackingError, match=message):
        _where(text)


def test_an_empty_file_means_the_defaults() -> None:
    assert _where("# nothing\n").experiment == "headroom"


def test_a_refused_uri_does_not_show_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "oracle://ann:s3cret@db/x")
    with pytest.raises(TrackingError) as caught:
        read_tracking_settings()
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["plain", "a b", "a?b", "a#b", "a%20b", "\u00fc", "a?x=1", "a@b:c"]
)
def test_a_database_lies_in_its_folder_whatever_that_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A database of a folder with a `?` was written beside that folder, under half of its name."""
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.chdir(folder)
    chosen = _where("tracking_uri: sqlite:///kept/mlflow.db\n")
    assert chosen.database == folder / "kept" / "mlflow.db"
    client, experiment = open_experiment(chosen)
    run_id = client.create_run(experiment).info.run_id
    samples = [("loss", 1.0, 1, 1)]
    run_sender.send_metrics(client, chosen.database, run_id, samples)
    # As a process that is started is told of it, by this variable.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", chosen.tracking_uri)
    assert read_tracking_settings() == chosen
    assert MlflowClient(read_tracking_settings().tracking_uri).get_run(run_id).data.metrics == {
        "loss": 1.0
    }
    assert sorted(f.name for f in (folder / "kept").iterdir()) == ["mlflow.db", "mlflow.db.lock"]
    assert [f.name for f in tmp_path.iterdir()] == [name]
    assert not {f.name for f in folder.iterdir()} - {"kept", "mlflow.yaml", ".headroom"}


def test_what_is_behind_the_name_of_a_database_stays_an_option(tmp_path: Path) -> None:
    chosen = _where("tracking_uri: sqlite:///a.db?timeout=5\n")
    assert chosen.tracking_uri == f"sqlite:///{tmp_path}/a.db?timeout=5"
    assert chosen.database == tmp_path / "a.db"


def test_an_environment_whose_folder_mlflow_cannot_read_is_refused_in_a_sentence(
    tmp_path: Path,
) -> None:
    """With a % in the folder of its environment, MLflow's error was of an interpolation."""
    (tmp_path / "of%20mine").mkdir()
    link = tmp_path / "of%20mine" / "mlflow"
    link.symlink_to(Path(mlflow.__file__).parent)
    asks = "import sys; from headroom.tracking import mlflow_store as s, tracking_settings as w\n"
    asks += (
        "try: s.open_experiment(w.read_tracking_settings())\nexcept w.TrackingError as e: print(e)"
    )
    path = os.pathsep.join([str(link.parent), str(ROOT)])
    done = subprocess.run(
        [PYTHON, "-c", asks], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert "MLflow opens no database where its own folder has a %" in done.stdout, done.stderr
    assert not list(tmp_path.glob("mlflow.db*"))


@pytest.mark.skipif(os.getuid() != 0, reason="only root has files of other users")
def test_a_run_is_never_kept_in_a_folder_that_another_user_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it could be kept nowhere else it went to /tmp/headroom-UID, whoever had made that."""
    tmp_path.chmod(0o1777)
    theirs = tmp_path / f"headroom-{os.geteuid()}"
    theirs.mkdir(mode=0o777)
    os.chown(theirs, 54321, 54321)
    (tmp_path / "file").touch()
    (tmp_path / "mlflow.yaml").write_text("runs: file/runs\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = find_tracking_settings()
    base = Path(found.settings.runs).parent
    assert base.parent == tmp_path and base != theirs and str(base) in found.doubt
    assert stat.S_IMODE(base.stat().st_mode) == 0o700 and not [*theirs.iterdir()]
    os.rmdir(theirs)
    found = find_tracking_settings()  # now it is ours, and so the same each time
    assert Path(found.settings.runs).parent == theirs
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o700
