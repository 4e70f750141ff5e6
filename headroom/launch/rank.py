"""One rank of a training: it joins the others, trains its share and checks that it freed its
memory. `python -m headroom.launch.rank FOLDER PARENT` is such a process: PyTorch's agent starts
it, and everything that it is told and that it tells lies in the folder (processes.py).
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    from headroom.launch.parent_death import end_with_parent

    end_with_parent(int(sys.argv[2]))  # before PyTorch is imported: that takes seconds
    with open(f"{sys.argv[1]}/printed-{os.environ['RANK']}", "wb") as printed:
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)

import faulthandler
import json
import logging
import pickle
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headroom.base.facts import DataFacts, DeviceFacts, TrainFacts
from headroom.data.preparation import prepare_dataset
from headroom.data.source_data import DataError
from headroom.device.detection import DeviceError, detect_best_device
from headroom.device.leases import Leases, find_lease_folder
from headroom.launch.launcher import AGAIN
from headroom.launch.placement import choose_device_name, find_rank_device
from headroom.ranks.ranks import (
    FailedRank,
    Ranks,
    RestartableError,
    describe_peer_error,
    is_lost_peer,
    join_ranks,
    read_micro_batches,
    read_ranks_from_environment,
    refuse_different,
    shorten_peer_error,
    store_failure,
    store_micro_batch,
)
from headroom.settings.model_args import ModelError
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.admission import PastRuns
from headroom.training.loop import StopCheck, StopRequest, TrainingLeft, leave_training
from headroom.training.plan import make_plan
from headroom.training.shared_model import MicroBatchTooLarge, summarize_ranks
from headroom.watch.leaks import release_device_memory, take_baseline
from headroom.watch.step_metrics import Log

MIB = 1024**2
LEAVE_S = 10  # for a checkpoint of all, after a signal
FIRST_S = 1.0  # for the rank that has failed to say so itself: the agent ends it with this one
# Files in the folder of ranks that were started here.
JOB = "job"  # what all do, and the device of the first
EVENTS = "events"  # of all ranks, a JSON list a line: its kind, and what belongs to it
STOP = "stop"  # while it is there, a checkpoint is wanted; whether the training then ends
FACTS = "facts"  # what was trained
_logger = logging.getLogger("headroom.launch.rank")  # also of a process that runs this file


@dataclass(frozen=True)
class Job:
    """The training that all ranks do together."""

    config: RunConfig
    data: DataFacts
    past: PastRuns
    folder: Path
    resumes: bool
    tried: tuple[int, ...] = ()  # rows of micro-batches that ranks before these ran short with


def train_together(
    job: Job,
    device: DeviceFacts,
    ranks: Ranks,
    *,
    log: Log,
    check_stop: StopCheck = lambda: None,
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
            stored = [*job.tried, *read_micro_batches(store)] if ranks.is_lead else []
            past, resumes, tried = ranks.broadcast((job.past, job.resumes, stored))
            if tried:
                past = PastRuns(past.metrics | {"memory/micro_batch": min(tried)})
            facts = trainer.train(
                make_plan(job.config, device, job.data),
                past=past,
                folder=_agree_on_folder(job, ranks),
                log=log,
                resumes=resumes,
                check_stop=check_stop,
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
                raise meeting.explain_loss(error) from None
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
            "checkpoint.every to none"
        )
    return folder if sees[ranks.rank] else job.folder


def _describe_start(job: Job, device: DeviceFacts) -> dict[str, Any]:
    """What all ranks must have been started with."""
    own = ("run.", "data.path", "data.cache")  # places, which each machine may have its own of
    settings = {k: v for k, v in job.config.flat().items() if not k.startswith(own)}
    data = job.data.fingerprint or (job.data.train_rows, job.data.val_rows)
    return {**settings, "data": data, "torch": torch.__version__, "device.kind": device.kind}


class _Events(logging.Handler):
    """Appends to the file of all ranks, lines of the log among them; each is written whole."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        super().__init__(logging.INFO if ranks.is_lead else logging.WARNING)
        self._prefix = "" if ranks.is_lead else f"rank {ranks.rank}: "
        self._file = os.open(folder / EVENTS, os.O_WRONLY | os.O_APPEND)

    def append(self, kind: str, *values: Any) -> None:
        os.write(self._file, json.dumps([kind, *values], default=float).encode() + b"\n")

    def emit(self, entry: logging.LogRecord) -> None:
        self.append("line", entry.name, entry.levelno, f"{self._prefix}{entry.getMessage()}")


def _read_stop(folder: Path, events: _Events) -> StopRequest | None:
    """Return what the process that asked for this one wants meanwhile."""
    if not (folder / STOP).exists():
        return None
    ends = (folder / STOP).read_text() == "True"

    def act() -> None:
        (folder / STOP).unlink()
        if ends:
            leave_training()
        events.append("kept")

    return StopRequest("", ends=ends, act=act)


def main(folder: Path) -> None:
    """Train as one of the ranks that were started for the job in this folder, and leave there what
    came of it: events, the facts, or the error that it raises."""
    ranks = read_ranks_from_environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked hears it
    with (folder / name_stack(ranks.rank)).open("w") as stack:
        # So the agent ends one that hangs. It is written also where the interpreter is stuck.
        faulthandler.register(signal.SIGTERM, stack, all_threads=False, chain=True)
        try:
            job, first = pickle.loads((folder / JOB).read_bytes())
            events = _Events(folder, ranks)
            logging.getLogger("headroom").addHandler(events)
            logging.getLogger("headroom").setLevel(logging.INFO)
            device = find_rank_device(ranks, first)
            facts = train_together(
                job,
                device,
                ranks,
                log=partial(events.append, "log"),
                check_stop=partial(_read_stop, folder, events),
            )
        except TrainingLeft:
            events.append("left")
            return
        except Exception as error:
            _write_whole(folder / name_error(ranks.rank), _make_sendable(error))
            if isinstance(error, FailedRank):
                time.sleep(FIRST_S)
            raise
        if ranks.is_lead:
            _write_whole(folder / FACTS, facts)
        events.append("end")


def name_error(rank: int) -> str:
    """Return the name of the file with the error that a rank raised."""
    return f"error-{rank}"


def name_stack(rank: int) -> str:
    """Return the name of the file with the place where a rank was when it was ended."""
    return f"stack-{rank}"


def _write_whole(file: Path, value: Any) -> None:
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(pickle.dumps(value))
    part.replace(file)


def follow_lead(config: RunConfig) -> int:
    """Take part in a training whose lead is another process of torchrun, on this machine or not.
    Returns the exit code: 0 trained, 1 failed, 2 bad input, AGAIN where all are to begin anew."""
    ranks = read_ranks_from_environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the lead has them all leave a checkpoint
    for number in (signal.SIGTERM, signal.SIGHUP):  # one that hangs says where
        signal.signal(number, lambda *_: faulthandler.dump_traceback_later(LEAVE_S, exit=True))
    leases = Leases(
        find_lease_folder(),
        wait_s=config.device.wait_s,
        holder=f"process {os.getpid()}, rank {ranks.rank} of a training",
    )
    try:
        name = choose_device_name(config.device, ranks)
        facts = detect_best_device(name, leases=None if config.device.share else leases)
        device = replace(facts, baseline_bytes=take_baseline(facts.name).bytes)
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
    finally:
        leases.close()
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
    code = 1
    try:
        main(Path(sys.argv[1]))
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)  # threads of a process group that is broken would keep it
