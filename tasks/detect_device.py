"""The first task of the flow: finds the device that this run gets, and says why not a
better one. It refuses, before anything is spent, a device, precision or memory limit that
cannot be had.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from headroom.base.facts import DeviceFacts
from headroom.device.detection import check_memory_limit, detect_best_device, resolve_precision
from headroom.device.leases import Leases
from headroom.launch.placement import choose_device_name, count_leases, count_processes
from headroom.prefect.run_task import run_task
from headroom.ranks.ranks import read_ranks_from_environment
from headroom.settings.run_config import DeviceConfig, LaunchConfig
from headroom.watch.leaks import take_baseline

log = logging.getLogger(f"headroom.{__name__}")


@run_task
def detect_device(
    device: DeviceConfig,
    *,
    precision: str = "auto",
    limit_mib: float | None = None,
    launch: LaunchConfig = LaunchConfig(),  # noqa: B008 (frozen)
    leases: Leases | None = None,
) -> DeviceFacts:
    """Return the device to train on; `leases` holds it from then on, and those of the other
    processes of the training.

    Raises DeviceError where it cannot be what was asked for, or others hold it for too long.
    """
    facts = detect_best_device(
        choose_device_name(device, read_ranks_from_environment()),
        leases=None if device.share else leases,
        count=count_leases(launch),
    )
    resolve_precision(precision, facts)
    check_memory_limit(facts, limit_mib)
    count_processes(launch, facts)
    if facts.fell_back:
        log.warning("device.name: fell back to the %s", facts.reason)
    # After the probe's own arithmetic: the workspaces that it leaves are not this run's.
    return replace(facts, baseline_bytes=take_baseline(facts.name).bytes)
