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
from ruamel.yaml.representer import SafeRepresenter

MAX_BYTES = 2**20
MAX_DEPTH = 32
MAX_VALUES = 5_000
_LONGEST_NUMBER = 400  # letters
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+|0x[0-9a-fA-F]+")
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
    dotted paths, and what stands there twice; of that the first is the value."""

    value: Any = None
    line: int = 1
    lines: dict[str, int] = field(default_factory=dict)
    twice: list[Refused] = field(default_factory=list)


def read_text(file: str) -> str:
    """The file's text. Never more than 1 MiB is read, and nothing that could wait or never end."""
    try:
        mode = os.stat(file).st_mode  # before open: opening a FIFO or a device can wait or act
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
            raise Refused(f"is {kind}; name a YAML file")
        with open(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise Refused(f"is not there (looked in {os.getcwd()}); check the path") from error
    except OSError as error:
        raise Refused(
            f"cannot be read ({error.strerror}); check the path and its rights"
        ) from error
    except ValueError as error:  # a NUL in the name
        raise Refused(f"is not a file name ({error})") from error
    if len(data) > MAX_BYTES:
        raise Refused("is larger than 1 MiB; a settings file holds only settings")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Refused("is UTF-16; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise Refused(
            f"is not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8", line
        ) from error


def scalar(text: str) -> Any:
    """What an unquoted word means in YAML 1.2's core schema: 1e-3 is a number, yes is text.

    ruamel's own reading takes 2024-01-01 for a date and .5e3 for text.
    """
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        return text
    try:
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    except ValueError:
        return float(text)


def parse(text: str) -> Document:
    """The only document in the text; its value is None where it holds nothing."""
    document = Document()
    found = _events(text)
    for event in found:
        if isinstance(event, events.NodeEvent):
            document.line = event.start_mark.line + 1
            document.value = _value(event, found, "", document)
    return document


def parse_value(text: str) -> Any:
    """The plain value of one YAML text, such as a flag's [64, 32]."""
    document = parse(text)
    if document.twice:
        raise document.twice[0]
    return document.value


def to_yaml(settings: Any) -> str:
    """Plain settings as text that reads back as the same: 1e-3 in quotes where it is text."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.allow_unicode = False
    yaml.width = 100
    stream = io.StringIO()
    yaml.dump(settings, stream)
    return stream.getvalue()


class _Representer(SafeRepresenter):
    def represent_text(self, text: str) -> Any:
        style = None if isinstance(scalar(text), str) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Representer.add_representer(str, _Representer.represent_text)


def _value(event: Any, rest: Iterator[Any], path: str, document: Document) -> Any:
    """What begins with `event`, taken from the `rest` of the events; its depth is bounded there."""
    if isinstance(event, events.ScalarEvent):
        return scalar(event.value) if event.implicit[0] else event.value
    inside = takewhile(lambda event: not isinstance(event, events.CollectionEndEvent), rest)
    if isinstance(event, events.SequenceStartEvent):
        return [_value(item, rest, f"{path}{i}.", document) for i, item in enumerate(inside)]
    found: dict[str, Any] = {}
    for key in inside:
        line = key.start_mark.line + 1
        name = _value(key, rest, path, document) if isinstance(key, events.ScalarEvent) else None
        if not isinstance(name, str):
            raise Refused("has a name that is not text; put it in quotes", line)
        full = path + name
        first = document.lines.get(full)
        if first is None:
            document.lines[full] = line
            found[name] = _value(next(rest), rest, f"{full}.", document)
        else:
            where = f"line {line}" if first == line else f"lines {first} and {line}"
            document.twice.append(Refused(f"{full}: is written twice, on {where}; keep one", line))
            _value(next(rest), rest, "", Document())  # all that it holds would be told again
    return found


def _events(text: str) -> Iterator[Any]:
    """What a parser sees, one after the other. Raises Refused before a limit is passed."""
    documents = values = depth = 0
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            line = event.start_mark.line + 1
            documents += isinstance(event, events.DocumentStartEvent)
            values += isinstance(event, events.NodeEvent)
            depth += isinstance(event, events.CollectionStartEvent)
            depth -= isinstance(event, events.CollectionEndEvent)
            if documents > 1:
                raise Refused("holds a second document (---); keep one", line)
            if values > MAX_VALUES:
                raise Refused(f"holds more than {MAX_VALUES:,} values; name data by its path", line)
            if depth > MAX_DEPTH:
                raise Refused(f"is nested deeper than {MAX_DEPTH} levels", line)
            if isinstance(event, events.NodeEvent):
                _check_plain(event, line)
            yield event
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = ord(error.character) if isinstance(error.character, str) else error.character
        says = f"holds a character that YAML refuses (0x{code:02x}); save it as plain UTF-8"
        raise Refused(says, line) from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        says = error.problem or error.context or "it cannot be understood"
        if "'\\t'" in says:
            says = "a tab; indent with spaces"
        says = says.replace("('", "'").replace("',)", "'")  # one of its formats prints a tuple
        raise Refused(f"is not YAML: {says}", mark.line + 1 if mark else None) from error
    except (ValueError, OverflowError) as error:  # "\UFFFFFFFF" is no character
        raise Refused(f"is not YAML: {error}") from error


def _check_plain(event: Any, line: int) -> None:
    if event.anchor is not None:
        raise Refused("has an anchor or alias (& or *); write the value out, or quote it", line)
    if getattr(event, "tag", None) is not None:
        raise Refused(f"has a tag ({event.tag[:60]}); a settings file holds plain values", line)
    if isinstance(event, events.ScalarEvent) and re.search("[\0\ud800-\udfff]", event.value):
        raise Refused("holds an escape that stands for no character of a text", line)
