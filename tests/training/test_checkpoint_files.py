"""A checkpoint is whole, or it is not there; what was changed since is noticed."""

import errno
import json
import os
import random
import shutil
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.training import checkpoint_files
from headroom.training.checkpoint_files import (
    DamagedCheckpoint,
    NewerCheckpoint,
    UnsavableState,
    flatten_state,
    read_checkpoint,
    unflatten_state,
    write_checkpoint,
)
from headroom.training.checkpoints import (
    Checkpoints,
    TrainingPosition,
    read_newest,
    refuse_no_room,
)
from headroom.training.kept_steps import list_steps
from headroom.training.stateful import HostCopies

STATE: dict[str, Any] = {
    "weights": {
        "a.b": torch.arange(6.0).reshape(2, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
    },
    "groups": [{"params": [0, 1], "betas": (0.9, 0.999)}],
    0: {"step": torch.tensor(3.0)},
    "numpy": np.arange(4, dtype=np.int64),
    "count": np.int64(7),
    "bytes": b"\x00\xff",
    "none": None,
    "infinite": float("inf"),
    "exact": 0.1 + 0.2,
}


def _write(folder: Path, step: int, state: Any = STATE) -> None:
    tensors: dict[str, torch.Tensor] = {}
    plain = flatten_state(state, tensors)
    write_checkpoint(folder, step=step, about={"step": step}, plain=plain, tensors=tensors)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    _write(tmp_path, 12)
    found = read_checkpoint(tmp_path, 12)
    assert _same(found.state, STATE) and found.about == {"step": 12}
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())


def test_what_only_pickling_could_keep_is_refused_by_its_name() -> None:
    with pytest.raises(
        UnsavableState, match="^/optimizer/0 is a Path|^/optimizer/0 is a PosixPath"
    ):
        flatten_state({"optimizer": [Path("x")]}, {})
    with pytest.raises(UnsavableState, match="^/odd is a dict"):
        flatten_state({"odd": {(1, 2): 3}}, {})


def written_pair(folder: Path) -> None:
    """Checkpoints of the steps 1 and 2."""
    for step in (1, 2):
        _write(folder, step, {"x": torch.randn(64), "step": step})


@pytest.fixture
def written(tmp_path: Path) -> Path:
    written_pair(tmp_path / "made")
    return tmp_path / "made"


def damage(folder: Path, drawn: random.Random) -> str:
    """Damage the checkpoint of step 2 in one of the ways that a disk or a person does; says how."""
    names = "step-{:012d}.json", "step-{:012d}-*.safetensors"
    record, tensors = (next(folder.glob(name.format(2))) for name in names)
    way = drawn.choice(("flip", "cut", "empty", "gone", "swapped"))
    file = drawn.choice((record, tensors))
    body = bytearray(file.read_bytes())
    if way == "flip":
        body[drawn.randrange(len(body))] ^= 1 << drawn.randrange(8)
    elif way == "cut":
        del body[drawn.randrange(len(body)) :]
    elif way == "swapped":
        body[:] = next(folder.glob(names[file is tensors].format(1))).read_bytes()
    else:
        body.clear()
    file.write_bytes(bytes(body))
    if way == "gone" and file is tensors:  # without its record it would be none
        file.unlink()
    return f"{way} of {file.name}"


def test_where_all_are_damaged_nothing_is_made_up(written: Path) -> None:
    for file in written.glob("*.safetensors"):
        file.write_bytes(b"nonsense")
    with pytest.raises(DamagedCheckpoint, match="step-0+2-.*was changed since it was written"):
        read_newest(written)


def test_one_of_a_newer_version_is_told_as_such(written: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_files, "FORMAT", 99)
    _write(written, 3)
    monkeypatch.undo()
    with pytest.raises(NewerCheckpoint, match=r"was written by a newer version \(format 99\)"):
        read_newest(written)


@pytest.mark.parametrize("name", ["fsync", "rename", "fchmod", "open"])
@pytest.mark.parametrize("nth", range(4))
def test_whatever_fails_while_it_is_written_the_one_before_stays(
    written: Path, monkeypatch: pytest.MonkeyPatch, name: str, nth: int
) -> None:
    real, calls = getattr(os, name), iter(range(10**6))

    def fails(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, fails)
    failed = False
    try:
        _write(written, 3, {"step": 3})
    except OSError:
        failed = True
    monkeypatch.undo()
    found = read_newest(written)
    assert found is not None and found.state["step"] == found.step
    assert found.step in ((2, 3) if failed else (3,))
    assert not list(written.glob("*.new"))
    _write(written, 3, {"step": 3})
    assert read_checkpoint(written, 3).state == {"step": 3} and len(list(written.iterdir())) == 6


class _Training:
    def __init__(self, step: int) -> None:
        self.position = TrainingPosition(step)

    def state_dict(self) -> dict[str, Any]:
        return {"part": {"value": self.position.step}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state


def _checkpoints(
    folder: Path, clock: list[float], *, size_bytes: int = 0, **chosen: Any
) -> Checkpoints:
    return Checkpoints(
        folder,
        RunConfig.model_validate({"checkpoint": chosen}).checkpoint,
        HostCopies(torch.device("cpu")),
        about={"settings": {}, "data": "", "device": "cpu", "torch": ""},
        size_bytes=size_bytes,
        now_s=lambda: clock[0],
    )


def test_the_newest_stay_and_the_best(tmp_path: Path) -> None:
    clock = [0.0]
    made = _checkpoints(tmp_path, clock, every="1step", keep=2)
    for step in range(1, 7):
        clock[0] += 1
        if step == 3:
            made.end_epoch(_Training(step), is_best=True)
        else:
            made.end_step(_Training(step))
        made.close()
    assert list_steps(tmp_path) == [6, 5, 3]


@pytest.mark.parametrize(("size_bytes", "steps"), [(2**20, [1]), (2 * 2**30, [200])])
def test_the_first_best_epoch_is_kept_where_a_checkpoint_of_its_size_costs_little(
    tmp_path: Path, size_bytes: int, steps: list[int]
) -> None:
    """On an H100 one of 1.5 GB after each epoch of 3 s took a quarter of the training's time."""
    clock = [0.0]
    made = _checkpoints(tmp_path, clock, size_bytes=size_bytes, every="1000s")
    for step, now_s in [(1, 2.0), (200, 300.0)]:
        clock[0] = now_s
        made.end_epoch(_Training(step), is_best=not list_steps(tmp_path))
        made.close()
    assert list_steps(tmp_path) == steps


def test_by_time_one_is_due_when_so_many_seconds_have_passed(tmp_path: Path) -> None:
    clock = [0.0]
    made = _checkpoints(tmp_path, clock, every="30s", keep=9)
    for step in range(1, 101):
        clock[0] = float(step)
        made.end_step(_Training(step))
        made.close()
    assert list_steps(tmp_path) == [90, 60, 30]


def test_what_the_writer_tells_belongs_to_the_run_that_it_writes_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefect's log took it for nobody's, and printed a warning of its own between the lines."""
    run, seen = ContextVar("run", default=""), []
    run.set("mine")
    monkeypatch.setattr(
        checkpoint_files, "write_checkpoint", lambda *_, **__: seen.append(run.get())
    )
    _checkpoints(tmp_path, [0.0], every="1step").save(_Training(1), last=True)
    assert seen == ["mine"]


def test_a_disk_that_is_full_costs_the_training_nothing_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    made = _checkpoints(tmp_path, clock, every="1step")
    made.save(_Training(1), last=True)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files, "save_file", full)
        for step in (2, 3, 4):
            made.save(_Training(step), last=True)
    assert [r.message for r in caplog.records] == [
        "checkpoint: a checkpoint could not be written (No space left on device); "
        "the training goes on"
    ]
    assert list_steps(tmp_path) == [1]
    made.save(_Training(4), last=True)  # there is room again
    assert list_steps(tmp_path) == [4, 1]


def test_no_room_for_the_first_one_is_said_before_the_first_step(tmp_path: Path) -> None:
    refuse_no_room(tmp_path / "not" / "there", 1)
    with pytest.raises(ConfigError, match="^checkpoint.every: a checkpoint takes about .* left;"):
        refuse_no_room(tmp_path, shutil.disk_usage(tmp_path).total * 2)


def test_nested_states_keep_their_names_apart() -> None:
    tensors: dict[str, torch.Tensor] = {}
    state = {"a": {"b/c": torch.zeros(1)}, "a/b": {"c": torch.ones(1)}}
    plain = json.loads(json.dumps(flatten_state(state, tensors)))
    assert _same(unflatten_state(plain, tensors), state)


def read_all_kept(folder: Path) -> None:
    """Read every checkpoint that is announced. Raises DamagedCheckpoint."""
    for step in list_steps(folder):
        checkpoint_files.read_checkpoint(folder, step)


def find_step_after_damage(folder: Path, *, damaged: int) -> int | None:
    """The step that a training would go on from where this one was damaged: itself where that was
    not noticed."""
    try:
        return checkpoint_files.read_checkpoint(folder, damaged).step
    except DamagedCheckpoint:
        found = read_newest(folder)
    return None if found is None else found.step
