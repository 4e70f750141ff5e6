"""The flow run that this process is, where it is one: what leads to it from MLflow, and what is
shown in it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import UUID

from httpx import HTTPStatusError, TransportError
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import get_client
from prefect.context import SettingsContext, get_settings_context
from prefect.runtime import deployment, flow_run
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)
from prefect.utilities import engine

from headroom.base.names import make_parent_tags
from headroom.prefect.local_prefect import is_temporary_api
from headroom.prefect.prefect_http import TAG as PROCESS_TAG
from headroom.prefect.run_task import IS_RECORDED
from headroom.process import signals
from headroom.process.redaction import redact, remove_login

log = logging.getLogger(__name__)


def raise_signals() -> None:
    """Raise a signal as an exception from now on, within a flow, too: Prefect would put a handler
    of its own in our place for as long as a flow runs, and that raises anywhere."""
    engine._prefect_sigterm_handler = signals.handle_signal  # type: ignore[assignment]
    signals.enable_signal_exceptions()


@contextmanager
def forget_prefect() -> Iterator[None]:
    """Let nothing be told to Prefect in the block, nor by the process that sends the run."""
    api = os.environ.pop("PREFECT_API_URL", None)
    token = IS_RECORDED.set(False)
    try:
        with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}):
            yield
    finally:
        IS_RECORDED.reset(token)
        if api is not None:
            os.environ["PREFECT_API_URL"] = api


def move_process_tag() -> None:
    """Move the name of this process from the tags of its flow run, which people read, to a field
    that only programs do: by it a flow run is ended whose process is gone."""
    named = [tag for tag in flow_run.tags or [] if tag.startswith(f"{PROCESS_TAG}:")]
    if not named or not flow_run.id:
        return
    others = [tag for tag in flow_run.tags if tag not in named]
    with suppress(TransportError, HTTPStatusError), get_client(sync_client=True) as client:
        client.update_flow_run(UUID(str(flow_run.id)), tags=others, infrastructure_pid=named[0])


def make_flow_run_tags() -> dict[str, str]:
    """Return the tags that lead from MLflow to this flow run; empty outside of one."""
    part_of = make_parent_tags()
    if not flow_run.id:
        return part_of
    tags = {**part_of, "prefect.flow_run_id": flow_run.id, "prefect.deployment": deployment.name}
    if not is_temporary_api(PREFECT_API_URL.value() or ""):
        tags["prefect.flow_run_url"] = remove_login(flow_run.ui_url or "")
    return {k: str(v) for k, v in tags.items() if v}


def show_markdown(text: str, key: str, title: str) -> bool:
    """Show the text as an artifact of this flow run, and return whether Prefect took it: that it is
    away is only logged."""
    if not IS_RECORDED.get():
        return False
    try:
        create_markdown_artifact(text, key=key, description=title)
        return True
    except (TransportError, HTTPStatusError) as error:
        log.warning("no report in Prefect: %s", redact(str(error)))
        if "PREFECT__FLOW_RUN_ID" not in os.environ:  # the end of a command does not wait once more
            here = get_settings_context()
            once = here.settings.copy_with_update({PREFECT_CLIENT_MAX_RETRIES: 0})
            SettingsContext(profile=here.profile, settings=once).__enter__()
        return False
