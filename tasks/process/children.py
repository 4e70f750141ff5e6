"""Starts a module of this project in a process of its own, which answers by lines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO


def start(
    module: str,
    *,
    stderr: int | IO[str] = subprocess.DEVNULL,
    env: Mapping[str, str] = os.environ,
) -> subprocess.Popen[str]:
    """The process; it outlives a Ctrl-C, which is for the one that started it."""
    project = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join(p for p in (project, env.get("PYTHONPATH")) if p)
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**env, "PYTHONPATH": path},
        start_new_session=True,
    )


def let_go(process: subprocess.Popen[str]) -> None:
    """Tell it that nothing more comes."""
    assert process.stdin is not None
    with suppress(OSError):  # it has gone already
        process.stdin.close()
