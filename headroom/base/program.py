"""How this program was called, which its help repeats: by the command `headroom`, or by Python."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any

VERSION = 1  # of answers for programs
is_headroom = False  # the command was called, which a person may be told to call again
_COMMAND = re.compile(r"python -m (?:flows\.(\w+)|headroom\.services\.serve(?: (ui|up|down))?)")
# Of those that may stand in JSON as they are.
_UNPRINTABLE = re.compile(r"[\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_SERVE = {"ui": "ui", "down": "serve-down"}


def use_name(text: str) -> str:
    """Return the text with each command of this project as it can be called here."""
    if not is_headroom:
        return text
    return _COMMAND.sub(lambda m: f"headroom {m[1] or _SERVE.get(m[2], 'serve')}", text)


def list_training_words() -> list[str]:
    """Return what stands behind `python -m` for a training, as this program was called: beside a
    package `flows` of somebody else's only the command `headroom` finds ours."""
    return ["headroom", "train"] if is_headroom else ["flows.train"]


def print_answer(answer: Mapping[str, Any]) -> None:
    """Print what a program has asked for by --json: one object in a line, whose version is that of
    docs/answers.schema.json. A number that is none is null."""
    import orjson

    text = orjson.dumps({"version": VERSION, **answer}).decode()
    # In a text of it, where whoever reads JSON makes the same of it again.
    print(_UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text), flush=True)


class Parser(argparse.ArgumentParser):
    """A parser whose help names the commands as they can be called here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prog = use_name(self.prog)

    def format_help(self) -> str:
        return use_name(super().format_help())

    def format_usage(self) -> str:
        return use_name(super().format_usage())
