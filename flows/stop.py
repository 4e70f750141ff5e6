"""Ends a training of this host: `python -m flows.stop RUN`. It leaves a checkpoint of its step,
and is recorded as KILLED. Nothing but that very process is ended, and what does not train is
refused. Exit codes: 0 ended, 1 could not be ended, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from tasks.process import signals, streams

    streams.keep()
    signals.catch()

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tasks.engine.base.units import printable
from tasks.known_runs import Run, called, known_runs, of_folder
from tasks.live_runs import Live, live_runs, lives, owner, process_of
from tasks.serving.processes import is_running
from tasks.tracking.where import TrackingError, where

ASK_EVERY_S = 0.1
TWICE_S = 0.5  # between two signals: of two that come at once a process hears one
KILL_S = 10.0  # with --now, until it is killed
LEAVE_S = 10.0  # for what comes after a training's end


def main(argv: Sequence[str]) -> int:
    """Stop what the command line names. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.stop",
        description="End a training of this host. It leaves a checkpoint to go on from.",
    )
    words = "Its id in MLflow or 6 letters of that, its name, key, folder or process number."
    parser.add_argument("run", metavar="RUN", help=f"{words} `python -m flows.runs` shows them.")
    words = "Do not wait for the step to end, and kill it after 10 s."
    parser.add_argument("--now", action="store_true", help=words)
    asked = parser.parse_args(list(argv))
    try:
        runs = Path(where().runs)
    except TrackingError as error:
        print(error, file=sys.stderr)
        return 2
    found = called(asked.run, known_runs(runs))
    alive = [run for run in found if run.live]
    if len(alive) == 1:
        return _stop(alive[0], now=asked.now)
    print(_refusal(asked.run, found, alive), file=sys.stderr)
    return 2


def _refusal(word: str, found: Sequence[Run], alive: Sequence[Run]) -> str:
    if alive:
        several = ", ".join(_which(run) for run in alive)
        return f"RUN: {printable(word, limit=80)} is {len(alive)} trainings: {several}; name one"
    if found:
        return f"RUN: {_which(found[0])} does not train: {_end(found[0])}"
    told = printable(word, limit=80)
    return f"RUN: no training here is called {told}; `python -m flows.runs` shows them"


def _which(run: Run) -> str:
    which = [run.run_id[:8]] if run.run_id else []
    which += [f"process {run.pid}"] if run.live else []
    return f"{printable(run.name, limit=60)} ({', '.join(which)})"


def _end(run: Run) -> str:
    told = ", ".join(filter(None, [run.state, printable(run.reason, limit=300)]))
    return f"{told}. Go on with: {run.resume}" if run.resume else told


def _stop(run: Run, *, now: bool) -> int:
    live = next(
        (one for one in live_runs() if (one.folder, one.pid) == (run.folder, run.pid)), None
    )
    process = process_of(live) if live is not None else None
    if live is None or process is None:
        why = "its process can't be seen from here: another container's, or an older version's"
        print(f"RUN: {_which(run)} can't be stopped: {why}", file=sys.stderr)
        return 1
    try:
        process.terminate()
        how = "ends after its step, with a checkpoint" if run.state == "training" else "ends"
        print(f"{_which(run)} {'ends now' if now else how} ...", file=sys.stderr, flush=True)
        if now:
            _insist(live, process)
    except psutil.AccessDenied:
        told = f"it is {owner(live)}'s, and nobody else's to stop"
        print(f"RUN: {_which(run)} can't be stopped: {told}", file=sys.stderr)
        return 1
    except psutil.NoSuchProcess:  # it was faster
        pass
    _is_so(lambda: not lives(live))
    _is_so(lambda: not is_running(process), most_s=LEAVE_S)
    _is_so(lambda: _now(run).state not in ("sending", "gone"), most_s=LEAVE_S)
    print(f"{printable(run.name, limit=60)}: {_end(_now(run))}")
    return 0


def _insist(live: Live, process: psutil.Process) -> None:
    """A second signal does not wait for a step; SIGKILL waits for nothing."""
    if not _is_so(lambda: not lives(live), most_s=TWICE_S):
        process.terminate()
    if not _is_so(lambda: not lives(live), most_s=KILL_S):
        process.kill()


def _is_so(said: Callable[[], bool], most_s: float = math.inf) -> bool:
    """Whether it came to be so in that time."""
    until = time.monotonic() + most_s
    while not (is_so := said()) and time.monotonic() < until:
        time.sleep(ASK_EVERY_S)
    return is_so


def _now(run: Run) -> Run:
    """What is known of it by now; nothing of one that had not begun."""
    return of_folder(Path(run.folder)) or Run(run.name, "ended before it began")


if __name__ == "__main__":
    from flows.cli.train_command import leave

    leave(main(sys.argv[1:]))
