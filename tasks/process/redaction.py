"""Hides secrets in whatever a run prints, keeps or raises: logins in URIs, headers and
queries, values that stand behind the name of a secret, tokens of known services by their
look, and the secrets of the environment wherever they stand. Control characters, which
could drive a terminal, are shown as escapes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, TextIO
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from tasks.engine.base.secret_names import HIDDEN, is_random_text, is_secret

MIN_SECRET_LETTERS = 8  # characters of a secret to look for: a shorter one may be an ordinary word
MIN_LINE_LETTERS = 20  # and of a line of a secret with several, such as a private key
_NO_PORT = r"(?!\d+(?:[/?#\s\"',;)]|$))"
_LOGIN = re.compile(rf"\w://[^\s:/@\[]*:{_NO_PORT}([^\s\"']*)@")
_LONE_LOGIN = re.compile(rf"\w://[^\s:/@\[]*:{_NO_PORT}(.*)@", re.DOTALL)  # of a text with one URI
# NAME=value and "name": "value"; --name value.
_PAIR = re.compile(
    r"""((?:(?<=--)|(?<![\w.-]))(?=[A-Za-z_])([\w.-]{3,})(?:["']?\s?=\s?|["']\s*:\s*))"""
    r"""(?:(["'])(.*?)\3|([^\s,;&)}\]"']+))"""
)
_FLAG = re.compile(r"""(--([\w.-]{3,})\s)()()([^\s"'-][^\s"']*)""")
_RULES = (
    (re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END|$)", re.DOTALL), r"\1***\2"),
    (re.compile(rf"(\w://[^\s:/@\[]*):{_NO_PORT}[^\s\"']*@"), r"\1:***@"),
    # With a space or a quote in it, which should have been written %20 or %22.
    (
        re.compile(
            rf"(\w://[^\s:/@\[\"']*):{_NO_PORT}(?!\*\*\*@)[^\s@/][^@\n]{{0,80}}@(?=[\w.\[])"
        ),
        r"\1:***@",
    ),
    (re.compile(r"(https?://)[^\s:/@\"']+@"), r"\1***@"),  # a token for a name
    (
        re.compile(
            r"(?i)([?&](?:[\w.-]*(?:passw(?:or)?d|token|secret|signature|credential)|sig|auth)=)"
            r"[^&\s\"']+"
        ),
        r"\1***",
    ),
    (
        re.compile(
            r"(?i)((?:[\w-]*authorization|x-[\w-]*(?:key|token|auth|secret)|[\w-]*api-?key|private-token"
            r"|[\w-]+-(?:api|access|subscription|auth)-(?:key|token)|(?:set-)?cookie)[\"']?\s*[:=,]\s*"
            r"[\"']?(?:(?:basic|bearer|token|apikey|digest|negotiate)\s+)?)[^\s\"',)}]+"
        ),
        r"\1***",
    ),
    (
        re.compile(
            r"(hooks\.slack\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/"
            r"|\.webhook\.office\.com/|api\.telegram\.org/bot|chat\.googleapis\.com/v1/spaces/)"
            r"[^\s\"'<>]+"
        ),
        r"\1***",
    ),
)
# GitHub, GitLab, Slack, Stripe, OpenAI and its like, Hugging Face, Google, npm, PyPI, Docker,
# Vault, Databricks, SendGrid, DigitalOcean, Linear, Notion, Atlassian, Shopify; JSON web tokens.
_TOKENS = re.compile(
    r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|xapp-|sk-|[rs]k_(?:live|test)_|hf_|AIza|ya29\."
    r"|GOCSPX-|npm_|pypi-|dckr_pat_|hv[sb]\.|dapi|SG\.|do[opr]_v1_|lin_api_|secret_|ntn_|ATATT|shp[ap]+_"
    r"|whsec_|nvapi-|pk_live_|tskey-|eyJ[\w-]{8,}\.eyJ)[\w.~+/-]{12,}=*"
)
# But for tabs and the ends of lines.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)")
_DRAWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\b]")  # what a progress line needs


def redact(text: str) -> str:
    """Return the text with each secret replaced by ***, and control characters as escapes."""
    return _CONTROL.sub(_escape, _hide_secrets(text))


def _escape(found: re.Match[str]) -> str:
    return f"\\x{ord(found[0]):02x}"


def _hide_secrets(text: str) -> str:
    for rule, instead in _RULES:
        text = rule.sub(instead, text)
    for pair in (_PAIR, _FLAG):
        text = pair.sub(_hide_named_secret, text)
    text = _TOKENS.sub(lambda found: HIDDEN if is_random_text(found[0]) else found[0], text)
    secrets = _compile_secrets(tuple(os.environ.items()))
    return secrets.sub(HIDDEN, text) if secrets is not None else text


def _hide_named_secret(pair: re.Match[str]) -> str:
    head, name, mark, quoted, bare = pair.groups(default="")
    return f"{head}{mark}{HIDDEN}{mark}" if is_secret(name, quoted or bare) else pair[0]


@lru_cache(1)
def _compile_secrets(environment: tuple[tuple[str, str], ...]) -> re.Pattern[str] | None:
    """Return a pattern of all secrets in the environment, in each way to write them.

    None where there are none. The longest come first: one may be a part of another.
    """
    found: set[str] = set()
    for name, given in environment:
        value = given.strip()
        if is_secret(name, value):
            found |= {
                value,
                *(line for line in value.split("\n") if len(line.strip()) >= MIN_LINE_LETTERS),
            }
        found.update((_LONE_LOGIN if value.count("://") == 1 else _LOGIN).findall(value))
        found.update(_LOGIN.findall(value))
        inside = (pair.groups(default="") for pair in _PAIR.finditer(value))
        found |= {q or b for _, inner, _, q, b in inside if is_secret(inner, q or b)}
    found |= {decode(one) for one in found for decode in (unquote, unquote_plus)}
    found |= {
        written
        for one in found
        for written in (
            quote(one, safe=""),
            quote_plus(one),
            repr(one)[1:-1],
            json.dumps(one)[1:-1],
        )
    }
    known = sorted(
        {s for one in found if len(s := one.strip()) >= MIN_SECRET_LETTERS}, key=len, reverse=True
    )
    return re.compile("|".join(map(re.escape, known))) if known else None


def redact_nested(found: Any) -> Any:
    """Return the same mapping or list with every text in it redacted."""
    if isinstance(found, str):
        return redact(found)
    if isinstance(found, Mapping):
        return {key: redact_nested(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [redact_nested(value) for value in found]
    return found


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
        if isinstance(told := getattr(error, name), str):
            setattr(error, name, redact(told))
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
    if record.name.startswith(("tasks", "flows", "prefect")):
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
    text = _hide_secrets(text)
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
