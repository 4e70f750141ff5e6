"""Cleans up what trainings of this host left behind when they or a server died: runs and
flow runs that are shown as running, what was not sent, files of dead processes, and, where
asked for, old journals. What lives holds a lock and is never touched; two who clean up at
once share the work.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headroom.base.event_log import LOG, SENDING_LOCK, TRAINING_LOCK, is_sent, remove_folder
from headroom.base.file_lock import FileLock, is_held
from headroom.base.units import format_mebibytes, format_seconds, make_printable
from headroom.prefect import local_prefect, prefect_http
from headroom.prefect.prefect_http import FlowRunEnd
from headroom.process import children
from headroom.process.redaction import redact
from headroom.run.known_runs import (
    find_left_files,
    find_live_runs,
    list_run_folders,
    read_start,
)
from headroom.services import serve
from headroom.services.parts import find_parts, find_worker_starts
from headroom.tracking.tracking_settings import TrackingSettings
from headroom.training.kept_steps import CHECKPOINTS, list_steps

MIB = 1024**2
LOCKS = (TRAINING_LOCK, SENDING_LOCK)
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}


@dataclass(frozen=True)
class TidyAction:
    """One thing that is, or would be, cleaned up."""

    verb: str  # end, send, set, remove
    what: str
    problem: str = ""  # why it could not be


def clean_up(
    chosen: TrackingSettings, *, older_s: float | None = None, does: bool
) -> Iterator[TidyAction]:
    """Find and, where it `does`, clean up what was left behind; yield each action.

    older_s: the age from which on journals and checkpoints of runs go that MLflow has.
    """
    ends: dict[str, FlowRunEnd] = {}
    if chosen.database is None or chosen.database.is_file():
        yield from _clean_up_mlflow(chosen, ends, does=does)
        if chosen.keep_days:
            yield from _remove_from_mlflow(chosen, does=does)
    ends |= prefect_http.read_flow_run_ends(Path(chosen.runs))
    for api, workers in _find_servers().items():
        try:
            yield from _clean_up_prefect(api, ends, workers, does=does)
        except (OSError, ValueError, LookupError, TypeError) as error:
            yield TidyAction("set", "flow runs", f"Prefect at {redact(api)}: {redact(str(error))}")
    for path in find_left_files():
        if does:
            path.unlink(missing_ok=True)
        yield TidyAction("remove", f"{path}: its process is gone")
    if older_s is not None:
        yield from _remove_old_runs(Path(chosen.runs), older_s, does=does)


def _clean_up_mlflow(
    chosen: TrackingSettings, ends: dict[str, FlowRunEnd], *, does: bool
) -> Iterator[TidyAction]:
    """Clean up MLflow's runs in a process of its own, which imports mlflow.

    ends: gets the flow runs that are to end.
    """
    yield from (
        _make_mlflow_action(answer, ends)
        for answer in _ask("headroom.tracking.orphaned_runs", chosen, does=does)
    )


def _ask(module: str, chosen: TrackingSettings, *, does: bool) -> Iterator[dict[str, Any]]:
    """Yield what that process answers, a line each; the last is a problem where it failed."""
    order = json.dumps({"where": chosen.model_dump(), "does": does})
    with children.start_child(module, env={**PATIENCE, **os.environ}) as asking:
        assert asking.stdin is not None and asking.stdout is not None
        asking.stdin.write(order)
        asking.stdin.close()
        for line in asking.stdout:
            with suppress(ValueError):  # a library that prints
                yield json.loads(line)
    if asking.returncode:
        yield {"problem": f"its process ended with {asking.returncode}"}


def _remove_from_mlflow(chosen: TrackingSettings, *, does: bool) -> Iterator[TidyAction]:
    """Remove the runs that are older than mlflow.yaml lets MLflow keep them."""
    for answer in _ask("headroom.tracking.old_runs", chosen, does=does):
        if "name" not in answer:
            yield TidyAction("remove", "old runs of MLflow", answer["problem"])
            continue
        which = f"{make_printable(answer['name'], limit=60)} ({answer['run_id'][:8]})"
        age, size = format_seconds(answer["age_s"]), format_mebibytes(answer["size_bytes"] / MIB)
        what = f"{which}: ended {age} ago, over keep_days of mlflow.yaml, {size} of files"
        yield TidyAction("remove", what, answer["problem"])


def _make_mlflow_action(answer: dict[str, Any], ends: dict[str, FlowRunEnd]) -> TidyAction:
    if "verb" not in answer:
        return TidyAction("end", "runs in MLflow", answer["problem"])
    with suppress(OSError):
        at_s = (Path(answer["folder"]) / LOG).stat().st_mtime
        ends[answer["flow_run"]] = FlowRunEnd(at_s=at_s)
    why = "its process is gone" if answer["verb"] == "end" else "not all of it was sent to MLflow"
    id = f" ({answer['run_id'][:8]})" if answer["run_id"] else ""  # MLflow has not heard of it yet
    which = make_printable(answer["name"], limit=60) + id
    return TidyAction(answer["verb"], f"{which}: {why}", answer["problem"])


def _find_servers() -> dict[str, list[float] | None]:
    """Return the Prefect APIs that are known here, each with when its workers began.

    None but for that of `make serve`, whose workers are no other host's.
    """
    ours = find_parts(serve.FOLDER)
    servers = (
        {f"{ours['prefect'].address}/api": find_worker_starts(ours)} if "prefect" in ours else {}
    )
    named = local_prefect.find_api_url()
    return {named: None, **servers} if named else {**servers}


def _clean_up_prefect(
    api: str, ends: dict[str, FlowRunEnd], workers: list[float] | None, *, does: bool
) -> Iterator[TidyAction]:
    dead = prefect_http.end_dead_flow_runs(api, ends, workers=workers, does=does)
    for name, end in {**dead, **prefect_http.correct_flow_run_ends(api, ends, does=does)}.items():
        state = end.name or end.type
        yield TidyAction(
            "set", f"flow run {make_printable(name, limit=60)} to {state}: {end.message}"
        )


def _remove_old_runs(runs: Path, older_s: float, *, does: bool) -> Iterator[TidyAction]:
    live = {live.folder for live in find_live_runs()}
    for folder in list_run_folders(runs):
        with suppress(OSError), ExitStack() as held:
            age_s = time.time() - max(file.stat().st_mtime for file in folder.iterdir())
            if age_s < older_s or not is_sent(folder) or str(folder) in live:
                continue
            if any(is_held(folder / name) for name in LOCKS):
                continue
            start, size = read_start(folder), sum(f.lstat().st_size for f in folder.rglob("*"))
            kept = [
                f", with its checkpoint of step {n:,}" for n in list_steps(folder / CHECKPOINTS)[:1]
            ]
            if does:
                locks = [held.enter_context(FileLock(folder / name)) for name in LOCKS]
                if not all(lock.take(f"process {os.getpid()}, which removes it") for lock in locks):
                    continue
                remove_folder(folder)
            name = make_printable(start.name if start else "", limit=60)
            description = ", ".join(
                [name, f"{format_seconds(age_s)} old", format_mebibytes(size / MIB)]
            )
            yield TidyAction("remove", "".join([f"{folder}: {description}", *kept]))
