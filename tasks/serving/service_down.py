"""Takes the service down so that nothing is lost: first the runs, each of which gives its memory
back and closes its record; then the worker, the server and MLflow. Ends nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.serving import prefect_http, systemd_unit
from tasks.serving.prefect_http import FLOW_RUN
from tasks.serving.processes import KEEPER, PART, STORES, WORKER, await_end, end, marked, parts

RUN_S = 90.0  # for runs to end: give the device back, and send what MLflow has not got yet


def take_down(folder: Path, *, but: Collection[str] = ()) -> None:
    """End all parts `but` some, and whatever they started that is still there.

    A training that goes on although its worker or the server has died is left alone: nobody could
    end it in good order, and the next `up` takes it over.
    """
    up = parts(folder)
    workers = [part.process for name, part in up.items() if name.startswith(WORKER)]
    spares = bool(but) or not workers or "prefect" not in up
    if not spares:
        _end_workers(folder, workers, f"{up['prefect'].address}/api")
    # The keeper first, which would start the others again; the stores last: still written to.
    for name, part in sorted(up.items(), key=lambda p: (p[0] in STORES, p[0] != KEEPER)):
        if name in but:
            continue
        if spares and name.startswith(WORKER):
            part.process.kill()  # told to end, it would take its run with it
        end([part.process], wait_s=20)
    _sweep(folder, spares=spares, but=but)


def end_keeper(folder: Path) -> None:
    """So that nothing is started again that is taken down."""
    systemd_unit.remove(folder)
    if KEEPER in (up := parts(folder)):
        end([up[KEEPER].process], wait_s=20)


def _end_workers(folder: Path, workers: Sequence[psutil.Process], api: str) -> None:
    """A worker that is told to end while a run goes on kills the run's process the hard way: no
    `finally`, and the run says Running for ever. So the runs are cancelled before."""
    is_paused = False
    try:
        with suppress(OSError):  # no answer: then it hands out no runs either
            if not prefect_http.is_paused(api):
                prefect_http.pause(api, paused=True)  # else the worker would start the next one
                is_paused = True
        _end_runs(folder, workers, api)
        end(workers, wait_s=20)
    finally:
        if is_paused:
            with suppress(OSError):
                prefect_http.pause(api, paused=False)


def _end_runs(folder: Path, workers: Sequence[psutil.Process], api: str) -> None:
    """Cancel the workers' runs as the UI would; it signals their processes, which give their memory
    back and close their records. Those of a worker that has died none of these knows."""
    runs = {p: env[FLOW_RUN] for p, env in marked(folder).items() if FLOW_RUN in env}
    if not runs:
        return
    ids = sorted(set(runs.values()))
    print(f"Cancelling {len(ids)} run{'s' * (len(ids) > 1)} ...", flush=True)
    signalled: set[psutil.Process] = set()
    with suppress(OSError, psutil.Error):  # no answer: then the signal that it would have sent
        family = {child for worker in workers for child in worker.children(recursive=True)}
        for run in ids:
            prefect_http.cancel(api, run)
        signalled = family
    end([p for p in runs.keys() - signalled if not _ends_by_itself(p)], wait_s=RUN_S)
    late = [p for p in await_end(runs, wait_s=RUN_S) if not _ends_by_itself(p)]
    for run in sorted({runs[process] for process in late}):
        print(f"run {run} has not ended within {RUN_S:.0f} s; its process is killed")
    end(late, wait_s=0)
    with suppress(OSError):
        for run in ids:
            prefect_http.confirm_cancelled(api, run)


def _sweep(folder: Path, *, spares: bool, but: Collection[str]) -> None:
    """What is left of ours; `spares` the runs, e.g. one whose worker has died before."""
    ours = {p: e for p, e in marked(folder).items() if e.get(PART, "").split(" ")[0] not in but}
    runs = {p for p, environment in ours.items() if spares and FLOW_RUN in environment}
    if runs:
        print("A run goes on without its service; `make serve` takes it over.", flush=True)
    left = ours.keys() - runs
    end([process for process in left if not _ends_by_itself(process)], wait_s=RUN_S)
    end(await_end(left, wait_s=RUN_S), wait_s=5)


def _ends_by_itself(process: psutil.Process) -> bool:
    """Whether it is a run's sending process: it ends when the run has, and all is in MLflow."""
    with suppress(psutil.Error):
        return "tasks.tracking.mlflow_sender" in process.cmdline()
    return False
