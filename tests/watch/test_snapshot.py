"""When a snapshot of the memory is written, and that it never stands in a run's way."""

import logging

import pytest
import torch

from headroom.watch.snapshot import CudaHistory, NoHistory, make_history, record_history

GPU, CPU = torch.device("cuda:0"), torch.device("cpu")


class Told:
    """A history that keeps what was asked of it."""

    can_record = True

    def __init__(self, error=None):
        self.calls, self._error = [], error

    def start(self):
        self.calls.append("start")

    def write(self, file):
        self.calls.append("write")
        file.write_bytes(b"half")
        if self._error is not None:
            raise self._error
        file.write_bytes(f"{self.calls.count('start')} started".encode())

    def stop(self):
        self.calls.append("stop")


def files(folder):
    return {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()}


def test_a_run_that_asked_is_recorded_from_its_start_and_written_at_its_end(tmp_path):
    source = Told()
    with record_history(GPU, folder=tmp_path, on=True, source=source):
        assert source.calls == ["start"]
    assert source.calls == ["start", "write", "stop"]
    assert files(tmp_path) == {"memory/snapshot.pickle"}


def test_a_run_that_did_not_ask_leaves_nothing_and_records_nothing(tmp_path):
    source = Told()
    with record_history(GPU, folder=tmp_path, on=False, source=source):
        pass
    with (
        pytest.raises(ValueError, match="other"),
        record_history(GPU, folder=tmp_path, on=False, source=source),
    ):
        raise ValueError("other")
    assert source.calls == []
    assert files(tmp_path) == set()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), RuntimeError("HIP out of memory")])
def test_a_run_that_ran_out_of_memory_is_written_though_nobody_asked(tmp_path, error):
    source = Told()
    with (
        pytest.raises(type(error)),
        record_history(GPU, folder=tmp_path, on=False, source=source) as recorder,
    ):
        recorder.start()  # the last attempt
        recorder.start()
        raise error
    assert source.calls == ["start", "write", "stop"]
    assert (tmp_path / "memory" / "snapshot.pickle").read_bytes() == b"1 started"


def test_what_was_written_at_the_failure_is_not_written_over_by_what_is_left_later(tmp_path):
    source = Told()
    with (
        pytest.raises(torch.OutOfMemoryError),
        record_history(GPU, folder=tmp_path, on=True, source=source) as recorder,
    ):
        recorder.write()
        raise torch.OutOfMemoryError("x")
    assert source.calls == ["start", "write", "stop"]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("CUDA error")])
def test_a_full_disk_or_a_broken_device_is_said_and_ends_no_run(tmp_path, caplog, error):
    with record_history(GPU, folder=tmp_path, on=True, source=Told(error)):
        pass
    assert files(tmp_path) == set()
    assert "memory.snapshot: " in caplog.text and str(error) in caplog.text


def test_a_folder_that_cannot_be_made_ends_no_run(tmp_path, caplog):
    (tmp_path / "memory").write_text("a file stands where the folder would be")
    with record_history(GPU, folder=tmp_path, on=True, source=Told()):
        pass
    assert "memory.snapshot: " in caplog.text


def test_a_device_without_a_history_says_so_once_and_writes_nothing(tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(torch.OutOfMemoryError),
        record_history(CPU, folder=tmp_path, on=True) as recorder,
    ):
        recorder.start()
        raise torch.OutOfMemoryError("x")
    assert [r.getMessage() for r in caplog.records] == [
        "memory.snapshot: cpu keeps no history of its memory: no memory/snapshot.pickle"
    ]
    assert files(tmp_path) == set()


def test_the_history_of_a_device_is_its_allocators():
    assert isinstance(make_history(GPU), CudaHistory)
    for name in ("cpu", "mps", "xpu"):
        assert isinstance(make_history(torch.device(name)), NoHistory)
