"""The sides of a judgement as they are written, and what a candidate may not change."""

import subprocess
from pathlib import Path

import pytest

from headroom.comparison.sides import (
    Side,
    check_out,
    find_changed_evaluation,
    find_unfair,
    parse_side,
    remove_worktree,
)
from headroom.settings.read_settings import ConfigError, resolve_config


def parse(text: str, folder: Path = Path()) -> Side:
    return parse_side(text, option="--candidate", folder=folder)


def test_settings_are_split_at_spaces_that_stand_in_nothing() -> None:
    side = parse("optim.lr=1e-3 model.args={hidden: [64, 32]} model.name='a b'")
    wanted = {"optim.lr": "1e-3", "model.args": "{hidden: [64, 32]}", "model.name": "a b"}
    assert side.settings == wanted and not side.commit and not side.command


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("optim.lr", "is no NAME=VALUE"),
        ("optim.lr=1 optim.lr=2", "is given twice"),
        ("cmd:python loop.py", "takes no seed"),
        ("cmd:", "names no command"),
        ("cmd:python 'loop.py --seed {seed}", "No closing quotation"),
        ("git:--upload-pack=x", "names no commit"),
        ("run.notify=https://user:secret@host/x", "is a secret"),
    ],
)
def test_what_is_no_side_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"--candidate.*{why}"):
        parse(text)


@pytest.mark.parametrize(
    ("name", "has_time", "is_fair"),
    [
        ("optim.lr", False, True),
        ("train.batch_size", False, True),
        ("train.epochs", False, False),
        ("train.epochs", True, True),
        ("data.split_seed", True, False),
        ("train.seed", True, False),
        ("train.metrics.mine", True, False),
        ("train.loss", True, False),
        ("device.name", True, False),
    ],
)
def test_a_candidate_changes_nothing_that_it_is_measured_by(
    name: str, has_time: bool, is_fair: bool
) -> None:
    problems = find_unfair(Side("", {name: "1"}), goal="val/loss", has_time=has_time)
    assert bool(problems) is not is_fair, problems
    assert all(name in problem for problem in problems)


def test_another_loss_is_fair_where_it_is_not_the_goal() -> None:
    assert not find_unfair(Side("", {"train.loss": "1"}), goal="val/accuracy", has_time=False)


def test_what_is_kept_is_the_base_of_the_next() -> None:
    commit = Side("git:x b=2", {"b": "2"}, commit="c0ffee", ref="git:x")
    base = Side("a=1", {"a": "1"}).apply(commit).apply(Side("a=3", {"a": "3"}))
    assert base == Side("git:x a=3 b=2", {"a": "3", "b": "2"}, commit="c0ffee", ref="git:x")
    command = Side("cmd:x {seed}", command="x {seed}")
    assert base.apply(command) == command and command.apply(Side("")) == command


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repo" / "project"
    folder.mkdir(parents=True)
    (folder / "own.py").write_text("def score(x, y):\n    return 1.0\n\nWIDTH = 1\n")
    run_git(folder.parent, "init", "-q", "-b", "main")
    run_git(folder.parent, "add", "-A")
    run_git(folder.parent, "commit", "-q", "-m", "one")
    return folder


def run_git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=me", "-c", "user.email=me@here")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_a_commit_is_checked_out_beside_the_working_folder(repository: Path) -> None:
    (repository / "own.py").write_text("changed")
    side = parse("git:main optim.lr=1", repository)
    assert len(side.commit) == 40 and side.settings == {"optim.lr": "1"}
    place = repository.parent.parent / "tree"
    folder = check_out(side.commit, place, repository)
    assert folder == place / "project" and "WIDTH = 1" in (folder / "own.py").read_text()
    assert check_out(side.commit, place, repository) == folder, "it is there already"
    remove_worktree(place, repository)
    assert not place.exists() and (repository / "own.py").read_text() == "changed"


def test_a_commit_that_is_not_there_is_one_sentence(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="git has no commit nowhere here"):
        parse("git:nowhere", repository)
    with pytest.raises(ConfigError, match="git has no commit main here"):
        parse("git:main", tmp_path)


@pytest.mark.parametrize(
    ("code", "is_changed"),
    [
        ("WIDTH = 7\n\ndef score(x, y):  # the same\n    return 1.0\n", False),
        ("def score(x, y):\n    return 2.0\n", True),
        ("def other(x, y):\n    return 1.0\n", True),
        ("def score(:", True),
    ],
)
def test_a_metric_of_ones_own_is_that_of_the_base(
    repository: Path, tmp_path: Path, code: str, is_changed: bool
) -> None:
    config = resolve_config(None, {"train.metrics": "{mine: 'own:score'}"})
    (tmp_path / "own.py").write_text(code)
    found = find_changed_evaluation(config, repository, tmp_path)
    assert found == (["train.metrics.mine"] if is_changed else [])
