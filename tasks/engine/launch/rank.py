"""One rank of a training: it joins the others, trains its share and checks that it freed its
memory. `python -m tasks.engine.launch.rank` is such a process: it is started by PyTorch's
launcher, gets its job from the process that started the training, and reports all that happens
to it.
"""

from __future__ import annotations

if __name__ == "__main__":
    from tasks.engine.launch.parent_death import end_with_parent

    end_with_parent()  # before PyTorch is imported: that takes seconds

import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tasks.engine.accounts.step_metrics import Log
from tasks.engine.base.facts import DataFacts, DeviceFacts, TrainFacts
from tasks.engine.data.preparation import prepare_dataset
from tasks.engine.device.detection import DeviceError, detect_best_device
from tasks.engine.distributed.ranks import (
    LostRank,
    Meeting,
    Ranks,
    RestartableError,
    describe_peer_error,
    is_lost_peer,
    join_ranks,
    read_failure,
    read_micro_batches,
    read_ranks_from_environment,
    refuse_different,
    shorten_peer_error,
    store_failure,
    store_micro_batch,
)
from tasks.engine.files.source_data import DataError
from tasks.engine.launch.launcher import AGAIN
from tasks.engine.launch.placement import choose_device_name, find_rank_device
from tasks.engine.memory.leaks import release_device_memory, take_baseline
from tasks.engine.settings.model_args import ModelError
from tasks.engine.settings.read_settings import ConfigError
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.step.plan import make_plan
from tasks.engine.training import trainer
from tasks.engine.training.admission import PastRuns
from tasks.engine.training.loop import StopCheck, StopRequest, TrainingLeft, leave_training
from tasks.engine.training.shared_model import MicroBatchTooLarge, summarize_ranks

MIB = 1024**2
ADDRESS = "HEADROOM_RANKS"  # where a rank finds the process that asked for it
LEAVE_S = 10  # for a checkpoint of all, after a signal
FIRST_S = 1.0  # for the rank that has failed to say so itself
_logger = logging.getLogger("tasks.engine.launch.rank")  # also of a process that runs this file


class FailedRank(RuntimeError):
    """Another rank failed, in these words: its error itself is there."""


@dataclass(frozen=True)
class Job:
    """The training that all ranks do together."""

    config: RunConfig
    data: DataFacts
    past: PastRuns
    folder: Path
    resumes: bool


def train_together(
    job: Job,
    device: DeviceFacts,
    ranks: Ranks,
    *,
    log: Log,
    asked: StopCheck = lambda: None,
    is_flow: bool = False,
) -> TrainFacts:
    """Train as one of the ranks; return the facts, on the lead with what all of them measured.
    is_flow: this is the process of the flow, which will look for its leaks itself.

    Raises what trainer.train raises, MicroBatchTooLarge among it, of which those who begin
    again will know; LostRank where another rank is gone, and FailedRank with its words where
    another one failed.
    """
    tried: list[int] = []
    launch = job.config.launch
    with join_ranks(
        ranks, torch.device(device.name), wait_s=launch.wait_s, timeout_s=launch.timeout_s
    ) as meeting:
        store = meeting.store
        try:
            refuse_different(ranks, _describe_start(job, device))
            past, resumes, tried = ranks.broadcast(
                (job.past, job.resumes, read_micro_batches(store) if ranks.is_lead else [])
            )
            if tried:
                past = PastRuns(past.metrics | {"memory/micro_batch": min(tried)})
            facts = trainer.train(
                make_plan(job.config, device, job.data),
                past=past,
                folder=_agree_on_folder(job, ranks),
                log=log,
                resumes=resumes,
                asked=asked,
                ranks=ranks,
            )
            held = release_device_memory(
                device.name, baseline_bytes=device.baseline_bytes, held_bytes=facts.held_bytes
            )
            leaked = {"memory/leaked_mib": held.leaked_bytes / MIB}
            released = summarize_ranks(ranks, device.name, leaked)
            leaks = ranks.all_gather(() if is_flow else held.owners)
        except TrainingLeft:
            raise
        except MicroBatchTooLarge as error:
            _logger.warning("%s", error)
            store_micro_batch(store, error.smaller)
            raise
        except Exception as error:
            if is_lost_peer(error):
                raise _failure_of_another(meeting, error) from None
            store_failure(store, ranks, describe_peer_error(error) or type(error).__name__)
            if isinstance(error, dist.DistError):
                raise shorten_peer_error(error) from None
            raise
    metrics = facts.metrics | released.metrics
    metrics |= {k: v + len(tried) for k, v in metrics.items() if "/ooms_recovered" in k}
    of_all = tuple(
        replace(owner, held_by=f"{owner.held_by}, on rank {rank}")
        for rank, owners in enumerate(leaks)
        for owner in owners
    )
    return replace(facts, metrics=metrics, tags=facts.tags | released.tags, leaks=of_all)


def _agree_on_folder(job: Job, ranks: Ranks) -> Path:
    """The folder of the run, as far as this rank sees it. Raises ConfigError, on all ranks, where
    one does not see it and would have to."""
    folder = Path(ranks.broadcast(str(job.folder.absolute())))
    sees = ranks.all_gather(folder.is_dir())
    if job.config.train.parallel == "fsdp" and job.config.checkpoint.is_on and not all(sees):
        raise ConfigError(
            f"checkpoint: each rank writes its part, and rank {sees.index(False)} does not see "
            f"{folder}; put runs (mlflow.yaml) on a disk that all machines share, or set "
            "checkpoint.every_s to none"
        )
    return folder if sees[ranks.rank] else job.folder


def _failure_of_another(meeting: Meeting, error: Exception) -> FailedRank | LostRank:
    """Return what ends this rank since another one is gone: the words of that one, where it left
    some; else who has not come, and what this rank heard."""
    lost = meeting.lost(error)  # by now: for the words it waits
    failed = read_failure(meeting.store)
    return lost if failed is None else FailedRank(failed)


def _describe_start(job: Job, device: DeviceFacts) -> dict[str, Any]:
    """What all ranks must have been started with."""
    own = ("run.", "data.path", "data.cache")  # places, which each machine may have its own of
    settings = {k: v for k, v in job.config.flat().items() if not k.startswith(own)}
    data = job.data.fingerprint or (job.data.train_rows, job.data.val_rows)
    return {**settings, "data": data, "torch": torch.__version__, "device.kind": device.kind}


class _Sender(logging.Handler):
    """Sends to the process that asked for this rank: values, and lines of the log."""

    def __init__(self, connection: Connection, ranks: Ranks) -> None:
        super().__init__(logging.INFO if ranks.is_lead else logging.WARNING)
        self._connection, self._ranks, self._one = connection, ranks, threading.Lock()

    def send(self, kind: str, *values: Any) -> None:
        with self._one:
            try:
                self._connection.send((kind, self._ranks.rank, *values))
            except OSError:  # nobody is left to hear it
                os._exit(0)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if not self._ranks.is_lead:
            text = f"rank {self._ranks.rank}: {text}"
        self.send("line", record.name, record.levelno, text)


class _ReceivedStops:
    """What the process that asked wants meanwhile; where it is gone, this one ends."""

    def __init__(self, connection: Connection, sender: _Sender) -> None:
        self._connection, self._sender = connection, sender
        self._ends: list[bool] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def __call__(self) -> StopRequest | None:
        if not self._ends:
            return None
        ends = self._ends.pop()

        def act() -> None:
            self._sender.send("kept")
            if ends:
                leave_training()

        return StopRequest("", ends=ends, act=act)

    def _listen(self) -> None:
        while True:
            try:
                self._ends.append(self._connection.recv())
            except (EOFError, OSError):
                os._exit(0)


def main() -> int:
    """Return the exit code: 0 where all was reported, AGAIN where the launcher is to start all
    anew."""
    ranks = read_ranks_from_environment()
    try:
        connection = Client(os.environ[ADDRESS])
        job, first = connection.recv()
    except (EOFError, OSError):  # nobody is left to hear it; another code would begin all anew
        return 0
    sender = _Sender(connection, ranks)
    logging.getLogger("tasks").addHandler(sender)
    logging.getLogger("tasks").setLevel(logging.INFO)
    again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    sender.send("here", again, os.getpid())
    job = replace(job, resumes=job.resumes or again > 0)
    wishes = _ReceivedStops(connection, sender)
    try:
        device = find_rank_device(ranks, first, job.config.device)
        facts = train_together(job, device, ranks, log=partial(sender.send, "log"), asked=wishes)
    except TrainingLeft:
        sender.send("left")
    except MicroBatchTooLarge:
        sender.send("too large")
        return AGAIN
    except LostRank as error:
        sender.send("lost", str(error), error.missing)
        return AGAIN
    except Exception as error:
        if isinstance(error, FailedRank):
            time.sleep(FIRST_S)
        sender.send("failed", _make_sendable(error))
    else:
        sender.send("done", facts if ranks.is_lead else None)
    return 0


def follow_lead(config: RunConfig) -> int:
    """Take part in a training whose lead is another process of torchrun, on this machine or not.
    Returns the exit code: 0 trained, 1 failed, 2 bad input, AGAIN where all are to begin anew."""
    ranks = read_ranks_from_environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the lead has them all leave a checkpoint
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.alarm(LEAVE_S))
    try:
        device = replace(
            facts := detect_best_device(choose_device_name(config.device, ranks)),
            baseline_bytes=take_baseline(facts.name).bytes,
        )
        data = prepare_dataset(
            config.data, batch_size=config.train.batch_size, seed=config.train.seed
        )
        with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
            job = Job(config, data, PastRuns(), Path(folder), resumes=False)
            train_together(job, device, ranks, log=lambda metrics, step: None)
    except TrainingLeft:
        return 0
    except (ConfigError, DataError, ModelError, DeviceError) as error:
        print(f"rank {ranks.rank}: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if isinstance(error, RestartableError) or is_lost_peer(error):  # which the lead tells of
            return AGAIN
        print(f"rank {ranks.rank}: failed: {error}", file=sys.stderr)
        return 1
    return 0


def _make_sendable(error: Exception) -> Exception:
    """The error without its frames; its words where it cannot be sent."""
    bare = error.with_traceback(None)
    bare.__cause__ = bare.__context__ = None
    try:
        pickle.loads(pickle.dumps(bare))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return bare


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
