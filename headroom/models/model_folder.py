"""Write the folder that a training leaves: weights, description, an example of the rows, and
for a user's own model its code: the user's modules that the import path leads to, and the
installed packages among what these import, as pinned requirements. Source text is read and none
of it is run; only *.py files are copied.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from headroom.base.import_paths import OWN, find_module_spec, is_import_path, is_installed
from headroom.models import builtin, predictor
from headroom.models.user_model import CODE

MOST_FILES = 2000  # of one package; more are somebody's environment
SKIPPED = ("__pycache__", "node_modules", "site-packages")


def save_code(name: str, folder: Path) -> list[str]:
    """Copy the code behind the import path into `folder`/code, and return its requirements, as
    pip takes them.

    Torch, numpy and pandas are required by every logged model already.
    """
    waiting, seen, installed = [name.partition(":")[0].partition(".")[0]], set(OWN), set()
    while waiting:
        top = waiting.pop()
        if top in seen or top in sys.stdlib_module_names:
            continue
        seen.add(top)
        files = _find_files(top)
        if files is None:
            installed.add(top)
        for file, place in files or []:
            target = folder / CODE / place
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            waiting += _find_imports(file)
    return _pin_requirements(installed)


def _find_files(top: str) -> list[tuple[Path, Path]] | None:
    """Return the files of a user's module or package, and where each lies under its parent;
    None for an installed one."""
    spec = find_module_spec(top)
    if spec is None:
        return []
    places = list(spec.submodule_search_locations or [])
    origin = spec.origin if spec.origin and os.path.exists(spec.origin) else None
    if is_installed(origin or (places or [""])[0]):
        return None
    if not places:
        whole = [Path(origin)] if origin and origin.endswith(".py") else []
        return [(file, Path(file.name)) for file in whole]
    files: list[tuple[Path, Path]] = []
    for place in places:
        for where, folders, names in os.walk(place):
            folders[:] = [f for f in folders if f not in SKIPPED and not f.startswith(".")]
            inside = Path(top) / Path(where).relative_to(place)
            files += [(Path(where, n), inside / n) for n in sorted(names) if n.endswith(".py")]
            if len(files) > MOST_FILES:
                return files[:MOST_FILES]
    return files


def _find_imports(file: Path) -> list[str]:
    """Return the top-level names of what a file imports, anywhere in it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return [name.partition(".")[0] for name in names]


def _pin_requirements(installed: set[str]) -> list[str]:
    distributions = packages_distributions() if installed - {"torch", "numpy", "pandas"} else {}
    names = {dist for top in installed for dist in distributions.get(top, [])}
    return sorted(f"{name}=={version(name)}" for name in names - {"torch", "numpy", "pandas"})


def save_model_folder(
    model: nn.Module, spec: dict[str, Any], rows: dict[str, np.ndarray], folder: Path
) -> None:
    """Write a folder from which `predictor.load` makes the same model again, with two example
    rows by the names of its inputs: example.npy of the only one, else example.npz.

    Raises OSError, in words of its own, where the folder can't be written.
    """
    try:
        requirements: list[str] = []
        if is_import_path(spec["model"]):
            requirements = save_code(spec["model"], folder)
        predictor.save(model, {**spec, "requirements": requirements}, folder)
        if set(rows) == {"x"}:
            np.save(folder / "example.npy", rows["x"])
        else:
            np.savez(folder / "example.npz", allow_pickle=False, **rows)
    except OSError as error:
        why = error.strerror or str(error)
    except RuntimeError as error:  # of torch.save, which says "unexpected pos" of a full disk
        if shutil.disk_usage(folder).free > builtin.count_bytes(model):
            raise
        why = f"no space left; {error}"
    else:
        return
    raise OSError(f"runs: the model can't be written to {folder} ({why}); make room there")
