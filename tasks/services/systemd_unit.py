"""The service's keeper as a unit of the user's systemd, where there is one that outlives a log-out:
then systemd starts the keeper again when it dies, and with the machine, and the keeper the rest.
Nothing is asked of root, and nothing of what the unit started is ended with it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tasks.engine.base.secret_names import is_secret
from tasks.process.redaction import redact
from tasks.services.processes import MARK, ServeError, provide_mark

ENVIRONMENT = "environment"  # a file of the service's folder
# Of one log-in, or of a unit; none of a service that outlives it.
PASSING = re.compile(
    r"_|SHLVL|PWD|OLDPWD|TERM.*|SSH_.*|XDG_SESSION.*|DISPLAY|WAYLAND.*|DBUS.*|INVOCATION_ID"
    r"|JOURNAL_STREAM|NOTIFY_SOCKET|LISTEN_.*|SYSTEMD_.*|MAINPID|MANAGERPID"
)


def is_possible() -> bool:
    """Return whether there is a systemd of this user that stays when the user logs out."""
    if _ask("systemctl", "--user", "show-environment") is None:
        return False
    return _ask("loginctl", "show-user", str(os.getuid()), "--property=Linger") == "Linger=yes"


def make_unit_name(folder: Path) -> str:
    """Return the name of the unit of this folder's service: a machine may have several."""
    return f"headroom-{provide_mark(folder)[:12]}.service"


def put(folder: Path, *, project: Path, command: Sequence[str], env: Mapping[str, str]) -> None:
    """Write the unit and start it, also with the machine. Raises ServeError."""
    unit = _find_unit_path(folder)
    unit.parent.mkdir(parents=True, exist_ok=True)
    unit.write_text(make_unit_text(folder, project=project, command=command))
    file = folder / ENVIRONMENT
    with open(os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as told:
        told.write(make_environment_text(env))
    # In no file: systemd keeps them until it ends.
    if hidden := [name for name, value in env.items() if _is_hidden(name, value)]:
        _do(["systemctl", "--user", "import-environment", *hidden], env=env)
    for words in (["daemon-reload"], ["enable", "--quiet", unit.name], ["restart", unit.name]):
        _do(["systemctl", "--user", *words])


def remove(folder: Path) -> None:
    """End the unit, and what made it; nothing where there is none."""
    if not (folder / "mark").exists() or not (unit := _find_unit_path(folder)).exists():
        return
    for words in (["disable", "--quiet", unit.name], ["stop", unit.name]):
        _ask("systemctl", "--user", *words)
    unit.unlink(missing_ok=True)
    (folder / ENVIRONMENT).unlink(missing_ok=True)
    _ask("systemctl", "--user", "daemon-reload")


def make_unit_text(folder: Path, *, project: Path, command: Sequence[str]) -> str:
    """Return the text of the unit file."""
    words = " ".join(_quote_word(word) for word in command)
    log = _escape_path(folder / "keeper.log")
    return "\n".join(
        [
            "[Unit]",
            f"Description=Headroom: the service of {_escape_path(project)}",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            f"WorkingDirectory={_escape_path(project)}",
            f"EnvironmentFile={_escape_path(folder / ENVIRONMENT)}",
            f"ExecStart={words}",
            f"StandardOutput=append:{log}",
            f"StandardError=append:{log}",
            "Restart=always",
            "RestartSec=5",
            "# Servers, workers and trainings go on: `make serve-down` ends them in good order.",
            "KillMode=process",
            "",
            "[Install]",
            "WantedBy=default.target",
            "",
        ]
    )


def make_environment_text(env: Mapping[str, str]) -> str:
    """Return what of the environment is no secret, as systemd reads it."""
    lines = []
    for name, value in env.items():
        is_kept = re.fullmatch(r"[A-Za-z_]\w*", name) and not PASSING.fullmatch(name)
        if is_kept and not _is_hidden(name, value):
            escaped = re.sub(r'(["\\$`])', r"\\\1", value)
            lines.append(f'{name}="{escaped}"')
    return "".join(f"{line}\n" for line in lines)


def _is_hidden(name: str, value: str) -> bool:
    return name != MARK and (is_secret(name, value) or redact(value) != value)


def _find_unit_path(folder: Path) -> Path:
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "systemd" / "user" / make_unit_name(folder)


def _escape_path(path: Path) -> str:
    return str(path).replace("%", "%%")


def _quote_word(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _do(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    if done.returncode:
        said = redact(done.stderr.strip() or f"exit code {done.returncode}")
        raise ServeError(f"{' '.join(command[:3])}: {said}")


def _ask(*command: str) -> str | None:
    """Return what the command printed; None where it failed, or is not there."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else None
    return None
