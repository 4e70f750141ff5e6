"""A disk without room is told before the training, not after it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.run import preflight
from headroom.run.preflight import check_fit
from headroom.settings.run_config import RunConfig
from headroom.tracking.tracking_settings import TrackingError, read_tracking_settings
from headroom.training.plan import make_plan

MIB = 1024**2


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """Sets the free MiB of a folder's disk; there is plenty on the others."""
    found: dict[Path, float] = {}

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=found.get(path, 10**6) * MIB)

    monkeypatch.setattr(preflight.shutil, "disk_usage", usage)
    return found


def _where(folder: Path, uri: str = "sqlite:///{}/mlflow.db") -> Any:
    given = {"artifacts": f"{folder}/a/b", "runs": f"{folder}/runs"}
    return read_tracking_settings().model_copy(update={"tracking_uri": uri.format(folder), **given})


def test_one_disk_has_to_hold_all_of_it(tmp_path: Path, free, monkeypatch) -> None:
    monkeypatch.setattr(preflight.tempfile, "gettempdir", lambda: str(tmp_path))
    where = _where(tmp_path)
    # Three times 10 MiB of weights; 1 + 1 + 2 MiB; 1,400 bytes for each of 1,000 log points.
    needed_mib = 34 + 1_400 * 1_000 / MIB
    free[tmp_path] = needed_mib + 0.01
    preflight.check_disk_space(where, weights_bytes=10 * MIB, log_points=1_000)
    free[tmp_path] = needed_mib - 0.01
    with pytest.raises(TrackingError) as caught:
        preflight.check_disk_space(where, weights_bytes=10 * MIB, log_points=1_000)
    assert str(caught.value) == (
        f"runs, tracking_uri, artifacts, the temporary folder: the disk of {tmp_path} has "
        "35.3 MiB free, and the run may need 35.3 MiB there for its record and its model; "
        "make room"
    )


def test_a_tracking_server_keeps_the_files_on_a_disk_of_its_own(tmp_path: Path, free) -> None:
    free[tmp_path] = 12
    with pytest.raises(TrackingError, match="artifacts"):
        preflight.check_disk_space(_where(tmp_path), weights_bytes=10 * MIB, log_points=0)
    served = _where(tmp_path, "http://127.0.0.1:5000")
    free[Path(preflight.tempfile.gettempdir())] = 100
    if tmp_path.stat().st_dev == Path(preflight.tempfile.gettempdir()).stat().st_dev:
        free[tmp_path] = 22
    preflight.check_disk_space(served, weights_bytes=10 * MIB, log_points=0)


def test_a_run_is_refused_before_it_is_trained(tmp_path: Path, monkeypatch) -> None:
    config = RunConfig.model_validate({"data": {"cache": str(tmp_path)}})
    data = prepare_dataset(config.data)
    monkeypatch.chdir(tmp_path)
    check_fit(make_plan(config, detect_best_device("cpu"), data))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB))
    with pytest.raises(TrackingError, match=r"has 1.00 MiB free, and the run may need 4\.\d+ MiB"):
        check_fit(make_plan(config, detect_best_device("cpu"), data))


def test_many_epochs_that_patience_will_cut_short_need_no_room(tmp_path: Path, monkeypatch) -> None:
    train = {"epochs": 10**6, "log_every": 1}
    config = RunConfig.model_validate({"data": {"cache": str(tmp_path)}, "train": train})
    data = prepare_dataset(config.data)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30))
    with pytest.raises(TrackingError, match="may need 30.* GiB"):
        check_fit(make_plan(config, detect_best_device("cpu"), data))
    train["patience"] = 5
    patient = RunConfig.model_validate({**config.model_dump(), "train": train})
    check_fit(make_plan(patient, detect_best_device("cpu"), data))


def test_artifacts_that_cannot_be_written_are_told_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the training, tracking_uri was blamed for it."""
    may = preflight.os.access
    closed = tmp_path / "a"
    closed.mkdir()
    monkeypatch.setattr(preflight.os, "access", lambda p, mode: p != closed and may(p, mode))
    with pytest.raises(
        TrackingError, match=f"^artifacts: {closed} can't be written, .*mlflow.yaml"
    ):
        preflight.check_disk_space(_where(tmp_path), weights_bytes=0, log_points=0)
    preflight.check_disk_space(
        _where(tmp_path, "http://127.0.0.1:5000"), weights_bytes=0, log_points=0
    )
