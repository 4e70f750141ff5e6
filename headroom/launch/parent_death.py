"""Ends a process with the one that has started it, also where it is stopped or waits in a driver
and hears nothing. Linux alone can do that; elsewhere a process ends when it next looks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

ASK_EVERY_S = 1.0
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def end_with_parent(parent: int) -> None:
    """Have this process killed when the thread that has started it is gone; end it at once where
    that is so already. parent: the id of the process of that thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before
        os._exit(0)
    if sys.platform != "linux":
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(ASK_EVERY_S)
    os._exit(0)
