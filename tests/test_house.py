"""The laws of the house, each a test, such as who may import whom. And
its picture: `make docs` (`python -m tests.test_house`) writes what the pages under docs/ show of
the house, the settings and the names of the record."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests import pages

ROOT = Path(__file__).parent.parent
FILES = sorted(
    file
    for storey in ("headroom", "flows", "tasks", "benchmarks", "tests")
    for file in (ROOT / storey).rglob("*.py")
)
# Imports run along this list only: a room knows those before it. Up to `prediction` they know
# neither Prefect nor MLflow.
CORE_ROOMS = (
    "base",
    "settings",
    "ranks",
    "watch",
    "device",
    "report",
    "models",
    "data",
    "training",
    "launch",
    "prediction",
)
OTHER_ROOMS = (
    *("process", "prefect", "tracking", "services", "run", "prefect_flows", "comparison"),
)
ROOMS = (
    *(f"headroom.{room}" for room in (*CORE_ROOMS, *OTHER_ROOMS)),
    "headroom",
    "tasks",
    "flows.cli",
    "flows",
)
CORE = tuple(f"headroom.{room}." for room in CORE_ROOMS)
# What a storey without an __init__.py is for: others may have folders of the same names.
STOREYS = {
    "flows": "What runs, in which order: a flow a file, read top to bottom; and the commands that "
    "need no flow: forecast, new, runs, stop. No class, no torch.",
    "tasks": "One Prefect task a file: facts in, facts out, no tensor. And the forecast of memory "
    "that a person asks for before there is a run.",
    "headroom": "The doors of the library, the command `headroom`, and the accounts of loops that "
    "a framework runs: a file for each framework, imported by its users alone.",
}
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts): file
    for file in FILES
    if file.name != "__init__.py"
    and file.relative_to(ROOT).parts[0] in ("headroom", "flows", "tasks")
}


def _room(module: str) -> str:
    """Of a module by its dotted name: the package that it lies in."""
    return module.rpartition(".")[0]


@cache
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


@cache
def _needs(module: str) -> set[str]:
    """The modules of this project that it imports."""
    return {name for name in _imports(MODULES[module]) if name in MODULES}


def _id(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_every_module_lies_in_a_room_of_the_list() -> None:
    assert {_room(module) for module in MODULES} == set(ROOMS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_along_the_list_of_rooms(module: str) -> None:
    """A room knows nothing above it."""
    mine = ROOMS.index(_room(module))
    # A command line knows the flow that it plays, and a flow begins with its command line.
    known = {"flows.cli"} if _room(module) == "flows" else set()
    known |= {"flows"} if _room(module) == "flows.cli" else set()
    later = {n for n in _needs(module) if ROOMS.index(_room(n)) > mine and _room(n) not in known}
    assert not later
    if module.startswith(CORE):
        assert not _names(MODULES[module]) & {"prefect", "mlflow"}
    if module.startswith("headroom."):
        assert not _names(MODULES[module]) & {"flows", "tasks"}
    elif module.startswith("tasks."):
        assert not _names(MODULES[module]) & {"flows", "torch"}


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith(CORE)])
def test_only_the_sending_process_imports_mlflow(module: str) -> None:
    """What the training process imports of tracking/ does not bring mlflow along."""
    if "mlflow" not in _names(MODULES[module]):
        return
    assert _room(module) == "headroom.tracking"
    importers = {m for m in MODULES if module in _needs(m)} - {
        "headroom.services.serve",
        "headroom.services.first_use",
        "headroom.comparison.comparison",
        "flows.runs",  # for --accept
        "flows.verdict",  # of a run of another host
    }
    assert all(_room(m) == "headroom.tracking" for m in importers)


@pytest.mark.parametrize(
    "module", [m for m in MODULES if m.startswith("flows.") and _room(m) != "headroom"]
)
def test_flows_hold_no_classes_and_no_torch(module: str) -> None:
    assert "torch" not in _names(MODULES[module])
    tree = ast.parse(MODULES[module].read_text())
    assert not [n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]


def test_within_a_room_too_imports_make_no_circle() -> None:
    needs = {m: _needs(m) for m in MODULES if m.startswith(CORE)}
    done: set[str] = set()
    while len(done) < len(needs):
        ready = {name for name in needs if name not in done and needs[name] - {name} <= done}
        assert ready, f"a circle among {sorted(set(needs) - done)}"
        done |= ready


def test_no_core_module_brings_prefect_or_mlflow_along() -> None:
    modules = [module for module in MODULES if module.startswith(CORE)]
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
        "flows.runs",
        "flows.stop",
        "flows.verdict",
        "flows.cli.tidy_command",
        "headroom.prefect.local_prefect",
        "headroom.tracking.journal",
    ],
)
def test_what_answers_first_imports_nothing_slow(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "print([m for m in ('torch', 'prefect', 'mlflow', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("name", ["mlflow_sender", "model_finder", "query_runs"])
def test_no_process_that_asks_mlflow_imports_torch(name: str) -> None:
    """The sending process did: 2 s of a core and 150 MiB beside each run."""
    code = (
        f"import sys, headroom.tracking.{name}\n"
        "print([m for m in ('torch', 'prefect') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=_id)
def test_a_file_opens_with_what_it_is_for(file: Path) -> None:
    text = file.read_text()
    assert text.isascii()
    if file == ROOT / "headroom" / "__init__.py":
        assert ast.get_docstring(ast.parse(text))
    elif file.name == "__init__.py":
        assert len(ast.parse(text).body) == bool(text), "code where one docstring may stand"
    elif not file.is_relative_to(ROOT / "tests"):
        assert ast.get_docstring(ast.parse(text)), "no opening paragraph"


def test_what_a_comment_refers_to_exists() -> None:
    """A file that was renamed left its old name behind in six comments."""
    text = {name: file.read_text() for name, file in MODULES.items()}
    stems = {name.rpartition(".")[2]: source for name, source in text.items()}
    lost = [
        f"{name}: {found[0]}"
        for name, source in text.items()
        for found in re.finditer(r"\b[Ss]ee ([a-z_]+)\.(py\b|[A-Za-z_]+)", source)
        if found[1] not in stems
        and found[1] not in ("data", "train", "launch")  # settings
        or found[2] != "py"
        and found[1] in stems
        and not re.search(rf"^ *(def|class) {found[2]}\b|^{found[2]}\b", stems[found[1]], re.M)
    ]
    assert not lost


def test_there_is_no_drawer_for_odds_and_ends() -> None:
    assert not {f.stem for f in FILES} & {"utils", "helpers", "common", "misc"}


def test_mlflow_yaml_holds_no_hyper_parameter() -> None:
    from headroom.settings.run_config import RunConfig

    settings = YAML(typ="safe").load(ROOT / "mlflow.yaml")
    leaves = {name.split(".")[1] for name in RunConfig().flat()} - {"experiment"}
    assert not set(settings) & (leaves | set(RunConfig.model_fields))


def _edges() -> dict[str, set[str]]:
    """The rooms that each room imports from."""
    edges: dict[str, set[str]] = {room: set() for room in reversed(ROOMS)}
    for module in MODULES:
        edges[_room(module)] |= {_room(need) for need in _needs(module)} - {_room(module)}
    edges["flows.cli"].discard("flows")  # the other way is drawn
    return edges


def _reached(room: str, edges: dict[str, set[str]]) -> set[str]:
    return edges[room].union(*(_reached(next_room, edges) for next_room in edges[room]))


def _short(room: str) -> str:
    return room.removeprefix("headroom.")


def _graph() -> Iterator[str]:
    """The rooms and their imports as a mermaid graph, without arrows that others imply."""
    edges = _edges()
    yield from ("```mermaid", "graph TD")
    for room, needs in edges.items():
        farther = set().union(*(_reached(need, edges) for need in needs))
        for need in sorted(needs - farther, key=ROOMS.index):
            yield f"    {_short(room)} --> {_short(need)}"
    yield "```"


def _rooms() -> Iterator[str]:
    """The rooms, each with what it is for, as a Markdown table."""
    yield from ("| room | what it is for | files | lines |", "|:--|:--|--:|--:|")
    for room in reversed(ROOMS):
        folder = ROOT / room.replace(".", "/")
        purpose = STOREYS.get(room)
        if purpose is None:
            text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
            assert text, f"{room} does not say what it is for"
            purpose = " ".join(text.split())
        files = [MODULES[m] for m in MODULES if _room(m) == room]
        lines = sum(len(file.read_text().splitlines()) for file in files)
        yield f"| `{folder.relative_to(ROOT)}` | {purpose} | {len(files)} | ~{lines} |"


def _make_parts() -> dict[str, str]:
    """The generated parts of docs/architecture.md, by the names that stand in its comments."""
    return {"picture": "\n".join(_graph()), "rooms": "\n".join(_rooms())}


def test_a_page_shows_the_house_as_it_is() -> None:
    """Lines come and go with each change: those are told within a fifth."""
    pages.check_page("architecture.md", _make_parts(), counts=r"(?<=\| ~)\d+")


def _is_constant(node: ast.expr) -> bool:
    return all(isinstance(one, ast.Constant | ast.Tuple | ast.Load) for one in ast.walk(node))


def _listed_names(node: ast.AST, known: set[str]) -> list[str]:
    """The metrics that stand in a tuple, a list or a set, by themselves or as the first of pairs,
    or that a dict has words for."""
    if isinstance(node, ast.Dict):
        parts = node.keys if all(map(_is_constant, node.values)) else []
    else:
        parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else []
    firsts = [part.elts[0] if isinstance(part, ast.Tuple) and part.elts else part for part in parts]
    return [one.value for one in firsts if isinstance(one, ast.Constant) and one.value in known]


def test_there_is_one_list_of_the_names_of_metrics() -> None:
    """There were some thirty tuples and dicts of them, each with its own order, words and gaps."""
    from headroom.base.names import METRICS

    known = {metric.name for metric in METRICS}
    lists = {
        f"{name}:{node.lineno}": found
        for name, file in MODULES.items()
        if name != "headroom.base.names"
        for node in ast.walk(ast.parse(file.read_text()))
        if len(found := _listed_names(node, known)) > 2
    }
    assert not lists, "give these a Place in headroom/base/names.py"


def test_the_core_of_the_training_is_small_and_hangs_together() -> None:
    """Each file that a person must read to change the loop is used by another of them, or by the
    command."""
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## The core\n")[2]
    names = re.findall(r"^\| `([^`]+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert len(names) == 11
    modules = {name.removesuffix(".py").replace("/", ".") for name in names}
    used = {need for module in modules for need in _needs(module)}
    assert modules - used == {"flows.train"}
    lines = sum(len(MODULES[module].read_text().splitlines()) for module in modules)
    assert lines <= 3000, "what it takes to change the loop has grown"


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Among them the answers to the ten questions of docs/architecture.md."""
    named = re.findall(r"`((?:headroom|flows|tasks|tests|benchmarks)/[^`*]*)`", page.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_licence_is_one_and_the_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = YAML(typ="safe").load(ROOT / "CITATION.cff")
    assert project["license"] == citation["license"] == "Apache-2.0"
    assert project["version"] == citation["version"]
    assert project["authors"] == citation["authors"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert f"({project['version']})" in (ROOT / "CHANGELOG.md").read_text()


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
        f.read_text().count("@pytest.mark.real_gpu(") for f in (ROOT / "tests/gpu").rglob("*.py")
    ]
    assert sum(marked) <= 8


if __name__ == "__main__":
    from tests.base.test_metrics_page import make_parts as make_metrics
    from tests.report.test_verdict_page import make_parts as make_rules
    from tests.settings.test_settings_page import make_parts as make_settings

    pages.write_page("architecture.md", _make_parts())
    pages.write_page("settings.md", make_settings())
    pages.write_page("metrics.md", make_metrics())
    pages.write_page("verdict.md", make_rules())
