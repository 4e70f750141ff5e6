"""The table of trainings: whole in every terminal, and nobody's name can spoil it."""

import io
import os
import pwd
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console

from flows.runs import make_runs_table
from headroom.run.known_runs import KnownRun

ME = pwd.getpwuid(os.getuid()).pw_name
LIVE = KnownRun(
    name="mlp-digits-20260101-120000",
    state="training",
    live=True,
    user=ME,
    run_id="0123456789abcdef",
    device="cuda:0",
    step=1240,
    steps=4600,
    epoch=3,
    epochs=10,
    eta_s=41,
    loss=0.2134,
    samples_per_s=41_234,
    peak_mib=1234,
)
WAITING = KnownRun("nightly", "waiting", live=True, user=ME, pid=42, waits_for="GPU-1 is held by b")
THEIRS = KnownRun("theirs", "training", live=True, user="somebody", pid=43, run_id="f" * 32)
FAILED = KnownRun(
    "lost", "FAILED", reason="train.loss: became nan " * 20, total_s=12, loss=float("nan")
)
KILLED = KnownRun(
    "over", "KILLED", reason="terminated", resume="python -m flows.train --resume " + "a" * 32
)
ALL = [LIVE, WAITING, THEIRS, FAILED, KILLED]


def _lines(*runs: KnownRun, columns: int) -> list[str]:
    console = Console(file=io.StringIO(), width=columns, highlight=False)
    console.print(make_runs_table(runs, columns=columns))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 140, 300])
def test_no_line_is_longer_than_the_terminal_is_wide(columns: int) -> None:
    odd = KnownRun(
        "a\x1b[31m\nname\u202e" + "\u5b57" * 40, "training", live=True, run_id="\x07" * 9
    )
    lines = _lines(*ALL, odd, columns=columns)
    assert max(map(cell_len, lines)) <= columns
    assert not any(c in line for line in lines for c in "\x1b\x07\u202e")


@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_what_has_no_column_is_told_below_a_live_training(columns: int) -> None:
    told = " ".join(_lines(LIVE, columns=columns))
    for part in ("mlp-digits-20260101-120000", "01234567", "cuda:0", "1,240/4,600", "3/10"):
        assert part in told
    for part in ("0:41 left", "0.2134", "41,234", "1.21 GiB"):
        assert part in told


def test_at_140_columns_a_training_is_one_line() -> None:
    head, line = _lines(LIVE, columns=140)
    assert head.split() == [
        *("run", "id", "state", "device", "step", "epoch", "time", "loss", "samples/s", "peak"),
    ]
    assert line == (
        "mlp-digits-20260101-120000  01234567  training  cuda:0  1,240/4,600   3/10  "
        "0:41 left  0.2134     41,234  1.21 GiB"
    )


def test_a_long_name_loses_its_beginning_and_not_the_time_at_its_end() -> None:
    long = KnownRun("a-model-with-a-long-name-20260101-120000", "FINISHED", step=10**9, total_s=1.0)
    assert "...-long-name-20260101-120000" in _lines(long, columns=62)[1]


def test_a_training_is_told_whose_it_is_what_it_waits_for_and_how_to_go_on() -> None:
    lines = _lines(*ALL, columns=80)
    assert "  process 42" in lines and "  waits: GPU-1 is held by b" in lines
    assert "  of somebody, process 43" in lines
    assert f"  go on: {KILLED.resume}" in lines
    reason = lines[lines.index(next(line for line in lines if line.startswith("lost"))) + 1 :]
    assert [line.endswith("...") for line in reason[:4]] == [False, False, True, False]


def test_the_table_is_shown_to_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container of `--user 12345` the list of live trainings was a traceback."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    mine = replace(LIVE, run_id="", pid=42, user="12345")
    assert "  process 42" in _lines(mine, columns=80)
