"""Which way of taking a step was chosen and why, and what earlier runs have measured of the ways.
What was not measured is absent.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """What was chosen and why, for the run. Seconds are None where not measured."""

    compiled: str  # no, graph, default, max, default+graph, max+graph
    reason: str
    plain_step_s: float | None = None
    compiled_step_s: float | None = None
    cost_s: float | None = None

    def metrics(self) -> dict[str, float]:
        """Under the names of the run record."""
        found = {
            "time/plain_step_ms": _ms(self.plain_step_s),
            "time/compiled_step_ms": _ms(self.compiled_step_s),
            "time/compile_s": self.cost_s,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Known:
    """What an earlier run of the same model, batch and device measured."""

    plain_step_s: float
    compiled_step_s: float
    cost_s: float


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else 1000 * value_s
