"""Ends a process with the one that has started it, also where it is stopped or waits in a driver
and hears nothing: `python -m tasks.engine.launch.parent_death MODULE ARGUMENTS` runs a module so.
Linux alone can do that; elsewhere a process ends when it next looks.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PARENT = "HEADROOM_PARENT"  # the id of the process that starts one
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def end_with_parent() -> None:
    """Have this process killed when the thread that has started it is gone; end it at once where
    that is so already. Nothing where no PARENT has been set.

    A thread of the parent's, and not the parent: whoever starts one waits for it in that thread.
    """
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it was gone before
        os._exit(0)


if __name__ == "__main__":
    end_with_parent()
    os.environ[PARENT] = str(os.getpid())  # of what it starts
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
