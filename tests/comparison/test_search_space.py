"""What a search may be asked for: ranges, choices, goals, and what is refused before it begins."""

import pytest

from flows.cli.compare_command import parse_comparison
from headroom.comparison import search_space
from headroom.comparison.search_space import Range, find_goal, make_probes, parse_range
from headroom.settings.read_settings import ConfigError


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("optim.lr", "1e-5..1e-1", Range(("1e-5", "1e-1"), False)),
        ("optim.lr", "1..2", Range(("1", "2"), False)),
        ("train.batch_size", "8..256", Range(("8", "256"), True)),
        ("train.batch_size", "1e1..1e3", Range(("10", "1000"), True)),
        ("model.args.width", "-4..4", Range(("-4", "4"), True)),
        ("model.args.dropout", "0..0.5", Range(("0", "0.5"), False)),
        ("data.path", "../rows.csv", None),
        ("optim.lr", "1e-3", None),
        ("optim.lr", "0..inf", None),
    ],
)
def test_a_range_is_two_numbers_and_whole_ones_stay_whole(
    name: str, text: str, found: Range | None
) -> None:
    assert parse_range([text], name) == found


def test_two_powers_of_ten_are_searched_as_such() -> None:
    logs = {text: Range(tuple(text.split("..")), False).is_log for text in ("1..100", "1..99")}  # type: ignore[arg-type]
    assert logs == {"1..100": True, "1..99": False}
    assert not Range(("0", "1000"), False).is_log and not Range(("-1", "1000"), True).is_log


def test_a_number_is_short_and_stays_in_its_range() -> None:
    wide, narrow = Range(("1e-5", "1"), False), Range(("0.123456", "0.123459"), False)
    assert wide.format_value(0.00316227766) == "0.003162" and wide.format_value(1e-5) == "1e-05"
    assert 0.123456 <= float(narrow.format_value(0.1234567)) <= 0.123459
    assert Range(("1", "9"), True).format_value(7) == "7"


@pytest.mark.parametrize(
    ("asked", "tasks", "own", "found"),
    [
        ("", ["classification"], [], ("val/accuracy", False)),
        ("", ["regression"], [], ("val/r2", False)),
        ("", ["tokens"], [], ("val/perplexity", True)),
        ("", ["classification", "multilabel"], [], ("val/accuracy", False)),
        ("", [], [], ("val/loss", True)),
        ("val/mae", ["regression"], [], ("val/mae", True)),
        ("val/rmse", ["regression"], [], ("val/rmse", True)),
        ("max:val/loss", ["regression"], [], ("val/loss", False)),
        ("min:val/far", ["regression"], ["far"], ("val/far", True)),
    ],
)
def test_the_goal_is_what_the_task_is_judged_by(
    asked: str, tasks: list[str], own: list[str], found: tuple[str, bool]
) -> None:
    goal = find_goal(asked, tasks, own)
    assert (goal.name, goal.is_lower_better) == found


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("val/r2", "--goal val/r2: must be one of val/accuracy, val/balanced_accuracy"),
        ("up:val/loss", "--goal up:val/loss: must be one of"),
        ("val/far", "--goal val/far: is your own; say min:val/far or max:val/far"),
    ],
)
def test_a_goal_that_is_not_measured_or_has_no_direction_is_refused(asked: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        find_goal(asked, ["classification"], ["far"])
    assert told in str(refused.value)


def test_every_end_is_checked_beside_values_that_go_with_it() -> None:
    """accumulate 8 is refused with a batch of 4, and goes with one of 64."""
    words = "--search tpe --vary train.batch_size=4..64 --vary train.accumulate=1,8"
    search = parse_comparison([*words.split(), "--devices", "cpu"]).search
    assert search is not None
    found = [tuple(one.values()) for one in make_probes(search)]
    assert found == [("4", "1"), ("64", "1"), ("64", "8"), ("4", "1", "cpu")]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--search tpe", "--search: needs a --vary"),
        ("--search tpe --vary optim.lrr=1..2", "optim.lrr: unknown setting; did you mean"),
        ("--search tpe --vary optim.lr=-1..1", "optim.lr: must be greater than 0 (got -1)"),
        ("--search tpe --vary train.batch_size=8..1e9", "train.batch_size: must be less than"),
        ("--search tpe --vary train.batch_size=0.5..8", "train.batch_size: must be a valid int"),
        ("--search tpe --vary optim.lr=2..1", "optim.lr: must be LOW..HIGH with LOW below HIGH"),
        ("--search grid --vary optim.lr=1..2", "--vary optim.lr=1..2: a grid needs a list"),
        ("--vary optim.lr=1..2", "--vary optim.lr=1..2: a range is for --search tpe or random"),
        ("--last 3 --anew", "--anew: trains nothing beside --last"),
        ("--vary optim.lr=1,2 --trials 3", "--trials: goes with --search"),
        ("--vary optim.lr=1,2 --goal val/loss", "--goal: goes with --search"),
        (
            "--search tpe --vary optim.lr=1..2 --last 3",
            "--vary: trains anew, and --last reads runs that exist",
        ),
        ("--search tpe --vary device.name=cpu,auto", "a search takes its devices from --devices"),
    ],
)
def test_bad_words_are_refused(words: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_comparison(words.split())
    assert told in str(refused.value)


def test_without_optuna_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_space, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--search: needs Optuna.*-e '\.\[search\]'"):
        parse_comparison(["--search", "tpe", "--vary", "optim.lr=1e-4..1"])
    assert parse_comparison(["--vary", "optim.lr=1e-4,1"]).cells, "a grid does without"


def test_a_grid_has_as_many_trials_as_it_has_combinations() -> None:
    words = ["--search", "grid", "--vary", "optim.lr=1,2,3", "--vary", "train.batch_size=8,16"]
    for trials, count in (([], 6), (["--trials", "4"], 4), (["--trials", "90"], 6)):
        search = parse_comparison([*words, *trials]).search
        assert search is not None and search.trials == count
