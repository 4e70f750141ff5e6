"""Shows the trainings of this host: `python -m flows.runs`; with `--watch`, anew every two seconds.
`--accept RUN` lets the history of a gate begin at that run. The table has as many columns as the
terminal has room for, and notes under a training; names and reasons may be anybody's, and are shown
as one plain line. It imports nothing slow, but to accept. Exit codes: 0 shown or accepted, 2 bad
input, 130 interrupted.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from headroom.process.first_signals import answer_first_interrupt

    answer_first_interrupt()  # before the imports that take time
    from headroom.process.command import exit_process, start_command

    start_command()

import argparse
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from headroom.base.program import Parser, print_answer
from headroom.base.units import (
    ELLIPSIS,
    format_clock,
    format_mebibytes,
    format_number,
    format_seconds,
    make_printable,
)
from headroom.process.redaction import redact_output
from headroom.run.known_runs import KnownRun, find_called_runs, find_user_name, list_known_runs
from headroom.tracking.tracking_settings import (
    TrackingError,
    TrackingSettings,
    read_tracking_settings,
)

EVERY_S = 2.0
# The last ones go first where there is no room; those of a live training are told below it then.
COLUMNS = ("run", "state", "step", "time", "loss", "id", "samples/s", "peak", "epoch", "device")
ORDER = ("run", "id", "state", "device", "step", "epoch", "time", "loss", "samples/s", "peak")
RIGHT = ("step", "epoch", "time", "loss", "samples/s", "peak")
MISSING = {"device": "on {}", "samples/s": "{} samples/s"}
LEAST_NAME = 26  # the letters of a default name
BETWEEN = 2
STYLES = {"training": "green", "waiting": "yellow", "FINISHED": "", "FAILED": "red", "gone": "red"}


def main(argv: Sequence[str]) -> int:
    """Show what the command line asks for. Returns the exit code."""
    redact_output()
    options = _make_parser().parse_args(list(argv))
    try:
        where = read_tracking_settings()
        runs = Path(where.runs)
        if options.accept is not None:
            print(_accept_level(options.accept, where))
            return 0
    except TrackingError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print_answer({"runs": list_known_runs(runs, last=options.last)})
        return 0
    console = Console(highlight=False)
    if options.watch:
        return _watch(runs, options.last, console)
    console.print(_make_view(runs, options.last, console))
    return 0


def _accept_level(word: str, where: TrackingSettings) -> str:
    """Return what was done. The run may also be one of another host, by its id in MLflow."""
    if where.database is not None and not where.database.is_file():
        raise TrackingError(f"tracking_uri: {where.database} is not there; nothing has run yet")
    matches = find_called_runs(word, list_known_runs(Path(where.runs)))
    if len(matches) > 1:
        ids = ", ".join(run.run_id[:8] for run in matches)
        raise TrackingError(
            f"--accept {word[:80]}: is {len(matches)} runs; name one by its id: {ids}"
        )
    from headroom.tracking.query_runs import accept_level  # imports mlflow

    runs = accept_level(where, matches[0].run_id if matches else word)
    more = f", and the {len(runs) - 1} after it of its kind" if len(runs) > 1 else ""
    return f"{runs[-1]} is the level from now on{more}. The next runs are compared with it."


def _make_view(runs: Path, last: int, console: Console) -> RenderableType:
    known_runs = list_known_runs(runs, last=last)
    if not known_runs:
        return Text(f"No training lives on this host, and {runs} holds none.")
    return make_runs_table(known_runs, columns=console.width)


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
    parser = Parser(
        prog="python -m flows.runs",
        description="Show the trainings of this host: those that live, then the newest others.",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", action="store_true", help="Draw it anew every 2 s, until Ctrl-C.")
    how.add_argument("--json", action="store_true", help="One line of JSON.")
    words = "Compare later runs of its kind with this one: it is as it should be. Its name or id."
    how.add_argument("--accept", metavar="RUN", help=words)
    words = "How many of those that ended. Default: 20."
    parser.add_argument("-n", "--last", type=_parse_last, default=20, metavar="N", help=words)
    return parser


def make_runs_table(runs: Sequence[KnownRun], *, columns: int) -> RenderableType:
    """Return the trainings as a table that is `columns` letters wide."""
    rows = [_make_row_cells(run) for run in runs]
    widths = {name: max(map(cell_len, (name, *(row[name] for row in rows)))) for name in COLUMNS}
    shown = list(COLUMNS)
    while _compute_least_width(widths, shown) > columns and len(shown) > 1:
        shown.pop()
    widths["run"] += min(0, columns - BETWEEN * (len(shown) - 1) - sum(widths[n] for n in shown))
    lines: list[RenderableType] = [_make_line({n: n for n in ORDER}, shown, widths, style="bold")]
    for run, row in zip(runs, rows, strict=True):
        lines.append(_make_line(row, shown, widths, style=STYLES.get(run.state, "")))
        left_out = (n for n in ORDER if run.live and n not in shown and row[n])
        missing = [MISSING.get(name, f"{name} {{}}").format(row[name]) for name in left_out]
        for note in [", ".join(missing), *_make_notes(run, columns)]:
            if note:
                lines.append(Padding(Text(note, style="dim"), (0, 0, 0, BETWEEN), expand=False))
    return Group(*lines)


def _compute_least_width(widths: dict[str, int], shown: Sequence[str]) -> int:
    """Return the least width of these columns."""
    others = sum(widths[name] for name in shown if name != "run")
    return min(widths["run"], LEAST_NAME) + others + BETWEEN * (len(shown) - 1)


def _make_line(
    row: dict[str, str], shown: Sequence[str], widths: dict[str, int], *, style: str
) -> Text:
    text = Text(no_wrap=True)
    for name in (name for name in ORDER if name in shown):
        width, cell = max(1, widths[name]), row[name]
        if cell_len(cell) > width:  # the end of a name tells it from others: its time stands there
            cell = ELLIPSIS + cell[len(ELLIPSIS) - width :]
        cell = set_cell_size(cell, width) if name not in RIGHT else cell.rjust(width)
        text.append(cell, style if name in ("state", "run") or style == "bold" else "")
        text.append(" " * BETWEEN)
    text.rstrip()
    return text


def _make_row_cells(run: KnownRun) -> dict[str, str]:
    def format_count(done: int | None, whole: int | None) -> str:
        return "" if done is None else f"{done:,}" + (f"/{whole:,}" if whole else "")

    time = "" if run.total_s is None else format_seconds(run.total_s)
    if run.live:
        so_far = "" if run.total_s is None else f"{format_clock(run.total_s)} so far"
        time = so_far if run.eta_s is None else f"{format_clock(run.eta_s)} left"
    return {
        "run": make_printable(run.name, limit=60),
        "id": make_printable(run.run_id, limit=60)[:8],
        "state": make_printable(run.state, limit=20),
        "device": make_printable(run.device, limit=12),
        "step": format_count(run.step, run.steps),
        "epoch": format_count(run.epoch, run.epochs),
        "time": time,
        "loss": "" if run.loss is None else format_number(run.loss),
        "samples/s": "" if run.samples_per_s is None else f"{run.samples_per_s:,.0f}",
        "peak": _format_peak(run),
    }


def _format_peak(run: KnownRun) -> str:
    if run.peak_mib is None:
        return ""
    return "at least " * run.is_peak_lower_bound + format_mebibytes(run.peak_mib)


def _make_notes(run: KnownRun, columns: int) -> list[str]:
    """Return what no column shows, each in one line or two."""
    is_others = run.live and run.user not in ("", find_user_name(os.geteuid()))
    whose = [f"of {run.user}"] if is_others else []
    which = [f"process {run.pid}"] if run.live and (whose or not run.run_id) else []
    reason = f"waits: {run.waits_for}" if run.waits_for else run.reason
    return [
        ", ".join([*whose, *which]),
        make_printable(reason, limit=2 * columns - 3 * BETWEEN),
        make_printable(run.bound.partition(". ")[0], limit=2 * columns - 3 * BETWEEN)
        if run.live
        else "",
        make_printable(run.unsent, limit=2 * columns - 3 * BETWEEN),
        f"go on: {run.resume}" if run.resume else "",
    ]


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
