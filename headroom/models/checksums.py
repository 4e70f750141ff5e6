"""Write and check the checksums of a logged model's files, in the format that `sha256sum -c
SHA256SUMS` reads: written when a model is logged, and checked before its files are used.
Changed files are refused. It travels with logged models.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from headroom.settings.model_args import ModelError

SUMS = "SHA256SUMS"


def write_checksums(folder: Path, files: Iterable[Path]) -> None:
    """Write the checksums of these files into `folder`, which holds the weights."""
    lines = [
        f"{_compute_digest(f)}  {Path(os.path.relpath(f, folder)).as_posix()}\n" for f in files
    ]
    (folder / SUMS).write_text("".join(lines))


def check_checksums(folder: Path, *names: str) -> None:
    """Raise ModelError where a file differs from its checksum. names: these only. A model that
    was logged before there were checksums has none to be checked."""
    if not (folder / SUMS).is_file():
        return
    lines = [line.partition("  ") for line in _read_text(folder / SUMS).splitlines()]
    bad = [
        f"{name} is {'not as it was logged' if (folder / name).is_file() else 'gone'}"
        for digest, _, name in lines
        if (not names or name in names) and _compute_digest(folder / name) != digest
    ]
    if not lines:
        bad = [f"{SUMS} holds no checksums"]
    if bad:
        raise ModelError(
            f"run: the model in {folder} was damaged or changed: {bad[0]} (SHA-256); bring its "
            "files back, choose another run, or train it anew"
        )


def _read_text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _compute_digest(file: Path) -> str:
    try:
        with open(file, "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError:
        return ""
