"""Where a run is, as tags and as a file of it: the device, the host, the process and its user."""

from __future__ import annotations

import getpass
import json
import socket
from dataclasses import asdict

import psutil

from tasks.engine.base.facts import DeviceFacts
from tasks.engine.memory.memory_meter import MIB
from tasks.serving.crashed_flow_runs import uptime


def device_tags(device: DeviceFacts) -> dict[str, str]:
    """The tags; what is not known has none."""
    found = {
        "device": device.name,
        "device.kind": device.kind,
        "device.model": device.model,
        "device.uuid": device.uuid,
        "device.reason": device.reason,
        "device.total_mib": None
        if device.total_bytes is None
        else f"{device.total_bytes / MIB:.0f}",
        "torch.version": device.torch_version,
        "accelerator.runtime": device.runtime,
        "driver.version": device.driver_version,
    }
    return {k: v for k, v in found.items() if v is not None} | process_tags("flows/train.py")


def process_tags(source: str) -> dict[str, str]:
    """Which process a run is of, and of which file; by these it is found where that has died."""
    me = psutil.Process()
    found = {
        "host": socket.gethostname(),
        "pid": str(me.pid),
        "process.started_at": f"{me.create_time():.2f}",
        "process.uptime_s": uptime(me),
        "mlflow.source.name": source,
        "mlflow.source.type": "LOCAL",
        "mlflow.user": _user(),
    }
    return {k: v for k, v in found.items() if v is not None}


def device_json(device: DeviceFacts) -> str:
    """All that is known of it, and every check on the way to it."""
    facts = asdict(device)
    checks = facts.pop("checks")
    return json.dumps({**facts, "checks": checks}, indent=1)


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return None
