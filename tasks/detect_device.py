"""The first task of the flow: which device this run gets, and why not a better one. It refuses,
before anything is spent, a device, precision or memory limit that cannot be had.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from tasks.engine.base.facts import DeviceFacts
from tasks.engine.device.detection import check_limit, detect, resolve_precision
from tasks.engine.device.leases import Leases
from tasks.engine.distributed.ranks import asked
from tasks.engine.launch.processes import own_name, processes_of
from tasks.engine.memory.leaks import baseline
from tasks.engine.settings.launch_config import LaunchConfig
from tasks.engine.settings.run_config import DeviceConfig
from tasks.run_task import run_task

log = logging.getLogger(__name__)


@run_task
def detect_device(
    device: DeviceConfig,
    *,
    precision: str = "auto",
    limit_mib: float | None = None,
    launch: LaunchConfig = LaunchConfig(),  # noqa: B008 (frozen)
    leases: Leases | None = None,
) -> DeviceFacts:
    """The device to train on, held by `leases` from then on. Raises DeviceError where it cannot be
    what was asked, or others hold it for too long."""
    facts = detect(
        own_name(device, asked()), require=device.require, leases=None if device.share else leases
    )
    resolve_precision(precision, facts)
    check_limit(facts, limit_mib)
    processes_of(launch, facts)
    if facts.fell_back:
        log.warning("device.name: fell back to the %s", facts.reason)
    # After the probe's own arithmetic: the workspaces that it leaves are not this run's.
    return replace(facts, baseline_bytes=baseline(facts.name).bytes)
