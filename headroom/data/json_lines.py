"""Reads JSON lines, block by block: an object a line, whose keys are the columns and whose values
are cells, taken as they are written, as those of a CSV are. Columns are the keys of the lines in
the first MiB. It refuses a line that is no object, a key that is there twice in it, and nested
values of the columns that are read, by line and key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa

from headroom.data.source_data import DataError, format_size, shorten

BLOCK_BYTES = 1 << 19  # of text, which takes some 20 times as much while it is parsed
HEAD_BYTES = 1 << 20  # in which columns are looked for
LONGEST_BYTES = 16 << 20  # of a line
MOST_CELLS = 1 << 20  # of a block: lines may lack most of the columns
FEW_COLUMNS, FULL_SHARE = 100, 0.01  # of more columns each line has some, or they are no columns
BOM = b"\xef\xbb\xbf"
SPACE = " \t\r"
# Numbers stay as they are written, NaN and Infinity too; an object becomes a tuple of its pairs.
DECODER = JSONDecoder(object_pairs_hook=tuple, parse_float=str, parse_int=str, parse_constant=str)
CONSTANTS = {True: "true", False: "false"}
# What the decoder takes, but for nested values and text with an escaped character.
VALUE = (
    "(-?(?:0|[1-9][0-9]*+)(?:[.][0-9]++)?+(?:[eE][+-]?[0-9]++)?+"
    r'|"[^"\\\x00-\x1f]*+"|true|false|null|NaN|-?Infinity)'
)
MOST_GROUPS = 1000  # of a pattern


class _Row(NamedTuple):
    line: int  # from 1
    keys: tuple[str, ...]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class JsonLines:
    """A file of objects, of which the first were read."""

    path: Path
    names: tuple[str, ...]
    skips_late: bool
    is_written = True
    note = ""
    rows = None
    column_bytes = 0

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (pa.string(),) * len(self.names)

    @cached_property
    def amount(self) -> int:
        return self.path.stat().st_size

    def count_most_cells(self, columns: int) -> int:
        """Return the most cells that there may be: a line may lack many of its keys."""
        lines = 1
        with open(self.path, "rb") as file:
            while block := file.read(HEAD_BYTES):
                lines += block.count(b"\n")
        return lines * columns

    def read(self, places: Sequence[int]) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield the rows; blank lines are left out. Errors: DataError by line and key."""
        columns = [str(place) for place in places]
        for text, line, end in _read_texts(self.path, BLOCK_BYTES):
            for cells in self._read_plain(text, places) or self._read_rows(text, line, places):
                yield pa.RecordBatch.from_arrays(cells, columns), end

    def _read_plain(self, text: str, places: Sequence[int]) -> list[list[pa.Array]]:
        """The cells of lines that all have the same keys, in the same order, and no text in which a
        character is escaped: as _read_rows gives them, in a third of the time. Empty where a line
        is another."""
        if self._line is None:
            return []
        rows = self._line.findall(text)
        if len(rows) != text.count("\n") + (not text.endswith("\n")):
            return []
        return [[_encode_cells(_unquote([row[place] for row in rows])) for place in places]]

    @cached_property
    def _line(self) -> re.Pattern[str] | None:
        if not 1 < len(self.names) <= MOST_GROUPS:
            return None  # findall gives tuples from 2 groups on, and many take long to compile
        pairs = (
            f"{re.escape(json.dumps(n, ensure_ascii=False))} *+: *+{VALUE}" for n in self.names
        )
        return re.compile(rf"^ *+\{{ *+{' *+, *+'.join(pairs)} *+\}} *+\r?+$", re.MULTILINE)

    def _read_rows(self, text: str, line: int, places: Sequence[int]) -> Iterator[list[pa.Array]]:
        rows, many = _parse_lines(text, self.path.name, line), max(1, MOST_CELLS // len(self.names))
        _refuse_strange_keys(rows, len(self.names), self.path.name)
        for at in range(0, len(rows), many):
            part = rows[at : at + many]
            values = [self._order_values(row) for row in part]
            yield [self._make_cells(part, values, place) for place in places]

    def _order_values(self, row: _Row) -> Sequence[Any]:
        """The values of a row by the columns; None where one is missing."""
        if row.keys == self.names:
            return row.values
        values = dict(zip(row.keys, row.values, strict=True))
        if not self.skips_late and (late := values.keys() - self._all_names):
            key = next(key for key in row.keys if key in late)
            raise DataError(
                f"data.path: {self.path.name} line {row.line} has the key {shorten(key)}, which no "
                f"line in the first {format_size(HEAD_BYTES)} has; write it there too, if only as "
                "null"
            )
        return [values.get(name) for name in self.names]

    @cached_property
    def _all_names(self) -> frozenset[str]:
        return frozenset(self.names)

    def _make_cells(
        self, rows: Sequence[_Row], values: Sequence[Sequence[Any]], place: int
    ) -> pa.Array:
        """The cells of a column as text; null for what is missing."""
        cells = [row[place] for row in values]
        for row, cell in zip(rows, cells, strict=True):
            if isinstance(cell, tuple | list):
                self._refuse_nested(row.line, place, cell)
        try:
            return _encode_cells([CONSTANTS.get(cell, cell) for cell in cells])
        except UnicodeEncodeError:
            row = next(r for r, cell in zip(rows, cells, strict=True) if not _is_text(cell or ""))
            self._refuse_surrogate(row.line, place)

    def _refuse_nested(self, line: int, place: int, value: Any) -> NoReturn:
        what = "an object" if isinstance(value, tuple) else "a list"
        raise DataError(
            f"data.path: {self.path.name} line {line}, key {shorten(self.names[place])}: holds "
            f"{what}; give each of its values a key of its own, or leave the key out"
        )

    def _refuse_surrogate(self, line: int, place: int) -> NoReturn:
        raise DataError(
            f"data.path: {self.path.name} line {line}, key {shorten(self.names[place])}: holds "
            "half a character (a lone surrogate), which is no text; mend it"
        )


def open_json_lines(path: Path, source: str, *, allowed_bytes: int, skips_late: bool) -> JsonLines:
    """Open a file by the keys of its first lines. Errors: DataError."""
    text, line, _ = next(_read_texts(path, HEAD_BYTES), ("", 1, 0))
    rows = _parse_lines(text, path.name, line)
    names = tuple(dict.fromkeys(chain.from_iterable(row.keys for row in rows)))
    if not names:
        raise DataError(
            f"data.path: {path.name} has no values in its first lines; write an object with keys "
            "on each line"
        )
    for name in names:
        if not _is_text(name):
            raise DataError(
                f"data.path: {path.name} has a key that is no text ({shorten(name)}); mend it"
            )
    _refuse_strange_keys(rows, len(names), path.name)
    return JsonLines(path, names, skips_late)


def _is_text(text: str) -> bool:
    """True if UTF-8 can hold it: a file may name halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_strange_keys(rows: Sequence[_Row], columns: int, label: str) -> None:
    """Raises DataError where keys are rather values: the table would be next to empty, and
    enormous."""
    there = sum(len(row.keys) for row in rows)
    if columns > FEW_COLUMNS and there < FULL_SHARE * columns * len(rows):
        raise DataError(
            f"data.path: {label} line {rows[0].line} to {rows[-1].line} have {there:,} values, of "
            f"{columns:,} different keys, each of which is a column; write objects of the same keys"
        )


def _unquote(cells: list[str]) -> list[str | None]:
    """Cells as JSON writes them without their quotes; None for null."""
    text = "".join(cells)
    if '"' not in text and "null" not in text:
        return list(cells)
    return [None if cell == "null" else cell.strip('"') for cell in cells]


def _encode_cells(cells: list[str | None]) -> pa.Array:
    """As pa.array would, which imports pandas. Errors: UnicodeEncodeError."""
    holes, texts = None, [cell for cell in cells if cell is not None]
    if len(texts) < len(cells):
        holes = pa.py_buffer(np.packbits([cell is not None for cell in cells], bitorder="little"))
        texts = [cell or "" for cell in cells]
    text = "".join(texts)
    encoded = text.encode()
    lengths = map(len, texts if len(encoded) == len(text) else (each.encode() for each in texts))
    ends = np.cumsum([0, *lengths], dtype=np.int32)
    buffers = [holes, pa.py_buffer(ends), pa.py_buffer(encoded)]
    return pa.Array.from_buffers(pa.string(), len(cells), buffers)


def _read_texts(path: Path, block_bytes: int) -> Iterator[tuple[str, int, int]]:
    """Yield blocks of whole lines: the text, the number of its first line, and where it ends."""
    line = 1
    with open(path, "rb") as file:
        while block := file.read(block_bytes):
            if not block.endswith(b"\n"):
                rest = file.readline(LONGEST_BYTES)
                block += rest
                if len(rest) == LONGEST_BYTES and not rest.endswith(b"\n"):
                    number = line + block.count(b"\n")
                    raise DataError(
                        f"data.path: {path.name} line {number} is longer than "
                        f"{format_size(LONGEST_BYTES)}; mend it, or write an object a line"
                    )
            text = _decode(block.removeprefix(BOM) if line == 1 else block, path.name, line)
            yield text, line, file.tell()
            line += block.count(b"\n")


def _decode(block: bytes, label: str, first: int) -> str:
    try:
        return block.decode()
    except UnicodeDecodeError as error:
        number = first + block.count(b"\n", 0, error.start)
        near = error.object[max(0, error.start - 8) : error.start + 8]
        raise DataError(
            f"data.path: {label} line {number} is not UTF-8 (at {near!r}); save it as UTF-8 "
            "(iconv -f LATIN1 -t UTF-8)"
        ) from None


def _parse_lines(text: str, label: str, first: int) -> list[_Row]:
    """The rows of the lines that are not blank."""
    lines = enumerate((line.strip(SPACE) for line in text.split("\n")), first)
    return [_parse_line(line, label, number) for number, line in lines if line]


def _parse_line(line: str, label: str, number: int) -> _Row:
    try:
        pairs, end = DECODER.raw_decode(line)
    except JSONDecodeError as error:
        raise DataError(
            f"data.path: {label} line {number} is no JSON ({error.msg} at character "
            f"{error.pos + 1}: {shorten(line[max(0, error.pos - 8) : error.pos + 8])}); write an "
            "object a line"
        ) from None
    except RecursionError:
        raise DataError(
            f"data.path: {label} line {number} is nested too deeply; write an object a line, of "
            "values that are not nested"
        ) from None
    if not isinstance(pairs, tuple):
        raise DataError(
            f"data.path: {label} line {number} is no object ({shorten(line, 40)}); write each row "
            'as an object on a line of its own, such as {"a": 1, "b": "red"}'
        )
    if end != len(line):
        raise DataError(
            f"data.path: {label} line {number} holds more than an object (at character {end + 1}: "
            f"{shorten(line[end : end + 16])}); write an object a line"
        )
    if not pairs:
        return _Row(number, (), ())
    keys, values = zip(*pairs, strict=True)
    if len(set(keys)) < len(keys):
        key = next(key for key in keys if keys.count(key) > 1)
        raise DataError(
            f"data.path: {label} line {number} has the key {shorten(key)} twice; keep one"
        )
    return _Row(number, keys, values)
