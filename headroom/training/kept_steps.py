"""Finds the steps of which a run's folder holds checkpoints, by the names of their files
alone, so that callers need not import PyTorch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

CHECKPOINTS = "checkpoints"  # their folder, in that of a run
_NAME = re.compile(r"step-(\d{12})\.json")


def list_steps(folder: Path) -> list[int]:
    """Return the steps of which there is a checkpoint, the newest first."""
    matches = (_NAME.fullmatch(name) for name in (os.listdir(folder) if folder.is_dir() else ()))
    return sorted((int(match[1]) for match in matches if match), reverse=True)
