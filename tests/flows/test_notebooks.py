"""The notebooks of docs/notebooks in a kernel of their own, and what a cell does to a run."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from tests.conftest import ROOT, desk_environment, query

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
# The runs that each leaves in MLflow, by name; None: it names none.
RUNS = {
    "compare": None,
    "lightning": ["digits"],
    "own-loop": ["by-hand", "digits"],
    "transformers": ["gpt2-small"],
}
NEEDS = {"lightning": "lightning", "transformers": "accelerate"}
REPORT = 'class="headroom"'
STATUS = "select status from runs where name = '{}'"


def _make_environment(place: Path) -> dict[str, str]:
    own = {name: str(place / name.lower()) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR")}
    return {**desk_environment(), **own, "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs_and_shows_its_reports(file: Path, place: Path) -> None:
    pytest.importorskip(NEEDS.get(file.stem, "torch"))
    notebook = nbformat.read(file, as_version=4)
    where = {"metadata": {"path": str(place)}}
    client = NotebookClient(notebook, timeout=500, kernel_name="python3", resources=where)
    client.execute(env=_make_environment(place))
    shown = [
        output["data"].get("text/html", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "data" in output
    ]
    names = RUNS[file.stem]
    if names is None:
        assert len([html for html in shown if REPORT in html]) == 3  # a run, two comparisons
        assert len([html for html in shown if "epoch 3/3" in html]) == 1  # how far it was
        assert query(place, "select count(*) from runs where status != 'FINISHED'") == [(0,)]
        assert query(place, "select count(*) from runs") == [(4,)]
    else:
        reports = [html for html in shown if REPORT in html and 'class="status FINISHED"' in html]
        assert len(reports) == len(names)
        found = query(place, "select name, status from runs order by name")
        assert found == [(name, "FINISHED") for name in names]


def test_the_notebooks_are_kept_without_outputs_and_names_of_a_machine() -> None:
    assert [file.stem for file in NOTEBOOKS] == sorted(RUNS)
    for file in NOTEBOOKS:
        notebook = json.loads(file.read_text())
        assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
        assert not re.search(r"/(home|root|work|tmp|Users)/", file.read_text())
        for cell in notebook["cells"]:
            assert not cell.get("outputs") and cell.get("execution_count") is None
            assert not cell["metadata"]


@dataclass
class Kernel:
    """A kernel as an editor uses it: `run` runs a cell of a name."""

    manager: KernelManager
    client: Any
    shown: list[dict[str, Any]] = field(default_factory=list)  # by the last cell

    def run(self, code: str, cell: str = "") -> str:
        """What the cell printed, and the name of its error."""
        request = self.client.session.msg(
            "execute_request",
            {"code": code, "silent": False, "store_history": True, "user_expressions": {}}
            | {"allow_stdin": False, "stop_on_error": False},
        )
        request["metadata"] = {"cellId": cell} if cell else {}
        self.client.shell_channel.send(request)
        said = ""
        self.shown = []
        while True:
            message = self.client.get_iopub_msg(timeout=200)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != request["header"]["msg_id"]:
                continue
            if kind == "status" and content["execution_state"] == "idle":
                self.client.get_shell_msg(timeout=60)
                return said.strip()
            if kind == "stream" and content["name"] == "stdout":
                said += content["text"]
            elif kind == "error":
                said += content["ename"]
            elif kind in ("display_data", "execute_result", "update_display_data"):
                self.shown.append({"kind": kind, **content["data"]})


START = "import torch\nfrom torch import nn\nfrom headroom import account\nruns = []"
BEGIN = """
net = nn.Linear(8, 2)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
run = account(run_name="{}", model=net, optimizer=opt, quiet=True).begin()
runs.append(run)
"""
STEP = "net(torch.ones(4, 8)).mean().backward(); opt.step()\n"
ENDS = "print([(r.run.get('status'), r.run.get('stopped') or r.run.get('error')) for r in runs])"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    yield from _start_kernel(tmp_path_factory.mktemp("kernel"))


def _start_kernel(place: Path) -> Iterator[Kernel]:
    (place / "mlflow.yaml").write_text("send_later_s: 0\n")
    manager = KernelManager(kernel_name="python3", transport="ipc", ip=str(place / "k"))
    manager.start_kernel(cwd=str(place), env=_make_environment(place))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=200)
        kernel = Kernel(manager, client)
        assert not kernel.run(START)
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.context.destroy(linger=0)


@pytest.fixture
def kernel(shared: Kernel) -> Kernel:
    shared.run("runs.clear()")
    return shared


def test_a_cell_that_is_run_again_ends_the_run_that_it_began(kernel: Kernel) -> None:
    """Its model and its optimizer are others, so the old run lived on, and hooked on."""
    kernel.run(BEGIN.format("again"), cell="a")
    kernel.run(BEGIN.format("changed") + STEP, cell="a")  # it was edited in between
    assert kernel.run(ENDS) == "[('FINISHED', 'its cell was run again'), (None, None)]"
    kernel.run("run.end()")
    assert kernel.run(ENDS).endswith("('FINISHED', None)]")


def test_a_cell_without_a_name_is_known_by_its_code(kernel: Kernel) -> None:
    for _ in range(2):
        kernel.run(BEGIN.format("nameless"))
    assert kernel.run(ENDS) == "[('FINISHED', 'its cell was run again'), (None, None)]"
    kernel.run("run.end()")


def test_runs_of_other_cells_and_of_one_turn_stay_open(kernel: Kernel) -> None:
    kernel.run(BEGIN.format("one") + BEGIN.format("two"), cell="a")
    kernel.run(BEGIN.format("three"), cell="b")
    kernel.run("kept = account(run_name='kept', quiet=True)", cell="c")
    for _ in range(2):
        kernel.run("with kept if not kept.run else account(quiet=True): pass", cell="d")
    assert kernel.run(ENDS) == "[(None, None), (None, None), (None, None)]"
    kernel.run("for each in runs: each.end()")


@pytest.mark.parametrize(
    ("error", "said", "end"),
    [
        ("1 / 0", "ZeroDivisionError", "('FAILED', 'division by zero')"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", "('KILLED', 'interrupted')"),
        ("raise SystemExit(3)", "SystemExit", "('FAILED', 'sys.exit(3)')"),
    ],
)
def test_an_error_ends_the_run_that_its_cell_began(
    kernel: Kernel, error: str, said: str, end: str
) -> None:
    """It was open until the next one began, or the kernel ended."""
    assert said in kernel.run(BEGIN.format("fails") + STEP + error)
    assert kernel.run(ENDS) == f"[{end}]"


def test_a_run_lives_through_errors_of_later_cells_and_leaves_nothing_in_the_notebook(
    kernel: Kernel,
) -> None:
    kernel.run(BEGIN.format("long"))
    assert kernel.run(STEP + "typo") == "NameError"
    kernel.run(STEP + "run")
    assert kernel.shown[0]["text/html"] == "<p>long is open, 2 steps</p>"
    kernel.run("run.end()")
    assert kernel.run(ENDS) == "[('FINISHED', None)]"
    hooks = "print(get_ipython().events.callbacks['post_run_cell'])"
    assert kernel.run(hooks) == "[]"


def test_the_report_is_shown_in_the_cell_once(kernel: Kernel) -> None:
    kernel.run("with account(run_name='shown') as run: pass")
    (shown,) = kernel.shown
    assert shown["kind"] == "display_data" and REPORT in shown["text/html"]
    assert shown["text/plain"].startswith("FINISHED shown")
    kernel.run("run")
    (again,) = kernel.shown
    assert again["text/html"] == shown["text/html"]
    kernel.run("with account(quiet=True): pass")
    assert not kernel.shown


def test_a_forecast_is_a_table(kernel: Kernel) -> None:
    code = "from headroom import forecast\nforecast(nn.Linear(8, 2), torch.ones(4, 8), on='t4')"
    kernel.run(code)
    (shown,) = kernel.shown
    assert "<td>t4</td>" in shown["text/html"] and "peak of backward" in shown["text/html"]
    kernel.run(code.replace("forecast(nn", "told = str(forecast(nn") + ")")
    assert not kernel.shown


def test_the_progress_is_one_line(kernel: Kernel) -> None:
    """Each of these was a line of its own, or a second table."""
    kernel.run(
        "from headroom.run import progress\n"
        "progress.WRITE_EVERY_S = 0.0\n"
        "with progress.Progress(20, 2) as shown:\n"
        "    for step in range(20):\n"
        "        shown.update({'train/loss': 0.5}, step + 1)"
    )
    kinds = [each["kind"] for each in kernel.shown]
    assert kinds[0] == "display_data" and set(kinds[1:]) == {"update_display_data"}
    assert len(kinds) > 20 and "epoch 2/2  loss 0.5" in kernel.shown[-1]["text/plain"]


def test_a_notebook_that_is_known_gives_its_name_to_the_run(kernel: Kernel) -> None:
    kernel.run("__vsc_ipynb_file__ = '/somewhere/net.ipynb'")
    said = kernel.run("with account(quiet=True) as named: pass\nprint(named.run['name'])")
    kernel.run("del __vsc_ipynb_file__")
    assert said == "net"


def test_the_run_of_a_kernel_that_is_killed_is_killed(place: Path) -> None:
    for kernel in _start_kernel(place):
        kernel.run(BEGIN.format("open") + STEP)
        _wait(lambda: _read_status(place, "open") == "RUNNING")
        kernel.manager.shutdown_kernel(now=True)
        _wait(lambda: _read_status(place, "open") == "KILLED")


def _read_status(place: Path, name: str) -> str:
    found = query(place, STATUS.format(name)) if (place / "mlflow.db").exists() else []
    return str(found[0][0]) if found else ""


def _wait(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.2)
