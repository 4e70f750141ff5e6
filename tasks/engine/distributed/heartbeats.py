"""What each of several ranks tells the others while it trains: that it lives, how many collectives
it has come to, and where its code is. The others name by it who has not come. It ends nothing:
that is for the time-out of PyTorch's process group.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

BEAT_S = 5.0
TELL_AFTER_S = 30.0  # of silence; then after twice as long, and so on
BEATS = 3  # that one who lives may miss: its interpreter may be held, or its host be busy
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Beat:
    """What a rank last told of itself."""

    number: int  # how often it has
    calls: int  # collectives that it has come to
    who: str  # host and process
    place: str  # where the code of its main thread is

    def write(self) -> str:
        return json.dumps([self.number, self.calls, self.who, self.place])


class Heartbeats:
    """A thread beside the training of one rank, until the `with` block ends."""

    def __init__(
        self,
        store: Any,
        *,
        keeper: str,
        rank: int,
        size: int,
        calls: Callable[[], int],
        timeout_s: float,
    ) -> None:
        """store: where all of them tell, kept by `keeper`; no other thread of this process may wait
        at it. calls: the collectives that this rank has come to."""
        self._store, self._keeper, self._rank, self._size = store, keeper, rank, size
        self._calls, self._timeout_s = calls, timeout_s
        self._beat_s = min(BEAT_S, timeout_s / 10)
        self._tell_after_s = min(TELL_AFTER_S, timeout_s / 2)
        self._number, self._last = 0, -1
        self._moved_s = time.monotonic()  # when this rank last came to a collective
        self._seen: dict[int, tuple[int, float]] = {}  # number of the last beat, and when it came
        self._beats: list[Beat] = []
        self._over = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(self._beat_s)  # a store that has gone may keep it longer

    def describe_silence(self) -> str:
        """Return who has not come, and for how long nothing has gone on: "no step for 60 s: rank 1
        has not come"; empty where nobody is known to be missing."""
        silent_s = time.monotonic() - self._moved_s
        if silent_s < self._tell_after_s:
            return ""
        if self._is_quiet(self._rank):
            return f"no step for {silent_s:.0f} s, and {self._keeper} does not answer"
        named = "; ".join(map(self._describe, self.missing()))
        return f"no step for {silent_s:.0f} s: {named}" if named else ""

    def _run(self) -> None:
        tell_at_s, is_over = self._tell_after_s, False
        while not is_over:  # at once: one that stops before it has told of itself has no name
            try:
                self._exchange()
            except RuntimeError as error:  # who keeps the store is gone, or stopped
                log.debug("no heartbeat: %s", error)
            silent_s = time.monotonic() - self._moved_s
            if silent_s < self._tell_after_s:
                tell_at_s = self._tell_after_s
            elif silent_s >= tell_at_s and self._tells() and (told := self.describe_silence()):
                tell_at_s = 2 * silent_s
                log.warning("%s (given up after %g s: launch.timeout_s)", told, self._timeout_s)
            is_over = self._over.wait(self._beat_s)

    def _exchange(self) -> None:
        """Tell of this rank, and read what the others have told where nothing goes on."""
        calls, now_s = self._calls(), time.monotonic()
        if calls != self._last:
            self._last, self._moved_s = calls, now_s
        self._number += 1
        beat = Beat(self._number, calls, f"{platform.node()}, process {os.getpid()}", self._place())
        self._store.set(f"beat/{self._rank}", beat.write())
        # So early that it is known of each, when it is told of, whether it still tells anything.
        if now_s - self._moved_s < self._tell_after_s - (BEATS + 2) * self._beat_s:
            self._seen, self._beats = {}, []
            return
        keys = [f"beat/{rank}" for rank in range(self._size)]
        if not self._store.check(keys):  # they have just begun
            return
        self._beats = [Beat(*json.loads(text)) for text in self._store.multi_get(keys)]
        for rank, one in enumerate(self._beats):
            if self._seen.get(rank, (-1, 0.0))[0] != one.number:
                self._seen[rank] = one.number, now_s

    def _is_quiet(self, rank: int) -> bool:
        """Whether it tells nothing of itself any more."""
        _, seen_s = self._seen.get(rank, (0, time.monotonic()))
        return time.monotonic() - seen_s > BEATS * self._beat_s

    def missing(self) -> list[int]:
        """Return the ranks that have not come to what the first of them has come to."""
        most = max((beat.calls for beat in self._beats), default=0)
        return [r for r, beat in enumerate(self._beats) if beat.calls < most or self._is_quiet(r)]

    def _tells(self) -> bool:
        """Whether it is this rank that tells: the first one that still could."""
        return all(map(self._is_quiet, range(self._rank)))

    def _describe(self, rank: int) -> str:
        beat = self._beats[rank]
        what = "tells nothing any more" if self._is_quiet(rank) else f"is at {beat.place}"
        return f"rank {rank} has not come ({beat.who}; it {what})"

    def _place(self) -> str:
        """Where the main thread is, as far as that is not PyTorch's own code."""
        frame = sys._current_frames().get(self._main)
        while frame is not None:
            if not str(frame.f_globals.get("__name__", "")).startswith("torch"):
                code = frame.f_code
                return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}, {code.co_name}"
            frame = frame.f_back
        return "its end"
