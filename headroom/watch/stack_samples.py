"""Look now and then at where the thread of a loop is: which kind of work it does, by the file of
the library that it is in, and at which line of the user's code. So a time that was measured gets
the line that it belongs to. Nothing is asked of the loop, and no object of it is kept. Beside it,
the seconds that Python's garbage collector takes.

A look comes when the thread gives the interpreter free, which short stretches of Python do at their
end: what takes how long is for clocks to tell.
"""

from __future__ import annotations

import gc
import linecache
import os
import sys
import sysconfig
import threading
import weakref
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, chain, repeat, takewhile
from operator import attrgetter, call, methodcaller
from time import perf_counter
from typing import Any, NamedTuple

# Between two looks, and after so many of them. One takes some 50 us of the interpreter.
EVERY_S, FIRST_LOOKS, LATER_S = 0.25, 40, 1.0
DEEPEST = 100  # frames of a thread
_get_place = attrgetter("f_code.co_filename", "f_lineno", "f_code.co_name")
DATA, COLLATE, WORKERS, START = "data", "collate", "workers", "start of workers"
OPTIMIZER, BACKWARD, FORWARD, CHECKPOINT = "optimizer", "backward", "forward", "checkpoint"
LOGGING, ACCOUNT, CODE = "logging", "account", "code"
COPY, READ = "copy to the device", "read from the device"  # if it is another one than the host
# What a loop says that it does, beside the parts of a run that it names.
STEP, BETWEEN = "step", "between"

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_OURS = tuple(os.path.join(_ROOT, room, "") for room in ("headroom", "flows", "tasks"))
_PLACES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")}
# PyTorch may lie elsewhere: built by its user, or in a folder of PYTHONPATH.
_PLACES |= set(getattr(find_spec("torch"), "submodule_search_locations", None) or ())
_LIBRARIES = tuple(os.path.join(place, "") for place in _PLACES)
_KINDS = {  # by a part of the path of a file
    "/torch/utils/data/": DATA,
    "/torch/optim/": OPTIMIZER,
    "/torch/autograd/": BACKWARD,
    "/torch/serialization.py": CHECKPOINT,
    "/torch/distributed/checkpoint/": CHECKPOINT,
    "/safetensors/": CHECKPOINT,
    "/logging/__init__.py": LOGGING,
    "/tensorboard/": LOGGING,
    "/wandb/": LOGGING,
    "/mlflow/": LOGGING,
    "/matplotlib/": LOGGING,
    "/torch/nn/modules/module.py": FORWARD,
}
# By the user's line, where no library tells.
_WORDS = {
    LOGGING: ("print(", ".write(", "log(", "logger."),
    COPY: (".to(", ".cuda("),
    READ: (".item(", ".tolist(", ".cpu(", ".numpy("),
}
_LOADER = "/torch/utils/data/dataloader.py"
_WAITS = ("_get_data", "_try_get_data")
_STARTS = ("__init__", "_reset", "_shutdown_workers")


class Place(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def describe(self) -> str:
        """Return the place in words, with the line where it can be read."""
        text = linecache.getline(self.file, self.line).strip()
        name = os.path.basename(self.file)
        return f"{name}:{self.line}" + (f" `{text[:60]}`" if text else "")


class Look(NamedTuple):
    """What the thread was at: what the loop says that it does, the kind of work, and the line."""

    state: str
    kind: str
    place: Place | None


@dataclass(frozen=True)
class Looks:
    """How often each was seen."""

    seen: dict[Look, int]

    def describe(self) -> dict[str, list[dict[str, Any]]]:
        """Return by state the kinds of work that were seen there, the most frequent first: each
        with how often, and its most frequent line in words, empty where none was seen twice."""
        kinds: dict[str, Counter[str]] = defaultdict(Counter)
        places: dict[tuple[str, str], Counter[Place]] = defaultdict(Counter)
        for look, times in self.seen.items():
            kinds[look.state][look.kind] += times
            if look.place is not None:
                places[look.state, look.kind][look.place] += times
        described = {}
        for state, counted in kinds.items():
            described[state] = [
                {"kind": kind, "looks": times, "line": _describe_best(places[state, kind])}
                for kind, times in counted.most_common()
            ]
        return described


def _describe_best(places: Counter[Place]) -> str:
    if not places:
        return ""
    place, times = places.most_common(1)[0]
    return place.describe() if times > 1 else ""


class StackSampler:
    """Looks at the thread that has made it, from `start` to `stop`, and times the collector."""

    def __init__(self) -> None:
        self.state = ""  # what the loop says that it does
        self.is_evaluating = False  # a model was called without gradients since the last step
        self.garbage_s = 0.0
        self._watched = threading.get_ident()
        self._seen: Counter[Look] = Counter()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._garbage_began = 0.0
        self._callback: Any = None  # that the collector calls

    def start(self) -> None:
        """Begin to look, in a thread of its own."""
        # Neither keeps it: where nobody ends a loop, it ends with what watches that.
        mine = weakref.ref(self)

        def time_garbage(phase: str, info: dict[str, int]) -> None:
            sampler = mine()
            if sampler is not None:
                sampler._time_garbage(phase)
            else:
                with suppress(ValueError):
                    gc.callbacks.remove(time_garbage)

        self._callback = time_garbage
        self._thread = threading.Thread(
            target=_look, args=(mine, self._is_over), name="headroom-looks", daemon=True
        )
        self._thread.start()
        gc.callbacks.append(time_garbage)

    def stop(self) -> None:
        """Look no more. It may be called again."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._is_over.set()
        with suppress(ValueError):  # somebody may have cleared them
            gc.callbacks.remove(self._callback)
        thread.join(timeout=1)

    def summarize(self) -> Looks:
        """Return what was seen so far."""
        return Looks(dict(self._seen))

    def look(self, weight: int) -> bool:
        """Look once; return whether the thread is there."""
        state, positions = self.state, list_positions(self._watched)
        if positions:
            kind, place = describe_positions(positions)
            if self.is_evaluating and state == BETWEEN and kind in (CODE, READ, COPY):
                kind = FORWARD
            self._seen[Look(state, kind, place)] += weight
        return bool(positions)

    def _time_garbage(self, phase: str) -> None:
        if threading.get_ident() != self._watched:
            return
        if phase == "start":
            self._garbage_began = perf_counter()
        elif self._garbage_began:
            self.garbage_s += perf_counter() - self._garbage_began


def _look(of: weakref.ref[StackSampler], is_over: threading.Event) -> None:
    looks = 0
    while not is_over.wait(EVERY_S if looks < FIRST_LOOKS else LATER_S):
        sampler = of()
        weight = 1 if looks < FIRST_LOOKS else round(LATER_S / EVERY_S)
        try:
            if sampler is None or not sampler.look(weight):
                return
        except Exception:  # no memory, no file: a run is told without lines then
            return
        del sampler
        looks += 1


def is_own_code(position: Place) -> bool:
    """Return whether this is a line of the user's: of no library, nor of this project."""
    file = position.file
    is_ours = file.startswith(_OURS)
    return not (is_ours or file.startswith(("<", *_LIBRARIES)) or "/site-packages/" in file)


def list_positions(thread: int) -> list[Place]:
    """Return where each frame of a thread is, the innermost first, at most a hundred.

    One chain of C calls, in which the interpreter's lock is not given free: a walk in Python is
    interrupted, and may go on in memory that the thread has freed; so is one in which the garbage
    collector runs a finalizer. faulthandler, which needs no lock, reads threads that a library is
    beginning, and crashes (Python 3.11).
    """
    pause, resume = ((gc.disable,), (gc.enable,)) if gc.isenabled() else ((), ())
    innermost = map(methodcaller("get", thread), map(call, (sys._current_frames,)))
    frames = takewhile(bool, accumulate(chain(innermost, repeat("f_back", DEEPEST - 1)), getattr))
    walk = chain(map(call, pause), map(_get_place, frames), map(call, resume))
    return [Place(*place) for place in list(walk) if place]


def describe_positions(positions: list[Place]) -> tuple[str, Place | None]:
    """Return the kind of work of a thread that is there, and the innermost line of the user's code,
    if any."""
    kind, own = "", None
    is_collated = False
    for position in positions:
        file = position.file
        if file.startswith(_OURS):
            kind = kind or ACCOUNT
        elif file.startswith(_LIBRARIES) or "/site-packages/" in file:
            of_file = _choose_kind(position)
            # A model that is called by something else is that; so is all that a loader does.
            if of_file and (kind in ("", FORWARD) or of_file in (DATA, WORKERS, START)):
                kind = kind if kind in (WORKERS, START) else of_file
            is_collated |= position.function == "fetch" and "collate_fn" in _read_line(position)
        elif own is None and not file.startswith("<"):
            own = position
    if kind == DATA and is_collated:
        kind = COLLATE
    if not kind and own is not None:
        line = _read_line(own)
        kind = next((k for k, words in _WORDS.items() if any(w in line for w in words)), "")
    return kind or CODE, own


def _choose_kind(position: Place) -> str:
    if position.file.endswith(_LOADER):
        if position.function in _WAITS:
            return WORKERS
        if position.function in _STARTS:
            return START
    return next((kind for part, kind in _KINDS.items() if part in position.file), "")


def _read_line(place: Place) -> str:
    return linecache.getline(place.file, place.line)
