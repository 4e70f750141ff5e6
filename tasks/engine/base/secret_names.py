"""Recognize secrets by their names and by their look: in the environment, in settings, and in a
text. Where settings are stored, three stars stand for a secret, and reading them again takes it
from the environment. Ordinary words are never taken for secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

HIDDEN, HIDDEN_NUMBER = "***", "*** (a number)"
VARIABLE = "HEADROOM_SECRET_"  # and the setting's name: of the environment, where it is again
_SECRET = re.compile(
    r"(password|passwd|passphrase|secret|token|credentials?|auth_string|jaas_config"
    r"|(api|access|secret|private|account|encryption|signing)_?key"
    r"|connection_?string|conn_str|webhook(_ur[il])?|(^|_)(dsn|pwd|pass))$"
)
_MAY_BE = re.compile(r"_(key|auth|pat|sas)$")  # where it looks like one
_NONE = re.compile(
    r"(public_key"
    r"|(pad|padding|bos|eos|sos|unk|unknown|sep|cls|mask|class|special|start|begin|end|stop|image)"
    r"_token)$"
)
_PLAIN = re.compile(r"|[-+]?\d{1,5}(\.\d*)?|none|null|true|false|yes|no|on|off", re.IGNORECASE)
_WORD = re.compile(r"(?=.{0,20}$)((([A-Z]*[a-z]+){1,3}|[A-Z]*)\d{0,8})")
_RANDOM_LETTERS = 12  # at least


def is_secret(name: str, value: str) -> bool:
    """Return whether the value is a secret: what a PASSWORD or a TOKEN is, and a KEY if it
    looks like random letters. A path that exists is none, nor a number or a word of YAML."""
    if value.strip("*") == "" or _PLAIN.fullmatch(value):
        return False
    if os.path.isabs(value) and (name == "PWD" or os.path.exists(value)):
        return False
    if name.startswith(VARIABLE):
        return True
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    name = re.sub(r"[^a-z0-9]+", "_", name.lower())
    name = re.sub(r"(_\d+)+$", "", name)  # the second of several
    if _NONE.search(name):
        return False
    return bool(_SECRET.search(name)) or (bool(_MAY_BE.search(name)) and is_random_text(value))


def is_random_text(value: str) -> bool:
    """Return whether the text is long and not made of words and numbers, as names and paths are."""
    if len(value) < _RANDOM_LETTERS or any(letter.isspace() for letter in value):
        return False
    return not all(_WORD.fullmatch(part) for part in re.split(r"[^A-Za-z0-9]+", value))


def hide_secrets(values: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """Return the values of a setting such as model.args, with stars for the secrets in it."""

    def star(name: str, value: Any) -> Any:
        if not _may_hide(value) or not is_secret(name, str(value)):
            return value
        return HIDDEN if isinstance(value, str) else HIDDEN_NUMBER

    changed: dict[str, Any] = _map_values(values, setting, star)
    return changed


def find_secrets(values: Mapping[str, Any], setting: str) -> dict[str, str]:
    """Return the secrets in these values by the names of their environment variables."""
    found: dict[str, str] = {}

    def keep(name: str, value: Any) -> Any:
        if _may_hide(value) and is_secret(name, str(value)) and not is_hidden(value):
            found[make_variable_name(name)] = str(value)
        return value

    _map_values(values, setting, keep)
    return found


def restore_secrets(values: Mapping[str, Any], setting: str, missing: list[str]) -> dict[str, Any]:
    """Return the values with the secrets of the environment in place of the stars.

    missing: receives the name of each variable that is not set.
    """

    def give(name: str, value: Any) -> Any:
        if not is_hidden(value):
            return value
        given = os.environ.get(make_variable_name(name))
        if given is None:
            missing.append(name)
            return value
        return int(given) if value == HIDDEN_NUMBER else given

    changed: dict[str, Any] = _map_values(values, setting, give)
    return changed


def is_hidden(value: Any) -> bool:
    """Return whether the value is the stars that stand for a secret."""
    return value in (HIDDEN, HIDDEN_NUMBER)


def make_variable_name(name: str) -> str:
    """Return the name of the environment variable for a setting's secret."""
    return VARIABLE + re.sub(r"\W", "_", name).upper()


def _may_hide(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


def _map_values(value: Any, name: str, change: Callable[[str, Any], Any]) -> Any:
    """Return the value with each plain value in it changed, by its dotted name."""
    if isinstance(value, Mapping):
        return {key: _map_values(one, f"{name}.{key}", change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map_values(one, f"{name}.{i}", change) for i, one in enumerate(value))
    return change(name, value)
