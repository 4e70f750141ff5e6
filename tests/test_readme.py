"""The commands of the README, as they are written, each block in a fresh shell of a new clone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

# What does not run here, by a part of the command, and why not.
LEFT_OUT = {
    "make test ": "it is what runs this",
    "make ui": "it serves until it is ended: tests/tasks/test_serve.py",
    "make serve ": "tests/flows/test_scheduled.py",
    "make serve-down": "tests/flows/test_scheduled.py",
    "prefect deployment run": "needs `make serve`: tests/flows/test_scheduled.py",
    "prefect flow-run ls": "needs `make serve`: tests/flows/test_scheduled.py",
    "PREFECT_API_URL": "names the server of `make serve`",
    ".venv/bin/activate": "done for every block",
    "--device.name cuda:1": "needs two GPUs",
    "make train ARGS": "trains a language model for 21 s on two idle CPU cores",
    "book.txt": "trains a larger one",
    "models:/churn@champion": "needs a registered model: tests/flows/test_predict.py",
}


def _commands(block: str) -> list[str]:
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip()]


KEPT = [
    "\n".join(c for c in _commands(block) if not any(part in c for part in LEFT_OUT))
    for block in BLOCKS
]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone that is set up, with the files that the README speaks of."""
    project = tmp_path_factory.mktemp("clone")
    for name in ("flows", "tasks"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "mlflow.yaml", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, project)
    (project / ".venv").mkdir()
    for entry in Path(sys.prefix).iterdir():
        if entry.name != ".ready":
            (project / ".venv" / entry.name).symlink_to(entry)
    (project / ".venv" / ".ready").touch()
    rng = np.random.default_rng(0)
    rows = [
        f"{i},n{i},{rng.normal():.3f},{rng.normal():.3f},{100 + i % 7}.5,{i % 2}"
        for i in range(200)
    ]
    head = "id,name,age,spent,price,churned"
    (project / "houses.csv").write_text("rooms,area,price\n" + _columns(rows, 2, 3, 4))
    (project / "customers.csv").write_text("\n".join([head, *rows]) + "\n")
    (project / "rows.csv").write_text("customer_id,age,spent,price\n" + _columns(rows, 0, 2, 3, 4))
    for name in ("cat", "dog"):
        (project / "pets" / name).mkdir(parents=True)
        for i in range(40):
            pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(project / "pets" / name / f"{i}.png")
    return project


def _columns(rows: list[str], *wanted: int) -> str:
    return "".join(",".join(row.split(",")[i] for i in wanted) + "\n" for row in rows)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", [b for b in KEPT if b], ids=lambda b: b.split("  ")[0][:60])
def test_the_commands_of_the_readme_work_as_written(block: str, clone: Path) -> None:
    environment = {
        "HOME": str(clone / "home"),  # a fresh one: also of Prefect
        "PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}",
        "MPLCONFIGDIR": os.environ["MPLCONFIGDIR"],
    }
    done = subprocess.run(
        ["sh", "-ec", block], cwd=clone, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trainings = len(re.findall(r"make train|flows\.train (?!.*--(dry|fore|expl))", block))
    assert done.stdout.count("FINISHED") == trainings


def test_what_is_left_out_stands_in_the_readme() -> None:
    commands = [command + " " for block in BLOCKS for command in _commands(block)]
    for part in LEFT_OUT:
        assert any(part in command for command in commands), part
