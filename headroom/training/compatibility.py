"""Says whether a training may go on from a checkpoint: what has to be the same as when it was
written, and what may differ. It refuses by name, all that differs at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import pbkdf2_hmac, sha256
from pathlib import Path
from typing import Any

import torch

from headroom.base.import_paths import OWN, PACKAGES, is_import_path, is_installed
from headroom.base.secret_names import make_variable_name
from headroom.base.secret_texts import hide_secrets
from headroom.settings.read_settings import (
    ConfigError,
    find_config_secrets,
    hide_config_secrets,
)
from headroom.settings.run_config import RunConfig
from headroom.training.plan import Plan

# Where it runs and how it is watched, how long, and where its rows come from while they stay the
# same. Another device draws other random numbers and rounds otherwise: said, and allowed.
MAY_DIFFER = (
    *("device.name", "data.path", "data.cache", "data.memory_mib"),
    *("train.epochs", "train.max_steps", "train.end", "train.patience"),
    *("train.log_every", "train.compile", "train.parallel"),
    *("train.eval_every_steps", "train.min_delta"),
)
MAY_DIFFER_IN = ("checkpoint", "memory", "launch", "run")
GIT_S = 5.0  # for its answer
HASH_ROUNDS = 20_000  # 5 ms a secret


def describe_training(plan: Plan) -> dict[str, Any]:
    """Return what a checkpoint says of the training that it is of."""
    return {
        "settings": hide_config_secrets(plan.settings).model_dump(mode="json"),
        "secrets": _hash_secrets(find_config_secrets(plan.settings), os.urandom(16).hex()),
        "data": plan.data.fingerprint,
        "device": plan.torch_device.type,
        "torch": torch.__version__,
    }


def _hash_secrets(secrets: Mapping[str, str], salt: str) -> dict[str, str]:
    """Return what tells by its dotted name whether a secret is the same; empty where there is
    none."""
    hashes = {name: _hash_secret(value, salt) for name, value in secrets.items()}
    return {"salt": salt, **hashes} if hashes else {}


def _hash_secret(value: str, salt: str) -> str:
    return pbkdf2_hmac("sha256", value.encode(), bytes.fromhex(salt), HASH_ROUNDS).hex()


def describe_code(config: RunConfig) -> dict[str, Any]:
    """Return the same of the code that it is trained by: the user's own modules, as far as they
    are imported by now, and the commit of the working directory; empty where that has none."""
    files = {
        os.path.relpath(file): sha256(file.read_bytes()).hexdigest()
        for file in _find_own_files(config)
    }
    return {"code": files, "commit": _read_commit()}


def _find_own_files(config: RunConfig) -> Iterator[Path]:
    """Yield the files of modules from the working directory, and of those that an import path
    begins with."""
    paths = [
        path
        for path in _iterate_texts(hide_config_secrets(config).model_dump())
        if is_import_path(path)
    ]
    named = {path.partition(":")[0].partition(".")[0] for path in paths}
    here = os.getcwd() + os.sep
    for name, module in list(sys.modules.items()) if named else ():
        file, top = getattr(module, "__file__", None) or "", name.partition(".")[0]
        is_own = file.endswith(".py") and top not in OWN and name != "__main__"
        if not is_own or not (top in named or file.startswith(here)):
            continue
        if not set(PACKAGES) & set(Path(file).parts) and not is_installed(file):
            with suppress(OSError):
                if os.access(file, os.R_OK):
                    yield Path(file)


def _iterate_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _iterate_texts(one)


def _read_commit() -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_S)
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def describe_changed_code(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the sentence for code of the user's own that is not what it was; empty where it is,
    as far as both know of it."""
    before, files = was.get("code", {}), now.get("code", {})
    other = sorted(file for file in files if before.get(file, files[file]) != files[file])
    if not other:
        return ""
    have = "has" if len(other) == 1 else "have"
    return (
        f"{', '.join(other)} {have} changed since the checkpoint was written: the training goes on "
        "with the code of now"
    )


def refuse_other_training(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs and may. Raises ConfigError for what must not.

    A secret may: a password has its time, and rows are known by their fingerprint.
    """
    secrets = was.get("secrets", {})
    problems, notes = [], _list_changed_secrets(secrets)
    for name, before, after in _list_changed(was["settings"], now["settings"]):
        if _is_same_but_hidden(name, before, after, secrets):
            continue
        if name in MAY_DIFFER or name.partition(".")[0] in MAY_DIFFER_IN:
            notes.append(f"{name} was {before} and is {after}")
        else:
            problems.append(
                f"{name}: was {before} when the checkpoint was written and is {after}; "
                "leave it as it was, or train anew (a run.key: under another one)"
            )
    if was["data"] != now["data"]:
        problems.append(
            f"data.source: the rows are others than those of the checkpoint (their fingerprint was "
            f"{was['data'] or 'none'} and is {now['data'] or 'none'}); train anew"
        )
    if problems:
        raise ConfigError(*problems)
    for what in ("device", "torch"):
        if was[what] != now[what]:
            notes.append(f"{what} was {was[what]} and is {now[what]}: not the same to the last bit")
    before, after = was.get("commit"), now.get("commit")
    if before and after and before != after:
        notes.append(f"git.commit was {before[:12]} and is {after[:12]}")
    return notes


def _list_changed(
    was: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, Any, Any]]:
    """Settings by their dotted names; one that an earlier version did not know is not compared, and
    what that did not take for a secret is hidden."""
    return [
        (full, before, value)
        for section, settings in now.items()
        for name, value in settings.items()
        if name in was.get(section, {})
        and (
            before := hide_secrets(
                was[section][name], full := f"{section}.{name}", by_name=name == "args"
            )
        )
        != value
    ]


def _list_changed_secrets(hashes: Mapping[str, str]) -> list[str]:
    """Return in words which secrets are others than those of the checkpoint."""
    values = {name: os.environ.get(make_variable_name(name)) for name in hashes if name != "salt"}
    return [
        f"{name} has another secret than it had"
        for name, value in values.items()
        if value is not None and _hash_secret(value, hashes["salt"]) != hashes[name]
    ]


def _is_same_but_hidden(name: str, before: Any, after: Any, hashes: Mapping[str, str]) -> bool:
    """True if what differs was hidden, by a variable of the environment that is there no more, and
    is the same."""
    was, now = ({n: v for n, v in _iterate_values(value, name)} for value in (before, after))
    return was.keys() == now.keys() and all(
        value == now[n] or (n in hashes and _hash_secret(str(now[n]), hashes["salt"]) == hashes[n])
        for n, value in was.items()
    )


def _iterate_values(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _iterate_values(one, f"{name}.{key}")
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from _iterate_values(one, f"{name}.{i}")
    else:
        yield name, value
