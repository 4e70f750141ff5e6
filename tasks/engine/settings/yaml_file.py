"""A settings file, read as YAML 1.2 would: plain text first, then nodes that know their lines.
It refuses what a settings file has no use for and what would harm the reader: files that are not
regular, large or deep ones, aliases, tags, second documents and settings that are written twice.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import yaml

MAX_BYTES = 2**20
MAX_DEPTH = 32
MAX_VALUES = 5_000
_INT = re.compile(r"[-+]?[0-9]{1,400}")
_OTHER_INT = re.compile(r"0o[0-7]{1,400}|0x[0-9a-fA-F]{1,300}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **{s + w: float(s + "inf") for s in ("", "+", "-") for w in (".inf", ".Inf", ".INF")},
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


class Refused(Exception):
    """The file or text is no settings file. The line is None where the whole is at fault."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text, line)
        self.text = text
        self.line = line


@dataclass(frozen=True)
class Node:
    """A YAML value; value holds a scalar, a list of nodes, or a list of (key, value) nodes."""

    kind: Literal["scalar", "list", "map"]
    line: int
    value: Any


@dataclass(frozen=True)
class Entry:
    """One setting: its dotted name, its line where it stands in a file, its plain value."""

    name: str
    line: int | None
    value: Any


def read_text(file: str) -> str:
    """The file's text. Never more than 1 MiB is read, and nothing that could wait or never end."""
    try:
        mode = os.stat(file).st_mode  # before open: opening a FIFO or a device can wait or act
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
            raise Refused(f"is {kind}; name a YAML file")
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(handle, "rb") as stream:
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
    return _decoded(data)


def _decoded(data: bytes) -> str:
    rough = data.decode("latin-1")  # one character a byte: good enough to count lines
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Refused("is UTF-16; save it as UTF-8")
    if b"\0" in data:
        raise Refused(
            "holds a NUL byte; save it as plain UTF-8", _line_at(rough, rough.index("\0"))
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = _line_at(rough, error.start)
        byte = data[error.start]
        raise Refused(f"is not UTF-8 (byte 0x{byte:02x}); save it as UTF-8", where) from error


def _line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def scalar(text: str) -> Any:
    """What an unquoted word means in YAML 1.2's core schema: 1e-3 is a number, yes is text."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _OTHER_INT.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text) and not text.lstrip("+-").isdecimal():
        return float(text)
    return text


def parse(text: str) -> Node | None:
    """The only document in the text, or None where it holds nothing. No recursion: the depth of
    the text is bounded before Python's stack is."""
    stack = [Node("list", 1, [])]
    documents = values = 0
    for event in _events(text):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise Refused("holds a second document (---); keep one", line)
        if isinstance(event, yaml.CollectionEndEvent):
            stack.pop()
        if not isinstance(event, yaml.NodeEvent):
            continue
        values += 1
        if values > MAX_VALUES:
            raise Refused(f"holds more than {MAX_VALUES:,} values; name data by its path", line)
        node = _node(event, line)
        _put(stack[-1], node)
        if node.kind != "scalar":
            stack.append(node)
            if len(stack) > MAX_DEPTH:
                raise Refused(f"is nested deeper than {MAX_DEPTH} levels", line)
    return stack[0].value[0] if stack[0].value else None


def parse_value(text: str) -> Any:
    """The plain value of one YAML text, such as a flag's [64, 32]."""
    root, problems = parse(text), list[Refused]()
    value = _plain(root, "", problems) if root else None
    if problems:
        raise problems[0]
    return value


def to_yaml(settings: Any) -> str:
    """Plain settings as text that reads back as the same: what only looks like a number is quoted.

    yaml.safe_dump alone leaves the text 1e-3 bare, which YAML 1.2 reads as a number.
    """
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, width=100)


class _Dumper(yaml.SafeDumper):
    def represent_text(self, text: str) -> Any:
        style = None if isinstance(scalar(text), str) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_text)


def _events(text: str) -> Iterator[Any]:
    try:
        yield from yaml.parse(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        code = ord(error.character) if isinstance(error.character, str) else error.character
        where = _line_at(text, error.position)
        raise Refused(f"holds a character that YAML refuses (0x{code:02x})", where) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        says = error.problem or error.context or "it cannot be understood"
        if "'\\t'" in says:
            says = "a tab; indent with spaces"
        raise Refused(f"is not YAML: {says}", mark.line + 1 if mark else None) from error
    except (ValueError, OverflowError) as error:  # "\UFFFFFFFF" is no character
        raise Refused(f"is not YAML: {error}") from error


def _node(event: Any, line: int) -> Node:
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        raise Refused("has an anchor or alias (& or *); write the value out, or quote it", line)
    if event.tag is not None:
        raise Refused(f"has a tag ({event.tag[:60]}); a settings file holds plain values", line)
    if isinstance(event, yaml.ScalarEvent):
        if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in event.value):
            raise Refused("holds an escape that stands for no character of a text", line)
        return Node("scalar", line, scalar(event.value) if event.style is None else event.value)
    return Node("list" if isinstance(event, yaml.SequenceStartEvent) else "map", line, [])


def _put(parent: Node, node: Node) -> None:
    if parent.kind == "list":
        parent.value.append(node)
    elif parent.value and parent.value[-1][1] is None:
        parent.value[-1] = (parent.value[-1][0], node)
    elif node.kind == "scalar" and isinstance(node.value, str):
        parent.value.append((node, None))
    else:
        raise Refused("has a name that is not text; put it in quotes", node.line)


def entries(root: Node, mappings: Collection[str]) -> tuple[list[Entry], list[Refused]]:
    """The settings of a document, nested or dotted, and what is written twice in it.

    A mapping under a name without a dot is a section; one under a name in `mappings` is taken
    apart as well, so that model.args.width is one setting in whichever form it stands.
    """
    if root.kind != "map":
        got = "a list" if root.kind == "list" else repr(root.value)[:60]
        raise Refused(f"must hold sections, such as 'optim: {{lr: 0.01}}' (got {got})", root.line)
    problems: list[Refused] = []
    found: dict[str, Entry] = {}
    for entry in _flat(root, "", mappings, problems):
        first = found.setdefault(entry.name, entry)
        if first is not entry:
            problems.append(_twice(entry.name, first.line or 0, entry.line or 0))
    return list(found.values()), problems


def _flat(
    node: Node, path: str, mappings: Collection[str], problems: list[Refused]
) -> Iterator[Entry]:
    for key, value in _unique(node, path, problems):
        name = path + key.value
        if value.kind == "map" and value.value and ("." not in name or name in mappings):
            yield from _flat(value, f"{name}.", mappings, problems)
        else:
            yield Entry(name, key.line, _plain(value, f"{name}.", problems))


def _unique(node: Node, path: str, problems: list[Refused]) -> list[tuple[Node, Node]]:
    first: dict[str, tuple[Node, Node]] = {}
    for pair in node.value:
        key = pair[0]
        known = first.setdefault(key.value, pair)
        if known is not pair:
            problems.append(_twice(path + key.value, known[0].line, key.line))
    return list(first.values())


def _twice(name: str, first: int, again: int) -> Refused:
    lines = f"line {first}" if first == again else f"lines {first} and {again}"
    return Refused(f"{name}: is written twice, on {lines}; keep one", again)


def _plain(node: Node, path: str, problems: list[Refused]) -> Any:
    if node.kind == "list":
        return [_plain(item, path, problems) for item in node.value]
    if node.kind == "map":
        pairs = _unique(node, path, problems)
        return {key.value: _plain(value, f"{path}{key.value}.", problems) for key, value in pairs}
    return node.value
