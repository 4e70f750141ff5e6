"""A run is told to be worse than the one before where it is by more than chance."""

import pytest

from tasks.regression import LOSS, SPEED, TRAINED_S, regressed

LONG = {LOSS: 0.30, SPEED: 1000.0, TRAINED_S: 60.0}


@pytest.mark.parametrize(
    ("now", "before", "told"),
    [
        ({}, LONG, ""),
        (LONG, {}, ""),
        (LONG, LONG, ""),
        ({**LONG, LOSS: 0.32, SPEED: 820.0}, LONG, ""),
        ({**LONG, LOSS: 0.34}, LONG, "val/loss 0.34 after 0.3"),
        ({LOSS: -1.0}, {LOSS: -1.2}, "val/loss -1 after -1.2"),
        ({LOSS: -1.2}, {LOSS: -1.0}, ""),
        ({**LONG, SPEED: 790.0}, LONG, "790 samples/s after 1,000"),
        ({**LONG, SPEED: 790.0, TRAINED_S: 59.0}, LONG, ""),
        ({**LONG, SPEED: 790.0}, {**LONG, TRAINED_S: 59.0}, ""),
        ({**LONG, LOSS: 1.0, SPEED: 1.0}, LONG, "val/loss 1 after 0.3; 1 samples/s after 1,000"),
        ({LOSS: float("nan")}, LONG, ""),
    ],
)
def test_a_tenth_more_loss_or_a_fifth_less_speed_of_a_long_run(
    now: dict[str, float], before: dict[str, float], told: str
) -> None:
    assert regressed(now, before) == told
