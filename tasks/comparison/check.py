"""Answers, in a process of its own, whether trainings could run here: `python -m
tasks.comparison.check` reads their settings and says what is wrong, as JSON; asked of none, it
lists this machine's devices.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tasks.engine.base.facts import DataFacts
from tasks.engine.device.detection import DeviceError, detect, names
from tasks.engine.settings.run_config import RunConfig
from tasks.preflight import BAD_INPUT, looked_at


def problems(order: list[dict[str, Any]], prepared: dict[str, DataFacts]) -> list[str]:
    """What each is refused by, once where several are by the same. prepared: gets their data."""
    devices: dict[tuple[str, str], Any] = {}
    found: dict[str, list[str]] = {}
    for asked in order:
        try:
            _check(RunConfig.model_validate(asked["config"]), devices, prepared)
        except BAD_INPUT as error:
            for line in str(error).splitlines():
                found.setdefault(line, []).append(asked["label"])
    return [
        line if len(labels) == len(order) else f"{line} (with {labels[0]})"
        for line, labels in found.items()
    ]


def _check(
    config: RunConfig, devices: dict[tuple[str, str], Any], prepared: dict[str, DataFacts]
) -> None:
    which = config.device.name, config.device.require
    if which not in devices:
        try:
            devices[which] = detect(which[0], require=which[1])
        except DeviceError as error:
            devices[which] = error
    if isinstance(devices[which], DeviceError):
        raise devices[which]
    looked_at(config, devices[which], prepared)


def main() -> None:
    order = json.load(sys.stdin)
    prepared: dict[str, DataFacts] = {}
    told = {"problems": problems(order, prepared), "devices": [] if order else names()}
    tasks = sorted({data.task for data in prepared.values()})
    print(json.dumps({**told, "tasks": tasks}))


if __name__ == "__main__":
    main()
