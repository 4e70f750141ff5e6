"""Refuses what can't work before anything is spent: data by its head, then the model with the data;
before memory is taken on a device and before an MLflow run exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks import disk_space
from tasks.engine.base.facts import DataFacts, DeviceFacts
from tasks.engine.data.preparation import check as check_data
from tasks.engine.data.preparation import prepare
from tasks.engine.device.detection import DeviceError, check_limit, resolve_precision
from tasks.engine.files.source_data import DataError
from tasks.engine.forecast.forecast import Unforeseeable
from tasks.engine.settings.import_path_checks import check as check_imports
from tasks.engine.settings.model_args import ModelError
from tasks.engine.settings.read_settings import ConfigError, given_again, override
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.step.plan import Plan, make_plan
from tasks.engine.training import check_training
from tasks.tracking.where import TrackingError, where

BAD_INPUT = (ConfigError, DataError, ModelError, DeviceError, TrackingError, Unforeseeable)


def resolved(config: RunConfig, overrides: Mapping[str, Any] | None) -> RunConfig:
    """The settings with `overrides` applied, import paths that lead somewhere, and data whose head
    looks right.

    Raises ConfigError or DataError.
    """
    config = given_again(override(config, overrides))
    check_imports(config)
    check_data(config.data)
    return config


def looked_at(
    config: RunConfig, device: DeviceFacts, known: dict[str, DataFacts] | None = None
) -> Plan:
    """Return the plan of a training, its data prepared: all that it is refused by on this device
    has been looked at.

    known: of several trainings, what was prepared for those before. Raises one of BAD_INPUT.
    """
    config = resolved(config, None)
    resolve_precision(config.train.precision, device)  # before the data, which may take long
    check_limit(device, config.memory.limit_mib)
    how = config.data, config.train.batch_size, config.train.seed
    known = {} if known is None else known
    if (key := repr(how)) not in known:
        known[key] = prepare(how[0], batch_size=how[1], seed=how[2])
    plan = make_plan(config, device, known[key])
    check_training.check(plan)
    return plan


def check_fit(plan: Plan) -> None:
    """Refuse a model or a setting that this data can't have, and a record that finds no room.

    Raises ModelError, ConfigError or TrackingError.
    """
    weights_bytes = check_training.check(plan).weights_bytes
    train = plan.settings.train
    log_points = plan.steps // train.log_every
    if train.patience:  # as many epochs as it will take at least
        log_points = min(log_points, log_points * train.patience // train.epochs)
    disk_space.check(where(), weights_bytes=weights_bytes, log_points=log_points)
