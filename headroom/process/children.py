"""Starts a module of this project as a child process, which answers in lines on its
standard output, and lets forked processes end. The pipes of a child process belong to the
process that started it: processes forked from that one do not keep them open.
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

_left: list[subprocess.Popen[str]] = []  # here, since one that nobody holds is warned of
_children: weakref.WeakSet[subprocess.Popen[str]] = weakref.WeakSet()


def start_child(
    module: str,
    *,
    stderr: int | IO[str] = subprocess.DEVNULL,
    env: Mapping[str, str] = os.environ,
) -> subprocess.Popen[str]:
    """Start a module of this project as a child process, and return it.

    Its standard input and output are pipes of text. It has a session of its own, so Ctrl-C
    in the terminal does not reach it.
    """
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
    _children.add(process)
    return process


def close_stdin(process: subprocess.Popen[str]) -> None:
    """Close the standard input of a child process, which tells it that no more orders come."""
    assert process.stdin is not None
    with suppress(OSError):  # it has gone already
        process.stdin.close()


def leave(process: subprocess.Popen[str]) -> None:
    """Close the standard input of a child process, and let it end when it has done what it was
    told, without anybody who waits for it."""
    close_stdin(process)
    _left[:] = [one for one in (*_left, process) if one.poll() is None]


def _detach_pipes() -> None:
    """In a forked process: replace each pipe by /dev/null, and keep its number in use."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for process in list(_children):
        for pipe in (process.stdin, process.stdout):
            if pipe is not None and not pipe.closed:
                os.dup2(nothing, pipe.fileno(), inheritable=False)
    os.close(nothing)


os.register_at_fork(after_in_child=_detach_pipes)
