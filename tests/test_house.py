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
    "headroom": "The doors of the library, the command `headroom`, the accounts of loops that a "
    "framework runs, a file for each framework, and the plugin of pytest: imported by their users "
    "alone.",
}
# What a test may import of a room that it does not lie in: what the rooms hand to each other, and
# what makes it. Everything else of a room is for the tests in its own folder, tests/ROOM or
# tests/gpu/ROOM; a test that needs it belongs there, or speaks through train, predict, account, a
# task or a command.
DOORS = {
    # What was asked for, and the refusal of it.
    *("settings.run_config.RunConfig", "settings.run_config.DataConfig"),
    *("settings.run_config.OptimConfig", "settings.read_settings.resolve_config"),
    *("settings.read_settings.override_config", "settings.read_settings.ConfigError"),
    *("tracking.tracking_settings.read_tracking_settings",),
    *("tracking.tracking_settings.TrackingError", "settings.model_args.ModelError"),
    # The facts that tasks hand on, and the list of names in them.
    *("base.facts.Column", "base.facts.DataFacts", "base.facts.DeviceFacts"),
    *("base.facts.ModelFacts", "base.facts.PredictFacts", "base.facts.TrainFacts"),
    *("base.names.METRICS", "base.names.OWNERS", "base.scores.Evaluation"),
    # The device.
    *("device.detection.detect_best_device", "device.detection.DeviceError"),
    "device.detection.TemporaryDeviceError",
    # The data set: prepared, opened, as batches, and rows as a user has them.
    *("data.preparation.prepare_dataset", "data.preparation.load_arrays"),
    *("data.dataset_batches.place_rows", "data.dataset_batches.draw_row_order"),
    *("data.dataloaders.LoaderBatches", "data.batch.Batch", "data.source_data.DataError"),
    "base.raw_inputs.make_inputs",
    # A model, as it is made, saved and loaded.
    *("models.builtin.build_model", "models.predictor.save", "models.predictor.load"),
    # The plan, its training, how that is stopped, what it keeps and how it fails.
    *("training.plan.make_plan", "training.trainer.train", "training.admission.PastRuns"),
    *("training.loop.StopRequest", "training.kept_steps.list_steps"),
    *("training.checkpoints.NoRoom", "watch.step_metrics.Diverged"),
    *("watch.oom_report.OutOfMemory", "watch.out_of_memory.MemoryFailure"),
    # Several processes.
    *("ranks.ranks.Ranks", "ranks.ranks.read_ranks_from_environment", "ranks.ranks.LostProcess"),
    "ranks.ranks.LostRank",
    # What measures a loop, and proves that the memory was given back.
    *("watch.own_loop.OwnLoop", "watch.phases.Watched", "watch.allocation_log.AllocationLog"),
    *("watch.leaks.take_baseline", "watch.leaks.release_device_memory", "watch.leaks.LeakError"),
    # The runs of this machine, their locks, and how recording one fails.
    *("run.known_runs.list_known_runs", "run.known_runs.KnownRun", "base.file_lock.FileLock"),
    *("tracking.journal.JournalError", "tracking.journal.SenderEnded"),
    # A server of Prefect, as a person with curl asks it.
    *("prefect.prefect_http.call_api", "prefect.prefect_http.is_healthy"),
}
MOST_DOORS = 58
# What tests put something else in place of, by its name, in a room that they do not lie in: a limit
# that would take gigabytes or minutes to reach, or a fault. It may only shrink.
REPLACED = {
    *("base.event_log.BATCH", "data.dataset_batches.RESIDENT_SHARE"),
    *("data.delimited_text.BLOCK_BYTES", "data.delimited_text.LONGEST_BYTES"),
    *("data.json_lines.BLOCK_BYTES", "data.json_lines.HEAD_BYTES"),
    *("models.predictor.rebuild_network", "process.command.leave_prefect"),
    *("prefect.prefect_http.is_pool_paused", "prefect.prefect_http.set_pool_paused"),
    *("run.alerts.", "run.messages.TIMEOUT_S", "run.messages.deliver"),
    *("settings.run_config.LEAST_WAIT_S", "tracking.journal.OPEN_S", "tracking.journal.SILENT_S"),
    *("tracking.journal.append_line", "tracking.journal.start_sender"),
    *("training.place.admit_training", "training.shared_model.make_model"),
    *("training.trainer.fit_model", "watch.host_memory.psutil.virtual_memory"),
    *("watch.leaks.is_broken", "watch.memory_meter.MemoryMeter.is_thrashing"),
    *("watch.memory_meter.count_allocated_bytes", "watch.own_loop.COUNT_SHARE"),
    *("watch.own_loop.TIME_FIRST", "watch.own_loop.has_compiled", "watch.phases.TIME_FIRST"),
    *("watch.phases._is_due", "watch.throughput._SHEETS"),
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
        "headroom.comparison.trained_comparison",
        "headroom.comparison.referee",
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


def _find_inner(name: str) -> str | None:
    """The module of a room that this dotted name is of, if there is one."""
    module = ".".join(name.split(".")[:3])
    return module if module in MODULES and module.startswith("headroom.") else None


def _list_inner_names(tree: ast.Module) -> Iterator[str]:
    """What a test imports of modules of rooms, also by way of a module that it imports whole."""
    whole: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _find_inner(alias.name))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in MODULES:
                    whole[alias.asname or alias.name] = name
                elif _find_inner(name):
                    yield name
    asked = {
        node.value.id: node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    yield from (name for alias, name in whole.items() if _find_inner(name) and alias not in asked)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if _find_inner(module := whole.get(node.value.id, "")):
            yield f"{module}.{node.attr}"


def _list_replaced(tree: ast.Module) -> Iterator[str]:
    """What a text of a test names within a module of a room."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = _find_inner(node.value)
            if module and node.value != module and " " not in node.value:
                yield node.value


def _find_room_of_test(file: Path) -> str:
    """The room that a test lies in; empty where it lies in none."""
    folders = file.relative_to(ROOT / "tests").parts[:-1]
    folders = folders[1:] if folders[:1] == ("gpu",) else folders
    return f"headroom.{folders[0]}" if folders else ""


# It plays the record's modules of several rooms together, and replaces what they call.
SIMULATION = ROOT / "tests" / "simulation"
TESTS = [
    file
    for file in FILES
    if file.is_relative_to(ROOT / "tests") and not file.is_relative_to(SIMULATION)
]


@pytest.mark.parametrize("file", TESTS, ids=_id)
def test_a_test_speaks_through_doors_where_it_does_not_lie_in_the_room(file: Path) -> None:
    """553 inner names were imported by tests, each of which no longer could be changed alone."""
    room, tree = _find_room_of_test(file), ast.parse(file.read_text())
    for names, known in ((_list_inner_names, DOORS), (_list_replaced, REPLACED)):
        elsewhere = {name for name in names(tree) if not name.startswith(f"{room}.")}
        assert not elsewhere - {f"headroom.{door}" for door in known}


def test_doors_are_few_and_each_is_used() -> None:
    trees = {file: ast.parse(file.read_text()) for file in TESTS}
    for names, known in ((_list_inner_names, DOORS), (_list_replaced, REPLACED)):
        used = {
            name.removeprefix("headroom.")
            for file, tree in trees.items()
            for name in names(tree)
            if not name.startswith(f"{_find_room_of_test(file)}.")
        }
        assert not known - used, "of no use any more"
    assert len(DOORS) <= MOST_DOORS


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
