"""Shows the progress of a training, or of a prediction, to a person: on a terminal a line
that is redrawn and removed at the end; in a notebook one that is written anew and stays;
elsewhere a plain log line now and then. It is never
a reason to fail: a terminal that is closed, dumb or odd gets plain lines, and the training
goes on.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import copy_context
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from headroom.base import notebook
from headroom.base.names import LOWER_BOUND, Place, list_words
from headroom.base.units import (
    format_clock,
    format_mebibytes,
    format_number,
    format_percent,
    format_seconds,
)
from headroom.report.verdict import MIXED, SHORT, Verdict

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

log = logging.getLogger(__name__)

PLAIN_EVERY_S = 5.0
LISTEN_EVERY_S = 5.0
QUIET_S = 30.0  # no longer without a line, however long an epoch or a step takes
DRAW_EVERY_S = 0.1
WRITE_EVERY_S = 0.5  # in a notebook, where each time is a message, which may cross a network
BAR_COLUMNS = 12
# Where nearly all rows are of one class: its share is the accuracy of no model at all.
UNEVEN = "val/largest_class_share"
# What a terminal raises that went away or cannot show a character: OSError, closed file, encoding.
TERMINAL_ERRORS = (OSError, ValueError)


class Progress:
    """Shows how far a training is. Use as a context manager; `update` at each log point."""

    def __init__(
        self,
        total_steps: int,
        epochs: int,
        stream: TextIO | None = None,
        *,
        at: int = 0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stream` is sys.stderr by default, looked up on entry. at: the step to go on from."""
        self._total_steps = max(1, total_steps)
        self._epochs = epochs
        self._stream = stream
        self._now_s = now_s
        self._metrics: dict[str, float] = {}
        self._step = at
        self._first: tuple[int, float] | None = None  # step and time of the first log point
        self._updated_s, self._longest_s = math.inf, 0.0  # the last log point; between two
        self._drawn_s = -math.inf
        self._last_line: tuple[int, float] | None = None  # epoch and time of the last plain line
        self._untold = False
        self._ended = False
        self._bar: Bar | None = None
        self._cell_line: notebook.Line | None = None
        self._bound = ""  # what holds it back

    def __enter__(self) -> Self:
        self._began_s = self._now_s()
        stream = sys.stderr if self._stream is None else self._stream
        if _is_terminal(stream):
            self._open(stream)
        elif self._stream is None and (line := notebook.make_line()) is not None:
            self._cell_line = line
            self._tell(self._began_s)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()
        self._ended = True
        if self._untold:
            self._tell(self._now_s())

    def update(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step, under the names of the run record, and show them in time."""
        now_s = self._now_s()
        self._metrics.update(metrics)
        self._step = max(self._step, step)
        if self._first is None:
            self._first = (self._step, now_s)
        else:
            self._longest_s = max(self._longest_s, now_s - self._updated_s)
        self._updated_s = now_s
        if self._bar is not None:
            if now_s - self._drawn_s >= DRAW_EVERY_S or self._step >= self._total_steps:
                self._drawn_s = now_s
                self._draw(now_s)
            return
        self._untold = True
        if self._cell_line is not None:
            if now_s - self._drawn_s >= WRITE_EVERY_S:
                self._tell(now_s)
            return
        told_epoch, told_s = self._last_line or (0, self._began_s)
        quiet_s = now_s - told_s
        if quiet_s >= PLAIN_EVERY_S and (self._compute_epoch() > told_epoch or quiet_s >= QUIET_S):
            self._tell(now_s)

    def show_verdict(self, verdict: Verdict) -> None:
        """Show from now on what holds the training back."""
        if verdict.bound in (MIXED, SHORT):
            self._bound = ""
            return
        share = "" if verdict.share is None else f" {format_percent(verdict.share)}"
        self._bound = f"bound by {verdict.bound.replace('_', ' ')}{share}"

    def tell_if_silent(self) -> None:
        """Log how far it is where that was not logged for long, within a step of minutes."""
        now_s = self._now_s()
        _, told_s = self._last_line or (0, self._began_s)
        if self._bar is None and now_s - told_s >= QUIET_S:
            self._tell(now_s)

    def _compute_epoch(self) -> int:
        """Return the number of the epoch that is being trained, from 1.

        It is computed from the step, since it is only logged at an epoch's end.
        """
        by_step = round(self._epochs * self._step / self._total_steps, 6)
        logged = self._metrics.get("train/epoch", 0.0)
        done = max(by_step, logged if math.isfinite(logged) else 0.0)
        return min(self._epochs, max(1, math.ceil(done)))

    def _make_line(self, now_s: float, *, columns: int = 10**6) -> str:
        """Return the line, with less in it where there is less room.

        For example "epoch 3/10  loss 0.412  41,200 samples/s  peak 6.10 GiB  0:12 left".
        """
        epoch, left = f"epoch {self._compute_epoch()}/{self._epochs}", self._describe_time(now_s)
        loss = self._describe_first(("train/loss", "loss {}"), words=format_number)
        uneven = list_words(Place.UNEVEN) if UNEVEN in self._metrics else ()
        scores = [*uneven, *list_words(Place.PROGRESS_SCORE)]
        speeds = list_words(Place.PROGRESS_SPEED)[::-1]  # tokens, where there are any
        score = self._describe_first(*scores, words=format_number)
        speed = self._describe_first(*speeds, words=_format_rounded)
        peak = self._describe_first(*list_words(Place.PROGRESS_MEMORY), words=format_mebibytes)
        if self._metrics.get(LOWER_BOUND):
            peak = [part.replace("peak ", "peak at least ") for part in peak]
        bound = [self._bound] if self._bound else []
        lines = (
            "  ".join([epoch, *loss, *kept, *left])
            for kept in (
                [*score, *speed, *peak, *bound],
                [*score, *speed, *peak],
                [*speed, *peak],
                speed,
                [],
            )
        )
        return next((line for line in lines if len(line) <= columns), epoch)

    def _describe_first(
        self, *choices: tuple[str, str], words: Callable[[float], str]
    ) -> list[str]:
        """Return the first of the choices that is known, in words."""
        parts = [
            t.format(words(self._metrics[name])) for name, t in choices if name in self._metrics
        ]
        return parts[:1]

    def _describe_time(self, now_s: float) -> list[str]:
        left_steps = self._total_steps - self._step
        if self._ended or left_steps <= 0:
            return [format_seconds(now_s - self._began_s)]
        if self._first is None or self._step <= self._first[0]:  # one log point has no pace yet
            so_far_s = now_s - self._began_s
            return [f"{format_clock(so_far_s)} so far"] if so_far_s >= QUIET_S else []
        first_step, first_s = self._first
        silent_s = now_s - self._updated_s
        if silent_s >= max(QUIET_S, 3 * self._longest_s):  # what is left, nobody knows then
            return [f"no step for {format_clock(silent_s)}"]
        left_s = left_steps * (now_s - first_s) / (self._step - first_step)
        return [f"{format_clock(left_s)} left"]

    def _tell(self, now_s: float) -> None:
        self._last_line = (self._compute_epoch(), now_s)
        self._untold = False
        if self._cell_line is None:
            log.info("%s", self._make_line(now_s))
        else:
            self._drawn_s = now_s
            self._cell_line.write(self._make_line(now_s))

    def _open(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        class Steady(Console):
            def on_broken_pipe(self) -> None:
                raise  # rich would end the process here, and send its stdout to nowhere

        console = Steady(file=stream)
        if not console.is_terminal or console.is_dumb_terminal:
            return
        # Drawn by update, not by a thread: the interpreter's lock belongs to the training.
        text = TextColumn(
            "{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)
        )
        bar = Bar(
            BarColumn(bar_width=BAR_COLUMNS),
            text,
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=_is_terminal(sys.stdout),  # what goes to a file or a pipe stays there
            redirect_stderr=_is_terminal(sys.stderr),
            expand=True,
        )
        self._bar = bar
        try:
            bar.add_task("starting", total=self._total_steps, completed=self._step)
            bar.start()
            bar.refresh()
        except TERMINAL_ERRORS:
            self._close()
        except BaseException:  # Ctrl-C: __exit__ is not called for an entry that did not end
            self._close()
            raise

    def _draw(self, now_s: float) -> None:
        assert self._bar is not None
        task = self._bar.task_ids[0]
        try:
            room = self._bar.console.width - BAR_COLUMNS - 2
            line = self._make_line(now_s, columns=room)
            self._bar.update(task, completed=self._step, description=line)
            self._bar.refresh()
        except TERMINAL_ERRORS:
            self._close()
            self._untold = True

    def _close(self) -> None:
        """Leave the terminal as it was found: line cleared, cursor shown, stdout its own again."""
        bar, self._bar = self._bar, None
        if bar is None:
            return
        streams = sys.stdout, sys.stderr
        try:
            bar.stop()
        except (*TERMINAL_ERRORS, IndexError) as error:  # IndexError: its start had failed half-way
            log.debug("the terminal went away: %s", error)
        finally:
            for name, stream in zip(("stdout", "stderr"), streams, strict=True):
                own = getattr(stream, "rich_proxied_file", None)
                if own is not None and getattr(sys, name) is stream:
                    setattr(sys, name, own)


def log_during_silence(
    over: threading.Event, progress: Callable[[], Progress | None], stage: Callable[[], str]
) -> None:
    """Log a line at least every half minute until `over` is set, from another thread.

    progress: of the training, while there is one; stage: what is done else.
    """

    def tell() -> None:
        silent_s, began_s = 0.0, time.monotonic()
        while not over.wait(LISTEN_EVERY_S):
            silent_s += LISTEN_EVERY_S
            shown = progress()
            if shown is not None:
                shown.tell_if_silent()
            elif silent_s >= QUIET_S:
                silent_s = 0.0
                log.info("%s: %s so far", stage(), format_clock(time.monotonic() - began_s))

    here = copy_context()  # Prefect knows by it which run's log this is
    threading.Thread(target=here.run, args=(tell,), daemon=True).start()


def _format_rounded(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) and value >= 100 else format_number(value)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        alive = stream is not None and stream.isatty()
    except TERMINAL_ERRORS:
        return False
    return alive


PERCENT = 100


class RowsProgress(Progress):
    """Shows how far a prediction is. Use as a context manager."""

    def __init__(
        self,
        amount: int,
        stream: TextIO | None = None,
        *,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """amount: what there is to do, in bytes or rows."""
        super().__init__(amount, PERCENT, stream, now_s=now_s)
        self._rows = 0

    def show_rows(self, rows: int, done: int) -> None:
        """Show that so many rows are predicted, and so much of the amount is done."""
        self._rows = rows
        self.update({}, done)

    def _make_line(self, now_s: float, *, columns: int = 10**6) -> str:
        """Return the line, with less in it where there is less room.

        For example "41,200 rows  12,300 rows/s  0:12 left".
        """
        passed_s = now_s - self._began_s
        rows = f"{self._rows:,} rows"
        speed = [f"{format_number(self._rows / passed_s)} rows/s"] if passed_s > 0 else []
        share = self._step / self._total_steps
        is_over = self._ended or share >= 1
        left = [] if share <= 0 else [f"{format_clock(passed_s * (1 - share) / share)} left"]
        last = [format_seconds(passed_s)] if is_over else left
        lines = ("  ".join([rows, *kept]) for kept in ([*speed, *last], speed))
        return next((line for line in lines if len(line) <= columns), rows)
