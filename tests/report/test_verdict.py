"""The verdict says what its figures bear: the cause with the largest share, and nothing of a run
that only computes."""

from __future__ import annotations

import io
from typing import Any

import pytest

from headroom.report.run_report import make_html, make_markdown, make_terminal_report
from headroom.report.verdict import (
    BOUNDS,
    RULES,
    compute_gain,
    judge_run,
    make_markdown_table,
)


def make_run(
    phases: dict[str, float],
    *,
    seconds: float = 20.0,
    beside: dict[str, float] | None = None,
    profile: dict[str, Any] | None = None,
    kind: str = "cpu",
    **metrics: float,
) -> dict[str, Any]:
    """A run of a loop of somebody else's; phases: milliseconds of a step; beside: seconds."""
    step_ms = sum(phases.values())
    beside = beside or {}
    steps_s = seconds - sum(beside.values())
    return {
        "metrics": {
            **{f"time/{name}_ms": ms for name, ms in phases.items()},
            **{f"time/{name}_s": s for name, s in beside.items()},
            "time/setup_s": 1.0,
            "time/first_step_s": 0.1,
            "time/steps_s": steps_s,
            "time/train_model_s": seconds + 1.1,
            "speed/steps_per_s": (1000 * steps_s / step_ms + 1) / (steps_s + 0.1),
            **{name.replace("__", "/", 1): value for name, value in metrics.items()},
        },
        "profile": {"threads": 2, "cores": 2, "workers": 0, **(profile or {})},
        "tags": {"device.kind": kind},
    }


HEALTHY = {"data_wait": 0.5, "forward": 4.0, "backward": 6.0, "optimizer": 1.0, "other": 0.2}


def judge(phases: dict[str, float] = HEALTHY, **given: Any) -> Any:
    verdict = judge_run(make_run(phases, **given))
    assert verdict is not None and verdict.bound in BOUNDS
    return verdict


def test_a_run_that_computes_has_no_cause() -> None:
    verdict = judge()
    assert verdict.bound == "compute" and verdict.gain is None
    assert verdict.why.startswith("Nothing stands out: 94 % of the time is the model's own work")


def test_nothing_is_said_of_a_run_that_was_short_or_took_no_step() -> None:
    assert judge(seconds=2.0).bound == "short"
    assert judge({"forward": 1000.0}, seconds=30.0).bound == "short"
    assert judge(seconds=2.0).make_metrics() == {}
    assert judge_run({"metrics": {}}) is None
    assert judge_run({}) is None


@pytest.mark.parametrize(
    ("bound", "given", "words"),
    [
        ("data", {"phases": {**HEALTHY, "data_wait": 30.0}}, "waits for data 73 % of the time"),
        ("transfer", {"phases": {**HEALTHY, "h2d": 10.0}}, "Copies of batches"),
        ("eval", {"beside": {"eval": 9.0}}, "Evaluations take 45 %"),
        ("checkpoint", {"beside": {"checkpoint": 6.0}}, "Checkpoints take 30 %"),
        ("logging", {"beside": {"log": 6.0}}, "Logging takes 30 %"),
        ("python", {"phases": {**HEALTHY, "between": 20.0}}, "Code between the steps takes 63 %"),
        ("optimizer", {"phases": {**HEALTHY, "optimizer": 40.0}}, "The optimizer takes 79 %"),
        ("contention", {"time__core_wait_pct": 60.0}, "others had its cores 60 % of the time"),
        ("contention", {"time__core_limited_pct": 50.0}, "limit of its container"),
        ("memory", {"memory__alloc_retries": 900.0}, "freed its cache 900 times"),
        ("memory", {"time__memory_wait_pct": 60.0}, "stood still for pages"),
        ("throttled", {"gpu__throttled": 1.0}, "slowed by heat or power"),
        ("compile", {"time__compile_s": 9.0}, "Compiling the step took 45 %"),
        (
            "launch",
            {"time__step_operations": 3000.0, "time__step_cpu_ms": 12.0},
            "3,000 a step of 3.8 us",
        ),
        (
            "threads",
            {"profile": {"threads": 8}, "time__core_wait_own_pct": 70.0},
            "8 threads on 2 cores",
        ),
        (
            "workers",
            {"phases": {**HEALTHY, "data_wait": 30.0}, "profile": {"workers": 16}},
            "16 workers share 2 cores",
        ),
        (
            "host_leak",
            {"profile": {"growth": {"memory": {"change": 900, "least": 800, "first": 400}}}},
            "The memory of the process grows: 400 MiB to 1.27 GiB",
        ),
        (
            "device_leak",
            {"profile": {"growth": {"device": {"change": 900, "least": 800, "first": 400}}}},
            "What tensors hold on the device grows",
        ),
        (
            "slowing",
            {
                "profile": {
                    "growth": {
                        "step": {"change": 0.02, "least": 0.018, "first": 0.01, "start": 0.01},
                        "step_cpu": {"change": 0.02, "least": 0.018, "first": 0.01, "start": 0.01},
                    }
                }
            },
            "the last take 3.0 times as long as the first",
        ),
        (
            "slow_rank",
            {
                "profile": {
                    "slow_rank": {
                        "rank": 1,
                        "own_ms": 25.0,
                        "others_ms": 10.0,
                        "phase": "forward",
                        "share": 0.3,
                    }
                }
            },
            "Rank 1 is slow",
        ),
    ],
)
def test_each_cause_is_told_with_its_share(bound: str, given: dict[str, Any], words: str) -> None:
    verdict = judge(**given)
    assert verdict.bound == bound and words in verdict.why
    if verdict.share is not None:
        assert verdict.gain == pytest.approx(compute_gain(verdict.share))
        assert "without it up to" in verdict.why


def test_every_rule_has_a_test_and_a_row() -> None:
    tested = {
        mark.args[1][at][0]
        for mark in test_each_cause_is_told_with_its_share.pytestmark  # type: ignore[attr-defined]
        for at in range(len(mark.args[1]))
    }
    assert tested == {rule.bound for rule in RULES}
    assert all(f"| `{rule.bound}` |" in make_markdown_table() for rule in RULES)


def see(kind: str) -> dict[str, Any]:
    """The profile of a loop that was seen at this kind of work between its steps."""
    return {"places": {"between": [{"kind": kind, "looks": 90, "line": "mine.py:7 `save()`"}]}}


def test_code_between_the_steps_is_named_by_what_was_seen_there() -> None:
    phases = {**HEALTHY, "between": 20.0}
    bounds = {
        "collate": "data",
        "logging": "logging",
        "forward": "eval",
        "start of workers": "workers",
        "read from the device": "python",
    }
    named = {kind: judge(phases, profile=see(kind)) for kind in bounds}
    assert {kind: one.bound for kind, one in named.items()} == bounds
    assert all("most often at mine.py:7 `save()`" in one.why for one in named.values())
    garbage = judge(phases, time__garbage_s=10.0, profile=see("forward"))
    assert garbage.bound == "python" and "garbage collector takes 50 %" in garbage.why


def test_on_a_gpu_code_between_the_steps_may_wait_for_it() -> None:
    phases = {**HEALTHY, "between": 20.0}
    read = judge(phases, profile=see("read from the device"), kind="cuda")
    copy = judge(phases, profile=see("copy to the device"), kind="cuda")
    assert (read.bound, copy.bound) == ("logging", "transfer")
    assert "without .item()" in read.why and "pin_memory=True" in copy.why


def test_operations_are_tiny_on_a_gpu_where_it_waits_for_their_calls() -> None:
    """Processor time says nothing there: the host waits for the device while it spins."""
    known: dict[str, Any] = {"time__step_operations": 500.0, "kind": "cuda"}
    tiny = judge(**known, time__host_bound_pct=100.0)
    assert tiny.bound == "launch" and "500 a step of 22.0 us each" in tiny.why
    assert "in 100 % of the steps the device waits for their calls" in tiny.why
    assert judge(**known, time__host_bound_pct=10.0).bound == "compute"
    assert judge(**known, time__step_cpu_ms=1.0).bound == "compute"
    known["time__step_operations"] = 50.0  # each of 220 us: its backward is slow by itself
    assert judge(**known, time__host_bound_pct=100.0).bound == "compute"


def test_operations_that_are_arithmetic_are_not_tiny() -> None:
    """A GRU of 2,340 operations of 7 us was told that most of that is the call; it was a third."""
    known = {"time__step_operations": 2340.0, "time__step_cpu_ms": 17.0}
    assert judge(**known, time__arithmetic_ms=0.1).bound == "launch"
    assert judge(**known, time__arithmetic_ms=7.8).bound == "compute"


def test_the_gain_leaves_room_for_what_gets_faster_alone() -> None:
    """Loops without their cause were up to a fifth above the share: "up to" was too little."""
    assert compute_gain(0.0) == 1 and compute_gain(0.5) == pytest.approx(2 / 0.9)
    assert compute_gain(0.999) == pytest.approx(100)


def test_steps_that_grow_are_held_against_the_fastest() -> None:
    """The first reading of half a second is the mean of many steps, which have grown by then."""
    growth = {"step": {"change": 0.02, "least": 0.02, "first": 0.004, "start": 0.004}}
    known: dict[str, Any] = {"profile": {"growth": growth}}
    slow = judge(**known)
    fast = judge(**known, time__fast_step_ms=1.2)
    assert slow.bound == fast.bound == "slowing" and slow.share and fast.share
    assert fast.share == pytest.approx(1 - 1.2 / (0.004e3 / (1 - slow.share)))


def test_steps_that_grow_as_the_machine_gets_slower_are_no_cause() -> None:
    """On a shared host a CNN, all of whose steps are alike, was told that they grow 1.8 times."""
    step = {"change": 0.003, "least": 0.002, "first": 0.0037, "start": 0.0037}
    machine = {"change": 1e-4, "least": 5e-5, "first": 1.4e-4, "start": 1.4e-4}
    growth = {"step": step, "step_cpu": step}
    assert judge(profile={"growth": growth}).bound == "slowing"
    assert judge(profile={"growth": {**growth, "reference": machine}}).bound == "compute"
    unsure = {**machine, "least": -1e-5}
    assert judge(profile={"growth": {**growth, "reference": unsure}}).bound == "slowing"


def test_tiny_operations_of_an_optimizer_are_told_of_that() -> None:
    phases = {**HEALTHY, "forward": 1.0, "backward": 1.0, "optimizer": 9.0}
    verdict = judge(phases, time__step_operations=5000.0, time__step_cpu_ms=12.0)
    assert verdict.bound == "optimizer"


def test_what_several_processes_take_to_start_is_no_code_between_their_steps() -> None:
    run = make_run(HEALTHY)
    run["metrics"]["time/train_model_s"] += 15.0
    assert judge_run(run).bound == "python"  # type: ignore[union-attr]
    run["profile"] |= {"whole_s": 26.1, "once_s": {"held": 5.0}}
    assert judge_run(run).bound == "compute"  # type: ignore[union-attr]


def test_steps_of_which_no_part_was_seen_are_no_cause() -> None:
    verdict = judge({"data_wait": 1.0, "optimizer": 2.0, "other": 30.0})
    assert verdict.bound == "mixed" and verdict.gain is None
    assert "no parts that were seen, for 91 % of the time" in verdict.why


def test_what_steps_that_grow_cost_is_what_they_take_above_the_first() -> None:
    """Lengths that grow fast and then no more have a slope that begins far above their first."""
    growth = {"change": 0.01, "least": 0.009, "first": 0.006, "start": 0.002}
    verdict = judge(profile={"growth": {"step": growth}})
    assert verdict.bound == "slowing" and "take 2.7 times as long" in verdict.why
    assert verdict.share == pytest.approx(1 - 2.0 / sum(HEALTHY.values()), rel=0.01)


def test_advice_comes_from_a_fact_of_the_run() -> None:
    """A rival says "increase workers" of 16 workers on 2 cores."""
    phases = {**HEALTHY, "data_wait": 30.0}
    assert "num_workers=1" in judge(phases).why
    assert "Take 7 workers" in judge(phases, profile={"workers": 2, "cores": 8}).why
    assert "cheaper" in judge(phases, profile={"workers": 1}).why
    started = judge(phases, profile={"workers": 2}, time__first_waits_s=12.0)
    assert "persistent_workers=True" in started.why


def test_the_largest_share_is_first_and_smaller_ones_are_beside_it() -> None:
    verdict = judge({**HEALTHY, "data_wait": 15.0}, beside={"eval": 5.0, "checkpoint": 3.0})
    assert verdict.bound == "data"
    assert "Beside it: evaluations take 25 % of the time; checkpoints take 15 %" in verdict.why
    busy = judge({**HEALTHY, "data_wait": 30.0}, time__core_wait_pct=40.0)
    assert busy.bound == "data" and "beside it: the machine was not free" in busy.why.lower()
    busier = judge({**HEALTHY, "data_wait": 2.0}, time__core_wait_pct=60.0)
    assert busier.bound == "contention" and "it waits for data 15 %" in busier.why


def test_a_wait_that_grows_is_no_step_that_grows() -> None:
    """On a busy machine steps take longer and do no more."""
    growth = {"change": 0.02, "least": 0.018, "first": 0.01, "start": 0.01}
    still = {"change": 0.0, "least": -0.001, "first": 0.01, "start": 0.01}
    assert judge(profile={"growth": {"step": growth, "step_cpu": still}}).bound == "compute"


def test_memory_that_grows_by_little_or_not_for_sure_is_not_told() -> None:
    for least, first in ((60, 400), (70, 900), (-5, 100)):
        growth = {"memory": {"change": 500, "least": least, "first": first}}
        assert judge(profile={"growth": growth}).bound == "compute"


def test_what_grows_is_named_where_it_was_found() -> None:
    growth = {"memory": {"change": 900, "least": 800, "first": 400}}
    growing_list = {"holder": "list in x", "tensors": 1310, "shape": [], "has_graphs": True}
    verdict = judge(profile={"growth": growth, "growing_list": growing_list})
    assert verdict.bound == "host_leak"
    assert "list in x has 1,310 tensors of one number, with their graphs" in verdict.why
    assert verdict.why.endswith("Append loss.item() or loss.detach()")
    plain = judge(
        profile={
            "growth": growth,
            "growing_list": {**growing_list, "shape": [8, 3], "has_graphs": 0},
        }
    )
    assert "has 1,310 tensors of 8x3. Keep fewer of them" in plain.why


def test_shares_of_sampled_phases_are_of_the_steps_own_time() -> None:
    """Phases that come to more or less than the steps took are scaled to them."""
    run = make_run({**HEALTHY, "data_wait": 12.0})
    for name in [n for n in run["metrics"] if n.endswith("_ms")]:
        run["metrics"][name] *= 1.7
    verdict = judge_run(run)
    assert verdict is not None and verdict.share == pytest.approx(12.0 / 23.2, rel=0.01)


def test_files_that_are_written_once_at_the_end_are_no_checkpoints_of_the_steps() -> None:
    run = make_run(HEALTHY, beside={"checkpoint": 8.0})
    assert judge_run(run).bound == "checkpoint"  # type: ignore[union-attr]
    run["profile"]["once_s"] = {"log": 0.1, "checkpoint": 7.5}
    assert judge_run(run).bound == "compute"  # type: ignore[union-attr]


def test_it_stands_first_in_every_report() -> None:
    run = make_run({**HEALTHY, "data_wait": 30.0})
    verdict = judge_run(run)
    assert verdict is not None
    run |= {"name": "night", "status": "FINISHED", "tags": {**run["tags"], **verdict.make_tags()}}
    from rich.console import Console

    console = Console(width=100, record=True, file=io.StringIO())
    console.print(make_terminal_report(run, open_command=""))
    lines = [line for line in console.export_text().splitlines() if line.strip()]
    assert lines[0].startswith("FINISHED night") and lines[1].startswith("Verdict  It waits")
    markdown = make_markdown(run, open_command="")
    assert markdown.splitlines()[1].startswith("It waits for data 73 % of the time")
    assert markdown.index("### Verdict") < markdown.index("### Time")
    html = make_html(run, [], open_command="")
    assert html.index('class="verdict"') < html.index("<h2>")


def test_it_is_the_same_whatever_is_missing() -> None:
    """Records of before, of other versions and of runs that failed have fewer figures."""
    run = make_run({**HEALTHY, "data_wait": 30.0})
    del run["profile"]
    assert judge_run(run).bound == "data"  # type: ignore[union-attr]
    for name in [*run["metrics"]]:
        fewer = {**run, "metrics": {k: v for k, v in run["metrics"].items() if k != name}}
        verdict = judge_run(fewer)
        assert verdict is None or verdict.bound in BOUNDS
    run["metrics"]["time/data_wait_ms"] = float("nan")
    assert judge_run(run) is not None
