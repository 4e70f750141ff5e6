"""Make of the layers of a model, which are some hundred, the few that a person should read: blocks
that are alike become one line, such as "encoder.layers.*.attn", and the largest are taken apart
into what they are made of.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_LINES = 8  # the rest of the model included
SMALL = 0.1  # of the whole: what is not taken apart, and what the rest of the model may be
PARAMETERS = "parameters"
OUTSIDE = "outside the layers"
# The columns of a table, and the owners in each; all others are in the last one.
COLUMNS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer_state",),
    "activations": ("activations",),
    "other": (),
}


@dataclass(frozen=True)
class LayerGroup:
    """Some layers in one line, with all that is in them."""

    name: str
    count: int  # of the layers that are alike
    owners: Mapping[str, int]  # bytes

    @property
    def bytes(self) -> int:
        return sum(self.owners.values())

    @property
    def label(self) -> str:
        """Return the name, and how many there are."""
        return f"{self.name} ({self.count})" if self.count > 1 else self.name

    def split(self) -> dict[str, int]:
        """Return the bytes of each column of COLUMNS."""
        named = {
            column: sum(self.owners.get(owner, 0) for owner in owners)
            for column, owners in COLUMNS.items()
        }
        return {**named, "other": self.bytes - sum(named.values())}


@dataclass
class _Node:
    """A module and those in it."""

    name: str = ""
    count: int = 1
    own: Counter[str] = field(default_factory=Counter)  # bytes by owner, in no module within
    parts: dict[str, _Node] = field(default_factory=dict)

    def sum_owners(self) -> Counter[str]:
        return sum((part.sum_owners() for part in self.parts.values()), Counter(self.own))

    def list_parameters(self, at: str = "") -> list[tuple[str, int]]:
        """Return the bytes of the parameters by the path from here: by these blocks are alike."""
        own = [(at, self.own[PARAMETERS])] if self.own[PARAMETERS] else []
        return own + [
            one for name, part in self.parts.items() for one in part.list_parameters(f"{at}.{name}")
        ]


def group_layers(told: Mapping[str, Any], *, most: int = MOST_LINES) -> list[LayerGroup]:
    """Return the groups that are the most of a model, the largest first, then what is left of it
    and what is in no layer; together they are all there is. told: as describe_layers returns it;
    of nothing there are none."""
    if not told:
        return []
    rows = _split_largest(_make_tree(told["layers"]), most)
    groups = sorted((_make_group(*row) for row in rows), key=lambda group: -group.bytes)
    groups = [group for group in groups if group.bytes]
    if len(groups) > most:
        kept, rest = groups[: most - 1], groups[most - 1 :]
        held = sum((Counter(group.owners) for group in rest), Counter[str]())
        groups = [*kept, LayerGroup(f"{len(rest)} others", 1, held)]
    outside = {owner: size for owner, size in told["outside"].items() if size > 0}
    return [*groups, *([LayerGroup(OUTSIDE, 1, outside)] if outside else [])]


_Row = tuple[_Node, bool]  # the second: with what is in it


def _split_largest(root: _Node, most: int) -> list[_Row]:
    """Return the tree in rows, of which the large ones are taken apart as long as that leaves few
    of them."""
    whole = sum(root.sum_owners().values())
    rows: list[_Row] = [(root, True)]
    settled: set[int] = set()
    while True:
        open_rows = [node for node, has_parts in rows if has_parts and node.parts]
        open_rows = [node for node in open_rows if id(node) not in settled]
        largest = max(open_rows, key=_count_bytes, default=None)
        if largest is None or _count_bytes(largest) < SMALL * whole:
            return rows
        settled.add(id(largest))
        if 2 * sum(largest.own.values()) >= _count_bytes(largest):
            continue  # most is its own
        parts: list[_Row] = [(part, True) for part in _fold_alike(largest)]
        tried = [row for row in rows if row[0] is not largest] + [(largest, False), *parts]
        tried = [row for row in tried if _count_row(row)]
        tried.sort(key=_count_row, reverse=True)
        left = sum(map(_count_row, tried[most - 1 :])) if len(tried) > most else 0
        if left <= SMALL * whole or 2 * _count_bytes(largest) > whole:
            rows = tried


def _count_bytes(node: _Node) -> int:
    return sum(node.sum_owners().values())


def _count_row(row: _Row) -> int:
    node, has_parts = row
    return _count_bytes(node) if has_parts else sum(node.own.values())


def _make_group(node: _Node, has_parts: bool) -> LayerGroup:
    name = node.name or "the model"
    is_alone = not has_parts and node.parts
    owners = node.sum_owners() if has_parts else node.own
    return LayerGroup(f"{name} itself" if is_alone else name, node.count, owners)


def _make_tree(layers: Mapping[str, Mapping[str, int]]) -> _Node:
    root = _Node()
    for path, owners in layers.items():
        node = root
        for name in filter(None, path.split(".")):
            inner = f"{node.name}.{name}".lstrip(".")
            node = node.parts.setdefault(name, _Node(inner))
        node.own.update(owners)
    return root


def _fold_alike(node: _Node) -> list[_Node]:
    """Return what is in a module; of those that are numbered and alike, one for all of them."""
    alike: dict[Any, list[str]] = defaultdict(list)
    for name, part in node.parts.items():
        key = tuple(sorted(part.list_parameters())) if name.isdigit() else ()
        alike[key or name].append(name)
    numbered = sum(name.isdigit() for name in node.parts)
    folded = []
    for names in alike.values():
        numbers = sorted(map(int, names)) if len(names) > 1 else []
        if not numbers:
            shared = names[0]
        elif len(numbers) == numbered:
            shared = "*"
        else:
            shared = _join_numbers(numbers)
        name = f"{node.name}.{shared}".lstrip(".")
        folded.append(_merge([node.parts[n] for n in names], name, node.count * len(names)))
    return folded


def _join_numbers(numbers: list[int]) -> str:
    """Return them in short: "1-3", or "0,2,5" where they do not follow one another."""
    is_run = numbers == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if is_run else ",".join(map(str, numbers))


def _merge(nodes: Iterable[_Node], name: str, count: int) -> _Node:
    """Return one node for all of these."""
    merged = _Node(name, count)
    inner: dict[str, list[_Node]] = defaultdict(list)
    for node in nodes:
        merged.own.update(node.own)
        for key, part in node.parts.items():
            inner[key].append(part)
    for key, parts in inner.items():
        merged.parts[key] = _merge(parts, f"{name}.{key}", count)
    return merged
