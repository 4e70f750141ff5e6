"""The sending process: with the files beside it the only importer of mlflow. It follows the event
log in the folder of a run, and sends to MLflow what is new there. The training process tells it, in
lines of JSON, where MLflow is, and then of which folder there is more to read.

`python -m headroom.tracking.mlflow_sender FOLDER` sends what a run left there while MLflow was
away.
"""

from __future__ import annotations

import gc
import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# MLflow's defaults wait four minutes for a server that is away; the journal waits better.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
# Where its address is not to be had, the thread of MLflow's telemetry takes a variable out of the
# environment while a request reads it, which then fails.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import psutil  # noqa: E402

from headroom.process.command import pause_collection  # noqa: E402

with pause_collection():
    from mlflow import MlflowClient  # it reads the environment when it is imported
    from mlflow.exceptions import MlflowException
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    from headroom.base.event_log import read_end
    from headroom.base.file_lock import FileLock
    from headroom.prefect import prefect_http
    from headroom.process.redaction import redact, redact_output
    from headroom.report import run_report
    from headroom.tracking import mlflow_store, orphaned_runs, send_later
    from headroom.tracking.answer_limits import make_client
    from headroom.tracking.journal import RunGone
    from headroom.tracking.orphaned_runs import LeftRun
    from headroom.tracking.query_runs import find_newest_metrics, read_history
    from headroom.tracking.run_sender import (
        Sender,
        SendingState,
        make_telemetry,
        try_sending_lock,
        wait_for_sending_lock,
    )
    from headroom.tracking.tracking_settings import (
        TrackingError,
        TrackingSettings,
        read_tracking_settings,
    )
    from headroom.watch import host_memory

SYSTEM_METRICS_AFTER_S = 5.0  # MLflow samples the host every 10 s: a short run has none to tell
# The pipe of a process that is killed ends before the kernel has let go of all of its locks.
LET_GO_S = (0.1, 0.5, 2.0)


class Session:
    """Sends the run of one training process, and answers what that waits for."""

    def __init__(self, answer: Callable[[dict[str, Any]], None]) -> None:
        self.answer = answer
        self.client: MlflowClient | None = None
        self.where: TrackingSettings | None = None
        self.prefect_api = ""
        self.training: psutil.Process | None = None
        self.experiment_id = ""
        self.sender: Sender | None = None
        self.wake: dict[str, Any] = {}  # the newest: which folder, and what is known of its run
        self.is_patient = False  # MLflow hears of the run's begin as soon as it is there
        self.held: FileLock | None = None  # the folder's lock, until then
        self.retry_at, self.wait_s = 0.0, 1.0
        self.is_swept = False
        self.left: Iterator[LeftRun] = iter(())  # other runs, each sent when it is asked for
        self.opened_at = math.inf
        self.gate_of = ""  # of the runs that this one is compared with
        self.source = ""  # the file that trains
        self.system: SystemMetricsMonitor | None = None
        self.kills = host_memory.count_kills()  # by the kernel, before this run

    def hear(self, line: dict[str, Any]) -> None:
        """Take a line of the training process, and answer it."""
        if "where" in line:
            return self._answer_for("open", lambda: self.open(**line))
        if "take_back" in line:
            return self._answer_for("take_back", lambda: self.take_back(**line))
        self.wake = line
        folder = Path(line["folder"])
        if end := line.get("end") or read_end(folder):
            self._answer_for("close", lambda: self.close(end))
        elif "wanted" in line:
            self._answer_for("begin", self.begin)
        elif self.sender is None:
            self.is_patient = True  # nobody waits for it
            with suppress(OSError, TrackingError):  # told when the run is begun
                self.held = self.held or try_sending_lock(folder)

    def take_back(self, take_back: str, again: bool) -> dict[str, Any]:
        """Let MLflow have nothing of the run that has begun in that folder: another is gone on with
        in its place. again: the sending process before this one died at it.

        Raises what MLflow raises.
        """
        if self.system is not None:
            self.system.finish()
        sender, self.sender = self.sender, None  # where this fails the run is begun once more
        if sender is not None:
            sender.telemetry.close()
            self._delete_run(sender.state.run_id)
        elif again:
            self._reopen_client()
            assert self.client is not None
            with suppress(ValueError):  # MLflow has none
                self._delete_run(orphaned_runs.find_run(self.client, Path(take_back)).info.run_id)
        if self.held is not None:
            self.held.close()
        self.system = self.held = None
        self.is_patient, self.opened_at, self.gate_of = False, math.inf, ""
        return {}

    def _delete_run(self, run_id: str) -> None:
        """Delete the run. Where only the answer was lost it is deleted, and can't be gone on with:
        MLflow is asked. Raises what MLflow raises."""
        assert self.client is not None
        try:
            self.client.set_terminated(run_id, "KILLED")  # nobody looks for its process then
            self.client.set_tag(run_id, "end.reason", orphaned_runs.TAKEN_BACK)
            self.client.delete_run(run_id)
        except MlflowException:
            if self.client.get_run(run_id).info.lifecycle_stage != "deleted":
                raise

    def _answer_for(self, to: str, call: Callable[[], dict[str, Any]]) -> None:
        """Answer with what the call returns, or with why it can't: the training process has to
        hear of it, whatever it is."""
        try:
            answer = call()
        except RunGone as gone:
            answer = {"gone" if to == "begin" else "error": str(gone)}
        except Exception as error:  # of any store
            is_kept = to != "close" and mlflow_store.may_answer_later(error, self.where)
            self.is_patient = self.is_patient or (is_kept and to == "begin")
            text = mlflow_store.explain_error(error, self.where)
            answer = {"away" if is_kept else "error": text}
        self.answer({"to": to, **answer})

    def open(self, where: dict[str, Any], prefect_api: str = "", pid: int = 0) -> dict[str, Any]:
        """Open the experiment. Raises what MLflow raises."""
        self.where, self.prefect_api = TrackingSettings(**where), prefect_api
        self.watch(pid)
        self.answer({"to": "open"})  # MLflow is imported
        with pause_collection():  # it imports MLflow's store
            self.client, self.experiment_id = mlflow_store.open_experiment(self.where)
        notes = [*mlflow_store.notes]
        mlflow_store.notes.clear()
        return {"ready": True, "notes": notes}

    def _reopen_client(self) -> None:
        """Open the experiment, where MLflow was away at first. Raises what MLflow raises."""
        assert self.where is not None
        if self.client is None:
            self.client, self.experiment_id = mlflow_store.open_experiment(self.where)

    def watch(self, pid: int) -> None:
        """Let `is_alone` know that very process, whatever happens to its number."""
        with suppress(psutil.NoSuchProcess):  # then the pipe has ended
            self.training = psutil.Process(pid) if pid else None

    def is_alone(self) -> bool:
        """Return whether the training's process is gone, though its end of the pipe is held.

        What was forked behind Python's back may hold it.
        """
        if self.training is None:
            return False
        with suppress(psutil.NoSuchProcess):
            is_there = self.training.is_running()
            return not is_there or self.training.status() == psutil.STATUS_ZOMBIE
        return True

    def begin(self, *, is_over: bool = False) -> dict[str, Any]:
        """Let MLflow know how the run began, or that it goes on. is_over: it has ended since.

        Raises what MLflow raises.
        """
        self._reopen_client()
        assert self.where is not None and self.client is not None
        experiment_id = self.wake.get("experiment_id") or self.experiment_id
        folder, past = Path(self.wake["folder"]), {}
        self.held = self.held or wait_for_sending_lock(folder)
        tags = orphaned_runs.read_tags(folder)
        if "wanted" in self.wake and not self.is_patient:
            past = find_newest_metrics(
                self.client, experiment_id, tags.get("alike", ""), self.wake["wanted"]
            )
        ids = {"run_id": self.wake.get("run_id", ""), "experiment_id": experiment_id}
        try:
            sender = orphaned_runs.begin_run(self.client, self.where, folder, **ids)
        except RunGone:  # another one may begin, in another folder
            self.held.close()
            self.held = None
            raise
        sender.held = self.held
        self.sender, self.opened_at = sender, time.monotonic()
        self.experiment_id = sender.state.experiment_id
        self.gate_of = tags.get("gate.of", "")
        self.source = tags.get("mlflow.source.name", "")
        ids = {"run_id": sender.state.run_id, "experiment_id": sender.state.experiment_id}
        if not is_over:
            sender.telemetry = make_telemetry(self.client, sender.state.run_id, tags)
        return {**ids, "past": past}

    @property
    def is_begin_due(self) -> bool:
        """Whether the run has started without MLflow and is to be begun there now."""
        return self.is_patient and self.sender is None and time.monotonic() >= self.retry_at

    def begin_patiently(self) -> None:
        """Begin the run in MLflow that has started without it, or try again later."""
        if not self.is_begin_due:
            return
        try:
            self.answer({"to": "begin", **self.begin()})
        except Exception as error:  # of any store: sqlite's, the network's, the server's
            print(f"kept, not yet begun: {redact(str(error))}", file=sys.stderr)
            self.retry_at = time.monotonic() + self.wait_s
            self.wait_s = min(30.0, 2 * self.wait_s)

    def idle(self) -> None:
        """Send what is new while nobody waits, then do what makes the end faster."""
        if self.sender is None:
            return self.begin_patiently()
        self.tell_history()  # first: a short run's end waits for it
        self.sender.flush_patiently()
        if self.system is None and time.monotonic() - self.opened_at > SYSTEM_METRICS_AFTER_S:
            assert self.where is not None
            run_id, uri = self.sender.state.run_id, self.where.tracking_uri
            self.system = SystemMetricsMonitor(run_id, tracking_uri=uri)
            self.system.start()
        if not self.is_swept:
            self.is_swept = True
            self.sender.tags |= read_code_version(self.source)
            with pause_collection():
                run_report.load_plotting()
            assert self.client is not None and self.where is not None
            self.left = self.send_left_runs(with_ended=False)
            self.correct_flow_runs()
        else:
            self.send_one_left()  # this run's end may be asked for: it would wait for all of them

    def send_left_runs(self, *, with_ended: bool) -> Iterator[LeftRun]:
        assert self.client is not None and self.where is not None
        experiments = [self.experiment_id]
        return orphaned_runs.send_left_runs(
            self.client, self.where, experiments, with_ended=with_ended
        )

    def send_one_left(self) -> bool:
        """Send what the next run has left whose process is gone. False after the last."""
        # Somebody else's runs and files: not worth this run's end.
        with suppress(MlflowException, OSError, ValueError):
            if (left := next(self.left, None)) is not None:
                if left.problem:
                    said = f"left behind, and not sent: {left.problem}"
                    print(f"{left.run_id or left.folder}: {said}", file=sys.stderr)
                return True
        return False

    def tell_history(self) -> None:
        """Answer once with the runs that the end of this run is compared with."""
        if self.gate_of and self.client is not None:
            history = read_history(self.client, self.experiment_id, self.gate_of)
            self.gate_of = ""
            self.answer({"history": history})

    def correct_flow_runs(self) -> None:
        """Give flow runs of this folder their true end in Prefect too.

        Its server may be gone, or ask for a password: then the next run does it.
        """
        assert self.where is not None
        prefect_http.correct_flow_runs(self.prefect_api, Path(self.where.runs))

    def close(self, run: dict[str, Any]) -> dict[str, Any]:
        """End the run, trying again until `give_up_s` have passed; return the answer to that."""
        if self.sender is None:
            self.answer({"to": "begin", **self.begin(is_over=True)})
            # Who has gone on with the run meanwhile may have told another end, or none yet.
            run = read_end(Path(self.wake["folder"])) or self.wake.get("end", {})
            if not run:
                raise RunGone("another process goes on with the run, and tells MLflow of all of it")
        assert self.sender is not None and self.where is not None
        self.sender.told_progress = partial(self.answer, {"to": "close", "sending": True})
        if self.system is not None:
            self.system.finish()
        until = time.monotonic() + self.where.give_up_s
        while True:
            try:
                times = self.sender.close(run)
                break
            except (MlflowException, OSError) as error:
                if time.monotonic() > until:
                    raise
                print(f"not closed yet: {redact(str(error))}", file=sys.stderr)
                time.sleep(1)
        return {"closed": True, "times": times, "registered": self.sender.registered}

    def end(self) -> None:
        """End the run where the training process is gone without closing it: it was killed."""
        if self.where is None:
            return
        self.begin_patiently()  # a run that began without waiting may have died at once
        if self.sender is not None and not self.sender.state.closed:
            killed = host_memory.describe_kills_since(self.kills)
            dead = f"{orphaned_runs.DEAD}{killed and ', '}{killed}"
            try:
                for pause_s in LET_GO_S:
                    if orphaned_runs.send_rest(self.sender, dead=dead):
                        break
                    time.sleep(pause_s)
            except Exception as error:  # of any store
                said = f"left behind, and not sent: {redact(str(error))}"
                print(f"{self.sender.folder.name}: {said}", file=sys.stderr)
        elif self.held is not None:
            self.held.close()
        if self.client is not None and self.sender is not None:  # MLflow answers, as it seems
            self.left = self.send_left_runs(with_ended=True)
            while self.send_one_left():
                pass
        self.correct_flow_runs()
        mlflow_store.remove_old_journals(Path(self.where.runs), keep=self.where.keep_runs)
        if self.where.send_later_s and send_later.is_needed(Path(self.where.runs)):
            send_later.replace_process(self.where, self.prefect_api)


def read_code_version(source: str = "") -> dict[str, str]:
    """Return the commit of the code as tags, and whether files differ from it: of the file `source`
    where that is somebody's own, else of this project.

    Empty where git is not here or does not answer.
    """
    here = Path(source).parent if os.path.isabs(source) else Path(__file__).parent.parent

    def ask(*words: str) -> str | None:
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


def main() -> None:
    """Send the run of the training process until that closes its end of the pipe."""
    answers, pending = os.fdopen(os.dup(1), "w", buffering=1), b""
    os.dup2(2, 1)  # what a library prints is not an answer

    def tell(answer: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):
            print(json.dumps(answer), file=answers)

    session = Session(tell)
    redact_output(is_log=True)
    while True:
        is_quick = session.is_begin_due or (session.sender is not None and not session.is_swept)
        pause_s = session.where.flush_s if session.where is not None and not is_quick else 0.05
        if not select.select([0], [], [], pause_s)[0]:
            if session.is_alone():
                return session.end()
            session.idle()
            continue
        read = os.read(0, 1 << 16)
        if not read:
            return session.end()
        *lines, pending = (pending + read).split(b"\n")
        for line in lines:
            session.hear(json.loads(line))


def send_folder(folder: Path) -> int:
    """Send one run's folder now. Returns the exit code."""
    try:
        chosen = read_tracking_settings()
        sender = Sender(make_client(chosen.tracking_uri), chosen, folder, SendingState("", ""))
        if not orphaned_runs.send_rest(sender):
            print(f"{folder}: not sent: another process is sending it", file=sys.stderr)
            return 1
    except (OSError, ValueError, MlflowException) as error:
        print(f"{folder}: not sent: {redact(str(error))}", file=sys.stderr)
        return 1
    print(f"{folder}: sent, run {sender.state.run_id}")
    return 0


if __name__ == "__main__":
    gc.freeze()  # what MLflow has made stays: to look through it takes what the training could use
    if len(sys.argv) > 1:
        sys.exit(send_folder(Path(sys.argv[1])))
    main()
