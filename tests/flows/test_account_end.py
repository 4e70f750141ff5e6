"""Where a run is kept, how one that nobody ends has ended, and what is logged after its end."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from headroom import account
from headroom.run.known_runs import list_known_runs
from tests.conftest import PYTHON, desk_environment, query

pytestmark = pytest.mark.filterwarnings("ignore")  # what frameworks warn of is theirs


def _run_program(place: Path, code: str, **more: str) -> subprocess.CompletedProcess[str]:
    (place / "loop.py").write_text(code)
    return subprocess.run(
        [PYTHON, "loop.py"],
        cwd=place,
        env={**desk_environment(), **more},
        capture_output=True,
        text=True,
    )


def _wait_for(place: Path, sql: str) -> Any:
    """What the database answers, once it has an answer."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        found = query(place, sql) if (place / "mlflow.db").exists() else []
        if found:
            return found[0][0]
        time.sleep(0.2)
    raise AssertionError(sql)


BEGIN = "import sys\nfrom headroom import account\nrun = account(run_name='own').begin()\n"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("sys.exit(3)", "FAILED", "sys.exit(3)"),
        ("sys.exit(0)", "FINISHED", "the program ended it by sys.exit(0)"),
        ("raise SystemExit(3)", "FAILED", "its program was left by a SystemExit"),
        ("try: sys.exit(3)\nexcept SystemExit: pass", "FINISHED", "ended without ending it"),
        ("def main(): sys.exit('no such file')\nmain()", "FAILED", "sys.exit('no such file')"),
    ],
)
def test_the_end_of_a_program_is_that_of_its_run(
    place: Path, body: str, status: str, reason: str
) -> None:
    """`begin()` and then `sys.exit(3)` was FINISHED."""
    _run_program(place, BEGIN + body)
    assert _wait_for(place, "select status from runs where status != 'RUNNING'") == status
    assert reason in dict(query(place, "select key, value from tags"))["end.reason"]


def test_a_cell_that_begins_twice_has_two_runs_with_the_steps_of_each(place: Path) -> None:
    """The first stayed open, counted the steps of the second, and ended by another cell's error."""
    cell = (
        "run = account(run_name='cell', model=net, optimizer=opt, quiet=True).begin()\n"
        "runs.append(run)\n"
        "for _ in range(15):\n"
        "    net(torch.ones(4, 8)).mean().backward()\n"
        "    opt.step()\n"
    )
    net = nn.Linear(8, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    names: dict[str, Any] = {"torch": torch, "account": account, "net": net, "opt": opt, "runs": []}
    for _ in range(2):
        exec(compile(cell, "cell", "exec"), names)
    first, second = names["runs"]
    second.end()
    assert (first.loop.done, second.loop.done) == (15, 15)
    assert first.run["status"] == second.run["status"] == "FINISHED"
    assert first.run["stopped"] == "another account was opened on its optimizer"


def test_an_account_within_another_one_ends_it_not(place: Path) -> None:
    net = nn.Linear(8, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with account(optimizer=opt, quiet=True) as outer:
        with account(optimizer=opt, quiet=True):
            pass
        assert not outer.run


def test_what_is_logged_after_the_end_belongs_to_the_record(place: Path) -> None:
    """It was a ValueError: I/O operation on closed file."""
    with account(run_name="own", quiet=True) as run:
        run.log({"val/loss": 0.5}, 3)
    run.log({"test/loss": torch.tensor(0.25), "mAP@0.5": 1}, 4)
    assert run.run["metrics"]["test/loss"] == 0.25
    run.send_added()
    sql = "select value from latest_metrics where key = '{}'"
    assert _wait_for(place, sql.format("test/loss")) == 0.25
    assert _wait_for(place, sql.format("mAP_0.5")) == 1.0
    ended = "select status from runs where status != 'RUNNING'"
    assert _wait_for(place, ended) == "FINISHED"
    (known,) = list_known_runs(Path(".headroom/runs"))
    assert known.state == "FINISHED"


def test_what_sends_it_leaves_no_pipe_open(place: Path) -> None:
    """Where warnings are errors, the one of an unclosed file came in the midst of what followed."""
    with account(run_name="own", quiet=True) as run:
        pass
    run.log({"test/loss": 0.25})
    before = psutil.Process().num_fds()
    run.send_added()
    assert psutil.Process().num_fds() == before
    assert _wait_for(place, "select value from latest_metrics where key = 'test/loss'") == 0.25


def test_what_is_logged_after_the_end_is_sent_when_the_program_ends(place: Path) -> None:
    code = BEGIN.replace(".begin()", "") + (
        "with run: run.log({'val/loss': 0.5})\nrun.log({'test/loss': 0.25})\n"
    )
    done = _run_program(place, code)
    assert done.returncode == 0, done.stderr
    found = _wait_for(place, "select value from latest_metrics where key = 'test/loss'")
    assert found == 0.25


@pytest.mark.parametrize(
    "uri", ["file:./mlruns", "./mlruns", "file:///tmp/x/mlruns", "nonsense://x"]
)
def test_an_address_that_cannot_be_used_is_told_and_the_training_begins(
    place: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    with account(run_name="own", quiet=True) as run:
        run.log({"train/loss": 0.5})
    assert run.run["status"] == "FINISHED"
    assert "tracking_uri: must be one of" in run.run["warnings"][0]
    assert f"this run is kept in {place / 'state' / 'headroom'}" in run.run["warnings"][0]
    assert run.folder.is_relative_to(place / "state" / "headroom" / "runs")
    assert (place / "state" / "headroom" / "mlflow.db").is_file()


def test_a_folder_that_cannot_be_written_is_told_and_the_training_begins(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / ".headroom").write_text("no folder")  # as a read-only one is none to write in
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    with account(run_name="own", quiet=True) as run:
        pass
    assert run.run["status"] == "FINISHED"
    assert "can't be written; this run is kept in" in run.run["warnings"][0]


def test_databricks_is_a_form_that_mlflow_documents(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headroom.tracking.tracking_settings import read_tracking_settings

    for uri in ("databricks", "databricks://profile"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        found = read_tracking_settings()
        assert (found.tracking_uri, found.keeps_files) == (uri, False)


def test_a_checkout_keeps_the_runs_of_those_who_work_in_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install wrote the runs of every other folder into its own database."""
    from headroom.tracking.tracking_settings import read_tracking_settings

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    found = read_tracking_settings()
    assert found.database == tmp_path / "mlflow.db"
    assert found.runs == str(tmp_path / ".headroom" / "runs")


def _make_module(pl: Any) -> Any:
    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: torch.Tensor, at: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def validation_step(self, batch: torch.Tensor, at: int) -> None:
            self.log("val_f1@10", self.layer(batch).mean())

        def test_step(self, batch: torch.Tensor, at: int) -> None:
            self.log("test_loss", self.layer(batch).mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def test_the_test_after_a_fit_of_lightning_belongs_to_its_run(place: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from headroom.lightning import HeadroomCallback

    told = HeadroomCallback(quiet=True)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[told],
        log_every_n_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    module, data = _make_module(pl), DataLoader(torch.randn(16, 8), 4)
    trainer.test(module, data, verbose=False)  # of no fit
    assert told.run is None
    trainer.fit(module, data)
    for copied in (copy.deepcopy(told), pickle.loads(pickle.dumps(told))):
        assert copied.run is None and told.run is not None
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    found = told.run.run
    assert (found["status"], told.run.loop.done) == ("FINISHED", 4)
    assert {"val/f1_10", "test/loss"} <= set(found["metrics"])
    first = told.run
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data)
    assert told.run is not first


def test_the_evaluation_after_a_training_of_transformers_belongs_to_its_run(place: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from headroom.transformers import HeadroomCallback

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.layer(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    rows = [{"x": torch.randn(8), "labels": torch.randn(1)} for _ in range(16)]
    asked = transformers.TrainingArguments(
        output_dir="hf", max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    told = HeadroomCallback(quiet=True)
    trainer = transformers.Trainer(
        Net(),
        asked,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[told],
        compute_metrics=lambda _: {"f1@10": 0.5},
    )
    trainer.train()
    trainer.evaluate()
    trainer.predict(rows)
    assert told.run is not None and told.run.run["status"] == "FINISHED"
    assert {"val/loss", "val/f1_10", "test/loss"} <= set(told.run.run["metrics"])


def test_accelerate_may_log_after_its_training_and_begin_another(place: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from headroom.accelerate import HeadroomTracker

    tracker = HeadroomTracker(quiet=True)
    does = accelerate.Accelerator(cpu=True, log_with=tracker)
    does.init_trackers("mine", config={"lr": 0.1, "b#/1?": {"of[0]": 1}, 3: "x"})
    first = tracker.run
    does.log({"text": "word", "map": {"a": 1}, "nothing": None, "loss": 0.5}, step=1)
    does.end_training()
    does.log({"test/loss": 0.25}, step=2)
    assert first is not None and first is tracker.run
    assert first.run["metrics"]["test/loss"] == 0.25
    assert first.run["tags"]["log.text"] == "word"
    assert {"lr", "3", "b_/1_.of_0"} <= set(first.run["params"])
    does.init_trackers("mine", config={"lr": 0.2})
    does.log({"loss": 0.5})
    does.end_training()
    second = tracker.run
    assert second is not None and second is not first and second.run["params"]["lr"] == 0.2
    accelerate.state.AcceleratorState._reset_state(True)
    os.environ.pop("ACCELERATE_USE_CPU", None)
