"""Reads token sequences and cuts them into rows. Tokens are the bytes of a text, or a file of
numbers that a tokenizer wrote, mapped and read in blocks so that it may be larger than memory.
Each row holds `context` tokens and the one after them, so that it is input and target at once;
the end of the text is kept apart for validation, and no token is in both parts. A value that
is no token is refused by its place, counted from 1.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from headroom.data.arrays import ArrayHeader, map_array, read_header
from headroom.data.source_data import DataError, find_source_file, refuse_target
from headroom.settings.run_config import DataConfig

BYTES = 256
MOST_TOKENS = 2**16  # they are kept as uint16
BLOCK_TOKENS = 1 << 20
NPY_MAGIC = b"\x93NUMPY"
LLM_C_MAGIC = (20240520, 20240801)  # the first number of llm.c's files, before 1,020 more bytes


@dataclass(frozen=True)
class Tokens:
    """A token sequence. values: (n,) whole numbers from 0 to below `vocabulary`, possibly
    mapped."""

    values: np.ndarray
    vocabulary: int
    label: str


def check_text_file(data: DataConfig) -> None:
    """Raise DataError where there is no text, or too short a one."""
    refuse_target(data)
    path = None if data.path is None else find_source_file(data)
    size = len(build_default_text()) if path is None else path.stat().st_size
    label = "Python's own text" if path is None else path.name
    _check_length(size, data.tokens.context, label=label)


def read_text_file(data: DataConfig) -> Tokens:
    """Map the bytes of the file at data.path, or return those of `build_default_text`."""
    if data.path is None:
        return Tokens(np.frombuffer(build_default_text(), np.uint8), BYTES, "Python's own text")
    path = find_source_file(data)
    return Tokens(_map_bytes(path, np.dtype(np.uint8)), BYTES, path.name)


@cache
def build_default_text() -> bytes:
    """Return the licence of this Python and the topics of its help(), in a fixed order, as UTF-8.

    Raises DataError where Python was installed without both.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    licences = (place / name for place in (folder, folder.parent) for name in _LICENCES)
    texts = [p.read_text(encoding="utf-8", errors="replace") for p in licences if p.is_file()][:1]
    try:
        from pydoc_data import topics  # only this source needs it, and some systems leave it out
    except ImportError:
        pass
    else:
        texts += [text for _, text in sorted(topics.topics.items())]
    if not texts:
        raise DataError(
            f"data.path: is needed for source text, since the Python in {folder} comes without "
            "its licence and pydoc_data; name a file"
        )
    return "\n\n".join(texts).encode()


_LICENCES = ("LICENSE.txt", "LICENSE")


def check_token_file(data: DataConfig) -> None:
    """Raises DataError for a file that is not a row of whole numbers, or is too short."""
    refuse_target(data)
    _open_tokens(data)


def read_token_file(data: DataConfig) -> Tokens:
    """Map the numbers of an npy or bin file. Every one is looked at: DataError names the first
    that is negative or beyond the vocabulary."""
    values, label = _open_tokens(data)
    return Tokens(values, _find_vocabulary(values, data.tokens.vocab, label=label), label)


def _open_tokens(data: DataConfig) -> tuple[np.ndarray, str]:
    path = find_source_file(data)
    ending = path.suffix.lower()
    if ending not in (".npy", ".bin"):
        raise DataError(
            f"data.path: {path.name} must end in .npy (an array of whole numbers) or .bin (16-bit "
            "ones, little-endian); rename it, or for plain text set data.source to text"
        )
    values = _map_npy(path) if ending == ".npy" else _map_bin(path)
    _check_length(len(values), data.tokens.context, label=path.name)
    return values, path.name


def _map_npy(path: Path) -> np.ndarray:
    header = read_header(path)
    if header.dtype.kind not in "iu":
        raise DataError(
            f"data.path: {path.name} must hold whole numbers (got {header.dtype}); save it with "
            ".astype('uint16')"
        )
    if len(header.shape) != 1:
        raise DataError(
            f"data.path: {path.name} must hold one row of tokens, shape (n,) (got {header.shape}); "
            "save it with .reshape(-1)"
        )
    return map_array(path, header)


def _map_bin(path: Path) -> np.ndarray:
    size_bytes = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(len(NPY_MAGIC))
    if head == NPY_MAGIC:
        raise DataError(f"data.path: {path.name} is an NPY file; rename it to end in .npy")
    if int.from_bytes(head[:4], "little") in LLM_C_MAGIC:
        raise DataError(
            f"data.path: {path.name} begins with a header of llm.c, which would be read as tokens; "
            "save the tokens alone, as an npy file"
        )
    if size_bytes % 2:
        raise DataError(
            f"data.path: {path.name} must hold 16-bit numbers, an even count of bytes (got "
            f"{size_bytes:,}); copy or write it anew, or save it as an npy file"
        )
    return _map_bytes(path, np.dtype("<u2"))


def _map_bytes(path: Path, dtype: np.dtype) -> np.ndarray:
    count = path.stat().st_size // dtype.itemsize
    return map_array(path, ArrayHeader(dtype, (count,), fortran=False, start=0))


def _check_length(tokens: int, context: int, *, label: str) -> None:
    needed = 2 * (context + 1)
    if tokens < needed:
        raise DataError(
            f"data.args.context: {label} has {tokens:,} tokens, and a row of {context:,} for "
            f"training and one for validation, each with the token after it, need {needed:,}; "
            "lower data.args.context, or use a longer text"
        )


def _find_vocabulary(values: np.ndarray, requested: int | None, *, label: str) -> int:
    largest = 0
    for start in range(0, len(values), BLOCK_TOKENS):
        block = values[start : start + BLOCK_TOKENS]
        bad = (block < 0) | (block >= (requested or MOST_TOKENS))
        if bad.any():
            at = int(bad.argmax())
            raise DataError(
                _describe_bad_token(int(block[at]), start + at + 1, requested, label=label)
            )
        largest = max(largest, int(block.max()))
    if requested is None and largest == 0:
        raise DataError(
            f"data.path: {label} holds token 0 alone, from which there is nothing to learn; use "
            "another text"
        )
    return requested or largest + 1


def _describe_bad_token(value: int, place: int, requested: int | None, *, label: str) -> str:
    if value < 0:
        return (
            f"data.path: {label} token {place:,}: must be at least 0 (got {value}); tokens are "
            "counted from 0, so mend or drop it"
        )
    if requested is None:
        return (
            f"data.path: {label} token {place:,}: must be below {MOST_TOKENS:,} (got {value:,}); "
            "use a tokenizer with a smaller vocabulary"
        )
    return (
        f"data.args.vocab: {label} token {place:,}: must be below {requested:,} (got {value:,}); "
        "raise data.args.vocab, or drop it"
    )
