"""Shows in Prefect which run has a device, and which waits for one: a concurrency limit of
one slot a device, and a state of the flow run. It decides nothing: that does the lease of
the host, which needs no server. A Prefect that is away, or behind, is no reason to wait or
to fail.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLeaseHolder, State
from prefect.runtime import flow_run
from prefect.states import Running

FREE_AFTER_S = 60.0  # of a slot whose holder is gone, as Prefect shows it; the least it takes
PATIENCE_S = 1.0  # for the slot of a holder that is gone
log = logging.getLogger(__name__)


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
