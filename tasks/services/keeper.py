"""The part of the service that looks after the others: it starts again what has died, and once a
minute puts right in Prefect what no process says any more, and sees to it that what was not sent is
sent. It imports neither Prefect nor MLflow, and ends nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from tasks.services.processes import KEEPER, Part, ServeError, find_parts, is_running
from tasks.services.service import ServicePlan, put_right

LOOK_S = 5.0  # between two looks at the parts
PASS_S = 60.0  # between two passes
AGAIN_S, LONGEST_S = 10.0, 300.0  # after a start that failed


def keep(
    folder: Path,
    brought_up: Callable[[], ServicePlan],
    send: Callable[[], None],
    *,
    looks: Callable[[float], None] = time.sleep,
) -> None:
    """Look after the parts of the service, for ever.

    brought_up: starts what is missing. send: sees to what was not sent. Raises what `looks`
    raises.
    """
    plan, pause_s, pass_at = _bring_up_patiently(brought_up, looks), AGAIN_S, 0.0
    up = add_keeper(find_parts(folder))
    while True:
        if missing := [name for name in plan.addresses if not _is_up(name, up)]:
            up = add_keeper(find_parts(folder))  # somebody else may have started it
            missing = [name for name in plan.addresses if name not in up]
        if missing:
            print(f"{_format_now()} {', '.join(missing)}: had ended", flush=True)
            plan = _bring_up_patiently(brought_up, looks)
            up, pass_at = add_keeper(find_parts(folder)), 0.0
            looks(pause_s)  # what ends at once is not started a hundred times
            pause_s = min(LONGEST_S, 2 * pause_s)
        elif time.monotonic() > pass_at:
            if pass_at:
                pause_s = AGAIN_S  # all has lived for a pass
            _run_pass(plan, up, send)
            pass_at = time.monotonic() + PASS_S
        looks(LOOK_S)


def add_keeper(up: Mapping[str, Part]) -> dict[str, Part]:
    """Return what is up, and this process, which does not find itself."""
    return {KEEPER: Part(ADDRESS, psutil.Process()), **up}


ADDRESS = "starts the others again"  # what `status` shows of it


def _is_up(name: str, up: Mapping[str, Part]) -> bool:
    return name in up and is_running(up[name].process)


def _bring_up_patiently(
    brought_up: Callable[[], ServicePlan], looks: Callable[[float], None]
) -> ServicePlan:
    pause_s = AGAIN_S
    while True:
        try:
            return brought_up()
        except ServeError as error:
            print(f"{_format_now()} {error}; again in {pause_s:.0f} s", file=sys.stderr, flush=True)
        looks(pause_s)
        pause_s = min(LONGEST_S, 2 * pause_s)


def _run_pass(plan: ServicePlan, up: Mapping[str, Part], send: Callable[[], None]) -> None:
    try:
        if done := put_right(plan, up):
            print(f"{_format_now()} put right in Prefect: {', '.join(done)}", flush=True)
        send()
    except (OSError, ValueError, LookupError, TypeError) as error:  # no answer, or none of Prefect
        print(f"{_format_now()} the pass failed: {error}", file=sys.stderr, flush=True)


def _format_now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
