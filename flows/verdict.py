"""Says what held a run back: `python -m flows.verdict RUN`; without RUN that of the run
that was begun or gone on with last on this host. A run that trains is told as far as it is; one of
another host by its id in MLflow. Exit codes: 0 told, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from headroom.process.first_signals import answer_first_interrupt

    answer_first_interrupt()  # before the imports that take time
    from headroom.process.command import exit_process, start_command

    start_command()

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

from headroom.base.event_log import read_end
from headroom.base.program import Parser, print_answer
from headroom.base.units import make_printable
from headroom.process.redaction import redact_output
from headroom.report.verdict import BOUND, SHARE, WHY, judge_run
from headroom.run.known_runs import (
    KnownRun,
    find_called_runs,
    find_newest_run,
    list_known_runs,
)
from headroom.tracking.tracking_settings import (
    TrackingError,
    TrackingSettings,
    read_tracking_settings,
)

FULL_LETTERS = 8000  # of a tag
UNTOLD = "nothing is told of it: it has taken no steps, or has not trained for a minute yet"


def main(argv: Sequence[str]) -> int:
    """Tell what the command line asks for. Returns the exit code."""
    redact_output()
    parser = Parser(
        prog="python -m flows.verdict",
        description="Say what held a run back, how much would be won, and what to do next.",
    )
    words = "Its id in MLflow or 6 letters of that, its name, key or folder."
    default = "Default: the one that was begun or gone on with last."
    parser.add_argument("run", metavar="RUN", nargs="?", help=f"{words} {default}")
    parser.add_argument("--json", action="store_true", help="One line of JSON.")
    options = parser.parse_args(list(argv))
    try:
        answer = _find_verdict(options.run, read_tracking_settings())
    except TrackingError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print_answer(answer)
    else:
        # Of MLflow's run or of a folder it may be anybody's text.
        print(f"{answer['name']}: {make_printable(answer['why'] or UNTOLD, limit=FULL_LETTERS)}")
    return 0


def _find_verdict(word: str | None, where: TrackingSettings) -> dict[str, Any]:
    """Return name, bound, why, share and gain of the run that is meant; what is not known is None.

    Raises TrackingError where there is none, or several.
    """
    runs = Path(where.runs)
    if word is None:
        newest = find_newest_run(runs)
        if newest is None:
            raise TrackingError(f"RUN: {runs} holds no run yet")
        return _describe_run(newest)
    matches = find_called_runs(word, list_known_runs(runs))
    shown = make_printable(word, limit=80)
    if len(matches) > 1:
        ids = ", ".join(run.run_id[:8] for run in matches)
        raise TrackingError(f"RUN: {shown} is {len(matches)} runs; name one by its id: {ids}")
    if matches:
        return _describe_run(matches[0])
    if where.database is not None and not where.database.is_file():
        raise TrackingError(f"RUN: no run is called {shown}; `python -m flows.runs` shows them")
    from headroom.tracking.query_runs import read_run  # imports mlflow

    run = read_run(where, word)
    return _describe(run["name"] or word, run, run["tags"].get(WHY))


def _describe_run(run: KnownRun) -> dict[str, Any]:
    end = read_end(Path(run.folder))
    verdict = None if run.live else judge_run(end)
    if verdict is None:
        return _describe(run.name, end, run.bound or None)
    return {"name": run.name, "run_id": run.run_id, **asdict(verdict)}


def _describe(name: str, run: Mapping[str, Any], why: str | None) -> dict[str, Any]:
    """Return the verdict that stands in the record of a run."""
    bound, share_pct = (run.get("tags") or {}).get(BOUND), (run.get("metrics") or {}).get(SHARE)
    share = None if share_pct is None or isnan(share_pct) else share_pct / 100
    return {"name": name, "bound": bound, "why": why, "share": share, "gain": None}


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
