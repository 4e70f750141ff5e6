"""The folder of a run, read and written by what its files say, as a program of somebody else's
would: JSON lines with a checksum in events.jsonl, start.json of who trains, sent.json of what
MLflow has, and the locks of whoever trains or sends it."""

import json
import zlib
from collections.abc import Mapping
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

LOG = "events.jsonl"
START = "start.json"
SENT = "sent.json"
TRAINING_LOCK = "training.lock"
SENDING_LOCK = "sending.lock"


def make_line(metrics: Mapping[str, float], step: int, *, unix_ms: int) -> bytes:
    """The line of what was measured at a step."""
    return _add_checksum(f'{{"step":{step},"t":{unix_ms},"metrics":{json.dumps(metrics)}')


def make_event(kind: str, content: Mapping[str, Any], *, unix_ms: int) -> bytes:
    """The line of a begin or an end."""
    return _add_checksum(f'{{"{kind}":{json.dumps(content)},"t":{unix_ms}')


def _add_checksum(text: str) -> bytes:
    return f'{text},"crc32":{zlib.crc32(text.encode())}}}\n'.encode()


def append_lines(folder: Path, *lines: bytes) -> None:
    with open(folder / LOG, "ab") as log:
        log.write(b"".join(lines))


def write_end(folder: Path, run: Mapping[str, Any], *, is_sent: bool = False) -> None:
    """Let the log of a run's folder say how it ended. is_sent: MLflow has it."""
    append_lines(folder, make_event("end", run, unix_ms=7))
    if is_sent:
        offset = (folder / LOG).stat().st_size
        (folder / SENT).write_text(json.dumps({"closed": True, "offset": offset}))


def read_begins(folder: Path) -> list[dict[str, Any]]:
    """What its log says of each time that it began."""
    return [line["begin"] for line in _read_log(folder) if "begin" in line]


def read_end(folder: Path) -> dict[str, Any]:
    """What its log says of its end; empty where that is not the last line of it."""
    last = _read_log(folder)[-1:]
    return dict(last[0].get("end", {})) if last else {}


def read_points(folder: Path) -> list[tuple[str, int]]:
    """The names and steps of all that was measured, in order."""
    measured = [line for line in _read_log(folder) if "metrics" in line]
    return [(name, line["step"]) for line in measured for name in line["metrics"]]


def _read_log(folder: Path) -> list[dict[str, Any]]:
    """Its whole lines; of a log that grows the last may be half a one."""
    text = (folder / LOG).read_bytes() if (folder / LOG).exists() else b""
    return [json.loads(line) for line in text.split(b"\n")[:-1]]


def is_sent(folder: Path) -> bool:
    """Whether MLflow has all of it, its end too."""
    if not (folder / SENT).exists():
        return False
    sent = json.loads((folder / SENT).read_text())
    return bool(sent.get("closed")) and sent.get("offset", 0) == (folder / LOG).stat().st_size


def write_start(folder: Path, run_id: str = "", *, name: str = "mine", **more: Any) -> None:
    """Let the folder say who trains it."""
    start = {"run_id": run_id, "experiment_id": "1", "name": name, **more}
    (folder / START).write_text(json.dumps(start))


def read_start(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / START).read_text())
    return found


def list_folders(place: Path) -> list[Path]:
    """The folders of the runs of a working directory, the newest first."""
    found = (file.parent for file in place.glob(f".headroom/runs/*/{START}"))
    return sorted(found, key=lambda folder: read_start(folder).get("made_at", 0), reverse=True)


def is_held(lock: Path) -> bool:
    """Whether a process holds this lock."""
    if not lock.exists():
        return False
    with open(lock, "rb") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            return True
    return False
