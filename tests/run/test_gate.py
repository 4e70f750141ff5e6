"""A run is told to be slower, larger or worse where that is more than the noise of the last."""

import math
import re
from typing import Any

import pytest

from benchmarks import gate as benchmark
from headroom.base.facts import DataFacts
from headroom.base.names import METRICS
from headroom.run.gate import (
    BUSIEST,
    BUSY,
    CORE_WAIT,
    FIGURES,
    LIMITS,
    LOSS,
    NEEDED_RUNS,
    REFERENCE,
    Verdict,
    compare_with_history,
    compute_gate_key,
    judge_run,
)
from headroom.settings.read_settings import override_config
from headroom.settings.run_config import RunConfig

# Samples a second and the fast step, in ms, of runs of one training on a machine that others use.
NOISE = [
    (70833, 0.679),
    (84302, 0.436),
    (114581, 0.390),
    (105303, 0.396),
    (79433, 0.621),
    (116101, 0.395),
    (110409, 0.398),
    (119001, 0.390),
    (110806, 0.394),
    (67325, 0.770),
    (78275, 0.408),
    (103747, 0.398),
    (95019, 0.403),
    (86587, 0.473),
    (82974, 0.629),
    (81462, 0.425),
    (112120, 0.397),
    (102437, 0.403),
    (104454, 0.398),
    (129144, 0.387),
    (111447, 0.395),
    (87759, 0.396),
    (91466, 0.392),
    (106622, 0.398),
    (78343, 0.422),
    (112038, 0.392),
    (102269, 0.391),
    (108508, 0.392),
    (120587, 0.391),
    (116184, 0.388),
    (105247, 0.393),
    (112868, 0.392),
    (118919, 0.390),
    (122823, 0.392),
    (117396, 0.388),
    (111512, 0.389),
    (101694, 0.388),
    (122480, 0.390),
    (123912, 0.390),
    (114777, 0.389),
    (91936, 0.399),
    (91354, 0.392),
    (123316, 0.392),
    (109679, 0.392),
    (123878, 0.385),
    (92277, 0.391),
    (117416, 0.389),
    (115010, 0.392),
    (67259, 0.822),
    (70693, 0.717),
    (110787, 0.391),
    (96307, 0.398),
    (121175, 0.392),
    (116879, 0.394),
    (96819, 0.397),
    (106997, 0.391),
    (102919, 0.396),
]
QUIET = [(speed, fast) for speed, fast in NOISE if fast < 0.4]
SCORE, LEAKED, PEAK = "val/accuracy", "memory/leaked_mib", "memory/run_peak_allocated_mib"
SPEED, FAST = "speed/samples_per_s", "time/fast_step_ms"


def _run(noise: tuple[float, float], *, slower: float = 1.0, **more: float) -> dict[str, float]:
    speed, fast = noise
    phases = {"time/forward_ms": 0.2, "time/backward_ms": 0.2 * slower}
    found = {SPEED: speed / slower, FAST: fast * slower, PEAK: 1.07, LEAKED: 0.0, SCORE: 0.97}
    return {**found, **phases, **more}


def _verdicts(runs: list[dict[str, float]]) -> list[Verdict]:
    """Of each run, after those before it."""
    before: list[dict[str, Any]] = []
    found = []
    for run in runs:
        found.append(judge_run(run, before))
        before.insert(0, {"gate": found[-1].gate, "metrics": run})
    return found


def _gates(runs: list[dict[str, float]]) -> list[str]:
    return [verdict.gate for verdict in _verdicts(runs)]


def test_real_noise_raises_no_alarm() -> None:
    """One in six of these runs was up to twice as slow, by what the machine did beside it."""
    assert max(fast for _, fast in NOISE) > 1.5 * min(fast for _, fast in NOISE)
    gates = _gates([_run(noise) for noise in NOISE])
    assert gates == ["new"] * NEEDED_RUNS + ["ok"] * (len(NOISE) - NEEDED_RUNS)


def test_five_per_cent_are_found_in_three_quiet_runs() -> None:
    runs = [_run(noise, slower=1.05 if i >= 20 else 1.0) for i, noise in enumerate(QUIET[:23])]
    found = _verdicts(runs)
    assert [one.gate for one in found[5:]] == ["ok"] * 17 + ["slower"]
    assert "as the 2 runs before; backward is 100 % of it" in found[-1].why


@pytest.mark.parametrize(
    ("more", "gate", "why"),
    [
        ({LEAKED: 1.0}, "larger", "1.00 MiB leaked, above the median of the last 20 (0 MiB"),
        ({PEAK: 1.5}, "larger", "peak 1.50 MiB, 40.2 % above the median of the last 20"),
        ({SCORE: 0.96}, "worse", "val/accuracy 0.96, 1.0 % below the median of the last 20 (0.97"),
        ({SCORE: math.nan}, "worse", "val/accuracy nan, below the median"),
        ({SCORE: 0.5, LEAKED: 1.0}, "worse", "MiB leaked"),  # the most serious word, and all of it
        ({SPEED: 9e3, FAST: 4.0}, "slower", "4.00 ms where nothing is in its way"),
        (
            {SPEED: 9e3, FAST: 4.0, CORE_WAIT: BUSIEST + 1},
            "ok",
            "speed is not judged: its threads had",
        ),
        (
            {SPEED: 9e3, FAST: 4.0, CORE_WAIT: BUSIEST},
            "slower",
            "4.00 ms where nothing is in its way",
        ),
        ({SPEED: 9e3, CORE_WAIT: BUSY + 1}, "ok", "within the limits of the last 20"),
        ({SPEED: 9e3, CORE_WAIT: BUSY + 1}, "ok", "its samples/s are not judged: its threads"),
        ({SPEED: 9e3, CORE_WAIT: BUSY}, "slower", "9,000 samples/s, 9"),
        ({SCORE: 0.99, SPEED: 9e6, FAST: 0.1, PEAK: 0.5}, "ok", "within the limits of the last 20"),
    ],
)
def test_one_run_tells_what_no_noise_does(more: dict[str, float], gate: str, why: str) -> None:
    before = [_run(noise) for noise in QUIET[:25]]
    found = _verdicts([*before, _run(QUIET[25], **more)])[-1]
    assert found.gate == gate
    assert why in found.why


def test_a_machine_that_is_slower_itself_is_said_and_judges_no_speed() -> None:
    """Every second run was slower by a tenth, and so was a fixed piece of work beside its steps."""
    slow, usual = {REFERENCE: 0.11}, {REFERENCE: 0.1}
    calm = QUIET[:23]
    runs = [_run(noise, **usual) for noise in calm[:20]]
    both = [[_run(noise, slower=1.1, **slow), _run(noise, **usual)] for noise in calm]
    found = _verdicts([*runs, *sum(both, [])])
    assert {one.gate for one in found[NEEDED_RUNS:]} == {"ok"}
    said = "its speed is not judged: the machine itself took 10 % longer for the same work"
    assert [said in one.why for one in found[20:26]] == [True, False] * 3
    # A training that is slower is found all the same, by the runs that can be judged.
    both = [[_run(noise, slower=1.2, **slow), _run(noise, slower=1.1, **usual)] for noise in calm]
    gates = _gates([*runs, *sum(both[:3], [])])
    assert gates[20:] == ["ok"] * 5 + ["slower"]


def test_a_metric_that_is_better_lower_and_one_that_too_few_have() -> None:
    def run(**more: float) -> dict[str, float]:
        return {SPEED: 1000.0, "val/loss": 0.30, **more}

    assert _gates([*([run()] * 9), run(**{"val/loss": 0.32})])[-1] == "worse"
    assert _gates([*([run()] * 9), run(**{"val/loss": 0.1})])[-1] == "ok"
    assert _gates([*([run()] * 9), run(**{SCORE: 0.1})])[-1] == "ok"
    assert _gates([{}] * 9) == ["new"] * 5 + ["ok"] * 4


def test_history_begins_where_a_person_says_new() -> None:
    run, slow = _run(QUIET[0]), _run(QUIET[0], slower=4.0)
    before = [{"gate": "slower", "metrics": slow}] * 2 + [{"gate": "ok", "metrics": run}] * 9
    assert judge_run(slow, before).gate == "slower"
    before[0] = {"gate": "new", "metrics": slow}
    for number in range(1, NEEDED_RUNS):
        found = judge_run(slow, before)
        assert found.gate == "new" and found.why.startswith(f"{number} of the {NEEDED_RUNS} runs")
        before.insert(0, {"gate": "new", "metrics": slow})
    assert judge_run(slow, before).gate == "ok"
    assert judge_run(_run(QUIET[0], slower=16.0), before).gate == "slower"


def test_runs_that_did_not_pass_are_no_measure_and_no_new_beginning() -> None:
    slow = _run(QUIET[0], slower=4.0)
    found = judge_run(slow, [{"gate": "slower", "metrics": slow}] * 100)
    assert found.gate == "slower" and found.why.startswith("none of the last 100 runs was ok")


def test_without_mlflow_nothing_is_said() -> None:
    found = judge_run(_run(QUIET[0]), None)
    assert found.tags == {"gate.why": "not compared: MLflow could not be asked"}


def test_so_many_good_runs_are_looked_at() -> None:
    runs = [_run(QUIET[0], slower=2.0)] * 9 + [_run(QUIET[0])] * 22
    assert len(_verdicts(runs)[-1].trend[0]["values"]) == 21


@pytest.mark.parametrize("begins_at", [0, 30])
@pytest.mark.parametrize("busy", [0.0, 0.1])
def test_a_slow_decay_is_noticed_before_it_is_a_seventh(begins_at: int, busy: float) -> None:
    """After 100 runs, each half a per cent slower, all were ok: their median had gone along."""
    late, share = benchmark.measure_decay(0.005, at=begins_at, busy=busy, histories=40)
    assert share >= 0.95, late


def test_a_level_that_is_the_best_by_luck_raises_no_alarm() -> None:
    """The best five of 200 runs lie 6 % off by luck alone: as a level each run would be slower."""
    for busy in (0.0, 0.1):
        assert benchmark.measure_alarms(histories=10, busy=busy) <= 0.01


def test_a_small_step_is_told_though_never_three_in_a_row_are_far_off() -> None:
    def step(place: int) -> float:
        return 1.05 if place >= 30 else 1.0

    drawn = [benchmark.draw_history(step, seed=seed, length=60) for seed in range(20)]
    told = [found[-1] for found in drawn if len(found) > 30 and found[-1].gate == "slower"]
    assert len(told) >= 17
    sums = [one.why for one in told if "above the level that it once had (" in one.why]
    assert len(sums) > 8 and re.search(r"summed up over \d+ runs", sums[0])


def test_the_level_is_that_with_which_history_began_however_long_ago() -> None:
    """The 40 runs before were all alike, and all a tenth slower than the first ones."""
    first = [{"gate": "new", "metrics": _run(QUIET[i])} for i in range(NEEDED_RUNS)]
    slow = [{"gate": "ok", "metrics": _run(QUIET[i % 40], slower=1.1)} for i in range(40)]
    now = _run(QUIET[3], slower=1.1)
    assert judge_run(now, slow).gate == "ok"
    found = judge_run(now, [*slow, *first])
    assert found.gate == "slower" and "the level that it once had (" in found.why
    for run in slow[:NEEDED_RUNS]:
        run["gate"] = "new"  # a person has accepted them
    assert judge_run(now, [*slow, *first]).gate == "ok"


def test_what_did_not_pass_names_the_way_to_accept_it() -> None:
    run = {"metrics": _run(QUIET[3], slower=9.0), "tags": {"a": "b"}, "run_id": "0af3"}
    before = [{"gate": "new", "metrics": _run(QUIET[i])} for i in range(9)]
    tags = compare_with_history(run, before)["tags"]
    assert tags["gate"] == "slower" and tags["a"] == "b"
    assert tags["gate.why"].endswith("from now on: python -m flows.runs --accept 0af3")
    tags = compare_with_history({**run, "metrics": _run(QUIET[3])}, before)["tags"]
    assert tags["gate"] == "ok" and "--accept" not in tags["gate.why"]


def test_a_speed_that_is_not_judged_for_nights_is_a_warning() -> None:
    before = [{"gate": "new", "metrics": _run(QUIET[i])} for i in range(9)]
    busy = _run(QUIET[3], **{CORE_WAIT: BUSIEST + 1})
    run = {"metrics": busy, "tags": {"warnings": "one"}, "warnings": ("one",), "run_id": "0af3"}
    for nights in range(2):
        assert compare_with_history(run, before)["tags"]["warnings"] == "one", nights
        before.insert(0, {"gate": "ok", "metrics": busy})
    found = compare_with_history(run, before)
    tags = found["tags"]
    assert tags["gate"] == "ok" and tags["gate.why"].endswith("as in the 2 runs before")
    assert found["warnings"] == tags["warnings"].split("\n")
    said = "one\ngate: the speed is not judged for 3 runs in a row: its threads had no core"
    assert tags["warnings"].startswith(said)


def test_a_loss_that_is_a_tenth_worse_is_told_at_the_same_accuracy() -> None:
    before = [{"gate": "new", "metrics": _run(QUIET[i], **{LOSS: 0.1})} for i in range(9)]
    found = judge_run(_run(QUIET[9], **{LOSS: 0.11}), before)
    assert found.gate == "worse" and found.why.startswith("val/loss 0.11, 10.0 % above the median")
    assert judge_run(_run(QUIET[9], **{LOSS: 0.105}), before).gate == "ok"


def test_the_same_is_all_but_what_it_is_called_and_where_it_is_kept(facts: Any) -> None:
    config, device, data = facts
    name = compute_gate_key(config, device, data)
    for other in ({"run.name": "x"}, {"gate.fail": True}, {"data.cache": "elsewhere"}):
        assert compute_gate_key(override_config(config, other), device, data) == name
    for other in ({"train.seed": 1}, {"optim.lr": 0.5}, {"train.epochs": 1}):
        assert compute_gate_key(override_config(config, other), device, data) != name


@pytest.fixture
def facts() -> tuple[RunConfig, Any, DataFacts]:
    from headroom.data.preparation import prepare_dataset
    from headroom.device.detection import detect_best_device

    config = override_config(RunConfig(), {"data.source": "synthetic", "device.name": "cpu"})
    return config, detect_best_device("cpu"), prepare_dataset(config.data)


def test_the_gate_has_limits_for_what_the_list_of_names_shows_there() -> None:
    shown = [row.name for row in METRICS if any(place.name == "GATE" for place in row.shown)]
    assert [*LIMITS] == [figure.metric for figure in FIGURES]
    assert sorted(LIMITS) == sorted(shown)
