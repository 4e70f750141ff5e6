"""What nobody holds is put right; the rest stays as it is, and so does all without --yes."""

import json
import os
import socket
import time
from pathlib import Path

import pytest

from flows.cli.tidy_command import main, parse_age_s
from headroom.base.file_lock import FileLock
from headroom.prefect.prefect_http import call_api, is_healthy
from headroom.run.known_runs import Announcement, RunStart
from headroom.settings.read_settings import ConfigError
from tests.run_folders import write_end

GONE = {"host": socket.gethostname(), "pid": "4194305", "process.started_at": "1.0"}
DAY_S = 86400


@pytest.fixture(autouse=True)
def runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs' folder of a place without MLflow's database, leases, or a Prefect server."""
    monkeypatch.setenv("HEADROOM_LEASES", str(place / "leases"))
    monkeypatch.setenv("PREFECT_HOME", str(place / "prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return place / ".headroom" / "runs"


def _folder(runs: Path, name: str, *, days: float, closed: bool = True) -> Path:
    folder = runs / name
    (folder / "checkpoints").mkdir(parents=True)
    RunStart(name, "1", f"run {name}").write(folder)
    (folder / "checkpoints" / "step-000000000007.json").write_text("x" * 2**20)
    (folder / "sent.json").write_text(json.dumps({"closed": closed}))
    for path in folder.iterdir():
        os.utime(path, (time.time() - days * DAY_S,) * 2)
    return folder


def test_old_journals_go_where_mlflow_has_the_run_and_nothing_lives_there(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, live, training, sending = (_folder(runs, name, days=40) for name in "abcd")
    kept = [live, training, sending, _folder(runs, "e", days=20)]
    kept.append(_folder(runs, "f", days=40, closed=False))
    with (
        Announcement(live, "live"),
        FileLock(training / "training.lock") as one,
        FileLock(sending / "sending.lock") as two,
    ):
        assert one.take() and two.take()
        for folder in (training, sending):
            os.utime(next(folder.glob("*.lock")), (0, 0))
        told = "run a, 960 h 00 min old, 1.00 MiB, with its checkpoint of step 7\n"
        assert main(["--older-than", "30d"]) == 0
        said = capsys.readouterr().out
        assert said == f"would remove {old}: {told}Nothing was changed; with --yes it is.\n"
        assert old.is_dir()
        assert main(["--older-than", "30d", "--yes"]) == 0
        assert capsys.readouterr().out == f"removed {old}: {told}"
        assert not old.exists() and all((folder / "start.json").is_file() for folder in kept)
        assert main(["--older-than", "30d", "--yes"]) == 0
        assert capsys.readouterr().out == "Nothing is left behind.\n"


def test_a_removal_that_was_interrupted_is_found_again(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(runs, "a", days=40)

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            main(["--older-than", "1d", "--yes"])
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    assert main(["--older-than", "1d", "--yes"]) == 0 and not folder.exists()


def test_files_of_the_dead_go_and_those_of_the_living_stay(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Announcement(Path("a"), "mine"):
        (mine,) = (place / "leases").iterdir()
        left = [place / "leases" / name for name in ("1.run", "2.ticket")]
        others = [place / "leases" / name for name in ("GPU-1.lock", "3.new")]
        for path in (*left, *others):
            path.touch()
        assert main([]) == 0 and all(path.exists() for path in left)
        assert "would remove" in capsys.readouterr().out
        assert main(["--yes"]) == 0
        assert {*(place / "leases").iterdir()} == {mine, *others}


def test_a_flow_run_whose_server_was_away_gets_the_end_of_its_run(
    prefect_api: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)
    while not is_healthy(f"{prefect_api}/health"):
        time.sleep(0.2)
    flow = call_api("POST", f"{prefect_api}/flows/", {"name": "lost"})["id"]
    asked = {"flow_id": flow, "state": {"type": "RUNNING"}}
    lost, lives = (call_api("POST", f"{prefect_api}/flow_runs/", asked)["id"] for _ in range(2))
    folder = _folder(runs, "a", days=0)
    end = {"status": "FINISHED", "tags": {**GONE, "prefect.flow_run_id": lost}}
    write_end(folder, end, is_sent=True)

    def state(flow_run: str) -> str:
        return str(call_api("GET", f"{prefect_api}/flow_runs/{flow_run}")["state"]["type"])

    assert main([]) == 0 and state(lost) == "RUNNING"
    assert main(["--yes"]) == 0
    assert (state(lost), state(lives)) == ("COMPLETED", "RUNNING")
    call_api("DELETE", f"{prefect_api}/flow_runs/{lives}")


def test_a_server_that_does_not_answer_is_told_and_the_rest_is_done(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://user:word@127.0.0.1:9/api")
    old = _folder(runs, "a", days=40)
    assert main(["--older-than", "30d", "--yes"]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("can't set flow runs: Prefect at http://user:***@127.0.0.1:9/api: ")
    assert not old.exists() and "removed" in said.out


@pytest.mark.parametrize("text", ["", "30", "0d", "-3d", "3x", "1e3d", "d", "90m", "1d "])
def test_an_age_is_a_number_and_a_unit(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="^--older-than: must be a time such as 12h, 30d"):
        parse_age_s(text)
    assert main([f"--older-than={text}"]) == 2
    assert (
        parse_age_s(None) is None and parse_age_s("90s") == 90 and parse_age_s("2w") == 14 * DAY_S
    )


def test_the_flow_of_the_service_does_the_same(prefect_api: str, runs: Path) -> None:
    from flows.tidy import tidy

    old = _folder(runs, "a", days=40)
    (line,) = tidy(older_than="30d", dry_run=True)
    assert line.startswith(f"would remove {old}") and old.is_dir()
    assert tidy(older_than="30d")[0].startswith("removed") and not old.exists()
