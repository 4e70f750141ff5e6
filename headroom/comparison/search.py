"""Draws the trainings of a search with Optuna, each from the results of those before: its
samplers draw, its pruners say which training ends early, its journal in the comparison's
folder is what an interrupted search goes on from. Nothing else here imports Optuna, and
this is imported for a search alone.
"""

from __future__ import annotations

import math
import shlex
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import ExperimentalWarning
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from headroom.base.event_log import LOG, read_end, read_metric_batches
from headroom.base.units import format_number, format_percent
from headroom.comparison.grid import DEVICE, Cell, shift_seed
from headroom.comparison.run_groups import Goal, Group, MeasuredRun
from headroom.comparison.search_space import Axes, Range, Search
from headroom.comparison.trainings import ComparisonFolder, TrainingEnd
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig

STUDY = "study.journal"
STATES = {"FINISHED": TrialState.COMPLETE, "PRUNED": TrialState.PRUNED}
STARTUP = 5  # trials that finished, before another is pruned; half of a search of few
WEIGHED = 10  # finished trials from which on it is told what the settings weigh
EPOCH = "train/epoch"


class Trials:
    """The trials of a study, as a source of trainings; see trainings.Source."""

    def __init__(
        self, search: Search, comparison: ComparisonFolder, *, goal: Goal, base: RunConfig
    ) -> None:
        self.search, self.comparison, self.goal, self.base = search, comparison, goal, base
        self.study = open_study(
            comparison.folder / STUDY, search, goal=goal, epochs=base.train.epochs
        )
        self._distributions = _make_distributions(search.axes)
        self._left = self._find_unfinished()
        # How far it was read, in bytes and in epochs.
        self._journals: dict[int, tuple[Trial, int, int]] = {}
        self._pruned: dict[int, str] = {}
        self._repeated = set(comparison.ended)  # numbers of repeats that were taken, and of trials

    @property
    def devices(self) -> Sequence[str]:
        return self.search.devices or [self.base.device.name]

    def _find_unfinished(self) -> list[FrozenTrial]:
        """Return the trials that were running when the search ended.

        Tell the study how the others ended.
        """
        left = []
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            if (end := self.comparison.ended.get(trial.number + 1)) is not None:
                self._tell(end)
            elif len(trial.params) < len(self._distributions):
                error = "the search was ended while this was drawn"
                self._tell(
                    self.comparison.add(TrainingEnd(trial.number + 1, "FAILED", error=error))
                )
            else:
                left.append(trial)
        return left

    def take_next(self, device: str) -> Cell | None:
        for trial in self._left:
            if trial.user_attrs.get("device", device) == device:
                self._left.remove(trial)
                return self.make_cell(trial)
        if self._count_drawn() >= self.search.trials:
            return self._take_repeat(device)
        drawn = self.draw()
        drawn.set_user_attr("device", device)
        return self.make_cell(self.study.trials[drawn.number])

    def _take_repeat(self, device: str) -> Cell | None:
        """Return the best trial once more, when all have ended, with the next seed."""
        again = [cell for cell in self.list_repeats() if cell.number not in self._repeated]
        for cell in again:
            if cell.device == device or not self.search.devices:
                self._repeated.add(cell.number)
                return cell
        return None

    def list_repeats(self) -> list[Cell]:
        """Return the trainings of the best trial with other seeds; none before all have ended."""
        trials = range(1, self.search.trials + 1)
        if self.best is None or any(number not in self.comparison.ended for number in trials):
            return []
        best = self.make_cell(self.study.trials[self.best.number - 1])
        return [
            Cell(len(trials) + turn, best.settings, shift_seed(best.config, turn), repeat=turn + 1)
            for turn in range(1, self.search.repeats + 1)
        ]

    def _is_repeat(self, number: int) -> bool:
        return number > self.search.trials

    def _count_drawn(self) -> int:
        trials = self.study.get_trials(deepcopy=False)
        return sum(trial.state != TrialState.WAITING for trial in trials)

    def draw(self) -> Trial:
        """Draw a trial by a seed of its own.

        A search that goes on draws what it would have drawn.
        """
        count = self._count_drawn()
        seeds = np.random.SeedSequence((self.base.train.seed, count))
        self.study.sampler = _make_sampler(
            self.search.how, int(seeds.generate_state(1)[0]), is_alone=len(self.devices) == 1
        )
        if self.search.how == "grid":  # Optuna's sampler of that name is not for ask and tell
            self.study.enqueue_trial(self.search.combinations[count], skip_if_exists=True)
        return self.study.ask(self._distributions)

    def make_cell(self, trial: FrozenTrial) -> Cell:
        settings = format_params(self.search.axes, trial.params)
        try:
            config = self.search.resolve({**settings, **self._find_device(trial)})
        except ConfigError as error:
            return Cell(trial.number + 1, settings, self.base, refused="; ".join(error.problems))
        return Cell(trial.number + 1, settings, config)

    def _find_device(self, trial: FrozenTrial) -> dict[str, str]:
        """Return the device that the trial began on, where several may be used."""
        devices = self.search.devices
        return {DEVICE: trial.user_attrs.get("device", devices[0])} if devices else {}

    def is_pruned(self, cell: Cell, folder: Path) -> bool:
        """Return whether the training ends here, by the epochs since the last look."""
        if self.search.pruner == "none" or self._is_repeat(cell.number):
            return False
        at = cell.number - 1
        if at not in self._journals:
            stored_trial = self.study.trials[at]
            last = max(stored_trial.intermediate_values, default=0)
            self._journals[at] = Trial(self.study, stored_trial._trial_id), 0, last
        trial, offset, last = self._journals[at]
        epochs, offset = read_evaluations(folder / LOG, offset, self.goal.name)
        new = [(epoch, value) for epoch, value in epochs if epoch > last]
        for last, value in new:  # noqa: B007 (its last is a result)
            trial.report(value, last)
        self._journals[at] = trial, offset, last
        if not new or last >= cell.config.train.epochs:  # it has trained to its end
            return False
        if not trial.should_prune():  # by the newest
            return False
        epoch, value = new[-1]
        why = "worse than the median of the trials before"
        self._pruned[cell.number] = (
            f"after epoch {epoch}: {self.goal.name} {format_number(value)}, {why}"
        )
        return True

    def take_end(self, cell: Cell, ended: TrainingEnd, folder: Path | None) -> TrainingEnd:
        """Keep how the training ended, then tell the study.

        A search that is ended in between tells the study when it goes on.
        """
        metrics = read_end(folder).get("metrics", {}) if folder is not None else {}
        value = float(metrics.get(self.goal.name, math.nan))
        if ended.status == "FINISHED" and not math.isfinite(value):
            why = f"is {value}" if self.goal.name in metrics else "was not measured"
            ended = replace(ended, status="FAILED", error=f"{self.goal.name}: {why}")
        elif ended.status == "FINISHED":
            ended = replace(ended, value=value, error="")  # though it was told to end by then
        elif cell.number in self._pruned:
            ended = replace(ended, status="PRUNED", error=self._pruned[cell.number])
        self.comparison.add(ended)
        if not self._is_repeat(cell.number):
            self._tell(ended)
        return ended

    def _tell(self, ended: TrainingEnd) -> None:
        state = STATES.get(ended.status, TrialState.FAIL)
        value = ended.value if state == TrialState.COMPLETE else None
        self.study.tell(ended.number - 1, value, state=state)

    @property
    def best(self) -> TrainingEnd | None:
        """Return the finished trial with the best value; the first of those that share it."""
        done = [
            one
            for one in self.comparison.ended.values()
            if one.value is not None and not self._is_repeat(one.number)
        ]
        if not done:
            return None
        best = self.goal.choose_best(one.value for one in done if one.value is not None)
        return min((one for one in done if one.value == best), key=lambda one: one.number)

    def make_best_command(self) -> tuple[dict[str, str], str]:
        """Return the settings of the best trial, and the command that trains it again."""
        assert self.best is not None
        trial = self.study.trials[self.best.number - 1]
        settings = format_params(self.search.axes, trial.params)
        flags_of_trial = {**settings, **self._find_device(trial)}
        flags = [word for name, value in flags_of_trial.items() for word in (f"--{name}", value)]
        words = ["python", "-m", "flows.train", *self.search.words, *flags]
        return settings, shlex.join(words)

    def make_groups(self, runs: Sequence[MeasuredRun]) -> list[Group]:
        """Return a group for each trial, those that finished first, the best of them on top; its
        repeats are in its group."""
        groups: list[Group] = []
        for cell, run in zip(self.list_cells(), runs, strict=True):
            if self._is_repeat(cell.number) and self.best is not None:
                groups[self.best.number - 1].runs.append(run)
            else:
                groups.append(Group(cell.settings, [run], cell.number, is_trial=True))

        def rank(group: Group) -> tuple[int, float, int]:
            value = group.runs[0].metrics.get(self.goal.name, math.nan)
            value = value if self.goal.is_lower_better else -value
            order = ("FINISHED", "PRUNED")
            at = order.index(group.state) if group.state in order else len(order)
            return at, value if math.isfinite(value) else math.inf, group.number

        return sorted(groups, key=rank)

    def list_cells(self) -> list[Cell]:
        """Return all trainings, the repeats last."""
        trials = [self.make_cell(trial) for trial in self.study.trials[: self._count_drawn()]]
        return trials + self.list_repeats()

    def describe_best(self) -> str:
        """Return the best trial so far in words; empty where none has finished."""
        if self.best is None:
            return ""
        label = self.make_cell(self.study.trials[self.best.number - 1]).label
        value = format_number(self.best.value or 0.0)
        return f"#{self.best.number} has the best {self.goal.name}: {value} ({label})"

    def describe(self) -> list[str]:
        """Return the search in sentences."""
        ended = self.comparison.ended.values()
        ends = [one.status for one in ended if not self._is_repeat(one.number)]
        counts = {"finished": ends.count("FINISHED"), "pruned": ends.count("PRUNED")}
        counts["failed"] = len(ends) - sum(counts.values())
        parts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        lines = [f"{len(ends)} trials by {self.search.how}: {parts}"]
        if best := self.describe_best():
            lines[:0] = [best, self._describe_repeats(len(ends))]
        if counts["finished"] >= WEIGHED and len(self._distributions) > 1:
            weighed = get_param_importances(
                self.study, evaluator=FanovaImportanceEvaluator(seed=self.base.train.seed % 2**32)
            )
            said = ", ".join(f"{name} {format_percent(share)}" for name, share in weighed.items())
            lines.append(f"The differences in {self.goal.name} come from (fANOVA): {said}")
        return lines

    def _describe_repeats(self, trials: int) -> str:
        """Return what the best trial comes to with other seeds."""
        ended = self.comparison.ended.values()
        again = [one for one in ended if self._is_repeat(one.number)]
        values = [one.value for one in again if one.value is not None]
        if not values:
            of = f"the best of {trials} is partly luck" if trials > 1 else "one seed is one draw"
            failed = f"; its {len(again)} repeats failed" if again else ""
            return f"That is of one seed, and {of}: --repeats 5 trains it again with others{failed}"
        said = format_number(statistics.mean(values))
        if len(values) > 1:
            said += f" +- {format_number(statistics.stdev(values))}"
            said += f" ({format_number(min(values))} to {format_number(max(values))})"
        failed = f", {len(again) - len(values)} failed" if len(again) > len(values) else ""
        times = f"{len(values)} more times" if len(values) > 1 else "once more"
        return f"With other seeds, {times}: {self.goal.name} {said}{failed}"


def open_study(file: Path, search: Search, *, goal: Goal, epochs: int) -> optuna.Study:
    """Return the study in that file, which this process alone uses.

    It holds the comparison's lock.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file.with_name(f"{file.name}.lock").unlink(missing_ok=True)  # of a process that was killed
    if file.exists() and not (whole := file.read_bytes()).endswith(b"\n"):  # a disk that was full
        file.write_bytes(whole[: whole.rfind(b"\n") + 1])
    pruner = optuna.pruners.MedianPruner(
        n_startup_trials=min(STARTUP, max(1, search.trials // 2)),
        n_warmup_steps=-(-epochs // 5),  # a first epoch says little of a rate that warms up
    )
    return optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(file))),
        study_name="search",
        direction="minimize" if goal.is_lower_better else "maximize",
        load_if_exists=True,
        pruner=pruner if search.pruner == "median" else optuna.pruners.NopPruner(),
    )


def _make_sampler(how: str, seed: int, *, is_alone: bool) -> BaseSampler:
    """Return the sampler. is_alone: no trial is drawn while others run.

    Else those count as poor, so that what is drawn beside them is not the same again.
    """
    if how != "tpe":
        return RandomSampler(seed=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(seed=seed, constant_liar=not is_alone)


def _make_distributions(axes: Axes) -> dict[str, BaseDistribution]:
    return {name: _make_distribution(axis) for name, axis in axes.items()}


def _make_distribution(axis: Range | Sequence[str]) -> BaseDistribution:
    if not isinstance(axis, Range):
        return CategoricalDistribution(list(axis))
    if axis.is_whole:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.is_log)
    return FloatDistribution(axis.low, axis.high, log=axis.is_log)


def format_params(axes: Axes, params: dict[str, Any]) -> dict[str, str]:
    """Return the values that were drawn, as settings are written."""
    return {
        name: "-"
        if name not in params
        else axis.format_value(params[name])
        if isinstance(axis, Range)
        else str(params[name])
        for name, axis in axes.items()
    }


def read_evaluations(
    journal: Path, offset: int, metric: str
) -> tuple[list[tuple[int, float]], int]:
    """Return epoch and metric of each evaluation behind that offset, and the next offset."""
    evaluations: dict[int, dict[str, float]] = {}
    if journal.exists():
        with journal.open("rb") as lines:
            for batch, offset in read_metric_batches(lines, offset):  # noqa: B007, B020 (its last is a result)
                for name, value, _, step in batch:
                    if name in (metric, EPOCH):
                        evaluations.setdefault(step, {}).setdefault(name, value)
    epochs = [at for _, at in sorted(evaluations.items()) if metric in at and EPOCH in at]
    whole = [at for at in epochs if at[EPOCH].is_integer()]  # others are within an epoch
    return [(int(at[EPOCH]), at[metric]) for at in whole], offset
