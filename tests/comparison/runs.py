"""Runs as MLflow would tell them, for tests that need no training."""

from typing import Any

from headroom.comparison.run_groups import MeasuredRun


def run(
    id: str,
    *,
    speed: float = 1000.0,
    batch: int = 100,
    phases: dict[str, float] | None = None,
    memory: dict[str, float] | None = None,
    tags: dict[str, str] | None = None,
    status: str = "FINISHED",
    metrics: dict[str, float] | None = None,
    **params: Any,
) -> MeasuredRun:
    """phases: ms of a step. memory: MiB by owner; the peak is their sum."""
    measured = {
        "speed/samples_per_s": speed,
        "speed/steps_per_s": speed / batch,
        **{f"time/{name}_ms": value for name, value in (phases or {}).items()},
        **{f"memory/{name}_mib": value for name, value in (memory or {}).items()},
        **(metrics or {}),
    }
    if memory is not None:
        measured["memory/run_peak_allocated_mib"] = sum(memory.values())
    asked = {name.replace("__", "."): str(value) for name, value in params.items()}
    return MeasuredRun(
        run_id=id,
        name=id,
        status=status,
        params=asked,
        tags={"device": "cpu", **(tags or {})},
        metrics=measured if status == "FINISHED" else {},
        error="" if status == "FINISHED" else "memory ran out",
        recent_speeds=[speed] * 3,
    )
