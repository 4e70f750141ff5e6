"""Whether a training may go on from a checkpoint: what has to be the same as when it was written,
and what may differ. It refuses by name, all that differs at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tasks.engine.settings.read_settings import ConfigError, hidden
from tasks.engine.step.plan import Plan

# Where it runs and how it is watched, how long, and where its rows come from while they stay the
# same. Another device draws other random numbers and rounds otherwise: said, and allowed.
MAY_DIFFER = (
    *("device.name", "device.require", "data.path", "data.cache", "data.memory_mib"),
    *("train.epochs", "train.max_steps", "train.max_s", "train.until", "train.patience"),
    *("train.log_every", "train.compile", "train.parallel"),
)
MAY_DIFFER_IN = ("checkpoint", "memory", "launch", "run")


def identity(plan: Plan) -> dict[str, Any]:
    """Return what a checkpoint says of the training that it is of."""
    return {
        "settings": hidden(plan.settings).model_dump(mode="json"),
        "data": plan.data.fingerprint,
        "device": plan.torch_device.type,
        "torch": torch.__version__,
    }


def refuse_another(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs and may. Raises ConfigError for what must not."""
    problems, told = [], []
    for name, before, after in _changed(was["settings"], now["settings"]):
        if name in MAY_DIFFER or name.partition(".")[0] in MAY_DIFFER_IN:
            told.append(f"{name} was {before} and is {after}")
        else:
            problems.append(
                f"{name}: was {before} when the checkpoint was written and is {after}; "
                "leave it as it was, or train anew"
            )
    if was["data"] != now["data"]:
        problems.append(
            f"data.source: the rows are others than those of the checkpoint (their fingerprint was "
            f"{was['data'] or 'none'} and is {now['data'] or 'none'}); train anew"
        )
    if problems:
        raise ConfigError(*problems)
    for what in ("device", "torch"):
        if was[what] != now[what]:
            told.append(f"{what} was {was[what]} and is {now[what]}: not the same to the last bit")
    return told


def _changed(
    was: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, Any, Any]]:
    """Settings by their dotted names; one that an earlier version did not know is not compared."""
    return [
        (f"{section}.{name}", was[section][name], value)
        for section, settings in now.items()
        for name, value in settings.items()
        if name in was.get(section, {}) and was[section][name] != value
    ]
