"""Read and write the settings of a run: a YAML 1.2 file, read by ruamel into plain values with
the line of each name; flags over that, overrides over a finished config, and the form without
secrets that is stored and shown. Unknown names, repeated names and bad values are refused all
at once, one line each, with the place, the dotted name, the rule and the value; so are files
that are large or not regular, and aliases of aliases.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, get_origin

from pydantic import ValidationError
from ruamel.yaml import YAML, ScalarNode, SequenceNode
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError

from headroom.base.import_paths import (
    IMPORT_PATH,
    find_allow_problem,
    find_import_problem,
    is_import_path,
)
from headroom.base.secret_names import make_variable_name, restore_secrets
from headroom.base.secret_texts import find_secrets, hide_secrets
from headroom.settings.arguments import UNKNOWN_ARGUMENT
from headroom.settings.run_config import (
    TOKEN_SOURCES,
    RunConfig,
)
from headroom.settings.table import (
    MAPPINGS,
    describe_unknown_setting,
    find_kind,
    format_value,
)

MAX_BYTES = 2**18
MAX_VALUES = 50_000
# Dates and YAML's two signs of its own stay text: no setting is one.
_TEXTS = [f"tag:yaml.org,2002:{kind}" for kind in ("timestamp", "merge", "value")]
_KINDS = ("map", "seq", "str", "int", "float", "bool", "null")
_TAGS = {*_TEXTS, *(f"tag:yaml.org,2002:{kind}" for kind in _KINDS)}


class _PlainConstructor(SafeConstructor):
    """Makes plain values."""


for _text in _TEXTS:
    _PlainConstructor.add_constructor(_text, SafeConstructor.construct_yaml_str)


@dataclass(eq=False)
class SettingsProblem(Exception):
    """A problem of a settings file or text. The line is None where the whole is at fault."""

    text: str
    line: int | None = None


@dataclass
class Document:
    """The plain value of a YAML text, the lines where it and the names in it begin, and the
    names that are repeated, of which the first counts."""

    value: Any = None
    line: int = 1
    lines: dict[str, int] = field(default_factory=dict)  # by the dotted path of a name
    problems: list[SettingsProblem] = field(default_factory=list)
    count: int = 0  # of the values in it


def read_file_text(file: str) -> str:
    """Return the file's text. No more than the limit is read, and nothing that could wait or
    not end."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # to open a pipe or a device can wait or act
            raise SettingsProblem("is a folder, pipe or device; name a YAML file")
        with open(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise SettingsProblem("is larger than 256 KiB; a settings file holds only settings")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        says = f"is not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8"
        raise SettingsProblem(says, line) from error
    except FileNotFoundError as error:
        raise SettingsProblem(f"is not there (looked in {os.getcwd()}); check the path") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise SettingsProblem(f"cannot be read ({why}); check the path and its rights") from error


def parse_document(text: str) -> Document:
    """Parse the only document in the text; its value is None where the text holds nothing."""
    document, yaml = Document(), YAML(typ="safe", pure=True)
    yaml.Constructor = _PlainConstructor
    try:
        if (root := yaml.compose(text)) is not None:
            document.line = root.start_mark.line + 1
            document.value = _read_value(root, yaml.constructor, "", document)
    except (YAMLError, ValueError, LookupError, OverflowError, RecursionError) as error:
        # Those of Python are of !!int x, !!bool x, "\UFFFFFFFF", [[[[...
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        at = mark.index if mark else getattr(error, "position", None)
        words = (getattr(error, name, None) for name in ("context", "problem", "reason"))
        why = " ".join(filter(None, words)) or str(error)
        hint = "; indent with spaces" if "'\\t'" in why else ""
        line = None if at is None else text.count("\n", 0, at) + 1
        raise SettingsProblem(f"is not YAML: {why}{hint}", line) from error
    return document


def parse_value(text: str) -> Any:
    """Return the plain value of one YAML text, such as a flag's [64, 32]."""
    document = parse_document(text)
    if document.problems:
        raise document.problems[0]
    return document.value


def dump_yaml(settings: Any) -> str:
    """Return plain settings as YAML that reads back as the same: 1e-3 in quotes where it is
    text."""
    yaml, stream = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.allow_unicode = False
    yaml.dump(settings, stream)
    return stream.getvalue()


def _read_value(node: Any, constructor: Any, path: str, document: Document) -> Any:
    """Return the plain value of a node, and record the lines of the names in it in the document."""
    document.count += 1
    if document.count > MAX_VALUES:  # a few aliases of aliases stand for billions
        raise SettingsProblem(f"holds over {MAX_VALUES:,} values", node.start_mark.line + 1)
    if node.tag not in _TAGS:
        raise SettingsProblem(f"has a tag, {node.tag}; leave it out", node.start_mark.line + 1)
    if isinstance(node, ScalarNode):
        return constructor.construct_object(node)
    if isinstance(node, SequenceNode):
        items = enumerate(node.value)
        return [_read_value(item, constructor, f"{path}{i}.", document) for i, item in items]
    values: dict[str, Any] = {}
    for key, held in node.value:
        name, line = _read_value(key, constructor, path, document), key.start_mark.line + 1
        if not isinstance(name, str):
            raise SettingsProblem("has a name that is not text; put it in quotes", line)
        if first := document.lines.get(full := path + name):
            says = f"{full}: is written twice, first on line {first}; keep one"
            document.problems.append(SettingsProblem(says, line))
        else:
            document.lines[full] = line
            values[name] = _read_value(held, constructor, f"{full}.", document)
    return values


_NUMERAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class ConfigError(ValueError):
    """Settings that cannot be used; every problem is one line, which starts with its place or
    dotted name."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = tuple(_escape_line(problem) for problem in problems)

    def __str__(self) -> str:
        return "\n".join(self.problems)


def resolve_config(file: str | None, flags: Mapping[str, Any]) -> RunConfig:
    """Return the settings of `file`, with `flags` (dotted names; text is read as YAML) over them.

    Raises ConfigError with every problem of both.
    """
    sections: dict[str, Any] = {}
    document = Document()
    problems: list[SettingsProblem] = []
    try:
        if file is not None:
            document = parse_document(read_file_text(file))
            if not isinstance(document.value, dict):
                rule = "must hold sections, such as 'optim: {lr: 0.01}'"
                raise SettingsProblem(f"{rule} (got {format_value(document.value)})", document.line)
            problems += document.problems
            _put_settings(sections, document.value)
    except SettingsProblem as refused:
        place = "" if refused.line else f"{file or '--config'}: "
        problems.append(SettingsProblem(place + refused.text, refused.line))
    requested = {}
    for name, value in flags.items():
        document.lines.pop(name, None)
        try:
            requested[name] = _parse_flag(name, value)
        except SettingsProblem as refused:
            problems.append(SettingsProblem(f"{name}: {refused.text} (got {format_value(value)})"))
    _put_settings(sections, requested)
    return _validate(sections, document.lines, file, problems)


def override_config(
    config: RunConfig, overrides: Mapping[str, Any] | None, *, called: str = "overrides"
) -> RunConfig:
    """Return `config` with `overrides` (sections or dotted names, values of the right type)
    applied.

    called: what the caller knows them by. Raises ConfigError with every problem.
    """
    if overrides is None or overrides == {}:
        return config
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        rule = "must be a dict of settings, such as {'optim.lr': 0.01}"
        raise ConfigError(f"{called}: {rule} (got {format_value(overrides)})")
    sections = config.model_dump()
    _put_settings(sections, overrides)
    return _validate(sections, {}, None, [])


def make_config(settings: Mapping[str, Any]) -> RunConfig:
    """Return the config of a plain dict, in sections or by dotted names, as a notebook has them.

    Raises ConfigError with every problem.
    """
    return override_config(RunConfig(), settings, called="config")


def hide_config_secrets(config: RunConfig) -> RunConfig:
    """Return the config as it may be stored and shown: with stars for the secrets in its values,
    of its arguments also by their names."""
    return _change_values(
        config, lambda value, name: hide_secrets(value, name, by_name=name in _BY_NAME)
    )


def restore_config_secrets(config: RunConfig) -> RunConfig:
    """Return a config that was stored by `hide_config_secrets`, with its secrets; from now on
    they are in the environment, for the processes that this one starts.

    Raises ConfigError for those that the environment does not have, and for names of the run that
    hold one: every page shows them.
    """
    held = find_config_secrets(config)
    if names := [name for name in held if name.startswith("run.") and name != _NOTIFY]:
        problem = "holds a secret, which every page of the run would show; choose another"
        raise ConfigError(*(f"{name}: {problem}" for name in names))
    missing: list[str] = []
    os.environ.update(_name_variables(held))
    config = _change_values(
        config,
        lambda value, name: (
            value
            if name.startswith("run.") and name != _NOTIFY
            else restore_secrets(value, name, missing)
        ),
    )
    if missing:
        problem = "was hidden when it was kept; give it again:"
        ways = [(name, make_variable_name(name)) for name in missing]
        raise ConfigError(*(f"{n}: {problem} --{n}, or {v} in the environment" for n, v in ways))
    return config


def find_secret_variables(config: RunConfig) -> dict[str, str]:
    """Return the environment variables that a process needs which is given the settings without
    their secrets."""
    return _name_variables(find_config_secrets(config))


def find_config_secrets(config: RunConfig) -> dict[str, str]:
    """Return the values that `hide_config_secrets` hides, or a part of, by their dotted names."""
    secrets: dict[str, str] = {}

    def keep(value: Any, name: str) -> Any:
        secrets.update(find_secrets(value, name, by_name=name in _BY_NAME))
        return value

    _change_values(config, keep)
    return secrets


_ARGUMENTS = ("data.args", "model.args", "optim.args", "optim.schedule_args", "train.loss_args")
_NOTIFY = "run.notify"
_BY_NAME = (*_ARGUMENTS, _NOTIFY)  # whose values are hidden by their names, too


def _name_variables(secrets: Mapping[str, str]) -> dict[str, str]:
    return {make_variable_name(name): value for name, value in secrets.items()}


def _change_values(config: RunConfig, change: Callable[[Any, str], Any]) -> RunConfig:
    """Return the config with each value changed that is free text, or has any in it: no choice, no
    default, and no import path."""
    sections = {}
    for section in RunConfig.model_fields:
        held = getattr(config, section)
        new = {}
        for name, about in type(held).model_fields.items():
            value = getattr(held, name)
            if not isinstance(value, (str, list, dict)) or value == about.get_default(
                call_default_factory=True
            ):
                continue
            if get_origin(about.annotation) is Literal or (
                isinstance(value, str) and IMPORT_PATH.fullmatch(value)
            ):
                continue
            changed = change(value, f"{section}.{name}")
            if changed != value:
                new[name] = changed
        if new:
            sections[section] = held.model_copy(update=new)
    return config.model_copy(update=sections) if sections else config


def _parse_flag(name: str, value: Any) -> Any:
    """Return the value that a flag's text stands for, by the type of its setting. Raises
    SettingsProblem."""
    kind = find_kind(name) or find_kind(".".join(_split_name(name)[:2])) or "string"
    if not isinstance(value, str) or not value:
        return value
    if kind.endswith(" or null") and value.lower() in ("none", "null"):
        return None
    if kind.startswith(("string", "one of")) and not name.startswith(_ARGUMENTS):
        return value
    try:
        return parse_value(value)
    except SettingsProblem:
        if kind.startswith("one of"):  # a comma is no YAML
            return value
        raise


def _put_settings(sections: dict[str, Any], settings: Mapping[str, Any]) -> None:
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
        *path, last = _split_name(name)
        place: Any = sections
        for part in path:
            place = place.setdefault(part, {}) if isinstance(place, dict) else place
        if isinstance(place, dict):  # else its own problem is told
            place[last] = dict(value) if isinstance(value, Mapping) else value


def _split_name(name: str) -> list[str]:
    """Split a dotted name into section, setting and name in a mapping; an unknown one stays
    whole."""
    if name.partition(".")[0] not in RunConfig.model_fields:
        return [name]
    return name.split(".", 2 if name.startswith(tuple(f"{m}." for m in MAPPINGS)) else 1)


def _validate(
    sections: dict[str, Any],
    lines: Mapping[str, int],
    file: str | None,
    problems: list[SettingsProblem],
) -> RunConfig:
    """Return the config of these sections. A contradiction between settings is not reported
    where there was a mistake before: it may be a consequence of that."""
    is_read = not problems
    try:
        config = RunConfig.model_validate(sections)
    except ValidationError as error:
        for each in error.errors(include_url=False):
            if is_read or len(each["loc"]) > 1 or each["type"] != "value_error":
                problems.append(_make_problem(each, lines))
    if problems:
        problems.sort(key=lambda problem: problem.line or inf)
        raise ConfigError(*(f"{file}:{p.line} {p.text}" if p.line else p.text for p in problems))
    return config


def _make_problem(error: Mapping[str, Any], lines: Mapping[str, int]) -> SettingsProblem:
    """Make one line of one of pydantic's errors: "optim.lr: must be greater than 0 (got
    -0.1)"."""
    about, value, path = error["type"], error["input"], [str(part) for part in error["loc"]]
    name, got = ".".join(path), f" (got {format_value(value)})"
    got = "" if name == _NOTIFY else got
    line = lines.get(name, lines.get(".".join(path[:2])))
    text = error["msg"].removeprefix("Value error, ")
    text = text.replace("Input should", "must").replace("String should", "must")
    if about == "value_error" and len(path) == 1:  # of a section: it begins with a setting's name
        near = (line for key, line in lines.items() if key.startswith(f"{name}."))
        own = f"{name}.{text.partition(':')[0]}"
        return SettingsProblem(f"{name}.{text}", lines.get(own, next(near, None)))
    if about == UNKNOWN_ARGUMENT:
        return SettingsProblem(f"{name}: {text}", line)
    if about == "missing":  # of two numbers
        text = "must be given too"
    if about in ("extra_forbidden", "model_type"):  # no setting, a section that is no mapping
        text, got = describe_unknown_setting(name), got if about == "model_type" else ""
    elif about == "string_type" and isinstance(value, int | float):
        got += "; put it in quotes"
    elif isinstance(value, str) and about.endswith("_type") and _NUMERAL.fullmatch(value):
        got += "; drop the quotes"
    return SettingsProblem(f"{name}: {text}{'' if '(got ' in text else got}", line)


def _escape_line(text: str) -> str:
    """Return the text with whatever would break its line, or control a terminal, written as an
    escape."""
    shorter = text if len(text) <= 2000 else f"{text[:1000]}...{text[-1000:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shorter)


_NOT_OF_TOKENS = (*("data.scale", "data.target_transform", "data.split", "data.split_seed"),)


def find_unused_settings(config: RunConfig) -> dict[str, str]:
    """Return the settings that this run does not use, each with what it is for."""
    source = config.data.source
    unused: dict[str, str] = {}
    if source in TOKEN_SOURCES:
        unused |= {
            name: f"it is not for tokens (data.source is {source})" for name in _NOT_OF_TOKENS
        }
    return unused


def collect_params(config: RunConfig) -> dict[str, object]:
    """Return the settings that this run uses, under their dotted names and without secrets."""
    unused = find_unused_settings(config)
    return {
        name: value
        for name, value in hide_config_secrets(config).flat().items()
        if name not in unused
    }


_NAMES = ("run.name", "run.key", "run.experiment", _NOTIFY)
_OF_REGRESSION = ("data.target_transform",)
_OF_SEVERAL = ("launch.nodes", "launch.port", "launch.timeout_s")
_EMPTY = ("", "None", "[]", "{}")
_PARAM = re.compile(r"[\w.-]+")


def select_params(settings: Mapping[str, object], *, task: str = "") -> dict[str, str]:
    """Return what was set or decided, as MLflow's params have it: no names of the run, nothing
    that is empty or means nothing here, and each argument of a mapping under its own name.

    settings: as collect_params returns them. task: of the data, where it is known.
    """
    params: dict[str, str] = {}
    for name, value in settings.items():
        if name in _ARGUMENTS and str(value).startswith("{"):
            params |= _flatten(name, value)
        else:
            params[name] = "" if value is None else str(value)
    absent = {*_NAMES, *(_OF_REGRESSION if task not in ("", "regression") else ())}
    if params.get("launch.processes", "1") == "1" and params.get("launch.nodes", "") in _EMPTY:
        absent |= {*_OF_SEVERAL}
    return {k: v for k, v in params.items() if k not in absent and v not in _EMPTY}


def read_mapping(text: str) -> dict[Any, Any]:
    """Return the mapping that is written so, in Python or in JSON; empty where it is none."""
    for read in (ast.literal_eval, json.loads):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            mapping = read(text)
            if isinstance(mapping, dict):
                return mapping
    return {}


def _flatten(name: str, value: object) -> dict[str, str]:
    """Return the entries of a mapping, or of its text, under dotted names; as one text where that
    cannot be."""
    mapping = value if isinstance(value, Mapping) else read_mapping(str(value))
    if not mapping or not all(_PARAM.fullmatch(str(key)) for key in mapping):
        return {name: str(value)}
    return {f"{name}.{key}": str(one) for key, one in mapping.items()}


def describe_unused_settings(config: RunConfig) -> list[str]:
    """Return a line for each setting that was changed without effect."""
    values, usual = hide_config_secrets(config).flat(), RunConfig().flat()
    lines = [
        f"{name}: has no effect (got {values[name]}): {why}"
        for name, why in find_unused_settings(config).items()
        if values[name] != usual[name]
    ]
    patience, epochs = config.train.patience, config.train.epochs
    if patience >= epochs and config.train.eval_every_steps is None:
        why = f"the run ends after {epochs} epoch{'s' * (epochs != 1)}, by train.epochs"
        lines.append(f"train.patience: has no effect (got {patience}): {why}")
    return lines


def find_import_paths(config: RunConfig) -> dict[str, str]:
    """Return the import paths by the dotted names of their settings."""
    values = {
        "model.name": config.model.name,
        "data.source": config.data.source,
        "optim.name": config.optim.name,
        "optim.schedule": config.optim.schedule,
        "train.loss": config.train.loss,
        **{f"train.metrics.{name}": path for name, path in config.train.metrics.items()},
    }
    return {setting: path for setting, path in values.items() if is_import_path(path)}


def check_imports(config: RunConfig) -> None:
    """Raise ConfigError with every import path that can't be used; nothing is imported."""
    texts = [
        find_import_problem(setting, path) for setting, path in find_import_paths(config).items()
    ]
    problems = list(
        dict.fromkeys(text for text in (find_allow_problem(), *texts) if text is not None)
    )
    if problems:
        raise ConfigError(*problems)
