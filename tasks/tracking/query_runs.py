"""What is asked of MLflow of runs that exist: what earlier runs alike have measured, before a run
begins, and what several have, to compare them; and the run that a comparison is kept in. A past is
no reason to fail: a store that can't answer has none.

`python -m tasks.tracking.query_runs` answers one question of the past, as JSON, without opening a
run. No process that trains imports it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

# As in mlflow_sender.py: MLflow's defaults wait four minutes for a server that is away.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")

from mlflow import MlflowClient  # noqa: E402 (it reads the environment when it is imported)
from mlflow.entities import Param, Run, RunTag  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE  # noqa: E402

from tasks.process.redaction import redacted  # noqa: E402
from tasks.tracking import mlflow_store  # noqa: E402
from tasks.tracking.where import TrackingError, Where  # noqa: E402

NEWEST = 20  # runs to look through; each may lack what another has measured
HISTORY = 40  # runs that one is compared with, and those that did not pass; 7 ms each
COMPARISON = "comparison"  # the tag of a run that holds others: how many
PAGE = 1_000
NEEDED = "speed/samples_per_s"
FULL_LETTERS = 7900  # of a tag
MISSING = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # of MLflow's errors
P = ParamSpec("P")
T = TypeVar("T")


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


def _explained(
    asks: Callable[Concatenate[Comparisons, P], T],
) -> Callable[Concatenate[Comparisons, P], T]:
    """What any store raises, in a sentence: as TrackingError."""

    @functools.wraps(asks)
    def told(self: Comparisons, *args: P.args, **named: P.kwargs) -> T:
        try:
            return asks(self, *args, **named)
        except TrackingError:
            raise
        except Exception as error:
            raise TrackingError(mlflow_store.explained(error, self.where)) from error

    return told


def history(client: MlflowClient, experiment_id: str, of: str) -> list[dict[str, Any]] | None:
    """The gate and the metrics of the finished runs with the tag `gate.of`, the newest first; None
    from a store that can't answer."""
    query, newest = f"attributes.status = 'FINISHED' and tags.`gate.of` = '{of}'", "start_time DESC"
    try:
        runs = client.search_runs([experiment_id], query, max_results=HISTORY, order_by=[newest])
    except Exception as error:  # sqlite's, the network's, the server's
        print(f"no history: {redacted(str(error))}", file=sys.stderr)
        return None
    told = [(run.data.tags.get("gate"), run.data.metrics) for run in runs]
    return [{"gate": gate, "metrics": metrics} for gate, metrics in told if gate]


class Comparisons:
    """The runs of one experiment."""

    def __init__(self, where: Where, experiment: str | None = None, *, makes: bool = True) -> None:
        """makes: the experiment, where it is new. Raises TrackingError."""
        self.where = where.model_copy(update={"experiment": experiment}) if experiment else where
        self._open(makes)

    @_explained
    def _open(self, makes: bool) -> None:
        name = self.where.experiment
        if not makes and not MlflowClient(self.where.tracking_uri).get_experiment_by_name(name):
            raise TrackingError(f"run.experiment: {name!r} is not there; nothing has run in it")
        self.client, self.experiment_id = mlflow_store.open_experiment(self.where)

    @_explained
    def begin(self, run_id: str, *, name: str, count: int, tags: Mapping[str, str]) -> str:
        """The id of the run that holds the others: a new one, or that one, begun again."""
        tags = {**tags, COMPARISON: str(count)}
        if run_id:
            self.client.log_batch(run_id, tags=[RunTag(k, v) for k, v in tags.items()])
            self.client.update_run(run_id, status="RUNNING")
            return run_id
        run = self.client.create_run(self.experiment_id, run_name=name, tags=tags)
        return str(run.info.run_id)

    def tag(
        self, run_id: str, tags: Mapping[str, str], params: Mapping[str, str] | None = None
    ) -> None:
        """What is known of a run from now on. Where MLflow is away it is said, and no more: what
        goes on may have hours to go."""
        try:
            self.client.log_batch(
                run_id,
                tags=[RunTag(name, value[:FULL_LETTERS]) for name, value in tags.items()],
                params=[Param(name, value) for name, value in (params or {}).items()],
            )
        except Exception as error:  # of any store
            print(mlflow_store.explained(error, self.where), file=sys.stderr)

    @_explained
    def end(self, run_id: str, *, status: str, text: str = "", files: Sequence[Path] = ()) -> None:
        for file in files:
            self.client.log_artifact(run_id, str(file), "plots" if file.suffix == ".png" else None)
        if text:
            self.client.set_tag(run_id, "mlflow.note.content", text[:FULL_LETTERS])
        self.client.set_terminated(run_id, status)

    @_explained
    def runs(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """What MLflow has of these. Raises TrackingError with every one that is no training."""
        found, problems, store = [], [], redacted(self.where.tracking_uri)
        for run_id in ids:
            try:
                run = self.client.get_run(run_id)
                if run.info.lifecycle_stage == "deleted":
                    raise MlflowException("deleted", INVALID_PARAMETER_VALUE)
            except MlflowException as error:
                if error.error_code not in MISSING:
                    raise
                problems.append(f"--runs {run_id[:80]}: no such run in {store}, or deleted")
                continue
            if _is_training(run):
                found.append(_told(run))
            else:
                problems.append(f"--runs {run_id[:80]}: is no training that tells {NEEDED}")
        if problems:
            raise TrackingError("\n".join(problems))
        return found

    @_explained
    def newest(self, *, last: int | None, query: str = "") -> list[dict[str, Any]]:
        """The trainings of the experiment, the oldest first: so many of the newest, of those that
        MLflow's query finds. Raises TrackingError for a query that MLflow refuses."""
        found = []
        for run in self._searched(query):
            if _is_training(run) and COMPARISON not in run.data.tags:
                found.append(_told(run))
                if len(found) == last:
                    break
        return found[::-1]

    def _searched(self, query: str) -> Iterator[Run]:
        token = None
        while True:
            try:
                page = self.client.search_runs(
                    [self.experiment_id],
                    query,
                    max_results=PAGE,
                    order_by=["attributes.start_time DESC"],
                    page_token=token,
                )
            except MlflowException as error:
                if error.error_code not in MISSING:
                    raise
                raise TrackingError(f"--filter {query[:80]}: {error.message[:300]}") from None
            yield from page
            token = page.token
            if not token:
                return

    @_explained
    def series(self, run_id: str, name: str, *, most: int) -> list[tuple[int, int, float]]:
        """Step, Unix ms and value of a metric, by step, thinned to about `most` points."""
        points = {
            point.step: (point.step, point.timestamp, point.value)
            for point in self.client.get_metric_history(run_id, name)
        }
        found = [points[step] for step in sorted(points)]
        return found[:: -(-len(found) // most) or 1]


def _is_training(run: Run) -> bool:
    return NEEDED in run.data.metrics or (
        run.info.status != "FINISHED" and "device" in run.data.tags
    )


def _told(run: Run) -> dict[str, Any]:
    tags: Mapping[str, str] = run.data.tags
    return {
        "run_id": run.info.run_id,
        "name": run.info.run_name or "",
        "status": run.info.status,
        "params": run.data.params,
        "tags": tags,
        "metrics": run.data.metrics,
        "error": tags.get("end.reason", tags.get("failure", "")),
    }


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
