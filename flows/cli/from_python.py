"""The flow of a training as Python and Prefect's form meet it. Called from a notebook it takes a
plain dict, has the same server, lines, report and refusals as the command; in the form it has its
settings in groups, with their limits. A worker calls neither: it plays the flow itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prefect import Flow
from prefect.context import FlowRunContext
from prefect.utilities.callables import ParameterSchema

from flows.cli import train_command
from flows.cli.flags import TITLES
from tasks.engine.settings.read_settings import ConfigError, from_mapping, hidden
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.settings.table import described, table
from tasks.flow_run import CalledFlow
from tasks.gate import GateFailed
from tasks.preflight import BAD_INPUT, resolved
from tasks.resume import settings_of


def call(
    play: Callable[..., Any],
    config: RunConfig | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: str | None = None,
    **unknown: Any,
) -> dict[str, Any]:
    """Train, print the report, and return the run. Raises what the run raises; what is wrong with
    what was asked is one sentence, without the frames of pydantic and Prefect.

    config: None: the default one, or that of the run to go on with."""
    try:
        _refuse(unknown)
        if config is None:
            config = RunConfig() if resume is None else settings_of(resume)
        given = config if isinstance(config, RunConfig) else from_mapping(config)
        asked = resolved(given, overrides)
        if FlowRunContext.get() is not None:  # a step of somebody's own flow
            run: dict[str, Any] = play(config=asked, resume=resume)
            return run
        with train_command.called():
            run = play(config=asked, resume=resume)
    except BAD_INPUT as error:
        raise error.with_traceback(None) from None
    except GateFailed as failed:
        train_command.show(failed.run)
        raise
    train_command.show(run)
    return run


def _refuse(unknown: Mapping[str, Any]) -> None:
    """Raises ConfigError, which tells how a setting is given."""
    if not unknown:
        return
    names = {name.split(".")[-1]: name for name in (row.name for row in table())}
    by_name = ", ".join(
        f"{names[given]!r}: {'...' if given == 'args' else repr(value)}"
        for given, value in unknown.items()
        if given in names
    )
    by_name = by_name or "'train.epochs': 3"
    raise ConfigError(
        f"train() takes config, overrides and resume, not {', '.join(unknown)}: settings are given "
        f"by their dotted names, as in train(overrides={{{by_name}}})"
    )


def called_from_python(flow: Flow[..., Any]) -> CalledFlow:
    """Return the flow of `config`, `overrides` and `resume`, for who calls it: from Python with all
    that the command does, in Prefect's form with its settings in groups."""
    made = CalledFlow(
        flow.fn, call=call, shown=_shown, name=flow.name, flow_run_name=flow.flow_run_name
    )
    made.parameters = _form(made.parameters)
    return made


def _shown(parameters: dict[str, Any]) -> dict[str, Any]:
    config = parameters.get("config")
    return {**parameters, "config": hidden(config)} if isinstance(config, RunConfig) else parameters


def _form(parameters: ParameterSchema) -> ParameterSchema:
    """The same parameters, `overrides` first, each setting under its dotted name and with its
    limits in words."""
    first = ("overrides", "config", "resume")
    properties = {name: parameters.properties[name] for name in first}
    for position, name in enumerate(first):
        properties[name]["position"] = position
    sections = parameters.definitions["RunConfig"]["properties"]
    for section, title in TITLES.items():
        sections[section] |= {"title": section, "description": title}
    for row in table():
        section, _, name = row.name.partition(".")
        kind = RunConfig.model_fields[section].annotation
        assert isinstance(kind, type)
        fields = parameters.definitions[kind.__name__]["properties"]
        fields[name] |= {"title": row.name, "description": described(row)}
    return parameters.model_copy(update={"properties": properties})
