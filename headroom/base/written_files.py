"""Files that a person asked for: each is there whole or not at all, and one that cannot be written
is named in one sentence, with what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EDQUOT, ENOSPC
from pathlib import Path


@contextmanager
def write_whole(file: Path) -> Iterator[Path]:
    """Yield where to write the file, which has its name when the block is left; make its folder.

    Raises OSError in words of its own where it can't be written: a full disk does not say of
    which file. What was there by that name stays then.
    """
    half = file.with_name(f".{file.stem}.part{file.suffix}")  # who draws goes by the suffix
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        yield half
        half.replace(file)
    except OSError as error:
        remedy = "make room there" if error.errno in (ENOSPC, EDQUOT) else "see to it"
        why = error.strerror or error
        raise OSError(f"{file} can't be written ({why}); {remedy}") from error
    finally:
        with suppress(OSError):
            half.unlink()
