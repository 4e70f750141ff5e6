"""What a training would be, without training: --dry-run, --forecast and --explain-device. Each
gives the exit code, 2 where it would be refused. What is slow to import is imported when asked for.
"""

from __future__ import annotations

import sys
from argparse import Namespace

from tasks.engine.settings import unused_settings
from tasks.engine.settings.read_settings import hidden
from tasks.engine.settings.yaml_file import to_yaml


def dry_run(asked: Namespace) -> int:
    """Print the settings as they would be used, and the device."""
    from tasks.engine.device.detection import DeviceError, detect

    print(to_yaml(hidden(asked.config).model_dump()), end="")
    for line in unused_settings.told(asked.config):
        print(f"# {line}")
    device = asked.config.device
    try:
        facts = detect(device.name, require=device.require)
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"# device: {facts.name}: {facts.reason}")
    return 0


def forecast(asked: Namespace) -> int:
    """Print the memory that it would take."""
    from rich.console import Console

    from tasks.forecast_memory import forecast_memory
    from tasks.forecast_other_gpus import forecast_on, sizes, table
    from tasks.preflight import BAD_INPUT

    try:
        if asked.elsewhere is not None:
            found = forecast_on(asked.config, sizes(asked.elsewhere))
            Console().print(table(found, asked.config))
            return 0 if any(one.fits for one in found) else 2
        foreseen = forecast_memory(asked.config)
    except BAD_INPUT as error:
        print(error, file=sys.stderr)
        return 2
    Console().print(foreseen.table())
    return 0 if foreseen.fits else 2


def explain_device(asked: Namespace) -> int:
    """Print what was found of devices, and what is missing."""
    from rich.console import Console
    from rich.table import Table

    from tasks.engine.device.detection import explain

    table, signs = Table("check", "ok", "finding", "remedy"), {True: "yes", False: "NO", None: "-"}
    for check in explain(asked.config.device.name):
        table.add_row(check.name, signs[check.ok], check.finding, check.remedy)
    Console().print(table)
    return 0
