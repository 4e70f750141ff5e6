"""A run as Prefect's flow sees it: how it is named, opened, published and tried again; what Prefect
knows of it, as tags; and the flow that does more where Python calls it than where a worker runs
it. Prefect is shown which run has a device, and which waits for one, by a concurrency limit of one
slot a device: it decides nothing, that does the lease of the host, so that a Prefect that is away
is no reason to wait or to fail."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace
from datetime import UTC, datetime
from inspect import Signature, signature
from typing import Any
from uuid import UUID

import psutil
from httpx import HTTPStatusError, TransportError
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLeaseHolder, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import Pause
from prefect.runtime import deployment, flow_run
from prefect.settings import (
    PREFECT_API_URL,
    get_current_settings,
)
from prefect.states import AwaitingRetry, Completed, Running
from pydantic_core import to_jsonable_python
from rich.console import Console

from headroom.base.units import make_printable
from headroom.prefect.local_prefect import find_server_log, is_temporary_api
from headroom.prefect.prefect_http import is_healthy, make_flow_run_end
from headroom.prefect.run_task import CURRENT_RUN
from headroom.prefect.this_flow_run import (
    forget_prefect,
    make_flow_run_tags,
    move_process_tag,
    show_markdown,
)
from headroom.process import command, signals
from headroom.process.redaction import (
    redact,
    redact_errors,
    redact_logs,
    redact_nested,
)
from headroom.report import run_report
from headroom.report.report_sections import make_report
from headroom.run.failures import classify_failure
from headroom.run.gate import GateFailed
from headroom.run.preflight import resolve_and_check
from headroom.run.record import Record, find_last_ended
from headroom.run.resume import Retry, make_default_name, plan_retry
from headroom.settings.read_settings import ConfigError, make_config, override_config
from headroom.settings.run_config import RunConfig

log = logging.getLogger(__name__)
FREE_AFTER_S = 60.0  # of a slot whose holder is gone, as Prefect shows it; the least it takes
NAME_LETTERS = 120  # of a flow run that is refused
PATIENCE_S = 1.0  # for the slot of a holder that is gone
EXIT_S = 10.0  # for a process that is to be started again to end
# Unix time at which somebody asked for this run.
ASKED_AT: ContextVar[float | None] = ContextVar("ASKED_AT", default=None)
_begun: ContextVar[threading.Event | None] = ContextVar("_begun", default=None)  # the flow itself


def run_at_desk(flow: Callable[..., Any], function: Callable[..., Any], **arguments: Any) -> Any:
    """Return what the flow returns. Its function is called alone where the server that this desk
    has started fails before the flow has begun: it would only show the run. A server that somebody
    has named is waited for, and missed."""
    api = PREFECT_API_URL.value() or ""
    if not is_temporary_api(api):
        return flow(**arguments)
    begun = threading.Event()
    token = _begun.set(begun)
    try:
        if is_healthy(f"{api}/health"):
            return flow(**arguments)
        why = "no answer"
    except (TransportError, HTTPStatusError, RuntimeError) as error:
        if begun.is_set() or not _is_of_server(error):
            raise
        why = redact(str(error)).splitlines()[0] or type(error).__name__
    finally:
        _begun.reset(token)
    command.leave_prefect()
    with forget_prefect():
        log.warning(
            "Prefect's server of this desk, %s, fails (%s; see %s): this goes on without it, and "
            "is not shown in Prefect",
            *(api, why, find_server_log()),
        )
        result = function(**arguments)
        # A training gives Prefect a state.
        return result.data if isinstance(result, State) else result


def mark_begun() -> None:
    """Say that the function of the flow has begun: from here on it is not called once more."""
    if (begun := _begun.get()) is not None:
        begun.set()


def _is_of_server(error: Exception) -> bool:
    if isinstance(error, HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, TransportError) or str(error).startswith("Failed to reach API")


def make_run_name() -> str:
    """Return what a training is called, in Prefect as in MLflow: as asked, else by what it trains
    on what and when; one whose settings are wrong by what is wrong, which is then the first that
    Prefect shows and logs of it. Prefect asks for it when the flow begins."""
    parameters = flow_run.parameters or {}
    config = parameters.get("config") or {}
    try:
        if not isinstance(config, RunConfig):
            config = make_config(config)
        config = override_config(config, parameters.get("overrides"))
    except ConfigError as error:
        return make_printable(f"refused: {redact(error.problems[0])}", limit=NAME_LETTERS)
    return make_default_name(config)


@contextmanager
def open_run(
    config: RunConfig, overrides: Mapping[str, Any] | None = None, *, resume: str | None = None
) -> Iterator[Record]:
    """Yield the run of this flow run, which holds its settings; it ends with its true status, in
    MLflow and Prefect, by whatever door it is left. No error that leaves it shows a secret.

    overrides: dotted names over the settings. resume: the run to go on with. Raises ConfigError and
    DataError for what can't work, before anything is spent.
    """
    mark_begun()
    with redact_errors():
        run = Record(
            resolve_and_check(config, overrides),
            flow_run=_prepare_flow_run(),
            name=flow_run.name,
            waited_s=_count_waited_s(),
            resume=resume,
            key=_make_own_key(),
            show_waiting=show_waiting,
            take_device_slot=take_device_slot,
        )
    try:
        with schedule_retry(run), redact_errors(), run:
            token = CURRENT_RUN.set(run)
            try:
                yield run
            finally:
                CURRENT_RUN.reset(token)
    except (KeyboardInterrupt, SystemExit):  # by a signal
        if deployment.id:
            _show_interruption(run)
        raise


def _show_interruption(record: Record) -> None:
    """Show the report of a run that was cancelled, with where MLflow has it and what goes on."""
    with suppress(Exception):  # it is to end now
        finished = record.run
        report = run_report.make_markdown(finished, open_command="")
        text = f"{make_flow_run_end(finished).cancelled}\n\n{report}"
        headline = ", ".join(make_report(finished).headline)
        show_markdown(text, make_artifact_key("report", finished["name"]), headline)


def show_waiting(reason: str) -> None:
    """Give this flow run a state that says what it waits for.

    An empty reason: it waits no more.
    """
    if not flow_run.id:
        return
    state: State = Running(name="AwaitingDevice", message=reason) if reason else Running()
    with suppress(Exception), get_client(sync_client=True) as client:
        client.set_flow_run_state(UUID(flow_run.id), state, force=True)


@contextmanager
def take_device_slot(device: str) -> Iterator[None]:
    """Take the slot of the concurrency limit named after the device, for the block."""
    from prefect.concurrency.sync import concurrency  # some ms that a start-up can do without

    stack = ExitStack()
    try:
        if flow_run.id:
            with get_client(sync_client=True) as client:
                client.upsert_global_concurrency_limit_by_name(device, limit=1)
            holder = ConcurrencyLeaseHolder(type="flow_run", id=UUID(flow_run.id))
            slot = concurrency(
                device,
                timeout_seconds=PATIENCE_S,
                lease_duration=FREE_AFTER_S,
                holder=holder,
                raise_on_lease_renewal_failure=False,
            )
            stack.enter_context(slot)
    except Exception as error:  # of any kind: it is only shown
        log.debug("%s: not shown in Prefect: %s", device, error)
    try:
        yield
    finally:
        with suppress(Exception):  # the server may have gone since
            stack.close()


def publish_run(run: Record) -> Any:
    """Put the report of a run that has ended where Prefect's UI shows it, and return the run as the
    flow's result: for Prefect in a state of its own where it is not done, did not pass its gate, or
    MLflow has not got all of it. Raises GateFailed where the gate is to fail."""
    finished = run.run
    opens = (
        finished["open_command"] if finished["run_id"] else ""
    )  # MLflow may not know the run yet
    page = next((word for word in opens.split() if word.startswith("http")), "")
    text = run_report.make_markdown(finished, open_command="" if opens == page else opens)
    headline = ", ".join(make_report(finished).headline)
    link = f"[Open it in MLflow]({page})\n\n" if page else ""
    if show_markdown(link + text, make_artifact_key("report", finished["name"]), headline):
        _show_tags(finished["tags"])
    end = make_flow_run_end(finished, finished.get("unsent", ""))
    if end.type == "FAILED":
        raise GateFailed(finished)
    said = end.message if end.name else headline
    return Completed(name=end.name or None, message=f"{said}\n{page}".strip(), data=finished)


def make_artifact_key(kind: str, name: str) -> str:
    """Return the key of an artifact: by it Prefect keeps the ones of equal runs as versions of one,
    and its pages show it as the title, in words that they can wrap."""
    return re.sub(r"[^a-z0-9]+", "-", f"{kind}-{name}".lower())[:60].strip("-")


def _show_tags(tags: Mapping[str, str]) -> None:
    """Show in Prefect's list of runs where this one trained, and how it passed its gate."""
    if not deployment.id:  # of a command it is in the report on the terminal
        return
    shown = [f"{name}:{tags[name]}" for name in ("device", "gate") if tags.get(name)]
    with suppress(TransportError, HTTPStatusError), get_client(sync_client=True) as client:
        client.update_flow_run(UUID(str(flow_run.id)), tags={*flow_run.tags, *shown})


def plan_command_retry(error: Exception, config: RunConfig) -> Retry | None:
    """Return the next start of a command whose training has failed by this error.

    None where a new process would not help, and for a first start that has not opened its run:
    its user is there.
    """
    ended = find_last_ended()
    folder = ended.folder if ended is not None else command.find_failed_folder()
    failure = (ended.failure if ended is not None else None) or classify_failure(error)
    return plan_retry(folder, failure, config) if folder is not None else None


class CalledFlow(Flow[..., Any]):
    """A Prefect flow that does more where Python calls it: `call` is given the plain call and its
    arguments. Of these Prefect keeps, and shows, what `shown` makes of them; the flow gets them as
    they are."""

    def __init__(
        self,
        fn: Any,
        *,
        call: Callable[..., Any] | None = None,
        shown: Callable[[dict[str, Any]], dict[str, Any]],
        form: Callable[[Flow[..., Any]], Signature] | None = None,
        **settings: Any,
    ) -> None:
        """form: makes the signature that Prefect's form shows, when it is asked for."""
        super().__init__(fn, **settings)
        self.call, self.shown, self._form = call, shown, form

    @property
    def __signature__(self) -> Signature:
        """Return what `prefect deploy` makes the form of."""
        return signature(self.fn) if self._form is None else self._form(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.call is None:
            return super().__call__(*args, **kwargs)
        return self.call(super().__call__, *args, **kwargs)

    def serialize_parameters(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return what Prefect keeps of them; its own method imports fastapi for that, 0.3 s."""
        kept = {name: _make_plain(value) for name, value in self.shown(parameters).items()}
        serialized: dict[str, Any] = redact_nested(kept)
        return serialized


def _make_plain(value: Any) -> Any:
    """Return the value as JSON may hold it; what has no such form is told by its type."""
    try:
        return to_jsonable_python(value, fallback=_name_type)
    except (ValueError, RecursionError):  # it holds itself
        return _name_type(value)


def _name_type(value: Any) -> str:
    return f"<{type(value).__name__}>"


class Ended(RuntimeError):
    """A flow run that failed, in words that begin with the class of the failure."""


@contextmanager
def schedule_retry(record: Record) -> Iterator[None]:
    """Leave the flow run for its worker to start again, where a new process may cure a failure.

    Any other failure says its class in Prefect too.
    """
    try:
        yield
    except Exception as error:
        # A part of somebody's own flow has an error to tell there, in the same process.
        if not _make_own_key() or flow_run.id != os.environ.get("PREFECT__FLOW_RUN_ID"):
            raise
        failure = record.failure or classify_failure(error)
        retry = plan_retry(record.folder, failure, record.config, starts=flow_run.run_count)
        if retry is None:
            raise Ended(f"{failure.kind}: {failure.said}") from error
        # A worker with a limit dies of a run that it finds scheduled while it still runs it
        # (Prefect 3.8, acquire_on_behalf_of_nowait), and it looks some seconds ahead.
        ahead_s = get_current_settings().worker.prefetch_seconds + 2 * EXIT_S
        retry = replace(retry, at=max(retry.at, time.time() + ahead_s))
        log.warning("%s", retry)
        at = datetime.fromtimestamp(retry.at, UTC)
        state: State[None] = AwaitingRetry(scheduled_time=at, message=f"{failure.said}\n{retry}")
        with get_client(sync_client=True) as client:
            answer = client.set_flow_run_state(UUID(str(flow_run.id)), state)
        if answer.status != SetStateStatus.ACCEPT:  # somebody has cancelled it
            raise
        hung = threading.Timer(EXIT_S, os._exit, [0])
        hung.daemon = True
        hung.start()
        raise Pause(state=answer.state) from None  # "needs to exit for resubmission"


def _prepare_flow_run() -> dict[str, str]:
    """Return the tags of this flow run.

    From here on Prefect's UI shows what the tasks log: by default a logger passes warnings only.
    """
    logging.getLogger("headroom").setLevel(logging.INFO)
    redact_logs()
    move_process_tag()
    if os.environ.get("PREFECT__FLOW_RUN_ID"):  # a worker has started it, and reads what it prints
        outlive_the_worker()
    return make_flow_run_tags()


def _make_own_key() -> str:
    """Return what a flow run that Prefect starts again is known by; empty for one that runs
    once."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun starts lost processes again
        return f"torchrun {os.environ.get('TORCHELASTIC_RUN_ID', '')}".strip()
    return f"flow run {flow_run.id}" if deployment.id and flow_run.id else ""


def _count_waited_s() -> float:
    """Return the seconds that a person has waited for this run by now; a worker's process is there
    for it."""
    began = ASKED_AT.get()
    if began is None and "PREFECT__FLOW_RUN_ID" in os.environ:
        began = psutil.Process().create_time()
    return 0.0 if began is None else max(0.0, time.time() - began)


def outlive_the_worker() -> None:
    """Go on where the worker has died: rich, through which Prefect logs, would end the process at
    the next line, and a user's print() would fail."""
    signals.protect_standard_streams()
    Console.on_broken_pipe = _go_on  # type: ignore[method-assign]


def _go_on(self: Console) -> None:
    return None
