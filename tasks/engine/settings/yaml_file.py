"""A settings file, read as YAML 1.2 by ruamel: plain values, and the line of each name. It
refuses what is written twice, files that are large or not regular, and aliases of aliases.
"""

from __future__ import annotations

import io
import os
import stat
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML, ScalarNode, SequenceNode
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.error import YAMLError

MAX_BYTES = 2**18
MAX_VALUES = 50_000
# Dates and YAML's two signs of its own stay text: no setting is one.
_TEXTS = [f"tag:yaml.org,2002:{kind}" for kind in ("timestamp", "merge", "value")]
_KINDS = ("map", "seq", "str", "int", "float", "bool", "null")
_TAGS = {*_TEXTS, *(f"tag:yaml.org,2002:{kind}" for kind in _KINDS)}


class _Plain(SafeConstructor):
    """Makes plain values."""


for _text in _TEXTS:
    _Plain.add_constructor(_text, SafeConstructor.construct_yaml_str)


@dataclass(eq=False)
class Refused(Exception):
    """The file or text is no settings file. The line is None where the whole is at fault."""

    text: str
    line: int | None = None


@dataclass
class Document:
    """The plain value of a text, where it and the names in it begin, and the names that stand there
    twice, of which the first counts."""

    value: Any = None
    line: int = 1
    lines: dict[str, int] = field(default_factory=dict)  # by the dotted path of a name
    problems: list[Refused] = field(default_factory=list)
    count: int = 0  # of the values in it


def read_text(file: str) -> str:
    """The file's text. No more than the limit is read, and nothing that could wait or not end."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # to open a pipe or a device can wait or act
            raise Refused("is a folder, pipe or device; name a YAML file")
        with open(file, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise Refused("is larger than 256 KiB; a settings file holds only settings")
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


def parse(text: str) -> Document:
    """The only document in the text; its value is None where it holds nothing."""
    document, yaml = Document(), YAML(typ="safe", pure=True)
    yaml.Constructor = _Plain
    try:
        if (root := yaml.compose(text)) is not None:
            document.line = root.start_mark.line + 1
            document.value = _value(root, yaml.constructor, "", document)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        at = mark.index if mark else getattr(error, "position", 0)
        words = (getattr(error, name, None) for name in ("context", "problem", "reason"))
        why = " ".join(filter(None, words))
        hint = "; indent with spaces" if "'\\t'" in why else ""
        raise Refused(f"is not YAML: {why}{hint}", text.count("\n", 0, at) + 1) from error
    except (ValueError, LookupError, OverflowError, RecursionError) as error:
        # Of !!int x, !!bool x, "\UFFFFFFFF", [[[[...
        raise Refused(f"is not YAML: {error}") from error
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


def _value(node: Any, constructor: Any, path: str, document: Document) -> Any:
    """The plain value of a node; the names in it are told to the document."""
    document.count += 1
    if document.count > MAX_VALUES:  # a few aliases of aliases stand for billions
        raise Refused(f"holds over {MAX_VALUES:,} values", node.start_mark.line + 1)
    if node.tag not in _TAGS:
        raise Refused(f"has a tag, {node.tag}; leave it out", node.start_mark.line + 1)
    if isinstance(node, ScalarNode):
        return constructor.construct_object(node)
    if isinstance(node, SequenceNode):
        items = enumerate(node.value)
        return [_value(item, constructor, f"{path}{i}.", document) for i, item in items]
    found: dict[str, Any] = {}
    for key, held in node.value:
        name, line = _value(key, constructor, path, document), key.start_mark.line + 1
        if not isinstance(name, str):
            raise Refused("has a name that is not text; put it in quotes", line)
        if first := document.lines.get(full := path + name):
            says = f"{full}: is written twice, first on line {first}; keep one"
            document.problems.append(Refused(says, line))
        else:
            document.lines[full] = line
            found[name] = _value(held, constructor, f"{full}.", document)
    return found
