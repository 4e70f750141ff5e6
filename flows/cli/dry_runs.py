"""Describes a training without training: --dry-run, --forecast and --explain-device. Each
returns the exit code, 2 where the training would be refused. What is slow to import is
imported when asked for.
"""

from __future__ import annotations

import sys
from argparse import Namespace

from tasks.engine.settings import read_settings
from tasks.engine.settings.read_settings import dump_yaml, hide_config_secrets


def print_dry_run(asked: Namespace) -> int:
    """Print the settings as they would be used, and the device. Returns the exit code."""
    from tasks.engine.device.detection import DeviceError, detect_best_device

    print(dump_yaml(hide_config_secrets(asked.config).model_dump()), end="")
    for line in read_settings.describe_unused_settings(asked.config):
        print(f"# {line}")
    device = asked.config.device
    try:
        facts = detect_best_device(device.name, require=device.require)
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"# device: {facts.name}: {facts.reason}")
    return 0


def print_forecast(asked: Namespace) -> int:
    """Print the memory that the training would take. Returns the exit code."""
    from rich.console import Console

    from tasks.forecast_memory import (
        forecast_memory,
        forecast_on_gpus,
        make_gpu_table,
        parse_gpu_sizes,
    )
    from tasks.run.preflight import BAD_INPUT

    try:
        if asked.elsewhere is not None:
            found = forecast_on_gpus(asked.config, parse_gpu_sizes(asked.elsewhere))
            Console().print(make_gpu_table(found, asked.config))
            return 0 if any(one.fits for one in found) else 2
        foreseen = forecast_memory(asked.config)
    except BAD_INPUT as error:
        print(error, file=sys.stderr)
        return 2
    Console().print(foreseen.table())
    return 0 if foreseen.fits else 2


def explain_device(asked: Namespace) -> int:
    """Print what was found of devices, and what is missing. Returns the exit code."""
    from rich.console import Console
    from rich.table import Table

    from tasks.engine.device.detection import explain_choice

    table, signs = Table("check", "ok", "finding", "remedy"), {True: "yes", False: "NO", None: "-"}
    for check in explain_choice(asked.config.device.name):
        table.add_row(check.name, signs[check.ok], check.finding, check.remedy)
    Console().print(table)
    return 0
