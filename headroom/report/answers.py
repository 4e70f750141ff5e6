"""What a run is to a program that asks by --json; docs/answers.schema.json has its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headroom.report.verdict import BOUND, WHY


def describe_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run that has ended, of what its log says at its end."""
    tags: Mapping[str, str] = run.get("tags") or {}
    return {
        "run_id": run.get("run_id") or None,
        "name": run.get("name", ""),
        "status": run.get("status", ""),
        "error": run.get("error") or None,
        "stopped": run.get("stopped") or None,
        "device": tags.get("device"),
        "bound": tags.get(BOUND),
        "why": tags.get(WHY),
        "gate": tags.get("gate"),
        "gate_why": tags.get("gate.why"),
        "metrics": dict(run.get("metrics") or {}),
    }
