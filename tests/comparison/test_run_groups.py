"""Which runs are the same training, and what differs between the others."""

import pytest

from headroom.comparison.run_groups import (
    LETTERS,
    MeasuredRun,
    compute_epoch_parts,
    compute_epoch_s,
    compute_step_ms,
    find_differing,
    find_peak_metric,
    find_score,
    format_with_spread,
    group_runs,
    shorten_values,
)
from tests.comparison.runs import run


def test_only_what_differs_is_a_column_and_seeds_are_repeats() -> None:
    runs = [
        run(f"{lr}-{seed}", optim__lr=lr, train__seed=seed, train__epochs=5, run__name=f"{seed}")
        for lr in (0.1, 0.2)
        for seed in (0, 1, 2)
    ]
    assert find_differing(runs) == ["optim.lr"]
    assert [(g.label, len(g.runs)) for g in group_runs(runs)] == [("lr=0.1", 3), ("lr=0.2", 3)]
    assert [group.label for group in group_runs(runs[:3])] == ["all"]
    assert len(group_runs(runs, ["optim.lr", "train.seed"])) == 6, "asked for by name"


def test_what_was_found_differs_too() -> None:
    runs = [
        run("a", tags={"device": "cuda:0", "device.model": "T4"}, device__name="auto"),
        run("b", tags={"device": "cpu"}, device__name="cpu"),
    ]
    assert find_differing(runs) == ["device", "device.model"]
    same = [run("a", device__name="auto"), run("b", device__name="cpu")]
    assert find_differing(same) == [], "both ran on the same device"


def test_a_long_label_is_a_number_in_a_sentence() -> None:
    runs = [run(f"{n}", data__path=f"{'x' * 30}{n}", data__target=f"y{n}") for n in range(2)]
    assert [group.called for group in group_runs(runs)] == ["#1", "#2"]


def test_long_settings_are_grouped_whole_and_shown_by_what_differs() -> None:
    """Values were cut to 40 letters first: two data sets were repeats of one training."""
    place = "/data/warehouse/exports/2026/november/houses"
    files = [f"{place}_cleaned.csv", f"{place}_augmented.csv"]
    scores = {files[0]: 0.9, files[1]: 0.5}
    runs = [run(f, data__path=f, metrics={"val/accuracy": s}) for f, s in scores.items()]
    groups = group_runs(runs)
    assert [group.settings["data.path"] for group in groups] == files
    assert [group.label for group in groups] == [
        "path=...houses_cleaned.csv",
        "path=...houses_augmented.csv",
    ]
    assert [len(group.runs) for group in group_runs([*runs, *runs])] == [2, 2]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (["{'hidden': [64], 'dropout': 0.1}", "{}"], ["{'hidden': [64], 'dropout': 0.1}", "{}"]),
        (
            [str({"hidden": [512, 512, 256, 128], "drop": d, "norm": "layer"}) for d in (0, 0.5)],
            ["drop: 0", "drop: 0.5"],
        ),
        (
            ['{"hidden": [512, 512, 256, 128], "bias": true, "n": 1}', '{"bias": false, "n": 1}'],
            ["hidden: [512, 512, 256, 128], bias: True", "hidden: -, bias: False"],
        ),
        ([f"{'x' * 60}{n}" for n in "ab"], [f"{'x' * 31}... (1)", f"{'x' * 31}... (2)"]),
        (["short", f"/{'y' * 60}"], ["short", f"/{'y' * 36}..."]),
    ],
)
def test_what_is_shown_of_a_long_setting_tells_it_from_the_others(
    values: list[str], shown: list[str]
) -> None:
    assert shorten_values(values) == shown
    assert all(len(told) <= LETTERS for told in shown)


def test_names_that_end_alike_stay_whole() -> None:
    runs = [
        run("a", optim__name="sgd", model__name="mlp"),
        run("b", optim__name="a", model__name="c"),
    ]
    assert group_runs(runs)[0].label == "model.name=mlp, optim.name=sgd"


def test_a_group_is_its_medians_and_deviation_without_those_that_failed() -> None:
    runs = [run(f"{s}", speed=s, metrics={"val/r2": 0.5}) for s in (100, 300, 120)]
    (group,) = group_runs([*runs, run("bad", status="FAILED")])
    assert group.compute_median("speed/samples_per_s") == 120 and group.state == "FAILED"
    assert format_with_spread(group, "speed/samples_per_s") == "120 \u00b1 110"
    assert group.compute_median(compute_step_ms) == 100 * 1000 / 120
    assert (
        group.compute_median("gpu/energy_j") is None
        and format_with_spread(group, "gpu/energy_j") == ""
    )
    assert find_score([group]) == "val/r2"
    assert find_peak_metric([group]) == "memory/run_peak_allocated_mib"


def test_an_epoch_takes_its_share_of_the_training() -> None:
    assert compute_epoch_s(run("a", metrics={"time/train_model_s": 30, "train/epoch": 4})) == 7.5
    assert compute_epoch_s(run("a")) is None


def test_the_parts_of_an_epoch_sum_to_it() -> None:
    def train(at: int, *, steps_s: float, all_s: float) -> MeasuredRun:
        spent = {"time/steps_s": steps_s, "time/eval_s": 2.0, "time/train_model_s": all_s}
        return run(f"{at}", metrics={**spent, "train/epoch": 2.0})

    (group,) = group_runs([train(n, steps_s=5.0 + n, all_s=10.0 + n) for n in (9, 0, 3)])
    assert compute_epoch_parts(group) == {"steps": 4.0, "evaluation": 1.0, "other": 1.5}
    assert sum(compute_epoch_parts(group).values()) == group.compute_median(compute_epoch_s)
    (more,) = group_runs([train(0, steps_s=20.0, all_s=10.0)])  # of several processes, together
    assert compute_epoch_parts(more) == {}
