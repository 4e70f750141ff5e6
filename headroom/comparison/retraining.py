"""Trains a window of a run anew, from one of its checkpoints or from its start: reads what the run
has left behind, refuses what can't be trained anew, and does so on a device of this machine. The
run is only read: what is trained anew lies in a folder of its own, which is removed.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headroom.base.event_log import LOG, read_begins, read_end, read_metric_batches
from headroom.base.facts import DataFacts, DeviceFacts
from headroom.base.file_lock import FileLock, is_held
from headroom.base.units import make_printable
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.device.leases import Leases, find_lease_folder
from headroom.settings.read_settings import (
    ConfigError,
    check_imports,
    collect_params,
    override_config,
    resolve_config,
    restore_config_secrets,
    select_params,
)
from headroom.settings.run_config import LaunchConfig, RunConfig
from headroom.training import trainer
from headroom.training.checkpoint_files import (
    DamagedCheckpoint,
    NewerCheckpoint,
    read_record,
    verify_checkpoint,
)
from headroom.training.compatibility import describe_code
from headroom.training.kept_steps import CHECKPOINTS, list_steps
from headroom.training.loop import StopRequest
from headroom.training.plan import make_plan
from headroom.training.step_digests import KeptDigests, describe_environment, read_digests
from headroom.training.train_state import TrainState

LOGGED = ("train/", "val/")  # of the model; the others are of the machine
# Settings that a step depends on, but for:
OF_STEPS = ("data.", "model.", "optim.", "train.", "launch.processes", "launch.nodes")
ELSEWHERE = ("data.path", "data.cache", "data.memory_mib", "data.target_transform", "train.end")

SCRATCH, LOCK = "headroom-verify-", "lock"  # begin of a temporary folder's name, file in it
LEFT_S = 60.0  # after which an unlocked one is of a process that was killed


@dataclass(frozen=True)
class Recorded:
    """What a run has left behind that a training anew can be compared with."""

    folder: Path
    kept: tuple[int, ...]  # steps of its checkpoints, the oldest first
    digests: KeptDigests
    logged: Mapping[tuple[str, int], float]
    end: Mapping[str, Any]

    def find_last_step(self) -> int:
        """Return the last step that something is known of."""
        steps = [*self.kept, *self.digests.steps, *(step for _, step in self.logged)]
        return max(steps, default=0)


def read_recorded(folder: Path) -> Recorded:
    """Return what the run of this folder has left. Raises ConfigError where it is no training of
    ours, or where there is nothing to compare with."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"RUN: {folder.name} has no config.yaml, so it can't be trained anew: it is no "
            "training of `flows.train`, has not begun, or its files are elsewhere. The loop of an "
            "account or of a framework is not known here"
        )
    kept = tuple(sorted(list_steps(folder / CHECKPOINTS)))
    log = folder / LOG
    recorded = Recorded(folder, kept, read_digests(folder), _read_logged(log), read_end(folder))
    if not recorded.find_last_step():
        raise ConfigError(
            f"RUN: {folder.name} has no checkpoint, and logged no step: nothing to compare with"
        )
    return recorded


def _read_logged(log: Path) -> dict[tuple[str, int], float]:
    logged: dict[tuple[str, int], float] = {}
    if log.is_file():
        with open(log, "rb") as lines:
            for batch, _ in read_metric_batches(lines, 0):
                for name, value, _, step in batch:
                    if step and name.startswith(LOGGED):
                        # The end tells of its step once more, of the best weights.
                        logged.setdefault((name, step), value)
    return logged


def choose_window(recorded: Recorded, begin: int | None, steps: int) -> tuple[int, int]:
    """Return the step to begin at, and that to end with: by default from the newest checkpoint that
    something is known behind, else from the start. Raises ConfigError."""
    last = recorded.find_last_step()
    if begin is None:
        begin = max((step for step in recorded.kept if step < last), default=0)
    if begin and begin not in recorded.kept:
        kept = ", ".join(f"{step:,}" for step in recorded.kept) or "none"
        raise ConfigError(
            f"--from: there is no checkpoint of step {begin:,}; 0 is the start, and checkpoints "
            f"are kept of: {kept}"
        )
    if begin >= last:
        raise ConfigError(f"--from: nothing is recorded behind step {begin:,}; choose 0")
    end = min(last, begin + steps)
    known = {*recorded.digests.steps, *(step for _, step in recorded.logged)}
    if end not in recorded.kept and not any(begin < step <= end for step in known):
        first = min(step for step in (*known, *recorded.kept) if step > end)
        raise ConfigError(
            f"--steps: nothing was recorded of the steps {begin + 1:,} to {end:,}: nothing to "
            f"compare with; choose {first - begin:,} or more"
        )
    return begin, end


class WindowDone(Exception):
    """What was to be looked at has been."""


EndStep = Callable[[TrainState, int, Tensor], None]
Log = Callable[[Mapping[str, float], int], None]


@dataclass(frozen=True)
class Retraining:
    """A training that can be begun again and again, each in a folder of its own."""

    config: RunConfig
    device: DeviceFacts
    data: DataFacts
    recorded: Recorded
    begin: int
    scratch: Path

    def train(
        self,
        end: int,
        *,
        end_step: EndStep,
        log: Log = lambda metrics, step: None,
        keeps: bool = False,
    ) -> Path:
        """Train to the step where the window ends, or until one of the two functions, which are
        called after each step and with what is logged, raises WindowDone. Return the folder; keeps:
        with a checkpoint of that step."""
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        if self.begin:
            _copy_checkpoint(self.recorded.folder / CHECKPOINTS, self.begin, folder / CHECKPOINTS)
        every = f"{end}steps" if keeps else None
        config = override_config(self.config, {"checkpoint.every": every})
        reached = self.begin

        def end_this_step(state: TrainState, step: int, loss: Tensor) -> None:
            nonlocal reached
            reached = step
            end_step(state, step, loss)

        def check_stop() -> StopRequest | None:
            return None if reached < end else StopRequest("the window is done", act=_end_window)

        with suppress(WindowDone):
            trainer.train(
                make_plan(config, self.device, self.data),
                folder=folder,
                log=log,
                resumes=bool(self.begin),
                check_stop=check_stop,
                end_step=end_this_step,
            )
        return folder


def _end_window() -> None:
    raise WindowDone


def _copy_checkpoint(source: Path, step: int, target: Path) -> None:
    """Copy a checkpoint, which a run that trains may remove at any moment."""
    target.mkdir()
    try:
        verify_checkpoint(source, step)
        record = read_record(source, step)
        if "files" in record:
            raise ConfigError(f"--from {step}: several processes wrote it in parts; choose another")
        name = str(record["tensors"])
        shutil.copy(source / name, target)
        shutil.copy(source / f"step-{step:012d}.json", target)
    except (DamagedCheckpoint, NewerCheckpoint, OSError) as error:
        raise ConfigError(f"--from {step}: {error}") from None


@contextmanager
def open_retraining(recorded: Recorded, begin: int) -> Iterator[Retraining]:
    """Yield this run from that step on, ready to be trained anew with the threads of then on a
    device that nobody else has for so long. Raises ConfigError where that can't be done."""
    config = restore_config_secrets(_read_config(recorded.folder / "config.yaml"))
    config = override_config(config, {"train.end": None, "memory.snapshot": False})
    _refuse_other_settings(recorded, begin, config)
    _refuse_several_processes(recorded, begin, config.launch)
    config = override_config(config, {"launch.processes": "1"})
    check_imports(config)
    leases = Leases(
        find_lease_folder(),
        wait_s=config.device.wait_s,
        holder=f"process {os.getpid()}, verifying {recorded.folder.name}",
        show_waiting=_show_waiting,
    )
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        scratch = stack.enter_context(_make_scratch())
        stack.callback(leases.close)
        stack.callback(torch.set_num_threads, threads)
        if not Path(config.data.cache).is_dir():
            config = override_config(config, {"data.cache": str(scratch / "data")})
        device = detect_best_device(
            config.device.name, leases=None if config.device.share else leases
        )
        train = config.train
        data = prepare_dataset(config.data, batch_size=train.batch_size, seed=train.seed)
        _refuse_other_data(recorded, data)
        then = _read_threads(recorded)
        if then.isdecimal() and int(then) > 1:
            torch.set_num_threads(int(then))
        yield Retraining(config, device, data, recorded, begin, scratch)


@contextmanager
def _make_scratch() -> Iterator[Path]:
    """Yield a folder that is removed afterwards; those of processes that were killed are, too."""
    for left in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*/{LOCK}"):
        with suppress(OSError):
            about = left.stat()
            is_old = time.time() - about.st_mtime > LEFT_S  # else it may be about to be taken
            if is_old and about.st_uid == os.getuid() and not is_held(left):
                shutil.rmtree(left.parent, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH))
    try:
        with FileLock(scratch / LOCK) as lock:
            lock.take()
            yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _read_config(file: Path) -> RunConfig:
    try:
        return resolve_config(str(file), {})
    except ConfigError as error:
        raise ConfigError(
            f"{error}; these are the run's own settings, of another version of Headroom perhaps: "
            "verify it with that one"
        ) from None


def _show_waiting(reason: str) -> None:
    if reason:
        print(f"waiting for a device: {reason}", file=sys.stderr, flush=True)


def _refuse_other_settings(recorded: Recorded, begin: int, config: RunConfig) -> None:
    """Raise ConfigError for a window of before the run was gone on with, where settings were
    changed then: those of each time between are not kept."""
    log = recorded.folder / LOG
    begins = read_begins(log, 0)
    if len(begins) < 2:
        return
    with open(log, "rb") as lines:
        batches = read_metric_batches(lines, 0, begun=begins[-2][1])
        gone_on = max((step for batch, _ in batches for *_, step in batch), default=0)
    then = begins[0][0].get("params") or {}
    now = select_params(collect_params(config))
    changed = [
        f"{name} was {then.get(name, 'not set')} and is {now.get(name, 'not set')}"
        for name in sorted(then.keys() | now.keys())
        if name.startswith(OF_STEPS) and name not in ELSEWHERE and then.get(name) != now.get(name)
    ]
    if then and changed and begin < gone_on:
        later = [step for step in recorded.kept if gone_on <= step < recorded.find_last_step()]
        remedy = f"choose --from {later[0]}" if later else "no checkpoint is kept from there on"
        raise ConfigError(
            f"--from: the run was gone on with at step {gone_on:,} with other settings "
            f"({', '.join(changed)}), so what lies before can't be trained anew; {remedy}"
        )


def _refuse_several_processes(recorded: Recorded, begin: int, launch: LaunchConfig) -> None:
    """Raise ConfigError for a window that several processes trained, however many GPUs there are
    here: what the run has kept of it says how many they were."""
    counts = [*_iterate_process_counts(recorded, begin)]
    if launch.machines or max(*counts, launch.count or 1, 1) > 1:
        raise ConfigError(
            "RUN: several processes trained it, and one can't train it anew; a run with "
            "launch.processes 1 can be verified"
        )
    if not counts and launch.count is None and torch.accelerator.is_available():
        raise ConfigError(
            "RUN: nothing says how many processes trained it: launch.processes is auto, and it has "
            "neither an end nor digests nor a checkpoint; a run with launch.processes 1 can be "
            "verified"
        )


def _iterate_process_counts(recorded: Recorded, begin: int) -> Iterator[int]:
    """Yield how many processes trained, as far as what is kept of the window says so."""
    if recorded.end:
        yield int(_read_tag(recorded, "ranks") or 1)
    if recorded.digests.steps:
        yield 1  # several keep none
    for step in recorded.kept:
        if step > begin:
            with suppress(DamagedCheckpoint, NewerCheckpoint):
                plain = read_record(recorded.folder / CHECKPOINTS, step)["plain"]
                yield len(dict(plain["dict"])["random"])  # of each a state


def _refuse_other_data(recorded: Recorded, data: DataFacts) -> None:
    then = _read_tag(recorded, "data.fingerprint")
    if not then and recorded.kept:
        then = read_record(recorded.folder / CHECKPOINTS, recorded.kept[-1])["about"]["data"]
    if then and data.fingerprint and then != data.fingerprint:
        raise ConfigError(
            f"data.source: the rows are others than those that the run was trained on (their "
            f"fingerprint was {then} and is {data.fingerprint}): it can't be verified with these"
        )


def _read_tag(recorded: Recorded, name: str) -> str:
    return str((recorded.end.get("tags") or {}).get(name, ""))


def _read_threads(recorded: Recorded) -> str:
    return recorded.digests.environment.get("threads") or _read_tag(recorded, "threads")


def list_changes(again: Retraining) -> Iterator[str]:
    """Yield what differs between when the run was trained and now."""
    recorded, device = again.recorded, again.device
    now = describe_environment()
    threads = _read_threads(recorded)
    for name, value in sorted(recorded.digests.environment.items()):
        if name != "threads" and now.get(name) != value:
            yield f"{name} was {value} and is {now.get(name, 'not set')}"
    for name in sorted(now.keys() - recorded.digests.environment.keys()):
        if recorded.digests.environment:
            yield f"{name} was not set and is {now[name]}"
    most = os.cpu_count() or 1
    if threads.isdecimal() and int(threads) > most:
        yield f"threads: {threads} as then, though there are {most} cores here"
    is_now: dict[str, str | None] = {
        "device.kind": device.kind,
        "device.model": device.model,
        "torch.version": device.torch_version,
    }
    for name, here in is_now.items():
        then = _read_tag(recorded, name)
        is_told = name == "torch.version" and recorded.digests.environment
        if then and here and then != here and not is_told:
            yield f"{name} was {make_printable(then, limit=60)} and is {here}"
    yield from _list_changed_code(again)


def _list_changed_code(again: Retraining) -> Iterator[str]:
    recorded = again.recorded
    about: dict[str, Any] = {}
    if recorded.kept:
        with suppress(DamagedCheckpoint, NewerCheckpoint):
            step = again.begin or recorded.kept[-1]
            about = read_record(recorded.folder / CHECKPOINTS, step)["about"]
    code = describe_code(again.config)
    commit = code["commit"]
    was = about.get("commit") or _read_tag(recorded, "git.commit")
    if was and commit and was != commit:
        yield f"git.commit was {was[:12]} and is {commit[:12]}"
    files = about.get("code", {})
    for file in sorted(n for n, v in code["code"].items() if files.get(n, v) != v):
        yield f"{file} has changed"
