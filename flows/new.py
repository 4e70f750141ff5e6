"""Starts a project of a user's own: `python -m flows.new DIR` writes a small example of a
model, data, settings and a test into DIR, and prints the commands that run it. It imports
nothing slow. Exit codes: 0 written, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from flows.cli import starter
from tasks.engine.settings.read_settings import ConfigError


def main(argv: Sequence[str]) -> int:
    """Write the example. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.new",
        description="Write a small example of your own model, data and settings, which trains.",
    )
    parser.add_argument("folder", metavar="DIR", help="A new or empty folder.")
    name = parser.parse_args(list(argv)).folder
    try:
        folder = starter.write_example(name)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{folder} holds {', '.join(starter.FILES)}. Now:\n")
    for command in starter.list_commands(name):
        print(f"  {command}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
