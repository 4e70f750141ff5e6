"""A loop of one's own with its account: the record is that of a training, and its end is true by
whatever way the loop ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from headroom import account
from headroom.run.known_runs import list_known_runs
from tests.conftest import PYTHON, desk_environment, query
from tests.run_folders import LOG

LOOP = """
import os, sys, time, signal, torch
from torch import nn
from headroom import account

net = nn.Linear(8, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)

def take_step():
    net(torch.randn(16, 8)).square().mean().backward()
    opt.step()
    opt.zero_grad()

with account(run_name="own", params={"lr": 0.1}, model=net, optimizer=opt) as run:
    for _ in range(4):
        take_step()
    run.log({"train/loss": 0.5})
    {body}
print("went on")
"""


RUNS = Path(".headroom/runs")


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever an earlier test of this process has compiled."""
    monkeypatch.setattr("headroom.watch.own_loop.has_compiled", lambda: False)
    monkeypatch.setattr("headroom.watch.own_loop.COUNT_SHARE", float("inf"))  # so short


def _program(place: Path, body: str, **more: str) -> subprocess.Popen[str]:
    (place / "loop.py").write_text(LOOP.replace("{body}", body))
    return subprocess.Popen(
        [PYTHON, "loop.py"],
        cwd=place,
        env={**desk_environment(), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _status(place: Path) -> str:
    """Of the only run, once it has ended."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = query(place, "select status from runs") if (place / "mlflow.db").exists() else []
        if found and found[0][0] != "RUNNING":
            return str(found[0][0])
        time.sleep(0.2)
    raise AssertionError("it has not ended")


def _tags(place: Path) -> dict[str, str]:
    return dict(query(place, "select key, value from tags"))


def _metrics(place: Path) -> dict[str, float]:
    return dict(query(place, "select key, value from latest_metrics"))


def _train(run: account, *, steps: int = 4) -> nn.Module:
    net = nn.Linear(8, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    run.watch(net, opt)
    for _ in range(steps):
        net(torch.randn(16, 8)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return net


def test_the_record_of_a_loop_has_the_names_of_a_training(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    opt = torch.optim.AdamW(net.parameters(), lr=2e-4)
    rows = TensorDataset(torch.randn(320, 8), torch.zeros(320, dtype=torch.long))
    params = {"lr": 2e-4, "model": {"width": 64}, "note": None}
    with account(run_name="own", params=params, model=net, optimizer=opt) as run:
        live = list_known_runs(RUNS)[0]
        for x, y in run.batches(DataLoader(rows, batch_size=32)):
            with run.step():
                with run.phase("forward"):
                    loss = nn.functional.cross_entropy(net(x), y)
                loss.backward()
                opt.step()
                opt.zero_grad()
            run.log({"train/loss": loss})
        last = loss.item()
    assert (live.name, live.state, live.live) == ("own", "training", True)
    assert _status(place) == "FINISHED"
    assert dict(query(place, "select key, value from params")) == {
        "lr": "0.0002", "model.width": "64", "note": ""
    }  # fmt: skip
    metrics, tags = _metrics(place), _tags(place)
    assert metrics["train/loss"] == last
    assert query(place, "select count(*) from metrics where key = 'train/loss'") == [(10,)]
    assert metrics.keys() >= {
        *(f"time/{p}_ms" for p in ("data_wait", "forward", "backward", "optimizer", "other")),
        *("time/total_s", "time/train_model_s", "time/detect_device_s", "time/release_memory_s"),
        *("speed/samples_per_s", "speed/steps_per_s", "train/lr", "memory/host_rss_mib"),
        *("memory/parameters_mib", "memory/optimizer_state_mib", "memory/run_peak_allocated_mib"),
        "memory/held_mib",
    }
    assert not metrics.keys() & {"memory/leaked_mib", "memory/release_ok", "time/eval_s"}
    assert tags["device.reason"] == "cpu, where the model is"
    assert tags["gate"] == "new"
    assert "mlflow.note.content" in tags
    assert not [name for name in tags if name.startswith("prefect.")]
    (known,) = list_known_runs(RUNS)
    assert (known.state, known.step, known.run_id) == ("FINISHED", 10, run.run["run_id"])
    kept = {f.name for f in place.rglob("*")}
    assert {"report.html", "device.json", "events.jsonl"} <= kept
    printed = capsys.readouterr()
    assert printed.out == "", "the output is the program's"
    assert "FINISHED own" in printed.err


def test_with_nothing_told_there_is_still_a_device_a_peak_and_an_end(place: Path) -> None:
    with account(quiet=True) as run:
        pass
    assert run.run["status"] == "FINISHED"
    assert run.run["tags"]["device.reason"] == "cpu, the default device of PyTorch here"
    assert "steps: none was seen, since nothing was given to watch" in run.run["warnings"][0]
    metrics = _metrics(place)
    assert {"memory/host_rss_peak_mib", "time/total_s", "memory/held_mib"} <= metrics.keys()
    assert not [name for name in metrics if name.startswith("speed/")]


def test_neither_prefect_nor_mlflow_is_imported_and_the_start_is_quick(place: Path) -> None:
    """The record of a run brought Prefect along, and waited for MLflow."""
    (place / "loop.py").write_text(
        "import sys, time, torch\nfrom headroom import account\n"
        "began = time.perf_counter()\nrun = account(quiet=True).begin()\n"
        "spent = time.perf_counter() - began\nrun.end()\n"
        "print([m for m in ('prefect', 'mlflow') if m in sys.modules], spent < 1.5)"
    )
    done = subprocess.run(
        [PYTHON, "loop.py"], cwd=place, env=desk_environment(), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[] True", done.stdout + done.stderr


@pytest.mark.parametrize(
    "body, code, status, reason",
    [
        ("raise ValueError('no such thing')", 1, "FAILED", "no such thing"),
        ("sys.exit(3)", 3, "FAILED", "sys.exit(3)"),
        ("sys.exit(0)", 0, "FINISHED", "the program ended it by sys.exit(0)"),
        ("raise KeyboardInterrupt", -2, "KILLED", "interrupted"),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", 143, "KILLED", "terminated"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "KILLED", "process"),
    ],
)
def test_the_end_of_a_loop_is_true(
    place: Path, body: str, code: int, status: str, reason: str
) -> None:
    program = _program(place, body)
    out, err = program.communicate(timeout=120)
    assert (program.returncode, out) == (code, ""), err
    assert _status(place) == status
    assert reason in _tags(place)["end.reason"]
    assert _metrics(place)["train/loss"] == 0.5


@pytest.mark.parametrize("body, status", [("", "FINISHED"), ("raise ValueError('x')", "FAILED")])
def test_a_run_that_nobody_ends_ends_with_its_program(place: Path, body: str, status: str) -> None:
    """A trainer that dies calls no callback."""
    (place / "loop.py").write_text(
        f"from headroom import account\nrun = account(run_name='own').begin()\n{body}\n"
    )
    subprocess.run([PYTHON, "loop.py"], cwd=place, env=desk_environment(), capture_output=True)
    assert _status(place) == status
    assert _tags(place)["end.reason"] == ("x" if body else "its program ended without ending it")


def test_an_interrupted_cell_of_a_notebook_leaves_a_true_end_and_a_loop_that_works(
    place: Path,
) -> None:
    """Each cell is run in one namespace, and an error of one is no end of the process."""
    cells: dict[str, Any] = {}
    exec("from headroom import account\nimport torch", cells)
    with pytest.raises(KeyboardInterrupt):
        exec("with account(run_name='first', quiet=True) as run:\n  raise KeyboardInterrupt", cells)
    assert cells["run"].run["status"] == "KILLED"
    exec("with account(run_name='second', quiet=True) as run:\n  run.log({'a': 1})", cells)
    assert cells["run"].run["status"] == "FINISHED"
    assert query(place, "select name, status from runs order by name") == [
        ("first", "KILLED"), ("second", "FINISHED")
    ]  # fmt: skip


def test_accounts_may_be_nested_and_in_threads(place: Path) -> None:
    ended: list[dict[str, Any]] = []

    def play(name: str) -> None:
        with account(run_name=name, quiet=True) as run:
            _train(run)
        ended.append(run.run)

    with account(run_name="outer", quiet=True) as outer:
        threads = [threading.Thread(target=play, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        _train(outer, steps=3)
        play("inner")
        for thread in threads:
            thread.join()
    ended.append(outer.run)
    assert sorted(run["name"] for run in ended) == ["inner", "one", "outer", "two"]
    assert {run["status"] for run in ended} == {"FINISHED"}
    assert all(run["metrics"]["time/backward_ms"] > 0 for run in ended)


def test_an_account_that_has_begun_may_be_entered_and_one_that_has_ended_may_not(
    place: Path,
) -> None:
    run = account(run_name="own", quiet=True).begin()
    with run as same:
        assert same is run
    assert len(list(RUNS.glob("*/start.json"))) == 1
    with pytest.raises(RuntimeError, match="it has ended, and is of one run; make another"):
        run.begin()


def test_each_process_of_torchrun_has_a_run_by_its_rank(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of one name could not be told apart."""
    names = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with account(run_name="ddp", quiet=True) as run:
            _train(run, steps=1)
        names.append(run.run["name"])
    assert names == ["ddp", "ddp-rank-1"]


def test_batches_may_be_made_once_for_all_epochs_and_are_as_the_loader_else(place: Path) -> None:
    """A loader that was wrapped before the epochs gave nothing from the second one on, and a
    progress bar found no length."""
    net = torch.nn.Linear(8, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=16)
    with account(model=net, optimizer=opt, quiet=True) as run:
        batches = run.batches(loader)
        assert len(batches) == 4 and batches.batch_size == 16
        for _ in range(3):
            for (x,) in batches:
                net(x).mean().backward()
                opt.step()
        first = next(batches)
        assert len([first, *batches]) == 4, "what `next` has begun goes on"
        assert run.loop.done == 12 and run.loop.rows == 12 * 16
    assert len(list(batches)) == 4, "after the end, too"


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_the_workers_of_a_loader_do_not_end_the_run(place: Path) -> None:
    """A forked process has the exit functions and the signal handlers of its parent."""
    rows = TensorDataset(torch.randn(64, 8))
    with account(run_name="own", quiet=True) as run:
        for _ in range(2):
            for _ in run.batches(DataLoader(rows, batch_size=16, num_workers=2)):
                pass
        pid = os.fork()
        if not pid:
            run.end()
            os._exit(0)
        os.waitpid(pid, 0)
        assert not run.run, "the fork has ended it"
    assert run.run["status"] == "FINISHED"
    assert run.run["metrics"]["speed/samples_per_s"] > 0


def test_memory_that_ran_out_is_told_and_raised_as_it_came(place: Path) -> None:
    class Full(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = super().forward(x)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.", kept)

    net = Full(8, 4096)
    with (
        pytest.raises(torch.OutOfMemoryError, match="^.*Tried to allocate 3.00 GiB") as came,
        account(run_name="own", model=net, quiet=True) as run,
    ):
        net(torch.randn(256, 8))
    assert len(came.value.args) == 2, "the error itself, as it came"
    assert run.run["tags"]["failure"] == "out_of_memory"
    assert run.run["tags"]["end.reason"].startswith(
        "batch: memory ran out on cpu in the forward pass of step 1 (a batch of 256x8); 3.00 GiB"
    )
    assert run.run["oom"]["owners"]["parameters"] == 9 * 4096 * 4
    assert (run.folder / "memory" / "oom.json").is_file()


def test_a_run_begins_and_ends_while_mlflow_is_away_and_is_sent_later(place: Path) -> None:
    text = (place / "mlflow.yaml").read_text()
    assert "tracking_uri: sqlite:///mlflow.db" in text
    (place / "mlflow.yaml").write_text(
        text.replace("tracking_uri: sqlite:///mlflow.db", "tracking_uri: http://127.0.0.1:9")
    )
    with account(run_name="own", quiet=True) as run:
        run.log({"train/loss": 0.25}, step=1)
    assert run.run["run_id"] == ""
    assert "unsent" in run.run
    (place / "mlflow.yaml").write_text(text)
    sent = subprocess.run(
        [PYTHON, "-m", "headroom.tracking.mlflow_sender", str(run.folder)],
        cwd=place,
        env=desk_environment(),
        capture_output=True,
        text=True,
    )
    assert sent.returncode == 0, sent.stderr
    assert _status(place) == "FINISHED"
    assert _metrics(place)["train/loss"] == 0.25


class Optimizer:
    """One of somebody else's, which is none of PyTorch's."""


@pytest.mark.parametrize(
    "given, words",
    [
        ({"params": {"lr (start)": 1}}, "params: a name has letters"),
        ({"model": 3}, r"watch: takes models .* \(got int\)"),
        ({"optimizer": Optimizer()}, r"watch: takes models .* \(got .*test_account\.Optimizer\)"),
        ({"device": "cuda:7"}, "device.name: cuda:7 is not here"),
    ],
)
def test_what_cannot_be_is_refused_before_there_is_a_run(
    place: Path, given: dict[str, Any], words: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=words), account(**given):
        pass
    assert not list(RUNS.glob(f"*/{LOG}"))


def test_runs_alike_are_held_against_each_other_by_the_gate(place: Path) -> None:
    """By params, program and device; val/loss is what the loop calls so."""
    for at in range(6):
        with account(run_name="own", params={"lr": 0.1}, quiet=True) as run:
            _train(run)
            run.log({"val/loss": 0.5 if at < 5 else 0.9})
    assert (run.run["tags"]["gate"], run.run["tags"]["gate.why"][:8]) == ("worse", "val/loss")


def test_compare_shows_loops_side_by_side(
    place: Path, compare: Callable[..., subprocess.Popen[str]]
) -> None:
    ids = []
    for lr in (0.1, 0.2):
        with account(run_name=f"own {lr}", params={"lr": lr}, quiet=True) as run:
            for _ in run.batches(DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8)):
                _train(run, steps=1)
            run.log({"train/loss": lr})
        ids.append(run.run["run_id"])
    shown = compare("--runs", ",".join(ids))
    out, err = shown.communicate(timeout=120)
    assert shown.returncode == 0, err
    rows = [line.split()[0] for line in out.splitlines() if line.startswith(("lr ", "0.1", "0.2"))]
    assert rows == ["lr", "0.1", "0.2"], "by what differs in their params"


@pytest.mark.usefixtures("prefect_api")
def test_within_a_flow_the_run_leads_to_its_flow_run(place: Path) -> None:
    from prefect import flow
    from prefect.runtime import flow_run

    @flow
    def play() -> str:
        with account(run_name="own", quiet=True):
            pass
        return str(flow_run.id)

    flow_run_id = play()
    assert _tags(place)["prefect.flow_run_id"] == flow_run_id


def test_the_journal_has_every_metric_that_was_logged(place: Path) -> None:
    with account(run_name="own", quiet=True) as run:
        for step in range(25):
            run.log({"reward": step / 2}, step=step + 1)
    lines = (run.folder / "events.jsonl").read_text().splitlines()
    told = [json.loads(line).get("metrics", {}) for line in lines]
    assert [metrics["reward"] for metrics in told if "reward" in metrics][:25] == [
        step / 2 for step in range(25)
    ]


def test_a_terminated_program_that_handles_signals_itself_keeps_its_handler(place: Path) -> None:
    def mine(number: int, frame: Any) -> None:
        raise RuntimeError("mine")

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with account(run_name="own", quiet=True):
            assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
