"""Looks at a thread say which line of the user's code it is at, and keep nothing of it."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

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
    list_positions,
)

LOOKS = pytest.mark.skipif(not stack_samples.MAY_LOOK, reason="this Python may crash of a look")
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
    for words, kind in (
        ("x.item()", "read from the device"),
        ("x.cuda()", "copy to the device"),
    ):
        line = find_line(__file__, f'("{words}",')
        assert describe_positions([Place(__file__, line, "test")])[0] == kind
    assert describe_positions([]) == ("code", None)


@LOOKS
def test_the_line_at_which_a_loop_is_most_often_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stack_samples, "EVERY_S", 0.002)
    sampler = StackSampler()
    sampler.start()
    sampler.state = "between"
    time.sleep(0.2)  # this line
    thread = sampler._thread
    sampler.stop()
    (seen,) = (one for one in sampler.summarize().describe()["between"] if one["line"])
    assert seen["line"].startswith("test_stack_samples.py:") and "# this line" in seen["line"]
    assert thread is not None and not thread.is_alive()


@LOOKS
def test_frames_of_any_file_are_read_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "fran\u00e7ais \u6f22.py"
    file.write_text("def deep(n, call):\n    return call() if n == 0 else deep(n - 1, call)\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    me = threading.get_ident()
    positions = names["deep"](30, lambda: list_positions(me))
    mine = [position for position in positions if position.file == str(file)]
    assert [(place.line, place.function) for place in mine] == [(2, "deep")] * 31
    assert list_positions(12345) == []


@LOOKS
def test_looking_at_a_thread_never_reads_what_it_has_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Through `sys._current_frames` it did, where it was interrupted: 'Tensor' object has no
    attribute 'f_code', or a segmentation fault."""
    monkeypatch.setattr(sys, "_current_frames", None)
    interval = sys.getswitchinterval()
    is_over, seen = threading.Event(), []
    me = threading.get_ident()

    def look() -> None:
        while not is_over.is_set():
            seen.append(list_positions(me))

    def fall(n: int) -> int:
        if n % 7 == 6:
            try:
                raise ValueError
            except ValueError:
                return fall(n - 1)
        return fall(n - 1) if n else sum(i for i in range(20))

    looker = threading.Thread(target=look)
    sys.setswitchinterval(1e-5)
    try:
        looker.start()
        until = time.monotonic() + 2
        while time.monotonic() < until:
            fall(60)
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        looker.join()
    assert seen and all(positions for positions in seen)
    assert all(isinstance(place, Place) for positions in seen for place in positions)


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
    looking = samplers[0]._thread
    assert looking is not None
    looking.join(timeout=10)
    assert not looking.is_alive(), "it looks at a thread that has ended"
    samplers[0].stop()


def test_it_ends_with_what_has_made_it() -> None:
    """Of a loop that nobody has ended."""
    before = len(gc.callbacks)
    sampler = StackSampler()
    sampler.start()
    looking = sampler._thread
    assert looking is not None
    del sampler
    looking.join(timeout=10)
    assert not looking.is_alive()
    gc.collect()
    assert len(gc.callbacks) == before


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
