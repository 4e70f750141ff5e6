"""Checks, in a process of its own, whether trainings could run here: `python -m
headroom.comparison.check` reads their settings and prints what is wrong, as JSON; given none,
it lists this machine's devices.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from headroom.base.facts import DataFacts
from headroom.device.detection import DeviceError, detect_best_device, list_devices
from headroom.run.preflight import BAD_INPUT, prepare_and_check
from headroom.settings.run_config import RunConfig


def find_problems(order: list[dict[str, Any]], prepared: dict[str, DataFacts]) -> list[str]:
    """Return what the trainings would be refused for, once where it is the same for several.

    prepared: gets their data.
    """
    devices: dict[str, Any] = {}
    problems: dict[str, list[str]] = {}
    for one in order:
        try:
            _check_training(RunConfig.model_validate(one["config"]), devices, prepared)
        except BAD_INPUT as error:
            for line in str(error).splitlines():
                problems.setdefault(line, []).append(one["label"])
    return [
        line if len(labels) == len(order) else f"{line} (with {labels[0]})"
        for line, labels in problems.items()
    ]


def _check_training(
    config: RunConfig, devices: dict[str, Any], prepared: dict[str, DataFacts]
) -> None:
    name = config.device.name
    if name not in devices:
        try:
            devices[name] = detect_best_device(name)
        except DeviceError as error:
            devices[name] = error
    if isinstance(devices[name], DeviceError):
        raise devices[name]
    prepare_and_check(config, devices[name], prepared)


def main() -> None:
    """Check the trainings on standard input, and print the problems, devices and tasks."""
    order = json.load(sys.stdin)
    prepared: dict[str, DataFacts] = {}
    answer = {
        "problems": find_problems(order, prepared),
        "devices": [] if order else list_devices(),
    }
    tasks = sorted({data.task for data in prepared.values()})
    rows: dict[str, set[str]] = {}
    for data in prepared.values():  # of loaders nobody knows more than how many rows they have
        rows.setdefault(data.source, set()).add(data.fingerprint or f"{data.train_rows} rows")
    fingerprints = {source: ", ".join(sorted(of)) for source, of in rows.items()}
    print(json.dumps({**answer, "tasks": tasks, "data": fingerprints}))


if __name__ == "__main__":
    main()
