"""Groups runs side by side: runs with the same settings on the same device are one group,
described by its medians and the standard deviation of its runs. What a group did not measure
is None.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headroom.base.names import LOWER_BOUND, TAGS, Place, list_shown
from headroom.base.units import ELLIPSIS, format_number, make_printable
from headroom.report.report_sections import split_training_time
from headroom.settings.read_settings import read_mapping
from headroom.settings.run_config import RunConfig, parse_best_metric

# What may differ and makes no other training: names, and the draws of repeats.
IGNORED_SETTINGS = ("run.name", "run.key", "run.experiment")
SEED = "train.seed"
COMPARED_TAGS = [tag.name for tag in TAGS if tag.is_compared]
SPEED, STEPS = "speed/samples_per_s", "speed/steps_per_s"
RECENT_SPEED = "speed/recent_samples_per_s"
PEAKS = list_shown(Place.PEAK)
LETTERS = 40  # of a value
LABEL_LETTERS = 40  # of a label that is read within a sentence
_LASTS = Counter(name.rpartition(".")[2] for name in RunConfig().flat())  # model.name, optim.name

Points = list[tuple[int, int, float]]  # step, Unix ms, value


@dataclass(frozen=True)
class Goal:
    """The metric that a search optimizes, or by which groups are judged."""

    name: str
    is_lower_better: bool

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Return the goal of a metric's name, or of min:NAME and max:NAME."""
        return cls(*parse_best_metric(text))

    def choose_best(self, values: Iterable[float]) -> float:
        return min(values) if self.is_lower_better else max(values)


@dataclass(frozen=True)
class MeasuredRun:
    """One run, as MLflow has it; run_id is empty where the run ended before it had any."""

    run_id: str
    name: str
    status: str
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    recent_speeds: Sequence[float] = ()  # from log point to log point, where they were asked for

    @property
    def is_done(self) -> bool:
        return self.status == "FINISHED"


@dataclass(frozen=True)
class Group:
    """The runs of one setting."""

    settings: dict[str, str]  # those that differ between the groups, whole
    runs: list[MeasuredRun]
    number: int = 1
    is_trial: bool = False  # of a search, where each is known by its number
    shown: dict[str, str] = field(default_factory=dict)  # of long settings the part that differs

    @property
    def called(self) -> str:
        """Return the name of the group in a sentence."""
        if self.is_trial:
            return f"#{self.number}"
        return self.label if len(self.label) <= LABEL_LETTERS else f"#{self.number}"

    @property
    def label(self) -> str:
        named = zip(shorten_names(list(self.settings)), self.list_shown(), strict=True)
        return ", ".join(f"{name}={value}" for name, value in named) or "all"

    def list_shown(self) -> list[str]:
        """Return the values of the settings as a person reads them."""
        return [self.shown.get(name, value) for name, value in self.settings.items()]

    @property
    def done(self) -> list[MeasuredRun]:
        return [run for run in self.runs if run.is_done]

    @property
    def has_lower_bound(self) -> bool:
        """True if the peak of one of them may have been higher than what was seen of it."""
        return any(run.metrics.get(LOWER_BOUND) for run in self.done)

    @property
    def state(self) -> str:
        """Return FINISHED where all of its runs have; else how the others ended."""
        states = [run.status for run in self.runs if not run.is_done]
        return ", ".join(dict.fromkeys(states)) or "FINISHED"

    def list_values(self, of: str | Callable[[MeasuredRun], float | None]) -> list[float]:
        """Return the values of its finished runs, of a metric or of a function of a run."""
        ask = (lambda run: run.metrics.get(of)) if isinstance(of, str) else of
        return [value for run in self.done if (value := ask(run)) is not None]

    def compute_median(self, of: str | Callable[[MeasuredRun], float | None]) -> float | None:
        values = self.list_values(of)
        return statistics.median(values) if values else None

    def compute_spread(self, of: str | Callable[[MeasuredRun], float | None]) -> float | None:
        """Return the standard deviation of the runs; None for a single one."""
        values = self.list_values(of)
        return statistics.stdev(values) if len(values) > 1 else None

    def find_tag(self, name: str) -> str:
        return next((run.tags[name] for run in self.done or self.runs if name in run.tags), "")

    def find_usual(self, name: str) -> str:
        """Return the value of a tag that most of its finished runs have."""
        values = Counter(run.tags[name] for run in self.done if name in run.tags)
        return values.most_common(1)[0][0] if values else ""


def group_runs(runs: Sequence[MeasuredRun], varied: Sequence[str] = ()) -> list[Group]:
    """Return the runs grouped by what differs between them, in the order in which it came up.

    varied: the names of settings that differ, where they are known; else all params and the
    tags of COMPARED_TAGS are compared, and runs that differ by their seed alone are repeats.
    """
    names = [name for name in varied if _count_values(runs, name) > 1] or find_differing(runs)
    grouped: dict[tuple[str, ...], list[MeasuredRun]] = {}
    for run in runs:
        grouped.setdefault(tuple(_read_value(run, name) for name in names), []).append(run)
    shown = [shorten_values(values) for values in zip(*grouped, strict=True)]
    return [
        Group(
            dict(zip(names, values, strict=True)),
            of,
            at + 1,
            shown={name: column[at] for name, column in zip(names, shown, strict=True)},
        )
        for at, (values, of) in enumerate(grouped.items())
    ]


def shorten_values(values: Sequence[str]) -> list[str]:
    """Return the values of one setting as a person tells them apart.

    Where one is too long: of mappings the keys that differ, of others the part that does.
    """
    if all(len(value) <= LETTERS for value in values):
        return [make_printable(value, limit=LETTERS) for value in values]
    mappings = [read_mapping(value) for value in values]
    if all(mappings):
        parts = [_join_differing(mapping, mappings) for mapping in mappings]
    else:
        begin = len(os.path.commonprefix(list(values)))
        begin = max((values[0].rfind(mark, 0, begin) for mark in "/\\ ,"), default=-1) + 1
        parts = [value if begin == 0 else f"{ELLIPSIS}{value[begin:]}" for value in values]
    shown = [make_printable(part, limit=LETTERS) for part in parts]
    if len({*shown}) == len({*values}):
        return shown
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values), 1)}
    return [
        f"{make_printable(part, limit=LETTERS - 6)} ({numbers[value]})"
        for part, value in zip(parts, values, strict=True)
    ]


def _join_differing(mapping: dict[Any, Any], mappings: Sequence[dict[Any, Any]]) -> str:
    keys = dict.fromkeys(key for one in mappings for key in one)
    names = [key for key in keys if len({repr(one.get(key, "-")) for one in mappings}) > 1]
    return ", ".join(f"{key}: {mapping.get(key, '-')}" for key in names)


def shorten_names(names: Sequence[str]) -> list[str]:
    """Return dotted names by their last part, where no other setting's name ends in it."""
    lasts = [name.rpartition(".")[2] for name in names]
    count = Counter(lasts)
    return [
        last if count[last] == 1 and _LASTS[last] <= 1 else name
        for name, last in zip(names, lasts, strict=True)
    ]


def find_differing(runs: Sequence[MeasuredRun]) -> list[str]:
    """Return the params, then the tags of COMPARED_TAGS, that have several values here."""
    with_params = [run for run in runs if run.params]
    params = sorted(
        {name for run in with_params for name in run.params if name not in IGNORED_SETTINGS}
    )
    settings = [name for name in params if _count_values(with_params, name) > 1]
    settings = [name for name in settings if name != SEED] or settings
    if settings == [SEED]:
        settings = []
    done = [run for run in runs if run.is_done]
    tags = [name for name in COMPARED_TAGS if _count_values(done, name) > 1]
    if all("device" in run.tags for run in done):  # says what it came to
        settings = [name for name in settings if name != "device.name"]
    return settings + tags


def _count_values(runs: Iterable[MeasuredRun], name: str) -> int:
    return len({_read_value(run, name) for run in runs})


def _read_value(run: MeasuredRun, name: str) -> str:
    held = run.tags if name in COMPARED_TAGS else run.params
    return held.get(name, "-")


def find_score(groups: Sequence[Group]) -> str:
    """Return the metric by which these groups are judged; empty where they share none."""
    shared = [
        s for s in list_shown(Place.GOAL) if any(s in run.metrics for g in groups for run in g.done)
    ]
    return shared[0] if shared else ""


def choose_goal(groups: Sequence[Group], goal: Goal | None = None) -> Goal | None:
    """Return the goal that was asked for, else the score by which these groups are judged; None
    where they share none."""
    score = find_score(groups)
    return goal or (Goal.parse(score) if score else None)


def find_best_group(groups: Sequence[Group], goal: Goal) -> Group | None:
    """Return the group whose median is best; None where none has one."""
    medians = {i: group.compute_median(goal.name) for i, group in enumerate(groups)}
    values = {i: value for i, value in medians.items() if value is not None}
    best = goal.choose_best(values.values()) if values else None
    return next((groups[i] for i, value in values.items() if value == best), None)


def find_peak_metric(groups: Sequence[Group]) -> str:
    """Return the metric of the peak that all of them have: of tensors, or of the process."""
    done = [run for group in groups for run in group.done]
    return next((peak for peak in PEAKS if done and all(peak in r.metrics for r in done)), PEAKS[0])


def compute_step_ms(run: MeasuredRun) -> float | None:
    """Return the milliseconds of one optimizer step, all in all."""
    steps = run.metrics.get(STEPS)
    return 1000 / steps if steps else None


def compute_epoch_s(run: MeasuredRun) -> float | None:
    """Return the seconds of an epoch, with its evaluation and its checkpoints."""
    seconds, epochs = (run.metrics.get(n) for n in ("time/train_model_s", "train/epoch"))
    return seconds / epochs if seconds and epochs else None


def compute_epoch_parts(group: Group) -> dict[str, float]:
    """Return the seconds of an epoch by part, of the run whose epochs take the median time; of an
    even number of runs the mean of the two in the middle. They sum to the median. Empty where they
    are not known."""
    runs = [run for run in group.done if compute_epoch_s(run)]
    runs.sort(key=lambda run: compute_epoch_s(run) or 0.0)
    middle = runs[(len(runs) - 1) // 2 : len(runs) // 2 + 1]
    splits = [(run.metrics["train/epoch"], split_training_time(run.metrics)) for run in middle]
    if not all(parts for _, parts in splits):
        return {}
    epoch_parts: dict[str, float] = {}
    for epochs, parts in splits:
        for name, seconds in parts.items():
            epoch_parts[name] = epoch_parts.get(name, 0.0) + seconds / epochs / len(splits)
    return epoch_parts


def compute_epoch_j(run: MeasuredRun) -> float | None:
    """Return the joules of an epoch, where the driver reports them for this run alone.

    It counts those of all processes that share a GPU.
    """
    if run.params.get("device.share") == "True":
        return None
    joules, epochs = (run.metrics.get(name) for name in ("gpu/energy_j", "train/epoch"))
    return joules / epochs if joules and epochs else None


def format_with_spread(group: Group, of: str | Callable[[MeasuredRun], float | None]) -> str:
    """Return the median in words, and the standard deviation of its runs behind it."""
    median, spread = group.compute_median(of), group.compute_spread(of)
    if median is None:
        return ""
    return format_number(median) + (
        f" \u00b1 {format_number(float(f'{spread:.2g}'))}" if spread else ""
    )
