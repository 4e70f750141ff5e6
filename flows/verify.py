"""Trains a window of a run anew and says whether it comes out the same, to the bit, step by step:
`python -m flows.verify RUN`. The run is only read. Exit codes: 0 equal, 1 something differs, 2 bad
input, or nothing to compare with, 3 something differs, but by operations that need not be the same,
130 interrupted.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from headroom.process.first_signals import answer_first_interrupt

    answer_first_interrupt()  # before the imports that take time
    from headroom.process.command import exit_process, start_command

    start_command()
    from flows.cli.verify_command import main

    exit_process(main(sys.argv[1:]))
