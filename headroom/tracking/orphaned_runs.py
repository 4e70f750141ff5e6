"""Sends what runs have left in their folders, and ends them: those whose process is gone, and
those that could not be sent to MLflow in time. Whoever finds one does the same: the next run of
this host, whoever stays to send later, `flows.tidy`, and a person who names a folder. Part of the
sending process.

`python -m headroom.tracking.orphaned_runs` lists them all at once, and sends them where asked
to.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Run, ViewType
from mlflow.exceptions import MlflowException

from headroom.base.event_log import (
    END,
    LOG,
    ONCE,
    RESERVE,
    SENDING_LOCK,
    SENT,
    START,
    TRAINING_LOCK,
    append_event,
    is_sent,
    make_event,
    read_begins,
    read_end,
    read_json,
    read_logged_tags,
    read_metric_batches,
    read_metrics_before,
    read_sent,
)
from headroom.base.file_lock import FileLock, is_held
from headroom.prefect import prefect_http
from headroom.prefect.prefect_http import is_run_alive
from headroom.tracking.answer_limits import make_client
from headroom.tracking.journal import RunGone
from headroom.tracking.left_folders import find_left_folders, is_going_on
from headroom.tracking.mlflow_store import explain_error, open_experiment
from headroom.tracking.run_sender import (
    EARLIER,
    END_REASON,
    END_STATUS,
    ENDS,
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
LOOK_AGAIN_S = (0.5, 2.0, 8.0)  # after a look that failed
DOUBLE = "a request that was asked again had made it, beside the run of its folder"
TAKEN_BACK = "another run was gone on with in its place"


@dataclass(frozen=True)
class LeftRun:
    """A run that was left behind, as a person and Prefect know it."""

    verb: str  # end: its process is gone; send: it has ended, and MLflow lacks a part
    folder: str
    name: str = ""
    run_id: str = ""
    flow_run: str = ""
    problem: str = ""  # why it could not be sent


def send_left_runs(
    client: MlflowClient,
    chosen: TrackingSettings,
    experiments: list[str],
    *,
    with_ended: bool = True,
    does: bool = True,
) -> Iterator[LeftRun]:
    """Send what the folders of this host's runs still have, and end the runs that have lost theirs;
    yield each, one at a time, as it is when it is its turn. What is wrong with one is told with it.

    experiments: where to look for runs that say RUNNING and have no such folder. with_ended: also
    those that have ended, and of which only a part is not there; else only whose process is gone.
    does: else they are only found.
    """
    found = set()
    for folder in find_left_folders(Path(chosen.runs)):
        verb = "send" if read_end(folder) else "end"
        if with_ended or verb == "end":
            found.add(folder)
            sender = Sender(client, chosen, folder, SendingState("", ""))
            if (left := _send_left(sender, verb, does=does)) is not None:
                yield left
    for sender in _find_dead_runs(client, chosen, experiments):
        if sender.has_folder and (
            (sender.folder in found and not _is_other(sender))
            or is_held(sender.folder / SENDING_LOCK)
            or is_going_on(sender.folder)
        ):
            continue
        if (left := _send_left(sender, "end", does=does)) is not None:
            yield left


def _send_left(sender: Sender, verb: str, *, does: bool) -> LeftRun | None:
    """Send what that run has left; None where nobody's process needs to, or another does it."""
    left = LeftRun(verb, str(sender.folder), name=sender.folder.name)
    try:
        left = replace(left, **_describe_run(sender))
        if does and not send_rest(sender):
            return None
    except NotOurs:
        return None
    except Exception as error:  # of what lies in anybody's folder
        return replace(left, problem=explain_error(error, sender.where))
    return left


def _find_dead_runs(
    client: MlflowClient, chosen: TrackingSettings, experiments: list[str]
) -> Iterator[Sender]:
    """Yield the runs of this host that say RUNNING though their process is gone.

    Each as it is when it is asked for: the one before may have taken a while to end.
    """
    host = socket.gethostname().replace("'", "")
    folders = {log.parent.name for log in Path(chosen.runs).glob(f"*/{LOG}")}
    query = f"attributes.status = 'RUNNING' and tags.host = '{host}'"
    for entry in client.search_runs(experiments, query, ViewType.ALL, max_results=100):
        run = client.get_run(entry.info.run_id)
        tags = run.data.tags
        if run.info.status != "RUNNING" or is_run_alive(tags):
            continue
        name = tags.get("journal", "")  # anybody's text: only a folder of ours is opened
        folder = Path(chosen.runs) / name if name in folders else Path()
        yield Sender(client, chosen, folder, SendingState(run.info.run_id, run.info.experiment_id))


def _read_new_begin(folder: Path, begun: int | None = None) -> dict[str, Any] | None:
    """Return how the run began, or went on, behind that offset of its log, with the offset behind
    it as `begun`; None where it did not. begun: by default the offset of which MLflow was told.

    Of one that went on several times it is what they say together, with the first start.
    """
    if begun is None:
        said = _read_sent_state(folder)
        begun = said.begun if said is not None and said.run_id else 0
    begins = read_begins(folder / LOG, begun)
    if not begins:
        return None
    contents = [content for content, _ in begins]
    merged = {name: value for content in contents for name, value in content.items()}
    merged["tags"] = {name: value for one in contents for name, value in one["tags"].items()}
    return {**merged, "start_ms": contents[0]["start_ms"], "begun": begins[-1][1]}


def read_tags(folder: Path) -> dict[str, str]:
    """Return the tags with which the run of this folder began, or went on; those of its newest
    begins, where MLflow knows of the ones before."""
    begin = _read_new_begin(folder) or _read_new_begin(folder, 0)
    return {} if begin is None else begin["tags"]


def begin_run(
    client: MlflowClient,
    chosen: TrackingSettings,
    folder: Path,
    *,
    run_id: str = "",
    experiment_id: str = "",
) -> Sender:
    """Let MLflow know of the run as far as its log says how it began and went on; return its
    sender.

    It is the run of that id, else the one that has this log, else a new one, in that experiment or
    the one that the log names. Raises RunGone where it was deleted, and where another copy of the
    folder has gone on with it, or does so now. Raises ValueError where the log has no begin, and
    MLflow no run.
    """
    run = _read_known_run(client, run_id) if run_id else None
    if run is None or _is_taken_back(run):
        run = None if _is_new(folder) else _find_run(client, folder)  # its maker may have died then
    if run is None:
        return _create_run(client, chosen, folder, experiment_id)
    if run.info.lifecycle_stage == "deleted":
        raise RunGone(f"its run {run.info.run_id} was deleted in MLflow")
    state = find_sending_state(client, run, folder)
    begin = _read_new_begin(folder, state.begun)
    if begin is None:
        if run.info.status != "RUNNING" and is_going_on(folder):  # it was to be taken back
            client.update_run(run.info.run_id, status="RUNNING")
            for name in run.data.tags.keys() & {END_REASON, END_STATUS}:
                client.delete_tag(run.info.run_id, name)
            state.closed = False
        return Sender(client, chosen, folder, state)
    tags = begin["tags"]
    _refuse_living(run, tags)
    if claim := begin.get("claim"):
        claim_run(client, run, marks=_read_marks(folder), by=claim["by"])
    how = {"state": state, "folder": folder, "tags": tags, "begun": begin["begun"]}
    sender = reopen_run(client, chosen, **how)
    sender.tell_params(begin.get("params", {}))
    sender.tell_data(begin.get("data", []))
    return sender


def _is_new(folder: Path) -> bool:
    """Return whether the run has just begun here, so that MLflow can't have it. sent.json alone
    does not tell: the power may have been cut before it was on the disk."""
    begin = _read_new_begin(folder, 0)
    if begin is None or "claim" in begin or (folder / SENT).exists():
        return False
    return is_going_on(folder)


def _is_taken_back(run: Run) -> bool:
    """Return whether the run was deleted by who had begun it, and not by a person. Its folder is
    still there where that process was killed before it was removed, or goes on with it."""
    is_deleted = run.info.lifecycle_stage == "deleted"
    return is_deleted and run.data.tags.get(END_REASON) == TAKEN_BACK


def _create_run(
    client: MlflowClient, chosen: TrackingSettings, folder: Path, experiment_id: str
) -> Sender:
    begin = _read_new_begin(folder, 0)
    if begin is None:
        raise ValueError("MLflow has no run of this journal")
    if not experiment_id:
        chosen = chosen.model_copy(update={"experiment": begin["experiment"]})
        client, experiment_id = open_experiment(chosen)
    if "name" not in begin:  # a power cut took the first begin, and what trained again has none
        begin["name"] = read_json(folder / START).get("name") or folder.name
    words = {"params": {}, "data": [], **begin}
    words = {n: words[n] for n in ("name", "params", "tags", "start_ms", "begun", "data")}
    return create_run(client, chosen, experiment_id=experiment_id, folder=folder, **words)


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
        return SendingState(**json.loads((folder / SENT).read_text()))
    return None


def find_run(client: MlflowClient, folder: Path) -> Run:
    """Return the run that has this journal.

    MLflow is asked: sent.json may be damaged, or of another run. Raises ValueError where
    there is none.
    """
    run = _find_run(client, folder)
    if run is None:
        raise ValueError("MLflow has no run of this journal")
    return run


def _find_run(client: MlflowClient, folder: Path) -> Run | None:
    said = _read_sent_state(folder)
    if said is not None and said.run_id:
        with suppress(MlflowException):
            run = client.get_run(said.run_id)
            if run.data.tags.get("journal") == folder.name and not _is_taken_back(run):
                return run
    ids = [experiment.experiment_id for experiment in client.search_experiments()]
    name = folder.name.replace("'", "")
    runs = client.search_runs(ids, f"tags.journal = '{name}'", max_results=10)
    # Of two that a request made which was asked again, one is empty: see `_is_double`.
    return max(runs, key=lambda run: bool(run.data.metrics), default=None)


def find_sending_state(client: MlflowClient, run: Run, folder: Path) -> SendingState:
    """Return how far the run was sent, by sent.json.

    That counts as far as the log and MLflow agree with it; else all is sent from the
    start. What is sent twice is kept once.
    """
    whole = SendingState(run.info.run_id, run.info.experiment_id)
    whole.unsent, whole.earlier = (run.data.tags.get(name, "") for name in (UNSENT, EARLIER))
    said = _read_sent_state(folder)
    if said is None or said.run_id != whole.run_id:
        return _begin_again(whole, run, folder)
    whole.beyond = said.beyond
    if is_sent(folder) and run.info.status != "RUNNING":
        return said
    if not _is_line_end(folder / LOG, said.begun):  # another log, in place of one that was lost
        return _begin_again(whole, run, folder)
    whole.begun = said.begun
    with suppress(MlflowException):
        if said.model_id and client.get_logged_model(said.model_id).source_run_id == whole.run_id:
            whole.model_id, whole.has_model = said.model_id, said.has_model
    try:
        before = read_metrics_before(folder / LOG, said.offset) if said.offset else {}
    except (OSError, ValueError, TypeError) as error:
        print(f"{folder}: sent again from the start: {error}", file=sys.stderr)
        return _begin_again(whole, run, folder)
    if not before or any(run.data.metrics.get(name) != value for name, value in before.items()):
        # It is not the newest that MLflow holds: less was sent, or more.
        return _begin_again(whole, run, folder)
    whole.offset, whole.damaged = said.offset, said.damaged
    return whole


def _is_line_end(log: Path, offset: int) -> bool:
    """Return whether a line of the log ends there, or it is the begin."""
    with suppress(OSError), open(log, "rb") as lines:
        lines.seek(max(0, offset - 1))
        return not offset or lines.read(1) == b"\n"
    return False


def _begin_again(whole: SendingState, run: Run, folder: Path) -> SendingState:
    """Return the state of which all is sent from the start, but for steps that MLflow has and the
    log has not: of a metric whose newest point is not in the log, none up to its step; nor up to
    the step that was found so before, as the log may have come further since."""
    points = {m.key: (m.step, m.timestamp) for m in run.data._metric_objs if m.step > ONCE}
    with suppress(FileNotFoundError), open(folder / LOG, "rb") as log:
        for batch, _ in read_metric_batches(log, 0):
            for name, _, unix_ms, step in batch:
                if points.get(name) == (step, unix_ms):
                    del points[name]
    steps = {name: step for name, (step, _) in points.items()}
    whole.beyond = whole.beyond | {n: max(s, whole.beyond.get(n, s)) for n, s in steps.items()}
    if whole.beyond:  # its begin is another one, too
        whole.begun = 0
    return whole


class NotOurs(ValueError):
    """The run is another host's, or of a process that lives."""


def send_rest(sender: Sender, *, dead: str = DEAD) -> bool:
    """Send what the folder still has, and end the run as its process ended it, or as KILLED.

    It is the run that its state names, or the one of its folder. dead: why it ended, where its
    process has not told. Return False where another process is at it, or the run goes on.
    """
    if sender.held is None and sender.has_folder:
        sender.held = try_sending_lock(sender.folder)
        if sender.held is None:
            return False
        if is_going_on(sender.folder):  # and MLflow will know
            sender.held.close()
            sender.held = None
            return False
    try:
        return _send_rest(sender, dead)
    finally:
        if sender.held is not None:
            sender.held.close()
            sender.held = None


def _send_rest(sender: Sender, dead: str) -> bool:
    if sender.held is not None and _is_double(sender):
        # Not ended before: who is killed between the two would leave it, and nobody looks again.
        sender.client.set_tag(sender.state.run_id, END_REASON, DOUBLE)
        sender.client.delete_run(sender.state.run_id)
        return True
    if sender.held is not None:
        begun = begin_run(sender.client, sender.where, sender.folder, run_id=sender.state.run_id)
        sender.client, sender.state = begun.client, begun.state
    elif not sender.state.run_id:
        run_info = find_run(sender.client, sender.folder).info
        sender.state = SendingState(run_info.run_id, run_info.experiment_id)
    stored = sender.client.get_run(sender.state.run_id)
    if sender.held is not None and _is_other_copy(sender.folder, stored):
        sender.close_copy()  # the other has all of it
        if stored.info.status != "RUNNING":
            return True
        sender.folder = Path()
    if not sender.has_folder:
        return _end_without_folder(sender.client, stored, dead)
    if sender.state.closed:
        return True
    log = sender.folder / LOG
    end_ms = int(log.stat().st_mtime * 1000) if log.is_file() else None
    run = read_end(sender.folder)
    if run.get("status") not in ENDS:
        run = {"status": stored.info.status}  # all that is known of an end on a full disk
        if run["status"] == "RUNNING":
            run["status"] = _read_told_end(stored)
        if not run["status"]:
            run = {"status": "KILLED", "error": dead, "tags": {END_REASON: dead}}
        # MLflow may not have been told of the newest of them.
        run["tags"] = {**stored.data.tags, **read_logged_tags(log), **run.get("tags", {})}
        if run["status"] != "KILLED" and run["tags"].get(END_REASON, "").startswith(DEAD):
            del run["tags"][END_REASON]  # a guess of before its end was told
        if not _append_end(sender, run):
            return False
    run = {"params": stored.data.params, "metrics": stored.data.metrics, **run}
    told = run.get("tags", {})
    dropped = {UNSENT, END_STATUS} | {END_REASON} - told.keys()
    kept = {k: v for k, v in {**stored.data.tags, **told}.items() if k not in dropped}
    run["tags"] = {k: v for k, v in kept.items() if not k.startswith("mlflow.")}
    sender.close({"name": stored.info.run_name, **run}, end_ms=end_ms)
    return True


def _read_told_end(run: Run) -> str:
    """Return how the run ended, as whoever sends its rest has told; empty where nobody has."""
    told = str(run.data.tags.get(END_STATUS, ""))
    return told if told in ENDS else ""


def _end_without_folder(client: MlflowClient, run: Run, dead: str) -> bool:
    """End a run whose folder is not here, as it was told to have ended, else as KILLED. Return
    False where its process is another host's or lives: no lock tells of somebody who goes on with
    it, or sends the rest of it, elsewhere meanwhile."""
    if not _is_dead_here(run):
        return False
    run_id, told = run.info.run_id, _read_told_end(run)
    if not told:
        client.set_tag(run_id, END_REASON, dead)
    status = told or "KILLED"
    client.set_terminated(run_id, status)
    for pause_s in LOOK_AGAIN_S:
        try:
            return not _correct_end(client, run_id, status, dead)
        except MlflowException:  # it does not answer now, and a run that trains must not stay so
            time.sleep(pause_s)
    return not _correct_end(client, run_id, status, dead)


def _correct_end(client: MlflowClient, run_id: str, status: str, dead: str) -> bool:
    """Set a run that was ended with this status to RUNNING again where somebody trains it since, or
    to the end that was told since; return whether that was so."""
    run = client.get_run(run_id)
    true = (_read_told_end(run) or status) if _is_dead_here(run) else "RUNNING"
    if run.info.status != status or true == status:
        return False
    client.update_run(run_id, status=true)
    if run.data.tags.get(END_REASON) == dead:
        client.delete_tag(run_id, END_REASON)
    return True


def _is_dead_here(run: Run) -> bool:
    tags = run.data.tags
    return bool(tags.get("host") == socket.gethostname() and not is_run_alive(tags))


def _is_double(sender: Sender) -> bool:
    """Return whether the run was made beside the one that its folder is sent to: MLflow's client
    asks again where a server's answer is lost, and the server then makes another."""
    if not sender.state.run_id or not _is_other(sender):
        return False
    if sender.client.get_run(sender.state.run_id).data.metrics:  # what was measured stays
        return False
    try:
        run = _read_known_run(sender.client, read_sent(sender.folder)["run_id"])
    except RunGone:
        return False
    is_of_folder = run.data.tags.get("journal") == sender.folder.name
    return is_of_folder and run.info.lifecycle_stage == "active"


def _is_other(sender: Sender) -> bool:
    """Return whether its folder is sent to another run than its own."""
    return read_sent(sender.folder).get("run_id", "") not in ("", sender.state.run_id)


def _append_end(sender: Sender, run: Mapping[str, Any]) -> bool:
    """Let the log say how the run ended, whose process could not; who looks at the folder learns
    it too. The time of the file stays that of the process's last line. Return False where somebody
    goes on with the run since it was looked at: who is about to waits for this."""
    folder = sender.folder
    with suppress(OSError), FileLock(folder / TRAINING_LOCK) as training:
        if not training.try_share() or _read_new_begin(folder, sender.state.begun) is not None:
            return False
        (folder / RESERVE).unlink(missing_ok=True)
        before = (folder / LOG).stat()
        append_event(folder, make_event(END, run, unix_ms=before.st_mtime_ns // 10**6))
        os.utime(folder / LOG, ns=(before.st_atime_ns, before.st_mtime_ns))
    return True


def _is_other_copy(folder: Path, run: Run) -> bool:
    """Return whether another copy of the folder went on with its run since."""
    with suppress(TypeError):
        return bool(find_other_copy(run, _read_marks(folder)))
    return False


def _read_marks(folder: Path) -> list[str]:
    """Return the marks of the times that this folder went on, the newest last, by start.json and by
    the log: a power cut may have taken the newest from either."""
    kept: list[str] = read_json(folder / START).get("marks", [])
    claims = [content.get("claim", {}) for content, _ in read_begins(folder / LOG, 0)]
    logged = [mark for claim in claims for mark in claim.get("marks", ())]
    later = logged if logged and logged[-1] not in kept else kept
    return [mark for mark in [*logged, *kept] if mark not in later] + later


def _describe_run(sender: Sender) -> dict[str, str]:
    """Return the names by which a person and Prefect know the run. Raises NotOurs where MLflow
    alone knows whose it is, and that is somebody else."""
    begin = _read_new_begin(sender.folder, 0) if sender.has_folder else None
    if begin is not None:
        said = _read_sent_state(sender.folder)
        run_id = sender.state.run_id or (said.run_id if said is not None else "")
        name, tags = begin.get("name", sender.folder.name), begin["tags"]
    else:
        known_id = sender.state.run_id
        run = (
            sender.client.get_run(known_id) if known_id else find_run(sender.client, sender.folder)
        )
        name, run_id, tags = run.info.run_name, run.info.run_id, run.data.tags
        if not _is_dead_here(run):
            raise NotOurs(run_id)
    return {"name": name, "run_id": run_id, "flow_run": tags.get("prefect.flow_run_id", "")}


def answer_tidy(act: Callable[..., Iterator[Any]]) -> dict[str, Any]:
    """Print what `act` yields of MLflow's runs, a line of JSON each, as `flows.tidy` has asked for
    on standard input; return what was asked for, empty where nothing was."""
    if not (asked := sys.stdin.read()):  # who asked was killed before
        return {}
    order: dict[str, Any] = json.loads(asked)
    chosen = TrackingSettings(**order["where"])
    try:
        client = make_client(chosen.tracking_uri)
        ids = [experiment.experiment_id for experiment in client.search_experiments()]
        for one in act(client, chosen, ids, does=order["does"]):
            print(json.dumps(asdict(one)), flush=True)
    except Exception as error:  # whatever it is, who asked has to hear of it
        print(json.dumps({"problem": explain_error(error, chosen)}))
    return order


def main() -> None:
    """Print each run that was left as a line of JSON, and end it where `does` is asked for."""
    if order := answer_tidy(send_left_runs):
        runs = Path(order["where"]["runs"])
        prefect_http.correct_flow_runs(order.get("prefect_api", ""), runs)


if __name__ == "__main__":
    main()
