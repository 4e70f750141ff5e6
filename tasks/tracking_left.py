"""Runs that were left behind: those that say RUNNING though their process is gone, and those that
MLflow could not be told of in time. Each is sent and ended by whoever comes next. Part of the
sending process.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import ViewType
from mlflow.exceptions import MlflowException

from tasks.prefect_left import is_alive
from tasks.tracking_run import Sender, State, lock
from tasks.where import Where

DEAD = "its process was gone"


def close_the_dead(client: MlflowClient, chosen: Where, experiment_id: str) -> None:
    """End the runs of this host that say RUNNING though their process is gone."""
    host = socket.gethostname().replace("'", "")
    query = f"attributes.status = 'RUNNING' and tags.host = '{host}'"
    for run in client.search_runs([experiment_id], query, ViewType.ALL, max_results=100):
        tags = run.data.tags
        if is_alive(tags.get("pid", ""), tags.get("process.started_at", "")):
            continue
        name = tags.get("journal", "")  # anybody's text: only a folder of ours is opened
        folder = Path(chosen.runs) / name if name in _folders(chosen) else Path()
        resend(Sender(client, chosen, folder, State(run.info.run_id, experiment_id)))


def _folders(chosen: Where) -> set[str]:
    return {file.parent.name for file in Path(chosen.runs).glob("*/sent.json")}


def send_the_unsent(client: MlflowClient, chosen: Where) -> None:
    """Send what earlier runs could not, and whose processes are gone."""
    for name in sorted(_folders(chosen)):
        # Whatever is wrong with one of them, the others are sent; it stays to be sent by hand.
        with suppress(MlflowException, OSError, ValueError, TypeError):
            folder = Path(chosen.runs) / name
            state = State(**json.loads((folder / "sent.json").read_text()))
            if not state.closed and _is_gone(client, state):
                resend(Sender(client, chosen, folder, state))


def _is_gone(client: MlflowClient, state: State) -> bool:
    """Whether its process was one of this host and is no more."""
    tags = client.get_run(state.run_id).data.tags
    is_here = tags.get("host") == socket.gethostname()
    return is_here and not is_alive(tags.get("pid", ""), tags.get("process.started_at", ""))


def resend(sender: Sender) -> bool:
    """Send what the folder holds, and end the run as its process ended it, or as KILLED. False
    where another process is at it."""
    if sender.held is None and sender.folder.is_dir() and sender.folder != Path():
        sender.held = lock(sender.folder)
        if sender.held is None:
            return False
    try:
        _resend(sender)
    finally:
        if sender.held is not None:
            sender.held.close()
            sender.held = None
    return True


def _resend(sender: Sender) -> None:
    with suppress(OSError, ValueError, TypeError):
        sender.state = State(**json.loads((sender.folder / "sent.json").read_text()))
    if sender.state.closed:
        return
    if not sender.folder.is_dir() or sender.folder == Path():
        sender.client.set_tag(sender.state.run_id, "end.reason", DEAD)
        sender.client.set_terminated(sender.state.run_id, "KILLED")
        return
    stored = sender.client.get_run(sender.state.run_id)
    try:
        run = json.loads((sender.folder / "run.json").read_text())
    except (OSError, ValueError):
        run = {"status": stored.info.status}  # all that is known of an end on a full disk
        if run["status"] == "RUNNING":
            run = {"status": "KILLED", "error": DEAD, "tags": {"end.reason": DEAD}}
    run = {"params": stored.data.params, "metrics": stored.data.metrics, **run}
    run["tags"] = {**stored.data.tags, **run.get("tags", {})}
    run["tags"] = {k: v for k, v in run["tags"].items() if not k.startswith("mlflow.")}
    sender.close({"name": stored.info.run_name, **run})
