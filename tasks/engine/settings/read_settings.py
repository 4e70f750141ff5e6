"""How a RunConfig comes to be: defaults, a YAML file over them, flags over that, overrides over a
finished one. It refuses unknown names and bad values all at once, one line each, with the place,
the dotted name, the rule, the value and the remedy; it never guesses what was meant, only says it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tasks.engine.settings.run_config import RunConfig
from tasks.engine.settings.sentences import sentence, shown
from tasks.engine.settings.table import MAPPINGS, Setting, table, unknown
from tasks.engine.settings.yaml_file import (
    Entry,
    Refused,
    entries,
    parse,
    parse_value,
    read_text,
    scalar,
)

_SECTIONS = frozenset(RunConfig.model_fields)
_ABOUT_A_FIELD = re.compile(r"(\w+):? (.*)", re.DOTALL)


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
    problems: list[Refused] = []
    asked: list[Entry] = []
    whole = True
    if file is not None:
        try:
            asked, problems = _from_file(file)
        except Refused as refused:
            whole = False
            text = refused.text if refused.line else f"{file or '--config'}: {refused.text}"
            problems = [Refused(text, refused.line)]
    for name, value in sorted(flags.items(), key=lambda flag: flag[0].count(".")):
        try:
            asked.append(Entry(name, None, _meant(name, value)))
        except Refused as refused:
            problems.append(Refused(f"{name}: {refused.text} (got {shown(value)})"))
    return _validated({}, asked, problems=problems, file=file, whole=whole)


def override(config: RunConfig, overrides: Mapping[str, Any] | None) -> RunConfig:
    """`config` with `overrides` (dotted names, values of the right type) applied.

    Raises ConfigError with every problem.
    """
    if not overrides:
        return config
    if not isinstance(overrides, Mapping) or not all(isinstance(name, str) for name in overrides):
        rule = "must map dotted names to values, such as {'optim.lr': 0.01}"
        raise ConfigError(f"overrides: {rule} (got {shown(overrides)})")
    given = sorted(overrides.items(), key=lambda pair: pair[0].count("."))
    asked = [Entry(name, None, value) for name, value in given]
    return _validated(config.flat(), asked, problems=[])


def from_mapping(settings: Mapping[str, Any]) -> RunConfig:
    """The settings of a plain dict, in sections or by dotted names, as a notebook has them.

    Raises ConfigError with every problem.
    """
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        rule = "must be a RunConfig or a dict of sections, such as {'optim': {'lr': 0.01}}"
        raise ConfigError(f"config: {rule} (got {shown(settings)})")
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _SECTIONS and isinstance(value, Mapping):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            flat[name] = value
    return override(RunConfig(), flat)


def _from_file(file: str) -> tuple[list[Entry], list[Refused]]:
    root = parse(read_text(file))
    if root is None or (root.kind == "scalar" and root.value is None):
        raise Refused("is empty; write at least one section, or leave the file out")
    return entries(root, MAPPINGS)


def _meant(name: str, value: Any) -> Any:
    """The value that a flag's text stands for, by the kind of its setting. Raises Refused."""
    if not isinstance(value, str):
        return value
    kind = next((row.kind for row in table() if row.name == name), "")
    if kind.endswith(" or null") and value.lower() in ("none", "null"):
        return None
    if kind.removesuffix(" or null") in ("mapping", "list") or name.startswith(
        tuple(f"{mapping}." for mapping in MAPPINGS)
    ):
        return parse_value(value)
    return value if kind.startswith(("text", "one of")) else scalar(value.strip()) if value else ""


def _validated(
    values: dict[str, Any],
    asked: Sequence[Entry],
    *,
    problems: list[Refused],
    file: str | None = None,
    whole: bool = True,
) -> RunConfig:
    """The config with what was asked over `values`; not `whole` where a file is not among it."""
    lines: dict[str, int | None] = {}
    rows = {row.name: row for row in table()}
    doubtful = set() if whole else set(_SECTIONS)  # what contradicts there may be a consequence
    for entry in asked:
        name = next((m for m in MAPPINGS if entry.name.startswith(f"{m}.")), entry.name)
        if name in rows:
            lines[name] = entry.line
            _place(values, name, entry)
        elif entry.name not in _SECTIONS or entry.value != {}:
            problems.append(Refused(f"{entry.name}: {_why_unknown(entry)}", entry.line))
            doubtful.add(name.partition(".")[0])
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    try:
        config = RunConfig.model_validate(sections)
    except ValidationError as error:
        for violation in error.errors(include_url=False):
            if len(violation["loc"]) > 1 or violation["loc"][0] not in doubtful:
                problems.append(_told(violation, rows, lines))
    if problems:
        raise ConfigError(*_in_order(problems, file))
    return config


def _place(values: dict[str, Any], name: str, entry: Entry) -> None:
    if entry.name == name:
        values[name] = entry.value
        return
    rest = values.get(name, {})
    if isinstance(rest, dict):  # else its own problem is told
        values[name] = {**rest, entry.name.removeprefix(f"{name}."): entry.value}


def _why_unknown(entry: Entry) -> str:
    if entry.name in _SECTIONS and entry.value is None:
        return "is empty; write its settings under it, or leave it out"
    got = f" (got {shown(entry.value)})" if entry.name in _SECTIONS else ""
    return unknown(entry.name) + got


def _told(
    violation: Mapping[str, Any], rows: Mapping[str, Setting], lines: Mapping[str, int | None]
) -> Refused:
    """One of pydantic's errors, about a setting or (from a model_validator) about a section."""
    section, *rest = violation["loc"]
    if rest:
        row = rows[f"{section}.{rest[0]}"]
        kind, choices = row.kind, tuple(row.limits.split(", "))
        return Refused(
            f"{row.name}: {sentence(violation, kind=kind, choices=choices)}", lines.get(row.name)
        )
    text = str(violation["ctx"]["error"])
    about = _ABOUT_A_FIELD.fullmatch(text)
    name = f"{section}.{about[1]}" if about else str(section)
    if about and name in rows:  # "path: is needed" is about data.path
        text = about[2]
    else:
        name = str(section)
    near = [n for key, n in lines.items() if n and key.startswith(f"{section}.")]
    return Refused(f"{name}: {text}", lines.get(name, min(near, default=None)))


def _in_order(problems: Sequence[Refused], file: str | None) -> list[str]:
    """Lines to print: those of the file with their places first, then the others."""
    placed = sorted((p for p in problems if p.line), key=lambda problem: problem.line or 0)
    others = [p.text for p in problems if not p.line]
    return [f"{file}:{problem.line} {problem.text}" for problem in placed] + others


def _one_line(text: str) -> str:
    """The text with whatever would break its line, or drive a terminal, written as an escape."""
    shorter = text if len(text) <= 2000 else f"{text[:1000]}...{text[-1000:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shorter)
