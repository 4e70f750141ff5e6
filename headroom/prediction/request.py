"""Checks what a prediction is asked for: which model, which rows, where to, on what.
Everything that the words alone and a look at the two files show is refused here, all of it at
once, before anything slow is imported.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from headroom.data.source_data import (
    DataError,
    detect_file_kind,
    list_parts,
    read_first_bytes,
    shorten,
)
from headroom.settings.file_formats import (
    ARRAYS,
    FORMATS,
    MATRIX,
    TEXT,
    list_endings,
    list_formats,
)
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import TABLE_FILES, DeviceConfig

ARRAY_FILES = list_formats(ARRAYS, MATRIX)
LINES = "txt"  # a text a line, where training reads a text as a whole
INPUTS = {**list_endings(*TABLE_FILES, *ARRAY_FILES), ".txt": LINES}
OUTPUTS = list_endings("csv", "tsv", "parquet", "npy", "jsonl")  # see output_files.py
FOLDERS = [name for name, file_format in FORMATS.items() if file_format.may_be_folder]
RUN = re.compile(
    r"latest|[0-9a-f]{32}|models:/m-[0-9a-f]{32}|models:/[^/:@]+(@[\w.-]+|/[0-9]{1,9})", re.ASCII
)


@dataclass(frozen=True)
class Order:
    """A prediction that can begin; paths are absolute."""

    run: str  # latest, a run's id, or models:/...
    input: str
    reads: str  # a format of tables or arrays, or LINES
    output: str
    writes: str  # csv, tsv, parquet, npy or jsonl
    keep: tuple[str, ...] = ()  # columns of the input that go to the output
    device: str = "auto"
    overwrite: bool = False
    experiment: str | None = None
    limit_mib: float | None = None


def make_order(
    *,
    input: str | None,
    output: str | None,
    run: str = "latest",
    keep: Sequence[str] = (),
    device: str = "auto",
    overwrite: bool = False,
    experiment: str | None = None,
    limit_mib: float | None = None,
) -> Order:
    """Check the files and return the order. Raises ConfigError with every problem."""
    problems = _list_run_problems(run) + _list_device_problems(device)
    reads, input_problems = _check_input(input)
    writes, output_problems = _check_output(output, overwrite=overwrite)
    problems += input_problems + output_problems
    problems += _list_keep_problems(keep, reads, writes)
    if limit_mib is not None and not (math.isfinite(limit_mib) and limit_mib > 0):
        problems.append(f"limit_mib: must be a number above 0 (got {limit_mib}); mend or drop it")
    if input and output and _make_absolute(input) == _make_absolute(output):
        problems.append("output: is the input itself; name another file")
    if problems:
        raise ConfigError(*problems)
    assert input is not None and output is not None
    return Order(
        run=run,
        input=str(_make_absolute(input)),
        reads=reads,
        output=str(_make_absolute(output)),
        writes=writes,
        keep=tuple(keep),
        device=device,
        overwrite=overwrite,
        experiment=experiment,
        limit_mib=limit_mib,
    )


def list_input_files(order: Order) -> list[Path]:
    """Return the parts of a folder in the order of their names, or the file itself."""
    path = Path(order.input)
    return list_parts(path, order.reads) if path.is_dir() else [path]


@contextmanager
def report_as_input(path: Path) -> Iterator[None]:
    """Report what a reader says of data.path, and the system's own errors, as errors of the
    input."""
    try:
        yield
    except DataError as error:
        raise DataError(str(error).replace("data.path: ", "input: ")) from None
    except OSError as error:
        raise DataError(
            f"input: {path.name} cannot be read ({error.strerror or error}); mend that or name "
            "another file"
        ) from None


def _make_absolute(path: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _list_run_problems(run: str) -> list[str]:
    if RUN.fullmatch(run):
        return []
    return [
        "run: must be latest, a run's id of 32 hex digits, models:/NAME@ALIAS, "
        f"models:/NAME/VERSION or models:/MODEL_ID (got {shorten(run)})"
    ]


def _list_device_problems(device: str) -> list[str]:
    try:
        DeviceConfig(name=device)
    except ValidationError as error:
        said = error.errors(include_url=False)[0]
        return [f"device: {said.get('ctx', {}).get('error', said['msg'])} (got {shorten(device)})"]
    return []


def _list_keep_problems(keep: Sequence[str], reads: str, writes: str) -> list[str]:
    if not keep:
        return []
    problems = []
    twice = sorted({name for name in keep if list(keep).count(name) > 1})
    if twice:
        problems.append(f"keep: {shorten(twice[0])} is named twice; name it once")
    if "" in keep:
        problems.append("keep: a column's name is empty; write keep as NAME,NAME")
    if reads and reads not in TABLE_FILES:
        problems.append(f"keep: {reads} has no columns with names; drop keep, or give a table")
    if writes == "npy":
        problems.append("keep: npy holds the predictions alone; drop keep, or write a table")
    return problems


def _check_input(text: str | None) -> tuple[str, list[str]]:
    """The kind of the input by its ending, empty where unknown, and what is wrong with it."""
    if not text:
        return "", ["input: is needed; name the file of rows to predict"]
    if "\0" in text:
        return "", ["input: must not hold a NUL character; mend the name"]
    path = _make_absolute(text)
    shown = shorten(str(path), 300)
    kind = INPUTS.get(path.suffix.lower(), "")
    if os.path.isdir(path):  # unlike pathlib's, False for any error
        return _check_folder(path, shown)
    try:
        with report_as_input(path):
            head = read_first_bytes(path, kind)
            if not kind:
                return "", [_describe_unknown_ending("input", shown, INPUTS)]
            inside = detect_file_kind(head, shown)
    except DataError as error:
        return kind, [str(error)]
    is_text = kind == LINES or FORMATS[kind].is_text
    if inside != (TEXT if is_text else kind):
        return kind, [f"input: {shown} ends in that of {kind}, but is {inside} inside; rename it"]
    return kind, []


def _check_folder(path: Path, shown: str) -> tuple[str, list[str]]:
    """The format of the parts in a folder, and what is wrong with it."""
    try:
        for kind in FOLDERS:
            if list_parts(path, kind):
                return kind, []
    except OSError as error:
        said = f"input: {shown} cannot be read ({error.strerror}); mend that or name another"
        return FOLDERS[0], [said]
    wanted = " or ".join(f"*{FORMATS[kind].endings[0]}" for kind in FOLDERS)
    said = f"input: the folder {shown} holds no {wanted} files; name a file, or such a folder"
    return FOLDERS[0], [said]


def _check_output(text: str | None, *, overwrite: bool) -> tuple[str, list[str]]:
    if not text:
        return "", ["output: is needed; name the file to write predictions to"]
    if "\0" in text:
        return "", ["output: must not hold a NUL character; mend the name"]
    path = _make_absolute(text)
    shown = shorten(str(path), 300)
    kind = OUTPUTS.get(path.suffix.lower(), "")
    problems = [] if kind else [_describe_unknown_ending("output", shown, OUTPUTS)]
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:  # a name that is too long, a folder that must not be looked into
        return kind, [*problems, f"output: {shown}: {error.strerror}; name another file"]
    if path.is_dir():
        return kind, [*problems, f"output: {shown} is a folder; name a file in it"]
    if os.path.lexists(path):
        if not overwrite:
            return kind, [*problems, f"output: {shown} exists; name another file, or overwrite it"]
        if not path.is_file():
            return kind, [*problems, f"output: {shown} is not a regular file; name another"]
    folder = path.parent
    if not folder.is_dir():
        where = shorten(str(folder), 300)
        problems.append(f"output: there is no folder {where}; make it, or name a file elsewhere")
    elif not os.access(folder, os.W_OK | os.X_OK):
        where = shorten(str(folder), 300)
        problems.append(f"output: the folder {where} cannot be written; name a file elsewhere")
    return kind, problems


def _describe_unknown_ending(setting: str, shown: str, endings: Mapping[str, str]) -> str:
    return (
        f"{setting}: the ending of {shown} does not tell what it is; name a file that ends in one "
        f"of {', '.join(endings)}"
    )
