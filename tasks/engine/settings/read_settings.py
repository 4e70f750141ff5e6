"""How a RunConfig comes to be: defaults, a YAML file over them, flags over that, overrides over a
finished one. It refuses unknown names and bad values all at once, one line each, with the place,
the dotted name, the rule, the value and the remedy; it never guesses what was meant, only says it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tasks.engine.settings.run_config import RunConfig
from tasks.engine.settings.sentences import sentence, shown
from tasks.engine.settings.table import MAPPINGS, Setting, table, unknown
from tasks.engine.settings.yaml_file import Document, Refused, parse, parse_value, read_text, scalar

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
    asked: list[tuple[str, Any]] = []
    lines: dict[str, int] = {}
    doubtful: frozenset[str] = frozenset()
    try:
        if file is not None:
            document = parse(read_text(file))
            asked += _in_turn(_flat(_sections(document)))
            problems += document.twice
            lines = {name: line for name, line in document.lines.items() if name not in flags}
    except Refused as refused:
        text = refused.text if refused.line else f"{file or '--config'}: {refused.text}"
        problems.append(Refused(text, refused.line))
        doubtful = _SECTIONS
    for name, value in _in_turn(flags):
        try:
            asked.append((name, _meant(name, value)))
        except Refused as refused:
            problems.append(Refused(f"{name}: {refused.text} (got {shown(value)})"))
    return _validated(asked, problems, lines=lines, file=file, doubtful=doubtful)


def override(config: RunConfig, overrides: Mapping[str, Any] | None) -> RunConfig:
    """`config` with `overrides` (dotted names, values of the right type) applied.

    Raises ConfigError with every problem.
    """
    if not overrides:
        return config
    if not isinstance(overrides, Mapping) or not all(isinstance(name, str) for name in overrides):
        rule = "must map dotted names to values, such as {'optim.lr': 0.01}"
        raise ConfigError(f"overrides: {rule} (got {shown(overrides)})")
    return _validated([*config.flat().items(), *_in_turn(overrides)], [])


def from_mapping(settings: Mapping[str, Any]) -> RunConfig:
    """The settings of a plain dict, in sections or by dotted names, as a notebook has them.

    Raises ConfigError with every problem.
    """
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        rule = "must be a RunConfig or a dict of sections, such as {'optim': {'lr': 0.01}}"
        raise ConfigError(f"config: {rule} (got {shown(settings)})")
    return override(RunConfig(), _flat(settings))


def _sections(document: Document) -> dict[str, Any]:
    value = document.value
    if value is None:
        raise Refused("is empty; write at least one section, or leave the file out")
    if not isinstance(value, dict):
        got = "a list" if isinstance(value, list) else repr(value)[:60]
        rule = f"must hold sections, such as 'optim: {{lr: 0.01}}' (got {got})"
        raise Refused(rule, document.line)
    return value


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Sections and dotted names, all by dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = value if isinstance(value, Mapping) and "." not in name else {}
        found |= {f"{name}.{key}": each for key, each in inner.items()} or {name: value}
    return found


def _in_turn(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """A mapping comes before what is set in it: model.args before model.args.hidden."""
    return sorted(settings.items(), key=lambda pair: pair[0].count("."))


def _meant(name: str, value: Any) -> Any:
    """The value that a flag's text stands for, by the kind of its setting. Raises Refused."""
    if not isinstance(value, str):
        return value
    kind = next((row.kind for row in table() if row.name == name), "")
    if kind.endswith(" or null") and value.lower() in ("none", "null"):
        return None
    if kind.startswith(("mapping", "list")) or _mapping_of(name) != name:
        return parse_value(value)
    return value if kind.startswith(("text", "one of")) else scalar(value.strip()) if value else ""


def _mapping_of(name: str) -> str:
    """The setting of a name: model.args of model.args.hidden, the name itself of all others."""
    return next((m for m in MAPPINGS if name.startswith(f"{m}.")), name)


def _validated(
    asked: Sequence[tuple[str, Any]],
    problems: list[Refused],
    *,
    lines: Mapping[str, int] | None = None,
    file: str | None = None,
    doubtful: Collection[str] = (),
) -> RunConfig:
    """The config of what was asked, the last of one name. What contradicts itself in a `doubtful`
    section is not told: it may be a consequence of what is."""
    lines, doubtful = lines or {}, set(doubtful)
    rows = {row.name: row for row in table()}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in asked:
        setting = _mapping_of(name)
        section, _, key = setting.partition(".")
        own = sections.setdefault(section, {}) if setting in rows else {}
        if setting not in rows and (name not in _SECTIONS or value != {}):
            problems.append(Refused(f"{name}: {_why_unknown(name, value)}", lines.get(name)))
            doubtful.add(section)
        elif setting == name:
            own[key] = value
        elif isinstance(whole := own.get(key, {}), dict):  # else its own problem is told
            own[key] = {**whole, name.removeprefix(f"{setting}."): value}
    try:
        config = RunConfig.model_validate(sections)
    except ValidationError as error:
        problems += [
            _told(violation, rows, lines)
            for violation in error.errors(include_url=False)
            if len(violation["loc"]) > 1 or violation["loc"][0] not in doubtful
        ]
    if problems:
        placed = sorted((p for p in problems if p.line), key=lambda problem: problem.line or 0)
        told = [f"{file}:{problem.line} {problem.text}" for problem in placed]
        raise ConfigError(*told, *(p.text for p in problems if not p.line))
    return config


def _why_unknown(name: str, value: Any) -> str:
    if name in _SECTIONS and value is None:
        return "is empty; write its settings under it, or leave it out"
    return unknown(name) + (f" (got {shown(value)})" if name in _SECTIONS else "")


def _told(
    violation: Mapping[str, Any], rows: Mapping[str, Setting], lines: Mapping[str, int]
) -> Refused:
    """One of pydantic's errors, about a setting or (from a model_validator) about a section."""
    section, *rest = violation["loc"]
    if rest:
        name = near = f"{section}.{rest[0]}"
        text = sentence(violation, kind=rows[name].kind, limits=rows[name].limits)
    else:
        name, near, text = section, section, str(violation["ctx"]["error"])
        about = _ABOUT_A_FIELD.fullmatch(text)
        if about and f"{section}.{about[1]}" in rows:  # "path: is needed" is about data.path
            name, text = f"{section}.{about[1]}", about[2]
    first = min((n for key, n in lines.items() if key.startswith(f"{near}.")), default=None)
    return Refused(f"{name}: {text}", lines.get(name, first))


def _one_line(text: str) -> str:
    """The text with whatever would break its line, or drive a terminal, written as an escape."""
    shorter = text if len(text) <= 2000 else f"{text[:1000]}...{text[-1000:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shorter)
