"""Hides secrets in whatever a run prints, keeps or raises: logins in URIs, headers and
queries, values that stand behind the name of a secret, tokens of known services by their
look, and the secrets of the environment wherever they stand. Control characters, which
could drive a terminal, are shown as escapes.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from headroom.base.secret_names import HIDDEN, is_secret
from headroom.base.secret_texts import hide_in_text

# But for tabs and the ends of lines; and what turns the direction of the text behind it.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
# What a progress line needs. Others ask the terminal, which answers into the shell, or clear it.
_DRAWN = re.compile(r"\x1b\[(?:[0-9;]*m|[0-9]?[ABCDGK]|\?25[hl])|[\r\b]")


def redact(text: str) -> str:
    """Return the text with each secret replaced by ***, and control characters as escapes."""
    return _CONTROL.sub(_escape, hide_in_text(text))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\u{code:04x}" if code > 0xFF else f"\\x{code:02x}"


def redact_nested(content: Any) -> Any:
    """Return the same mapping or list with every text in it redacted."""
    if isinstance(content, str):
        return redact(content)
    if isinstance(content, Mapping):
        return {key: redact_nested(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [redact_nested(value) for value in content]
    return content


def redact_command_line(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, each redacted; values of secret flags are hidden."""
    shown: list[str] = []
    for i, word in enumerate(words):
        flag = words[i - 1] if i else ""
        is_value = flag.startswith("--") and "=" not in flag and is_secret(flag, word)
        shown.append(HIDDEN if is_value else redact(word))
    return shown


def remove_login(uri: str) -> str:
    """Return the address without its login, for a browser, which asks for the login itself."""
    return re.sub(r"(https?://)[^\s/]*@", r"\1", uri)


@contextmanager
def redact_errors() -> Iterator[None]:
    """Redact the text of whatever is raised inside: Prefect keeps the text of a failed task."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        seen: set[int] = set()
        while cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            _redact_error(cause)
            cause = cause.__cause__ or cause.__context__
        raise


def _redact_error(error: BaseException) -> None:
    error.args = tuple(redact(a) if isinstance(a, str) else a for a in error.args)
    held = ("strerror", "filename", "filename2") if isinstance(error, OSError) else ()
    for name in held:  # what its text is made of
        if isinstance(text := getattr(error, name), str):
            setattr(error, name, redact(text))
    if hasattr(error, "__notes__"):
        error.__notes__ = [redact(note) for note in error.__notes__]


def redact_logs() -> None:
    """Redact every line that this project or Prefect logs from now on, whatever handles it."""
    if getattr(logging.getLogRecordFactory(), "__name__", "") == _make_redacted_record.__name__:
        return
    logging.setLogRecordFactory(_make_redacted_record)


_make_plain_record = logging.getLogRecordFactory()


def _make_redacted_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
    record = _make_plain_record(*args, **kwargs)
    if record.name.startswith(("headroom", "tasks", "flows", "prefect", "mlflow")):
        with suppress(TypeError, ValueError):  # words that do not fit: logging tells that itself
            record.msg, record.args = redact(record.getMessage()), ()
    return record


def redact_output(*, is_log: bool = False) -> None:
    """Redact everything that this process prints or logs from now on.

    is_log: the output goes to a file, and a full disk is no reason to end the process.
    """
    redact_logs()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _RedactingStream):  # None: it is closed
            setattr(sys, name, _RedactingStream(stream, is_forgiving=is_log))


def _redact_for_terminal(text: str) -> str:
    """Return the redacted text for a terminal, with the escapes of a progress line only."""
    drawn = list(_DRAWN.finditer(text))
    if not drawn:
        return redact(text)
    text = hide_in_text(text)
    parts = re.split(f"({_DRAWN.pattern})", text)
    return "".join(p if i % 2 else _CONTROL.sub(_escape, p) for i, p in enumerate(parts))


class _RedactingStream:
    def __init__(self, stream: TextIO, *, is_forgiving: bool) -> None:
        self._stream, self._is_forgiving = stream, is_forgiving

    def write(self, text: str) -> int:
        try:
            self._stream.write(_redact_for_terminal(text))
        except OSError:
            if not self._is_forgiving:
                raise
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
