"""Refuses what can't work before anything is spent: data by its head, then the model with
the data, then a record and a model that would not fit on the disks they go to; before
memory is taken on a device and before an MLflow run exists.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from headroom.base.facts import DataFacts, DeviceFacts
from headroom.base.units import format_mebibytes
from headroom.data.preparation import check_data, prepare_dataset
from headroom.data.source_data import DataError
from headroom.device.detection import DeviceError, check_memory_limit, resolve_precision
from headroom.launch import launcher
from headroom.settings.model_args import ModelError
from headroom.settings.read_settings import (
    ConfigError,
    check_imports,
    override_config,
    restore_config_secrets,
)
from headroom.settings.run_config import RunConfig
from headroom.tracking.tracking_settings import (
    TrackingError,
    TrackingSettings,
    read_tracking_settings,
)
from headroom.training.check_training import check_plan
from headroom.training.forecast import UnforeseeableMemory
from headroom.training.plan import Plan, make_plan

MIB = 1024**2
# Bytes that a run of digits with a log point each step left behind, for each, rounded up.
JOURNAL_BYTES, DATABASE_BYTES = 200, 1000
# What it left beside these: report, plots and example, their copy, a new database.
RECORD_BYTES, COPY_BYTES, NEW_BYTES = 1 * MIB, 1 * MIB, 2 * MIB
BAD_INPUT = (ConfigError, DataError, ModelError, DeviceError, TrackingError, UnforeseeableMemory)
_checked: ContextVar[RunConfig | None] = ContextVar("_checked", default=None)


def resolve_and_check(config: RunConfig, overrides: Mapping[str, Any] | None) -> RunConfig:
    """Return the settings with `overrides` applied; import paths, data's head and what a launcher
    has set are checked. Raises ConfigError or DataError.

    A flow that is run by a command or from Python takes settings that were checked there.
    """
    launcher.read_rank()
    config = override_config(config, overrides)
    if config == _checked.get():
        return config
    config = restore_config_secrets(config)
    check_imports(config)
    check_data(config.data)
    return config


@contextmanager
def mark_checked(config: RunConfig) -> Iterator[None]:
    """Let the flow that is run inside take these settings without looking at them again."""
    token = _checked.set(config)
    try:
        yield
    finally:
        _checked.reset(token)


def prepare_and_check(
    config: RunConfig, device: DeviceFacts, cache: dict[str, DataFacts] | None = None
) -> Plan:
    """Return the plan of a training, its data prepared: all that it is refused by on this device
    has been looked at.

    cache: of several trainings, what was prepared for those before. Raises one of BAD_INPUT.
    """
    config = resolve_and_check(config, None)
    resolve_precision(config.train.precision, device)  # before the data, which may take long
    check_memory_limit(device, config.memory.limit_mib)
    how = config.data, config.train.batch_size, config.train.seed
    cache = {} if cache is None else cache
    if (key := repr(how)) not in cache:
        cache[key] = prepare_dataset(how[0], batch_size=how[1], seed=how[2])
    return check_plan(make_plan(config, device, cache[key]))


def check_fit(plan: Plan) -> Plan:
    """Return the plan, checked: refuse a model or a setting that this data can't have, and a record
    that finds no room.

    Raises ModelError, ConfigError or TrackingError.
    """
    plan = check_plan(plan)
    assert plan.model_check is not None
    weights_bytes = plan.model_check.weights_bytes
    train = plan.settings.train
    log_points = plan.steps // train.log_every
    if train.patience:  # as many epochs as it will take at least
        log_points = min(log_points, log_points * train.patience // train.epochs)
    check_disk_space(read_tracking_settings(), weights_bytes=weights_bytes, log_points=log_points)
    return plan


def check_disk_space(where: TrackingSettings, *, weights_bytes: int, log_points: int) -> None:
    """Raises TrackingError where a disk lacks room for record and weights, or takes none."""
    journal = log_points * JOURNAL_BYTES
    needs = {"runs": (Path(where.runs), weights_bytes + journal + RECORD_BYTES)}
    if where.database is not None:
        needs["tracking_uri"] = where.database, log_points * DATABASE_BYTES + NEW_BYTES
    if where.keeps_files:
        needs["artifacts"] = Path(where.artifacts), weights_bytes + journal + COPY_BYTES
    # The weights lie there while they are sent.
    needs["the temporary folder"] = Path(tempfile.gettempdir()), weights_bytes
    disks: dict[int, list[tuple[str, Path, int]]] = {}
    for name, (path, needed) in needs.items():
        there = next((p for p in (path, *path.parents) if p.exists()), None)
        if there is not None:
            disks.setdefault(os.stat(there).st_dev, []).append((name, there, needed))
    if where.keeps_files:
        _refuse_read_only(Path(where.artifacts))
    for disk in disks.values():
        needed = sum(needed for *_, needed in disk)
        free = shutil.disk_usage(disk[0][1]).free
        if needed > free:
            names = ", ".join(name for name, *_ in disk)
            raise TrackingError(
                f"{names}: the disk of {disk[0][1]} has {format_mebibytes(free / MIB)} free, "
                "and the run "
                f"may need {format_mebibytes(needed / MIB)} there for its record and its model; "
                "make room"
            )


def _refuse_read_only(folder: Path) -> None:
    there = next((p for p in (folder, *folder.parents) if p.exists()), None)
    if there is not None and not os.access(there, os.W_OK | os.X_OK):
        raise TrackingError(
            f"artifacts: {there} can't be written, and the run's files and its model go to "
            f"{folder}; make it writable, or name another folder in mlflow.yaml"
        )
