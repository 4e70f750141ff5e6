"""How far it is from somebody's project to the first report: eight projects as people have them,
each in a fresh environment into which a wheel of Headroom is installed. Counted are the lines that
a project needs more, which are marked in benchmarks/projects, and the seconds from the start of the
installation to a report, of which the packages of the index take most.

`python -m benchmarks.first_projects [NAME ...]` prints the table and keeps it in
benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

from benchmarks.conditions import publish_whole

ROOT = Path(__file__).parent.parent
PROJECTS = ROOT / "benchmarks" / "projects"
MOST_LINES, MOST_S = 3, 300
ADDED = "# added"
# Its torchvision is built for CUDA, which this PyTorch need not be.
YOLO = (
    *("ultralytics", "ultralytics-thop", "torchvision", "opencv-python-headless"),
    *("polars", "polars-runtime-32"),
)


class Failed(RuntimeError):
    """A project came to no report."""


@dataclass(frozen=True)
class Place:
    """A copy of a project, with an environment of its own."""

    folder: Path
    environment: dict[str, str]

    def find(self, command: str) -> str:
        return str(self.folder / ".venv" / "bin" / command)

    def start(self, *words: str, **more: str) -> subprocess.Popen[str]:
        """Start a command of its environment in its folder."""
        return subprocess.Popen(
            [self.find(words[0]), *words[1:]],
            cwd=self.folder,
            env=self.environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str) -> str:
        """Return what a command prints. Raises Failed."""
        process = self.start(*words)
        output, _ = process.communicate(timeout=2 * MOST_S)
        if process.returncode:
            raise Failed(f"{' '.join(words)}: exit code {process.returncode}\n{output}")
        return output


@dataclass(frozen=True)
class Project:
    """Somebody's project, what its environment needs, and how it is run."""

    name: str
    needs: Sequence[str]
    run: Callable[[Place], None]
    extra: str = ""
    beside: Sequence[str] = ()  # packages that are installed without those that they name
    runs: int = 1  # that it makes, at least
    without_report: int = 0  # of them: which have a page of another kind, or are not of Headroom
    lines: int | None = None  # that it needs more, where none is marked


def _train(place: Place, *words: str) -> None:
    place.run("python", *words)


def _run_notebook(place: Place) -> None:
    place.run("jupyter", "execute", "--inplace", "loop.ipynb")
    cells = json.loads((place.folder / "loop.ipynb").read_text())["cells"]
    shown = [mime for cell in cells for out in cell["outputs"] for mime in out.get("data", {})]
    if "text/html" not in shown:
        raise Failed("the notebook shows no report")


def _run_agent(place: Place) -> None:
    page = (ROOT / "docs" / "agents.md").read_text()
    loop = re.findall(r"```python\n(.*?)```", page, re.S)[-1]
    (place.folder / "agent.py").write_text(loop)
    place.run("python", "agent.py")
    if not [*place.folder.rglob("session.html")]:
        raise Failed("the session has no page")


def _run_spot(place: Place) -> None:
    """Begin, take the machine away in the middle, and begin again by the same command."""
    first = place.start("python", "train.py", "slow")
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("step 200"):
            break
    first.send_signal(signal.SIGKILL)
    first.communicate()
    sleep(1)
    place.run("python", "train.py")


def _run_trainjob(place: Place) -> None:
    """The command line of a TrainJob's pods, with the variables that its operator sets."""
    port = "29417"
    known = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    nodes = [
        place.start(
            *("torchrun", "-m", "headroom", "train", "--train.epochs", "2", "--run.key", "night"),
            **known,
            PET_NODE_RANK=str(rank),
            PET_MASTER_PORT=port,
        )
        for rank in range(2)
    ]
    outputs = [node.communicate(timeout=2 * MOST_S)[0] for node in nodes]
    if any(node.returncode for node in nodes):
        raise Failed("\n".join(outputs))


def list_projects() -> tuple[Project, ...]:
    """Return the projects, in the order of the table."""
    return (
        Project("prefect_team", (), lambda place: _train(place, "-m", "flows.nightly")),
        Project("lightning", (), lambda place: _train(place, "train.py"), extra="lightning"),
        Project("transformers", (), lambda place: _train(place, "train.py"), extra="transformers"),
        # ultralytics has a callback of its own for MLflow, which makes the second run.
        Project(
            *("yolo", (), lambda place: _train(place, "train.py")),
            beside=YOLO,
            runs=2,
            without_report=1,
        ),
        Project("notebook", ("nbclient", "ipykernel"), _run_notebook),
        Project("agent", (), _run_agent, runs=3, without_report=1, lines=1),
        Project("spot", (), _run_spot),
        Project("trainjob", (), _run_trainjob),
    )


def main(names: Sequence[str]) -> int:
    """Measure, print, keep; return the exit code."""
    projects = [p for p in list_projects() if not names or p.name in names]
    failed: list[str] = []
    publish_whole(
        "first-projects",
        "From somebody's project to a report",
        _tell(projects, failed),
        is_whole=not names,
    )
    return 1 if failed else 0


def _tell(projects: Sequence[Project], failed: list[str]) -> Iterator[str]:
    yield ""
    yield f"Bars: {MOST_LINES} lines, {MOST_S} s. Each once, in turn."
    yield ""
    yield "| project | lines | installed after, s | report after, s | runs, as MLflow has them |"
    yield "|:--|--:|--:|--:|:--|"
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _make_wheel(Path(scratch))
        for project in projects:
            try:
                yield _try(project, wheel, Path(scratch))
            except (Failed, subprocess.TimeoutExpired) as error:
                failed.append(project.name)
                print(error, file=sys.stderr)
                yield f"| {project.name} | | | | FAILED |"


def _make_wheel(scratch: Path) -> Path:
    source = scratch / "source"  # else a folder build is left in the project
    for name in ("headroom", "flows", "tasks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    words = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(scratch), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return next(scratch.glob("*.whl"))


def _try(project: Project, wheel: Path, scratch: Path) -> str:
    place = _make_place(project.name, scratch)
    began = monotonic()
    subprocess.run([sys.executable, "-m", "venv", str(place.folder / ".venv")], check=True)
    named = f"headroom[{project.extra}] @ file://{wheel}" if project.extra else str(wheel)
    limits = ("--constraint", str(ROOT / "constraints.txt"))
    install = ("python", "-m", "pip", "install", "--quiet", *limits)
    place.run(*install, "torch", named, *project.needs)
    if project.beside:
        place.run(*install, "--no-deps", *project.beside)
    installed_s = monotonic() - began
    project.run(place)
    shown_s = monotonic() - began
    statuses = _check_runs(place, project)
    shutil.rmtree(place.folder)
    lines = _count_added(project.name) if project.lines is None else project.lines
    return f"| {project.name} | {lines} | {installed_s:.0f} | {shown_s:.0f} | {statuses} |"


def _make_place(name: str, scratch: Path) -> Place:
    folder = scratch / name
    if (PROJECTS / name).is_dir():
        shutil.copytree(PROJECTS / name, folder)
    else:
        folder.mkdir()
    drop = ("PREFECT_", "MLFLOW_", "HEADROOM_", "PYTHONPATH", "VIRTUAL_ENV")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    bin_folder = str(folder / ".venv" / "bin")
    own = {"HOME": str(folder), "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    own["PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS"] = "120"  # of a busy machine
    return Place(folder, kept | own)


def _count_added(name: str) -> int:
    """Return the lines that a project needs more; none where a command line does."""
    files = (PROJECTS / name).rglob("*") if (PROJECTS / name).is_dir() else ()
    return sum(file.read_text().count(ADDED) for file in files if file.is_file())


def _check_runs(place: Place, project: Project) -> str:
    """Return the statuses of the runs that MLflow has. Raises Failed where one has no report, or
    there are others than there should be."""
    stores = [*place.folder.rglob("mlflow.db")]
    if not stores:
        raise Failed("there is no run")
    sql = "select status, artifact_uri from runs where lifecycle_stage = 'active'"
    with closing(sqlite3.connect(stores[0])) as store:
        runs = store.execute(sql).fetchall()
    told = [Path(uri.removeprefix("file://")) / "report.html" for _, uri in runs]
    without = sum(not report.is_file() for report in told)
    statuses = ", ".join(status for status, _ in runs)
    is_whole = len(runs) >= project.runs and without == project.without_report
    if not is_whole or any(status != "FINISHED" for status, _ in runs):
        raise Failed(f"its runs are {statuses}, {without} of them without a report")
    return statuses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    sys.exit(main(parser.parse_args().names))
