"""What earlier runs alike have measured, asked of MLflow before a run begins. Part of the sending
process. It refuses to be a reason to fail: a store that can't answer has no past.

`python -m tasks.tracking.query_past` answers one question, as JSON, without opening a run.
"""

from __future__ import annotations

import json
import os
import sys

# As in mlflow_sender.py: MLflow's defaults wait four minutes for a server that is away.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")

from mlflow import MlflowClient  # noqa: E402 (it reads the environment when it is imported)
from mlflow.exceptions import MlflowException  # noqa: E402

from tasks.process.redaction import redacted  # noqa: E402
from tasks.tracking.where import Where  # noqa: E402

NEWEST = 20  # runs to look through; each may lack what another has measured


def recall(
    client: MlflowClient, experiment_id: str, alike: str, wanted: list[str]
) -> dict[str, float]:
    """The newest value of each wanted metric among the finished runs with the tag `alike`."""
    query = f"attributes.status = 'FINISHED' and tags.alike = '{alike}'"
    newest = ["attributes.start_time DESC"]
    try:
        runs = client.search_runs([experiment_id], query, max_results=NEWEST, order_by=newest)
    except MlflowException as error:
        print(f"no past: {redacted(str(error))}", file=sys.stderr)
        return {}
    found: dict[str, float] = {}
    for run in runs:
        for name in wanted:
            if name in run.data.metrics:
                found.setdefault(name, run.data.metrics[name])
    return found


def main() -> None:
    """Answer the question on standard input: where, alike, wanted."""
    order = json.load(sys.stdin)
    where = Where(**order["where"])
    try:
        client = MlflowClient(where.tracking_uri)
        experiment = client.get_experiment_by_name(where.experiment)
    except MlflowException as error:
        print(f"no past: {redacted(str(error))}", file=sys.stderr)
        experiment = None
    found = {}
    if experiment is not None:
        found = recall(client, experiment.experiment_id, order["alike"], order["wanted"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
