"""The import paths among the settings and the arguments of a built-in model, held against what can
be told without running any code or reading any data: forbidden paths, those of Python's own,
modules that are not there, arguments that the model does not take.
"""

from __future__ import annotations

from tasks.engine.base.field_types import is_import
from tasks.engine.base.import_paths import problem, unknown_word
from tasks.engine.settings.model_args import problems
from tasks.engine.settings.read_settings import ConfigError
from tasks.engine.settings.run_config import RunConfig


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
    """Raises ConfigError with every path and argument that can't be used; imports nothing."""
    found = [problem(setting, path) for setting, path in paths(config).items()]
    told = list(dict.fromkeys(text for text in (unknown_word(), *found) if text is not None))
    if not is_import(config.model.name):
        wrong = problems(config.model.name, config.model.args)
        told += [f"model.args: {text}" for text in wrong]
    if told:
        raise ConfigError(*told)
