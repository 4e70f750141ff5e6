"""The one door for secrets: what a run prints, keeps or raises goes through it. It hides logins in
URIs and headers, and the values of environment variables whose names say that they are secret.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

SHORTEST = 8  # characters of a secret to look for: a shorter one may be an ordinary word
_NAMED = re.compile(
    r"(PASSWORD|PASSWD|SECRET|TOKEN|API_KEY|ACCESS_KEY|AUTH_STRING|CREDENTIALS?)$", re.IGNORECASE
)
_LOGIN = re.compile(r"\w://[^\s:/@]*:([^\s\"']*)@")
_RULES = (
    (re.compile(r"(\w://[^\s:/@]*):[^\s\"']*@"), r"\1:***@"),
    (re.compile(r"(https?://)[^\s:/@\"']+@"), r"\1***@"),  # a token for a name
    (
        re.compile(r"(?i)([?&][\w.-]*(?:password|passwd|token|secret|signature|sig)=)[^&\s\"']+"),
        r"\1***",
    ),
    (
        re.compile(
            r"(?i)(authorization[\"']?\s*[:=,]\s*[\"']?(?:(?:basic|bearer)\s+)?)[^\s\"',)}]+"
        ),
        r"\1***",
    ),
)


def redacted(text: str) -> str:
    """The text without the secrets in it, each replaced by ***."""
    if len(text) < SHORTEST:
        return text
    for rule, instead in _RULES:
        text = rule.sub(instead, text)
    for secret in _of_the_environment():
        text = text.replace(secret, "***")
    return text


def _of_the_environment() -> list[str]:
    """The longest first: one may be a part of another."""
    named = [value for name, value in os.environ.items() if _NAMED.search(name)]
    logins = [login for value in os.environ.values() for login in _LOGIN.findall(value)]
    return sorted({s for s in named + logins if len(s) >= SHORTEST}, key=len, reverse=True)


def without_secrets(found: Any) -> Any:
    """The same mapping or list with every text in it redacted."""
    if isinstance(found, str):
        return redacted(found)
    if isinstance(found, Mapping):
        return {key: without_secrets(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [without_secrets(value) for value in found]
    return found


def link(uri: str) -> str:
    """The address for a browser, without the login, which the browser asks for."""
    return re.sub(r"(https?://)[^\s/]*@", r"\1", uri)


@contextmanager
def redacted_errors() -> Iterator[None]:
    """What is raised inside says no secret: Prefect keeps the text of a failed task."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        seen: set[int] = set()
        while cause is not None and id(cause) not in seen:
            seen.add(id(cause))
            cause.args = tuple(redacted(a) if isinstance(a, str) else a for a in cause.args)
            cause = cause.__cause__ or cause.__context__
        raise


def redact_output(*, is_log: bool = False) -> None:
    """From here on nothing that this process prints holds a secret.

    is_log: it goes to a file, and a full disk under that is no reason to end.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Redacting):  # None: it is closed
            setattr(sys, name, _Redacting(stream, is_forgiving=is_log))


class _Redacting:
    def __init__(self, stream: TextIO, *, is_forgiving: bool) -> None:
        self._stream, self._is_forgiving = stream, is_forgiving

    def write(self, text: str) -> int:
        try:
            self._stream.write(redacted(text))
        except OSError:
            if not self._is_forgiving:
                raise
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
