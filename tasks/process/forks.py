"""Lets forked processes, such as the workers of a DataLoader, end although Prefect's
services run in the process that forked them.
"""

import asyncio
import functools
import os

from prefect._internal.concurrency import services


@functools.cache
def fix_prefect_after_fork() -> None:
    """Mend, in every process forked from now on, the Prefect services copied from its parent.

    Prefect 3.8 takes away the event that tells that a service is done, and waits for it when the
    process ends: the process then fails with code 1, and PyTorch with it ("DataLoader worker
    exited unexpectedly").
    """
    os.register_at_fork(after_in_child=_mark_services_done)


def _mark_services_done() -> None:
    done = asyncio.Event()
    done.set()
    for service in list(services._active_services):
        service._done_event = done  # its thread did not come along: nothing is left to wait for
