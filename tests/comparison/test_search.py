"""A search without a training: what is drawn, what a journal ends early, and what goes on after it
was killed."""

import json
import math
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flows.cli.compare_command import parse_comparison
from headroom.comparison import trainings
from headroom.comparison.grid import Cell
from headroom.comparison.run_groups import Goal, MeasuredRun
from headroom.comparison.search import STUDY, Trials
from headroom.comparison.trainings import ComparisonFolder, TrainingEnd
from headroom.settings.read_settings import ConfigError
from tests.conftest import PYTHON
from tests.run_folders import append_lines, make_line, write_end
from tests.test_house import MODULES, _names

LOSS = Goal("val/loss", True)
WORDS = ["--vary", "optim.lr=1e-5..1", "--vary", "model.args.dropout=0..0.9"]


def _trials(folder: Path, *words: str, how: str = "tpe", goal: Goal = LOSS) -> Trials:
    asked = parse_comparison(["--search", how, *(words or WORDS)])
    assert asked.search is not None
    folder.mkdir(exist_ok=True)
    state = folder / trainings.STATE
    known = json.loads(state.read_text())["ended"] if state.exists() else []
    ended = {one["number"]: TrainingEnd(**one) for one in known}
    comparison = ComparisonFolder(folder, "words", ended=ended)
    return Trials(asked.search, comparison, goal=goal, base=asked.base)


def _far(cell: Cell) -> float:
    """The least at a rate of 1e-3 and a dropout of 0.3."""
    settings = {name: float(value) for name, value in cell.settings.items()}
    dropout = settings["model.args.dropout"]
    return (math.log10(settings["optim.lr"]) + 3) ** 2 + 25 * (dropout - 0.3) ** 2


def _finish(trials: Trials, cell: Cell, value: float) -> TrainingEnd:
    folder = trials.comparison.folder / f"run{cell.number}"
    folder.mkdir(exist_ok=True)
    write_end(folder, {"metrics": {trials.goal.name: value}})
    ended = TrainingEnd(cell.number, "FINISHED", f"id{cell.number}", error="terminated")  # too late
    return trials.take_end(cell, ended, folder)


def _next(trials: Trials) -> Cell:
    cell = trials.take_next("auto")
    assert cell is not None
    return cell


def test_tpe_draws_nearer_than_chance(tmp_path: Path) -> None:
    drawn: dict[str, list[float]] = {"tpe": [], "random": []}
    for how, found in drawn.items():
        trials = _trials(tmp_path / how, *WORDS, "--trials", "40", how=how)
        for _ in range(40):
            cell = _next(trials)
            found.append(_far(cell))
            _finish(trials, cell, found[-1])
        assert trials.take_next("auto") is None, "more trials than were asked for"
        assert trials.best is not None and trials.best.value == min(found)
    late = {how: statistics.median(found[20:]) for how, found in drawn.items()}
    assert late["tpe"] < late["random"] / 2, late


@pytest.mark.parametrize("how", ["tpe", "random"])
def test_one_that_goes_on_draws_what_it_would_have(tmp_path: Path, how: str) -> None:
    """By the settings' own seed: another seed draws others."""
    whole, drawn, others = _trials(tmp_path / "whole", how=how), [], []
    other = _trials(tmp_path / "other", *WORDS, "--train.seed=1", how=how)
    for _ in range(14):
        again = _trials(tmp_path / "again", how=how)  # a process each
        cell, same = _next(whole), _next(again)
        _finish(whole, cell, _far(cell))
        _finish(again, same, _far(same))
        drawn.append((cell.settings, same.settings))
        others.append(_next(other).settings)
    assert all(one == same for one, same in drawn)
    assert not {str(one) for one, _ in drawn} & set(map(str, others))


def test_what_was_under_way_is_told_or_goes_on_and_is_no_other_trial(tmp_path: Path) -> None:
    trials = _trials(tmp_path / "study")
    first, second = _next(trials), _next(trials)
    trials.comparison.add(
        TrainingEnd(1, "FINISHED", "a", value=0.5)
    )  # and killed before it was told
    trials.study.ask()  # and killed before it was drawn
    study = tmp_path / "study" / STUDY
    study.with_name(f"{STUDY}.lock").symlink_to("of-a-killed-process")
    study.write_bytes(study.read_bytes() + b'{"half a li')
    began = time.monotonic()
    trials = _trials(tmp_path / "study")
    assert time.monotonic() - began < 5, "waited for a lock that nobody holds"
    assert [t.state.name for t in trials.study.trials] == ["COMPLETE", "RUNNING", "FAIL"]
    assert trials.comparison.ended[3].status == "FAILED"
    again = _next(trials)
    assert (again.number, again.settings) == (second.number, second.settings)
    assert again.config == second.config and first.number == 1
    assert _next(trials).number == 4


def test_a_poor_training_is_ended_by_the_epochs_that_it_logs(tmp_path: Path) -> None:
    trials = _trials(tmp_path / "study", *WORDS, "--trials", "4", "--train.epochs", "6")
    for values in ([0.9, 0.5, 0.3], [0.8, 0.4, 0.2], [0.9, 0.9, 0.8]):
        cell = _next(trials)
        folder = tmp_path / f"journal{cell.number}"
        folder.mkdir()
        assert not trials.is_pruned(cell, folder), "it has told nothing yet"
        for epoch, value in enumerate(values, 1):
            metrics = {"val/loss": value, "val/accuracy": 0.1, "train/epoch": float(epoch)}
            append_lines(folder, make_line(metrics, 10 * epoch, unix_ms=1))
            append_lines(folder, make_line({"train/loss": 1.0}, 10 * epoch + 1, unix_ms=1))
            is_pruned = trials.is_pruned(cell, folder)
            assert is_pruned == (cell.number == 3 and epoch >= 2), f"epoch {epoch}"
            assert not trials.is_pruned(cell, folder), "of one look at an epoch"
        if not is_pruned:
            _finish(trials, cell, min(values))
    ended = trials.take_end(cell, TrainingEnd(3, "KILLED", "c"), folder)
    assert ended.status == "PRUNED" and ended.error.startswith("after epoch 3: val/loss 0.8")
    told = trials.study.trials[2]
    assert told.state.name == "PRUNED" and told.intermediate_values == {1: 0.9, 2: 0.9, 3: 0.8}


def test_a_training_at_its_last_epoch_is_not_ended_early(tmp_path: Path) -> None:
    """A trial was "PRUNED after epoch 5" of 5: it had trained to its end."""
    trials = _trials(tmp_path / "study", *WORDS, "--trials", "4", "--train.epochs", "3")
    for value in (0.1, 0.2, 0.9):
        cell = _next(trials)
        folder = tmp_path / f"journal{cell.number}"
        folder.mkdir()
        for epoch in (1, 2, 3):
            metrics = {"val/loss": value, "train/epoch": float(epoch)}
            append_lines(folder, make_line(metrics, 10 * epoch, unix_ms=1))
        assert not trials.is_pruned(cell, folder)
        assert trials.study.trials[cell.number - 1].intermediate_values == dict.fromkeys(
            (1, 2, 3), value
        )
        _finish(trials, cell, value)


def test_a_combination_that_is_refused_is_a_failed_trial(tmp_path: Path) -> None:
    words = ["--vary", "train.batch_size=4,64", "--vary", "train.accumulate=1,8"]
    trials = _trials(tmp_path / "study", *words, how="grid")
    drawn = [_next(trials) for _ in range(4)]
    assert trials.take_next("auto") is None
    assert [cell.settings["train.batch_size"] for cell in drawn] == ["4", "4", "64", "64"]
    assert [bool(cell.refused) for cell in drawn] == [False, True, False, False]
    assert "must be at most train.batch_size" in drawn[1].refused
    values = (0.5, math.nan, 0.3, math.nan)
    for cell, value in zip(drawn, values, strict=True):
        if cell.refused:
            trials.take_end(cell, TrainingEnd(cell.number, "FAILED", error=cell.refused), None)
        else:
            _finish(trials, cell, value)
    ended = trials.comparison.ended
    assert [ended[n].error for n in (1, 3, 4)] == ["", "", "val/loss: is nan"]
    assert trials.best is not None and trials.best.number == 3
    settings, command = trials.make_best_command()
    assert settings == drawn[2].settings
    assert command == "python -m flows.train --train.batch_size 64 --train.accumulate 1"
    runs = [
        MeasuredRun(f"{n}", "", trials.comparison.ended[n].status, metrics={"val/loss": value})
        for n, value in enumerate(values, 1)
    ]
    assert [group.number for group in trials.make_groups(runs)] == [3, 1, 2, 4]
    assert trials.describe()[-1] == "4 trials by grid: 2 finished, 2 failed"


def test_what_the_settings_weigh_is_told_of_many(tmp_path: Path) -> None:
    trials = _trials(tmp_path / "study", *WORDS, "--trials=12", how="random")
    for _ in range(12):
        cell = _next(trials)
        _finish(trials, cell, float(cell.settings["model.args.dropout"]))
    weights = trials.describe()[-1]
    assert "come from (fANOVA): model.args.dropout 9" in weights or "dropout 100 %" in weights


def test_only_the_parent_of_a_search_imports_optuna() -> None:
    users = {module for module, file in MODULES.items() if "optuna" in _names(file)}
    assert users == {"headroom.comparison.search"}
    needs = "flows.compare, flows.train, headroom.comparison.page, headroom.comparison.trainings"
    words = "'--search', 'tpe', '--vary', 'optim.lr=1e-5..1'"
    code = (
        f"import sys, {needs}\nfrom flows.cli.compare_command import parse_comparison as parse\n"
        f"parse([{words}])\n"
    )
    told = subprocess.run([PYTHON, "-c", f"{code}assert 'optuna' not in sys.modules"], check=False)
    assert told.returncode == 0


def test_the_best_trial_is_trained_again_with_other_seeds(tmp_path: Path) -> None:
    """The best of many on one seed is too good."""
    words = (*WORDS, "--trials", "4", "--repeats", "3", "--train.seed", "7")
    trials = _trials(tmp_path, *words, how="random")
    first = [_next(trials) for _ in range(4)]
    assert trials.take_next("auto") is None, "trials are still under way"
    for cell, value in zip(first, (3.0, 1.0, 2.0, 4.0), strict=True):
        _finish(trials, cell, value)
    again = _next(trials)
    assert (again.number, again.settings, again.repeat) == (5, first[1].settings, 2)
    _finish(trials, again, 1.2)
    trials = _trials(tmp_path, *words, how="random")  # it was interrupted, and goes on
    rest = [_next(trials), _next(trials)]
    assert [cell.number for cell in rest] == [6, 7] and trials.take_next("auto") is None
    seeds = [cell.config.train.seed for cell in (first[1], again, *rest)]
    assert seeds == [7, 8, 9, 10]
    _finish(trials, rest[0], 0.5)  # a seed that is better is no better trial
    _finish(trials, rest[1], 1.3)
    assert trials.best is not None and trials.best.number == 2
    told = trials.describe()
    assert told[0].startswith("#2 has the best val/loss: 1 ")
    assert told[1] == "With other seeds, 3 more times: val/loss 1 +- 0.4359 (0.5 to 1.3)"
    assert told[2] == "4 trials by random: 4 finished"
    cells = trials.list_cells()
    runs = [MeasuredRun(str(cell.number), "", "FINISHED") for cell in cells]
    groups = {group.number: group for group in trials.make_groups(runs)}
    assert [run.run_id for run in groups[2].runs] == ["2", "5", "6", "7"] and len(groups) == 4


def test_trials_side_by_side_count_those_under_way_as_poor(tmp_path: Path) -> None:
    """Four devices were given nearly the same: the sampler saw only what had ended."""
    here = [*WORDS, "--devices", "cpu,cpu"]
    with pytest.raises(ConfigError, match="one twice among its values"):
        parse_comparison(["--search", "tpe", *here])
    asked = parse_comparison(["--search", "tpe", *WORDS]).search
    assert asked is not None
    for devices, is_liar in (([], False), (["cuda:0", "cuda:1"], True)):
        base = parse_comparison(["--search", "tpe", *WORDS]).base
        folder = tmp_path / str(is_liar)
        folder.mkdir()
        search = replace(asked, devices=devices)
        trials = Trials(search, ComparisonFolder(folder, "words"), goal=LOSS, base=base)
        trials.draw()
        assert trials.study.sampler._constant_liar is is_liar  # type: ignore[attr-defined]
