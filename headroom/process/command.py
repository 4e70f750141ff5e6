"""The process of a command: how it starts, with streams that never fail, signals that end it in
order and a home for libraries that keep files in one; how it ends, at once; and how it starts anew,
after a failure that a new process may cure. It then has the same process id, so that its terminal,
its supervisor and whoever waits for its exit code keep it. Nothing else is carried over: no memory
of a device, no open file, no variable that was set, except for the secrets of its settings.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from headroom.base.program import list_training_words
from headroom.base.secret_names import VARIABLE
from headroom.process import signals

_AT, _OF = "HEADROOM_RETRY_AT", "HEADROOM_RETRY_OF"  # a Unix time, a run's folder
LONGEST_S = 3600.0  # a clock may be set anew meanwhile


@dataclass
class _Command:
    environment: dict[str, str]
    folder: str
    at: float | None = None  # when it began anew
    of: Path | None = None
    next: tuple[str, list[str], dict[str, str]] | None = None


_command: _Command | None = None
_is_prefect_away = False


def start_command() -> None:
    """Prepare this process for a command, before anything else; a restart waits for its time."""
    signals.protect_standard_streams()
    signals.install_signal_handlers()
    provide_home()
    _prepare_restart()


@contextmanager
def pause_collection() -> Iterator[None]:
    """Collect no garbage inside, where what is made stays: to look through it again and again takes
    a sixth of the time of imports, and most of that of reading 1,000 runs of MLflow's."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def spare_imports() -> None:
    """Let no collection look again at what this command has made so far, which stays: one through
    all that PyTorch, Prefect and MLflow make takes 0.3 s, and it came within the first steps."""
    if _command is not None:  # else the process is somebody else's
        gc.freeze()


def exit_process(code: int) -> NoReturn:
    """End the process once everything is written and flushed, without tearing its modules down.

    That would cost up to another second.
    """
    signals.disable_signal_exceptions(code)
    if not _is_prefect_away:
        atexit._run_exitfuncs()  # Prefect's last logs and events among them
        logging.shutdown()
    with suppress(OSError):  # whoever read it has gone
        sys.stdout.flush()
        sys.stderr.flush()
    if signals.find_exit_code() is None:
        _restart_if_planned()
    os._exit(code)


def leave_prefect() -> None:
    """Let the end of the process wait for no server of Prefect's: it does not answer."""
    global _is_prefect_away
    _is_prefect_away = True


def provide_home() -> None:
    """Make a folder take the place of a home that can't be found, or in which Prefect and
    matplotlib could not begin to keep anything. Whoever names theirs keeps it."""
    home = Path(os.path.expanduser("~"))
    if not home.is_absolute():
        os.environ["HOME"] = str(make_own_folder("headroom-home"))
        return
    # HOME itself stays: there may be settings to read in it.
    for variable, usual in {"PREFECT_HOME": ".prefect", "MPLCONFIGDIR": ".cache"}.items():
        if not os.environ.get(variable) and not _may_write(home / usual):
            os.environ[variable] = str(make_own_folder("headroom-home") / usual)


def _may_write(folder: Path) -> bool:
    """Return whether files can be kept there, or it can be made."""
    there = next(p for p in (folder, *folder.parents) if os.path.exists(p))
    return os.access(there, os.W_OK | os.X_OK)


def make_own_folder(name: str) -> Path:
    """Return a folder in the temporary one that is this user's alone, the same in each process
    while nothing clears it. Where another user has made one by its name it is a new one."""
    folder = Path(tempfile.gettempdir(), f"{name}-{os.geteuid()}")
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        about = os.lstat(folder)
        if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o77:
            return Path(tempfile.mkdtemp(prefix=f"{name}-"))
    return folder


def find_restart_time() -> float | None:
    """Return the Unix time at which this process was restarted; None for a first start."""
    return _command.at if _command is not None else None


def find_failed_folder() -> Path | None:
    """Return the folder of the run whose failure this process is a restart after.

    None for a first start.
    """
    return _command.of if _command is not None else None


def plan_restart(words: Sequence[str], *, at: float, of: Path, message: str) -> None:
    """Let `exit_process` print `message` and restart the command with these words.

    at: the Unix time at which the training goes on. of: the folder of the run that failed.
    """
    if _command is not None:
        # Options of Python's own, such as -X, come before -m.
        arguments = sys.orig_argv[1:]
        options = arguments[: arguments.index("-m")] if "-m" in arguments else []
        line = [sys.executable, *options, "-m", *list_training_words(), *words]
        again = {**_command.environment, _AT: repr(at), _OF: str(of)}
        secrets = {n: v for n, v in os.environ.items() if n.startswith(VARIABLE)}
        _command.next = message, line, {**again, **secrets}  # its settings are kept without them


def _prepare_restart() -> None:
    """Remember how this process was started, so that it can be restarted.

    In a process that is a restart itself: wait until its time has come.
    """
    global _command
    at, of = os.environ.pop(_AT, None), os.environ.pop(_OF, None)
    _command = _Command(dict(os.environ), os.getcwd())
    if at is None or of is None:
        return
    for child in psutil.Process().children():  # whom the last one left, and nobody waits for
        threading.Thread(target=child.wait, daemon=True).start()
    time.sleep(max(0.0, min(LONGEST_S, float(at) - time.time())))
    _command.at, _command.of = time.time(), Path(of)


def is_restart_planned() -> bool:
    """True if this command begins anew when its process ends."""
    return _command is not None and _command.next is not None


def _restart_if_planned() -> None:
    """Restart the command where that is planned; else do nothing.

    It does not return from a restart.
    """
    if _command is None or _command.next is None:
        return
    message, words, environment = _command.next
    print(message, file=sys.stderr, flush=True)
    with suppress(OSError):
        for name in os.listdir("/dev/fd"):
            if int(name) > 2:
                with suppress(OSError):  # that of the listing itself
                    os.set_inheritable(int(name), False)  # a driver's too
        os.chdir(_command.folder)
        os.execve(sys.executable, words, environment)
