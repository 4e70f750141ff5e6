"""Which earlier run another one goes on with: as asked, or the last one of the same key that did
not come to its end. A run's folder is held by the process that trains in it, by a lock that goes
with the process. It refuses a run that still trains, and one of which nothing was kept.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from tasks.engine.base.facts import DeviceFacts
from tasks.engine.base.file_lock import FileLock, is_held
from tasks.engine.base.units import printable, seconds
from tasks.engine.checkpoint.checkpoint_files import Damaged, Newer, intact_about
from tasks.engine.checkpoint.compatibility import identity, refuse_another
from tasks.engine.checkpoint.kept_steps import CHECKPOINTS, steps
from tasks.engine.device.detection import NotNow
from tasks.engine.settings import unused_settings
from tasks.engine.settings.read_settings import ConfigError, resolve
from tasks.engine.settings.run_config import RunConfig, RunSettings
from tasks.engine.step.plan import Plan
from tasks.engine.training.budget import ends_at
from tasks.failures import Failure
from tasks.process import restart
from tasks.process.redaction import redacted
from tasks.run_folders import LOCK, Start, folders, json_of, resume_command, start_of
from tasks.tracking.where import where

log = logging.getLogger(__name__)
# Settings that say nothing of what is trained, or stand first in the name.
NOT_VARIED = (
    *("run.", "gate.", "checkpoint.", "device.", "model.name", "data.source", "data.path"),
    *("launch.nodes", "launch.port", "launch.wait_s"),
)
PLAIN = (str, int, float)
NAME_LETTERS = 48  # of a name that nobody gave
RETRY_WAIT_S = 600.0  # at most
KEYS = "keys"  # the folder, beside those of runs, of those that are being trained


def default_name(config: RunConfig) -> str:
    """What a run is called: as asked, else by what it trains on what, and what was set otherwise
    than by default: `mlp-digits lr=0.01`."""
    if config.run.name:
        return config.run.name
    source = Path(config.data.path).stem if config.data.path else config.data.source
    usual, words = RunConfig().flat(), [f"{config.model.name}-{source}"]
    for name, value in unused_settings.params(config).items():
        if name.startswith(NOT_VARIED) or value == usual[name] or not isinstance(value, PLAIN):
            continue
        section, _, last = name.rpartition(".")
        shown = f"{value:g}" if isinstance(value, float) else redacted(str(value))
        words.append(f"{section if last == 'name' else last}={shown}")
    fit = max([n for n in range(len(words) + 1) if len(" ".join(words[:n])) <= NAME_LETTERS])
    more = len(words) - max(1, fit)
    return " ".join([*words[: max(1, fit)], *([f"+{more}"] if more else [])])


def stamp() -> str:
    """The time in UTC, as the names of runs' folders have it."""
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


class NothingKept(ConfigError):
    """A run that was to be gone on with has nothing to go on from; a key then begins a new one."""


def asked_for(runs: Path, resume: str) -> Path:
    """The folder of the run that --resume names: latest, a run's id, or a folder.

    Raises ConfigError.
    """
    told = printable(resume, limit=80)
    if resume == "latest":
        kept = [folder for folder in folders(runs) if steps(folder / CHECKPOINTS)]
        if not kept:
            raise ConfigError(f"--resume latest: no run in {runs} has a checkpoint")
        return kept[0]
    folder = next((f for f in folders(runs) if resume in (f.name, _id(f))), Path(resume).absolute())
    if folder.name == CHECKPOINTS:
        folder = folder.parent
    if start_of(folder) is None:
        raise ConfigError(
            f"--resume {told}: is neither latest, nor the id of a run in {runs}, nor its folder"
        )
    if not steps(folder / CHECKPOINTS):
        raise ConfigError(f"--resume {told}: that run wrote no checkpoint; train anew")
    return folder


def settings_of(resume: str) -> RunConfig:
    """The settings of the run that `asked_for` finds. Raises ConfigError."""
    return resolve(str(asked_for(Path(where().runs), resume) / "config.yaml"), {})


def of_key(runs: Path, key: str) -> Path | None:
    """The folder of the newest run of this key, where it did not come to its end, and where
    something is kept or another process is still at it; of no key there is none."""
    newest = _newest(runs, key)
    if newest is None or _is_done(newest):
        return None
    return newest if steps(newest / CHECKPOINTS) or is_held(newest / LOCK) else None


def held_key(runs: Path, key: str) -> KeyLock:
    """The key, until it is closed: from before its run has a folder, so that of two first starts
    one trains. Raises ConfigError where another process has it, or nothing can be written."""
    try:
        lock = KeyLock.taken(runs, key)
    except OSError as error:
        raise ConfigError(f"runs: {runs} can't be written ({error.strerror})") from None
    if isinstance(lock, KeyLock):
        return lock
    raise ConfigError(
        f"run.key: {printable(key, limit=80)} is being trained by {lock}; wait for it, end it with "
        "`python -m flows.stop`, or choose another key"
    )


def is_key_held(runs: Path, key: str) -> bool:
    """Whether a process trains under this key, or is about to."""
    return is_held(_key_file(runs, key))


def _key_file(runs: Path, key: str) -> Path:
    return runs / KEYS / f"{sha256(key.encode()).hexdigest()[:24]}.lock"


@dataclass(frozen=True)
class KeyLock:
    """A key that this process has. Its file goes with it."""

    lock: FileLock

    @classmethod
    def taken(cls, runs: Path, key: str) -> KeyLock | str:
        """It, or who else has it. Raises OSError."""
        path = _key_file(runs, key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            lock = FileLock(path)
            if not lock.take(f"process {os.getpid()}"):
                with lock:
                    return lock.text()
            if lock.is_in_place():
                return cls(lock)
            lock.close()  # whoever had it has removed the file since it was opened here

    def __enter__(self) -> KeyLock:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.lock.path.unlink()
        self.lock.close()


def taken(folder: Path) -> FileLock:
    """The lock of a run that is to be gone on with. Raises ConfigError where another process has
    it, and NothingKept where its checkpoints were removed until then."""
    if folder.is_dir():
        lock = held(folder)
        if steps(folder / CHECKPOINTS):
            return lock
        lock.close()
    raise NothingKept(f"--resume {folder}: its checkpoints were removed; train without --resume")


def check_resume(folder: Path, plan: Plan) -> None:
    """Refuse to go on with the run of this folder as another training, before it is opened again.

    Raises ConfigError, and NothingKept where none of its checkpoints is what was written.
    """
    kept, now, damage = folder / CHECKPOINTS, identity(plan), []
    for step in steps(kept):
        try:
            refuse_another(intact_about(kept, step), now)
        except Newer as error:
            raise ConfigError(f"--resume: {error}") from None
        except Damaged as error:  # told when it is read, where an older one is taken
            damage.append(str(error).replace(f"{kept}/", ""))
            continue
        return
    if damage:
        raise NothingKept(f"no checkpoint of it is what was written ({damage[0]})")
    raise NothingKept("its checkpoints were removed")


def _newest(runs: Path, key: str) -> Path | None:
    of_key = (f for f in folders(runs) if (s := start_of(f)) is not None and s.key == key)
    return next(of_key, None) if key else None


def held(folder: Path) -> FileLock:
    """The folder's lock, until it is closed. Raises ConfigError where another process trains there,
    or nothing can be written."""
    try:
        lock = FileLock(folder / LOCK)
        is_mine = lock.take(f"process {os.getpid()}")
    except OSError as error:
        raise ConfigError(f"--resume {folder}: can't be written ({error.strerror})") from None
    if not is_mine:
        by = lock.text()
        lock.close()
        raise ConfigError(f"--resume {folder}: that run is being trained by {by}")
    return lock


def _id(folder: Path) -> str:
    start = start_of(folder)
    return start.run_id if start else ""


def _is_done(folder: Path) -> bool:
    run = json_of(folder / "run.json")
    return run.get("status") == "FINISHED" and not run.get("stopped")


@dataclass(frozen=True)
class Retry:
    """Another start of a training, in a new process, that is to come."""

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
            f"begins in {seconds(max(0.0, self.at - time.time()))}, {source}"
        )


def plan_retry(
    folder: Path, failure: Failure, config: RunConfig, *, starts: int = 0
) -> Retry | None:
    """The next start of the training in this folder, which has failed and let go of it; None where
    that would not help, or has not helped so often. Kept in its start.json.

    starts: of a flow run by now; 0 at a desk, where somebody sits who is told at the first one.
    """
    start, step = start_of(folder), next(iter(steps(folder / CHECKPOINTS)), 0)
    was = start or Start("", "", "", retries=starts - 1)  # where it did not come to open its run
    before = 0 if step > was.retried_at else was.retries
    is_waited_for = failure.cure == "in a retry" and (starts > 0 or was.retries > 0)
    retry, most = None, config.run.retries
    if (failure.cure == "always" or is_waited_for) and 0 <= before < most:
        at = time.time() + min(RETRY_WAIT_S, config.run.retry_wait_s * 2**before)
        if not _is_over(config.train.until, at):
            retry = Retry(failure.kind, before + 1, most, at, folder, step)
    if start is not None:
        number, after = (retry.number, retry.after) if retry is not None else (0, "")
        try:
            replace(start, retries=number, retried_at=step, after=after).write(folder)
        except OSError:  # what is not counted might never end
            return None
    return retry


def _is_over(until: str | None, at: float) -> bool:
    """Whether the time that a training has is over by then: the next 06:30 is another day's."""
    with suppress(ConfigError):  # a date that has passed
        return until is not None and at >= ends_at(until, time.time())
    return True


def retry_of(runs: Path, key: str) -> Start | None:
    """The run that failed before it had a checkpoint, where this start is its retry."""
    folder = restart.follows() or _newest(runs, key)
    start = start_of(folder) if folder is not None else None
    return start if start is not None and start.retries else None


def retry_tags(
    before: Start | None, device: DeviceFacts, run: RunSettings, *, is_new: bool
) -> dict[str, str]:
    """What MLflow is told of a retry; nothing of another start. is_new: as a run of its own.

    Raises NotNow where the device is gone: nobody asked for weeks on the CPU.
    """
    if before is None or not before.retries:
        return {}
    if before.device not in ("", device.kind):
        raise NotNow(
            f"device.name: the training was on {before.device}, and its retry finds {device.kind} "
            f"({device.reason}); go on there with --resume, or look after the device",
            kind="device_lost",
        )
    told = {"retries": f"{before.retries} of {run.retries} after {before.after}"}
    return {**told, "retry_of": before.run_id} if is_new else told


def tell_resume(folder: Path, run_id: str) -> None:
    """Tell a person how to go on with what ended before its end, where something was kept. run_id:
    empty where MLflow knows nothing of it."""
    kept = steps(folder / CHECKPOINTS)
    if kept:
        command = resume_command(run_id or folder.name)
        log.info("step %s is kept; go on with `%s`", f"{kept[0]:,}", command)
