"""Sends and ends runs that were left behind: those that say RUNNING though their process is
gone, and those that could not be sent to MLflow in time. The next run of this host does it.
Part of the sending process.

`python -m headroom.tracking.orphaned_runs` lists them all at once, and ends them where asked
to.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException

from headroom.base.file_lock import is_held
from headroom.prefect import prefect_http
from headroom.prefect.prefect_http import is_run_alive
from headroom.process.redaction import redact
from headroom.tracking.journal import BEGIN, SENDING_LOCK, START, RunGone, read_metrics_before
from headroom.tracking.mlflow_store import explain_error, open_experiment
from headroom.tracking.run_sender import (
    EARLIER,
    UNSENT,
    Sender,
    SendingState,
    claim_run,
    create_run,
    find_other_copy,
    reopen_run,
    try_sending_lock,
)
from headroom.tracking.tracking_settings import TrackingSettings

DEAD = "its process was gone"


def find_dead_runs(
    client: MlflowClient, chosen: TrackingSettings, experiments: list[str]
) -> Iterator[Sender]:
    """Yield the runs of this host that say RUNNING though their process is gone.

    Each as it is when it is asked for: the one before may have taken a while to end.
    """
    host, folders = socket.gethostname().replace("'", ""), _find_folders(chosen)
    query = f"attributes.status = 'RUNNING' and tags.host = '{host}'"
    for found in client.search_runs(experiments, query, ViewType.ALL, max_results=100):
        run = client.get_run(found.info.run_id)
        tags = run.data.tags
        if run.info.status != "RUNNING" or is_run_alive(tags):
            continue
        name = tags.get("journal", "")  # anybody's text: only a folder of ours is opened
        folder = Path(chosen.runs) / name if name in folders else Path()
        yield Sender(client, chosen, folder, SendingState(run.info.run_id, run.info.experiment_id))


@contextmanager
def pass_over_errors(which: str) -> Iterator[None]:
    """Print what is wrong with one run that was left, and go on with the others."""
    try:
        yield
    except Exception as error:  # of what lies in anybody's folder
        message = f"{type(error).__name__}: {redact(str(error))}"
        print(f"{which}: left behind, and not sent: {message}", file=sys.stderr)


def _find_folders(chosen: TrackingSettings) -> set[str]:
    found = (Path(chosen.runs).glob(f"*/{name}") for name in ("sent.json", BEGIN))
    return {file.parent.name for files in found for file in files}


def send_unsent_runs(client: MlflowClient, chosen: TrackingSettings) -> None:
    """Send what earlier runs could not send, whose processes are gone."""
    for sender in _find_unsent_runs(client, chosen):
        with pass_over_errors(sender.folder.name):
            resend(sender)


def _find_unsent_runs(client: MlflowClient, chosen: TrackingSettings) -> Iterator[Sender]:
    for name in sorted(_find_folders(chosen)):
        folder = Path(chosen.runs) / name
        with pass_over_errors(name):
            begin, said = _read_begin(folder), _read_sent_state(folder)
            if begin is None and said is not None and said.closed:
                continue
            tags = find_run(client, folder).data.tags if begin is None else begin["tags"]
            if _is_gone(tags):
                yield Sender(client, chosen, folder, SendingState("", ""))


def _read_begin(folder: Path) -> dict[str, Any] | None:
    """Return how the run began, where MLflow does not know it yet; else None."""
    with suppress(FileNotFoundError):
        begin: dict[str, Any] = json.loads((folder / BEGIN).read_text())
        return begin
    return None


def begin_run(
    client: MlflowClient,
    chosen: TrackingSettings,
    folder: Path,
    begin: dict[str, Any],
    experiment_id: str,
) -> Sender:
    """Begin the run in MLflow of a training that begins or goes on; return its sender.

    It is the run that has this journal, else a new one. Raises RunGone where it was deleted, and
    where another copy of the folder has gone on with it, or does so now.
    """
    run = _read_known_run(client, begin["run_id"]) if "run_id" in begin else None
    if run is None and folder.name in _find_folders(chosen):  # whoever made it may have died then
        with suppress(ValueError):
            run = find_run(client, folder)
    if run is None:
        words = {name: begin[name] for name in ("name", "params", "tags", "start_ms")}
        words["data"] = begin.get("data", [])
        sender = create_run(client, chosen, experiment_id=experiment_id, folder=folder, **words)
        _keep_start(folder, begin.get("start"), sender.state)
    else:
        if run.info.lifecycle_stage == "deleted":
            raise RunGone(f"its run {run.info.run_id} was deleted in MLflow")
        state = find_sending_state(client, run, folder)
        if begin.get("again"):  # in mid-run, with another sending process
            return Sender(client, chosen, folder, state)
        _refuse_living(run, begin["tags"])
        if claim := begin.get("claim"):
            claim_run(client, run, **claim)
        sender = reopen_run(client, chosen, state=state, folder=folder, tags=begin["tags"])
        sender.tell_params(begin.get("params", {}))
        sender.tell_data(begin.get("data", []))
    (folder / BEGIN).unlink(missing_ok=True)
    return sender


def _refuse_living(run: Run, tags: Mapping[str, str]) -> None:
    """Raise RunGone where another process of this host trains the run, in another folder."""
    before, same = run.data.tags, ("host", "pid", "process.started_at")
    is_here = before.get("host") == tags.get("host") == socket.gethostname()
    is_me = all(before.get(name) == tags.get(name) for name in same)
    if run.info.status == "RUNNING" and is_here and not is_me and is_run_alive(before):
        raise RunGone(
            f"its run {run.info.run_id} is being trained by process {before.get('pid')}, in "
            "another copy of this folder"
        )


def _keep_start(folder: Path, start: Mapping[str, Any] | None, state: SendingState) -> None:
    """Write start.json, where the run's process may die before it writes that itself."""
    if start is not None and not (folder / START).exists():
        ids = {"run_id": state.run_id, "experiment_id": state.experiment_id}
        half = folder / f"{START}.new"
        half.write_text(json.dumps({**start, **ids}))
        half.rename(folder / START)


def _read_known_run(client: MlflowClient, run_id: str) -> Run:
    """Return that run. Raises RunGone where MLflow has none of that id."""
    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
    raise RunGone(f"MLflow does not know its run {run_id} any more")


def _read_sent_state(folder: Path) -> SendingState | None:
    """Return what sent.json says; None where it can't be read."""
    with suppress(OSError, ValueError, TypeError):
        return SendingState(**json.loads((folder / "sent.json").read_text()))
    return None


def find_run(client: MlflowClient, folder: Path) -> Run:
    """Return the run that has this journal.

    MLflow is asked: sent.json may be damaged, or of another run. Raises ValueError where
    there is none.
    """
    said = _read_sent_state(folder)
    if said is not None:
        with suppress(MlflowException):
            run = client.get_run(said.run_id)
            if run.data.tags.get("journal") == folder.name:
                return run
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    name = folder.name.replace("'", "")
    runs = client.search_runs(ids, f"tags.journal = '{name}'", max_results=1)
    if not runs:
        raise ValueError("MLflow has no run of this journal")
    return runs[0]


def find_sending_state(client: MlflowClient, run: Run, folder: Path) -> SendingState:
    """Return how far the run was sent, by sent.json.

    That counts as far as the journal and MLflow agree with it; else all is sent from the
    start. What is sent twice is kept once.
    """
    whole = SendingState(run.info.run_id, run.info.experiment_id)
    whole.unsent, whole.earlier = (run.data.tags.get(name, "") for name in (UNSENT, EARLIER))
    said = _read_sent_state(folder)
    if said is None or said.run_id != whole.run_id:
        return whole
    if said.closed and run.info.status != "RUNNING":
        return said
    with suppress(MlflowException):
        if said.model_id and client.get_logged_model(said.model_id).source_run_id == whole.run_id:
            whole.model_id, whole.has_model = said.model_id, said.has_model
    try:
        before = read_metrics_before(folder / "metrics.jsonl", said.offset) if said.offset else {}
    except (OSError, ValueError, TypeError) as error:
        print(f"{folder}: sent again from the start: {error}", file=sys.stderr)
        return whole
    if any(run.data.metrics.get(name) != value for name, value in before.items()):
        return whole  # it is not the newest that MLflow holds: less was sent, or more
    whole.offset, whole.damaged = said.offset, said.damaged
    return whole


def _is_gone(tags: Mapping[str, str]) -> bool:
    """Return whether the run's process was one of this host and is no more."""
    is_here = tags.get("host") == socket.gethostname()
    return is_here and not is_run_alive(tags)


def resend(sender: Sender, *, dead: str = DEAD) -> bool:
    """Send what the folder holds, and end the run as its process ended it, or as KILLED.

    It is the run that its state names, or the one of its folder. dead: why it ended, where its
    process has not told. Return False where another process is at it.
    """
    if sender.held is None and sender.folder.is_dir() and sender.folder != Path():
        sender.held = try_sending_lock(sender.folder)
        if sender.held is None:
            return False
    try:
        _resend(sender, dead)
    finally:
        if sender.held is not None:
            sender.held.close()
            sender.held = None
    return True


def _resend(sender: Sender, dead: str) -> None:
    if sender.held is not None and (begin := _read_begin(sender.folder)) is not None:
        chosen = sender.where.model_copy(update={"experiment": begin["experiment"]})
        sender.client, experiment_id = open_experiment(chosen)
        sender.state = begin_run(sender.client, chosen, sender.folder, begin, experiment_id).state
    elif not sender.state.run_id:
        run_info = find_run(sender.client, sender.folder).info
        sender.state = SendingState(run_info.run_id, run_info.experiment_id)
    stored = sender.client.get_run(sender.state.run_id)
    if _is_other_copy(sender.folder, stored):
        sender.state = find_sending_state(sender.client, stored, sender.folder)
        sender.state.closed = True  # the other has all of it
        sender._keep()
        if stored.info.status != "RUNNING":
            return
        sender.folder = Path()
    if not sender.folder.is_dir() or sender.folder == Path():
        sender.client.set_tag(sender.state.run_id, "end.reason", dead)
        sender.client.set_terminated(sender.state.run_id, "KILLED")
        return
    sender.state = find_sending_state(sender.client, stored, sender.folder)
    if sender.state.closed:
        return
    last = [sender.folder / name for name in ("run.json", "metrics.jsonl")]
    end_ms = next((int(f.stat().st_mtime * 1000) for f in last if f.is_file()), None)
    try:
        run = json.loads((sender.folder / "run.json").read_text())
        if run["status"] not in ("FINISHED", "FAILED", "KILLED"):
            raise ValueError("no end of a run")
    except (OSError, ValueError, KeyError, TypeError):
        run = {"status": stored.info.status}  # all that is known of an end on a full disk
        if run["status"] == "RUNNING":
            run = {"status": "KILLED", "error": dead, "tags": {"end.reason": dead}}
        run["tags"] = {**stored.data.tags, **run.get("tags", {})}
        with suppress(OSError):  # who looks at the folder learns it too
            (sender.folder / "run.json").write_text(json.dumps(run))
    run = {"params": stored.data.params, "metrics": stored.data.metrics, **run}
    run["tags"] = {**stored.data.tags, **run.get("tags", {})}
    kept = {k: v for k, v in run["tags"].items() if not k.startswith("mlflow.")}
    run["tags"] = {k: v for k, v in kept.items() if k != UNSENT}
    sender.close({"name": stored.info.run_name, **run}, end_ms=end_ms)


def _is_other_copy(folder: Path, run: Run) -> bool:
    """Return whether another copy of the folder went on with its run since."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        marks = json.loads((folder / START).read_text()).get("marks", [])
        return bool(find_other_copy(run, marks))
    return False


def _describe_run(sender: Sender) -> dict[str, str]:
    """Return the names by which a person and Prefect know the run."""
    begin = _read_begin(sender.folder)
    if begin is not None:
        name, run_id, tags = begin.get("name", sender.folder.name), "", begin["tags"]
    else:
        known = sender.state.run_id
        run = sender.client.get_run(known) if known else find_run(sender.client, sender.folder)
        name, run_id, tags = run.info.run_name, run.info.run_id, run.data.tags
    flow_run = tags.get("prefect.flow_run_id", "")
    return {"name": name, "run_id": run_id, "flow_run": flow_run, "problem": ""}


def main() -> None:
    """Print each run that was left as a line of JSON, and end it where `does` is asked for."""
    order = json.load(sys.stdin)
    chosen = TrackingSettings(**order["where"])
    try:
        client = MlflowClient(chosen.tracking_uri)
        ids = [experiment.experiment_id for experiment in client.search_experiments()]
        left = list(find_dead_runs(client, chosen, ids))
        ending = {sender.folder for sender in left}
        unsent = [one for one in _find_unsent_runs(client, chosen) if one.folder not in ending]
        for verb, sender in [*(("end", one) for one in left), *(("send", one) for one in unsent)]:
            if is_held(sender.folder / SENDING_LOCK):  # its own process is at it
                continue
            action = {"verb": verb, "folder": str(sender.folder), **_describe_run(sender)}
            try:
                if order["does"] and not resend(sender):
                    continue  # another came first
            except Exception as error:  # of what lies in anybody's folder
                action["problem"] = explain_error(error, chosen)
            print(json.dumps(action), flush=True)
    except Exception as error:  # whatever it is, who asked has to hear of it
        print(json.dumps({"problem": explain_error(error, chosen)}))
    prefect_http.correct_flow_runs(order.get("prefect_api", ""), Path(chosen.runs))


if __name__ == "__main__":
    main()
