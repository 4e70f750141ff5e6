"""Refuses what can't work before anything is spent: data by its head, then the model with the data;
before memory is taken on a device and before an MLflow run exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks import room
from tasks.engine import training
from tasks.engine.assembly import steps_of
from tasks.engine.config import RunConfig
from tasks.engine.data import check as check_data
from tasks.engine.device import DeviceError
from tasks.engine.facts import DataFacts
from tasks.engine.forecast import Unforeseeable
from tasks.engine.models import ModelError
from tasks.engine.own_paths import check as check_imports
from tasks.engine.raw import DataError
from tasks.engine.settings import ConfigError, override
from tasks.where import TrackingError, where

BAD_INPUT = (ConfigError, DataError, ModelError, DeviceError, TrackingError, Unforeseeable)


def resolved(config: RunConfig, overrides: Mapping[str, Any] | None) -> RunConfig:
    """The settings with `overrides` applied, import paths that lead somewhere, and data whose head
    looks right.

    Raises ConfigError or DataError.
    """
    config = override(config, overrides)
    check_imports(config)
    check_data(config.data)
    return config


def check_fit(config: RunConfig, data: DataFacts) -> None:
    """Refuse a model or a setting that this data can't have, and a record that finds no room.

    Raises ModelError, ConfigError or TrackingError.
    """
    weights_bytes = training.check(config, data).weights_bytes
    log_points = steps_of(config, data) // config.train.log_every
    if config.train.patience:  # as many epochs as it will take at least
        log_points = min(log_points, log_points * config.train.patience // config.train.epochs)
    room.check(where(), weights_bytes=weights_bytes, log_points=log_points)
