"""Runs a training from a command line: settings from its flags, a Prefect server if none is set,
the report in the terminal, and an exit code that says what happened: 0 trained, 1 failed, 2 bad
input, 130 interrupted, 143 terminated. Or only describes it, by --dry-run, --forecast and
--explain-device. What is slow to import is imported when the settings are right.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from functools import partial
from typing import Any

import psutil

from flows.cli.flags import make_resume_words, parse_training
from headroom.base.program import print_answer
from headroom.base.units import make_printable
from headroom.launch import launcher
from headroom.prefect import local_prefect, prefect_http
from headroom.process import command, signals
from headroom.process.redaction import redact, redact_output
from headroom.settings import read_settings
from headroom.settings.read_settings import (
    ConfigError,
    check_imports,
    dump_yaml,
    hide_config_secrets,
    restore_config_secrets,
)
from headroom.tracking import journal
from headroom.tracking.tracking_settings import TrackingError, read_tracking_settings


def main(argv: Sequence[str]) -> int:
    """Run what the command line says. Returns the exit code."""
    code = launcher.read_final_code()
    return launcher.keep_exit_code(_run_command(argv)) if code is None else code


def run_with_server(run_flow: Callable[[], int], *, debug: bool) -> int:
    """Run a flow with a Prefect server, and return the exit code.

    Prefect must not be imported yet. The code is what `run_flow` returns, or that of the error
    that ends it, which is printed; with `debug` it is raised again.
    """
    home, api_url = local_prefect.find_prefect_home(), None
    with ExitStack() as server:
        try:
            if local_prefect.is_needed():
                api_url = server.enter_context(local_prefect.share_server(home))
        except OSError as error:
            print(f"PREFECT_HOME: {home}: {error.strerror}", file=sys.stderr)
            return 2
        except ConfigError as error:
            print(error, file=sys.stderr)
            return 2
        _set_up_prefect(api_url, debug=debug)
        return _run_reporting_errors(run_flow, debug=debug)


@contextmanager
def set_up_call() -> Iterator[None]:
    """Do for a call from Python what `run_with_server` does for a command.

    A shared server where none is named, our lines and none of Prefect's. Afterwards all is
    as it was.
    """
    from prefect import tags
    from prefect.logging.handlers import PrefectConsoleHandler
    from prefect.settings import (
        PREFECT_API_URL,
        PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
        temporary_settings,
    )

    from headroom.prefect_flows.flow_run import ASKED_AT

    if ASKED_AT.get() is not None:  # the command itself
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(tags(prefect_http.make_flow_run_tag()))
        stack.callback(ASKED_AT.reset, ASKED_AT.set(time.time()))
        settings: dict[Any, Any] = {}
        if local_prefect.is_needed() and not PREFECT_API_URL.value():
            url = stack.enter_context(local_prefect.share_server(local_prefect.find_prefect_home()))
            settings = {PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
        stack.enter_context(temporary_settings(settings))  # also undoes what publish() sets
        for logger in map(logging.getLogger, (None, *logging.root.manager.loggerDict)):
            for handler in logger.handlers:
                if isinstance(handler, PrefectConsoleHandler):
                    stack.callback(handler.setLevel, handler.level)
                    handler.setLevel(logging.CRITICAL)
        stack.callback(logging.getLogger("headroom").removeHandler, _log_to_stderr())
        journal.warm_up(read_tracking_settings())
        yield


def print_report(run: Mapping[str, Any]) -> None:
    """Print the report of a run."""
    from rich.console import Console

    from headroom.report import run_report

    command = run["open_command"] if run["run_id"] else ""  # MLflow may not know it yet
    Console(file=sys.stdout).print(
        run_report.make_terminal_report(run, open_command=command), crop=False
    )


def _print_dry_run(request: Namespace) -> int:
    """Print the settings as they would be used, and the device. Returns the exit code."""
    from headroom.device.detection import DeviceError, detect_best_device

    print(dump_yaml(hide_config_secrets(request.config).model_dump()), end="")
    for line in read_settings.describe_unused_settings(request.config):
        print(f"# {line}")
    try:
        facts = detect_best_device(request.config.device.name)
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"# device: {facts.name}: {facts.reason}")
    return 0


def _print_forecast(request: Namespace) -> int:
    """Print the memory that the training would take. Returns the exit code."""
    from rich.console import Console

    from headroom.run.preflight import BAD_INPUT
    from headroom.training.gpu_fit import (
        conclude_fits,
        describe_fits,
        make_gpu_table,
        make_layer_table,
        parse_asked_sizes,
    )
    from tasks.forecast_memory import forecast_memory, forecast_on_gpus

    try:
        if request.elsewhere is not None or request.required:
            sizes, required = parse_asked_sizes(request.elsewhere, request.required)
            gpus = forecast_on_gpus(request.config, sizes)
            if request.json:
                print_answer(describe_fits(gpus, required))
            else:
                Console().print(make_gpu_table(gpus, request.config.train.batch_size))
            return conclude_fits(gpus, required)
        foreseen = forecast_memory(request.config)
    except BAD_INPUT as error:
        print(error, file=sys.stderr)
        return 2
    if request.json:
        print_answer(foreseen.describe())
    else:
        Console().print(foreseen.make_table(), make_layer_table(foreseen.memory))
    return 0 if foreseen.fits else 2


def _print_device_checks(request: Namespace) -> int:
    """Print what was found of devices, and what is missing. Returns the exit code."""
    from rich.console import Console
    from rich.table import Table

    from headroom.device.detection import explain_choice

    table, signs = Table("check", "ok", "finding", "remedy"), {True: "yes", False: "NO", None: "-"}
    for check in explain_choice(request.config.device.name):
        table.add_row(check.name, signs[check.ok], check.finding, check.remedy)
    Console().print(table)
    return 0


def _run_command(argv: Sequence[str]) -> int:
    redact_output()
    try:
        request = parse_training(argv)
        if request.explain_device:
            return _print_device_checks(request)
        request.config = restore_config_secrets(request.config)
        check_imports(request.config)
        if request.dry_run:
            return _print_dry_run(request)
        if request.forecast:
            return _print_forecast(request)
        return _train(request)
    except (ConfigError, TrackingError) as error:
        print(redact(str(error)), file=sys.stderr)
        return 2


def _train(request: Namespace) -> int:
    if request.config.launch.machines:  # before it is imported: of names that no server knows
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if launcher.read_rank():  # of torchrun; the first runs the flow
        from headroom.launch import rank

        return rank.follow_lead(request.config)
    data, model = request.config.data, make_printable(request.config.model.name, limit=60)
    subject = f"{model} on {make_printable(data.path or data.source, limit=60)}"
    print(f"{subject}: loading PyTorch, Prefect and MLflow ...", file=sys.stderr, flush=True)
    with command.pause_collection():
        from headroom.data.preparation import check_data
        from headroom.data.source_data import DataError

    try:
        check_data(request.config.data)
    except DataError as error:
        print(redact(str(error)), file=sys.stderr)
        return 2
    if request.config.launch.machines and not launcher.is_launched():
        from headroom.launch.machines import train_on_machines

        _log_to_stderr()
        return train_on_machines(request.config, request.words)
    journal.warm_up(read_tracking_settings())
    return run_with_server(partial(_run_flow, request), debug=request.debug)


def _run_reporting_errors(run_flow: Callable[[], int], *, debug: bool) -> int:
    try:
        with command.pause_collection():
            from prefect import tags
            from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

        # A heartbeat tells a distant server that a run is alive; here it costs 0.9 s at the exit.
        heartless = temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
        with heartless, tags(prefect_http.make_flow_run_tag()):
            return run_flow() or signals.find_exit_code() or 0
    except BaseException as error:
        from headroom.run.preflight import BAD_INPUT

        # Whatever a signal has become on its way up.
        if isinstance(error, KeyboardInterrupt) or signals.find_exit_code():
            print(signals.describe_signal(), file=sys.stderr)
            return signals.find_exit_code() or 130
        if isinstance(error, BAD_INPUT):
            print(redact(str(error)), file=sys.stderr)
            return 2
        if debug and isinstance(error, Exception):
            raise
        from prefect.settings import PREFECT_API_URL

        from headroom.ranks.ranks import RestartableError

        api = PREFECT_API_URL.value() or ""
        if str(error).startswith("Failed to reach API") and not local_prefect.is_temporary_api(api):
            remedy = "does not answer; start that server, or name none: a run then starts its own"
            print(f"PREFECT_API_URL: {redact(api)} {remedy}", file=sys.stderr)
            return 2
        print(f"failed: {redact(str(error))}", file=sys.stderr)
        return launcher.AGAIN if isinstance(error, RestartableError) else 1


def _log_to_stderr() -> logging.Handler:
    """Send the lines of the tasks to stderr; return the handler that does it."""
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("headroom").addHandler(console)
    logging.getLogger("headroom").setLevel(logging.INFO)
    return console


def _run_flow(request: Namespace) -> int:
    with _answer_at_the_end() if request.json else nullcontext():
        code = _train_in_flow(request)
    # The exit code is that of the record: whoever sees that of a signal trains once more.
    signals.forget_signal()
    signals.disable_signal_exceptions(code)
    return code


@contextmanager
def _answer_at_the_end() -> Iterator[None]:
    """Let stdout have the answer for a program alone, however the training ends."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        from headroom.report.answers import describe_run
        from headroom.run.record import find_last_ended

        ended = None if command.is_restart_planned() else find_last_ended()
        if ended is not None:
            print_answer(describe_run(ended.run))


def _train_in_flow(request: Namespace) -> int:
    with command.pause_collection():
        from httpx import TransportError

        from flows.train import train
        from headroom.prefect import this_flow_run
        from headroom.prefect_flows.flow_run import ASKED_AT
        from headroom.run.gate import GateFailed
        from headroom.run.preflight import mark_checked
        from headroom.run.record import find_last_ended

    command.spare_imports()
    ASKED_AT.set(command.find_restart_time() or psutil.Process().create_time())
    this_flow_run.raise_signals()
    try:
        with mark_checked(request.config):
            train(request.config, resume=request.resume)
    except GateFailed as failed:
        print(f"gate.fail: the run is {failed}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, SystemExit):  # a signal
        ended = find_last_ended()
        status = ended.run.get("status") if ended is not None else None
        if ended is None or status not in ("FINISHED", "FAILED"):
            raise
        message = f"{signals.describe_signal()} when the training had ended: {status} in MLflow"
        print(message, file=sys.stderr)
        print_report(ended.run)
        return 0 if prefect_http.make_flow_run_end(ended.run).type == "COMPLETED" else 1
    except Exception as error:
        ended = find_last_ended()
        is_away = isinstance(error, TransportError)
        if is_away:
            command.leave_prefect()
        if request.debug:
            raise
        if ended is None or ended.run["status"] != "FINISHED":
            _plan_retry(request, error)
            if ended is None or not is_away:
                raise
            raise RuntimeError(ended.run["error"]) from error  # what Prefect's own error hides
        print(f"trained, but Prefect could not record its end: {error}", file=sys.stderr)
        print_report(ended.run)
    return 0


def _plan_retry(request: Namespace, error: Exception) -> None:
    """Plan a restart after this process, where the failure is one that a new process may cure."""
    from headroom.prefect_flows.flow_run import plan_command_retry

    if launcher.is_launched():  # torchrun starts it again, with the others
        return
    if (retry := plan_command_retry(error, request.config)) is not None:
        words = make_resume_words(request.words, retry.folder) if retry.step else request.words
        command.plan_restart(words, at=retry.at, of=retry.folder, message=str(retry))


def _set_up_prefect(api_url: str | None, *, debug: bool) -> None:
    """Set what Prefect reads when it is imported."""
    if api_url is not None:
        os.environ["PREFECT_API_URL"] = api_url
    os.environ.setdefault("PREFECT_LOGGING_EXTRA_LOGGERS", "headroom")
    for name, value in local_prefect.TRIES_AGAIN.items():
        os.environ.setdefault(name, value)
    if not debug:
        logging.raiseExceptions = False  # else Prefect prints each line that it can't send
        os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
        os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")
    _log_to_stderr()
