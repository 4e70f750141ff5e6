"""Ends a training of this host: `python -m flows.stop RUN`. It leaves a checkpoint of its step,
and is recorded as KILLED. Nothing but that very process is ended, and what does not train is
refused. Exit codes: 0 ended, 1 could not be ended, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from headroom.process.first_signals import answer_first_interrupt

    answer_first_interrupt()  # before the imports that take time
    from headroom.process.command import exit_process, start_command

    start_command()

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from headroom.base.program import Parser
from headroom.base.units import make_printable
from headroom.process.redaction import redact_output
from headroom.run.known_runs import (
    KnownRun,
    LiveRun,
    find_called_runs,
    find_live_runs,
    find_owner,
    find_process,
    is_live,
    list_known_runs,
    read_run_folder,
)
from headroom.services.parts import is_running
from headroom.tracking.tracking_settings import TrackingError, read_tracking_settings

ASK_EVERY_S = 0.1
TWICE_S = 0.5  # between two signals: of two that come at once a process hears one
KILL_S = 10.0  # with --now, until it is killed
LEAVE_S = 10.0  # for what comes after a training's end


def main(argv: Sequence[str]) -> int:
    """Stop what the command line names. Returns the exit code."""
    redact_output()
    parser = Parser(
        prog="python -m flows.stop",
        description="End a training of this host. It leaves a checkpoint to go on from.",
    )
    words = "Its id in MLflow or 6 letters of that, its name, key, folder or process number."
    parser.add_argument("run", metavar="RUN", help=f"{words} `python -m flows.runs` shows them.")
    words = "Do not wait for the step to end, and kill it after 10 s."
    parser.add_argument("--now", action="store_true", help=words)
    options = parser.parse_args(list(argv))
    try:
        runs = Path(read_tracking_settings().runs)
    except TrackingError as error:
        print(error, file=sys.stderr)
        return 2
    until = time.monotonic() + LEAVE_S
    while True:
        matches = find_called_runs(options.run, list_known_runs(runs))
        alive = [run for run in matches if run.live]
        if len(alive) != 1:
            print(_describe_refusal(options.run, matches, alive), file=sys.stderr)
            return 2
        if (seen := _find_process(alive[0])) is not None:
            return _stop_run(alive[0], *seen, now=options.now)
        if time.monotonic() > until:
            why = "its process can't be seen from here: it may be another container's"
            print(f"RUN: {_describe_run(alive[0])} can't be stopped: {why}", file=sys.stderr)
            return 1
        time.sleep(ASK_EVERY_S)  # one that begins is announced at once, and one that ends let go


def _describe_refusal(word: str, matches: Sequence[KnownRun], alive: Sequence[KnownRun]) -> str:
    if alive:
        several = ", ".join(_describe_run(run) for run in alive)
        return (
            f"RUN: {make_printable(word, limit=80)} is {len(alive)} trainings: {several}; name one"
        )
    if matches:
        return f"RUN: {_describe_run(matches[0])} does not train: {_describe_end(matches[0])}"
    shown = make_printable(word, limit=80)
    return f"RUN: no training here is called {shown}; `python -m flows.runs` shows them"


def _describe_run(run: KnownRun) -> str:
    which = [run.run_id[:8]] if run.run_id else []
    which += [f"process {run.pid}"] if run.live else []
    return f"{make_printable(run.name, limit=60)} ({', '.join(which)})"


def _describe_end(run: KnownRun) -> str:
    state = ", ".join(filter(None, [run.state, make_printable(run.reason, limit=300)]))
    return f"{state}. Go on with: {run.resume}" if run.resume else state


def _find_process(run: KnownRun) -> tuple[LiveRun, psutil.Process] | None:
    for live in find_live_runs():
        if (live.folder, live.pid) == (run.folder, run.pid):
            process = find_process(live)
            return None if process is None else (live, process)
    return None


def _stop_run(run: KnownRun, live: LiveRun, process: psutil.Process, *, now: bool) -> int:
    try:
        process.terminate()
        how = "ends after its step, with a checkpoint" if run.state == "training" else "ends"
        print(f"{_describe_run(run)} {'ends now' if now else how} ...", file=sys.stderr, flush=True)
        if now:
            _kill_if_slow(live, process)
    except psutil.AccessDenied:
        why = f"it is {find_owner(live)}'s, and nobody else's to stop"
        print(f"RUN: {_describe_run(run)} can't be stopped: {why}", file=sys.stderr)
        return 1
    except psutil.NoSuchProcess:  # it was faster
        pass
    _wait_until(lambda: not is_live(live))
    _wait_until(lambda: not is_running(process), most_s=LEAVE_S)
    _wait_until(lambda: _read_now(run).state not in ("sending", "gone"), most_s=LEAVE_S)
    print(f"{make_printable(run.name, limit=60)}: {_describe_end(_read_now(run))}")
    return 0


def _kill_if_slow(live: LiveRun, process: psutil.Process) -> None:
    """Send a second signal, which does not wait for a step, and then SIGKILL."""
    if not _wait_until(lambda: not is_live(live), most_s=TWICE_S):
        process.terminate()
    if not _wait_until(lambda: not is_live(live), most_s=KILL_S):
        process.kill()


def _wait_until(said: Callable[[], bool], most_s: float = math.inf) -> bool:
    """Wait until this is true, for at most so long; return whether it is."""
    until = time.monotonic() + most_s
    while not (is_so := said()) and time.monotonic() < until:
        time.sleep(ASK_EVERY_S)
    return is_so


def _read_now(run: KnownRun) -> KnownRun:
    """Return what is known of the run by now; of one that had not begun, that it ended."""
    return read_run_folder(Path(run.folder)) or KnownRun(run.name, "ended before it began")


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
