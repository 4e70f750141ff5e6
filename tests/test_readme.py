"""The commands of the README and of the pages under docs/, as they are written, in a clone that is
set up: each block in a fresh shell, what an earlier block did not do already. Blocks of Python are
run too, and a block that begins with the name of a file is that file."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml
from PIL import Image

from tests.conftest import warm_python

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What does not run here, by a part of the command, and why not.
LEFT_OUT = {
    "make ui": "it serves until it is ended: tests/services/test_serve.py",
    "make serve ": "tests/flows/test_scheduled.py",
    "make serve-down": "tests/flows/test_scheduled.py",
    "docker ": "needs Docker: tests/flows/test_team.py starts what compose.yaml names",
    "prefect work-pool create": "needs a Prefect server",
    "prefect deployment run": "needs `make serve`: tests/flows/test_scheduled.py",
    "prefect flow-run ls": "needs `make serve`: tests/flows/test_scheduled.py",
    "PREFECT_API_URL": "names the server of `make serve`",
    ".venv/bin/activate": "done for every block",
    "flows.runs --accept RUN": "it takes a run: tests/tracking/test_mlflow_sender.py",
    "flows.runs --watch": "it watches until Ctrl-C: tests/flows/test_runs.py",
    "flows.stop night": "needs a training that lives: tests/flows/test_runs.py",
    "--devices all": "one training after another: tests/comparison/test_grid.py",
    "--search tpe --trials 30": "30 trainings: tests/flows/test_search.py",
    "book.txt": "trains a large model",
    "models:/churn@champion": "needs a registered model: tests/flows/test_predict.py",
}
# Refused where no GPU is.
REFUSED = {"--device.name cuda:1", "--device.name gpu"}
# What takes long is as good with fewer steps, and fewer rows to validate on.
SHORTER = {"--data.source text": "--train.max_steps 20 --data.validation_fraction 0.002 \\g<0>"}
# One run of those that a decision takes: what comes out is undecided.
JUDGES = ("flows.judge ", "flows.session judge ")
TRAINS = r"make train|flows\.train (?!.*--(?:dry|fore|expl|help))"


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    found = re.findall(r"```(sh|python|yaml)\n(.*?)```", page.read_text(), re.DOTALL)
    return [Block(page.name, language, text) for language, text in found]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL = [block for block in BLOCKS if block.language == "sh"]
FILES = [block for block in BLOCKS if block.text.startswith("# ")]
PYTHON = [block for block in BLOCKS if block.language == "python" and block not in FILES]


def _commands(block: Block) -> list[str]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip()]


def _kept(block: Block) -> list[str]:
    return [c for c in _commands(block) if not any(part in c + " " for part in LEFT_OUT)]


class Clone(NamedTuple):
    folder: Path
    done: set[str]  # commands and blocks that need not be run twice

    def run(self, *command: str) -> str:
        """What the command said. It must have succeeded."""
        environment = {
            "HOME": str(self.folder / "home"),  # a fresh one: also of Prefect
            "PATH": f"{self.folder / '.venv' / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.folder),  # as where it is installed: also from another folder
            "MPLCONFIGDIR": os.environ["MPLCONFIGDIR"],
            "CUDA_VISIBLE_DEVICES": "",
            "PYTEST_PLUGINS": "headroom.pytest_plugin",  # also where an older one is installed
            "TESTS_WARM_KIND": "torch",  # of `python -c`
            **({} if self.done else {"TESTS_COLD": "1"}),  # the first imports all itself
        }
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone that is set up, with the files that the pages speak of."""
    project = tmp_path_factory.mktemp("clone")
    for name in ("headroom", "flows", "tasks"):
        # What another worker is compiling comes and goes.
        compiled = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, project / name, ignore=compiled)
    for name in ("Makefile", "mlflow.yaml", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, project)
    (project / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name not in (".ready", "bin"):
            (project / ".venv" / entry.name).symlink_to(entry)
    bin = project / ".venv" / "bin"
    warm_python(bin, str(bin / "python3"))
    (project / ".venv" / ".ready").touch()
    rng = np.random.default_rng(0)
    rows = [
        f"{i},n{i},{rng.normal():.3f},{rng.normal():.3f},{100 + i % 7}.5,{i % 2}"
        for i in range(200)
    ]
    head = "id,name,age,spent,price,churned"
    (project / "houses.csv").write_text("rooms,area,price\n" + _columns(rows, 2, 3, 4))
    (project / "customers.csv").write_text("\n".join([head, *rows]) + "\n")
    sales = "".join(f"2024-01-{1 + i // 8:02d},{i % 13},{i % 7}.5\n" for i in range(200))
    (project / "sales.csv").write_text("day,visits,amount\n" + sales)
    (project / "rows.csv").write_text("id,rooms,area\n" + _columns(rows, 0, 2, 3))
    for name in ("cat", "dog"):
        (project / "pets" / name).mkdir(parents=True)
        for i in range(40):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(project / "pets" / name / f"{i}.png")
    for block in FILES:
        name, _, text = block.text.removeprefix("# ").partition("\n")
        (project / name).write_text(text)
    return Clone(project, set())


def _columns(rows: list[str], *wanted: int) -> str:
    return "".join(",".join(row.split(",")[i] for i in wanted) + "\n" for row in rows)


def _name(block: Block) -> str:
    return f"{block.page}: {block.text.split('  ')[0].splitlines()[0][:60]}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", [b for b in SHELL if _kept(b)], ids=_name)
def test_the_commands_of_the_pages_work_as_written(block: Block, clone: Clone) -> None:
    """Those of the README are the first, and what they did is not done again."""
    moves = any(command.startswith("cd ") for command in _kept(block))
    asked = ["\n".join(_kept(block))] if moves else _kept(block)
    done = set() if block.page == "predict.md" else clone.done  # it takes the newest models
    script = "\n".join(command for command in asked if _bare(command) not in done)
    trainings = len(re.findall(TRAINS, script)) - sum(script.count(part) for part in REFUSED)
    for part, shorter in SHORTER.items():
        script = re.sub(part, shorter, script)
    for part in REFUSED:
        script = re.sub(rf"(.*{part}[^#\n]*)", r"\1 || test $? = 2 ", script)
    for part in JUDGES:
        script = re.sub(rf"(.*{part}[^#\n]*)", r"\1 --runs 1 || test $? = 3 ", script)
    said = clone.run("sh", "-ec", script)
    assert len(re.findall("^FINISHED", said, re.MULTILINE)) == trainings
    clone.done.update(map(_bare, asked))


def _bare(command: str) -> str:
    return re.sub(r"\s+#.*", "", command)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", sorted({block.page for block in PYTHON}))
def test_the_python_of_the_pages_works_as_written(page: str, clone: Clone) -> None:
    for framework in ("lightning", "transformers", "accelerate") * (page == "frameworks.md"):
        pytest.importorskip(framework)
    code = "\n".join(block.text for block in PYTHON if block.page == page)
    said = clone.run("python", "-c", code)
    assert ("FINISHED" in said) is ("import train" in code)


def test_what_is_left_out_stands_in_the_pages() -> None:
    commands = [command + " " for block in SHELL for command in _commands(block)]
    for part in (*LEFT_OUT, *REFUSED, *SHORTER):
        assert any(part in command for command in commands), part


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_the_pages_lead_somewhere(page: Path) -> None:
    for target, _, heading in re.findall(r"\]\((?!http)([^)#]*)(#([^)]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert heading in {h.lower().replace(" ", "-") for h in headings}


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= 150


def test_the_scripts_and_manifests_of_a_cluster_can_be_read() -> None:
    """Nothing runs them here: a quote too few would be found on the cluster."""
    text = (ROOT / "docs" / "clusters.md").read_text()
    scripts = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    manifests = re.findall(r"```\n(apiVersion.*?)```", text, re.DOTALL)
    assert len(scripts) == 2 and len(manifests) == 2
    for script in scripts:
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert checked.returncode == 0 and not checked.stderr, checked.stderr
    kinds = [one["kind"] for text in manifests for one in yaml.safe_load_all(text)]
    assert kinds == ["TrainJob", "Service", "Job"]


def test_the_job_of_a_spot_machine_puts_its_runs_into_the_bucket(clone: Clone) -> None:
    """A mount that is not cached takes no log that grows: tried with rclone on an S3 store."""
    text = (ROOT / "docs" / "clusters.md").read_text()
    job = yaml.safe_load(re.search(r"```yaml\n(name: night.*?)```", text, re.DOTALL)[1])
    assert {path: at["mode"] for path, at in job["file_mounts"].items()} == {
        "/runs": "MOUNT_CACHED"
    }
    (clone.folder / "spot").mkdir()
    shutil.copy(ROOT / "mlflow.yaml", clone.folder / "spot")
    clone.run("sh", "-ec", f"cd spot\n{job['run'].rstrip()} --dry-run")
    told = yaml.safe_load((clone.folder / "spot" / "mlflow.yaml").read_text())
    assert told == {**yaml.safe_load((ROOT / "mlflow.yaml").read_text()), "runs": "/runs"}
