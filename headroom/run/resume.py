"""Which run a start is: an earlier one that it goes on with, as asked for or as the last of its key
that did not come to its end, or a new one; and retries. Key and folder are held by locks that go
with the process. It refuses a run that still trains, and one of which nothing was kept.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

from headroom.base.event_log import LOG, TRAINING_LOCK, read_end, read_log_ends, refuse_links
from headroom.base.facts import DeviceFacts
from headroom.base.file_lock import FileLock, is_held
from headroom.base.units import format_seconds, make_printable
from headroom.device.detection import TemporaryDeviceError
from headroom.process import command
from headroom.process.redaction import redact
from headroom.run.failures import Failure
from headroom.run.known_runs import (
    RunStart,
    list_run_folders,
    make_resume_command,
    make_timestamp,
    read_start,
)
from headroom.run.run_keys import lock_key
from headroom.settings import read_settings
from headroom.settings.arguments import ARGUMENTS
from headroom.settings.read_settings import ConfigError, resolve_config
from headroom.settings.run_config import RunConfig, RunSettings
from headroom.settings.table import list_arguments
from headroom.tracking.tracking_settings import TrackingError, read_tracking_settings
from headroom.training.checkpoint_files import (
    DamagedCheckpoint,
    NewerCheckpoint,
    verify_checkpoint,
)
from headroom.training.compatibility import describe_training, refuse_other_training
from headroom.training.kept_steps import CHECKPOINTS, list_steps
from headroom.training.loop import compute_end_time
from headroom.training.plan import Plan

log = logging.getLogger(__name__)
# Settings that say nothing of what is trained, or stand first in the name.
NOT_VARIED = (
    *("run.", "gate.", "checkpoint.", "device.", "model.name", "data.source", "data.path"),
    *("launch.nodes", "launch.port", "launch.wait_s"),
)
PLAIN = (str, int, float)
NAME_LETTERS = 48  # of a name that nobody gave
FIRST_RETRY_S, LONGEST_RETRY_S = 30.0, 600.0  # the wait doubles
TOGETHER_S = 600.0  # within which processes of one training begin their runs
STATE_VERSION = 1  # of what a checkpoint of somebody else's loop has of its run


def make_default_name(config: RunConfig) -> str:
    """Return the name of a run: as given, else the model, the data and changed settings.

    For example `mlp-digits lr=0.01`.
    """
    if config.run.name:
        return config.run.name
    source = Path(config.data.path).stem if config.data.path else config.data.source
    usual, words = RunConfig().flat(), [f"{config.model.name}-{source}"]
    for name, value in _spread_arguments(read_settings.collect_params(config)):
        if name.startswith(NOT_VARIED) or value == usual.get(name) or not isinstance(value, PLAIN):
            continue
        section, _, last = name.rpartition(".")
        shown = f"{value:g}" if isinstance(value, float) else redact(str(value))
        words.append(f"{section if last == 'name' else last}={shown}")
    fit = max([n for n in range(len(words) + 1) if len(" ".join(words[:n])) <= NAME_LETTERS])
    more = len(words) - max(1, fit)
    return " ".join([*words[: max(1, fit)], *([f"+{more}"] if more else [])])


def _spread_arguments(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the params, with the arguments that have limits here in place of what holds them."""
    argument_names = list_arguments()
    for name, value in params.items():
        named = {f"{name}.{key}": each for key, each in value.items()} if name in ARGUMENTS else {}
        yield from [(key, each) for key, each in named.items() if key in argument_names] or [
            (name, value)
        ]


class NothingKept(ConfigError):
    """A run that was to be gone on with has nothing to go on from; a key then begins a new one."""


def find_resumed_folder(runs: Path, resume: str) -> Path:
    """Return the folder of the run that --resume names: latest, a run's id, or a folder.

    Raises ConfigError.
    """
    shown = make_printable(resume, limit=80)
    if resume == "latest":
        kept = [folder for folder in list_run_folders(runs) if list_steps(folder / CHECKPOINTS)]
        if not kept:
            raise ConfigError(f"--resume latest: no run in {runs} has a checkpoint")
        return kept[0]
    folder = next(
        (f for f in list_run_folders(runs) if resume in (f.name, _read_run_id(f))),
        Path(resume).absolute(),
    )
    if folder.name == CHECKPOINTS:
        folder = folder.parent
    if read_start(folder) is None:
        raise ConfigError(
            f"--resume {shown}: is neither latest, nor the id of a run in {runs}, nor its folder"
        )
    if not list_steps(folder / CHECKPOINTS):
        raise ConfigError(f"--resume {shown}: that run wrote no checkpoint; train anew")
    return folder


def read_resumed_settings(resume: str) -> RunConfig:
    """Return the settings of the run that --resume names. Raises ConfigError."""
    return resolve_config(
        str(find_resumed_folder(Path(read_tracking_settings().runs), resume) / "config.yaml"), {}
    )


def find_unfinished_folder(runs: Path, key: str) -> Path | None:
    """Return the folder of the newest run of this key, where it did not come to its end.

    Something has to be kept there, or another process still trains it; of no key there is
    none.
    """
    newest = _find_newest(runs, key)
    if newest is None or _is_done(newest):
        return None
    return newest if list_steps(newest / CHECKPOINTS) or is_held(newest / TRAINING_LOCK) else None


def find_unfinished_loop(runs: Path, key: str) -> Path | None:
    """Return the same of a loop of somebody else's, who keeps its checkpoints where we do not look.
    A training of our own, which knows its steps before the first, is none."""
    newest = _find_newest(runs, key)
    start = read_start(newest) if newest is not None else None
    if newest is None or start is None or start.steps or _is_done(newest):
        return None
    return newest


def lock_resumed_folder(folder: Path) -> FileLock:
    """Return the lock of a run that is to be gone on with. Raises ConfigError where another process
    has it, and NothingKept where its checkpoints were removed until then."""
    if folder.is_dir():
        lock = lock_for_training(folder)
        if list_steps(folder / CHECKPOINTS):
            return lock
        lock.close()
    raise NothingKept(f"--resume {folder}: its checkpoints were removed; train without --resume")


class FolderClaim:
    """The folder of a run, which nobody else trains until its context is left: of a new one, or of
    an earlier one that is gone on with."""

    key = ""  # by which a run is gone on with
    resumes = False  # an earlier run is gone on with
    anew = ""  # why not, where one was to be

    def __init__(self, runs: Path, name: str, locks: ExitStack | None = None) -> None:
        """locks: what is held already, and let go of with the folder."""
        self.name = self._new_name = redact(name)
        self._runs, self._locks = runs, locks or ExitStack()
        self._folder_lock: FileLock | None = None
        self.start: RunStart | None = None
        self.folder = self._choose_folder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()

    def hold_folder(self) -> None:
        """Lock the folder of a run that has just got one. Raises ConfigError."""
        self._folder_lock = self._locks.enter_context(lock_for_training(self.folder))

    def write_start(self, start: RunStart) -> None:
        """Keep how this start began."""
        self.start = start
        start.write(self.folder)

    def mark_resume(self) -> RunStart:
        """Return how the run began, marked as gone on with by this folder. Raises ConfigError."""
        assert self.start is not None
        try:
            return self.start.mark_resume(self.folder)
        except OSError as error:
            problem = f"--resume {self.folder}: can't be written ({error.strerror})"
            raise ConfigError(problem) from None

    def begin_anew(self, why: ConfigError | TrackingError) -> None:
        """Leave the run of before, which can't be gone on with, for a new one."""
        self._let_go()
        self.anew = f"{why}; its folder {self.folder} is left, remove it where nobody needs it"
        self.resumes, self.folder = False, self._choose_folder()
        self.start, self.name = None, self._new_name

    def _go_on_with(self, folder: Path, lock: FileLock) -> None:
        """Be the run of this folder, which is locked."""
        self._folder_lock = lock
        self.resumes, self.folder, self.start = True, folder, read_start(folder)
        self.name = self.start.name if self.start else self._new_name

    def _let_go(self) -> None:
        if self._folder_lock is not None:
            self._folder_lock.close()

    def _choose_folder(self) -> Path:
        return self._runs / f"{make_timestamp()}-{uuid4().hex[:8]}"


class RunClaim(FolderClaim):
    """Which run this process is: an earlier one that it goes on with, or a new one.

    It holds the run's key and folder, so that nobody else trains it, until its context is left.
    """

    def __init__(
        self, runs: Path, config: RunConfig, *, name: str | None, resume: str | None, key: str
    ) -> None:
        """name: of a new run. resume: which run to go on with. key: of this training, where its
        settings give none. Raises ConfigError."""
        self.key = config.run.key or key
        self._is_by_key = bool(self.key and not resume)
        with ExitStack() as locks:  # first of the key: of two who look for its run one finds it
            if self.key:
                locks.enter_context(lock_key(runs, self.key))
            super().__init__(runs, name or make_default_name(config), locks)
            self._take_earlier(resume)
            self._locks = locks.pop_all()
        self.earlier = self.start or find_failed_start(runs, self.key)  # whose retry this may be

    def _take_earlier(self, resume: str | None) -> None:
        """Be the run to go on with, if there is one."""
        find = find_resumed_folder if resume else find_unfinished_folder
        left = find(self._runs, resume or self.key)
        try:
            if left is not None:
                self._go_on_with(left, self._locks.enter_context(lock_resumed_folder(left)))
        except NothingKept as nothing:
            if not self._is_by_key:
                raise
            self.anew = str(nothing)

    def check(self, plan: Plan) -> None:
        """Refuse to go on as another training. Where nothing is left to go on from, a key begins
        a new run. Raises ConfigError."""
        if self.resumes:
            try:
                check_resume(self.folder, plan)
            except NothingKept as nothing:
                self.begin_anew(nothing)

    def begin_anew(self, why: ConfigError | TrackingError) -> None:
        """Leave the run of before for a new one of its key. Raises NothingKept where that very run
        was asked for."""
        if not self._is_by_key:
            raise NothingKept(
                f"--resume {self.folder}: {why}; remove that folder, or train without --resume"
            ) from None
        super().begin_anew(why)
        self.earlier = None


@dataclass(frozen=True)
class NamedRun:
    """The run that a checkpoint of somebody else's loop names, and the step that it was at."""

    run_id: str  # empty, where MLflow had not been told of it
    folder: str  # its name
    step: int

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> NamedRun | None:
        """Return what `make_state` has made; None where it is nothing of the kind."""
        with suppress(LookupError, TypeError, ValueError):
            if int(state["version"]) <= STATE_VERSION and int(state["step"]) >= 0:
                return cls(str(state["run_id"]), str(state["folder"]), int(state["step"]))
        return None

    def make_state(self) -> dict[str, Any]:
        """Return this as plain values, for the checkpoint."""
        return {"version": STATE_VERSION, **asdict(self)}


class LoopClaim(FolderClaim):
    """Which run a loop of somebody else's is: the one that its checkpoint names, else the newest of
    its key that did not come to its end, else a new one. Key and folder are held from when its
    context is entered."""

    def __init__(self, runs: Path, name: str, key: str = "", of_rank: str = "") -> None:
        """of_rank: the end of name and key, where this is one of several processes and not the
        first."""
        super().__init__(runs, name + of_rank)
        self.key, self._of_rank = key and key + of_rank, of_rank
        self.named: NamedRun | None = None  # by a checkpoint
        self.step = 0  # that the run goes on after

    def __enter__(self) -> Self:
        """Raises KeyHeld, and ConfigError where nothing can be written."""
        with self._locks:  # none is kept where this fails
            if self.key:
                self._locks.enter_context(lock_key(self._runs, self.key, setting="key"))
            if self.named is not None:
                self.take_named(self.named)
            elif self.key and (left := find_unfinished_loop(self._runs, self.key)) is not None:
                self._take(left, _find_newest_step(left))
            self._locks = self._locks.pop_all()
        return self

    def take_named(self, named: NamedRun, give_up: Callable[[], None] = lambda: None) -> bool:
        """Be the run that a checkpoint names; return whether that can be: else `anew` says why not.
        give_up: is called before, and lets go of the run that this one was to be."""
        folder = self.find_named(named)
        if folder is None:
            self.anew = f"no folder in {self._runs} is that of {named.run_id or named.folder}"
            return False
        return self._take(folder, named.step, give_up)

    def find_named(self, named: NamedRun) -> Path | None:
        """Return the folder of the run that a checkpoint names; of another rank than the one that
        has written the checkpoint, that of its run which began with it."""
        starts = {f: s for f in list_run_folders(self._runs) if (s := read_start(f)) is not None}
        for folder, start in starts.items():
            if named.folder == folder.name or (named.run_id and named.run_id == start.run_id):
                if start.name.endswith(self._of_rank):
                    return folder
                apart_s = {
                    f: abs(other.made_at - start.made_at)
                    for f, other in starts.items()
                    if other.name == start.name + self._of_rank
                }
                nearest = min(apart_s, key=apart_s.__getitem__, default=None)
                return nearest if nearest is not None and apart_s[nearest] < TOGETHER_S else None
        return None

    def _take(self, folder: Path, step: int, give_up: Callable[[], None] = lambda: None) -> bool:
        try:
            lock = self._locks.enter_context(lock_for_training(folder))
        except ConfigError as held:
            self.anew = str(held).removeprefix("--resume ")
            return False
        try:
            give_up()
        except BaseException:
            lock.close()
            raise
        self._let_go()
        self.step = step
        self._go_on_with(folder, lock)
        return True

    def begin_anew(self, why: ConfigError | TrackingError) -> None:
        """Leave the run of before, which can't be gone on with, for a new one."""
        super().begin_anew(why)
        self.step = 0


def _find_newest_step(folder: Path) -> int:
    """Return the newest step that the log of a run knows."""
    return max((step for _, step, _ in read_log_ends(folder / LOG)[1]), default=0)


def check_resume(folder: Path, plan: Plan) -> None:
    """Refuse to go on with the run of this folder as another training, before it is opened again.

    Raises ConfigError, and NothingKept where none of its checkpoints is what was written.
    """
    kept, now, damage = folder / CHECKPOINTS, describe_training(plan), []
    for step in list_steps(kept):
        try:
            refuse_other_training(verify_checkpoint(kept, step), now)
        except NewerCheckpoint as error:
            raise ConfigError(f"--resume: {error}") from None
        except DamagedCheckpoint as error:  # told when it is read, where an older one is taken
            damage.append(str(error).replace(f"{kept}/", ""))
            continue
        return
    if damage:
        raise NothingKept(f"no checkpoint of it is what was written ({damage[0]})")
    raise NothingKept("its checkpoints were removed")


def _find_newest(runs: Path, key: str) -> Path | None:
    of_key = (
        f for f in list_run_folders(runs) if (s := read_start(f)) is not None and s.key == key
    )
    return next(of_key, None) if key else None


def lock_for_training(folder: Path) -> FileLock:
    """Return the folder's lock, held until it is closed.

    Raises ConfigError where another process trains there, or nothing can be written, or what is
    written would go elsewhere.
    """
    try:
        refuse_links(folder)
        lock = FileLock(folder / TRAINING_LOCK)
        is_mine = lock.take(f"process {os.getpid()}")
    except OSError as error:
        at = error.filename or folder
        raise ConfigError(f"--resume {at}: can't be written ({error.strerror})") from None
    if not is_mine:
        by = lock.read_text()
        lock.close()
        raise ConfigError(f"--resume {folder}: that run is being trained by {by}")
    return lock


def _read_run_id(folder: Path) -> str:
    start = read_start(folder)
    return start.run_id if start else ""


def _is_done(folder: Path) -> bool:
    run = read_end(folder)
    return run.get("status") == "FINISHED" and not run.get("stopped")


@dataclass(frozen=True)
class Retry:
    """A planned restart of a training, in a new process."""

    after: str  # the class of the failure
    number: int
    most: int
    at: float  # Unix time
    folder: Path
    step: int  # of the checkpoint that it goes on from; 0: there is none

    def __str__(self) -> str:
        source = f"from step {self.step:,}" if self.step else "from the start"
        return (
            f"{self.after}, which a new process may cure: retry {self.number} of {self.most} "
            f"begins in {format_seconds(max(0, math.ceil(self.at - time.time())))}, {source}"
        )


def plan_retry(
    folder: Path, failure: Failure, config: RunConfig, *, starts: int = 0
) -> Retry | None:
    """Return the next start of the training in this folder, which has failed and ended.

    None where that would not help, or has not helped so often. It is kept in the folder's
    start.json. starts: of a flow run by now; 0 from a command line, where the user sees the
    first failure.
    """
    start, step = read_start(folder), next(iter(list_steps(folder / CHECKPOINTS)), 0)
    was = start or RunStart("", "", "", retries=starts - 1)  # where it did not come to open its run
    before = 0 if step > was.retried_at else was.retries
    is_waited_for = failure.cure == "in a retry" and (starts > 0 or was.retries > 0)
    retry, most = None, config.run.retries
    if (failure.cure == "always" or is_waited_for) and 0 <= before < most:
        at = time.time() + min(LONGEST_RETRY_S, FIRST_RETRY_S * 2**before)
        if not _is_over(config.train.end_clock, at):
            retry = Retry(failure.kind, before + 1, most, at, folder, step)
    if start is not None:
        number, after = (retry.number, retry.after) if retry is not None else (0, "")
        try:
            replace(start, retries=number, retried_at=step, after=after).write(folder)
        except OSError:  # what is not counted might never end
            return None
    return retry


def _is_over(end: str | None, at: float) -> bool:
    """Return whether the time that a training has is over by then.

    The next 06:30 is another day's.
    """
    with suppress(ConfigError):  # a date that has passed
        return end is not None and at >= compute_end_time(end, time.time())
    return True


def find_failed_start(runs: Path, key: str) -> RunStart | None:
    """Return the start of the run that failed without a checkpoint, if this is its retry."""
    folder = command.find_failed_folder() or _find_newest(runs, key)
    start = read_start(folder) if folder is not None else None
    return start if start is not None and start.retries else None


def make_retry_tags(
    before: RunStart | None, device: DeviceFacts, run: RunSettings, *, is_new: bool
) -> dict[str, str]:
    """Return the tags of a retry; none for another start. is_new: as a run of its own.

    Raises TemporaryDeviceError where the device is gone: nobody asked for weeks on the CPU.
    """
    if before is None or not before.retries:
        return {}
    if before.device not in ("", device.kind):
        raise TemporaryDeviceError(
            f"device.name: the training was on {before.device}, and its retry finds {device.kind} "
            f"({device.reason}); go on there with --resume, or look after the device",
            kind="device_lost",
        )
    tags = {"retries": f"{before.retries} of {run.retries} after {before.after}"}
    return {**tags, "retry_of": before.run_id} if is_new else tags


def log_resume_command(folder: Path, run_id: str) -> None:
    """Log how to go on with a run that ended before its end, where a checkpoint was kept.

    run_id: empty where MLflow does not know the run.
    """
    kept = list_steps(folder / CHECKPOINTS)
    if kept:
        command = make_resume_command(run_id or folder.name)
        log.info("step %s is kept; go on with `%s`", f"{kept[0]:,}", command)
