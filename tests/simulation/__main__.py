"""`make simulate` plays histories of the record, each from its seed, over several processes: a
million of them take a night on two cores. The first that does not hold ends it, with its seed and
the shortest history that fails too. `--mutants` asks whether planted defects are found.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from tests.simulation.drawing import History
from tests.simulation.histories import play_history, stage
from tests.simulation.mutants import MUTANTS, Mutant, planted
from tests.simulation.shrink import shrink

PORTION = 500  # histories that a process plays before it tells how far it is
MOST_OF_A_MUTANT = 3000


@dataclass
class Played:
    """What a portion of histories came to."""

    histories: int = 0
    calls: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    points: int = 0
    seed: int | None = None  # of the first that failed
    failure: str = ""

    def add(self, other: Played) -> None:
        self.histories += other.histories
        self.calls += other.calls
        self.points += other.points
        self.faults += other.faults


def play_seeds(seeds: Sequence[int]) -> Played:
    """Play the histories of these seeds, up to the first that fails; on the stage."""
    played = Played()
    for seed in seeds:
        try:
            one = play_history(History.draw(seed))
        except Exception as error:
            played.seed, played.failure = seed, describe_failure(error)
            break
        played.histories += 1
        played.calls += one.world.calls
        played.points += sum(map(len, one.truth.points.values()))
        played.faults += Counter(fault.what for fault in one.world.met)
    return played


def describe_failure(error: Exception) -> str:
    """Return what went wrong, in a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def find_failure(history: History) -> str:
    """Return why it fails; empty where it does not."""
    try:
        play_history(history)
    except Exception as error:
        return describe_failure(error)
    return ""


def explain(seed: int, failure: str) -> str:
    """Return the failure with its seed and the shortest history that fails the same way."""
    kind = _make_kind(failure)
    shortest = shrink(History.draw(seed), lambda history: _make_kind(find_failure(history)) == kind)
    return (
        f"seed {seed}: {failure}\nThe shortest history that fails too:\n{shortest}\n"
        f"  {find_failure(shortest)}\nPlay it again with --seed {seed} --histories 1"
    )


def _make_kind(failure: str) -> str:
    """Return a failure without its names and numbers."""
    return re.sub(r"\d+-\d+-\w+|\d+", "#", failure)[:60]


def play_portion(seeds: Sequence[int]) -> Played:
    with stage():
        return play_seeds(seeds)


def play_many(first: int, histories: int, processes: int) -> Played:
    """Play so many histories from a seed on, over processes. Ends with the first that fails."""
    portions = [
        range(at, min(at + PORTION, first + histories))
        for at in range(first, first + histories, PORTION)
    ]
    gc.freeze()
    total, began = Played(), time.monotonic()
    # A process that was forked has none of the threads that play.
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for done, played in enumerate(pool.imap_unordered(play_portion, portions)):
            total.add(played)
            if played.seed is not None:
                total.seed, total.failure = played.seed, played.failure
                return total
            if done % 20 == 19:
                print(f"{total.histories:,} in {time.monotonic() - began:.0f} s", flush=True)
    return total


@dataclass
class Hunt:
    """How a mutant was found."""

    count: int = 0  # the histories that it took; 0: it was not found
    failure: str = ""
    skipped: list[int] = field(default_factory=list)  # seeds that fail without it, too


def hunt(mutant: Mutant, *, first: int, most: int) -> Hunt:
    """Play up to so many histories with the mutant, up to one that fails by it alone."""
    hunted = Hunt()
    with stage():
        for seed in range(first, first + most):
            history = History.draw(seed)
            with planted(mutant):
                failure = find_failure(history)
            if not failure:
                continue
            if not find_failure(history):
                hunted.count, hunted.failure = seed - first + 1, failure
                break
            hunted.skipped.append(seed)
    return hunted


def main(words: Sequence[str]) -> int:
    """Print what was played. Returns 1 where something did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--histories", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, help="of the first; the next ones follow")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--mutants", action="store_true", help="plant defects instead")
    asked = parser.parse_args(words)
    first = random.randrange(10**9) if asked.seed is None else asked.seed
    if asked.mutants:
        return hunt_all(first, asked.processes)
    began = time.monotonic()
    print(f"seeds {first} and on", flush=True)
    played = play_many(first, asked.histories, asked.processes)
    took_s = time.monotonic() - began
    each_ms = 1000 * took_s * asked.processes / max(1, played.histories)
    print(f"{played.histories:,} histories in {took_s:,.0f} s: {each_ms:.1f} ms of a core each")
    print(f"{played.points:,} points promised, {played.calls:,} calls that a fault could meet")
    print("faults: " + ", ".join(f"{what} {n:,}" for what, n in played.faults.most_common()))
    if played.seed is None:
        print("0 lost, 0 doubled, 0 false ends, 0 keys stuck")
        return 0
    with stage():
        print(f"BROKEN: {explain(played.seed, played.failure)}", file=sys.stderr)
    return 1


def hunt_all(first: int, processes: int) -> int:
    """Print after how many histories each mutant was found. Returns 1 where more than one was
    not."""
    gc.freeze()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        call = partial(hunt, first=first, most=MOST_OF_A_MUTANT)
        found = 0
        for mutant, hunted in zip(MUTANTS, pool.imap(call, MUTANTS), strict=True):
            found += hunted.count > 0
            print(f"{hunted.count or 'NOT FOUND':>9}  {mutant.name}: {hunted.failure[:90]}")
            if hunted.skipped:
                print(f"{'':>9}  left out, since they fail without it: {hunted.skipped}")
            sys.stdout.flush()
    print(f"{found} of {len(MUTANTS)} found")
    return 0 if found >= len(MUTANTS) - 1 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
