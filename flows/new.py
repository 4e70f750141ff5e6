"""Starts a project of a user's own: `python -m flows.new DIR` writes a small example of a model,
data, settings and a test into DIR, whole or not at all, and prints the commands that run it. It
refuses a folder that holds anything, and imports nothing slow. Exit codes: 0 written, 2 bad input.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from headroom.base.program import Parser
from headroom.base.units import make_printable
from headroom.settings.read_settings import ConfigError

MODEL = '''\
"""The model: any nn.Module. It is built with the arguments under `model.args`, and told the shape
of a row and how many outputs the data needs, where it has parameters of these names.
"""

from torch import Tensor, nn


class Net(nn.Module):
    """Two hidden layers."""

    def __init__(self, input_shape: tuple[int, ...], outputs: int, width: int = 64) -> None:
        super().__init__()
        (features,) = input_shape
        self.layers = nn.Sequential(
            nn.Linear(features, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits (rows, outputs) of rows (rows, features)."""
        return self.layers(x)
'''
DATA = '''\
"""The data: a function that returns arrays, or Datasets, or DataLoaders. It is called with the
arguments under `data.args`. Put your own in its place.
"""

import numpy as np

TURNS = 1.25


def load(rows: int = 3000, noise: float = 0.02, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points (rows, 2) on three arms of a spiral, and the arm (rows,) of each."""
    random = np.random.default_rng(seed)
    arm = random.integers(0, 3, rows)
    radius = np.sqrt(random.uniform(0.02, 1, rows))
    angle = 2 * np.pi * (TURNS * radius + arm / 3)
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points += random.normal(0, noise, points.shape)
    return points.astype(np.float32), arm
'''
CONFIG = """\
# Every setting: python -m flows.train --help
data:
  source: "data:load"        # module:function; arguments go into data.args
  args: {rows: 3000}
model:
  name: "model:Net"          # module:class or function; arguments go into model.args
  args: {width: 64}
optim: {lr: 0.01}
train: {epochs: 20, batch_size: 64}
"""
TEST = '''\
"""Quick checks of the model and the data: python -m pytest"""

import torch
from data import load
from model import Net


def test_the_model_gives_a_logit_for_each_class() -> None:
    assert Net((2,), 3)(torch.zeros(5, 2)).shape == (5, 3)


def test_the_model_learns_the_data() -> None:
    torch.manual_seed(0)
    x, y = (torch.from_numpy(values) for values in load(rows=500))
    net = Net((2,), 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    losses = []
    for _ in range(200):
        loss = torch.nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
'''
MLFLOW = """\
# Where results go. Paths are relative to this file.
tracking_uri: sqlite:///mlflow.db
artifacts: mlartifacts
experiment: starter
runs: .headroom/runs
"""
ROWS = """\
x1,x2
0.9,0.1
-0.4,0.6
0.2,-0.7
"""
IGNORED = """\
.headroom/
mlartifacts/
mlflow.db*
__pycache__/
"""
README = """\
# A model of your own

`model.py` is the model, `data.py` the data, `config.yaml` the settings of a training, `mlflow.yaml`
says where results go, `rows.csv` holds rows to predict.

```sh
python -m flows.train --config config.yaml
python -m flows.predict --input rows.csv --output predictions.csv
mlflow ui --backend-store-uri sqlite:///mlflow.db
python -m pytest
```

Change `model.py` and `data.py` into your own. `python -m flows.train --help` shows every setting.
"""
FILES = {
    "model.py": MODEL,
    "data.py": DATA,
    "config.yaml": CONFIG,
    "test_model.py": TEST,
    "mlflow.yaml": MLFLOW,
    "rows.csv": ROWS,
    ".gitignore": IGNORED,
    "README.md": README,
}


def write_example(name: str) -> Path:
    """Write the example into the new or empty folder `name`, whole or not at all.

    Raises ConfigError where that can't be done.
    """
    folder = _find_free_folder(name)
    made = _make_folders(folder)
    written: list[Path] = []
    try:
        for file, text in FILES.items():
            written.append(folder / file)
            # "x": what came to exist meanwhile is not ours to overwrite.
            with open(folder / file, "x", encoding="ascii") as opened:
                opened.write(text)
    except OSError as error:
        if isinstance(error, FileExistsError):
            written.pop()
        _remove_written(written, made)
        raise ConfigError(_describe_write_error(folder, error)) from None
    except BaseException:
        _remove_written(written, made)
        raise
    return folder


def list_commands(name: str) -> list[str]:
    """Return the commands that train the example, predict with it and test it."""
    is_found = shutil.which("python") is not None
    is_this = is_found and os.path.samefile(shutil.which("python") or "", sys.executable)
    python = "python" if is_this else shlex.quote(sys.executable)
    return [
        f"cd {shlex.quote(f'./{name}' if name.startswith('-') else name)}",
        f"{python} -m flows.train --config config.yaml",
        f"{python} -m flows.predict --input rows.csv --output predictions.csv",
        f"{python} -m pytest",
    ]


def _find_free_folder(name: str) -> Path:
    shown = repr(make_printable(name, limit=300))
    if not name or "\0" in name:
        raise ConfigError(f"DIR: must name a folder (got {shown}); name a new one")
    folder = Path(os.path.abspath(os.path.expanduser(name)))
    try:
        if folder.is_dir():
            if any(folder.iterdir()):
                raise ConfigError(f"DIR: {shown} is not empty; name a new folder")
        elif os.path.lexists(folder):
            raise ConfigError(f"DIR: {shown} is a file; name a new folder")
    except OSError as error:
        raise ConfigError(_describe_write_error(folder, error)) from None
    return folder


def _make_folders(folder: Path) -> list[Path]:
    """Make the folders that are missing; return them, the outermost first."""
    missing = [f for f in [folder, *folder.parents] if not os.path.lexists(f)][::-1]
    made: list[Path] = []
    try:
        for one in missing:
            one.mkdir()
            made.append(one)
    except OSError as error:
        _remove_written([], made)
        raise ConfigError(_describe_write_error(folder, error)) from None
    return made


def _remove_written(files: list[Path], folders: list[Path]) -> None:
    with suppress(OSError):
        for file in files:
            file.unlink(missing_ok=True)
        for folder in reversed(folders):
            folder.rmdir()


def _describe_write_error(folder: Path, error: OSError) -> str:
    shown = make_printable(str(folder), limit=300)
    return f"DIR: {shown!r} cannot be written ({error.strerror}); name a folder elsewhere"


def main(argv: Sequence[str]) -> int:
    """Write the example. Returns the exit code."""
    parser = Parser(
        prog="python -m flows.new",
        description="Write a small example of your own model, data and settings, which trains.",
    )
    parser.add_argument("folder", metavar="DIR", help="A new or empty folder.")
    name = parser.parse_args(list(argv)).folder
    try:
        folder = write_example(name)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{folder} holds {', '.join(FILES)}. Now:\n")
    for command in list_commands(name):
        print(f"  {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
