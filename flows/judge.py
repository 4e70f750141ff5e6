"""Judges a change: `python -m flows.judge --candidate SIDE` trains it and its base until it is
decided, and says keep, discard or undecided.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from headroom.process.first_signals import answer_first_interrupt

    answer_first_interrupt()  # before the imports that take time
    from headroom.process.command import exit_process, start_command

    start_command()
    from flows.cli.judge_command import main

    exit_process(main(sys.argv[1:]))

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from headroom.settings.read_settings import ConfigError

DECIDED = (0, 1, 3)  # exit codes of an answer


def judge(
    candidate: str,
    *,
    base: str = "",
    goal: str = "",
    not_worse: Mapping[str, float] | None = None,
    time: str = "",
    runs: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a change and its base until it is decided, in processes of their own, and return the
    answer: its fields are those of docs/agents.md.

    Args:
        candidate: A side: settings as "optim.lr=0.01", "git:BRANCH" or "cmd:COMMAND".
        base: The same; by default the project as it is.
        goal: The metric, such as "val/loss" or "max:val/own"; by default that of the task.
        not_worse: Other metrics, each with the share by which it may be worse, such as 0.02.
        time: That each run has, such as "5min".
        runs: Trainings that this call may take at most.
        settings: Of both sides, by their dotted names.

    Raises ConfigError for bad input, and RuntimeError where the base can't be trained or judged.
    """
    named = {"candidate": candidate, "base": base, "goal": goal, "for": time, "runs": runs}
    words = [f"--{name}={value}" for name, value in named.items() if value]
    words += [f"--not-worse={name}:{share}" for name, share in (not_worse or {}).items()]
    for name, value in (settings or {}).items():
        words.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
    command = [sys.executable, "-m", "headroom", "judge", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in DECIDED:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(said) if done.returncode == 2 else RuntimeError(said)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
