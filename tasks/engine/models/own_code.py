"""The user's code that a model needs to be made again: the modules of their own that the import
path leads to, copied beside the weights, and the installed packages among what these import, as
pinned requirements. It reads source text and runs none of it; only *.py files are copied.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path

from tasks.engine.base.import_paths import OWN, is_installed, spec_of
from tasks.engine.models.own_factory import CODE

MOST_FILES = 2000  # of one package; more are somebody's environment
SKIPPED = ("__pycache__", "node_modules", "site-packages")


def save(name: str, folder: Path) -> list[str]:
    """Copies the code behind the import path into `folder`/code; what it requires, as pip takes it.

    What torch, numpy and pandas are is told by every logged model already.
    """
    waiting, seen, installed = [name.partition(":")[0].partition(".")[0]], set(OWN), set()
    while waiting:
        top = waiting.pop()
        if top in seen or top in sys.stdlib_module_names:
            continue
        seen.add(top)
        files = _files(top)
        if files is None:
            installed.add(top)
        for file, place in files or []:
            target = folder / CODE / place
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            waiting += _imported(file)
    return _pinned(installed)


def _files(top: str) -> list[tuple[Path, Path]] | None:
    """The files of a module or package of the user's own, and where each lies under its parent;
    None for an installed one."""
    spec = spec_of(top)
    if spec is None:
        return []
    places = list(spec.submodule_search_locations or [])
    origin = spec.origin if spec.origin and os.path.exists(spec.origin) else None
    if is_installed(origin or (places or [""])[0]):
        return None
    if not places:
        whole = [Path(origin)] if origin and origin.endswith(".py") else []
        return [(file, Path(file.name)) for file in whole]
    found: list[tuple[Path, Path]] = []
    for place in places:
        for where, folders, names in os.walk(place):
            folders[:] = [f for f in folders if f not in SKIPPED and not f.startswith(".")]
            inside = Path(top) / Path(where).relative_to(place)
            found += [(Path(where, n), inside / n) for n in sorted(names) if n.endswith(".py")]
            if len(found) > MOST_FILES:
                return found[:MOST_FILES]
    return found


def _imported(file: Path) -> list[str]:
    """Top-level names of what a file imports, wherever in it."""
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


def _pinned(installed: set[str]) -> list[str]:
    known = packages_distributions() if installed - {"torch", "numpy", "pandas"} else {}
    names = {dist for top in installed for dist in known.get(top, [])}
    return sorted(f"{name}=={version(name)}" for name in names - {"torch", "numpy", "pandas"})
