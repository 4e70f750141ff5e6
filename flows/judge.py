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
