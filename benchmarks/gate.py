"""What the gate finds and where it cries wolf. First with drawn noise of 3 %, without and with runs
of a busy machine: how late a slow decay is noticed, and small steps. Then with the noise of real
runs of one training on this machine: repeated in processes of their own, then drawn in blocks, so
that a busy hour stays one, as histories without and with something planted.

`python -m benchmarks.gate [RUNS] [NOISE.jsonl]` repeats each training so often, prints the table
and keeps it in benchmarks/results. NOISE.jsonl: where runs are kept; of those that it holds
already, none is repeated.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.conditions import publish
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.run.gate import (
    CORE_WAIT,
    FIGURES,
    GATES,
    NEW,
    REFERENCE,
    SIGMA,
    SPEEDS,
    Verdict,
    judge_run,
)
from headroom.settings.read_settings import make_config
from headroom.training import trainer
from headroom.training.plan import make_plan

RUNS = 100
HISTORIES, LENGTH, BLOCK, PLANTED_AT, WITHIN = 500, 30, 5, 20, 3
TRAININGS: dict[str, dict[str, Any]] = {
    "mlp on digits, 1 thread": {"train": {"epochs": 200}},
    "cnn on digits, 2 threads": {"model": {"name": "cnn"}, "train": {"epochs": 24}},
}
NOISE, BUSY_RUNS, BUSY_TIMES = 0.03, 0.1, (1.05, 1.5)  # of drawn runs
DRAWN, DRAWN_LENGTH, CLEAN_LENGTH, DECAY_AT = 200, 160, 200, 30
REACH, BEGINNING = 40, 5  # runs that one is compared with, as tracking reads them
NOT_JUDGED = "its speed is not judged"
NOTES = f"""
- {HISTORIES} histories of {LENGTH} runs each, drawn from the real ones in blocks of {BLOCK}. What
  is planted is there from run {PLANTED_AT + 1} on, and has to be told by one of the first {WITHIN};
  or, of a speed, by one of the first {WITHIN} that are judged by theirs.
- alarms: clean histories in which any run is told to be worse, larger or slower.
- spread: the standard deviation that the middle half of the runs has, of the median.
- Drawn runs: {DRAWN} histories of each kind, with a noise of {NOISE:.0%}; where the machine is
  busy, {BUSY_RUNS:.0%} of the runs are {BUSY_TIMES[0]} to {BUSY_TIMES[1]} times slower besides, and
  no figure says so. Each is compared with the {REACH} runs before it, and with those with which
  history began. Figures: fast is the fast step alone, both has samples a second beside it.
"""

Metrics = dict[str, float]


def main(runs: int, kept: Path | None) -> None:
    """Repeat, draw, print, keep."""
    with tempfile.TemporaryDirectory() as scratch:
        file = kept or Path(scratch) / "noise.jsonl"
        publish("gate", "What the gate finds", _report(_noise(runs, file)))


def _noise(runs: int, file: Path) -> dict[str, list[Metrics]]:
    """What each run of each training measured, as they came."""
    found: dict[str, list[Metrics]] = {name: [] for name in TRAININGS}
    for line in file.read_text().splitlines() if file.exists() else ():
        name, metrics = json.loads(line)
        found[name].append(metrics)
    while any(len(of) < runs for of in found.values()):
        for name, of in found.items():
            child = os.fork()  # the parent has imported PyTorch, and never computed
            if not child:
                _train(name, file)
            os.waitpid(child, 0)
            of.append(json.loads(file.read_text().splitlines()[-1])[1])
    return found


def _train(name: str, file: Path) -> None:
    config = make_config({"data": {"source": "digits"}, **TRAININGS[name]})
    data = prepare_dataset(config.data, batch_size=config.train.batch_size, seed=config.train.seed)
    with tempfile.TemporaryDirectory() as folder, file.open("a") as kept:
        facts = trainer.train(
            make_plan(config, detect_best_device("cpu"), data),
            folder=Path(folder),
            log=lambda metrics, step: None,
        )
        kept.write(json.dumps([name, {**facts.metrics, "memory/leaked_mib": 0.0}]) + "\n")
    os._exit(0)


def draw_history(
    slower: Callable[[int], float],
    *,
    seed: int,
    length: int,
    busy: float = 0.0,
    figures: Sequence[str] = SPEEDS,
    ends: bool = True,
) -> list[Verdict]:
    """The verdicts on drawn runs, each after those before it; slower: times, of each run by its
    place. busy: the share of the runs that others slow down. ends: with the first alarm."""
    draw, before, found = random.Random(seed), list[dict[str, Any]](), list[Verdict]()
    for place in range(length):
        times = {name: slower(place) * math.exp(draw.gauss(0, NOISE)) for name in SPEEDS}
        other = draw.uniform(*BUSY_TIMES) if draw.random() < busy else 1.0
        rate, step_ms = SPEEDS
        made = {rate: 1e5 / (times[rate] * other), step_ms: 0.4 * times[step_ms] * other}
        now = {name: made[name] for name in figures}
        near, old = before[:REACH], before[REACH:]
        if not any(run["gate"] == NEW for run in near):
            near += [run for run in old if run["gate"] == NEW][:BEGINNING]
        found.append(judge_run(now, near))
        before.insert(0, {"gate": found[-1].gate, "metrics": now})
        if ends and found[-1].gate in GATES:
            break
    return found


def measure_decay(
    by: float, *, at: int = 0, histories: int = DRAWN, **drawn: Any
) -> tuple[list[float], float]:
    """How many times slower a decay of `by` a run is when it is noticed, of each history; and the
    share of histories in which that is below 1.15."""

    def slower(place: int) -> float:
        return float((1 + by) ** max(0, place - at))

    late = []
    for seed in range(histories):
        found = draw_history(slower, seed=seed, length=DRAWN_LENGTH, **drawn)
        late.append(slower(len(found) - 1) if found[-1].gate in GATES else math.inf)
    return sorted(late), sum(times < 1.15 for times in late) / histories


def measure_alarms(*, histories: int = DRAWN, **drawn: Any) -> float:
    """The share of runs that are told to be slower though nothing is."""
    drawn = {"length": CLEAN_LENGTH, "ends": False, **drawn}
    found = [
        v for seed in range(histories) for v in draw_history(lambda _: 1.0, seed=seed, **drawn)
    ]
    return sum(one.gate in GATES for one in found) / len(found)


def _report_drawn() -> Iterator[str]:
    kinds: list[tuple[str, dict[str, Any]]] = [
        (f"{words}, {'fast' if len(figures) == 1 else 'both'}", {"busy": busy, "figures": figures})
        for words, busy in (("free", 0.0), ("busy", BUSY_RUNS))
        for figures in (SPEEDS[1:], SPEEDS)
    ]
    yield "\n## Drawn runs\n"
    yield "| a decay of | begins at run | machine | noticed below 1.15x | median | 19 of 20 |"
    yield "|:--|--:|:--|--:|--:|--:|"
    for by, at in ((0.005, 0), (0.005, DECAY_AT), (0.01, DECAY_AT), (0.002, DECAY_AT)):
        for words, kind in kinds:
            late, share = measure_decay(by, at=at, **kind)
            words_late = f"{late[DRAWN // 2]:.3f}x | {late[DRAWN * 19 // 20]:.3f}x"
            yield f"| {by:.1%} a run | {at + 1} | {words} | {share:.1%} | {words_late} |"
    yield "\n| a step of | machine | told within 3 runs | 10 | 20 |\n|:--|:--|--:|--:|--:|"
    for percent in (3, 5, 10):
        for words, kind in kinds:
            places: list[float] = []
            for seed in range(DRAWN):
                found = draw_history(
                    lambda at: 1 + percent / 100 * (at >= DECAY_AT),  # noqa: B023 (called here)
                    **{**kind, "seed": seed, "length": DECAY_AT + 20, "ends": False},
                )
                told = [at for at, v in enumerate(found) if at >= DECAY_AT and v.gate in GATES]
                places.append(told[0] - DECAY_AT if told else math.inf)
            shares = [sum(at < within for at in places) / DRAWN for within in (3, 10, 20)]
            yield f"| {percent} % | {words} | " + " | ".join(f"{s:.1%}" for s in shares) + " |"
    yield "\n| nothing is slower | alarms a run |\n|:--|--:|"
    for words, kind in kinds:
        yield f"| {words} | {measure_alarms(**kind):.2%} |"


def _report(noise: Mapping[str, Sequence[Metrics]]) -> Iterator[str]:
    yield NOTES.rstrip()
    yield from _report_drawn()
    for name, runs in noise.items():
        yield f"\n## {name}, {len(runs)} real runs\n"
        yield "| figure | median | spread | furthest off |\n|:--|--:|--:|--:|"
        figures = (*(figure.metric for figure in FIGURES), REFERENCE, CORE_WAIT)
        for metric in (*figures, "val/accuracy", "val/loss"):
            if known := [run[metric] for run in runs if metric in run]:
                yield _spread(metric, known)
        alarms, why, judged_share = _told(runs, lambda run: run)
        yield f"\n{judged_share:.0%} of the runs are judged by their speed.\n"
        yield f"| planted | found within {WITHIN} runs | {WITHIN} judged ones |\n|:--|--:|--:|"
        yield f"| nothing | {len(alarms)} alarms in {HISTORIES} | |"
        for percent in (5, 10, 20, 50):
            planted = _slower(1 + percent / 100)
            shares = [
                len(_told(runs, planted, "slower", only_judged=only)[0]) / HISTORIES
                for only in (False, True)
            ]
            yield f"| {percent} % slower | {shares[0]:.1%} | {shares[1]:.1%} |"
        late = _measure_real_decay(runs)
        yield f"| 0.5 % slower a run, noticed below 1.15x | {late:.1%} | |"
        yield _found("1 MiB leaked a run", runs, _more("memory/leaked_mib", 1.0), "larger")
        yield _found("accuracy 0.01 lower", runs, _more("val/accuracy", -0.01), "worse")
        for words in why[:3]:
            yield f"\nAn alarm: {words}"


def _spread(metric: str, values: Sequence[float]) -> str:
    middle = median(values)
    away = [abs(value / middle - 1) if middle else abs(value) for value in values]
    return f"| {metric} | {middle:.4g} | {SIGMA * median(away):.2%} | {max(away):.1%} |"


def _slower(times: float) -> Callable[[Metrics], Metrics]:
    rate, step_ms = SPEEDS

    def planted(run: Metrics) -> Metrics:
        return {**run, rate: run[rate] / times, step_ms: run[step_ms] * times}

    return planted


def _more(metric: str, by: float) -> Callable[[Metrics], Metrics]:
    return lambda run: {**run, metric: run[metric] + by}


def _found(
    what: str, runs: Sequence[Metrics], planted: Callable[[Metrics], Metrics], gate: str
) -> str:
    return f"| {what} | {len(_told(runs, planted, gate)[0]) / HISTORIES:.1%} | |"


def _measure_real_decay(runs: Sequence[Metrics]) -> float:
    """The share of histories in which a decay of 0.5 % a run is noticed before 1.15 times."""
    draw, noticed = random.Random(0), 0
    for _ in range(HISTORIES):
        before: list[dict[str, Any]] = []
        times, place = 1.0, 0
        while times < 1.15:
            if place % BLOCK == 0:
                at = draw.randrange(len(runs))
            now = _slower(times)(runs[(at + place % BLOCK) % len(runs)])
            verdict = judge_run(now, before[: REACH + BEGINNING])
            before.insert(0, {"gate": verdict.gate, "metrics": now})
            place += 1
            times *= 1.005 if place > PLANTED_AT else 1.0
            if place > PLANTED_AT and verdict.gate == "slower":
                noticed += 1
                break
    return noticed / HISTORIES


def _told(
    runs: Sequence[Metrics],
    planted: Callable[[Metrics], Metrics],
    gate: str = "",
    *,
    only_judged: bool = False,
) -> tuple[list[int], list[str], float]:
    """The histories in which a run came out so, of the first with what is planted; without a gate:
    in which any did, why, and the share of all runs that were judged by their speed. only_judged:
    of those with what is planted others do not count."""
    draw, found, why, judged_runs, seen = random.Random(0), [], [], 0, 0
    for number in range(HISTORIES):
        drawn: list[Metrics] = []
        while len(drawn) < 2 * LENGTH:
            at = draw.randrange(len(runs))
            drawn += [runs[(at + i) % len(runs)] for i in range(BLOCK)]
        before: list[dict[str, Any]] = []
        left = WITHIN
        for place, run in enumerate(drawn if gate else drawn[:LENGTH]):
            now = planted(run) if place >= PLANTED_AT else run
            verdict = judge_run(now, before)
            before.insert(0, {"gate": verdict.gate, "metrics": now})
            is_judged = NOT_JUDGED not in verdict.why
            seen, judged_runs = seen + 1, judged_runs + is_judged
            is_told = verdict.gate == gate and place >= PLANTED_AT
            if is_told or (not gate and verdict.gate in GATES):
                found.append(number)
                why.append(f"run {place + 1}: {verdict.why}")
                break
            left -= gate != "" and place >= PLANTED_AT and (is_judged or not only_judged)
            if not left:
                break
    return found, why, judged_runs / seen


if __name__ == "__main__":
    words = sys.argv[1:]
    main(int(words[0]) if words else RUNS, Path(words[1]) if len(words) > 1 else None)
