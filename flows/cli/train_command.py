"""A run at somebody's desk: settings from the command line, a Prefect server if none is set, the
report in the terminal, and an exit code that tells what happened: 0 trained, 1 failed, 2 bad input,
130 interrupted, 143 terminated. What is slow to import is imported when the settings are right.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import psutil

from flows.cli import dry_runs
from flows.cli.flags import parse, resumed
from tasks.engine.base.units import printable
from tasks.engine.launch import attempts
from tasks.engine.settings.import_path_checks import check as check_imports
from tasks.engine.settings.read_settings import ConfigError, given_again
from tasks.process import restart, signals
from tasks.process.redaction import redact_output, redacted
from tasks.serving import crashed_flow_runs, local_prefect
from tasks.tracking import journal
from tasks.tracking.where import TrackingError, where

_prefect_away = threading.Event()  # nothing waits for its server any more


def main(argv: Sequence[str]) -> int:
    """Run what the command line says. Returns the exit code."""
    code = attempts.final()
    return attempts.kept(_obey(argv)) if code is None else code


def _obey(argv: Sequence[str]) -> int:
    redact_output()
    try:
        asked = parse(argv)
        if asked.explain_device:
            return dry_runs.explain_device(asked)
        asked.config = given_again(asked.config)
        check_imports(asked.config)
        if asked.dry_run:
            return dry_runs.dry_run(asked)
        if asked.forecast:
            return dry_runs.forecast(asked)
        return _train(asked)
    except (ConfigError, TrackingError) as error:
        print(redacted(str(error)), file=sys.stderr)
        return 2


def leave(code: int) -> NoReturn:
    """End the process when everything is written and flushed, without taking its modules apart,
    which would cost up to another second."""
    signals.finish()
    if not _prefect_away.is_set():
        atexit._run_exitfuncs()  # Prefect's last logs and events among them
        logging.shutdown()
    with suppress(OSError):  # whoever read it has gone
        sys.stdout.flush()
        sys.stderr.flush()
    if signals.exit_code() is None:
        restart.execute()
    os._exit(code)


def _train(asked: Namespace) -> int:
    if asked.config.launch.machines:  # before it is imported: of names that no server knows
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if attempts.rank_here():  # of torchrun; the first plays the flow
        from tasks.engine.launch import rank

        return rank.follow(asked.config)
    data, model = asked.config.data, printable(asked.config.model.name, limit=60)
    told = f"{model} on {printable(data.path or data.source, limit=60)}"
    print(f"{told}: loading PyTorch, Prefect and MLflow ...", file=sys.stderr, flush=True)
    from tasks.engine.data.preparation import check as check_data
    from tasks.engine.files.source_data import DataError

    try:
        check_data(asked.config.data)
    except DataError as error:
        print(redacted(str(error)), file=sys.stderr)
        return 2
    if asked.config.launch.machines and not attempts.is_launched():
        from tasks.engine.launch.machines import train_on_machines

        _tell_lines()
        return train_on_machines(asked.config, asked.words)
    journal.warm_up(where())
    return at_server(partial(_play, asked), debug=asked.debug)


def at_server(play: Callable[[], int], *, debug: bool) -> int:
    """The exit code of a flow that `play` runs: what it returns, or what the error says that ends
    it, which is printed; with `debug` it is raised again. A Prefect server is there, and Prefect
    not yet imported.
    """
    home, api_url = local_prefect.home(), None
    with ExitStack() as server:
        try:
            if local_prefect.is_needed():
                api_url = server.enter_context(local_prefect.shared(home))
        except OSError as error:
            print(f"PREFECT_HOME: {home}: {error.strerror}", file=sys.stderr)
            return 2
        _set_up_prefect(api_url, debug=debug)
        return _played(play, debug=debug)


def _played(play: Callable[[], int], *, debug: bool) -> int:
    try:
        from prefect import tags
        from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

        # A heartbeat tells a distant server that a run is alive; here it costs 0.9 s at the exit.
        heartless = temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
        with heartless, tags(crashed_flow_runs.tag()):
            return play() or signals.exit_code() or 0
    except BaseException as error:
        from tasks.preflight import BAD_INPUT

        # Whatever a signal has become on its way up.
        if isinstance(error, KeyboardInterrupt) or signals.exit_code():
            print(signals.in_words(), file=sys.stderr)
            return signals.exit_code() or 130
        if isinstance(error, BAD_INPUT):
            print(redacted(str(error)), file=sys.stderr)
            return 2
        if debug and isinstance(error, Exception):
            raise
        from prefect.settings import PREFECT_API_URL

        from tasks.engine.distributed.ranks import BeginAgain

        api = PREFECT_API_URL.value() or ""
        if str(error).startswith("Failed to reach API") and not local_prefect.is_temporary(api):
            told = "does not answer; start that server, or name none: a run then starts its own"
            print(f"PREFECT_API_URL: {redacted(api)} {told}", file=sys.stderr)
            return 2
        print(f"failed: {redacted(str(error))}", file=sys.stderr)
        return attempts.AGAIN if isinstance(error, BeginAgain) else 1


def show(run: Mapping[str, Any]) -> None:
    """Print the report of a run."""
    from rich.console import Console

    from tasks.engine.report import run_report

    command = run["open_command"] if run["run_id"] else ""  # MLflow may not know it yet
    Console(file=sys.stdout).print(run_report.terminal(run, open_command=command), crop=False)


@contextmanager
def called() -> Iterator[None]:
    """What `at_server` does for a command, for a call from Python: a shared server where none is
    named, our lines and none of Prefect's. Afterwards all is as it was."""
    from prefect import tags
    from prefect.logging.handlers import PrefectConsoleHandler
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        temporary_settings,
    )

    from tasks.flow_run import ASKED_AT

    if ASKED_AT.get() is not None:  # the command itself
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(tags(crashed_flow_runs.tag()))
        stack.callback(ASKED_AT.reset, ASKED_AT.set(time.time()))
        settings: dict[Any, Any] = {}
        if local_prefect.is_needed() and not PREFECT_API_URL.value():
            url = stack.enter_context(local_prefect.shared(local_prefect.home()))
            settings = {PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
        stack.enter_context(temporary_settings(settings))  # also undoes what publish() sets
        for logger in map(logging.getLogger, (None, *logging.root.manager.loggerDict)):
            for handler in logger.handlers:
                if isinstance(handler, PrefectConsoleHandler):
                    stack.callback(handler.setLevel, handler.level)
                    handler.setLevel(logging.CRITICAL)
        stack.callback(logging.getLogger("tasks").removeHandler, _tell_lines())
        journal.warm_up(where())
        yield


def _tell_lines() -> logging.Handler:
    """Send the lines of the tasks to stderr, by the handler that is returned."""
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("tasks").addHandler(console)
    logging.getLogger("tasks").setLevel(logging.INFO)
    return console


def _play(asked: Namespace) -> int:
    from httpx import TransportError

    from flows.train import train
    from tasks.flow_run import ASKED_AT
    from tasks.gate import GateFailed
    from tasks.record import last_ended

    ASKED_AT.set(restart.began_at() or psutil.Process().create_time())
    signals.begin()
    try:
        train(asked.config, resume=asked.resume)
    except GateFailed as failed:
        print(f"gate.fail: the run is {failed}", file=sys.stderr)
        return 1
    except Exception as error:
        ended = last_ended()
        if isinstance(error, TransportError):
            _prefect_away.set()
        if asked.debug:
            raise
        if ended is None or ended.run["status"] != "FINISHED":
            _plan_retry(asked, error)
            if ended is None or not _prefect_away.is_set():
                raise
            raise RuntimeError(ended.run["error"]) from error  # what Prefect's own error hides
        print(f"trained, but Prefect could not record its end: {error}", file=sys.stderr)
        show(ended.run)
    return 0


def _plan_retry(asked: Namespace, error: Exception) -> None:
    """Another start after this one's end, in a new process, where the failure is one that it may
    cure. A first start that has not opened its run has its user there."""
    if attempts.is_launched():  # torchrun starts it again, with the others
        return
    from tasks.failures import classify
    from tasks.record import last_ended
    from tasks.resume import plan_retry

    ended = last_ended()
    folder = ended.folder if ended is not None else restart.follows()
    failure = (ended.failure if ended is not None else None) or classify(error)
    if folder is not None and (retry := plan_retry(folder, failure, asked.config)) is not None:
        words = resumed(asked.words, retry.folder) if retry.step else asked.words
        restart.plan(words, at=retry.at, of=retry.folder, told=str(retry))


def _set_up_prefect(api_url: str | None, *, debug: bool) -> None:
    """Settings that Prefect reads when it is imported."""
    if api_url is not None:
        os.environ["PREFECT_API_URL"] = api_url
    os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "tasks")
    for name, value in local_prefect.TRIES_AGAIN.items():
        os.environ.setdefault(name, value)
    if not debug:
        logging.raiseExceptions = False  # else Prefect prints each line that it can't send
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
        os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")
    _tell_lines()
