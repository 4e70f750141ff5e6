"""Trainings that begin at once and need the GPUs of one host, seen from outside: which process held
which GPU's lease, by the kernel's own list of locks, and which computed on which, by the model that
they train. It finds where two were on one GPU at once, and where one computed without a lease.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

ASK_EVERY_S = 0.02
SLACK_S = 0.3  # between two looks at the locks, on a host whose cores are all taken
COMPUTED = "computed.log"
PASSES = 5  # before the first is killed; the second after as many more
# A model that says in a file which process computes on which GPU, and when, and takes its time.
MODEL = """
import math
import os
import time

import torch


class Witness(torch.nn.Module):
    def __init__(self, input_shape, outputs):
        super().__init__()
        self.layer = torch.nn.Linear(math.prod(input_shape), outputs)

    def forward(self, rows):
        if rows.is_cuda:
            uuid = torch.cuda.get_device_properties(rows.device).uuid
            line = f"{time.time()} {os.getpid()} GPU-{uuid}\\n"
            file = os.open("computed.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, line.encode())
            os.close(file)
            time.sleep(0.2)
        return self.layer(rows.flatten(1))
"""
WORDS = ("--model.name", "witness:Witness", "--train.compile", "off")


@dataclass
class Span:
    """A time in which a process had a GPU. Unix seconds."""

    pid: int
    device: str
    begin_s: float
    end_s: float


@dataclass
class Contention:
    """What came of trainings that wanted the same GPUs. codes: by process id."""

    codes: dict[int, int] = field(default_factory=dict)
    held: list[Span] = field(default_factory=list)
    computed: list[Span] = field(default_factory=list)  # each forward pass, without a length
    killed: list[Span] = field(default_factory=list)  # how long each had its GPU

    def find_faults(self) -> list[str]:
        """Return where two processes had a GPU at once, or one computed without its lease."""
        used = _merge(self.computed)
        faults = [*_find_overlaps(self.held, "held"), *_find_overlaps(used, "computed on")]
        for one in self.computed:
            if not any(
                (span.pid, span.device) == (one.pid, one.device)
                and span.begin_s - SLACK_S <= one.begin_s <= span.end_s + SLACK_S
                for span in self.held
            ):
                faults.append(f"{one.pid} computed on {one.device} without its lease")
        return faults

    def list_returns_s(self) -> list[float]:
        """Return after how many seconds each GPU of a killed training was another's."""
        return [
            min(later) - one.end_s
            for one in self.killed
            if (
                later := [
                    span.begin_s
                    for span in self.held
                    if span.device == one.device and span.pid != one.pid
                    if span.begin_s >= one.end_s - ASK_EVERY_S
                ]
            )
        ]


def _merge(passes: Sequence[Span]) -> list[Span]:
    """Return from when to when each process computed on each GPU."""
    found: dict[tuple[int, str], Span] = {}
    for one in passes:
        known = found.setdefault((one.pid, one.device), replace(one))
        known.begin_s = min(known.begin_s, one.begin_s)
        known.end_s = max(known.end_s, one.end_s)
    return [*found.values()]


def _find_overlaps(spans: Sequence[Span], how: str) -> list[str]:
    """Return where a process came to a GPU before the one before it was through with it."""
    order = sorted(spans, key=lambda span: (span.device, span.begin_s))
    return [
        f"{a.device} was {how} by {a.pid} and {b.pid} at once"
        for a, b in pairwise(order)
        if a.device == b.device and a.pid != b.pid and b.begin_s < a.end_s
    ]


class _Locks:
    """Looks at who holds which lease, from its making until `close`."""

    def __init__(self, leases: Path) -> None:
        self._leases, self.spans, self.faults = leases, list[Span](), list[str]()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def read(self) -> dict[str, list[int]]:
        """Return the processes that hold each GPU's lease alone, now."""
        names = {str(file.stat().st_ino): file.stem for file in self._leases.glob("*.lock")}
        holders = defaultdict(list)
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if words[1:4] == ["FLOCK", "ADVISORY", "WRITE"]:
                inode = words[5].rpartition(":")[2]
                if inode in names:
                    holders[names[inode]].append(int(words[4]))
        return holders

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        last: dict[tuple[int, str], Span] = {}
        while not self._is_over.wait(ASK_EVERY_S):
            holders, at_s = self.read(), time.time()
            now = {(pid, device) for device, pids in holders.items() for pid in pids}
            self.faults += [f"{d} was leased by {p}" for d, p in holders.items() if len(p) > 1]
            last = {key: span for key, span in last.items() if key in now}
            for pid, device in now:
                if (pid, device) not in last:
                    last[pid, device] = Span(pid, device, at_s, at_s)
                    self.spans.append(last[pid, device])
                last[pid, device].end_s = at_s


def contend(
    folder: Path,
    env: Mapping[str, str],
    trainings: Sequence[Sequence[str]],
    *,
    kills: int,
    within_s: float,
) -> Contention:
    """Begin these commands in the folder within so many seconds, kill some while they compute, and
    return what was seen when all have ended. They lease in `leases` there."""
    (folder / "witness.py").write_text(MODEL)
    (folder / "leases").mkdir(exist_ok=True)
    (folder / "leases").chmod(0o1777)
    found, watch = Contention(), _Locks(folder / "leases")
    running: dict[int, subprocess.Popen[bytes]] = {}
    began_s, waiting = time.time(), list(enumerate(trainings))
    while waiting or running:
        while waiting and time.time() - began_s >= within_s * waiting[0][0] / len(trainings):
            number, command = waiting.pop(0)
            with open(folder / f"{number}.log", "w") as log:
                one = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
            running[one.pid] = one
        for pid, process in list(running.items()):
            if process.poll() is not None:
                found.codes[pid] = process.returncode
                del running[pid]
        computed = read_computed(folder)
        if len(found.killed) < kills and (
            span := _choose(computed, running, PASSES * (1 + len(found.killed)))
        ):
            running[span.pid].send_signal(signal.SIGKILL)
            running[span.pid].wait()
            found.killed.append(Span(span.pid, span.device, span.begin_s, time.time()))
        time.sleep(ASK_EVERY_S)
    watch.close()
    found.held, found.computed = watch.spans, read_computed(folder)
    left = [device for device, pids in watch.read().items() if pids]
    if left or watch.faults:
        raise AssertionError(f"left leased: {left}; {watch.faults}")
    return found


def read_computed(folder: Path) -> list[Span]:
    """Return each forward pass on a GPU."""
    file = folder / COMPUTED
    lines = file.read_text().splitlines() if file.exists() else []
    parts = [line.split() for line in lines]
    return [Span(int(pid), device, float(at_s), float(at_s)) for at_s, pid, device in parts]


def _choose(computed: Sequence[Span], running: Mapping[int, object], passes: int) -> Span | None:
    """Return a training that has computed so often and goes on; None where there is none."""
    counts = Counter(one.pid for one in computed)
    return next((o for o in computed if o.pid in running and counts[o.pid] >= passes), None)
