"""What finished runs alike have measured, for a process that opens no run: asked of MLflow in a
process of its own, since this one never imports mlflow. It refuses to create anything: a database
that is not there has no past.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.tracking.where import Where

ANSWER_S = 60.0  # longer than MLflow's import on a busy machine; a past is not worth more


def measured(where: Where, alike: str, wanted: Sequence[str]) -> dict[str, float]:
    """The newest values of the wanted metrics among finished runs with the tag `alike`; none where
    MLflow does not answer."""
    if where.database is not None and not where.database.is_file():
        return {}
    order = {"where": where.model_dump(), "alike": alike, "wanted": list(wanted)}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tasks.tracking.query_runs"],
            input=json.dumps(order),
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            cwd=Path(__file__).parent.parent.parent,
            check=False,
        )
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, json.JSONDecodeError, IndexError):
        return {}
    return found
