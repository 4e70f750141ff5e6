"""Compares a finished run with the last ones of the same configuration, data and device:
ok, worse, larger or slower, or new where there are too few of them. It compares with the
median of the good ones, by limits that grow with how far those lie apart, and does not take
chance for a trend: a speed counts at once where it is far off, else where three runs in a
row are beyond it. That median goes along with a slow decay, so it also compares with a level
that stays: the best that runs in a row have had since history began. Small distances from it
are summed up from run to run (a CUSUM, Page 1954), until they are more than chance.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from statistics import median
from typing import Any

from headroom.base.facts import DataFacts, DeviceFacts
from headroom.base.names import (
    PhaseKind,
    Place,
    find_unit,
    is_lower_better,
    list_phases,
    list_shown,
    list_words,
)
from headroom.base.units import (
    format_mebibytes,
    format_milliseconds,
    format_number,
    format_percent,
)
from headroom.settings import read_settings
from headroom.settings.run_config import RunConfig

OK, NEW = "ok", "new"
GATES = ("worse", "larger", "slower")  # the most serious first
COMPARED_RUNS = 20  # good runs, of whose figures the median is compared
NEEDED_RUNS = 5  # good runs: of fewer nobody knows how far they lie apart
IN_A_ROW = 3  # this run and those just before it
UNJUDGED = 3  # runs in a row whose speed could not be judged: from then on a person is warned
LEVEL_RUNS = 10  # in a row, of whose medians the best is the level: the best run is mere luck
# Of the sum, in deviations. Of 100 medians of ten the best lies one deviation too far off, by luck
# alone: less is not counted. A run counts for 1 at most, so that it takes more than four of them.
SLACK, MOST, ALARM = 1.5, 1.0, 4.0
STEP_SIGMA = 1.0483  # times the median absolute step from run to run: a slow decay adds nothing
SIGMA = 1.4826  # of the median absolute deviation: the standard deviation of a normal one
NEAR, FAR = 2.0, 8.0  # of these from the median: each of three in a row; a single run
WORST = 0.1  # of the good runs, which lie beyond the limits for three in a row themselves
# Above these a speed says little: the machine was not free, or slower itself than it usually is.
CORE_WAIT, BUSY, BUSIEST = "time/core_wait_pct", 10.0, 50.0  # the mean; the fastest step in twenty
REFERENCE, SLOWER = "time/reference_ms", 1.07  # times the fastest tenth
LOSS = "val/loss"
UNCOMPARED = ("run.", "gate.", "data.cache")  # settings that make no other training
HUGE = 1e300  # MLflow's infinity

History = Sequence[Mapping[str, Any]]  # gate and metrics of runs, the newest first


class GateFailed(RuntimeError):
    """A finished run did not pass its gate, where that is to fail. `run`: its record."""

    def __init__(self, run: dict[str, Any]) -> None:
        super().__init__(f"{run['tags']['gate']}: {run['tags']['gate.why']}")
        self.run = run


@dataclass(frozen=True)
class Limits:
    """How far a metric may lie from the median: at least so far, as a share of it or in its own
    unit; `near` for each of three runs in a row, `far` for one. `drift`: the least deviation, as a
    share of the level, in which the distance from that is measured; half of `near` where it is not
    given.
    """

    gate: str  # what a run beyond them is
    near: float = 0.0
    far: float = 0.0
    unit: float = 0.0
    drift: float = 0.0
    busy: float = math.inf  # per cent of the time without a core, above which it says little


@dataclass(frozen=True)
class Figure:
    """A metric that a run is judged by."""

    metric: str
    said: str  # the sentence's first words, of the value
    limits: Limits

    @property
    def is_lower_better(self) -> bool:
        return is_lower_better(self.metric)

    @property
    def value(self) -> Callable[[float], str]:
        """Return what puts a value into words."""
        formats = {"MiB": format_mebibytes, "ms": format_milliseconds}
        return formats.get(find_unit(self.metric), format_number)


LIMITS = {  # of the metrics that the list shows at the gate
    "speed/samples_per_s": Limits("slower", near=0.3, far=0.67, drift=0.03, busy=BUSY),
    "time/fast_step_ms": Limits("slower", near=0.025, far=2.0, busy=BUSIEST),
    "memory/run_peak_allocated_mib": Limits("larger", near=0.01, far=0.02, unit=0.25),
    "memory/leaked_mib": Limits("larger", unit=0.25),
}
FIGURES = tuple(Figure(name, words, LIMITS[name]) for name, words in list_words(Place.GATE))
SPEEDS = tuple(figure.metric for figure in FIGURES if figure.limits.gate == "slower")


def _list_score_figures(metrics: Mapping[str, float]) -> list[Figure]:
    """Return the first score that the run has, and its loss: it may be worse at an equal score."""
    figures = []
    score = next((name for name in list_shown(Place.GOAL) if name in metrics), None)
    if score is not None and not is_lower_better(score):
        figures.append(Figure(score, f"{score} {{}}", Limits("worse", unit=0.005)))
        if LOSS in metrics:
            figures.append(Figure(LOSS, f"{LOSS} {{}}", Limits("worse", near=0.04, far=0.08)))
    elif score is not None:
        figures.append(Figure(score, f"{score} {{}}", Limits("worse", near=0.02, far=0.04)))
    return figures


@dataclass(frozen=True)
class Verdict:
    """What a run is, in a word and in a sentence; and each figure's trend, for a plot."""

    gate: str  # ok, new, one of GATES; empty: MLflow could not be asked
    why: str
    trend: list[dict[str, Any]] = field(default_factory=list)
    warning: str = ""  # what a person should doubt, whatever the word is

    @property
    def tags(self) -> dict[str, str]:
        """Return the tags of the verdict, under the names of the run record."""
        return {"gate.why": self.why, **({"gate": self.gate} if self.gate else {})}


def compute_gate_key(config: RunConfig, device: DeviceFacts, data: DataFacts) -> str:
    """Return a hash of what has to be the same for runs to be compared: 16 hex digits.

    All settings that mean something but those of UNCOMPARED, the seed among them, the data
    and the device's model.
    """
    params = {
        k: v
        for k, v in read_settings.collect_params(config).items()
        if not k.startswith(UNCOMPARED)
    }
    rows = data.fingerprint or [data.source, data.train_rows, data.val_rows, data.input_shape]
    said = [params, rows, device.kind, device.model]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:16]


def compare_with_history(
    run: Mapping[str, Any],
    runs: History | None,
    *,
    registered_model: str | None = None,
) -> dict[str, Any]:
    """Return what is new in the record of a finished run: tags and trend.

    And what the model registry needs to know, where its model is to be registered.
    """
    metrics, name = run["metrics"], registered_model
    verdict = judge_run(metrics, runs)
    tags = run["tags"] | verdict.tags
    if verdict.gate in GATES and (called := run.get("run_id") or run.get("name")):
        accept = f"python -m flows.runs --accept {shlex.quote(called)}"
        tags["gate.why"] += f"; if this is to be the level from now on: {accept}"
    outcome = {"tags": tags, "trend": verdict.trend}
    if verdict.warning:
        outcome["warnings"] = [*(run.get("warnings") or ()), verdict.warning]
        tags["warnings"] = "\n".join(outcome["warnings"])
    if name:
        score = next((score for score in list_shown(Place.GOAL) if score in metrics), "")
        champion = {"metric": score, "value": metrics.get(score), "lower": is_lower_better(score)}
        outcome["register"] = {"name": name, "passed": verdict.gate in (OK, NEW), **champion}
    return outcome


def judge_run(now: Mapping[str, float], runs: History | None) -> Verdict:
    """Return the verdict on a finished run by what it measured.

    runs: those of the same `gate.of`, the last of which are where history began; None where MLflow
    could not be asked.
    """
    if runs is None:
        return Verdict("", "not compared: MLflow could not be asked")
    since = _find_good_runs(runs)
    good = since[:COMPARED_RUNS]
    if runs and not good:
        return Verdict(runs[0]["gate"], f"none of the last {len(runs)} runs was ok to compare with")
    if len(good) < NEEDED_RUNS:
        return Verdict(NEW, f"{len(good)} of the {NEEDED_RUNS} runs that a comparison needs")
    usual_ms = find_usual_ms(good)
    problems: dict[str, list[str]] = {kind: [] for kind in GATES}
    trend = []
    for figure in (*_list_score_figures(now), *FIGURES):
        seen = _FigureHistory.collect(figure, now, runs, since, usual_ms=usual_ms)
        if seen is None:
            continue
        words = seen.describe()
        trend.append(seen.make_trend(is_beyond=bool(words)))
        if words:
            problems[figure.limits.gate].append(words)
    if problems["slower"]:
        problems["slower"] += _describe_phase(now, good)
    worst = next((kind for kind in GATES if problems[kind]), OK)
    why = "; ".join(words for kind in GATES for words in problems[kind])
    why = why or f"within the limits of the last {len(good)} runs"
    warning = ""
    if not_judged := describe_disturbance(now, usual_ms, BUSY):
        is_all = bool(describe_disturbance(now, usual_ms, BUSIEST))
        what = "speed is" if is_all else "samples/s are"
        why += f"; its {what} not judged: {not_judged}"
        row = _count_disturbed(runs, usual_ms, BUSIEST if is_all else BUSY)
        if row + 1 >= UNJUDGED:
            why += f", as in the {row} runs before"
        if row + 1 >= UNJUDGED and is_all:  # else the fast step is judged
            warning = f"gate: the speed is not judged for {row + 1} runs in a row: {not_judged}"
    return Verdict(worst, why, trend, warning)


def _find_good_runs(runs: History) -> list[Mapping[str, float]]:
    """Return the metrics of the good runs since history began, the newest first.

    It began at the newest unbroken row of new ones, of which a person may have made one.
    """
    good_runs, has_begun = [], False
    for run in runs:
        if has_begun and run["gate"] != NEW:
            break
        has_begun |= run["gate"] == NEW
        if run["gate"] in (OK, NEW):
            good_runs.append(run["metrics"])
    return good_runs


def find_usual_ms(runs: Sequence[Mapping[str, float]]) -> float:
    """Return the milliseconds in which this machine did the fixed piece of work, by these runs."""
    references = sorted(run[REFERENCE] for run in runs if REFERENCE in run)
    return references[len(references) // 10] if references else math.inf  # most may be slowed


def describe_disturbance(metrics: Mapping[str, float], usual_ms: float, busy: float) -> str:
    """Return what kept the machine from its usual speed; empty where nothing is known."""
    if metrics.get(CORE_WAIT, 0.0) > busy:
        return f"its threads had no core for {metrics[CORE_WAIT]:.0f} % of the time"
    slower = metrics.get(REFERENCE, 0.0) / usual_ms
    if slower > SLOWER:
        return f"the machine itself took {100 * (slower - 1):.0f} % longer for the same work"
    return ""


def _count_disturbed(runs: History, usual_ms: float, busy: float) -> int:
    """Return how many of the newest runs in a row were kept from their usual speed."""
    disturbed = (bool(describe_disturbance(run["metrics"], usual_ms, busy)) for run in runs)
    return sum(1 for _ in takewhile(bool, disturbed))


def _read_value(metrics: Mapping[str, float], name: str) -> float | None:
    value = metrics.get(name)
    return value if value is not None and math.isfinite(value) and abs(value) < HUGE else None


@dataclass(frozen=True)
class _FigureHistory:
    """A figure of this run, and of those before it."""

    figure: Figure
    now: float
    good: list[float]  # the newest first
    since: list[float]  # of all good ones in reach since history began, the oldest first
    before: list[float]  # of the two runs before that measured it, good or not

    @classmethod
    def collect(
        cls,
        figure: Figure,
        now: Mapping[str, float],
        runs: History,
        since: Sequence[Mapping[str, float]],
        *,
        usual_ms: float,
    ) -> _FigureHistory | None:
        """Return the figure's history, or None where it was measured too seldom.

        since: the good runs since history began, the newest first; COMPARED_RUNS of them are
        what the median is of. Measurements count where they were undisturbed: that of this run, and
        NEEDED_RUNS of the good ones.
        """

        def is_free(run: Mapping[str, float]) -> bool:
            return figure.limits.busy == math.inf or not describe_disturbance(
                run, usual_ms, figure.limits.busy
            )

        values, every, before = (
            [v for run in of if is_free(run) and (v := _read_value(run, figure.metric)) is not None]
            for of in (since[:COMPARED_RUNS], since, (run["metrics"] for run in runs))
        )
        if figure.metric not in now or not is_free(now) or len(values) < NEEDED_RUNS:
            return None
        return cls(figure, now[figure.metric], values, every[::-1], before[: IN_A_ROW - 1])

    @property
    def middle(self) -> float:
        return median(self.good)

    def compute_limit(self, deviations: float, least: float) -> float:
        spread = SIGMA * median(abs(value - self.middle) for value in self.good)
        away = max(deviations * spread, least * abs(self.middle), self.figure.limits.unit)
        return self.middle + (away if self.figure.is_lower_better else -away)

    @property
    def near(self) -> float:
        limit = self.compute_limit(NEAR, self.figure.limits.near)
        is_lower_better = self.figure.is_lower_better
        older = self.good[IN_A_ROW - 1 :]  # than the row, which may be good up to now
        worst = sorted(older, reverse=is_lower_better)[int(WORST * len(older))]
        return max(limit, worst) if is_lower_better else min(limit, worst)

    @property
    def far(self) -> float:
        limit = self.compute_limit(FAR, self.figure.limits.far)
        return max(limit, self.near) if self.figure.is_lower_better else min(limit, self.near)

    def is_beyond(self, value: float, limit: float) -> bool:
        return (value > limit) is self.figure.is_lower_better

    def find_passed_limit(self) -> tuple[float, str] | None:
        """Return the limit that was passed, and what to add in words; None where none was."""
        if self.is_beyond(self.now, self.far) or not abs(self.now) < HUGE:  # nan is no number
            return self.far, ""
        row = [self.now, *self.before]
        if len(row) == IN_A_ROW and all(self.is_beyond(value, self.near) for value in row):
            return self.near, f", as the {IN_A_ROW - 1} runs before"
        return None

    def find_level(self) -> tuple[float, int]:
        """Return the best that runs in a row have had, by their median, and at which they began.

        Those are the first ones, of which a person may have said that they are the level, and any
        LEVEL_RUNS after.
        """
        rows = [(median(self.since[:NEEDED_RUNS]), 0)]
        for at in range(len(self.since) - LEVEL_RUNS + 1):
            rows.append((median(self.since[at : at + LEVEL_RUNS]), at))
        choose = min if self.figure.is_lower_better else max
        return choose(rows, key=lambda row: row[0])

    def count_drifted(self) -> int:
        """Return for how many runs the distance from the level has been summed up.

        0 where the sum is no more than chance, or this run adds nothing to it.
        """
        level, began = self.find_level()
        steps = [abs(after - before) for before, after in pairwise(self.since)]
        least = (self.figure.limits.drift or self.figure.limits.near / NEAR) * abs(level)
        deviation = (
            max(STEP_SIGMA * median(steps), least, self.figure.limits.unit / NEAR) or math.inf
        )
        deviation *= 1 if self.figure.is_lower_better else -1
        total, runs, adds = 0.0, 0, 0.0
        for value in (*self.since[began:], self.now):
            adds = (value - level) / deviation - SLACK
            total = max(0.0, total + min(MOST, adds))
            runs = runs + 1 if total else 0
        return runs if total > ALARM and adds > 0 else 0

    def describe(self) -> str:
        """Return in words what limit was passed; empty where none was."""
        format_value, middle = self.figure.value, self.middle
        if passed := self.find_passed_limit():
            limit, more = format_value(passed[0]), passed[1]
            of = f"the median of the last {len(self.good)} ({format_value(middle)}, limit {limit})"
        elif runs := self.count_drifted():
            middle = self.find_level()[0]
            of, more = (
                f"the level that it once had ({format_value(middle)})",
                f", summed up over {runs} runs",
            )
        else:
            return ""
        side = "above" if self.figure.is_lower_better else "below"
        if middle and math.isfinite(self.now):
            side = f"{100 * abs(self.now / middle - 1):.1f} % {side}"
        return f"{self.figure.said.format(format_value(self.now))}, {side} {of}{more}"

    def make_trend(self, *, is_beyond: bool) -> dict[str, Any]:
        """Return the values for a plot, the oldest first and this run's last."""
        return {
            "metric": self.figure.metric,
            "values": [*self.good[::-1], self.now],
            "median": self.middle,
            "level": self.find_level()[0],
            "near": self.near,
            "far": self.far,
            "beyond": is_beyond,
        }


def _describe_phase(now: Mapping[str, float], good: Sequence[Mapping[str, float]]) -> list[str]:
    """Return which phase of a step has grown most, and its share of all growth."""
    grown = {}
    for phase in list_phases(PhaseKind.STEP):
        name = phase.metric
        values = [value for run in good if (value := _read_value(run, name)) is not None]
        mine = _read_value(now, name)
        if values and mine is not None and mine > median(values):
            grown[phase.name.replace("_", " ")] = mine - median(values)
    if not grown:
        return []
    most = max(grown, key=lambda phase: grown[phase])
    return [f"{most} is {format_percent(grown[most] / sum(grown.values()))} of it"]
