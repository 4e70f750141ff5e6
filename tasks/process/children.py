"""Starts a module of this project in a process of its own, which answers by lines. Its pipes end
with the process that started it: what that one has forked does not keep them open.
"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

_started: weakref.WeakSet[subprocess.Popen[str]] = weakref.WeakSet()


def start(
    module: str,
    *,
    stderr: int | IO[str] = subprocess.DEVNULL,
    env: Mapping[str, str] = os.environ,
) -> subprocess.Popen[str]:
    """The process; it outlives a Ctrl-C, which is for the one that started it."""
    project = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join(p for p in (project, env.get("PYTHONPATH")) if p)
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        # What a user makes of warnings is for the user's code: with `error` MLflow does not import.
        env={**{k: v for k, v in env.items() if k != "PYTHONWARNINGS"}, "PYTHONPATH": path},
        start_new_session=True,
    )
    _started.add(process)
    return process


def let_go(process: subprocess.Popen[str]) -> None:
    """Tell it that nothing more comes."""
    assert process.stdin is not None
    with suppress(OSError):  # it has gone already
        process.stdin.close()


def _let_go() -> None:
    """In a forked child: another file takes the place of each pipe, whose numbers stay in use."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for process in list(_started):
        for pipe in (process.stdin, process.stdout):
            if pipe is not None and not pipe.closed:
                os.dup2(nothing, pipe.fileno(), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go)
