"""The sending process: the only importer of mlflow. It reads a run's journal from its folder and
writes it to MLflow by the run's id, in batches, while the training goes on; it ends the run, with
its true status, also when the training process has died. It takes instructions as JSON lines.

`python -m tasks.tracking FOLDER` sends what a run left there while MLflow was away.
"""

from __future__ import annotations

import json
import math
import os
import platform
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

# MLflow's defaults wait four minutes for a server that is away; the journal waits better.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")

import psutil  # noqa: E402 (mlflow reads the environment when it is imported)
from mlflow import MlflowClient  # noqa: E402
from mlflow.entities import Metric, Param, RunStatus, RunTag, ViewType  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402

from tasks import tracking_model, tracking_store  # noqa: E402
from tasks.engine import report  # noqa: E402
from tasks.where import TrackingError, Where, redacted, where  # noqa: E402

BATCH = 1000  # metrics in one request: MLflow's limit
PARAMS = 100
TAG_LIMIT = 7900  # characters; over 8,000 MLflow cuts, or refuses
DEAD = "its process was gone"


@dataclass
class State:
    """How far a run's journal was sent; kept beside it as sent.json."""

    run_id: str
    experiment_id: str
    offset: int = 0  # bytes of metrics.jsonl
    closed: bool = False


@dataclass
class Sender:
    """One run in MLflow."""

    client: MlflowClient
    where: Where
    folder: Path
    state: State
    tags: dict[str, str] = field(default_factory=dict)
    retry_at: float = 0.0
    wait_s: float = 1.0

    def flush(self) -> None:
        """Send the metrics that are new. Raises what MLflow raises; nothing is lost then."""
        with suppress(FileNotFoundError), open(self.folder / "metrics.jsonl", "rb") as journal:
            journal.seek(self.state.offset)
            for batch, offset in _batches(journal.read(), self.state.offset):
                self.client.log_batch(self.state.run_id, metrics=batch)
                self.state.offset = offset
                self._keep()
        if self.tags:
            tags = [RunTag(k, v[:TAG_LIMIT]) for k, v in self.tags.items()]
            self.client.log_batch(self.state.run_id, tags=tags)
            self.tags.clear()

    def flush_patiently(self) -> None:
        """Send, or try again later: the training must not notice that MLflow is away."""
        if time.monotonic() < self.retry_at:
            return
        try:
            self.flush()
            self.wait_s = 1.0
        except Exception as error:  # of any store: sqlite's, the network's, the server's
            print(f"{self.state.run_id}: kept, not yet sent: {redacted(str(error))}", file=sys.stderr)
            self.retry_at = time.monotonic() + self.wait_s
            self.wait_s = min(30.0, 2 * self.wait_s)

    def close(self, run: dict[str, Any]) -> None:
        """Send all that is left and end the run. Raises what MLflow raises."""
        run_id = self.state.run_id
        self.tags |= {k: str(v) for k, v in run.get("tags", {}).items()}
        self.flush()
        run = {**run, "run_id": run_id, "experiment_id": self.state.experiment_id}
        run["series"] = series(self.folder / "metrics.jsonl")
        command = run.get("open_command", "make ui")
        plots = report.plots(run, self._made("plots"))
        page = report.html(run, plots, open_command=command)
        (self.folder / "report.html").write_text(page, encoding="utf-8")
        note = report.markdown(run, open_command=command)
        self.client.set_tag(run_id, "mlflow.note.content", note)
        (self.folder / "environment.txt").write_text(environment())
        if run["status"] == "FINISHED" and (self.folder / "model").is_dir():
            tracking_model.log(self.client, self.state, self.folder)
        for name in sorted(os.listdir(self.folder)):
            if name not in ("sent.json", "run.json", "model"):
                self._artifact(self.folder / name)
        self.client.set_terminated(run_id, run["status"])
        self.state.closed = True
        self._keep()

    def _artifact(self, path: Path) -> None:
        if path.is_dir():
            self.client.log_artifacts(self.state.run_id, str(path), path.name)
        else:
            self.client.log_artifact(self.state.run_id, str(path))

    def _made(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def _keep(self) -> None:
        half = self.folder / "sent.json.new"
        half.write_text(json.dumps(vars(self.state)))
        half.rename(self.folder / "sent.json")


def _batches(lines: bytes, offset: int) -> Iterator[tuple[list[Metric], int]]:
    """Whole lines as batches, each with the offset behind it; half a line waits for its end."""
    batch: list[Metric] = []
    for line in lines.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        entry = json.loads(line)
        # MLflow would store an infinity as 1.797e308, a number that nobody measured.
        kept = [(k, v) for k, v in entry["metrics"].items() if not math.isinf(v)]
        if len(batch) + len(kept) > BATCH:
            yield batch, offset
            batch = []
        batch += [Metric(k, v, entry["t"], entry["step"]) for k, v in kept]
        offset += len(line)
    if batch:
        yield batch, offset


def series(journal: Path) -> dict[str, list[list[float]]]:
    """What was logged, by name: [step, value, unix ms], in order."""
    found: dict[str, list[list[float]]] = {}
    with suppress(FileNotFoundError), open(journal) as lines:
        for line in lines:
            if not line.endswith("\n"):
                break
            entry = json.loads(line)
            for key, value in entry["metrics"].items():
                found.setdefault(key, []).append([entry["step"], value, entry["t"]])
    return found


def code_version() -> dict[str, str]:
    """The commit that this project's code is at, and whether files differ from it."""

    def ask(*words: str) -> str | None:
        here = Path(__file__).parent
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit = ask("rev-parse", "HEAD")
        changes = ask("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.TimeoutExpired):
        return {}  # no git here, or no answer from it: not known
    if not commit or changes is None:
        return {}
    dirty = str(bool(changes)).lower()
    return {"git.commit": commit, "mlflow.source.git.commit": commit, "git.dirty": dirty}


def environment() -> str:
    """Python, the platform, and every package with its version."""
    packages = sorted({f"{d.name}=={d.version}" for d in distributions()}, key=str.lower)
    head = f"# Python {platform.python_version()} on {platform.platform()}"
    return "\n".join([head, *packages]) + "\n"


def create(
    client: MlflowClient,
    chosen: Where,
    *,
    experiment_id: str,
    folder: Path,
    name: str,
    params: dict[str, str],
    tags: dict[str, str],
) -> Sender:
    """A new run with its params and tags."""
    tags = {k: v[:TAG_LIMIT] for k, v in tags.items()}
    run = client.create_run(experiment_id, run_name=name, tags={**tags, "journal": str(folder)})
    entries = [Param(k, v[:5900]) for k, v in params.items()]
    for i in range(0, len(entries), PARAMS):
        client.log_batch(run.info.run_id, params=entries[i : i + PARAMS])
    sender = Sender(client, chosen, folder, State(run.info.run_id, experiment_id))
    sender._keep()
    return sender


def close_the_dead(client: MlflowClient, chosen: Where, experiment_id: str) -> None:
    """End the runs of this host that say RUNNING though their process is gone."""
    host = socket.gethostname().replace("'", "")
    query = f"attributes.status = 'RUNNING' and tags.host = '{host}'"
    for run in client.search_runs([experiment_id], query, ViewType.ALL, max_results=100):
        tags = run.data.tags
        if is_alive(tags.get("pid", ""), tags.get("process.started_at", "")):
            continue
        sender = Sender(
            client, chosen, Path(tags.get("journal", "")), State(run.info.run_id, experiment_id)
        )
        resend(sender)


def is_alive(pid: str, started_at: str) -> bool:
    """Whether that very process is there; a pid alone may be another process by now."""
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(started_at)) < 1
    except (psutil.NoSuchProcess, ValueError):
        return False


def resend(sender: Sender) -> None:
    """Send what the folder holds, and end the run as its process ended it, or as KILLED."""
    with suppress(OSError, ValueError, TypeError):
        sender.state = State(**json.loads((sender.folder / "sent.json").read_text()))
    if sender.state.closed:
        return
    try:
        run = json.loads((sender.folder / "run.json").read_text())
    except (OSError, ValueError):
        run = {"status": "KILLED", "error": DEAD, "tags": {"end.reason": DEAD}}
    if not sender.folder.is_dir() or sender.folder == Path():
        sender.client.set_tag(sender.state.run_id, "end.reason", DEAD)
        sender.client.set_terminated(sender.state.run_id, run["status"])
        return
    stored = sender.client.get_run(sender.state.run_id)
    run = {"params": stored.data.params, "metrics": stored.data.metrics, **run}
    run["tags"] = {**stored.data.tags, **run.get("tags", {})}
    run["tags"] = {k: v for k, v in run["tags"].items() if not k.startswith("mlflow.")}
    sender.close({"name": stored.info.run_name, **run})


class Session:
    """Instructions in, answers out, for one training process."""

    def __init__(self) -> None:
        self.client: MlflowClient | None = None
        self.where: Where | None = None
        self.experiment_id = ""
        self.sender: Sender | None = None
        self.is_swept = False

    def obey(self, order: dict[str, Any]) -> dict[str, Any] | None:
        match order.pop("do"):
            case "open":
                self.where = Where(**order["where"])
                self.client, self.experiment_id = tracking_store.open_experiment(self.where)
                return {"ready": True}
            case "create":
                assert self.client is not None and self.where is not None
                order["folder"] = Path(order["folder"])
                self.sender = create(
                    self.client, self.where, experiment_id=self.experiment_id, **order
                )
                state = self.sender.state
                return {"run_id": state.run_id, "experiment_id": state.experiment_id}
            case "tag":
                assert self.sender is not None
                self.sender.tags |= order["tags"]
                return None
            case "close":
                assert self.sender is not None
                self.close()
                return {"closed": True}
        raise AssertionError("an unknown instruction")

    def idle(self) -> None:
        """Between instructions: send what is new, then what makes the end faster."""
        if self.sender is None:
            return
        self.sender.flush_patiently()
        if not self.is_swept:
            self.is_swept = True
            self.sender.tags |= code_version()
            report.load_plotting()
            assert self.client is not None and self.where is not None
            with suppress(MlflowException):  # somebody else's runs: not worth this run's end
                close_the_dead(self.client, self.where, self.experiment_id)

    def close(self) -> None:
        """End the run, trying again until `give_up_s` have passed."""
        assert self.sender is not None and self.where is not None
        run = json.loads((self.sender.folder / "run.json").read_text())
        until = time.monotonic() + self.where.give_up_s
        while True:
            try:
                return self.sender.close(run)
            except (MlflowException, OSError) as error:
                if time.monotonic() > until:
                    raise
                print(f"not closed yet: {redacted(str(error))}", file=sys.stderr)
                time.sleep(1)

    def end(self) -> None:
        """The training process is gone. If it did not close the run, it was killed."""
        if self.sender is not None and not self.sender.state.closed:
            resend(self.sender)
        if self.where is not None:
            tracking_store.sweep_journals(Path(self.where.runs), keep=self.where.keep_runs)


def main() -> None:
    """Obey the training process until it closes its end of the pipe."""
    answers, session, pending = os.fdopen(os.dup(1), "w", buffering=1), Session(), b""
    os.dup2(2, 1)  # what a library prints is not an answer
    while True:
        pause_s = session.where.flush_s if session.where is not None and session.is_swept else 0.05
        if not select.select([0], [], [], pause_s)[0]:
            session.idle()
            continue
        read = os.read(0, 1 << 16)
        if not read:
            return session.end()
        *orders, pending = (pending + read).split(b"\n")
        for order in orders:
            try:
                answer = session.obey(json.loads(order))
            except Exception as error:  # whatever it is, the training process has to hear of it
                answer = {"error": tracking_store.explained(error, session.where)}
            if answer is not None:
                with suppress(BrokenPipeError):
                    print(json.dumps(answer), file=answers)


def send_folder(folder: Path) -> int:
    """Send one run's folder now."""
    try:
        state = State(**json.loads((folder / "sent.json").read_text()))
        client = MlflowClient(where().tracking_uri)
        resend(Sender(client, where(), folder, state))
    except (OSError, TrackingError, MlflowException) as error:
        print(f"{folder}: not sent: {redacted(str(error))}", file=sys.stderr)
        return 1
    print(f"{folder}: sent, run {state.run_id}")
    return 0


if __name__ == "__main__":
    sys.exit(send_folder(Path(sys.argv[1])) if len(sys.argv) > 1 else main())
