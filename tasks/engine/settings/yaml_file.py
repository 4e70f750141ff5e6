"""A settings file, read as YAML 1.2: plain values, the line of each name, what is written twice. It
refuses what a settings file has no use for and what would harm the reader: files that are not
regular, large or deep ones, aliases, tags and second documents.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.reader import ReaderError

MAX_BYTES = 2**20
MAX_DEPTH = 32
MAX_VALUES = 5_000
_NUMBER = re.compile(
    r"[-+]?([0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?|\.[0-9]+([eE][-+][0-9]+)?)"
    r"|0o[0-7]+|0x[0-9a-fA-F]+"
)
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **{s + w: float(s + "inf") for s in ("", "+", "-") for w in (".inf", ".Inf", ".INF")},
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


@dataclass(eq=False)
class Refused(Exception):
    """The file or text is no settings file. The line is None where the whole is at fault."""

    text: str
    line: int | None = None


@dataclass
class Document:
    """The plain value of a text, the line it begins on, the lines of all names in it by their
    dotted paths, and what is wrong: names that stand there twice, of which the first counts."""

    value: Any = None
    line: int = 1
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[Refused] = field(default_factory=list)


def read_text(file: str) -> str:
    """The file's text. No more than the limit is read, and nothing that could wait or not end."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # to open a pipe or a device can wait or act
            raise Refused("is a folder, pipe or device; name a YAML file")
        with open(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise Refused("is larger than 1 MiB; a settings file holds only settings")
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        says = f"is not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8"
        raise Refused(says, line) from error
    except FileNotFoundError as error:
        raise Refused(f"is not there (looked in {os.getcwd()}); check the path") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise Refused(f"cannot be read ({why}); check the path and its rights") from error


def scalar(text: str) -> Any:
    """What an unquoted word means in YAML 1.2: 1e-3 is a number, yes and 2024-01-01 are text. So is
    .5e3, against the rules: ruamel reads it so and writes it without quotes."""
    if text in _WORDS:
        return _WORDS[text]
    if not _NUMBER.fullmatch(text):
        return text
    try:
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    except ValueError:
        return float(text)


def parse(text: str) -> Document:
    """The only document in the text; its value is None where it holds nothing."""
    document = Document()
    nodes = _nodes(text)
    for node in nodes:
        document.line = node.start_mark.line + 1
        document.value = _value(node, nodes, "", document)
    return document


def parse_value(text: str) -> Any:
    """The plain value of one YAML text, such as a flag's [64, 32]."""
    document = parse(text)
    if document.problems:
        raise document.problems[0]
    return document.value


def to_yaml(settings: Any) -> str:
    """Plain settings as text that reads back as the same: 1e-3 in quotes where it is text."""
    yaml, stream = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.allow_unicode = False
    yaml.dump(settings, stream)
    return stream.getvalue()


def _value(node: Any, rest: Iterator[Any], path: str, document: Document) -> Any:
    """What begins with `node`, taken from the `rest`; the names in it are told to the document."""
    if isinstance(node, events.ScalarEvent):
        return scalar(node.value) if node.implicit[0] else node.value
    inside = takewhile(lambda node: not isinstance(node, events.CollectionEndEvent), rest)
    if isinstance(node, events.SequenceStartEvent):
        return [_value(item, rest, f"{path}{i}.", document) for i, item in enumerate(inside)]
    found: dict[str, Any] = {}
    for key in inside:
        name, line = _value(key, rest, path, document), key.start_mark.line + 1
        if not isinstance(name, str):
            raise Refused("has a name that is not text; put it in quotes", line)
        first = document.lines.get(full := path + name)
        document.lines.setdefault(full, line)
        value = _value(next(rest), rest, f"{full}.", Document() if first else document)
        if first:
            says = f"{full}: is written twice, first on line {first}; keep one"
            document.problems.append(Refused(says, line))
        else:
            found[name] = value
    return found


def _nodes(text: str) -> Iterator[Any]:
    """Where values begin and end, as ruamel's parser sees it."""
    values = depth = 0
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            line = event.start_mark.line + 1
            if isinstance(event, events.DocumentStartEvent) and values:
                raise Refused("holds a second document (---); keep one", line)
            if isinstance(event, events.CollectionEndEvent):
                depth -= 1
                yield event
            if isinstance(event, events.NodeEvent):
                values += 1
                depth += isinstance(event, events.CollectionStartEvent)
                if values > MAX_VALUES or depth > MAX_DEPTH:
                    raise Refused(f"holds over {MAX_VALUES:,} values or {MAX_DEPTH} levels", line)
                if event.anchor is not None or getattr(event, "tag", None) is not None:
                    rule = "has an anchor, alias or tag (&, *, !)"
                    raise Refused(f"{rule}; write the value out, or quote it", line)
                if re.search("[\0\ud800-\udfff]", getattr(event, "value", "")):
                    raise Refused("holds an escape that stands for no character of a text", line)
                yield event
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        hint = "; indent with spaces" if "'\\t'" in str(error.problem) else ""
        raise Refused(f"is not YAML: {error.problem}{hint}", mark and mark.line + 1) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise Refused(f"is not YAML: {error.reason} (0x{error.character:02x})", line) from error
    except (ValueError, OverflowError) as error:  # "\UFFFFFFFF" is no character
        raise Refused(f"is not YAML: {error}") from error
