"""Answers, in a process of its own, whether trainings could run here: `python -m
tasks.comparison.check` reads their settings and says what is wrong, as JSON; with `--devices` it
lists this machine's devices.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tasks.engine.data.preparation import prepare
from tasks.engine.device.detection import (
    DeviceError,
    check_limit,
    detect,
    names,
    resolve_precision,
)
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.training import trainer
from tasks.preflight import BAD_INPUT, resolved


def problems(order: list[dict[str, Any]]) -> list[str]:
    """What each is refused by, once where several are by the same."""
    devices: dict[tuple[str, str], Any] = {}
    prepared: dict[str, Any] = {}
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
    config: RunConfig, devices: dict[tuple[str, str], Any], prepared: dict[str, Any]
) -> None:
    config = resolved(config, None)
    which = config.device.name, config.device.require
    if which not in devices:
        try:
            devices[which] = detect(which[0], require=which[1])
        except DeviceError as error:
            devices[which] = error
    device = devices[which]
    if isinstance(device, DeviceError):
        raise device
    resolve_precision(config.train.precision, device)
    check_limit(device, config.memory.limit_mib)
    how = config.data, config.train.batch_size, config.train.seed
    if (key := repr(how)) not in prepared:
        prepared[key] = prepare(config.data, batch_size=how[1], seed=how[2])
    trainer.check(config, prepared[key])


def main() -> None:
    if sys.argv[1:] == ["--devices"]:
        print(json.dumps(names()))
        return
    answer = {"problems": problems(json.load(sys.stdin))}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
