"""The settings of data as tests name them: those of the section, and arguments of the source, side
by side."""

from typing import Any

from headroom.settings.run_config import DataConfig


def make_data_config(**settings: Any) -> DataConfig:
    """Return the settings of data, with all that is no setting as arguments of the source."""
    known = {n: v for n, v in settings.items() if n in DataConfig.model_fields}
    args = {n: v for n, v in settings.items() if n not in known}
    return DataConfig(**known | {"args": {**known.get("args", {}), **args}})


def change_config(config: DataConfig, **settings: Any) -> DataConfig:
    """Return the config with these settings or arguments in place of its own."""
    return make_data_config(**{**config.model_dump(), **settings})
