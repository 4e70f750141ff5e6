"""Looks at a thread say which line of the user's code it is at, and keep nothing of it."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from headroom.watch import stack_samples
from headroom.watch.stack_samples import (
    COLLATE,
    DATA,
    WORKERS,
    Place,
    StackSampler,
    describe_positions,
)

FETCH = str(Path(torch.__file__).parent / "utils" / "data" / "_utils" / "fetch.py")
LOADER = str(Path(torch.__file__).parent / "utils" / "data" / "dataloader.py")
MODULE = str(Path(torch.__file__).parent / "nn" / "modules" / "module.py")
OPTIMIZER = str(Path(torch.__file__).parent / "optim" / "adam.py")
MINE = Place(__file__, 10, "mine")


def find_line(file: str, text: str) -> int:
    lines = Path(file).read_text().splitlines()
    return next(at for at, line in enumerate(lines, 1) if text in line)


def test_the_kind_of_work_is_that_of_the_library_which_is_at_work() -> None:
    load = Place(FETCH, find_line(FETCH, "self.dataset[idx] for idx"), "fetch")
    join = Place(FETCH, find_line(FETCH, "self.collate_fn(data)"), "fetch")
    assert describe_positions([MINE, load, MINE]) == (DATA, MINE)
    assert describe_positions([MINE, join, MINE]) == (COLLATE, MINE)
    assert describe_positions([Place(LOADER, 1, "_try_get_data"), MINE])[0] == WORKERS
    inner = Place(MODULE, 1, "_call_impl")
    assert describe_positions([Place(OPTIMIZER, 1, "step"), MINE])[0] == "optimizer"
    assert describe_positions([inner, MINE]) == ("forward", MINE)
    assert describe_positions([inner, load, MINE])[0] == DATA  # a model within the data set
    assert describe_positions([MINE]) == ("code", MINE)
    assert describe_positions([]) == ("code", None)


def test_the_line_at_which_a_loop_is_most_often_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stack_samples, "EVERY_S", 0.002)
    sampler = StackSampler()
    sampler.start()
    sampler.state = "between"
    time.sleep(0.2)  # this line
    sampler.stop()
    (seen,) = (one for one in sampler.summarize().describe()["between"] if one["line"])
    assert seen["line"].startswith("test_stack_samples.py:") and "# this line" in seen["line"]
    assert not any(thread.name == "headroom-looks" for thread in threading.enumerate())


def test_no_object_of_the_loop_is_kept_and_the_thread_ends_with_it() -> None:
    class Thing:
        pass

    seen: list[weakref.ref[Thing]] = []
    samplers: list[StackSampler] = []

    def loop() -> None:
        thing = Thing()
        seen.append(weakref.ref(thing))
        samplers.append(StackSampler())
        samplers[0].start()
        time.sleep(0.2)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert seen[0]() is None
    for _ in range(100):
        if not any(thread.name == "headroom-looks" for thread in threading.enumerate()):
            break
        time.sleep(0.05)
    else:
        raise AssertionError("it looks at a thread that has ended")
    samplers[0].stop()


def test_the_seconds_of_the_collector_are_those_of_the_thread() -> None:
    sampler = StackSampler()
    before = len(gc.callbacks)
    sampler.start()
    rings = [[] for _ in range(50_000)]  # type: ignore[var-annotated]
    for ring in rings:
        ring.append(ring)
    del rings, ring
    began = time.perf_counter()
    gc.collect()
    took_s = time.perf_counter() - began
    other = threading.Thread(target=gc.collect)
    other.start()
    other.join()
    sampler.stop()
    sampler.stop()
    assert 0 < sampler.garbage_s <= 3 * took_s
    assert len(gc.callbacks) == before
    assert sys.getrefcount(sampler) < 10
