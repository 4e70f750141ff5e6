"""Recognize secrets by their names and by their look: in the environment, in settings, and in a
text. Where settings are stored, three stars stand for a secret, and reading them again takes it
from the environment. Ordinary words are never taken for secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

HIDDEN, HIDDEN_NUMBER = "***", "*** (a number)"
VARIABLE = "HEADROOM_SECRET_"  # and the setting's name: of the environment, where it is again
# Whose value is a secret, whatever it looks like. Names are in lower case here, their words tied by
# "_", and without the number that the second of several has.
SECRET_NAMES = {
    "a password": r"(password|passwd|passphrase|passcode)s?",
    "a short word for one": r"(?<!old)pwd|pw|pswd|pass",
    "a secret": r"secrets?",
    "a token": r"token|(access|api|auth|bearer|bot|hub|refresh)_tokens",
    "a key": r"(api|access|secret|private|account|encryption|signing|master|auth)_?keys?",
    "what has a login in it": r"connection_?string|conn_str|(^|_)dsn|jaas_config|auth_string",
    "credentials": r"credentials?",
    "a header": r"(^|_)(authorization|bearer|jwt|(set_)?cookies?)|session_?cookies?",
    "a session": r"(^|_)(j?session|phpsess)id",
    "an address that lets in": r"webhook(_ur[il])?|run_notify",
    "which of several": r"(password|passwd|passphrase|secret|token|(api|access|secret|private)_?key"
    r"|credentials?)_(value|string|base|base64|b64|hex|raw|plain|current|previous|primary|secondary|prod)",
    "what for": r"(password|passwd|passphrase|secret|token|api_?key|credentials?)"
    r"_(for|of|from)_\w+",
    "the second of a pair": r"(^|_)(basic_|http_|proxy_)?auth_1",
}
# Of these, whose value is none: what a model of language and a signal have.
PLAIN_NAMES = {
    "a public key": r"public_key",
    "a token of a vocabulary": r"(^|_)(pad|padding|bos|eos|eot|sos|unk|unknown|sep|cls|mask|class"
    r"|special|start|begin|end|stop|image|video|audio|blank|fim|oov|num|n|max|min|total|per|next|first|prev|separator"
    r"|delimiter|sentinel|prefix|suffix|newline)_token",
    "a word that ends so": r"(com|by|sur|tres|over|under|encom|im)pass",
    "one of several rounds, or a filter": r"(for|back|forward|backward|low|high|band|all|first"
    r"|second|last|final|single|one|two|multi|num|n|per|each)_?pass",
}
# Who holds nothing but secrets, and what beside them stands there.
_HOLDER = r"(?i:(?:\w*_)?(passwords?|secrets?|credentials?))"
_BESIDE = (
    r"(?i:(\w+_)?(user|user_?name|login|name|host|host_?name|port|region|ur[il]|type|kind|id|email"
    r"|account|project|database|db|db_?name|bucket|path|file|mode|version|scheme|expires?(_\w+)?))"
)
_MAY_BE = re.compile(r"_(key|auth|pat|sas)$")  # where it looks like one
_PLAIN = re.compile(
    r"|[-+]?\d{1,5}(\.\d*)?|none|null|true|false|yes|no|on|off|auto|default|enabled|disabled"
    r"|required|optional",
    re.IGNORECASE,
)
_WORD = re.compile(r"(?=.{0,20}$)((([A-Z]*[a-z]+){1,3}|[A-Z]*)\d{0,8})")
_RANDOM_LETTERS = 12  # at least
_STARS = re.compile(r"(?<!\*)\*{3}(?!\*)")


def is_secret(name: str, value: str) -> bool:
    """Return whether the value is a secret: what a PASSWORD or a TOKEN is, and a KEY if it
    looks like random letters. A path that exists is none, nor a number or a word of YAML."""
    if value.strip("*") == "" or _PLAIN.fullmatch(value):
        return False
    if os.path.isabs(value) and (name == "PWD" or os.path.exists(value)):
        return False
    if name.startswith(VARIABLE):
        return True
    *above, last = name.split(".")
    is_held = any(re.fullmatch(_HOLDER, part) for part in above) and not last.isdigit()
    if is_held and not re.fullmatch(_BESIDE, last):
        return True
    kind = _classify_name(name)
    return kind == "secret" or (kind == "perhaps" and is_random_text(value))


@lru_cache(1024)
def _classify_name(name: str) -> str:
    """Return `secret`, `perhaps` where the look of its value tells, or nothing."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    name = re.sub(r"[^a-z0-9]+", "_", name.lower()).rstrip("_")
    plain, secret = _compile_names()
    one = re.sub(r"(_\d+)+$", "", name)  # the second of several
    if plain.search(one):
        return ""
    if secret.search(name) or secret.search(one):
        return "secret"
    return "perhaps" if _MAY_BE.search(one) else ""


@lru_cache(1)
def _compile_names() -> tuple[re.Pattern[str], re.Pattern[str]]:
    plain, secret = (f"({'|'.join(t.values())})$" for t in (PLAIN_NAMES, SECRET_NAMES))
    return re.compile(plain), re.compile(secret)


def is_random_text(value: str) -> bool:
    """Return whether the text is long and not made of words and numbers, as names and paths are."""
    if len(value) < _RANDOM_LETTERS or any(letter.isspace() for letter in value):
        return False
    return not all(_WORD.fullmatch(part) for part in re.split(r"[^A-Za-z0-9]+", value))


def restore_secrets(value: Any, setting: str, missing: list[str]) -> Any:
    """Return the value of a setting with the secrets of the environment in place of the stars.

    missing: receives the name of each variable that is not set.
    """

    def give(name: str, value: Any) -> Any:
        if not is_hidden(value) and not is_hidden(name):
            return value
        secret = None if is_hidden(name) else os.environ.get(make_variable_name(name))
        if secret is None:
            missing.append(name)
            return value
        return int(secret) if value == HIDDEN_NUMBER else secret

    return map_values(value, setting, give)


def is_hidden(value: Any) -> bool:
    """Return whether stars stand in the value for a secret, or for a part of it that is one."""
    return isinstance(value, str) and _STARS.search(value) is not None


def make_variable_name(name: str) -> str:
    """Return the name of the environment variable for a setting's secret."""
    return VARIABLE + re.sub(r"\W", "_", name).upper()


def map_values(value: Any, name: str, change: Callable[[str, Any], Any]) -> Any:
    """Return the value with each plain value in it changed, by its dotted name."""
    if isinstance(value, Mapping):
        return {key: map_values(one, f"{name}.{key}", change) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map_values(one, f"{name}.{i}", change) for i, one in enumerate(value))
    return change(name, value)
