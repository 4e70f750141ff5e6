"""What a history is, and how it is drawn from its seed: starts of trainings, who cleans up
meanwhile, and what befalls them. Some are scenes, in which happens at once what seldom meets.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.simulation.world import Fault


@dataclass(frozen=True)
class Start:
    """One start of a training."""

    after_s: float = 0.0  # since the one before was over, or was begun
    beside: bool = False  # the one before is not waited for
    key: str = "k"
    by: str = "key"  # key: the run of its key; checkpoint: the one that a checkpoint names; late:
    # the same, which is told after the run has begun
    points: int = 5
    pause_s: float = 1.0
    keeps_every: int = 2  # points, a checkpoint
    ends: str = "done"  # done, fails, stops, left (without a word), gone (and who sends it, too)
    device: bool = False
    waits: bool = True
    asks: int = 1  # so often, where its key is held


@dataclass(frozen=True)
class Sweep:
    """Somebody else who cleans up, or sends a folder."""

    at_s: float  # since that start was asked for
    how: str = "tidy"  # tidy, folder, elsewhere (of other runs' folders)
    start: int = 0  # by its number


@dataclass(frozen=True)
class History:
    """What happens, and what befalls it."""

    seed: int
    starts: tuple[Start, ...] = ()
    sweeps: tuple[Sweep, ...] = ()
    faults: tuple[Fault, ...] = ()
    direct: bool = False  # into an SQLite database, past MLflow's API
    busy: bool = False  # no core is idle
    lies: bool = False  # fsync does nothing
    switch: float = 0.05
    resumes_at_last: bool = False  # the key comes to its end before all is cleaned up

    @classmethod
    def draw(cls, seed: int) -> History:
        """Return the history of this seed."""
        drawn = random.Random(seed)
        starts = tuple(_draw_start(drawn, i) for i in range(drawn.choice((1, 1, 2, 2, 3))))
        sweeps = tuple(
            Sweep(drawn.uniform(0, 30), drawn.choice(SWEEPS))
            for _ in range(drawn.choice((0, 0, 0, 1, 2)))
        )
        faults = [_draw_fault(drawn) for _ in range(drawn.choice((0, 1, 1, 1, 2, 2, 3, 4)))]
        for fault in [f for f in faults if f.what == "full" and drawn.random() < 0.5]:
            nth = fault.nth + drawn.randint(1, drawn.choice((6, 60)))
            faults.append(Fault(fault.at, nth, "room"))
        if is_scene := seed % SCENE == SCENE - 1:
            starts, sweeps, faults = drawn.choice(SCENES)(drawn, faults)
        return cls(
            seed,
            starts,
            sweeps,
            tuple(faults),
            direct=drawn.random() < 0.4,
            busy=drawn.random() < 0.2,
            lies=drawn.random() < 0.1,
            switch=drawn.choice((0.1, 0.4) if is_scene else (0.0, 0.02, 0.1, 0.4)),
            resumes_at_last=drawn.random() < 0.5,
        )


SWEEPS = ("tidy", "tidy", "folder", "elsewhere")
SCENE = 5  # one history of so many is a scene
Scene = tuple[tuple[Start, ...], tuple[Sweep, ...], list[Fault]]


def _draw_crowd(drawn: random.Random, faults: list[Fault]) -> Scene:
    """Draw trainings that want one key, one run's folder or one device."""
    wants = drawn.choice(("key", "key", "folder", "device"))
    starts = []
    for _ in range(drawn.randint(3, 6)):
        how = {
            "key": {"after_s": drawn.uniform(0, 0.05), "pause_s": 0.0, "asks": 60},
            "folder": {
                "after_s": drawn.choice((0.0, 1.0, 2.0)),
                "pause_s": 0.5,
                "by": "checkpoint",
                "points": 6,
            },
            "device": {"after_s": drawn.uniform(0, 1), "pause_s": 0.5, "device": True},
        }[wants]
        one = Start(beside=True, key="k" if wants == "key" else "", points=2, keeps_every=1)
        ends = drawn.choice(("done", "fails"))
        starts.append(replace(one, **{"ends": ends, "waits": False, **how}))  # type: ignore[arg-type]
    return tuple(starts), (), [*faults, Fault("lock", drawn.randint(1, 120), "kill")]


def _draw_left(drawn: random.Random, faults: list[Fault]) -> Scene:
    """Draw a training that was left and is gone on with, and who cleans up at that moment."""
    one = Start(points=drawn.randint(1, 3), pause_s=0.5, keeps_every=1)
    other = replace(
        one,
        after_s=drawn.uniform(0, drawn.choice((0.05, 0.5))),
        by=drawn.choice(("key", "key", "checkpoint", "late")),
        points=6,
        pause_s=drawn.choice((0.5, 3.0)),
        waits=drawn.random() < 0.5,
    )
    sweeps = [
        Sweep(max(0.0, other.after_s + drawn.uniform(-0.02, 0.02)), how, start=1)
        for how in drawn.choices(SWEEPS, k=drawn.randint(1, 3))
    ]
    one = replace(one, ends=drawn.choice(("left", "gone")))
    return (one, other), tuple(sweeps), faults[:1]


def _draw_unwatched(drawn: random.Random, faults: list[Fault]) -> Scene:
    """Draw a training whose sending processes end, and whose clock is set, and who cleans up."""
    one = Start(points=8, pause_s=drawn.choice((0.5, 3.0, 12.0)), keeps_every=2)
    sweeps = [
        Sweep(drawn.uniform(0, 8 * one.pause_s), how)
        for how in drawn.choices(SWEEPS, k=drawn.randint(1, 3))
    ]
    set_s, ends_s = drawn.choice((-86400.0, -5.0, 3600.0)), drawn.choice((0.5, 5.0, 40.0))
    more = [
        Fault("sleep", drawn.randint(1, 8), "clock", set_s),
        Fault("sleep", drawn.randint(1, 8), "no memory", ends_s),
    ]
    return (one,), tuple(sweeps), [*faults[:1], *drawn.sample(more, k=drawn.randint(1, 2))]


def _draw_regrown(drawn: random.Random, faults: list[Fault]) -> Scene:
    """Draw a training that goes on after the power was cut, perhaps twice, or without MLflow."""
    starts = [
        Start(
            points=drawn.randint(2, 8),
            pause_s=drawn.choice((0.0, 0.5, 3.0)),
            keeps_every=1,
            by=drawn.choice(("key", "key", "checkpoint")),
            waits=drawn.random() < 0.5,
        )
        for _ in range(drawn.randint(2, 3))
    ]
    cuts = [
        Fault(at, drawn.randint(1, most), "power")
        for at, most in drawn.choices((("sleep", 12), ("server", 30), ("write", 60)), k=2)
    ]
    if drawn.random() < 0.5:
        nth = drawn.randint(5, 30)
        cuts = [Fault("server", nth, "power"), Fault("server", nth + 1, "away", 40.0)]
        return tuple(starts), (), cuts
    return tuple(starts), (), [*faults[:1], *cuts[: drawn.randint(1, 2)]]


def _draw_refused(drawn: random.Random, faults: list[Fault]) -> Scene:
    """Draw a training that is gone on with, when the disk is full for a moment."""
    one = Start(points=2, pause_s=0.0, keeps_every=1, ends=drawn.choice(("fails", "left", "stops")))
    other = replace(one, by=drawn.choice(("key", "checkpoint", "late")), ends="done")
    nth, amount = drawn.randint(10, 40), drawn.choice((0, drawn.randint(1, 600)))
    full = Fault("rename", nth, "full", amount)
    return (one, other), (), [full, Fault("rename", nth + drawn.randint(1, 6), "room")]


SCENES = (_draw_crowd, _draw_left, _draw_unwatched, _draw_regrown, _draw_refused)


def _draw_start(drawn: random.Random, index: int) -> Start:
    return Start(
        after_s=drawn.choice((0.0, 0.1, 3.0, 40.0)),
        beside=drawn.random() < 0.25,
        key=drawn.choice(("k", "k", "k", "other", "")),
        by=drawn.choice(("key", "key", "checkpoint", "late")),
        points=drawn.randint(1, 8),
        pause_s=drawn.choice((0.0, 0.0, 0.5, 3.0, 12.0)),
        keeps_every=drawn.choice((1, 2, 3, 100)),
        ends=drawn.choice(("done", "done", "fails", "stops", "left")),
        device=drawn.random() < 0.4,
        waits=drawn.random() < 0.5,
    )


# How often each is drawn, at which calls, up to which of them, and how much of it there is.
KINDS: tuple[tuple[int, str, tuple[tuple[str, int], ...]], ...] = (
    (6, "kill", (("any", 900), ("training", 300), ("sender", 500), ("rename", 40), ("lock", 40))),
    (3, "kill", (("server", 40), ("fsync", 4), ("write", 60), ("tidy", 150))),
    (4, "kill after", (("server", 40), ("write", 60), ("rename", 40))),
    (3, "kill in it", (("write", 60),)),
    (3, "kill all", (("any", 900), ("server", 40), ("write", 60), ("rename", 40))),
    (4, "power", (("any", 900), ("server", 40), ("write", 60), ("rename", 40))),
    (3, "full", (("write", 60), ("training", 300), ("any", 900))),
    (4, "away", (("server", 40),)),
    (4, "lost", (("server", 40),)),
    (4, "dropped", (("server", 40),)),
    (3, "twice", (("server", 40),)),
    (3, "clock", (("training", 300), ("any", 900))),
    (2, "no memory", (("sender", 500), ("any", 900))),
    (2, "pause", (("sender", 500), ("any", 900), ("lock", 40))),
)
_WEIGHTS = [weight for weight, _, _ in KINDS]


def _draw_fault(drawn: random.Random) -> Fault:
    _, what, places = drawn.choices(KINDS, _WEIGHTS)[0]
    at, most = drawn.choice(places)
    amount = {
        "kill in it": lambda: drawn.random(),
        "full": lambda: drawn.choice((0, drawn.randint(1, 600))),
        "away": lambda: drawn.choice((0.5, 5.0, 40.0, 400.0)),
        "clock": lambda: drawn.choice((-86400.0, -3600.0, -5.0, 5.0, 3600.0, 86400.0)),
        "no memory": lambda: drawn.choice((0.5, 5.0, 40.0)),
        "pause": lambda: drawn.choice((0.01, 1.0, 20.0)),
    }.get(what, lambda: 0.0)()
    return Fault(at, drawn.randint(1, most), what, amount)
