"""The laws of the house, each a test: who may import whom, and how large a room may grow."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PROJECT = ("flows", "tasks", "benchmarks", "tests")
FILES = sorted(f for room in PROJECT for f in (ROOT / room).rglob("*.py"))
ENGINE = sorted((ROOT / "tasks" / "engine").glob("*.py"))
HANDS = sorted((ROOT / "tasks").glob("*.py"))
FLOWS = sorted((ROOT / "flows").glob("*.py"))


def _imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _names(file: Path) -> set[str]:
    return {name.split(".")[0] for name in _imports(file)}


def _id(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("file", ENGINE, ids=_id)
def test_the_engine_knows_neither_prefect_nor_mlflow_nor_the_storeys_above(file: Path) -> None:
    assert not _names(file) & {"prefect", "mlflow", "flows"}
    tasks = {name for name in _imports(file) if name.startswith("tasks.")}
    assert all(name.startswith("tasks.engine") for name in tasks)


@pytest.mark.parametrize("file", HANDS, ids=_id)
def test_tasks_do_not_import_flows_and_do_no_torch_work(file: Path) -> None:
    assert not _names(file) & {"flows", "torch"}


@pytest.mark.parametrize("file", HANDS + FLOWS, ids=_id)
def test_only_the_sending_process_imports_mlflow(file: Path) -> None:
    assert ("mlflow" in _names(file)) == file.name.startswith("tracking")


@pytest.mark.parametrize("file", FLOWS, ids=_id)
def test_flows_hold_no_classes_and_no_torch(file: Path) -> None:
    assert "torch" not in _names(file)
    tree = ast.parse(file.read_text())
    assert not [n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]


def test_engine_modules_import_one_way() -> None:
    needs = {
        f.stem: {
            name.split(".")[2]
            for name in _imports(f)
            if name.startswith("tasks.engine.") and name.split(".")[2] in {e.stem for e in ENGINE}
        }
        for f in ENGINE
    }
    done: set[str] = set()
    while len(done) < len(needs):
        ready = {name for name in needs if name not in done and needs[name] - {name} <= done}
        assert ready, f"a circle among {sorted(set(needs) - done)}"
        done |= ready


def test_no_engine_module_brings_prefect_or_mlflow_along() -> None:
    modules = [f"tasks.engine.{f.stem}" for f in ENGINE if f.stem != "__init__"]
    code = (
        f"import importlib, sys\n[importlib.import_module(m) for m in {modules}]\n"
        "print([m for m in ('prefect', 'mlflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "flows.cli.train_command",
        "flows.cli.flags",
        "tasks.serving.local_prefect",
        "tasks.tracking.journal",
    ],
)
def test_what_answers_first_imports_nothing_slow(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "print([m for m in ('torch', 'prefect', 'mlflow', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=_id)
def test_a_file_opens_with_what_it_is_for_and_stays_readable(file: Path) -> None:
    text = file.read_text()
    assert text.isascii()
    if file.name == "__init__.py":
        assert text == ""
    elif not file.is_relative_to(ROOT / "tests"):
        assert ast.get_docstring(ast.parse(text)), "no opening paragraph"
        assert len(text.splitlines()) <= 300


def test_there_is_no_drawer_for_odds_and_ends() -> None:
    assert not {f.stem for f in FILES} & {"utils", "helpers", "common", "misc"}


def test_mlflow_yaml_holds_no_hyper_parameter() -> None:
    from tasks.engine.settings.run_config import RunConfig

    settings = yaml.safe_load((ROOT / "mlflow.yaml").read_text())
    leaves = {name.split(".")[1] for name in RunConfig().flat()} - {"experiment"}
    assert not set(settings) & (leaves | set(RunConfig.model_fields))


def test_the_readme_tells_every_setting_as_it_is() -> None:
    from tasks.engine.settings.table import markdown_table

    told = (ROOT / "README.md").read_text()
    assert markdown_table().strip() in told


def test_the_licence_is_one_and_the_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert project["license"] == citation["license"] == "Apache-2.0"
    assert project["version"] == citation["version"]
    assert project["authors"] == citation["authors"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert f"({project['version']})" in (ROOT / "CHANGELOG.md").read_text()


def test_the_image_is_made_of_files_that_are_sent_to_it() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]}
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} == {line for line in sent if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    assert "mlflow.yaml" not in copied, "results would lie in the image"


def test_the_first_call_of_make_says_what_it_does(tmp_path: Path) -> None:
    """It was silent for two minutes."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / "python"
    python.write_text('test "$2" != venv || { mkdir -p .venv/bin; ln -s "$0" .venv/bin/python; }\n')
    python.write_text("#!/bin/sh\n" + python.read_text())
    python.chmod(0o755)
    command = ["make", "setup", f"PYTHON={python}"]
    outside = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    done = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, *steps = done.stdout.splitlines()
    assert "1 to 5 minutes and 2 GB" in first
    assert [step[:3] for step in steps] == ["1/3", "2/3", "3/3"]


def test_few_tests_need_a_gpu_itself() -> None:
    marked = [
        f.read_text().count("@pytest.mark.real_gpu(") for f in (ROOT / "tests/gpu").glob("*.py")
    ]
    assert sum(marked) <= 8
