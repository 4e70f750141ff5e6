"""The import paths among the settings, held against what can be told without running any of the
code behind them: forbidden ones, those of Python's own, and modules that are not there.
"""

from __future__ import annotations

from tasks.engine.config import RunConfig
from tasks.engine.imports import problem
from tasks.engine.section import is_import
from tasks.engine.settings import ConfigError


def paths(config: RunConfig) -> dict[str, str]:
    """The import paths by the dotted names of their settings."""
    asked = {
        "model.name": config.model.name,
        "data.source": config.data.source,
        "optim.name": config.optim.name,
        "optim.schedule": config.optim.schedule,
        "train.loss": config.train.loss,
        **{f"train.metrics.{name}": path for name, path in config.train.metrics.items()},
    }
    return {setting: path for setting, path in asked.items() if is_import(path)}


def check(config: RunConfig) -> None:
    """Raises ConfigError with every path that can't be used; imports nothing."""
    problems = [problem(setting, path) for setting, path in paths(config).items()]
    told = [text for text in problems if text is not None]
    if told:
        raise ConfigError(*told)
