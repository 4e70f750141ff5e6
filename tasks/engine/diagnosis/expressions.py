"""The tensors that meet in the expression at which an error was raised, by the names they have in
the source. Names, attributes and constant indices are followed through what objects hold; nothing
is called and no property is read, so that some operands stay unknown.
"""

from __future__ import annotations

import ast
import linecache
import textwrap
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from tasks.engine.diagnosis.tensor_names import held_by


def tensors_at(
    place: traceback.FrameSummary,
    seen: Mapping[str, Any],
    others: Mapping[str, Any],
    *,
    within: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """What meets in the expression that failed, as far as plain names lead to it.

    seen: the variables of the function; others: those of its module. within: also what operands
    are made of, as self.mask in self.mask[:3] == 0.
    """
    failed = _failed(place)
    for part in ast.walk(failed) if within and failed is not None else _parts(failed):
        value = _value(part, seen, others)
        if isinstance(value, Tensor):
            yield ast.unparse(part), value


def _failed(place: traceback.FrameSummary) -> ast.AST | None:
    """The expression that failed: Python remembers where in the source it stands."""
    first, last = place.lineno, place.end_lineno
    if first is None or last is None or place.colno is None or place.end_colno is None:
        return None
    lines = [linecache.getline(place.filename, n) for n in range(first, last + 1)]
    if not all(lines):
        return None
    encoded = [line.encode() for line in lines]  # columns are those of bytes
    encoded[-1] = encoded[-1][: place.end_colno]
    encoded[0] = encoded[0][place.colno :]
    source = textwrap.dedent(b"".join(encoded).decode(errors="replace"))
    for text in (f"({source}\n)", source):  # in brackets, since a line may be broken anywhere
        try:
            return ast.parse(text).body[0]
        except SyntaxError:
            continue
    return None


def _parts(node: ast.AST | None) -> Iterator[ast.AST]:
    """The operands of an expression, each as it is written."""
    match node:
        case ast.Expr(value=inner) | ast.UnaryOp(operand=inner) | ast.Starred(value=inner):
            yield from _parts(inner)
        case ast.BinOp(left=left, right=right):
            yield from _leaves([left, right])
        case ast.AugAssign(target=left, value=right):
            yield from _leaves([left, right])
        case ast.Compare(left=left, comparators=others):
            yield from _leaves([left, *others])
        case ast.Subscript(value=left, slice=right):
            yield from _leaves([left, right])
        case ast.Call(func=function, args=arguments, keywords=keywords):
            receiver = [function.value] if isinstance(function, ast.Attribute) else []
            yield from _leaves([*receiver, *arguments, *(word.value for word in keywords)])


def _leaves(nodes: list[ast.expr]) -> Iterator[ast.AST]:
    for node in nodes:
        if isinstance(node, ast.List | ast.Tuple):
            yield from _leaves(node.elts)
        elif isinstance(node, ast.Starred | ast.UnaryOp):
            yield from _leaves([node.value if isinstance(node, ast.Starred) else node.operand])
        else:
            yield node


def _value(node: ast.AST, seen: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """What a name, attribute or constant index leads to; None where only a call would tell."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return seen.get(name, others.get(name))
        case ast.Attribute(value=inner, attr=name):
            return _attribute(_value(inner, seen, others), name)
        case ast.Subscript(value=inner, slice=index):
            return _item(_value(inner, seen, others), _value(index, seen, others))
    return None


def _attribute(thing: Any, name: str) -> Any:
    """What lies in an object under a name; None where a property or a class would have to tell."""
    if thing is None or isinstance(thing, Tensor):
        return None
    held = held_by(thing)
    for table in ("_parameters", "_buffers", "_modules"):
        if isinstance(thing, nn.Module) and name in held.get(table, {}):
            return held[table][name]
    return held.get(name)


def _item(thing: Any, key: Any) -> Any:
    try:
        if isinstance(thing, dict):
            return dict.get(thing, key)
        if isinstance(thing, list | tuple) and isinstance(key, int):
            return thing[key]
    except (IndexError, TypeError):
        return None
    return None
