"""The memory of a training step as a test keeps it: a file of snapshots beside the tests, in bytes
by owner, phase and layer; whether a step takes more than its snapshot; and the table that tells
what has grown. It refuses a file that it has not written. It imports no PyTorch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headroom.base.units import format_mebibytes

VERSION = 1
NAME = "memory_snapshot.json"
LIBRARIES = "libraries"
MIB = 1024**2
MOST_LAYERS = 8  # of those that have changed, in a table
_PERCENT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*%", re.ASCII)
_DICTS = ("owners", "phases", "layers")


class SnapshotError(ValueError):
    """A file of snapshots cannot be used; the message says which, why and what to do."""


@dataclass(frozen=True)
class StepSnapshot:
    """What a step took, in bytes, on which batch, and the version of PyTorch that it was of."""

    peak_bytes: int
    phase: str  # where the peak lies
    owners: Mapping[str, int]  # bytes there
    phases: Mapping[str, int]  # the most of each
    layers: Mapping[str, int]  # bytes at the peak, by the path of a module
    batch: str
    torch: str

    @property
    def tensor_bytes(self) -> int:
        """What is judged: what libraries keep is some 16 MiB for a step of any size, in which the
        growth of a small one would be lost."""
        return self.peak_bytes - self.owners.get(LIBRARIES, 0)

    def is_alike(self, other: StepSnapshot) -> bool:
        """Return whether the numbers are the same."""
        return {**asdict(self), "torch": ""} == {**asdict(other), "torch": ""}


def parse_percent(text: str) -> float | None:
    """Return the share of a percentage such as 2 %; None where it is none."""
    match = _PERCENT.fullmatch(text.strip())
    return None if match is None else float(match[1]) / 100


def read_snapshots(file: Path) -> dict[str, StepSnapshot]:
    """Return the snapshots of a file by the names of their tests; none where there is no file.
    Raises SnapshotError."""
    try:
        kept = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _refuse(file, f"cannot be read: {error}") from None
    if not isinstance(kept, dict) or not isinstance(kept.get("tests"), dict):
        raise _refuse(file, "is no file of memory snapshots")
    if kept.get("version") != VERSION:
        raise _refuse(file, f"is of version {kept.get('version')!r}, and this Headroom has 1")
    return {name: _read_snapshot(file, name, one) for name, one in kept["tests"].items()}


def _read_snapshot(file: Path, name: str, kept: Any) -> StepSnapshot:
    names = [each.name for each in fields(StepSnapshot)]
    if not isinstance(kept, dict) or sorted(kept) != sorted(names):
        raise _refuse(file, f"{name} has not the fields {', '.join(names)}")
    if not isinstance(kept["peak_bytes"], int) or not all(
        isinstance(kept[field], dict) for field in _DICTS
    ):
        raise _refuse(file, f"{name} has other than numbers of bytes")
    return StepSnapshot(**kept)


def _refuse(file: Path, problem: str) -> SnapshotError:
    return SnapshotError(
        f"{file.name}: {problem}; restore it, or delete it and write it anew: pytest "
        "--memory-update"
    )


def write_snapshots(file: Path, snapshots: Mapping[str, StepSnapshot]) -> None:
    """Write a file of snapshots in place of the one that is there: readers find the one or the
    other. The same snapshots are the same bytes. Raises OSError."""
    tests = {name: asdict(one) for name, one in snapshots.items()}
    text = json.dumps({"version": VERSION, "tests": tests}, indent=1, sort_keys=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        part.write_text(text + "\n")
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def merge_snapshots(
    kept: Mapping[str, StepSnapshot],
    taken: Mapping[str, StepSnapshot],
    collected: Mapping[str, set[str]],
) -> dict[str, StepSnapshot]:
    """Return the snapshots that a file should have: those taken, unless they are alike, and those
    kept of tests that are still there. collected: of a file of tests, all that it has."""
    merged = {
        name: one
        for name, one in kept.items()
        if name in collected.get(name.partition("::")[0], {name})
    }
    for name, one in taken.items():
        if name not in merged or not merged[name].is_alike(one):
            merged[name] = one
    return merged


def describe_growth(before: StepSnapshot, now: StepSnapshot, *, within: float) -> str:
    """Return the sentence that the step takes more than its snapshot by more than this share;
    empty where it does not."""
    if now.tensor_bytes <= before.tensor_bytes * (1 + within):
        return ""
    return f"{_describe_change(before, now)} (allowed: {100 * within:g} %)"


def describe_shrinking(before: StepSnapshot, now: StepSnapshot, *, within: float) -> str:
    """Return the words for a step that takes less than its snapshot by more than this share; empty
    where it does not."""
    if now.tensor_bytes >= before.tensor_bytes * (1 - within):
        return ""
    return _describe_change(before, now)


def _describe_change(before: StepSnapshot, now: StepSnapshot) -> str:
    was, is_now = before.tensor_bytes, now.tensor_bytes
    word = "more" if is_now > was else "less"
    share = f"{100 * abs(is_now - was) / was:.3g} % " if was else ""
    sizes = f"its tensors take {_format(is_now)}, before {_format(was)}"
    return f"a step takes {share}{word} than its snapshot: {sizes}"


def make_table(before: StepSnapshot | None, now: StepSnapshot) -> str:
    """Return what a step takes by owner and phase, beside what it took by its snapshot, where there
    is one; then also the layers that have changed most, and what else is different."""
    then = before or now
    rows = [(f"peak, in {now.phase}", then.peak_bytes, now.peak_bytes)]
    owners = sorted(_pair(then.owners, now.owners), key=lambda row: (-max(row[1:]), row[0]))
    rows += [("by owner, at the peak", -1, -1), *owners]
    rows += [("by phase, the most of each", -1, -1), *_pair(then.phases, now.phases)]
    if before is None:
        return "\n".join(_align([(name, _format(size)) for name, _, size in rows], header=()))
    layers = _list_changed_layers(before, now)
    if layers:
        rows += [("by layer, what has changed", -1, -1), *layers]
    cells = [(n, _format(a), _format(b), _format_change(a, b)) for n, a, b in rows]
    lines = _align(cells, header=("", "before", "now", "change"))
    for name in ("phase", "batch", "torch"):
        if getattr(before, name) != getattr(now, name):
            words = {"phase": "the peak lies in ", "torch": "PyTorch "}.get(name, "")
            lines.append(f"{words}{getattr(now, name)}, before {getattr(before, name)}")
    return "\n".join(lines)


def _pair(was: Mapping[str, int], is_now: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return each name with its bytes before and now."""
    return [(f"  {name}", was.get(name, 0), is_now.get(name, 0)) for name in {**is_now, **was}]


def _list_changed_layers(before: StepSnapshot, now: StepSnapshot) -> list[tuple[str, int, int]]:
    was, is_now = (
        {name or "(the model itself)": size for name, size in one.layers.items()}
        for one in (before, now)
    )
    changed = [row for row in _pair(was, is_now) if row[1] != row[2]]
    changed.sort(key=lambda row: (-abs(row[2] - row[1]), row[0]))
    rows, others = changed[:MOST_LAYERS], changed[MOST_LAYERS:]
    if others:
        sums = sum(row[1] for row in others), sum(row[2] for row in others)
        rows.append((f"  {len(others)} more", *sums))
    return rows


def _align(cells: Iterable[tuple[str, ...]], *, header: tuple[str, ...]) -> list[str]:
    """Return the lines of a table whose numbers stand at the right."""
    table = [header, *cells] if header else [*cells]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            (row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])),
        ).rstrip()
        for row in table
    ]


def _format(size_bytes: int) -> str:
    return "" if size_bytes < 0 else format_mebibytes(size_bytes / MIB)


def _format_change(before: int, now: int) -> str:
    if before == now:
        return "" if now < 0 else "0"
    return ("+" if now > before else "-") + _format(abs(now - before))


def list_shapes(tensors: Iterable[tuple[str, Any]]) -> str:
    """Return the shapes and types of a batch's named tensors in words."""

    def describe() -> Iterator[str]:
        for name, tensor in tensors:
            shape = "x".join(map(str, tensor.shape)) or "a number"
            yield f"{name} {shape} {str(tensor.dtype).removeprefix('torch.')}"

    return ", ".join(describe())
