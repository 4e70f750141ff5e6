import os
import pwd
import tempfile
from pathlib import Path

import pytest

from headroom.process import command


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("HOME", "PREFECT_HOME", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, "")  # so that all are as before afterwards
        monkeypatch.delenv(name)
    return tmp_path


def test_a_user_without_a_name_gets_a_home_of_its_own(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    """In a container of `--user 12345` the command ended with a traceback."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    command.provide_home()
    assert Path.home().parent == temporary and os.access(Path.home(), os.W_OK)
    assert Path.home().stat().st_mode & 0o777 == 0o700
    first = Path.home()
    monkeypatch.delenv("HOME")
    command.provide_home()
    assert Path.home() == first, "Prefect's server is shared by the runs of a user"


def test_a_home_that_cannot_be_written_is_kept_beside_one_for_prefect_and_matplotlib(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    monkeypatch.setenv("HOME", "/")  # as Docker sets it for a user without a name
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "/" and may(path, mode))
    monkeypatch.setenv("MPLCONFIGDIR", "/mine")
    command.provide_home()
    assert os.environ["HOME"] == "/" and os.environ["MPLCONFIGDIR"] == "/mine"
    assert Path(os.environ["PREFECT_HOME"]).parent.parent == temporary


def test_a_home_that_can_be_written_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    command.provide_home()
    assert "PREFECT_HOME" not in os.environ and not list(tmp_path.iterdir())


def test_a_folder_that_others_could_have_made_is_no_home(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    theirs = temporary / f"headroom-home-{os.geteuid()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    command.provide_home()
    assert Path(os.environ["HOME"]) != theirs and Path(os.environ["HOME"]).parent == temporary
