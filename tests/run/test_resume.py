"""What a run is called that nobody gave a name, and who may go on with one."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headroom.base.file_lock import FileLock
from headroom.run.known_runs import RunStart, make_timestamp
from headroom.run.resume import (
    NothingKept,
    find_resumed_folder,
    find_unfinished_folder,
    lock_for_training,
    lock_resumed_folder,
    make_default_name,
)
from headroom.run.run_keys import is_key_held, lock_key
from headroom.settings.read_settings import ConfigError, resolve_config
from tasks.train_model import train_model
from tests.run_folders import write_end


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({}, "mlp-digits"),
        ({"optim.lr": "0.01", "run.key": "night", "device.name": "cpu"}, "mlp-digits lr=0.01"),
        ({"data.path": "here/houses.csv", "data.target": "Price"}, "mlp-houses target=Price"),
        ({"optim.name": "sgd", "train.seed": "7"}, "mlp-digits optim=sgd seed=7"),
        ({"optim.name": "sgd", "optim.args.momentum": "0.5"}, "mlp-digits optim=sgd momentum=0.5"),
        ({"run.name": "mine", "optim.lr": "0.01"}, "mine"),
    ],
)
def test_a_run_is_called_by_what_was_varied(asked: dict[str, str], name: str) -> None:
    """Each was called by the time it began at, which told nothing where runs are compared."""
    assert make_default_name(resolve_config(None, asked)) == name


def test_a_long_name_says_how_much_it_leaves_out() -> None:
    asked = {"optim.lr": "0.01", "optim.weight_decay": "0.5", "train.epochs": "3"}
    name = make_default_name(
        resolve_config(None, {**asked, "train.seed": "7", "train.batch_size": "16"})
    )
    assert name.startswith("mlp-digits lr=0.01") and name.endswith(" +2") and len(name) <= 52


def test_of_two_first_starts_of_a_key_one_has_it(tmp_path: Path) -> None:
    """Both trained: neither had a folder yet that the other could have seen."""
    with lock_key(tmp_path, "night"):
        with lock_key(tmp_path, "another"):
            assert is_key_held(tmp_path, "night") and not is_key_held(tmp_path, "none of them")
        told = f"^run.key: night is being trained by process {os.getpid()}; wait for it"
        with pytest.raises(ConfigError, match=told):
            lock_key(tmp_path, "night")
    assert not [*(tmp_path / "keys").iterdir()], "its file goes with it"
    lock_key(tmp_path, "night").__exit__()


def test_a_key_is_not_had_by_a_file_that_its_last_holder_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two could have it: one by the old file, one by the new one of the same name."""
    real, opened = FileLock.take, []

    def take(lock: FileLock, text: str = "") -> bool:
        if not opened:  # between its opening and its locking
            opened.append(lock)
            lock.path.unlink()
        return real(lock, text)

    monkeypatch.setattr(FileLock, "take", take)
    with lock_key(tmp_path, "night") as key:
        assert key.lock is not opened[0] and is_key_held(tmp_path, "night")


def test_what_was_swept_before_its_lock_was_had_is_not_gone_on_with(tmp_path: Path) -> None:
    """It trained from step 0 in the same run, and told each point twice."""
    with pytest.raises(NothingKept, match="its checkpoints were removed; train without --resume$"):
        lock_resumed_folder(tmp_path / "gone")
    with pytest.raises(NothingKept, match="its checkpoints were removed"):
        lock_resumed_folder(tmp_path)
    taken_again = lock_for_training(tmp_path)  # it was given back
    taken_again.close()
    with pytest.raises(ConfigError, match="^--resume .*: its checkpoints were removed"):
        train_model.fn(None, None, tmp_path, None, resumes=True)


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "Pacific/Midway"])
def test_folders_are_named_by_utc(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a container in UTC beside a desk elsewhere, the newest run was not the last by name."""
    with monkeypatch.context() as patch:
        patch.setitem(os.environ, "TZ", zone)
        time.tzset()
        assert make_timestamp() == datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    time.tzset()


def _left(runs: Path, name: str, start: RunStart, *, kept: bool = True) -> Path:
    folder = runs / name
    (folder / "checkpoints").mkdir(parents=True)
    start.write(folder)
    if kept:
        (folder / "checkpoints" / "step-000000000007.json").touch()
    return folder


def test_what_cannot_be_gone_on_with_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^--resume latest: no run in .* has a checkpoint$"):
        find_resumed_folder(tmp_path, "latest")
    with pytest.raises(ConfigError, match="^--resume abc: is neither latest, nor the id of a run"):
        find_resumed_folder(tmp_path, "abc")
    bare = _left(tmp_path, "20260101-000000-a", RunStart("abc", "1", "mine"), kept=False)
    for words in ("abc", str(bare)):
        with pytest.raises(ConfigError, match="that run wrote no checkpoint; train anew$"):
            find_resumed_folder(tmp_path, words)
    folder = _left(tmp_path, "20260102-000000-b", RunStart("def", "1", "mine", pid=42))
    for words in ("latest", "def", str(folder), str(folder / "checkpoints")):
        assert find_resumed_folder(tmp_path, words) == folder
    with (
        lock_for_training(folder),
        pytest.raises(ConfigError, match=f"is being trained by process {os.getpid()}$"),
    ):
        lock_for_training(folder)
    lock_for_training(folder).close()


def test_a_key_that_is_being_trained_is_not_trained_twice(tmp_path: Path) -> None:
    folder = _left(
        tmp_path, "20260101-000000-a", RunStart("a", "1", "mine", key="night"), kept=False
    )
    assert find_unfinished_folder(tmp_path, "night") is None
    with lock_for_training(folder):
        assert find_unfinished_folder(tmp_path, "night") == folder
        with pytest.raises(ConfigError, match="that run is being trained by process"):
            lock_for_training(folder)


def test_a_key_goes_on_with_its_newest_run_until_that_is_done(tmp_path: Path) -> None:
    _left(tmp_path, "20260101-000000-a", RunStart("a", "1", "mine", key="night"))
    newest = _left(tmp_path, "20260102-000000-b", RunStart("b", "1", "mine", key="night"))
    _left(tmp_path, "20260103-000000-c", RunStart("c", "1", "mine", key="another"))
    assert (
        find_unfinished_folder(tmp_path, "night") == newest
        and find_unfinished_folder(tmp_path, "none of them") is None
    )
    for end, goes_on in (
        ({"status": "KILLED"}, True),
        ({"status": "FINISHED", "stopped": "train.end: it is 06:30"}, True),
        ({"status": "FINISHED", "stopped": ""}, False),
    ):
        write_end(newest, end)
        assert (find_unfinished_folder(tmp_path, "night") == newest) is goes_on
