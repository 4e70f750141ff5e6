"""Puts right what trainings of this host left behind when they or a server died: runs that say they
run, flow runs that do, what was not sent, files of the dead, and, where asked, old journals. What
lives holds a lock and is never touched; two who tidy at once share the work.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks import serve
from tasks.engine.base.file_lock import FileLock, is_held
from tasks.engine.base.units import mebibytes, printable, seconds
from tasks.engine.checkpoint.kept_steps import CHECKPOINTS, steps
from tasks.live_runs import left_files, live_runs
from tasks.process import children
from tasks.process.redaction import redacted
from tasks.run_folders import LOCK, START, folders, start_of
from tasks.serving import crashed_flow_runs, local_prefect
from tasks.serving.crashed_flow_runs import End
from tasks.serving.processes import parts, started
from tasks.tracking.journal_lines import LOCK as SENDING_LOCK
from tasks.tracking.where import Where

MIB = 1024**2
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}


@dataclass(frozen=True)
class Deed:
    """One thing that is, or would be, put right."""

    verb: str  # end, send, set, remove
    what: str
    problem: str = ""  # why it could not be


def put_right(chosen: Where, *, older_s: float | None = None, does: bool) -> Iterator[Deed]:
    """Each thing as it is found and, where it `does`, done. older_s: the age from which on journals
    and checkpoints of runs go that MLflow has."""
    known: dict[str, End] = {}
    if chosen.database is None or chosen.database.is_file():
        yield from _in_mlflow(chosen, known, does=does)
    known |= crashed_flow_runs.ends(Path(chosen.runs))
    for api, workers in _servers().items():
        try:
            yield from _in_prefect(api, known, workers, does=does)
        except (OSError, ValueError, LookupError, TypeError) as error:
            yield Deed("set", "flow runs", f"Prefect at {redacted(api)}: {redacted(str(error))}")
    for path in left_files():
        if does:
            path.unlink(missing_ok=True)
        yield Deed("remove", f"{path}: its process is gone")
    if older_s is not None:
        yield from _old(Path(chosen.runs), older_s, does=does)


def _in_mlflow(chosen: Where, known: dict[str, End], *, does: bool) -> Iterator[Deed]:
    """In a process of its own, which imports mlflow. known: gets the flow runs that are to end."""
    asked = json.dumps({"where": chosen.model_dump(), "does": does})
    with children.start("tasks.tracking.orphaned_runs", env={**PATIENCE, **os.environ}) as asking:
        assert asking.stdin is not None and asking.stdout is not None
        asking.stdin.write(asked)
        asking.stdin.close()
        for line in asking.stdout:
            with suppress(ValueError):  # a library that prints
                yield _of_mlflow(json.loads(line), known)
    if asking.returncode:
        yield Deed("end", "runs in MLflow", f"its process ended with {asking.returncode}")


def _of_mlflow(told: dict[str, Any], known: dict[str, End]) -> Deed:
    if "verb" not in told:
        return Deed("end", "runs in MLflow", told["problem"])
    with suppress(OSError):
        at_s = (Path(told["folder"]) / "metrics.jsonl").stat().st_mtime
        known[told["flow_run"]] = End(at_s=at_s)
    why = "its process is gone" if told["verb"] == "end" else "not all of it was sent to MLflow"
    id = f" ({told['run_id'][:8]})" if told["run_id"] else ""  # MLflow has not heard of it yet
    which = printable(told["name"], limit=60) + id
    return Deed(told["verb"], f"{which}: {why}", told["problem"])


def _servers() -> dict[str, list[float] | None]:
    """Prefect's APIs that are known here; of that of `make serve`, whose workers are no other
    host's, since when these live."""
    ours = parts(serve.FOLDER)
    found = {f"{ours['prefect'].address}/api": started(ours)} if "prefect" in ours else {}
    named = local_prefect.known_api()
    return {named: None, **found} if named else {**found}


def _in_prefect(
    api: str, known: dict[str, End], workers: list[float] | None, *, does: bool
) -> Iterator[Deed]:
    dead = crashed_flow_runs.crash_the_dead(api, known, workers=workers, does=does)
    for name, end in {**dead, **crashed_flow_runs.correct(api, known, does=does)}.items():
        state = end.name or end.type
        yield Deed("set", f"flow run {printable(name, limit=60)} to {state}: {end.message}")


def _old(runs: Path, older_s: float, *, does: bool) -> Iterator[Deed]:
    live = {live.folder for live in live_runs()}
    for folder in folders(runs):
        with suppress(OSError), ExitStack() as held:
            age_s = time.time() - max(file.stat().st_mtime for file in folder.iterdir())
            is_sent = '"closed": true' in (folder / "sent.json").read_text()
            if age_s < older_s or not is_sent or str(folder) in live:
                continue
            if any(is_held(folder / name) for name in (LOCK, SENDING_LOCK)):
                continue
            start, size = start_of(folder), sum(f.lstat().st_size for f in folder.rglob("*"))
            kept = [f", with its checkpoint of step {n:,}" for n in steps(folder / CHECKPOINTS)[:1]]
            if does:
                locks = [held.enter_context(FileLock(folder / n)) for n in (LOCK, SENDING_LOCK)]
                if not all(lock.take(f"process {os.getpid()}, which removes it") for lock in locks):
                    continue
                _remove(folder)
            name = printable(start.name if start else "", limit=60)
            told = ", ".join([name, f"{seconds(age_s)} old", mebibytes(size / MIB)])
            yield Deed("remove", "".join([f"{folder}: {told}", *kept]))


def _remove(folder: Path) -> None:
    """What makes it a run goes last: interrupted, it is found again."""
    last = ["sent.json", START]
    for entry in sorted(folder.iterdir(), key=lambda e: e.name in last and 1 + last.index(e.name)):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    folder.rmdir()
