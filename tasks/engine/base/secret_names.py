"""Which values are secrets, told by the names that they have and by their look: of the environment,
of settings, and of a text. In what is kept of settings three stars stand for one; who reads them
again finds it in the environment. It refuses to guess of ordinary words.
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
    """Whether the value is one: what a PASSWORD or a TOKEN is; a KEY if it looks like random
    letters. A path that is there is none, nor a number or a word of YAML."""
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
    return bool(_SECRET.search(name)) or (bool(_MAY_BE.search(name)) and looks_random(value))


def looks_random(value: str) -> bool:
    """Whether it is long, and not made of words and their numbers, as names and paths are."""
    if len(value) < _RANDOM_LETTERS or any(letter.isspace() for letter in value):
        return False
    return not all(_WORD.fullmatch(part) for part in re.split(r"[^A-Za-z0-9]+", value))


def hidden(values: Mapping[str, Any], setting: str) -> dict[str, Any]:
    """The same values of a setting such as model.args, with stars for the secrets in it."""

    def star(name: str, value: Any) -> Any:
        if not _may_hide(value) or not is_secret(name, str(value)):
            return value
        return HIDDEN if isinstance(value, str) else HIDDEN_NUMBER

    changed: dict[str, Any] = _each(values, setting, star)
    return changed


def variables(values: Mapping[str, Any], setting: str) -> dict[str, str]:
    """The secrets in them, as the environment would have them."""
    found: dict[str, str] = {}

    def keep(name: str, value: Any) -> Any:
        if _may_hide(value) and is_secret(name, str(value)) and not is_hidden(value):
            found[variable(name)] = str(value)
        return value

    _each(values, setting, keep)
    return found


def given_again(values: Mapping[str, Any], setting: str, missing: list[str]) -> dict[str, Any]:
    """The same with the secrets of the environment for the stars. missing: gets the name of each
    that is not there."""

    def give(name: str, value: Any) -> Any:
        if not is_hidden(value):
            return value
        given = os.environ.get(variable(name))
        if given is None:
            missing.append(name)
            return value
        return int(given) if value == HIDDEN_NUMBER else given

    changed: dict[str, Any] = _each(values, setting, give)
    return changed


def is_hidden(value: Any) -> bool:
    """Whether stars stand there for a secret."""
    return value in (HIDDEN, HIDDEN_NUMBER)


def variable(name: str) -> str:
    """The environment's name of a setting's secret."""
    return VARIABLE + re.sub(r"\W", "_", name).upper()


def _may_hide(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


def _each(value: Any, name: str, change: Callable[[str, Any], Any]) -> Any:
    """The value with each plain one in it changed, by its dotted name."""
    if isinstance(value, Mapping):
        return {key: _each(one, f"{name}.{key}", change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_each(one, f"{name}.{i}", change) for i, one in enumerate(value))
    return change(name, value)
