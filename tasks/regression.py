"""Whether a run came out worse than the last one like it, for a night that nobody watched: the same
model, batch and kind of rows on the same device. It refuses to speak of speed after a short run.
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.engine.base.units import number

LOSS, SPEED, TRAINED_S = "val/loss", "speed/samples_per_s", "time/train_model_s"
COMPARED = (LOSS, SPEED, TRAINED_S)
WORSE, SLOWER = 0.1, 0.2  # of what it was before
LONG_S = 60.0  # a shorter training's speed says little


def regressed(now: Mapping[str, float], before: Mapping[str, float]) -> str:
    """What is worse, in words; empty where nothing is known to be."""
    told = []
    if LOSS in now and LOSS in before and now[LOSS] - before[LOSS] > WORSE * abs(before[LOSS]):
        told.append(f"{LOSS} {number(now[LOSS])} after {number(before[LOSS])}")
    is_long = min(now.get(TRAINED_S, 0.0), before.get(TRAINED_S, 0.0)) >= LONG_S
    if is_long and SPEED in now and now[SPEED] < (1 - SLOWER) * before.get(SPEED, 0.0):
        told.append(f"{now[SPEED]:,.0f} samples/s after {before[SPEED]:,.0f}")
    return "; ".join(told)
