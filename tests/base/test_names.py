"""The list of names: that its rows agree with each other, and with what asks it."""

from __future__ import annotations

import re

import pytest

from headroom.base import names
from headroom.base.names import METRICS, PARAM_GROUPS, PHASES, TAGS, Place
from headroom.settings.run_config import RunConfig

WORDED = re.compile(r"[^{}]*\{\}[^{}]*|[^{}]+")


@pytest.mark.parametrize("rows", [METRICS, TAGS, PHASES, PARAM_GROUPS], ids=len)
def test_no_name_is_in_the_list_twice_and_each_says_what_it_is(rows: tuple) -> None:
    assert len({row.name for row in rows}) == len(rows)
    assert all(row.what and not row.what.endswith(".") and "|" not in row.what for row in rows)


def test_every_place_shows_something_and_words_are_worded() -> None:
    assert {place for metric in METRICS for place in metric.shown} == set(Place)
    for place in Place:
        words = [said for _, said in names.list_words(place)]
        assert all(WORDED.fullmatch(said) for said in words if said), place
    silent = {Place.RANKS}  # what is measured of each process, and not told
    mixed = [p for p in Place if len({bool(w) for _, w in names.list_words(p)}) > 1]
    assert set(mixed) == silent


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("time/forward_ms", "ms"),
        ("time/total_s", "s"),
        ("speed/samples_per_s", "1/s"),
        ("memory/leaked_mib", "MiB"),
        ("gpu/power_w", "W"),
        ("val/loss", ""),
        ("somebodys/own", ""),
    ],
)
def test_the_end_of_a_name_is_its_unit(name: str, unit: str) -> None:
    assert names.find_unit(name) == unit


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("val/loss", "val/loss"),
        ("val/of my own", "val/NAME"),
        ("test/r2", "test/NAME"),
        ("ranks/leaked_mib_most", "ranks/NAME_WHICH"),
        ("loss", None),
        ("val/", None),
    ],
)
def test_a_name_is_found_by_its_row_or_its_family(name: str, row: str | None) -> None:
    found = names.find_metric(name)
    assert (found and found.name) == row


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("device", "device"),
        ("ranks.leaked_mib_most", "ranks.NAME_most"),
        ("mlflow.user", "mlflow.NAME"),
        ("mlflowXuser", None),
    ],
)
def test_a_tag_is_found_by_its_row_or_its_family(name: str, row: str | None) -> None:
    found = names.find_tag(name)
    assert (found and found.name) == row


@pytest.mark.parametrize("task", names.TASKS)
def test_what_weights_may_be_chosen_by_has_a_direction(task: str) -> None:
    for name in names.list_best_metrics(task, classes=11):
        metric = names.find_metric(name)
        assert metric is not None and metric.is_lower_better is not None
        best = RunConfig.model_validate({"train": {"best_metric": name}}).train.best
        assert (best.name, best.is_lower) == (name, metric.is_lower_better)


def test_a_score_of_many_classes_is_one_only_where_there_are_many() -> None:
    few = names.list_best_metrics("classification", classes=10)
    many = names.list_best_metrics("classification", classes=11)
    assert {*many} - {*few} == {"val/top5_accuracy"}
    assert names.list_best_metrics("regression", classes=11) == names.list_best_metrics(
        "regression"
    )


@pytest.mark.parametrize("score", ["loss", "mape", "top5_accuracy", "largest_class_share"])
def test_a_score_of_the_tasks_is_taken(score: str) -> None:
    with pytest.raises(ValueError, match=f"'{score}' is the name of a figure of the task itself"):
        RunConfig.model_validate({"train": {"metrics": {score: "torch:abs"}}})


@pytest.mark.parametrize("score", ["NAME", "mine", "samples_per_s"])
def test_any_other_name_is_free_for_a_metric_of_ones_own(score: str) -> None:
    RunConfig.model_validate({"train": {"metrics": {score: "torch:abs"}}})


def test_the_trends_that_are_drawn_are_of_what_the_gate_looks_at() -> None:
    assert {*names.list_shown(Place.GATE)} == {*names.list_shown(Place.TREND_PLOT)}


def test_params_are_grouped_by_the_sections_of_the_settings() -> None:
    assert [group.name for group in PARAM_GROUPS] == [*RunConfig.model_fields]


def test_the_phases_that_a_tag_explains_are_those_of_a_step() -> None:
    steps = {phase.name for phase in names.list_phases(names.PhaseKind.STEP)}
    assert {phase for tag in TAGS for phase in tag.explains} <= steps
