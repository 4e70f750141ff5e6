"""The sides of a judgement as a person or a program writes them: settings, the code of a commit,
or a command that trains with an account; and what a candidate may not change, since its figure
would no longer be that of its base.
"""

from __future__ import annotations

import ast
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headroom.base.secret_names import is_secret
from headroom.base.units import make_printable
from headroom.comparison.grid import split_values
from headroom.process.redaction import redact
from headroom.settings.read_settings import ConfigError, find_import_paths
from headroom.settings.run_config import RunConfig

GIT, COMMAND = "git:", "cmd:"
SEED = "{seed}"  # in a command, where the seed of a run goes
GIT_S = 120.0  # for a command of git
# Settings by which a candidate would be measured otherwise, and what to do instead.
_FIXED = {
    "data.": "the rows it is judged by are those of its base; begin a session with other data",
    "train.metrics": "a candidate is judged by the metrics of its base",
    "train.best_metric": "which weights are judged is up to the base",
    "train.seed": "seeds are drawn by the judge",
    "train.end": "how long both train is said by --for",
    "run.": "a name makes no other training",
    "gate.": "the gate says nothing of a candidate",
    "launch.": "both sides train in as many processes",
    "device.": "both sides train on the same device",
}
_LENGTHS = ("train.epochs", "train.max_steps")  # equal, unless both have the same time


@dataclass(frozen=True)
class Side:
    """What is trained: settings over those of the session, with the code of a commit, or of the
    working folder where that is empty; or a command with the seed in it."""

    text: str  # as it was written
    settings: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""  # its whole hash
    command: str = ""
    ref: str = ""  # the commit as it was written, git:REF

    def apply(self, change: Side) -> Side:
        """Return this side after a change that was kept: it is the base of the next one."""
        if change.command:
            return change
        settings, ref = {**self.settings, **change.settings}, change.ref or self.ref
        words = [ref, *(f"{name}={value}" for name, value in settings.items())]
        text = self.command and self.text or " ".join(filter(None, words))
        return Side(text, settings, change.commit or self.commit, self.command, ref)

    @property
    def label(self) -> str:
        """Return the side in a line; one without a change is the base as it is."""
        return make_printable(self.text or "as it is", limit=200)


def parse_side(text: str, *, option: str, folder: Path) -> Side:
    """Return the side that the text means: NAME=VALUE ..., git:REF NAME=VALUE ... or cmd:COMMAND.

    option: that gave it. folder: within the repository of a commit. Raises ConfigError.
    """
    text = text.strip()
    if text.startswith(COMMAND):
        return _parse_command(text, option)
    words = [word for word in split_values(text, at=" ") if word]
    commit = ref = ""
    if words and words[0].startswith(GIT):
        ref = words.pop(0)
        commit = find_commit(ref.removeprefix(GIT), option=option, folder=folder)
    settings: dict[str, str] = {}
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        shown = make_printable(word, limit=80)
        if not equals or not name:
            raise ConfigError(
                f"{option}: {shown} is no NAME=VALUE; a commit is git:REF, a command cmd:COMMAND"
            )
        if name in settings:
            raise ConfigError(f"{option}: {name} is given twice; keep one")
        if is_secret(name, value) or redact(value) != value:
            raise ConfigError(f"{option}: {name} is a secret, which no page may show")
        is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        settings[name] = value[1:-1] if is_quoted else value
    return Side(text, settings, commit, ref=ref)


def _parse_command(text: str, option: str) -> Side:
    command = text.removeprefix(COMMAND).strip()
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{option}: {error} ({make_printable(text, limit=80)})") from None
    if not words:
        raise ConfigError(f"{option}: cmd: names no command")
    if SEED not in command:
        raise ConfigError(
            f"{option}: the command takes no seed, so that its runs would show no chance; put "
            f"{SEED} where its seed goes, as in cmd:python loop.py --seed {SEED}"
        )
    return Side(text, command=command)


def find_unfair(change: Side, *, goal: str, has_time: bool) -> list[str]:
    """Return why a candidate with this change could not be judged against its base.

    has_time: both sides train for the same time.
    """
    problems = []
    for name in change.settings:
        fixed = next((why for part, why in _FIXED.items() if _is_of(name, part)), "")
        if not fixed and name in _LENGTHS and not has_time:
            fixed = "a candidate may train no longer than its base; --for gives both the same time"
        if not fixed and _is_of(name, "train.loss") and goal.endswith("loss"):
            fixed = f"it would change what {goal} is; judge it by another metric, by --goal"
        if fixed:
            problems.append(f"--candidate: {name} can't differ: {fixed}")
    return problems


def _is_of(name: str, part: str) -> bool:
    return name.startswith(part) if part.endswith(".") else name.split(".")[:2] == part.split(".")


def find_changed_evaluation(config: RunConfig, base: Path, candidate: Path) -> list[str]:
    """Return the settings whose own code measures the candidate and is not that of its base: a
    metric, and the loss by which it is judged. Only the function or class itself is looked at."""
    paths = find_import_paths(config)
    measures = {
        n: p for n, p in paths.items() if n.startswith("train.metrics") or n == "train.loss"
    }
    return [
        name
        for name, path in measures.items()
        if _read_definition(base, path) != _read_definition(candidate, path)
    ]


def _read_definition(folder: Path, path: str) -> str:
    """Return the code of what an import path names, without its comments; empty where it is not
    defined in this folder."""
    module, _, name = path.partition(":")
    file = folder / Path(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    kinds = (ast.FunctionDef, ast.ClassDef)
    of_name = [node for node in tree.body if isinstance(node, kinds) and node.name == name]
    return ast.dump(of_name[-1]) if of_name else ""


def find_commit(ref: str, *, option: str, folder: Path) -> str:
    """Return the whole hash of a commit, branch or tag. Raises ConfigError."""
    shown = make_printable(ref, limit=80)
    if not ref or ref.startswith("-"):
        raise ConfigError(f"{option}: git:{shown} names no commit")
    return _run_git(
        ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}"],
        folder,
        problem=f"{option}: git has no commit {shown} here",
    )


def check_out(commit: str, place: Path, folder: Path) -> Path:
    """Return the folder that is as `folder` in a worktree of that commit, which is made where it
    is not there yet. Raises ConfigError."""
    problem = f"git:{commit[:12]}: its worktree can't be made"
    top = Path(_run_git(["rev-parse", "--show-toplevel"], folder, problem=problem))
    if not place.is_dir():
        words = ["worktree", "add", "--detach", "--force", str(place), commit]
        _run_git(words, folder, problem=problem)
    within = place / folder.resolve().relative_to(top.resolve())
    if not within.is_dir():
        raise ConfigError(f"git:{commit[:12]}: has no folder {within.relative_to(place)}")
    return within


def remove_worktree(place: Path, folder: Path) -> None:
    """Let go of a worktree; one that can't be removed stays."""
    words = ["git", "worktree", "remove", "--force", str(place)]
    subprocess.run(words, cwd=folder, capture_output=True, check=False, timeout=GIT_S)


def _run_git(words: Sequence[str], folder: Path, *, problem: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=folder, capture_output=True, text=True, timeout=GIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{problem} ({error})") from None
    if done.returncode:
        said = make_printable(redact(done.stderr.strip()), limit=200)
        raise ConfigError(problem + (f" ({said})" if said else ""))
    return done.stdout.strip()
