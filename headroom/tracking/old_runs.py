"""Removes from MLflow what `keep_days` of mlflow.yaml has no room for: runs of this host that ended
longer ago, with their points, files and models. Some stay: those that others build on, and those
that MLflow lacks a part of. A removal that was interrupted is completed by the next one: a tag says
of a run that it goes. Part of `flows.tidy`; no process that trains imports it.

`python -m headroom.tracking.old_runs` lists them all at once, and removes them where asked to.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlflow import MlflowClient
from mlflow.entities import LifecycleStage, Run, ViewType
from mlflow.exceptions import MlflowException

from headroom.base.event_log import SENDING_LOCK, TRAINING_LOCK, is_sent, remove_folder
from headroom.base.file_lock import FileLock, is_held
from headroom.tracking.mlflow_store import explain_error, may_answer_later
from headroom.tracking.orphaned_runs import answer_tidy
from headroom.tracking.query_runs import COMPARISON
from headroom.tracking.tracking_settings import TrackingSettings

DAY_S = 24 * 60 * 60
PAGE = 100  # runs that are read at once, each with all that it has measured
LOCKS = (TRAINING_LOCK, SENDING_LOCK)
ENDED = ("FINISHED", "FAILED", "KILLED")
REMOVAL = "removal"  # the tag of a run that is deleted, and perhaps not yet all of it


@dataclass(frozen=True)
class OldRun:
    """A run that is, or would be, removed."""

    name: str
    run_id: str
    age_s: float
    size_bytes: int  # of its files here: artifacts, models and journal
    problem: str = ""  # why it could not be


def remove_old_runs(
    client: MlflowClient, where: TrackingSettings, experiments: list[str], *, does: bool
) -> Iterator[OldRun]:
    """Remove the runs of this host that ended over `keep_days` ago; yield each.

    A run stays that is the newest of its `run.key`, that a registered model came from, that began
    the level of a gate which has a younger run, or whose folder is in use or not sent whole. The
    run of a comparison goes after the last of those that it holds. does: else they are only found.
    """
    if not where.keep_days:
        return
    before_ms = int((time.time() - where.keep_days * DAY_S) * 1000)
    removed: set[str] = set()
    for run in _find_half_removed(client, experiments):
        old = _remove_run(client, where, run, does=does)
        if old is not None:
            yield old
    old_runs = _find_old_runs(client, experiments, before_ms)
    # The run of a comparison is as old as what it holds.
    for run in sorted(old_runs, key=lambda run: COMPARISON in run.data.tags):
        if _is_needed(client, experiments, run, before_ms, removed):
            continue
        old = _remove_run(client, where, run, does=does)
        if old is not None:
            removed |= set() if old.problem else {old.run_id}
            yield old


def _find_half_removed(client: MlflowClient, experiments: list[str]) -> list[Run]:
    """Return the runs of this host whose removal was interrupted: MLflow shows them no more."""
    query = f"tags.{REMOVAL} = 'keep_days' and tags.host = '{_quote(socket.gethostname())}'"
    return [*_search(client, experiments, query, ViewType.DELETED_ONLY)]


def _find_old_runs(client: MlflowClient, experiments: list[str], before_ms: int) -> list[Run]:
    """Return the runs of this host that ended before that time, the oldest first."""
    host = _quote(socket.gethostname())
    query = f"attributes.end_time < {before_ms} and tags.host = '{host}'"
    return [
        run
        for run in _search(client, experiments, query)
        if run.info.status in ENDED and run.info.end_time
        if "journal" in run.data.tags or COMPARISON in run.data.tags
    ]


def _search(
    client: MlflowClient,
    experiments: list[str],
    query: str,
    which: int = ViewType.ACTIVE_ONLY,
) -> Iterator[Run]:
    token = None
    while True:
        order = ["attributes.start_time ASC"]
        found = client.search_runs(
            experiments, query, which, max_results=PAGE, order_by=order, page_token=token
        )
        yield from found
        token = found.token
        if not token:
            return


def _is_needed(
    client: MlflowClient, experiments: list[str], run: Run, before_ms: int, removed: set[str]
) -> bool:
    """Return whether something else builds on the run, but for what is removed already."""
    tags, run_id = run.data.tags, run.info.run_id
    if COMPARISON in tags:
        return bool(_find_children(client, experiments, run) - removed)
    if client.search_model_versions(f"run_id = '{run_id}'", max_results=1):
        return True
    if key := tags.get("run.key"):
        newest = f"tags.`run.key` = '{_quote(key)}' and attributes.start_time > "
        if not _has_run(client, experiments, f"{newest}{run.info.start_time}"):
            return True
    if tags.get("gate") == "new":  # the runs that come are compared with it
        younger = f"tags.`gate.of` = '{_quote(tags.get('gate.of', ''))}'"
        return _has_run(client, experiments, f"{younger} and attributes.end_time >= {before_ms}")
    return False


def _quote(text: str) -> str:
    """Return a tag's value as it may stand between the quotes of MLflow's query. One with a quote
    of its own then finds no other run, and so its own stays."""
    return text.replace("'", "")


def _has_run(client: MlflowClient, experiments: list[str], query: str) -> bool:
    return bool(client.search_runs(experiments, query, max_results=1))


def _find_children(client: MlflowClient, experiments: list[str], run: Run) -> set[str]:
    """Return the runs that this one holds."""
    query = f"tags.`mlflow.parentRunId` = '{run.info.run_id}'"
    return {child.info.run_id for child in _search(client, experiments, query)}


def _remove_run(
    client: MlflowClient, where: TrackingSettings, run: Run, *, does: bool
) -> OldRun | None:
    """Remove a run and its folder; None where that is in use, or has something to send, and where
    another process is faster. Raises what a store raises that is away: so are all other runs."""
    name = run.data.tags.get("journal", "")
    folder = Path(where.runs) / Path(name).name  # anybody's text: only a folder of ours is opened
    has_folder = bool(name) and folder.is_dir()
    is_half = run.info.lifecycle_stage == LifecycleStage.DELETED
    if is_half and not (has_folder or where.keeps_files):
        return None  # the rest is for `mlflow gc`
    if has_folder:
        is_kept = not is_half and not is_sent(folder)  # of half a folder that is not known
        if is_kept or any(is_held(folder / lock) for lock in LOCKS):
            return None
    models = [model.model_id for model in (run.outputs.model_outputs if run.outputs else [])]
    places = [*_find_places(client, run, models), *([folder] if has_folder else [])]
    size = sum(_measure_bytes(place) for place in places)
    age_s = time.time() - run.info.end_time / 1000
    old = OldRun(run.info.run_name or name, run.info.run_id, age_s, size)
    if not does:
        return old
    with ExitStack() as held:
        if has_folder:
            locks = [held.enter_context(FileLock(folder / lock)) for lock in LOCKS]
            if not all(lock.take(f"process {os.getpid()}, which removes it") for lock in locks):
                return None
        try:
            # What another host goes on with says so in MLflow first.
            now = client.get_run(run.info.run_id)
            if now.info.status not in ENDED or (
                now.info.lifecycle_stage != run.info.lifecycle_stage
            ):
                return None
            _hide(client, now, models)
            if has_folder:
                remove_folder(folder)
            if where.keeps_files:
                _free(client, run.info.run_id, models)
        except Exception as error:  # of any store, or of files
            if may_answer_later(error, where):
                raise
            if _is_gone(error):
                return None
            return OldRun(old.name, old.run_id, age_s, size, explain_error(error, where))
    return old


def _is_gone(error: Exception) -> bool:
    """Return whether MLflow does not know what was asked for: another process has removed it."""
    return isinstance(error, MlflowException) and error.error_code == "RESOURCE_DOES_NOT_EXIST"


def _find_places(client: MlflowClient, run: Run, models: Sequence[str]) -> list[Path]:
    """Return the folders here that hold the files of a run and of its models."""
    uris = [run.info.artifact_uri]
    for model in models:
        with suppress(MlflowException):
            uris.append(client.get_logged_model(model).artifact_location)
    parts = [urlsplit(uri) for uri in uris if uri]
    return [Path(unquote(part.path)) for part in parts if part.scheme == "file"]


def _measure_bytes(place: Path) -> int:
    sizes = [0]
    for file in place.rglob("*"):
        with suppress(OSError):
            sizes.append(file.lstat().st_size)
    return sum(sizes)


def _hide(client: MlflowClient, run: Run, models: Sequence[str]) -> None:
    """Delete the run as MLflow's pages do, and its models. The tag comes first, by which the next
    removal finds what this one does not come to."""
    if run.info.lifecycle_stage != LifecycleStage.DELETED:
        client.set_tag(run.info.run_id, REMOVAL, "keep_days")
        client.delete_run(run.info.run_id)
    for model in models:
        try:
            client.delete_logged_model(model)
        except MlflowException as error:
            if not _is_gone(error):
                raise


def _free(client: MlflowClient, run_id: str, models: Sequence[str]) -> None:
    """Free what they take where the store is a database, the run last, which names its models.

    A tracking server's store is only there for `mlflow gc` beside it.
    """
    # Not the command: unless it is told which, it also removes what people have deleted and may
    # want back.
    from mlflow.cli import _gc_tracking_resources

    store = client._tracking_client.store
    with redirect_stdout(StringIO()):  # which has our answers
        for runs, logged in (([], [*models]), ([run_id], [])):
            _gc_tracking_resources(
                backend_store=store,
                run_ids=runs,
                experiment_ids=None,
                logged_model_ids=logged,
                older_than=None,
                time_delta=0,
                skip_experiments=True,
                skip_logged_models=False,
                ignore_not_found=True,
            )


def main() -> None:
    """Print each old run as a line of JSON, and remove it where `does` is asked for."""
    answer_tidy(remove_old_runs)


if __name__ == "__main__":
    main()
