"""A home for libraries that keep files in one, where this user has none: that of a container is
often a number without a name, and its home is `/`.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def provide() -> None:
    """Make a folder take the place of a home that can't be found, or in which Prefect and
    matplotlib could not begin to keep anything. Whoever names theirs keeps it."""
    home = Path(os.path.expanduser("~"))
    if not home.is_absolute():
        os.environ["HOME"] = str(_make_own_home())
        return
    # HOME itself stays: there may be settings to read in it.
    for variable, usual in {"PREFECT_HOME": ".prefect", "MPLCONFIGDIR": ".cache"}.items():
        if not os.environ.get(variable) and not _may_write(home / usual):
            os.environ[variable] = str(_make_own_home() / usual)


def _may_write(folder: Path) -> bool:
    """Return whether files can be kept there, or it can be made."""
    there = next(p for p in (folder, *folder.parents) if os.path.exists(p))
    return os.access(there, os.W_OK | os.X_OK)


def _make_own_home() -> Path:
    """Return a folder of this user alone, the same in each process while nothing clears it."""
    folder = Path(tempfile.gettempdir(), f"headroom-home-{os.geteuid()}")
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        about = os.lstat(folder)
        if about.st_uid != os.geteuid() or not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o77:
            return Path(tempfile.mkdtemp(prefix="headroom-home-"))
    return folder
