"""Cleans up what trainings of this host left behind when they died. `python -m flows.tidy`
does so from a command line, without a flow; Prefect deployments run it by the entrypoint
`flows/tidy.py:tidy`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from headroom.process.first_signals import answer_first_interrupt

    answer_first_interrupt()  # before the imports that take time
    from headroom.process.command import exit_process, start_command

    start_command()
    from flows.cli.tidy_command import main  # it needs no prefect

    exit_process(main(sys.argv[1:]))

import logging

from prefect import flow

from flows.cli.tidy_command import describe_action, parse_age_s
from headroom.run.tidy import clean_up
from headroom.tracking.tracking_settings import read_tracking_settings

log = logging.getLogger("headroom.run.tidy")  # Prefect shows what the tasks log


@flow(name="tidy")
def tidy(older_than: str | None = None, dry_run: bool = False) -> list[str]:
    """End runs whose process is gone, in MLflow and in Prefect, and send what was not sent.

    Args:
        older_than: Also remove journals and checkpoints of runs that MLflow has, from that age on:
            12h, 30d, 8w.
        dry_run: Only tell of it.
    """
    log.setLevel(logging.INFO)
    lines, problems = [], []
    for action in clean_up(
        read_tracking_settings(), older_s=parse_age_s(older_than), does=not dry_run
    ):
        lines.append(describe_action(action, does=not dry_run))
        problems += [lines[-1]] if action.problem else []
        log.info("%s", lines[-1])
    if problems:
        raise RuntimeError("; ".join(problems))
    return lines
