"""Headroom as a dependency of somebody else's project: built as a wheel and installed into a fresh
environment, plain and editable, beside a project with folders `flows` and `tasks` of its own. The
heavy libraries are lent from the environment of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.conftest import ROOT

ACCOUNT = """
import flows.etl, tasks.clean
assert flows.etl.WHOSE == tasks.clean.WHOSE == "theirs"
import torch
from headroom import account, fits
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with account(run_name="mine", model=net, optimizer=optimizer, quiet=True) as run:
    for _ in range(3):
        net(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
assert run.loop.done == 3
assert fits(net, torch.zeros(8, 4), on="l4")
import flows.train
assert flows.train.WHOSE == "theirs"
print("loop done")
"""


def _make_environment(folder: Path, *, editable: bool) -> Path:
    """Return the Python of a new environment with this project in it."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    source = folder / "source"
    source.mkdir()
    for name in ("headroom", "flows", "tasks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    words = ["--editable"] if editable else []
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    command += ["--no-deps", "--disable-pip-version-check", *words, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # After it, so that what is installed is not taken for what is lent. A .pth of a lent folder is
    # not read: the environment of the tests has this project too.
    lent = {Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")}
    lent |= {Path(entry) for entry in sys.path if entry.endswith("site-packages")}
    (site / "zz_lent.pth").write_text("".join(f"{entry}\n" for entry in sorted(lent)))
    return python


@pytest.fixture(scope="module", params=["plain", "editable"])
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    return _make_environment(folder, editable=request.param == "editable")


@pytest.fixture(params=["packages", "folders"])
def project(request: pytest.FixtureRequest, place: Path) -> Path:
    """A project with `flows` and `tasks` of its own, with and without __init__.py."""
    for name, module in (("flows", "etl"), ("flows", "train"), ("tasks", "clean")):
        (place / name).mkdir(exist_ok=True)
        (place / name / f"{module}.py").write_text('WHOSE = "theirs"\n')
        if request.param == "packages":
            (place / name / "__init__.py").touch()
    return place


def _run(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    given = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TESTS_"))}
    return subprocess.run(
        [str(python), *words], env=given, capture_output=True, text=True, timeout=200
    )


def test_accounts_and_forecasts_work_beside_flows_and_tasks_of_others(
    python: Path, project: Path
) -> None:
    (project / "loop.py").write_text(ACCOUNT)
    done = _run(python, "loop.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loop done"


@pytest.mark.parametrize("project", ["packages"], indirect=True)
@pytest.mark.parametrize("command", ["headroom", "python -m headroom"])
def test_the_command_trains_beside_flows_and_tasks_of_others(
    python: Path, project: Path, command: str
) -> None:
    words = ["train", "--dry-run"]
    if command == "headroom":
        done = _run(python, str(python.parent / "headroom"), *words)
    else:
        done = _run(python, "-m", "headroom", *words)
    assert done.returncode == 0, done.stderr
    assert "device" in done.stdout


def test_a_command_that_is_not_there_gets_one_line() -> None:
    done = _run(Path(sys.executable), "-m", "headroom", "trian")
    assert done.returncode == 2
    assert done.stderr == "headroom: there is no command 'trian'; did you mean train?\n"


def test_the_doors_import_neither_prefect_nor_mlflow() -> None:
    code = (
        "import sys, headroom\n"
        "assert 'torch' not in sys.modules\n"
        "headroom.account, headroom.forecast, headroom.fits, headroom.peak\n"
        "print([name for name in ('prefect', 'mlflow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_pytest_finds_the_marker_where_it_is_installed(python: Path, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -W error\n")
    (tmp_path / "test_net.py").write_text(
        "import pytest\nimport torch\n\n"
        '@pytest.mark.memory(on="T4")\n'
        "def test_it(memory): memory(torch.nn.Linear(4, 2), torch.zeros(8, 4))\n"
    )
    words = ("-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path))
    done = _run(python, *words, "--memory-update")
    assert done.returncode == 0 and "1 written" in done.stdout, done.stdout + done.stderr
    # Also where a project names it, as without an installation.
    again = _run(python, *words, "-p", "headroom.pytest_plugin")
    assert again.returncode == 0 and "1 passed" in again.stdout, again.stdout + again.stderr
