"""What each command answers to a program: one line, by the schema of the pages."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "answers.schema.json").read_text())
Start = Callable[..., subprocess.Popen[str]]
FAILING = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.calls = nn.Linear(64, 10), 0

    def forward(self, x):
        print("a word of its own")
        self.calls += self.training
        if self.calls > 5:
            raise OSError("the disk is gone")
        return self.net(x.flatten(1))
"""
SMALL = ("--train.epochs", "1", "--device.name", "cpu")


@pytest.fixture
def answer(desk: Start) -> Callable[..., Any]:
    """The answer of a command, which is all that it says on stdout. code: that it exits with."""

    def run(kind: str, module: str, *words: str, code: int = 0) -> Any:
        process = desk(*words, "--json", module=module)
        out, err = process.communicate(timeout=200)
        assert process.returncode == code, err
        assert len(out.splitlines()) == 1 and "Traceback" not in err, out + err
        told = json.loads(out)
        jsonschema.validate(told, SCHEMA["$defs"][kind])
        return told

    return run


def test_a_training_and_what_is_asked_of_it(answer: Callable[..., Any]) -> None:
    run = answer("run", "flows.train", *SMALL, "--run.name", "mine")
    assert run["status"] == "FINISHED" and run["bound"] == "short" and run["error"] is None
    assert run["metrics"]["val/accuracy"] > 0.5
    assert answer("verdict", "flows.verdict", "mine")["why"] == run["why"]
    assert answer("verification", "flows.verify", "mine")["equal"]
    assert [one["run_id"] for one in answer("runs", "flows.runs")["runs"]] == [run["run_id"]]
    compared = answer("comparison", "flows.compare", "--last", "1")
    (group,) = compared["groups"]
    assert group["run_ids"] == [run["run_id"]] and compared["run_id"] is None
    assert group["medians"]["val/accuracy"] == run["metrics"]["val/accuracy"]
    assert Path(compared["page"]).is_file()


def test_a_training_that_fails_says_so(answer: Callable[..., Any], place: Path) -> None:
    (place / "own.py").write_text(FAILING)
    run = answer("run", "flows.train", *SMALL, "--model.name", "own:Net", code=1)
    assert run["status"] == "FAILED" and "the disk is gone" in run["error"]


def test_a_forecast_of_a_training_and_of_a_loop(answer: Callable[..., Any], place: Path) -> None:
    here = answer("forecast", "flows.train", *SMALL, "--forecast")
    assert here["fits"] and here["memory"]["peak_mib"] > 0
    small = ("--memory.limit_mib", "1", "--model.args", "{hidden: [4096]}")
    assert not answer("forecast", "flows.train", *SMALL, *small, "--forecast", code=2)["fits"]
    there = answer("gpus", "flows.train", *SMALL, "--forecast", "--for", "t4,24GiB")
    assert there["fits"] and set(there["gpus"]) == {"t4", "24gib"} and not there["required"]
    (place / "own.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Linear(8, 2)\n"
    )
    loop = answer("gpus", "flows.forecast", "own:net", "--batch", "64x8", "--for", "t4")
    assert loop["gpus"]["t4"]["fits"] and loop["memory"]["owners_mib"]["parameters"] > 0
    by_layer = loop["memory"]["layers_mib"].values()
    in_layers = sum(held.get("parameters", 0) for held in by_layer)
    assert in_layers == loop["memory"]["owners_mib"]["parameters"]
    words = ("own:net", "--batch", "64x8", "--require", "T4", "--require", "1GiB")
    loop = answer("gpus", "flows.forecast", *words, code=1)
    assert loop["required"] == ["t4", "1gib"] and not loop["fits"] and loop["gpus"]["t4"]["fits"]
