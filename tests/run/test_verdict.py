"""The command that says what held a run back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch

from flows.verdict import main
from headroom import account
from headroom.run.known_runs import Announcement, RunStart, read_start
from tests.conftest import query
from tests.run_folders import write_end


@pytest.fixture(autouse=True)
def runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADROOM_LEASES", str(place / "leases"))
    return place / ".headroom" / "runs"


def _write_run(runs: Path, name: str, **start: Any) -> Path:
    folder = runs / name
    folder.mkdir(parents=True)
    RunStart(name, "1", name, **start).write(folder)
    tags = {"bound": "data", "bound.why": f"why {name}"}
    write_end(folder, {"status": "FINISHED", "tags": tags, "metrics": {}})
    return folder


def _ask(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    answer = dict(json.loads(capsys.readouterr().out))
    assert answer.pop("version") == 1
    return answer


def test_without_a_name_it_is_of_the_run_that_was_begun_or_gone_on_with_last(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was of the run that began last, also where an older one had just been resumed."""
    older = _write_run(runs, "older", made_at=1.0)
    _write_run(runs, "newer", made_at=2.0)
    assert _ask(capsys)["name"] == "newer"
    start = read_start(older)
    assert start is not None
    start.make_next(older).write(older)
    assert _ask(capsys) == {
        **{"name": "older", "bound": "data", "why": "why older"},
        **{"share": None, "gain": None},
    }


def test_a_training_that_lives_is_told_of_where_none_was_begun_since(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    living, ended = _write_run(runs, "living", made_at=1.0), _write_run(runs, "ended", made_at=2.0)
    with Announcement(living, "living") as training:
        training.tell(stage="train model", device="cpu", bound="it waits")
        assert _ask(capsys)["why"] == "it waits"
        start = read_start(ended)
        assert start is not None
        replace(start, made_at=9e9).write(ended)
        assert _ask(capsys)["name"] == "ended"


def test_the_share_is_a_metric_and_told_of_a_run_that_mlflow_alone_has(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stood in the sentence alone, by which nothing can be sorted."""

    def draw_batches() -> Iterator[torch.Tensor]:
        for _ in range(80):
            sleep(0.05)
            yield torch.ones(8, 4)

    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with account(run_name="waits", model=net, optimizer=optimizer, quiet=True) as run:
        for batch in run.batches(draw_batches()):
            net(batch).square().mean().backward()
            optimizer.step()
    told = _ask(capsys)
    assert told["bound"] == "data" and 0.5 < told["share"] < 1 < told["gain"]
    sql = "select value, step from latest_metrics where key = 'bound/share_pct'"
    assert query(place, sql) == [(pytest.approx(100 * told["share"]), 0)]
    assert run.run["metrics"]["bound/share_pct"] == 100 * told["share"]
    shutil.rmtree(run.folder)
    there = _ask(capsys, run.run["run_id"])
    assert there == {
        **{name: told[name] for name in ("name", "bound", "why")},
        **{"share": pytest.approx(told["share"]), "gain": None},
    }


def test_where_nothing_has_run_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "holds no run yet" in capsys.readouterr().err
