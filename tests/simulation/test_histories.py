"""Half of the histories of the record that a run of the tests plays, each from its seed, and those
that once did not hold. The other half is test_more_histories.py's: two processes share them."""

import pytest

from tests.simulation.__main__ import explain, find_failure, play_seeds
from tests.simulation.drawing import KINDS, History, Start, Sweep
from tests.simulation.histories import stage
from tests.simulation.world import Fault

PORTION = 2_500  # histories of one test
HALF = 10_000


@pytest.mark.parametrize("first", range(0, HALF, PORTION))
def test_nothing_is_lost_doubled_falsely_ended_or_stuck(first: int) -> None:
    with stage():
        played = play_seeds(range(first, first + PORTION))
        assert played.seed is None, explain(played.seed, played.failure)
    assert played.histories == PORTION
    assert played.faults.keys() >= {what for _, what, _ in KINDS}
    assert min(played.faults.values()) > PORTION // 200, played.faults  # each kind befell many


# What the simulation found: the shortest history of each, and what was wrong.
ONCE_BROKEN = {
    "a power cut took the end of a finished run, which then said KILLED": History(
        seed=11,
        starts=(
            Start(after_s=40.0, key="", points=3, pause_s=3.0, keeps_every=1),
            Start(key="other", points=1, pause_s=0.0, keeps_every=1, waits=False),
        ),
        sweeps=(Sweep(at_s=0.9024776767436571),),
        faults=(Fault("write", 31, "power"),),
        direct=True,
        switch=0.4,
    ),
    "a power cut took sent.json, and MLflow got a second run": History(
        seed=12,
        starts=(
            Start(key="k", points=7, pause_s=0.0, keeps_every=1, device=True, waits=False),
            Start(key="", points=1, pause_s=0.0, keeps_every=1),
        ),
        faults=(Fault("write", 44, "power"),),
        switch=0.0,
    ),
    "a power cut emptied the log of a young run, which said RUNNING for ever": History(
        seed=57,
        starts=(Start(points=6, pause_s=3.0, keeps_every=1, waits=False),),
        faults=(Fault("write", 25, "power"),),
        switch=0.4,
    ),
    "who took away a run that a request made twice was killed before it was gone": History(
        seed=202370,
        starts=(
            Start(points=7, pause_s=0.5, keeps_every=1, waits=False),
            Start(key="", points=1, pause_s=0.0, keeps_every=1),
        ),
        faults=(Fault("server", 2, "twice"), Fault("server", 24, "kill")),
        switch=0.0,
    ),
    "a power cut took how a run began, and what went on with it was never sent": History(
        seed=303615,
        starts=(
            Start(points=1, pause_s=0.0, keeps_every=1, waits=False),
            Start(points=8, pause_s=0.0, keeps_every=1, waits=False),
        ),
        faults=(Fault("write", 12, "power"), Fault("server", 1, "away", 40.0)),
        switch=0.4,
    ),
    "a request that was asked again made two runs": History(
        seed=158,
        starts=(Start(key="", points=1, pause_s=0.0, keeps_every=1),),
        faults=(Fault("server", 3, "twice"),),
        switch=0.0,
    ),
    "steps were there twice, where the log after a power cut had come further": History(
        seed=2006454,
        starts=(
            Start(key="k", points=5, pause_s=3.0, keeps_every=1),
            Start(key="k", points=6, pause_s=3.0, keeps_every=1, waits=False),
            Start(key="k", points=1, pause_s=0.0, keeps_every=1, waits=False),
        ),
        faults=(
            Fault("rename", 35, "kill"),
            Fault("write", 22, "power"),
            Fault("server", 22, "power"),
        ),
        switch=0.4,
    ),
    "a full disk kept a run from going on, and a sweep from elsewhere took its end": History(
        seed=2045283,
        starts=(
            Start(key="other", points=1, pause_s=0.0, keeps_every=1),
            Start(key="other", by="checkpoint", points=1, pause_s=0.0, keeps_every=1),
        ),
        sweeps=(Sweep(at_s=23.726634759806586, how="elsewhere"),),
        faults=(Fault("any", 323, "full"),),
        switch=0.0,
    ),
    "a sweep from elsewhere and who sent its end ended it in one instant": History(
        seed=9753832,
        starts=(Start(key="other", points=1, pause_s=0.0, keeps_every=1),),
        sweeps=(
            Sweep(at_s=25.702143162777922, how="elsewhere"),
            Sweep(at_s=25.650110091905436, how="tidy"),
        ),
        faults=(Fault("server", 1, "away", 0.5),),
        switch=0.0,
    ),
    "a sweep from elsewhere guessed why it ended, and that stayed": History(
        seed=9602995,
        starts=(Start(key="k", points=2, pause_s=3.0, keeps_every=1, device=True, waits=False),),
        sweeps=(Sweep(at_s=13.74146169368445, how="elsewhere"),),
        faults=(Fault("server", 16, "away", 40.0),),
        switch=0.0,
    ),
    "a guess of why it ended stayed where a full disk kept its end": History(
        seed=9887449,
        starts=(
            Start(key="k", points=1, pause_s=0.0, keeps_every=1, ends="left"),
            Start(
                after_s=0.00488014006214893,
                key="k",
                points=6,
                pause_s=0.0,
                keeps_every=1,
                waits=False,
            ),
        ),
        sweeps=(Sweep(at_s=0.01503301918218906, how="elsewhere", start=1),),
        faults=(Fault("training", 171, "full", 53),),
        switch=0.0,
    ),
    "a power cut took log and sent.json, and steps were there twice": History(
        seed=395,
        starts=(
            Start(key="k", points=6, pause_s=0.0, keeps_every=1, waits=False),
            Start(key="", points=4, pause_s=0.0, keeps_every=1, waits=False),
        ),
        faults=(Fault("server", 29, "power"), Fault("fsync", 1, "kill")),
        switch=0.0,
        resumes_at_last=True,
    ),
    "a power cut took start.json, and its folder took itself for a copy: nothing was sent": History(
        seed=200592,
        starts=(
            Start(key="", points=8, pause_s=3.0, keeps_every=1),
            Start(key="", by="checkpoint", points=7, pause_s=0.0, keeps_every=1, waits=False),
        ),
        faults=(Fault("server", 32, "lost"), Fault("server", 38, "power")),
        switch=0.0,
    ),
    "a power cut took the log, and of the one that grew in its place nothing was sent": History(
        seed=502011,
        starts=(
            Start(key="k", points=1, pause_s=3.0, keeps_every=1),
            Start(key="k", points=5, pause_s=0.0, keeps_every=1),
        ),
        faults=(Fault("server", 6, "power"),),
        switch=0.1,
    ),
    "a power cut took the newest begin, and its mark was taken for another copy's": History(
        seed=700865,
        starts=(
            Start(key="k", points=1, pause_s=0.0, keeps_every=1, ends="stops"),
            Start(key="k", points=5, pause_s=3.0, keeps_every=1, waits=False),
            Start(key="k", by="late", points=4, pause_s=3.0, keeps_every=1),
        ),
        faults=(Fault("server", 12, "kill after"), Fault("any", 849, "power")),
        switch=0.0,
    ),
    "a full disk let no run be gone on with, and the new one was told as the old one": History(
        seed=400225,
        starts=(
            Start(key="k", points=8, pause_s=0.0, keeps_every=1),
            Start(
                key="k", by="late", points=1, pause_s=0.0, keeps_every=1, ends="fails", device=True
            ),
        ),
        faults=(Fault("any", 386, "full", 72), Fault("any", 403, "room")),
        switch=0.0,
    ),
    "a power cut took the name of a log whose end was on the disk": History(
        seed=10386,
        starts=(
            Start(key="", points=3, pause_s=3.0, keeps_every=1, waits=False),
            Start(key="k", points=1, pause_s=0.0, keeps_every=1, waits=False),
        ),
        faults=(Fault("server", 28, "power"), Fault("server", 8, "away", 400.0)),
        switch=0.1,
    ),
    "who asked for a sweep was killed, and what sweeps took nothing for an order": History(
        seed=18821,
        starts=(
            Start(points=6, pause_s=0.0, keeps_every=1, waits=False),
            Start(points=1, pause_s=3.0, keeps_every=1, waits=False),
        ),
        sweeps=(Sweep(at_s=0.7331279505908517),),
        faults=(Fault("any", 335, "kill"),),
        switch=0.0,
    ),
    "a power cut took steps, and the time of the start alone was compared with MLflow's": History(
        seed=21213,
        starts=(
            Start(points=3, pause_s=0.0, keeps_every=1, ends="fails", waits=False),
            Start(after_s=40.0, beside=True, points=8, pause_s=3.0, keeps_every=1, ends="left"),
            Start(points=8, pause_s=0.0, keeps_every=1),
        ),
        faults=(Fault("rename", 38, "power"),),
        switch=0.0,
    ),
    "a run was taken back, the answer was lost, and the deleted run was gone on with": History(
        seed=4277,
        starts=(
            Start(points=1, pause_s=0.0, keeps_every=1, waits=False),
            Start(by="late", points=1, pause_s=0.0, keeps_every=1),
        ),
        faults=(Fault("server", 22, "lost"),),
        switch=0.0,
    ),
    "an end that another process wrote meanwhile was cut off with what was no half a line": History(
        seed=3525,
        starts=(
            Start(after_s=40.0, points=4, pause_s=0.0, keeps_every=1, ends="left"),
            Start(by="checkpoint", points=1, pause_s=0.0, keeps_every=1, waits=False),
        ),
        sweeps=(Sweep(at_s=6.551078513722494),),
        faults=(Fault("server", 10, "kill all"),),
        switch=0.4,
    ),
    "a disk that lies lost a folder's newest mark, which the log and MLflow had": History(
        seed=3033909,
        starts=(
            Start(points=6, pause_s=0.0, keeps_every=1),
            Start(by="checkpoint", points=6, pause_s=3.0, keeps_every=1, waits=False),
            Start(points=1, pause_s=0.0, keeps_every=1),
        ),
        faults=(Fault("server", 28, "power"), Fault("server", 29, "away", 40.0)),
        lies=True,
        switch=0.4,
    ),
    "who took a run back was killed, and the run of its folder was gone on with": History(
        seed=4005190,
        starts=(
            Start(points=1, pause_s=12.0, keeps_every=1, waits=False),
            Start(by="late", points=1, pause_s=0.0, keeps_every=1),
            Start(points=6, pause_s=0.0, keeps_every=1),
        ),
        faults=(Fault("server", 25, "lost"), Fault("rename", 28, "kill after")),
        switch=0.0,
    ),
    "in place of a run that was taken back another was made, and then one more": History(
        seed=4213706,
        starts=(
            Start(points=1, pause_s=0.0, keeps_every=1),
            Start(by="late", points=1, pause_s=0.0, keeps_every=1),
            Start(points=1, pause_s=0.0, keeps_every=1, ends="fails", waits=False),
        ),
        faults=(Fault("rename", 27, "kill after"),),
        switch=0.0,
        resumes_at_last=True,
    ),
    "who was late told the end that it knew, of a run that was gone on with since": History(
        seed=4106379,
        starts=(
            Start(points=1, pause_s=0.0, keeps_every=1, ends="fails", waits=False, asks=60),
            Start(points=1, pause_s=0.0, keeps_every=1, waits=False, asks=60),
        ),
        faults=(Fault("server", 2, "away", 0.5), Fault("sender", 36, "pause", 20.0)),
        switch=0.0,
    ),
    "who was stopped while it shared a lock was waited for a thousand times a second": History(
        seed=4209349,
        starts=(
            Start(points=1, pause_s=0.5, keeps_every=1, ends="left"),
            Start(after_s=0.055546129175730374, points=1, pause_s=0.0, keeps_every=1, waits=False),
        ),
        faults=(Fault("any", 148, "pause", 20.0),),
        switch=0.0,
    ),
    "a power cut took which of two runs it was, and the empty one was gone on with": History(
        seed=4610686,
        starts=(
            Start(key="", points=8, pause_s=12.0, keeps_every=1, device=True, waits=False),
            Start(
                key="", by="late", points=1, pause_s=0.0, keeps_every=1, ends="left", waits=False
            ),
            Start(
                after_s=0.1,
                key="",
                by="checkpoint",
                points=1,
                pause_s=0.0,
                keeps_every=1,
                waits=False,
            ),
        ),
        faults=(Fault("server", 2, "twice"), Fault("rename", 18, "power")),
        switch=0.0,
    ),
    "of a refused run's sending process that was just replaced the pipe was closed": History(
        seed=9038846,
        starts=(
            Start(key="other", points=2, pause_s=12.0, keeps_every=1, ends="stops", waits=False),
            Start(key="other", points=1, pause_s=0.0, keeps_every=1, device=True, waits=False),
            Start(points=1, pause_s=0.0, keeps_every=1, waits=False),
        ),
        sweeps=(Sweep(at_s=10.923718010823979, how="elsewhere", start=0),),
        faults=(Fault("training", 117, "full", 317), Fault("sender", 165, "no memory", 40.0)),
        switch=0.4,
    ),
}


@pytest.mark.parametrize("what", ONCE_BROKEN)
def test_what_was_broken_once_holds(what: str) -> None:
    with stage():
        assert find_failure(ONCE_BROKEN[what]) == ""


def test_a_history_is_played_the_same_each_time() -> None:
    with stage():
        for seed in range(20):
            one, other = play_seeds([seed]), play_seeds([seed])
            assert one == other
