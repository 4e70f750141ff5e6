"""How a RunConfig comes to be: defaults, a YAML file over them, flags over that, overrides over a
finished one; and how it is kept and shown without its secrets. It refuses unknown names and bad
values all at once, one line each, with the place, the dotted name, the rule and the value; it never
guesses what was meant, only says it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from pydantic import ValidationError

from tasks.engine.base import secret_names
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.settings.table import MAPPINGS, shown, table, unknown
from tasks.engine.settings.yaml_file import Document, Refused, parse, parse_value, read_text

_NUMERAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class ConfigError(ValueError):
    """Settings that cannot be used; every problem is one line, which starts with its place or
    dotted name."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = tuple(_one_line(problem) for problem in problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


def resolve(file: str | None, flags: Mapping[str, Any]) -> RunConfig:
    """The settings of `file`, with `flags` (dotted names; text is read as YAML) over them.

    Raises ConfigError with every problem of both.
    """
    sections: dict[str, Any] = {}
    document = Document()
    told: list[Refused] = []
    try:
        if file is not None:
            document = parse(read_text(file))
            if not isinstance(document.value, dict):
                rule = "must hold sections, such as 'optim: {lr: 0.01}'"
                raise Refused(f"{rule} (got {shown(document.value)})", document.line)
            told += document.problems
            _put(sections, document.value)
    except Refused as refused:
        place = "" if refused.line else f"{file or '--config'}: "
        told.append(Refused(place + refused.text, refused.line))
    asked = {}
    for name, value in flags.items():
        document.lines.pop(name, None)
        try:
            asked[name] = _meant(name, value)
        except Refused as refused:
            told.append(Refused(f"{name}: {refused.text} (got {shown(value)})"))
    _put(sections, asked)
    return _validated(sections, document.lines, file, told)


def override(config: RunConfig, overrides: Mapping[str, Any] | None) -> RunConfig:
    """`config` with `overrides` (sections or dotted names, values of the right type) applied.

    Raises ConfigError with every problem.
    """
    return _over(config, "overrides", overrides) if overrides else config


def hidden(config: RunConfig) -> RunConfig:
    """The same as it may be kept and shown: stars stand in the arguments for what is a secret."""
    return _with_arguments(config, secret_names.hidden)


def given_again(config: RunConfig) -> RunConfig:
    """The same with its secrets, where it was read from what `hidden` has made; from now on they
    are in the environment, for the processes that this one starts.

    Raises ConfigError for those that are not there.
    """
    missing: list[str] = []
    os.environ.update(secret_variables(config))
    config = _with_arguments(config, lambda v, name: secret_names.given_again(v, name, missing))
    if missing:
        told = "was hidden when it was kept; give it again: --{0}, or {1} in the environment"
        raise ConfigError(
            *(f"{name}: {told.format(name, secret_names.variable(name))}" for name in missing)
        )
    return config


def secret_variables(config: RunConfig) -> dict[str, str]:
    """What the environment of a process has to hold, to which `hidden` settings are given."""
    each = (secret_names.variables(values, name) for name, values in _arguments(config).items())
    return {name: value for found in each for name, value in found.items()}


def _arguments(config: RunConfig) -> dict[str, dict[str, Any]]:
    return {"data.args": config.data.args, "model.args": config.model.args}


def _with_arguments(
    config: RunConfig, change: Callable[[Mapping[str, Any], str], dict[str, Any]]
) -> RunConfig:
    args = {name: change(values, name) for name, values in _arguments(config).items()}
    if args == _arguments(config):
        return config
    data = config.data.model_copy(update={"args": args["data.args"]})
    model = config.model.model_copy(update={"args": args["model.args"]})
    return config.model_copy(update={"data": data, "model": model})


def from_mapping(settings: Mapping[str, Any]) -> RunConfig:
    """The settings of a plain dict, in sections or by dotted names, as a notebook has them.

    Raises ConfigError with every problem.
    """
    return _over(RunConfig(), "config", settings)


def _over(config: RunConfig, name: str, settings: Mapping[str, Any]) -> RunConfig:
    if not isinstance(settings, Mapping) or not all(isinstance(key, str) for key in settings):
        rule = "must be a dict of settings, such as {'optim.lr': 0.01}"
        raise ConfigError(f"{name}: {rule} (got {shown(settings)})")
    sections = config.model_dump()
    _put(sections, settings)
    return _validated(sections, {}, None, [])


def _meant(name: str, value: Any) -> Any:
    """The value that a flag's text stands for, by the kind of its setting. Raises Refused."""
    setting = ".".join(_path(name)[:2])
    kind = next((row.kind for row in table() if row.name == setting), "string")
    if not isinstance(value, str) or not value:
        return value
    if kind.endswith(" or null") and value.lower() in ("none", "null"):
        return None
    return value if kind.startswith(("string", "one of")) else parse_value(value)


def _put(sections: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Sets the `settings`, which are nested or have dotted names, in the sections."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        is_section = isinstance(value, Mapping) and "." not in name
        if is_section and (value or name in RunConfig.model_fields):  # of others {} is told
            flat |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            flat[name] = value
    # A mapping comes before what is set in it: model.args before model.args.hidden.
    for name, value in sorted(flat.items(), key=lambda pair: pair[0].count(".")):
        *path, last = _path(name)
        place: Any = sections
        for part in path:
            place = place.setdefault(part, {}) if isinstance(place, dict) else place
        if isinstance(place, dict):  # else its own problem is told
            place[last] = dict(value) if isinstance(value, Mapping) else value


def _path(name: str) -> list[str]:
    """A dotted name as section, setting and name in a mapping; an unknown one as it is."""
    if name.partition(".")[0] not in RunConfig.model_fields:
        return [name]
    return name.split(".", 2 if name.startswith(tuple(f"{m}." for m in MAPPINGS)) else 1)


def _validated(
    sections: dict[str, Any], lines: Mapping[str, int], file: str | None, told: list[Refused]
) -> RunConfig:
    """The config of the sections. What contradicts itself is not told where there was a mistake
    before: it may be a consequence of that."""
    is_read = not told
    try:
        config = RunConfig.model_validate(sections)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            if is_read or len(each["loc"]) > 1 or each["type"] != "value_error":
                told.append(_problem(each, lines))
    if told:
        told.sort(key=lambda problem: problem.line or inf)
        raise ConfigError(*(f"{file}:{p.line} {p.text}" if p.line else p.text for p in told))
    return config


def _problem(error: Mapping[str, Any], lines: Mapping[str, int]) -> Refused:
    """One of pydantic's errors: "optim.lr: must be greater than 0 (got -0.1)"."""
    about, value, path = error["type"], error["input"], [str(part) for part in error["loc"]]
    name, got = ".".join(path), f" (got {shown(value)})"
    line = lines.get(name, lines.get(".".join(path[:2])))
    text = error["msg"].removeprefix("Value error, ")
    text = text.replace("Input should", "must").replace("String should", "must")
    if about == "value_error" and len(path) == 1:  # of a section: it begins with a setting's name
        near = (line for key, line in lines.items() if key.startswith(f"{name}."))
        own = f"{name}.{text.partition(':')[0]}"
        return Refused(f"{name}.{text}", lines.get(own, next(near, None)))
    if about == "extra_forbidden":
        text, got = unknown(name), ""
    elif about == "model_type":
        text = unknown(name)
    elif about == "string_type" and isinstance(value, int | float):
        got += "; put it in quotes"
    elif isinstance(value, str) and about.endswith("_type") and _NUMERAL.fullmatch(value):
        got += "; drop the quotes"
    return Refused(f"{name}: {text}{'' if '(got ' in text else got}", line)


def _one_line(text: str) -> str:
    """The text with whatever would break its line, or drive a terminal, written as an escape."""
    shorter = text if len(text) <= 2000 else f"{text[:1000]}...{text[-1000:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shorter)
