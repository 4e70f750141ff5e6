"""A folder of a run that somebody else has filled leads to nothing that is outside of it."""

import json
import os
import socket
from pathlib import Path

import pytest
from mlflow import MlflowClient

from flows.cli.tidy_command import main
from headroom.run.known_runs import RunStart, list_known_runs
from headroom.run.resume import lock_for_training
from headroom.settings.read_settings import ConfigError
from headroom.tracking.tracking_settings import read_tracking_settings
from tests.conftest import query
from tests.run_folders import append_lines, make_event, make_line, write_end

GONE = {"host": socket.gethostname(), "pid": "4194305", "process.started_at": "1.0"}
SECRET = "the key of a friend\n"
# What a run writes, reads, sends, or changes the rights of.
NAMES = ("events.jsonl", "start.json", "start.json.new", "sent.json.new", "report.html")
NAMES += ("environment.txt", "plots", "plots/loss.png", "notes", "notes/theirs.txt", "reserve")
NAMES += ("sending.lock", "training.lock", "checkpoints", "model", "config.yaml")


@pytest.fixture
def outside(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of somebody's, beside a place without leases or a Prefect server."""
    monkeypatch.setenv("HEADROOM_LEASES", str(place / "leases"))
    monkeypatch.setenv("PREFECT_HOME", str(place / "prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    outside = place / "outside"
    outside.mkdir(mode=0o755)
    (outside / "id").write_text(SECRET)
    (outside / "id").chmod(0o644)
    return outside


def _fill(runs: Path, link: str, outside: Path) -> Path:
    """A run that was left, with one link in its folder."""
    folder = runs / link.replace("/", "-")
    folder.mkdir(parents=True)
    RunStart("", "", link).write(folder)
    begin = {"name": link, "tags": GONE, "params": {}, "data": [], "start_ms": 1}
    append_lines(folder, make_event("begin", {**begin, "experiment": "mine"}, unix_ms=1))
    append_lines(folder, make_line({"train/loss": 1.0}, 1, unix_ms=2))
    write_end(folder, {"status": "FINISHED", "tags": {}, "metrics": {}})
    (folder / link).parent.mkdir(exist_ok=True)
    (folder / link).unlink(missing_ok=True)
    is_folder = link in ("plots", "notes", "checkpoints", "model")
    (folder / link).symlink_to(outside if is_folder else outside / "id")
    return folder


def _describe(outside: Path) -> list[tuple[str, str, int]]:
    files = sorted(outside.iterdir())
    modes = [(path.name, path.read_text(), path.stat().st_mode) for path in files]
    return [("", "", outside.stat().st_mode), *modes]


def test_what_a_link_in_a_run_s_folder_names_is_neither_changed_nor_sent(
    place: Path, outside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Reports, rights and the state of sending were written through it; what it named was sent."""
    before, runs = _describe(outside), place / ".headroom" / "runs"
    folders = {link: _fill(runs, link, outside) for link in NAMES}
    good = _fill(runs, "good", outside)
    where = read_tracking_settings()
    client = MlflowClient(where.tracking_uri)
    client.create_experiment("mine", Path(where.artifacts).as_uri())
    (good / "good").unlink()
    assert main(["--yes"]) == 1
    told = capfd.readouterr().err
    del folders["events.jsonl"]  # whose run nobody knows
    for link, folder in folders.items():
        assert (
            f"runs: {folder / link} is a link or a pipe, of which a run makes none; remove it"
            in told
        )
    assert _describe(outside) == before
    sent = [path for path in (place / "mlartifacts").rglob("*") if path.is_file()]
    assert sent and not [path for path in sent if SECRET in path.read_text(errors="replace")]
    assert query(place, "select name, status from runs") == [("good", "FINISHED")]


def test_a_run_with_a_link_in_its_folder_is_not_gone_on_with(place: Path, outside: Path) -> None:
    before = _describe(outside)
    folder = _fill(place / "runs", "start.json.new", outside)
    with pytest.raises(ConfigError, match=r"--resume .*/start.json.new: .*a run makes none"):
        lock_for_training(folder)
    assert _describe(outside) == before


@pytest.mark.parametrize("name", ["start.json", "events.jsonl", "sent.json"])
def test_a_pipe_in_a_run_s_folder_keeps_nobody_waiting(
    place: Path, outside: Path, name: str
) -> None:
    folder = _fill(place / "runs", "start.json.new", outside)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert len(list_known_runs(place / "runs")) == (name != "start.json")


def test_old_journals_go_with_their_links_and_without_what_these_name(
    place: Path, outside: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before, runs = _describe(outside), place / ".headroom" / "runs"
    folder = _fill(runs, "notes", outside)
    log = (folder / "events.jsonl").stat().st_size
    (folder / "sent.json").write_text(json.dumps({"closed": True, "offset": log}))
    for path in folder.iterdir():
        os.utime(path, (0, 0), follow_symlinks=False)
    os.utime(outside, (0, 0))
    assert main(["--older-than", "1d", "--yes"]) == 0
    assert not folder.exists() and _describe(outside) == before
