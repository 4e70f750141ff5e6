"""Refuses what can't work before anything is spent: in the order data, model, precision and limits;
before memory is taken on a device and before an MLflow run exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.engine import training
from tasks.engine.config import RunConfig
from tasks.engine.data import check as check_data
from tasks.engine.device import DeviceError, check_limit, resolve_precision
from tasks.engine.facts import DataFacts, DeviceFacts
from tasks.engine.models import ModelError
from tasks.engine.raw import DataError
from tasks.engine.settings import ConfigError, override
from tasks.where import TrackingError

BAD_INPUT = (ConfigError, DataError, ModelError, DeviceError, TrackingError)


def resolved(config: RunConfig, overrides: Mapping[str, Any] | None) -> RunConfig:
    """The settings with `overrides` applied, and data whose head looks right.

    Raises ConfigError or DataError.
    """
    config = override(config, overrides)
    check_data(config.data)
    return config


def check_fit(config: RunConfig, device: DeviceFacts, data: DataFacts) -> None:
    """Refuse a model, a precision or a limit that this data and device can't have.

    Raises ModelError, ConfigError or DeviceError.
    """
    training.check(config, data)
    resolve_precision(config.train.precision, device)
    if config.memory.limit_mib is not None:
        check_limit(device, config.memory.limit_mib)
