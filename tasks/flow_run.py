"""What Prefect knows of this run, as tags; and the report, as an artifact in Prefect's UI."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.runtime import deployment, flow_run
from prefect.settings import PREFECT_API_URL

from tasks.engine import report
from tasks.prefect_server import is_temporary
from tasks.redaction import link


def describe() -> dict[str, str]:
    """Tags that lead from MLflow to this flow run; empty outside of one.

    From here on Prefect's UI shows what the tasks log: by default a logger passes warnings only.
    """
    logging.getLogger("tasks").setLevel(logging.INFO)
    if not flow_run.id:
        return {}
    found = {"prefect.flow_run_id": flow_run.id, "prefect.deployment": deployment.name}
    if not is_temporary(PREFECT_API_URL.value() or ""):
        found["prefect.flow_run_url"] = link(flow_run.ui_url or "")
    return {k: str(v) for k, v in found.items() if v}


def publish(run: Mapping[str, Any]) -> None:
    """Put the report where Prefect's UI shows it."""
    text = report.markdown(run, open_command=run["open_command"])
    create_markdown_artifact(text, key=f"run-{run['run_id']}", description=run["name"])
