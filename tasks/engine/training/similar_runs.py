"""What earlier runs of the same training on the same device measured, for decisions that only a
measurement can make well; see Plan.comparable for which runs these are. It refuses to decide
anything itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tasks.engine.forecast.admission import Admission
from tasks.engine.memory.allocation_log import MIB
from tasks.engine.step.verdict import Known

COMPILING = ("time/plain_step_ms", "time/compiled_step_ms", "time/compile_s")
PEAKS = ("memory/run_peak_allocated_mib", "memory/run_peak_reserved_mib")
WANTED = (*COMPILING, *PEAKS, "memory/micro_batch")  # for decisions


@dataclass(frozen=True)
class Past:
    """The newest values of finished runs that are alike, under the names of the run record."""

    metrics: dict[str, float] = field(default_factory=dict)

    def compiling(self) -> Known | None:
        """What compiling cost and gained; None where no run has tried."""
        if not all(name in self.metrics for name in COMPILING):
            return None
        plain_ms, compiled_ms, cost_s = (self.metrics[name] for name in COMPILING)
        return Known(plain_ms / 1000, compiled_ms / 1000, cost_s)

    def peak_bytes(self) -> float | None:
        """The most that tensors held, of the last run that counted it."""
        peak_mib = self.metrics.get("memory/run_peak_allocated_mib")
        return None if peak_mib is None else peak_mib * MIB

    def reserved_bytes(self) -> float | None:
        """The most that the allocator held for them; None where it is not known to have one."""
        reserved_mib = self.metrics.get("memory/run_peak_reserved_mib")
        return None if reserved_mib is None else reserved_mib * MIB

    def micro_batch(self) -> int | None:
        """Rows of the micro-batch that fitted at the end of the last run."""
        rows = self.metrics.get("memory/micro_batch")
        return None if rows is None else max(1, round(rows))


def forecast_figures(
    admission: Admission, past: Past, limit_mib: float | None, has_recorded: bool
) -> dict[str, float]:
    """The forecast with a recorded step where one was recorded, else without."""
    peak_bytes, reserved_bytes = past.peak_bytes(), past.reserved_bytes()
    told = admission.told
    if told is not None:
        told = told.graphed if has_recorded and told.graphed is not None else told
        peak_bytes, reserved_bytes = told.peak_bytes, told.reserved_bytes
    # A forecast judges whole batches; where they don't fit a training judges parts of them.
    most_bytes = math.inf if limit_mib is None else limit_mib * MIB
    found = {
        "memory/predicted_peak_mib": peak_bytes,
        "memory/predicted_reserved_mib": reserved_bytes,
    }
    return {k: min(v, most_bytes) / MIB for k, v in found.items() if v is not None}
