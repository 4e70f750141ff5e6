"""Memory as a test in somebody else's project: the marker, the fixture and the snapshots, by a
pytest of its own, whether the plugin is installed here or named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from headroom import fits, forecast, peak
from tests.conftest import PYTHON, ROOT, desk_environment

pytest_plugins = ["pytester"]
NET = """
from torch import nn

WIDTH, DEPTH = 256, 2

def make(width=WIDTH):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(DEPTH)))
"""
TEST = """
import pytest
import torch
from net import WIDTH, make

@pytest.mark.memory(on="T4", at_most="2 GiB")
def test_step(memory):
    memory(make(), torch.zeros(8, WIDTH), optimizer="sgd")
"""
STRICT = """
[pytest]
addopts = --strict-markers --strict-config -q -p no:cacheprovider
"""
PLUGIN = "headroom.pytest_plugin"
Run = Callable[..., str]


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    """Imports all that a forecast does: a pytest within this process forgets what it has imported
    itself, and PyTorch cannot be imported twice."""
    peak(nn.Linear(4, 4), torch.zeros(2, 4))


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs pytest in a strict project with a model and a test; returns what it said. code: that it
    exits with. apart: in a process of its own, where warnings are errors too."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # what changes within a second, too
    monkeypatch.setenv("COLUMNS", "200")
    pytester.syspathinsert()
    for name, text in (("pytest.ini", STRICT), ("net.py", NET), ("test_net.py", TEST)):
        (pytester.path / name).write_text(text)

    def run(*words: str, code: int = 0, apart: bool = False) -> str:
        words = ("-p", PLUGIN, *words)
        if apart:
            known = {**desk_environment(), "PYTHONPATH": f"{ROOT}:{pytester.path}"}
            command = [PYTHON, "-B", "-m", "pytest", "-W", "error", *words]
            done = subprocess.run(command, env=known, capture_output=True, text=True)
            found, said = done.returncode, done.stdout + done.stderr
        else:
            result = pytester.runpytest_inprocess(*words)
            found, said = int(result.ret), f"{result.stdout}{result.stderr}"
        assert found == code and "INTERNALERROR" not in said, said
        return said

    return run


def _write(folder: Path, body: str, name: str = "test_net.py") -> None:
    head = (
        "import pytest\nimport torch\nimport unittest\nfrom torch import nn\nfrom net import make\n"
    )
    (folder / name).write_text(head + body)


def _read(folder: Path) -> dict[str, dict[str, object]]:
    kept: dict[str, dict[str, object]] = json.loads((folder / "memory_snapshot.json").read_text())
    return kept["tests"]  # type: ignore[return-value]


def test_a_model_that_grows_is_told_by_owner_and_phase(run: Run, pytester: pytest.Pytester) -> None:
    said = run(code=1)
    assert "memory: memory_snapshot.json has no snapshot of this test" in said
    assert "to keep what a step takes now: pytest --memory-update test_net.py::test_step" in said
    assert "memory_snapshot.json: 1 written" in run("--memory-update")
    file = pytester.path / "memory_snapshot.json"
    before = file.read_bytes()
    run()
    assert "written" not in run("--memory-update") and file.read_bytes() == before
    (pytester.path / "net.py").write_text(NET.replace("256", "512"))
    said = run(code=1)
    assert "a step takes 296 % more than its snapshot: its tensors take " in said
    assert "(allowed: 1 %)" in said and "Traceback" not in said
    for row in ("parameters", "gradients", "forward", "backward"):
        assert any(line.split()[:1] == [row] and "+" in line for line in said.splitlines()), row
    of_layers = said.partition("by layer, what has changed")[2].splitlines()
    assert {line.split()[0] for line in of_layers[1:3]} == {"0", "1"}
    assert "batch 8x512 float32, before batch 8x256 float32" in said
    assert file.read_bytes() == before, "only --memory-update writes"


def test_a_step_that_shrinks_is_told_and_no_failure(run: Run, pytester: pytest.Pytester) -> None:
    run("--memory-update")
    (pytester.path / "net.py").write_text(NET.replace("256", "128"))
    said = run()
    assert "test_net.py::test_step: a step takes 74.4 % less than its snapshot" in said
    assert "pytest --memory-update test_net.py::test_step" in said


def test_what_grows_within_the_tolerance_passes(run: Run, pytester: pytest.Pytester) -> None:
    _write(
        pytester.path,
        "import os\n@pytest.mark.memory(within='50 %')\ndef test_step(memory):\n"
        "    memory(make(int(os.environ['WIDTH'])), torch.zeros(8, int(os.environ['WIDTH'])))\n",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WIDTH", "256")
        run("--memory-update")
        patch.setenv("WIDTH", "300")
        run()
        patch.setenv("WIDTH", "350")
        assert "(allowed: 50 %)" in run(code=1)


def test_limits_are_told_and_no_snapshot_is_written_beyond_them(
    run: Run, pytester: pytest.Pytester
) -> None:
    _write(
        pytester.path,
        "@pytest.mark.memory(on=['1030 MiB', 'H100'])\nclass TestIt:\n"
        "    @pytest.mark.memory(at_most='1 MiB')\n"
        "    def test_step(self, memory):\n        memory(make, torch.zeros(8, 256))\n",
    )
    said = run("--memory-update", code=1)
    assert "a step does not fit 1030 mib: it needs " in said and "h100" not in said
    assert "at its peak, which may be at most 1.00 MiB" in said
    assert "to keep" not in said and not (pytester.path / "memory_snapshot.json").exists()


def test_markers_that_nobody_could_keep_to_are_one_usage_error(
    run: Run, pytester: pytest.Pytester
) -> None:
    asked = ("on='T5'", "at_most='12 GB'", "within=2", "'T4'", "at_moost='1 GiB'", "on=[]")
    tests = [
        f"@pytest.mark.memory({words})\ndef test_{i}(memory): ...\n"
        for i, words in enumerate(asked)
    ]
    _write(pytester.path, "".join(tests) + "@pytest.mark.memory(on='T4')\ndef test_none(): ...\n")
    said = run(code=4)
    assert "test_net.py::test_0: on t5: is neither a GPU that is known nor 24GiB" in said
    assert 'test_1: at_most: is a size such as "12 GiB"' in said
    assert 'test_2: within: is a percentage such as "2 %" (got 2)' in said
    assert "test_3: the marker memory has on=, at_most= and within= (got 'T4')" in said
    assert "(got 'at_moost')" in said and "test_5: on: is a GPU, or a list of them" in said
    assert "test_none: the marker memory limits what the test gives to the fixture" in said
    said = run("-n", "1", code=1, apart=True)
    assert "7 errors" in said and "on t5: is neither a GPU" in said


def test_a_test_that_measures_nothing_fails(run: Run, pytester: pytest.Pytester) -> None:
    _write(
        pytester.path,
        "@pytest.mark.memory(on='T4')\ndef test_it(memory): ...\n"
        "@pytest.mark.memory(on='T4')\ndef test_skipped(memory): pytest.skip('no')\n"
        "def test_twice(memory):\n    for _ in range(2): memory(make, torch.zeros(8, 256))\n",
    )
    said = run("--memory-update", code=1)
    assert "memory: the test has not called it: memory(model, batch)" in said
    assert "memory: is called once in a test" in said
    assert "2 failed, 1 skipped" in said


def test_names_of_other_projects_stay_theirs(run: Run, pytester: pytest.Pytester) -> None:
    """A project had a marker and a fixture `memory` before it had Headroom."""
    _write(
        pytester.path,
        "@pytest.fixture\ndef memory(): return 3\n"
        "@pytest.mark.memory(limit=3)\ndef test_own(memory): assert memory == 3\n"
        "@pytest.mark.memory\ndef test_marker(): ...\n",
    )
    assert "2 passed" in run()


def test_what_cannot_be_forecast_is_one_sentence(run: Run, pytester: pytest.Pytester) -> None:
    _write(
        pytester.path,
        "class Net(nn.Linear):\n    def forward(self, x):\n"
        "        y = super().forward(x)\n        return y if y.sum().item() > 0 else -y\n"
        "def test_values(memory): memory(Net(4, 4), torch.zeros(2, 4))\n"
        "def test_shape(memory): memory(nn.Linear(4, 4), torch.zeros(2, 5))\n"
        "def test_nothing(memory): memory(None, torch.zeros(2, 5))\n"
        "def test_optimizer(memory): memory(nn.Linear(4, 4), torch.zeros(2, 4), optimizer='x')\n",
    )
    said = run("--memory-update", code=1)
    assert said.count("memory: what a step takes cannot be told beforehand: ") >= 2
    assert "memory: model: is a module, or a function that makes one (got None)" in said
    assert "memory: optimizer: x is none of adadelta, " in said
    assert "4 failed" in said and "Traceback" not in said and "During handling" not in said


def test_a_damaged_file_of_snapshots_is_left_alone(run: Run, pytester: pytest.Pytester) -> None:
    run("--memory-update")
    file = pytester.path / "memory_snapshot.json"
    text = file.read_text()
    for damaged, told in (
        ("<<<<<<< HEAD\n" + text, "cannot be read: "),
        ("[]", "is no file of memory snapshots"),
        (text.replace('"version": 1', '"version": 2'), "is of version 2"),
        (text.replace('"peak_bytes"', '"peak"'), "test_net.py::test_step has not the fields"),
    ):
        file.write_text(damaged)
        assert f"memory: memory_snapshot.json: {told}" in run("--memory-update", code=1)
        assert file.read_text() == damaged


def test_snapshots_of_tests_that_are_gone_go_and_others_stay(
    run: Run, pytester: pytest.Pytester
) -> None:
    body = "def test_{0}(memory): memory(make, torch.zeros(8, 256))\n"
    _write(pytester.path, "".join(map(body.format, "abc")))
    _write(pytester.path, body.format("d"), "test_other.py")
    run("--memory-update")
    _write(pytester.path, "@pytest.mark.skip\n" + "".join(map(body.format, "ab")))
    run("--memory-update", "test_net.py::test_b")
    assert len(_read(pytester.path)) == 4, "one test was asked for by its name"
    assert "0 written, 1 removed" in run("--memory-update", "-k", "test_b", "test_net.py")
    kept = {"test_net.py::test_a", "test_net.py::test_b", "test_other.py::test_d"}
    assert set(_read(pytester.path)) == kept


def test_workers_write_one_file(run: Run, pytester: pytest.Pytester) -> None:
    _write(
        pytester.path,
        "@pytest.mark.parametrize('rows', range(1, 9))\n"
        "def test_rows(memory, rows): memory(make, torch.zeros(rows, 256))\n"
        "class TestIt(unittest.TestCase):\n"
        "    @pytest.fixture(autouse=True)\n    def take(self, memory): self.memory = memory\n"
        "    def test_it(self): self.memory(make, torch.zeros(8, 256))\n",
    )
    run("--memory-update")
    one = (pytester.path / "memory_snapshot.json").read_bytes()
    (pytester.path / "memory_snapshot.json").unlink()
    assert "9 written" in run("--memory-update", "-n", "2", apart=True)
    assert (pytester.path / "memory_snapshot.json").read_bytes() == one
    assert len(_read(pytester.path)) == 9
    assert [f.name for f in pytester.path.glob(".memory*")] == [], "nothing half-written is left"


def test_where_nobody_measures_the_plugin_imports_no_pytorch(
    run: Run, pytester: pytest.Pytester
) -> None:
    (pytester.path / "test_net.py").write_text(
        "import sys\n\ndef test_it():\n"
        f"    assert {PLUGIN!r} in sys.modules\n"
        "    slow = {'torch', 'numpy', 'rich', 'pydantic', 'prefect', 'mlflow'}\n"
        "    assert not slow & set(sys.modules)\n"
    )
    assert "1 passed" in run("-p", "no:anyio", apart=True)


def test_the_doors_tell_what_the_forecast_tells() -> None:
    net, batch = nn.Linear(256, 256), torch.zeros(64, 256)
    told = forecast(net, batch, optimizer="sgd", on="t4").memory
    assert peak(net, batch, optimizer="sgd") == told
    assert peak(net, batch, optimizer="sgd").peak_mib == told.peak_bytes / 2**20
    room = told.needed_bytes / 2**20 + 1024  # what the driver and the context of a process take
    for size, is_large_enough in ((room, True), (room - 1, False)):
        on = f"{size} MiB"
        assert fits(net, batch, optimizer="sgd", on=on) is is_large_enough
        assert forecast(net, batch, optimizer="sgd", on=on).gpus[on.lower()].fits is is_large_enough
    assert fits(net, batch, optimizer="sgd", on=["T4", "L4"])
    assert not fits(net, batch, optimizer="sgd", on=["T4", "1 GiB"])
    with pytest.raises(ValueError, match="^on t5: is neither a GPU"):
        fits(net, batch, on="T5")
    with pytest.raises(ValueError, match="^optimizer: adamx is none of "):
        peak(net, batch, optimizer="adamx")


class _Computing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.first = self.weight[0, 0].item()


def test_a_constructor_that_computes_draws_no_random_number_of_the_test() -> None:
    before = torch.get_rng_state()
    assert peak(_Computing, torch.zeros(4, 8)).peak_bytes > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_owners_sum_to_the_peak_of_a_step_without_products_of_matrices() -> None:
    """Workspaces of cuBLAS were told that such a step never takes: 16 MiB of a peak of 0.4."""
    ids = torch.zeros(8, 32, dtype=torch.long)
    told = peak(nn.EmbeddingBag(1000, 64), ids)
    assert sum(told.owners.values()) == told.peak_bytes and "libraries" not in told.owners
