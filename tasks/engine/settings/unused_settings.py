"""Which settings mean nothing for the source, the model or the optimizer that a run asks for. They
are no params of the run, and who has set one of them is told so: it is no error, since a file may
serve several runs.
"""

from __future__ import annotations

from tasks.engine.base.field_types import is_import
from tasks.engine.settings.data_config import TAKEN_BY, TOKEN_SOURCES
from tasks.engine.settings.read_settings import hidden
from tasks.engine.settings.run_config import RunConfig

_NOT_OF_TOKENS = (
    *("data.scale", "data.scale_target", "data.target_transform"),
    *("data.split", "data.split_seed"),
)


def without_meaning(config: RunConfig) -> dict[str, str]:
    """The settings that this run does not look at, each with what it is for."""
    source, optimizer = config.data.source, config.optim.name
    unused = {
        f"data.{name}": f"it is for data.source {' or '.join(sources)} (this is {source})"
        for name, sources in TAKEN_BY.items()
        if source not in sources
    }
    if source in TOKEN_SOURCES:
        unused |= {
            name: f"it is not for tokens (data.source is {source})" for name in _NOT_OF_TOKENS
        }
    if not is_import(source):
        unused["data.args"] = f"it is for a source of your own (this is {source})"
    if config.optim.schedule == "constant":
        unused["optim.min_lr_fraction"] = "it is for the cosine (optim.schedule is constant)"
    if optimizer == "sgd":
        unused["optim.beta2"] = "it is for AdamW (optim.name is sgd)"
    return unused


def params(config: RunConfig) -> dict[str, object]:
    """The settings that mean something in this run, under their dotted names, without secrets."""
    unused = without_meaning(config)
    return {name: value for name, value in hidden(config).flat().items() if name not in unused}


def told(config: RunConfig) -> list[str]:
    """A line for each setting that was changed without effect."""
    asked, usual = hidden(config).flat(), RunConfig().flat()
    lines = [
        f"{name}: has no effect (got {asked[name]}): {why}"
        for name, why in without_meaning(config).items()
        if asked[name] != usual[name]
    ]
    patience, epochs = config.train.patience, config.train.epochs
    if patience >= epochs:
        why = f"the run ends after {epochs} epoch{'s' * (epochs != 1)}, by train.epochs"
        lines.append(f"train.patience: has no effect (got {patience}): {why}")
    return lines
