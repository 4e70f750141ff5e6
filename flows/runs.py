"""Shows the trainings of this host: `python -m flows.runs`; with `--watch`, anew every two seconds.
`--accept RUN` lets the history of a gate begin at that run. It imports nothing slow, but for that.
Exit codes: 0 shown or accepted, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from tasks.process import signals

    signals.protect_standard_streams()
    signals.install_signal_handlers()

import argparse
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import orjson
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from flows.cli.runs_table import make_runs_table
from tasks.run.known_runs import find_called_runs, list_known_runs
from tasks.tracking.where import TrackingError, TrackingSettings, read_tracking_settings

EVERY_S = 2.0


def main(argv: Sequence[str]) -> int:
    """Show what the command line asks for. Returns the exit code."""
    asked = _make_parser().parse_args(list(argv))
    try:
        where = read_tracking_settings()
        runs = Path(where.runs)
        if asked.accept is not None:
            print(_accept_level(asked.accept, where))
            return 0
    except TrackingError as error:
        print(error, file=sys.stderr)
        return 2
    if asked.json:
        found = {"runs": list_known_runs(runs, last=asked.last)}
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
        return 0
    console = Console(highlight=False)
    if asked.watch:
        return _watch(runs, asked.last, console)
    console.print(_make_view(runs, asked.last, console))
    return 0


def _accept_level(word: str, where: TrackingSettings) -> str:
    """Return what was done. The run may also be one of another host, by its id in MLflow."""
    if where.database is not None and not where.database.is_file():
        raise TrackingError(f"tracking_uri: {where.database} is not there; nothing has run yet")
    found = find_called_runs(word, list_known_runs(Path(where.runs)))
    if len(found) > 1:
        ids = ", ".join(run.run_id[:8] for run in found)
        raise TrackingError(
            f"--accept {word[:80]}: is {len(found)} runs; name one by its id: {ids}"
        )
    from tasks.tracking.query_runs import accept_level  # imports mlflow

    runs = accept_level(where, found[0].run_id if found else word)
    more = f", and the {len(runs) - 1} after it of its kind" if len(runs) > 1 else ""
    return f"{runs[-1]} is the level from now on{more}. The next runs are compared with it."


def _make_view(runs: Path, last: int, console: Console) -> RenderableType:
    found = list_known_runs(runs, last=last)
    if not found:
        return Text(f"No training lives on this host, and {runs} holds none.")
    return make_runs_table(found, columns=console.width)


def _watch(runs: Path, last: int, console: Console) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(_make_view(runs, last, console), refresh=True)
                time.sleep(EVERY_S)
    except KeyboardInterrupt:
        return 130


def _parse_last(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 on (got {text!r})")
    return int(text)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.runs",
        description="Show the trainings of this host: those that live, then the newest others.",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="Draw it anew every 2 s, until Ctrl-C.")
    how.add_argument("--json", action="store_true", help="One JSON document.")
    words = "Compare later runs of its kind with this one: it is as it should be. Its name or id."
    how.add_argument("--accept", metavar="RUN", help=words)
    words = "How many of those that ended. Default: 20."
    parser.add_argument("-n", "--last", type=_parse_last, default=20, metavar="N", help=words)
    return parser


if __name__ == "__main__":
    from flows.cli.train_command import exit_process

    exit_process(main(sys.argv[1:]))
