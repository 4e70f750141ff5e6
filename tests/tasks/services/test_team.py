"""What a team's service says and refuses before anything is up.
The service for real: tests/flows/test_team.py."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.services import serve, team, team_hosts, team_stores
from tasks.services.processes import SettingError
from tasks.services.team_stores import Stores

OWN = {
    "MLFLOW_BACKEND_STORE_URI": "postgresql://ann:s3cretword@db/mlflow",
    "PREFECT_SERVER_DATABASE_CONNECTION_URL": "postgresql+asyncpg://ann:s3cretword@db/prefect",
    "MLFLOW_ARTIFACTS_DESTINATION": "s3://ours/mlflow",
    "AWS_ACCESS_KEY_ID": "ann",
    "AWS_SECRET_ACCESS_KEY": "s3cretkey",
}


def test_passwords_are_drawn_once_for_their_owner_alone(tmp_path: Path) -> None:
    stores = Stores(tmp_path, "postgresql://127.0.0.1:1", "http://127.0.0.1:2", {})
    drawn = stores.passwords
    assert len(set(drawn.values())) == 2 and min(map(len, drawn.values())) >= 32
    assert stores.passwords == drawn
    assert (tmp_path / "passwords.json").stat().st_mode & 0o777 == 0o600


def test_each_server_is_told_of_its_own_stores_alone(tmp_path: Path) -> None:
    stores = Stores(tmp_path, "postgresql://127.0.0.1:1", "http://127.0.0.1:2", {})
    prefect, mlflow = stores.make_server_env()
    assert stores.names == ["postgres", "s3"]
    assert list(prefect) == ["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    assert mlflow["AWS_SECRET_ACCESS_KEY"] == stores.passwords["s3"]
    assert mlflow["MLFLOW_S3_ENDPOINT_URL"] == "http://127.0.0.1:2"
    # The keys of a user who has some, but no store of a team.
    keys = {name: OWN[name] for name in OWN if name.startswith("AWS")}
    assert Stores(tmp_path, stores.postgres, stores.s3, keys).make_server_env()[1] == mlflow


def test_what_the_environment_names_is_taken_instead(tmp_path: Path) -> None:
    stores = Stores(tmp_path, "", "", OWN)
    assert stores.names == []
    prefect, mlflow = stores.make_server_env()
    assert {**prefect, **mlflow}.items() >= OWN.items()
    assert "MLFLOW_S3_ENDPOINT_URL" not in mlflow
    one = {"MLFLOW_BACKEND_STORE_URI": OWN["MLFLOW_BACKEND_STORE_URI"]}
    assert Stores(tmp_path, "", "", one).names == ["postgres", "s3"]  # Prefect's is not named


def test_where_postgresql_is_not_here_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(team_stores, "INSTALLED", tmp_path)
    monkeypatch.setattr(team_stores.shutil, "which", lambda name: None)
    monkeypatch.setattr(team_stores, "find_spec", lambda name: True)
    monkeypatch.setenv("HEADROOM_TEAM_FOLDER", str(tmp_path / "team"))
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)
    assert team.main(["up"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("postgres: PostgreSQL is not here; install it") and told.count("\n") == 1
    monkeypatch.setattr(team_stores, "find_spec", lambda name: None)
    assert team.main(["up"]) == 2
    assert capsys.readouterr().err.startswith("headroom[team] is not installed")


def test_without_root_the_hosts_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_hosts, "os", SimpleNamespace(geteuid=lambda: 1000, environ={}))
    assert team_hosts.plan_hosts(["one"]).make() == "network namespaces take root"


@pytest.mark.parametrize("network", ["10.83", "10.83.256", "8.8.8", "172.1.2", "10.83.77.1", "ten"])
def test_a_network_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, network: str) -> None:
    monkeypatch.setenv("HEADROOM_TEAM_NETWORK", network)
    with pytest.raises(SettingError, match=r"^HEADROOM_TEAM_NETWORK: must be three numbers"):
        team_hosts.plan_hosts(["one"])


def test_a_project_that_cannot_be_cloned_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "PROJECT", tmp_path)
    with pytest.raises(
        SettingError, match=r"^HEADROOM_REPOSITORY: must name what the workers clone; .* \(fatal: "
    ):
        team._provide_repository(tmp_path)
    monkeypatch.setenv("HEADROOM_REPOSITORY", "https://example.com/ours.git")
    assert team._provide_repository(tmp_path) == "https://example.com/ours.git"
    for login in ("ann:s3cretword@", "ghp_s3cretword@"):
        monkeypatch.setenv("HEADROOM_REPOSITORY", f"https://{login}example.com/ours.git")
        with pytest.raises(SettingError, match="must hold no login") as caught:
            team._provide_repository(tmp_path)
        assert "s3cretword" not in str(caught.value)


def test_the_workers_clone_the_newest_commit_whatever_was_cloned_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "PROJECT", tmp_path / "project")
    (tmp_path / "project").mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", serve.PROJECT]
    subprocess.run([*git, "init", "-q", "-b", "other"], check=True)
    for words in (["-m", "one"], ["--amend", "-m", "two"]):
        subprocess.run([*git, "commit", "-q", "--allow-empty", *words], check=True)
        code = team._provide_repository(tmp_path)
        there = ["git", "ls-remote", code, "HEAD", "main"]
        said = subprocess.run(there, check=True, capture_output=True, text=True).stdout
        head = [*git, "rev-parse", "HEAD"]
        commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
        assert said.split() == [commit, "HEAD", commit, "refs/heads/main"]
