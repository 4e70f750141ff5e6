"""Makes the training flow that Python calls and that Prefect's form shows. Called from a
notebook it takes a plain dict, has the same server, lines, report and refusals as the
command; in the form it has its settings in groups, with their limits. A worker uses
neither: it runs the flow itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

from prefect import Flow
from prefect.context import FlowRunContext
from pydantic import WithJsonSchema

from flows.cli import train_command
from flows.cli.flags import TITLES
from headroom.base.notebook import show_answer
from headroom.base.secret_texts import hide_secrets
from headroom.prefect_flows.flow_run import CalledFlow, run_at_desk
from headroom.report.run_report import make_fragment
from headroom.run.gate import GateFailed
from headroom.run.preflight import BAD_INPUT, mark_checked, resolve_and_check
from headroom.run.resume import read_resumed_settings
from headroom.settings.read_settings import ConfigError, hide_config_secrets, make_config
from headroom.settings.run_config import RunConfig
from headroom.settings.table import describe_setting, list_settings


def make_python_callable(flow: Flow[..., Any]) -> CalledFlow:
    """Return the flow of `config`, `overrides` and `resume`, for who calls it: from Python with all
    that the command does, in Prefect's form with its settings in groups."""
    return CalledFlow(
        flow.fn,
        call=partial(_train_from_python, flow.fn),
        shown=_hide_secrets,
        form=_make_form_signature,
        name=flow.name,
        flow_run_name=flow.flow_run_name,
    )


def _train_from_python(
    function: Callable[..., Any],
    run_flow: Callable[..., Any],
    config: RunConfig | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: str | None = None,
    **unknown: Any,
) -> dict[str, Any]:
    """Train, print the report, and return the run. Raises what the run raises.

    What is wrong with the arguments is one sentence, without the frames of pydantic and
    Prefect. config: None: the default one, or that of the run to go on with.
    """
    try:
        _refuse_unknown(unknown)
        if config is None:
            config = RunConfig() if resume is None else read_resumed_settings(resume)
        base = config if isinstance(config, RunConfig) else make_config(config)
        resolved = resolve_and_check(base, overrides)
        run: dict[str, Any]
        if FlowRunContext.get() is not None:  # a step of somebody's own flow
            with mark_checked(resolved):
                run = run_flow(config=resolved, resume=resume)
            return run
        with mark_checked(resolved), train_command.set_up_call():
            run = run_at_desk(run_flow, function, config=resolved, resume=resume)
    except BAD_INPUT as error:
        raise error.with_traceback(None) from None
    except GateFailed as failed:
        train_command.print_report(failed.run)
        raise
    train_command.print_report(run)
    return show_answer(run, partial(make_fragment, run, open_command=run["open_command"]))


def _refuse_unknown(unknown: Mapping[str, Any]) -> None:
    """Raise ConfigError where there are unknown arguments; say how a setting is given."""
    if not unknown:
        return
    names = {name.split(".")[-1]: name for name in (row.name for row in list_settings())}
    by_name = ", ".join(
        f"{names[setting]!r}: {'...' if setting == 'args' else repr(value)}"
        for setting, value in unknown.items()
        if setting in names
    )
    by_name = by_name or "'train.epochs': 3"
    raise ConfigError(
        f"train() takes config, overrides and resume, not {', '.join(unknown)}: settings are given "
        f"by their dotted names, as in train(overrides={{{by_name}}})"
    )


def _hide_secrets(parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        name: hide_config_secrets(value)
        if isinstance(value, RunConfig)
        else hide_secrets(value, name)
        for name, value in parameters.items()
    }


def _make_form_signature(flow: Flow[..., Any]) -> Signature:
    """Return the signature that `prefect deploy` makes the form of: it looks at no other part of a
    flow. What a person mostly needs, `overrides`, comes first, above some eighty fields."""
    parameters = signature(flow.fn, eval_str=True).parameters
    in_form = {
        "overrides": parameters["overrides"].replace(
            annotation=Annotated[
                dict[str, Any], WithJsonSchema({"type": "object", "propertyNames": _list_names()})
            ],
            default={},
        ),
        "resume": parameters["resume"],
        "config": parameters["config"].replace(
            annotation=Annotated[RunConfig, WithJsonSchema(_make_form())]
        ),
    }
    return Signature([p.replace(kind=Parameter.KEYWORD_ONLY) for p in in_form.values()])


def _list_names() -> dict[str, Any]:
    """Return the schema of the names that `overrides` may have, by which Prefect's server refuses a
    misspelt one when it is asked for the run, before there is one."""
    rows = list_settings()
    names = [*(row.name for row in rows), *RunConfig.model_fields]
    within = "|".join(re.escape(row.name) for row in rows if row.kind == "dictionary")
    return {"anyOf": [{"enum": names}, {"pattern": f"^({within})\\."}]}


def _make_form() -> dict[str, Any]:
    """Return the schema of the settings by which Prefect's form shows their dotted names, and their
    limits in words: it shows a schema's titles and descriptions, and no limits."""
    schema = RunConfig.model_json_schema()
    form: dict[str, Any] = _write_out(schema, schema.pop("$defs"))
    sections = form["properties"]
    for section, title in TITLES.items():
        sections[section] |= {"title": section, "description": title}
    for row in list_settings():
        section, _, name = row.name.partition(".")
        fields = sections[section]["properties"]
        fields[name] |= {"title": row.name, "description": describe_setting(row)}
    return form


def _write_out(part: Any, kinds: Mapping[str, Any]) -> Any:
    """Return the part of a schema with the kinds that it refers to in their places: references of
    a schema that stands in another one's lead nowhere."""
    if isinstance(part, list):
        return [_write_out(each, kinds) for each in part]
    if not isinstance(part, dict):
        return part
    whole = {**kinds[part["$ref"].rpartition("/")[2]], **part} if "$ref" in part else part
    return {name: _write_out(each, kinds) for name, each in whole.items() if name != "$ref"}
