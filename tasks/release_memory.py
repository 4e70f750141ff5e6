"""The last task of the flow: gives the device back and proves it, or names what still holds
how much. It takes and returns plain facts; neither they nor its error hold a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from headroom.base.facts import DeviceFacts, Owner, ReleaseFacts
from headroom.prefect.run_task import run_task
from headroom.watch.leaks import LeakError, describe_leak, release_device_memory

log = logging.getLogger(f"headroom.{__name__}")


@run_task
def release_memory(
    device: DeviceFacts,
    held_bytes: int = 0,
    leaks: Sequence[Owner] = (),
    *,
    on_leak: str = "warn",
) -> ReleaseFacts:
    """Return what was given back, of what is in use now and of `held_bytes`.

    held_bytes: in use when training ended. leaks: of the processes that trained, where these
    were others. Raises LeakError where something was not given back and on_leak is fail.
    """
    facts = release_device_memory(
        device.name, baseline_bytes=device.baseline_bytes, held_bytes=held_bytes
    )
    if leaks:
        leaked_bytes = facts.leaked_bytes + sum(owner.bytes for owner in leaks)
        owners = (*facts.owners, *leaks)
        facts = replace(facts, ok=False, leaked_bytes=leaked_bytes, owners=owners)
    if facts.ok:
        return facts
    if facts.broken:  # by what has ended the run already
        log.warning("%s", facts.broken)
        return facts
    if on_leak == "fail":
        raise LeakError(facts)
    log.warning("memory.on_leak: %s", describe_leak(facts))
    return facts
