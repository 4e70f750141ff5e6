"""Lists the trainings of this host: those that live, each by a small file beside the leases that it
holds locked, with how far they are; and the newest of those that ended, by their folders, with how.
Each folder says in start.json when its run was begun or gone on with, and by which process. It asks
no server and imports no PyTorch. The lock goes with its process: a file that nobody holds is of a
training that is gone, and one that can't write such a file trains all the same.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pwd
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from shlex import quote
from time import time, time_ns
from uuid import uuid4

import psutil

from headroom.base.event_log import (
    LOG,
    SENDING_LOCK,
    START,
    TRAINING_LOCK,
    Line,
    is_sent,
    read_end,
    read_json,
    read_log_ends,
    read_sent,
    write_to_disk,
)
from headroom.base.file_lock import FileLock, is_held
from headroom.base.names import LOWER_BOUND
from headroom.base.units import make_printable
from headroom.device import leases
from headroom.device.leases import Leases
from headroom.prefect.prefect_http import compute_uptime
from headroom.process.redaction import redact
from headroom.training.kept_steps import CHECKPOINTS, list_steps


@dataclass(frozen=True)
class RunStart:
    """How a run began; kept in its folder as start.json."""

    run_id: str
    experiment_id: str
    name: str
    key: str = ""
    resumed: int = 0  # times that it was gone on with
    pid: int = 0  # that trains, or trained last
    began_at: float = 0.0  # Unix time
    spent_s: float = 0.0  # by the times before
    device: str = ""  # its kind
    retries: int = 0  # since there was a newer checkpoint; 0 again where no more is to come
    retried_at: int = 0  # step of the checkpoint at the last of them
    after: str = ""  # which class of failure it came
    steps: int = 0  # that it is to take
    epochs: int = 0
    made_at: float = 0.0  # Unix time; see `choose_start_time`
    resumed_at: float = 0.0  # the same of the last time that it was gone on with
    marks: Sequence[str] = ()  # of the last times that this folder went on; see mark_resume

    def write(self, folder: Path) -> None:
        half = folder / f"{START}.new"
        half.write_text(json.dumps(asdict(self)))
        write_to_disk(half)  # else a power cut may leave an empty file, without its marks
        half.rename(folder / START)

    def mark_resume(self, folder: Path) -> RunStart:
        """Return this start with a new mark, which the folder keeps before MLflow has it: where
        MLflow has one that a folder does not know, another copy of it went on. Raises OSError."""
        marked = replace(self, marks=(*self.marks[-99:], uuid4().hex[:8]))
        marked.write(folder)
        write_to_disk(folder)  # else it would lack what MLflow keeps
        return marked

    def mark_as_retry(self, before: RunStart | None) -> RunStart:
        """Return this start as a retry of `before` if given."""
        was = before or self
        return replace(self, retries=was.retries, retried_at=was.retried_at, after=was.after)

    def make_next(self, folder: Path) -> RunStart:
        """Return the start of the next time, with the seconds that the times before took.

        The last one has recorded how long it took, or lasted, as far as is known, until its
        newest metric.
        """
        spent_s = self.spent_s
        try:
            total_s = read_end(folder)["metrics"]["time/total_s"]
            spent_s = max(spent_s, float(total_s))
        except (ValueError, LookupError, TypeError):
            with suppress(OSError):
                spent_s += max(0.0, (folder / LOG).stat().st_mtime - self.began_at)
        return replace(
            self,
            resumed=self.resumed + 1,
            pid=os.getpid(),
            began_at=time(),
            spent_s=spent_s,
            resumed_at=choose_start_time(folder.parent),
        )


def read_start(folder: Path) -> RunStart | None:
    """Return how the run of this folder began; None where it is no run's folder.

    MLflow may know the run only since then.
    """
    with suppress(TypeError):
        start = RunStart(**read_json(folder / START))
        start = replace(start, marks=tuple(start.marks))
        with suppress(LookupError):
            sent = read_sent(folder) if not start.run_id else {}
            start = replace(start, run_id=sent["run_id"], experiment_id=sent["experiment_id"])
        return start
    return None


def list_run_folders(runs: Path) -> list[Path]:
    """Return the folders of runs, the one that was begun or gone on with last first, by what their
    start.json says.

    A folder's name has the time of a clock, which may be that of another time zone, or of the
    hour that comes twice.
    """
    folders = (file.parent for file in runs.glob(f"*/{START}"))
    return sorted(folders, key=lambda folder: (_read_start_time(folder), folder.name), reverse=True)


def choose_start_time(runs: Path) -> float:
    """Return the time of a run that is begun or gone on with now: later than that of any run there.

    It is the Unix time, but where the clock was set back since.
    """
    folders = (file.parent for file in runs.glob(f"*/{START}"))
    return max(time(), max(map(_read_start_time, folders), default=0.0) + 0.001)


def _read_start_time(folder: Path) -> float:
    """Return when its run was begun or, later, gone on with; 0 where nobody knows."""
    start = read_json(folder / START)
    with suppress(TypeError, ValueError):
        return max(float(start.get(name, 0.0)) for name in ("made_at", "resumed_at"))
    return 0.0


def make_resume_command(run_id: str) -> str:
    """Return the command by which a person goes on with that run."""
    # Of a folder or a server of anybody's: it may be copied into a shell as it stands there.
    return f"python -m flows.train --resume {quote(make_printable(run_id, limit=80))}"


NEW_S = 60.0
MOST_BYTES = 2**16  # of a file that anybody may have written
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LiveRun:
    """What a training announces of itself; what it does not know yet is empty."""

    name: str = ""
    folder: str = ""
    run_id: str = ""
    stage: str = "starting"
    waits_for: str = ""
    device: str = ""
    bound: str = ""  # what holds it back so far, in a sentence
    steps: int = 0
    epochs: int = 0
    peak_mib: float = 0.0  # where no curve has it
    pid: int = 0
    started_at: float = 0.0  # the process, Unix time
    uptime_s: str = ""  # of the host then; see prefect_http.compute_uptime
    uid: int = 0  # of the file's owner, whatever the file says


class Announcement:
    """The announcement of this process.

    A context manager around a run: on exit it is removed.
    """

    def __init__(self, folder: Path, name: str) -> None:
        me = psutil.Process()
        content = {"name": redact(name), "folder": str(folder), "pid": me.pid}
        self.live = LiveRun(**content, started_at=me.create_time(), uptime_s=compute_uptime(me))  # type: ignore[arg-type]
        self._place = leases.find_lease_folder()
        self._path = self._place / f"{time_ns():020d}-{me.pid}.run"
        self._lock: FileLock | None = None

    def make_leases(
        self, wait_s: float, show_waiting: Callable[[str], None] = lambda _: None
    ) -> Leases:
        """Return leases that announce here what they wait for, and call `show_waiting` with it."""
        holder = f"process {self.live.pid}, {self.live.name}"

        def waits(reason: str) -> None:
            self.tell(waits_for=reason)
            show_waiting(reason)

        return Leases(self._place, wait_s=wait_s, holder=holder, show_waiting=waits)

    def tell(self, **fields: str | float) -> None:
        """Announce what is known from now on, by the fields of LiveRun."""
        self.live = replace(self.live, **fields)  # type: ignore[arg-type]
        with suppress(OSError):
            if self._lock is not None:
                self._lock.write(json.dumps(asdict(self.live)))

    def __enter__(self) -> Announcement:
        half = self._path.with_suffix(".new")
        try:
            leases.make_shared_folder(self._place)
            self._lock = FileLock(half, mode=0o644)
            self._lock.take(json.dumps(asdict(self.live)))
            half.rename(self._path)  # only now: others see it locked, or not at all
        except OSError as error:
            log.info("flows.runs does not show this: %s %s", self._place, error.strerror)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._path.unlink()
        if self._lock is not None:
            self._lock.close()


def find_live_runs() -> list[LiveRun]:
    """Return the trainings that live, in the order in which they began.

    Files of trainings that are gone are removed.
    """
    live_runs = []
    for path in leases.list_trusted_files(leases.find_lease_folder(), "*.run"):
        if not is_held(path):
            with suppress(OSError):
                path.unlink()
        elif (live := _read_live_run(path)) is not None:
            live_runs.append(live)
    return live_runs


def find_left_files() -> list[Path]:
    """Return this user's announcements and queue tickets whose processes are gone."""
    files = []
    for path in leases.list_trusted_files(leases.find_lease_folder(), "*.*"):
        with suppress(OSError):
            about = path.lstat()
            # Between its making and its locking a new one is nobody's.
            is_left = path.suffix in (".run", ".ticket") or (
                path.suffix == ".new" and time() - about.st_mtime > NEW_S
            )
            if is_left and about.st_uid == os.getuid() and not is_held(path):
                files.append(path)
    return files


def is_live(live: LiveRun) -> bool:
    """Return whether that training still lives, whatever else its process does."""
    of = (live.folder, live.pid, live.started_at)
    return any((one.folder, one.pid, one.started_at) == of for one in find_live_runs())


def find_process(live: LiveRun) -> psutil.Process | None:
    """Return that very process; None where it can't be seen, or is not its file's owner's."""
    with suppress(psutil.Error):
        process = psutil.Process(live.pid)
        is_same = abs(process.create_time() - live.started_at) < 1
        is_same |= compute_uptime(process) == live.uptime_s  # the clock was set since
        if is_same and process.uids().effective == live.uid:
            return process
    return None


def find_owner(live: LiveRun) -> str:
    """Return the name of its user."""
    return find_user_name(live.uid)


def find_user_name(uid: int) -> str:
    """Return the user's name; the number of one without, as in a container."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _read_live_run(path: Path) -> LiveRun | None:
    """Return what the file says; None where it is not what a training writes."""
    with suppress(OSError, ValueError, TypeError, AttributeError, OverflowError):
        with open(path, "rb", opener=_open_without_blocking) as file:
            text, uid = (
                file.read(MOST_BYTES).decode(errors="replace"),
                os.fstat(file.fileno()).st_uid,
            )
        content = json.JSONDecoder().raw_decode(text)[0]
        fields = {k: type(v)(content.get(k, v)) for k, v in asdict(LiveRun()).items()}
        return LiveRun(**{**fields, "uid": uid})
    return None


def _open_without_blocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


PEAK, RUN_PEAK = "memory/peak_allocated_mib", "memory/run_peak_allocated_mib"  # of a window; of all
LEAST_LETTERS = 6  # of an id
STATES = {  # of a training that lives, by its stage
    "starting": "starting",
    "detect device": "starting",
    "prepare data": "preparing",
    "train model": "training",
    "release memory": "releasing",
    "sending it to MLflow": "sending",
}
GONE = "its process is gone, and nothing has ended it; `python -m flows.tidy --yes` does"
END_UNKNOWN = "how it ended is only known in MLflow"
UNKNOWN = "MLflow has not been told of it yet"


@dataclass(frozen=True)
class KnownRun:
    """One training, by the names of --json. What is not known is None, or an empty text."""

    name: str
    state: str  # of STATES, waiting, or FINISHED, FAILED, KILLED, ended, gone
    live: bool = False
    run_id: str = ""
    key: str = ""
    folder: str = ""
    user: str = ""
    pid: int | None = None
    device: str = ""
    waits_for: str = ""
    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    eta_s: float | None = None
    total_s: float | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    peak_mib: float | None = None
    is_peak_lower_bound: bool = False
    reason: str = ""  # why it ended as it did
    bound: str = ""  # what held it back, in a sentence
    unsent: str = ""  # why MLflow has not got all of it
    resume: str = ""  # the command that goes on with it
    began_at: float | None = None  # Unix time


def list_known_runs(runs: Path, *, last: int | None = None) -> list[KnownRun]:
    """Return the trainings that live, then the `last` newest others; None: all of them."""
    alive = find_live_runs()
    places = {live.folder for live in alive}
    ended = (folder for folder in list_run_folders(runs) if str(folder) not in places)
    runs_there = (run for folder in ended if (run := read_run_folder(folder)) is not None)
    return [*map(_make_live_run, alive), *islice(runs_there, last)]


def find_newest_run(runs: Path) -> KnownRun | None:
    """Return the training that was begun or gone on with last, of those that live and those that
    ended; None where there is none."""
    alive = {live.folder: live for live in find_live_runs()}
    # One that has just been started has no start.json yet, or that of the time before.
    times = {
        folder: max(live.started_at, _read_start_time(Path(folder)))
        for folder, live in alive.items()
    }
    newest = max(times, key=lambda folder: times[folder], default="")
    for folder in list_run_folders(runs):
        if newest and _read_start_time(folder) <= times[newest]:
            break
        if (run := read_run_folder(folder)) is not None:
            return run
    return _make_live_run(alive[newest]) if newest else None


def find_called_runs(word: str, runs: Sequence[KnownRun]) -> list[KnownRun]:
    """Return the runs that a person means by this word.

    It is an id or the first letters of it, a name, a key, a folder, or the number of a
    process that trains.
    """
    folder = str(Path(word).absolute())
    exact = [
        run
        for run in runs
        if word in filter(None, (run.run_id, run.name, run.key, Path(run.folder).name))
        or (run.live and word == str(run.pid))
        or folder == run.folder
    ]
    return exact or [
        run for run in runs if len(word) >= LEAST_LETTERS and run.run_id.startswith(word)
    ]


def _make_live_run(live: LiveRun) -> KnownRun:
    folder = Path(live.folder)
    start = read_start(folder) if os.access(folder, os.R_OK) else None
    state = "waiting" if live.waits_for else STATES.get(live.stage, live.stage)
    run = KnownRun(
        name=live.name,
        state=state,
        live=True,
        run_id=live.run_id or (start.run_id if start is not None and live.device else ""),
        key=start.key if start is not None else "",
        folder=live.folder,
        user=find_owner(live),
        pid=live.pid,
        device=live.device,
        bound=live.bound,
        waits_for=live.waits_for,
        steps=live.steps or None,
        epochs=live.epochs or None,
        peak_mib=live.peak_mib or None,
    )
    if start is None or not live.device:  # another user's, or of a run that is not gone on with yet
        return run
    return _add_measurements(run, start, {})


def read_run_folder(folder: Path) -> KnownRun | None:
    """Return the run of a folder, which may still train; None where it holds none."""
    start = read_start(folder)
    if start is None:
        return None
    end = read_end(folder)
    tags = end.get("tags") or {}
    status, reason = end.get("status"), end.get("error") or end.get("stopped") or ""
    is_alive = is_held(folder / TRAINING_LOCK)  # of a process that could not tell of itself
    if is_alive:
        status, reason = "training", ""
    elif status is None and is_held(folder / SENDING_LOCK):
        status = "sending"
    elif status is None:
        status, reason = ("ended", END_UNKNOWN) if is_sent(folder) else ("gone", GONE)
    is_done = is_alive or (status == "FINISHED" and not reason)
    run = KnownRun(
        name=start.name,
        state=str(status),
        live=is_alive,
        run_id=start.run_id,
        key=start.key,
        folder=str(folder),
        pid=start.pid or None,
        device=str(tags.get("device") or read_json(folder / "device.json").get("name") or ""),
        reason=" ".join(str(reason).split()),
        bound=str(tags.get("bound.why") or ""),
        unsent="" if is_alive or not end else _explain_unsent(folder),
        steps=start.steps or None,
        epochs=start.epochs or None,
        resume=""
        if is_done or not list_steps(folder / CHECKPOINTS)
        else make_resume_command(start.run_id or folder.name),
    )
    return _add_measurements(run, start, end.get("metrics") or {})


def _explain_unsent(folder: Path) -> str:
    """Return why MLflow has not got all of a run that has ended; empty where it has."""
    sent = read_sent(folder)
    is_new = not sent.get("run_id") or (sent.get("closed") and not is_sent(folder))
    return UNKNOWN if is_new else str(sent.get("unsent") or "")


def _add_measurements(run: KnownRun, start: RunStart, end: Mapping[str, float]) -> KnownRun:
    """Return the run with the newest values of its log, and those of its end over them."""
    first, newest = read_log_ends(Path(run.folder) / LOG)
    measured: dict[str, float] = {}
    peaks = []
    for _, _, metrics in [*first, *newest]:
        measured |= metrics
        peaks += [value for name, value in metrics.items() if name == PEAK]
    measured |= {RUN_PEAK: max(peaks)} if peaks else {}
    measured |= end
    step, now_s = max((step for _, step, _ in newest), default=None), time()
    so_far_s = now_s - start.began_at + start.spent_s
    return replace(
        run,
        step=step,
        epoch=_compute_epoch(step, run),
        eta_s=_estimate_left_s(run, newest, start.began_at, now_s) if run.live else None,
        total_s=max(0.0, so_far_s) if run.live else measured.get("time/total_s"),
        loss=measured.get("train/loss"),
        samples_per_s=_find_speed(measured, "speed/samples_per_s"),
        tokens_per_s=_find_speed(measured, "speed/tokens_per_s"),
        peak_mib=measured.get(RUN_PEAK, run.peak_mib),
        is_peak_lower_bound=bool(measured.get(LOWER_BOUND)),
        began_at=start.began_at or None,
    )


def make_timestamp() -> str:
    """Return the time in UTC, as the names of runs' folders have it."""
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def make_curve_name(name: str) -> str:
    """Return the name under which MLflow has what a log point measured.

    A speed of a moment is not that of the run: under one name the run's would end its curve.
    """
    return name.replace("speed/", "speed/recent_", 1) if name.startswith("speed/") else name


def _find_speed(metrics: Mapping[str, float], name: str) -> float | None:
    """Return the run's speed; while it lives, its newest."""
    return metrics.get(name, metrics.get(make_curve_name(name)))


def _compute_epoch(step: int | None, run: KnownRun) -> int | None:
    """Return the number of the epoch that is being trained, from 1."""
    if step is None or not run.steps or not run.epochs:
        return None
    return min(run.epochs, max(1, math.ceil(round(run.epochs * step / run.steps, 6))))


def _estimate_left_s(
    run: KnownRun, lines: list[Line], began_at: float, now_s: float
) -> float | None:
    """Return the seconds that are left, by the pace of the newest lines of this start."""
    points = [(ms / 1000, step) for ms, step, _ in lines if ms / 1000 >= began_at]
    if not run.steps or len(points) < 2 or points[-1][1] <= points[0][1]:
        return None
    (first_s, first), (last_s, last) = points[0], points[-1]
    pace_s = (last_s - first_s) / (last - first)
    return max(0.0, (run.steps - last) * pace_s - max(0.0, now_s - last_s))
