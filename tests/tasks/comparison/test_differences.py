"""What is said of a difference: shares that sum to the whole, and nothing that may be chance."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.comparison.differences import (
    compute_memory_parts,
    compute_shares,
    compute_speed_up,
    compute_time_parts,
    describe_differences,
)
from tasks.comparison.run_groups import group_runs
from tests.tasks.comparison.runs import run

MILLISECONDS = st.floats(0.001, 500)


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
    assert describe_differences([slow, fast])[0] == (
        "workers=0 is 2x slower than workers=4: of the difference 80 % data wait, 20 % forward"
    )


def test_it_says_why_where_a_tag_does() -> None:
    why = "3.1 GiB of rows do not fit in 2.0 GiB"
    tags = {"data.residency": "host", "data.residency.reason": why}
    slow, fast = group_runs(
        [
            run("a", speed=500, phases={"data_wait": 150}, tags=tags, data__path="big.csv"),
            run("b", phases={"data_wait": 50}, tags={"data.residency": "device"}, data__path="s"),
        ]
    )
    (line, _) = describe_differences([slow, fast])
    assert f"100 % data wait (data.residency host against device: {why})" in line


@pytest.mark.parametrize(
    ("speeds", "is_told"),
    [
        (([1000], [920]), False),  # one run of each: 10 %
        (([1000], [880]), True),
        (([1000, 1004], [970, 976]), True),  # 2 % and what they spread
        (([1000, 1004], [985, 990]), False),
        (([900, 1100], [800, 1010]), False),  # within the spread
    ],
)
def test_it_is_silent_where_a_difference_may_be_chance(
    speeds: tuple[list[float], list[float]], is_told: bool
) -> None:
    runs = [
        run(f"{at}-{speed}", speed=speed, phases={"forward": 1}, optim__lr=at)
        for at, group in enumerate(speeds)
        for speed in group
    ]
    assert any("slower" in line for line in describe_differences(group_runs(runs))) is is_told


@pytest.mark.parametrize(
    ("setting", "speeds", "is_told"),
    [
        ("optim__lr", [[1000], [500]], False),
        ("train__batch_size", [[1000], [500]], True),
        ("optim__lr", [[1000, 1010], [500, 505]], True),  # each time anew is no chance
    ],
)
def test_one_run_of_each_that_does_the_same_work_is_slower_by_chance(
    setting: str, speeds: list[list[float]], is_told: bool
) -> None:
    runs = [
        run(f"{at}-{s}", speed=s, phases={"forward": 1}, tags={"alike": "a"}, **{setting: at})
        for at, group in enumerate(speeds)
        for s in group
    ]
    assert any("slower" in line for line in describe_differences(group_runs(runs))) is is_told


def test_a_setting_that_both_have_alike_is_no_difference_between_them() -> None:
    """Of a grid of two settings: rates of one model were told as slower."""
    runs = [
        run("a", speed=1000, phases={"forward": 1}, tags={"alike": "a"}, optim__lr=1, model="x"),
        run("b", speed=500, phases={"forward": 2}, tags={"alike": "a"}, optim__lr=2, model="x"),
        run("c", speed=400, phases={"forward": 3}, tags={"alike": "c"}, optim__lr=1, model="y"),
    ]
    (slower,) = [line for line in describe_differences(group_runs(runs)) if "slower" in line]
    assert slower.startswith("model=y, lr=1 is 2.5x slower than model=x, lr=1")


def test_a_speed_of_a_busy_machine_is_told_as_such() -> None:
    waited = [4.0, 31.6, 12.0]
    runs = [
        run(f"{w}", speed=w, phases={"forward": 1}, metrics={"time/core_wait_pct": w}, model=w)
        for w in waited
    ]
    assert describe_differences(group_runs(runs))[-1] == (
        "In 2 of 3 other work on the machine had the cores that threads waited for, up to 32 % of "
        "the time: it slowed them."
    )
    assert not any(
        "core" in line for line in describe_differences(group_runs([runs[0], run("a", speed=9)]))
    )


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
    assert describe_differences([small, large])[0] == (
        "batch_size=9 takes 304 MiB more memory at its peak than batch_size=8 "
        "(300 MiB more activations)"
    )


def test_the_best_is_named_where_it_is_more_than_chance() -> None:
    def runs(best: float) -> list[str]:
        scores = {0.1: [0.80, 0.81], 0.2: [best, best + 0.01]}
        found = [
            run(f"{lr}{score}", metrics={"val/accuracy": score}, optim__lr=lr)
            for lr, values in scores.items()
            for score in values
        ]
        return describe_differences(group_runs(found))

    assert runs(0.9) == ["lr=0.2 has the best val/accuracy: 0.905"]
    assert runs(0.815) == []


def test_a_speed_up_has_the_spread_of_both() -> None:
    slow, fast = group_runs(
        [run(f"{lr}{s}", speed=s, optim__lr=lr) for lr, s in ((1, 90), (1, 110), (2, 200))]
    )
    assert compute_speed_up(fast, slow) == pytest.approx((2.0, 0.2))
