"""Takes the service down so that nothing is lost: first the runs, each of which gives its memory
back and closes its record; then the worker, the server and MLflow. Ends nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.serving import prefect_http
from tasks.serving.processes import Component, await_end, end, marked, remember

RUN_S = 90.0  # for runs to end: give the device back, and send what MLflow has not got yet


def take_down(
    components: Sequence[Component], folder: Path, *, but: Sequence[Component] = ()
) -> None:
    """End all of them `but` some, and whatever they started that is still there.

    A training that goes on although its worker or the server has died is left alone: nobody could
    end it in good order, and the next `up` takes it over.
    """
    by_name = {c.name: c for c in components}
    worker, server = by_name.get("worker"), by_name.get("prefect")
    lives = [c.process() is not None for c in (worker, server) if c is not None]
    spares = bool(but) or not all(lives)
    if worker is not None and server is not None and not spares:
        _end_worker(worker, f"{server.address}/api")
    for component in components:
        process = component.process()
        if process is None or component in but:
            continue
        if spares and component is worker:
            process.kill()  # told to end, it would take its run with it
        end([process], wait_s=20)
    if not but:
        for mark in {c.mark for c in components}:
            _sweep(mark, spares=spares)
    remember(folder, but)


def _end_worker(worker: Component, api: str) -> None:
    """A worker that is told to end while a run goes on kills the run's process the hard way: no
    `finally`, and the run says Running for ever. So the runs are cancelled before."""
    process = worker.process()
    if process is None:
        return
    try:
        was_paused = prefect_http.is_paused(api)
        prefect_http.pause(api, paused=True)  # else it would start the next one
        try:
            _cancel_runs(process, api)
            _end_the_adopted(process, worker.mark)
            end([process], wait_s=20)
        finally:
            prefect_http.pause(api, paused=was_paused)
    except OSError:  # the server is gone: then the signal that it would have sent
        family = process.children(recursive=True)
        end([child for child in family if not _ends_by_itself(child)], wait_s=RUN_S)
        end([process], wait_s=20)


def _cancel_runs(worker: psutil.Process, api: str) -> None:
    family = worker.children(recursive=True)
    runs = sorted({run for child in family if (run := prefect_http.flow_run_of(child))})
    if not runs:
        return
    print(f"Cancelling {len(runs)} run{'s' * (len(runs) > 1)} ...", flush=True)
    left = prefect_http.cancel(api, runs, wait_s=RUN_S)
    for run in left:
        print(f"run {run} has not ended within {RUN_S:.0f} s; its process is killed")
    await_end(family, wait_s=0 if left else RUN_S)


def _end_the_adopted(worker: psutil.Process, mark: str) -> None:
    """Runs of a worker that has died: this one does not know them. Prefect hears of their end."""
    family = {child.pid for child in worker.children(recursive=True)}
    runs = [p for p in marked(mark) if prefect_http.flow_run_of(p) and p.pid not in family]
    end([process for process in runs if not _ends_by_itself(process)], wait_s=RUN_S)


def _sweep(mark: str, *, spares: bool) -> None:
    """What is left of ours; `spares` the runs, e.g. one whose worker has died before."""
    runs = {p.pid for p in marked(mark) if spares and prefect_http.flow_run_of(p)}
    if runs:
        print("A run goes on without its service; `make serve` takes it over.", flush=True)
    left = [process for process in marked(mark) if process.pid not in runs]
    end([process for process in left if not _ends_by_itself(process)], wait_s=RUN_S)
    await_end(left, wait_s=RUN_S)
    end((process for process in marked(mark) if process.pid not in runs), wait_s=5)


def _ends_by_itself(process: psutil.Process) -> bool:
    """Whether it is a run's sending process: it ends when the run has, and all is in MLflow."""
    with suppress(psutil.Error):
        return "tasks.tracking.mlflow_sender" in process.cmdline()
    return False
