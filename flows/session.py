"""Judges many changes with one error budget: `python -m flows.session new|judge|status|close`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from headroom.process.first_signals import answer_first_interrupt

    answer_first_interrupt()  # before the imports that take time
    from headroom.process.command import exit_process, start_command

    start_command()
    from flows.cli.judge_command import main_session

    exit_process(main_session(sys.argv[1:]))
