"""What is said of a difference: shares that sum to the whole, and nothing that may be chance."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.comparison.differences import (
    MOST,
    compute_memory_parts,
    compute_shares,
    compute_time_parts,
)
from headroom.comparison.page import ComparisonReport, compare_groups, make_markdown
from headroom.comparison.run_groups import (
    MeasuredRun,
    compute_epoch_parts,
    compute_epoch_s,
    group_runs,
)
from tests.comparison.runs import run

MILLISECONDS = st.floats(0.001, 500)


def compare(runs: Sequence[MeasuredRun]) -> ComparisonReport:
    return compare_groups(group_runs(runs), title="x")


@given(
    phases=st.dictionaries(
        st.sampled_from(["data_wait", "h2d", "forward", "backward", "optimizer"]), MILLISECONDS
    ),
    speed=st.floats(1, 1e6),
    batch=st.integers(1, 4096),
)
def test_the_parts_of_a_time_sum_to_what_the_speed_says(
    phases: dict[str, float], speed: float, batch: int
) -> None:
    """Also where the phases, timed one by one, take longer than a whole step does."""
    (group,) = group_runs([run("a", speed=speed, batch=batch, phases=phases)])
    parts = compute_time_parts(group)
    assert sum(parts.values()) == pytest.approx(1e6 / speed)
    assert min(parts.values()) >= -1e-6 * 1e6 / speed


def test_the_shares_of_a_difference_sum_to_one_and_say_where_it_is() -> None:
    """By hand: at 1,000 and 500 samples/s a batch of 100 takes 100 and 200 ms; 80 ms of the 100
    are data wait, 20 forward."""
    slow, fast = group_runs(
        [
            run("slow", speed=500, phases={"data_wait": 90, "forward": 100}, train__workers=0),
            run("fast", speed=1000, phases={"data_wait": 10, "forward": 80}, train__workers=4),
        ]
    )
    assert compute_shares(compute_time_parts(slow), compute_time_parts(fast)) == pytest.approx(
        {"data wait": 0.8, "forward": 0.2, "other": 0.0}
    )
    said = compare([*slow.runs, *fast.runs])
    assert said.words == [
        "workers=0 is 2.00x slower than workers=4 (1.74 to 2.30): of the difference 80 % data "
        "wait, 20 % forward"
    ]
    assert [line.partition(":")[0] for line in said.doubts] == ["There is one run of each"]


def test_it_says_why_where_a_tag_does() -> None:
    why = "3.1 GiB of rows do not fit in 2.0 GiB"
    tags = {"data.residency": "host", "data.residency.reason": why}
    (line,) = compare(
        [
            run("a", speed=500, phases={"data_wait": 150}, tags=tags, data__path="big.csv"),
            run("b", phases={"data_wait": 50}, tags={"data.residency": "device"}, data__path="s"),
        ]
    ).words
    assert f"100 % data wait (data.residency host against device: {why})" in line


def test_a_cause_that_the_phases_do_not_hold_is_not_told() -> None:
    """Shares of 105 % and "-12 % other" were told: the step was faster than its phases."""
    slow = run("a", speed=500, phases={"data_wait": 0, "forward": 190}, model=1)
    fast = run("b", phases={"data_wait": 30, "forward": 60}, model=2)
    assert compare([slow, fast]).words == ["model=1 is 2.00x slower than model=2 (1.74 to 2.30)"]


def test_a_phase_that_differs_by_chance_is_no_cause() -> None:
    runs = [
        run(f"{model}{at}", speed=speed * (1 + at / 1000), phases=phases, model=model)
        for model, speed, data_wait in ((1, 500, (20, 90, 10, 40)), (2, 1000, (10, 30, 40, 10)))
        for at, wait in enumerate(data_wait)
        for phases in [{"data_wait": wait, "forward": 150 if model == 1 else 60}]
    ]
    (line,) = compare(runs).words
    assert "% forward" in line and "data wait" not in line


@pytest.mark.parametrize(
    ("speeds", "is_told"),
    [
        (([1000], [880]), False),  # one run of each: 5 % of noise is taken for granted
        (([1000], [850]), True),
        (([1000, 1004], [950, 956]), True),
        (([1000, 1004], [985, 990]), False),  # less than 3 %
        (([900, 1100], [800, 1010]), False),  # within the spread
    ],
)
def test_it_is_silent_where_a_difference_may_be_chance(
    speeds: tuple[list[float], list[float]], is_told: bool
) -> None:
    runs = [
        run(f"{at}-{speed}", speed=speed, phases={"forward": 1}, model__args=at)
        for at, group in enumerate(speeds)
        for speed in group
    ]
    assert any("slower" in line for line in compare(runs).words) is is_told


@pytest.mark.parametrize("repeats", [1, 2, 3])
@pytest.mark.parametrize("tags", [{}, {"alike": "a"}])
def test_settings_that_change_no_step_are_no_cause_of_a_speed(
    repeats: int, tags: dict[str, str]
) -> None:
    """Of rates with two runs each "1.62x slower: 54 % backward" was told."""
    runs = [
        run(f"{lr}{at}", speed=speed, phases={"forward": 100 / speed}, tags=tags, optim__lr=lr)
        for lr, speed in ((1e-4, 1000), (1e-3, 780), (1e-2, 620))
        for at in range(repeats)
    ]
    comparison = compare(runs)
    assert not any("slower" in line for line in comparison.words)
    assert "speed-up" not in comparison.columns


def test_runs_of_one_work_are_repeats_of_its_speed() -> None:
    """Whatever the rate: then one run of each of a grid tells their noise."""
    runs = [
        run(f"{lr}{batch}", speed=speed * (1 + lr), optim__lr=lr, train__batch_size=batch)
        for lr in (0.001, 0.002, 0.003)
        for batch, speed in ((32, 500), (64, 550))
    ]
    comparison = compare(runs)
    assert comparison.words == ["batch_size=32 is 1.10x slower than batch_size=64 (1.10 to 1.10)"]
    assert comparison.columns["speed-up"] == ["1.00x", "1.10x"] * 3
    (doubt,) = comparison.doubts
    assert doubt.startswith("There is one run of each: how far scores of repeats would lie apart")


def test_a_setting_that_both_have_alike_is_no_difference_between_them() -> None:
    """Of a grid of two settings: rates of one model were told as slower."""
    runs = [
        run("a", speed=1000, phases={"forward": 1}, tags={"alike": "a"}, optim__lr=1, model="x"),
        run("b", speed=950, phases={"forward": 2}, tags={"alike": "a"}, optim__lr=2, model="x"),
        run("c", speed=400, phases={"forward": 3}, tags={"alike": "c"}, optim__lr=1, model="y"),
    ]
    (slower,) = [line for line in compare(runs).words if "slower" in line]
    assert slower.startswith("model=y, lr=1 is 2.44x slower than model=x (")


def test_where_the_gate_would_not_judge_a_speed_it_is_not_compared() -> None:
    """At 190 % of waiting "56 % backward" was told, of a model that differed by an idle buffer."""
    waits = {"a": [4.0, 31.6], "b": [12.0, 190.0]}
    runs = [
        run(f"{m}{w}", speed=1000 / (1 + w), metrics={"time/core_wait_pct": w}, model=m)
        for m, of in waits.items()
        for w in of
    ]
    told = compare(runs)
    assert told.doubts == [
        "The speed of 3 of 4 runs is not judged: other work had the cores that their threads "
        "waited for, up to 190 % of the time"
    ]
    assert told.words == [] and "speed-up" not in told.columns
    slow = {"time/reference_ms": 1.2}
    free = [run(f"{m}{at}", speed=m, metrics={"time/reference_ms": 1.0}, model=m) for m in (1, 2)
            for at in range(2)]  # fmt: skip
    told = compare([*free, run("x", speed=0.1, metrics=slow, model=1)])
    assert told.doubts == [
        "The speed of 1 of 5 runs is not judged: the machine took longer than usual for the same "
        "work"
    ]
    assert told.words == ["model=1 is 2.00x slower than model=2 (2.00 to 2.00)"]


def test_what_waited_for_its_own_processes_is_told_apart_from_other_work() -> None:
    own = {"time/core_wait_own_pct": 40.0, "time/core_wait_pct": 2.0}
    runs = [run(f"{m}{at}", metrics=own, model=m) for m in (1, 2) for at in range(2)]
    assert compare(runs).doubts == [
        "In 4 of 4 runs threads waited for cores that their own processes had, up to 40 % of the "
        "time: that is part of their speed"
    ]


def test_a_run_far_slower_than_its_repeats_is_told() -> None:
    runs = [run(f"{m}{at}", speed=1000 + at, model=m) for m in (1, 2) for at in range(4)]
    assert compare(runs).doubts == []
    (doubt,) = compare([*runs, run("odd", speed=500, model=1)]).doubts
    assert doubt.startswith("Run odd of model=1 was 2.00x slower than its repeats")


def test_a_setting_without_repeats_among_others_is_told() -> None:
    runs = [run(f"{m}{at}", speed=1000 + at, model=m) for m in (1, 2) for at in range(2)]
    assert compare([*runs, run("x", speed=1000, model=3)]).doubts == [
        "Of 1 of 3 settings there is one run: repeats of it are taken to lie as far apart as those "
        "of the others"
    ]


def test_of_many_differences_the_first_are_told() -> None:
    runs = [run(f"{m}", speed=1.5 ** (30 - m), model=m) for m in range(30)]
    words = compare(runs).words
    assert len(words) == MOST + 1 and words[-1] == "and 17 more are slower or larger, in the table"


def test_doubts_stand_before_what_they_are_of() -> None:
    text = make_markdown(compare([run("a", speed=1, model=1), run("b", speed=9, model=2)]))
    assert text.index("Doubtful: There is one run of each") < text.index("slower") < text.index("|")


def test_an_epoch_that_is_mostly_no_steps_is_explained() -> None:
    """26.7 s of an epoch stood beside 2.4 s of steps without a word."""
    spent = {"steps": 4.6, "first_step": 0.2, "eval": 1.0, "log": 36.0, "checkpoint": 10.4}
    metrics = {f"time/{name}_s": value for name, value in spent.items()}
    metrics |= {"time/train_model_s": 53.4, "train/epoch": 2.0}
    runs = [run(f"{m}{at}", metrics=metrics, model=m) for m in (1, 2) for at in range(2)]
    assert compare(runs).words[1:] == [
        "Steps are 9 % of an epoch of model=1 (26.7 s); beside them 18.0 s log, 5.20 s checkpoint"
    ]
    mostly = {**metrics, "time/log_s": 1.0, "time/train_model_s": 9.0, "time/checkpoint_s": 2.0}
    assert len(compare([run(f"{m}", metrics=mostly, model=m) for m in (1, 2)]).words) == 1


def test_the_epoch_of_a_sentence_is_that_of_the_table() -> None:
    """Of an even number of runs it was 0.75 s in the sentence and 0.79 s in the table."""

    def measure(seconds: float) -> dict[str, float]:
        steps = 0.1 if seconds < 1 else 0.4
        parts = {"time/steps_s": steps * seconds, "time/eval_s": 0.5 * seconds}
        return {**parts, "time/train_model_s": seconds, "train/epoch": 1.0}

    runs = [
        run(f"{model}{at}", metrics=measure(seconds), model=model)
        for model, of in ((1, (0.75, 0.83, 0.60, 0.90)), (2, (9.0, 8.0, 7.0)))
        for at, seconds in enumerate(of)
    ]
    told = compare(runs)
    assert told.columns["epoch"] == ["0.79 s", "8.00 s"]
    assert any("of an epoch of model=1 (0.79 s); beside them" in w for w in told.words)
    for group in told.groups:
        median = group.compute_median(compute_epoch_s)
        assert sum(compute_epoch_parts(group).values()) == pytest.approx(median)


def test_where_nothing_differs_it_says_what_would_have_been_told() -> None:
    """ "What differs" was empty, so that nobody knew how large a difference could have hidden."""
    speeds = (1000, 1030, 970, 1010, 1040, 980)
    runs = [run(f"{at}", speed=speed, model=at % 2) for at, speed in enumerate(speeds)]
    assert compare(runs).words == [
        "No difference in speed is beyond chance: at this noise of 3 % and 3 runs of each, one of "
        "10 % would have been told in 4 of 5 comparisons"
    ]


def test_of_one_run_each_the_noise_is_what_it_varied_by_itself() -> None:
    """5 % was taken whatever the runs showed: at 15 % of noise 53 % of pages told a difference."""

    def told(*recent: float) -> ComparisonReport:
        runs = [run(f"{m}", speed=speed, model=m) for m, speed in ((1, 1000.0), (2, 800.0))]
        return compare([replace(r, recent_speeds=recent) for r in runs])

    assert any("slower" in line for line in told(1000, 1010, 990, 1000).words)
    (doubt,) = told(1000, 1300, 700, 1200).doubts
    assert doubt.endswith("of a speed what it varied by from log point to log point, up to 28 %")
    assert not any("slower" in line for line in told(1000, 1300, 700, 1200).words)
    unknown = told(1000, 1000)
    assert unknown.words == [] and "speed-up" not in unknown.columns
    assert unknown.doubts[0].endswith(
        "; no difference of any in speed is told, since they logged too few to show it"
    )


def test_a_peak_of_which_not_all_was_seen_is_called_at_least_that() -> None:
    part = {"memory/peak_is_lower_bound": 1.0}
    told = compare(
        [
            run("a", memory={"activations": 100}, metrics=part, train__batch_size=8),
            run("b", memory={"activations": 400}, train__batch_size=9),
        ]
    )
    assert told.columns["peak"] == ["at least 100 MiB", "400 MiB"]
    assert "than batch_size=8, of what was seen (" in told.words[0]


def test_memory_is_told_by_its_owner() -> None:
    small, large = group_runs(
        [
            run("a", memory={"parameters": 10, "activations": 100, "rest": 5}, train__batch_size=8),
            run("b", memory={"parameters": 10, "activations": 400, "rest": 9}, train__batch_size=9),
        ]
    )
    assert (
        sum(compute_memory_parts(large).values()) == 419
        and compute_memory_parts(large)["other"] == 9
    )
    assert compare([*small.runs, *large.runs]).words[0] == (
        "batch_size=9 takes 304 MiB more memory at its peak than batch_size=8 "
        "(300 MiB more activations)"
    )


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (
            {1: [0.80, 0.81], 2: [0.90, 0.91]},
            ["lr=2 has the best val/accuracy: 0.905 against 0.805 of lr=1 (0.07 to 0.13 apart)"],
        ),
        (
            {1: [0.80, 0.81], 2: [0.815, 0.825]},
            ["lr=2 (0.82) cannot be told apart from lr=1 (0.805) by val/accuracy"],
        ),
        (  # no spread: each may be a row off
            {1: [0.99] * 5, 2: [0.995] * 5},
            ["lr=2 has the best val/accuracy: 0.995 against 0.99 of lr=1 (0.00079 to 0.0092 "
             "apart)"],
        ),
        (
            {1: [0.95] * 3, 2: [0.94] * 3, 3: [0.1] * 3},
            ["lr=1 (0.95) cannot be told apart from lr=2 (0.94) by val/accuracy",
             "lr=3 has a worse val/accuracy than lr=1: 0.1 against 0.95 (0.83 to 0.87 worse)"],
        ),
        (
            {1: [0.95, 0.945, 0.952], 2: [0.94, 0.948, 0.938], 3: [0.1, 0.15, 0.08]},
            ["lr=1 (0.95) cannot be told apart from lr=2 (0.94) by val/accuracy",
             "lr=3 has a worse val/accuracy than lr=1: 0.1 against 0.95 (0.76 to 0.92 worse)"],
        ),
    ],
)  # fmt: skip
def test_the_best_the_worse_and_the_equal_are_named(
    scores: dict[int, list[float]], words: list[str]
) -> None:
    """Of 0.95, 0.94 and 0.1 nothing was told, since the first two lay too near to each other."""
    runs = [
        run(f"{lr}{at}", metrics={"val/accuracy": score}, optim__lr=lr)
        for lr, values in scores.items()
        for at, score in enumerate(values)
    ]
    assert compare(runs).words == words


def test_losses_are_compared_by_their_ratio_and_without_those_that_are_no_number() -> None:
    runs = [
        run(f"{lr}{at}", metrics={"val/loss": loss}, optim__lr=lr)
        for lr, losses in ((1, [0.30, 0.31, 0.305]), (2, [0.60, 0.62, 0.61, 1.797e308]))
        for at, loss in enumerate(losses)
    ]
    (line,) = compare(runs).words
    assert line.startswith("lr=1 has the best val/loss: 0.305 against 0.61 of lr=2 (9")


def test_repeats_of_one_seed_do_not_show_what_another_changes() -> None:
    def doubts(*seeds: int) -> list[str]:
        return compare(
            [run(f"{m}{s}{n}", model=m, train__seed=s) for m in (1, 2) for n, s in enumerate(seeds)]
        ).doubts

    assert doubts(0, 1) == []
    assert doubts(0, 0) == [
        "All runs have train.seed 0: scores of repeats do not show what another seed changes"
    ]


def test_the_description_of_a_comparison_begins_with_its_best() -> None:
    """MLflow cuts it after three lines, and the first one was the page's own title again."""
    runs = [run(f"{m}", model=m, metrics={"val/accuracy": m / 10}) for m in (7, 9)]
    first = make_markdown(compare(runs)).splitlines()[0]
    assert first == "**Best median val/accuracy 0.9: model=9**"
    assert make_markdown(compare(runs[:1])).splitlines()[0] == "**x**"  # of one there is no best


BUSY_CPU = {"device.kind": "cpu"}


def make_busy(cpu_ms: dict[str, tuple[float, ...]], **more: float) -> list[MeasuredRun]:
    """Runs on a machine that was busy, by the processor time of a step."""
    return [
        run(
            f"{model}{at}",
            speed=1000 / (1 + at),
            phases={"forward": 5.0},
            tags=BUSY_CPU,
            metrics={"time/core_wait_pct": 70.0, "time/step_cpu_ms": ms, **more},
            model=model,
        )
        for model, of in cpu_ms.items()
        for at, ms in enumerate(of)
    ]


def test_on_a_busy_machine_the_processor_time_of_a_step_is_judged() -> None:
    """A slow loader was missed with three runs of each, whose processor times lay far apart."""
    told = compare(make_busy({"plain": (11.6, 12.0, 12.7), "slow": (18.3, 18.5, 18.9)}))
    assert told.words == [
        "A step of model=slow takes 1.54x the processor time of one of model=plain (1.42 to 1.66; "
        "18.5 ms against 12.0 ms), which a busy machine hardly changes"
    ]
    with_workers = make_busy({"plain": (10.0, 10.1), "slow": (10.0, 10.1)})
    for one in with_workers[2:]:
        assert isinstance(one.metrics, dict)
        one.metrics["time/workers_cpu_ms"] = 6.0
    assert "takes 1.60x the processor time" in compare(with_workers).words[0]


def test_processor_times_that_differ_by_chance_or_by_little_are_not_told() -> None:
    draw = random.Random(4)
    false = 0
    for _ in range(200):
        times = {m: tuple(10 * draw.lognormvariate(0, 0.08) for _ in range(3)) for m in "ab"}
        false += bool(compare(make_busy(times)).words)
    assert false <= 10
    assert compare(make_busy({"a": (10.0, 10.01), "b": (10.5, 10.51)})).words == []
    assert compare(make_busy({"a": (10.0,), "b": (30.0,)})).words == []


def test_what_bounds_each_side_is_told_in_the_words_of_the_verdict() -> None:
    def bound(model: int, word: str) -> MeasuredRun:
        return run(f"{model}", tags={"bound": word, "bound.why": "..."}, model=model)

    told = compare([bound(1, "data"), bound(2, "slow_rank")])
    assert "What bounds them: model=1 by data, model=2 by slow rank" in told.words
    assert told.columns["bound"] == ["data", "slow rank"]
    same = compare([bound(1, "data"), bound(2, "data")])
    assert not any("What bounds" in words for words in same.words)
    assert "bound" not in compare([run("a", model=1), run("b", model=2)]).columns
