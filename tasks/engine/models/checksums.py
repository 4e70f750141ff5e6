"""Checksums of a logged model's files, in the format that `sha256sum -c SHA256SUMS` reads: written
when a model is logged, and looked at before anything is made of its files. It refuses files that
are not as they were logged. It travels with logged models.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from tasks.engine.settings.model_args import ModelError

SUMS = "SHA256SUMS"


def seal(folder: Path, files: Iterable[Path]) -> None:
    """Write the checksums of these files into `folder`, which holds the weights."""
    lines = [f"{_digest(f)}  {Path(os.path.relpath(f, folder)).as_posix()}\n" for f in files]
    (folder / SUMS).write_text("".join(lines))


def check_seal(folder: Path, *names: str) -> None:
    """Raises ModelError where a file is not as it was sealed. names: these only. A model that was
    logged before there were checksums has none to be looked at."""
    if not (folder / SUMS).is_file():
        return
    lines = [line.partition("  ") for line in _read(folder / SUMS).splitlines()]
    bad = [
        f"{name} is {'not as it was logged' if (folder / name).is_file() else 'gone'}"
        for digest, _, name in lines
        if (not names or name in names) and _digest(folder / name) != digest
    ]
    if not lines:
        bad = [f"{SUMS} holds no checksums"]
    if bad:
        raise ModelError(
            f"run: the model in {folder} was damaged or changed: {bad[0]} (SHA-256); bring its "
            "files back, choose another run, or train it anew"
        )


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _digest(file: Path) -> str:
    try:
        with open(file, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError:
        return ""
