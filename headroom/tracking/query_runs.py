"""Reads runs that exist in MLflow: what comparable earlier runs have measured, before a run
begins, and what several runs have, to compare them; and keeps the run of a comparison. A
store that can't answer has no past runs: that is no reason to fail.

`python -m headroom.tracking.query_runs` answers one question about past runs, as JSON, without
opening a run. No process that trains imports it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

# As in mlflow_sender.py: MLflow's defaults wait four minutes for a server that is away.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")

from mlflow import MlflowClient  # noqa: E402 (it reads the environment when it is imported)
from mlflow.entities import Metric, Param, Run, RunTag  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE  # noqa: E402

from headroom.base.units import make_printable  # noqa: E402
from headroom.process.command import pause_collection  # noqa: E402
from headroom.process.redaction import redact  # noqa: E402
from headroom.tracking import mlflow_store  # noqa: E402
from headroom.tracking.answer_limits import make_client  # noqa: E402
from headroom.tracking.mlflow_pages import ComparisonView, find_old_comparisons  # noqa: E402
from headroom.tracking.tracking_settings import TrackingError, TrackingSettings  # noqa: E402

NEWEST = 20  # runs to look through; each may lack what another has measured
HISTORY = 40  # runs that one is compared with, and those that did not pass; 7 ms each
BEGINNING = 5  # runs of which more is known than that they are good: they are the level
COMPARISON = "comparison"  # the tag of a run that holds others: how many
PAGE, OTHERS = 1_000, 20  # runs that are asked for at once; more than wanted, as some are others
NEEDED_METRIC = "speed/samples_per_s"
FULL_LETTERS = 7900  # of a tag
NAME_LETTERS = 250  # MLflow's own limit
MISSING = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # of MLflow's errors
P = ParamSpec("P")
T = TypeVar("T")


def find_newest_metrics(
    client: MlflowClient, experiment_id: str, alike: str, wanted: list[str]
) -> dict[str, float]:
    """Return the newest values of the wanted metrics among finished runs of tag `alike`."""
    query = f"attributes.status = 'FINISHED' and tags.alike = '{alike}'"
    newest = ["attributes.start_time DESC"]
    try:
        runs = client.search_runs([experiment_id], query, max_results=NEWEST, order_by=newest)
    except MlflowException as error:
        print(f"no past: {redact(str(error))}", file=sys.stderr)
        return {}
    metrics: dict[str, float] = {}
    for run in runs:
        for name in wanted:
            if name in run.data.metrics:
                metrics.setdefault(name, run.data.metrics[name])
    return metrics


@contextmanager
def _explain(where: TrackingSettings) -> Iterator[None]:
    """Raise whatever a store raises as a TrackingError of one sentence."""
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:  # of any store
        raise TrackingError(mlflow_store.explain_error(error, where)) from error


def _explain_errors(
    asks: Callable[Concatenate[ExperimentRuns, P], T],
) -> Callable[Concatenate[ExperimentRuns, P], T]:
    """Make a method raise whatever its store raises as a TrackingError of one sentence."""

    @functools.wraps(asks)
    def call(self: ExperimentRuns, *args: P.args, **named: P.kwargs) -> T:
        with _explain(self.where):
            return asks(self, *args, **named)

    return call


def read_history(client: MlflowClient, experiment_id: str, of: str) -> list[dict[str, Any]] | None:
    """Return gate and metrics of the finished runs with the tag `gate.of`, the newest first.

    The last of them are those with which history began, however long ago. None where the store
    can't answer.
    """
    query, newest = f"attributes.status = 'FINISHED' and tags.`gate.of` = '{of}'", "start_time DESC"
    search = functools.partial(client.search_runs, [experiment_id], order_by=[newest])
    try:
        runs = [*search(query, max_results=HISTORY)]
        if len(runs) == HISTORY and not any(run.data.tags.get("gate") == "new" for run in runs):
            runs += search(f"{query} and tags.gate = 'new'", max_results=BEGINNING)
    except Exception as error:  # sqlite's, the network's, the server's
        print(f"no history: {redact(str(error))}", file=sys.stderr)
        return None
    ends = [(run.data.tags.get("gate"), run.data.metrics) for run in runs]
    return [{"gate": gate, "metrics": metrics} for gate, metrics in ends if gate]


def _get_run(client: MlflowClient, run_id: str, where: TrackingSettings, *, problem: str) -> Run:
    """Return that run. Raises TrackingError, which begins with the problem, where there is none."""
    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code not in MISSING:
            raise
        store = redact(where.tracking_uri)
        raise TrackingError(f"{problem}: no such run in {store}; see its id in MLflow") from None


def read_run(where: TrackingSettings, run_id: str) -> dict[str, Any]:
    """Return a run as MLflow has it: its name, tags, metrics and more. Raises TrackingError."""
    with _explain(where):
        client = make_client(where.tracking_uri)
        return _describe_run(_get_run(client, run_id, where, problem=f"RUN {run_id[:80]}"))


def accept_level(where: TrackingSettings, run_id: str) -> list[str]:
    """Let the history of a gate begin at this run; return the names of the runs that are in it now.

    Those are the run and all of its kind after it that were judged. Raises TrackingError.
    """
    problem = f"--accept {run_id[:80]}"
    with _explain(where):
        client = make_client(where.tracking_uri)
        run = _get_run(client, run_id, where, problem=problem)
        if "gate" not in run.data.tags or "gate.of" not in run.data.tags:
            raise TrackingError(f"{problem}: was judged by no gate; it is {run.info.status}")
        query = (
            f"attributes.status = 'FINISHED' and tags.`gate.of` = '{run.data.tags['gate.of']}' "
            f"and attributes.start_time >= {run.info.start_time}"
        )
        runs = client.search_runs([run.info.experiment_id], query, max_results=PAGE)
        judged = [one for one in runs if "gate" in one.data.tags]
        for one in judged:
            was = f"{one.data.tags['gate']}: {one.data.tags.get('gate.why', '')}"
            why = f"accepted as the level from now on; it was {was}"[:FULL_LETTERS]
            tags = [RunTag("gate", "new"), RunTag("gate.why", why)]
            client.log_batch(one.info.run_id, tags=tags)
    return [_clean_name(str(one.info.run_name)) for one in judged]


class ExperimentRuns:
    """The runs of one experiment, to compare them."""

    def __init__(
        self, where: TrackingSettings, experiment: str | None = None, *, makes: bool = True
    ) -> None:
        """makes: the experiment, where it is new. Raises TrackingError."""
        self.where = where.model_copy(update={"experiment": experiment}) if experiment else where
        self._open(makes)

    @_explain_errors
    def _open(self, makes: bool) -> None:
        name = self.where.experiment
        if not makes and not make_client(self.where.tracking_uri).get_experiment_by_name(name):
            raise TrackingError(f"run.experiment: {name!r} is not there; nothing has run in it")
        self.client, self.experiment_id = mlflow_store.open_experiment(self.where)

    @_explain_errors
    def begin(self, run_id: str, *, name: str, count: int, tags: Mapping[str, str]) -> str:
        """Return the id of the run that holds the others.

        It is a new one, or that of run_id, set to RUNNING again.
        """
        tags = {**tags, COMPARISON: str(count)}
        if run_id:
            self.client.log_batch(run_id, tags=[RunTag(k, v) for k, v in tags.items()])
            self.client.update_run(run_id, status="RUNNING")
            return run_id
        run = self.client.create_run(self.experiment_id, run_name=name, tags=tags)
        return str(run.info.run_id)

    def set_tags(
        self,
        run_id: str,
        tags: Mapping[str, str],
        params: Mapping[str, str] | None = None,
        metrics: Mapping[str, float] | None = None,
        step: int = 0,
    ) -> None:
        """Set tags, params and metrics of a run, these at the step.

        Where MLflow is away that is printed, and no more: the comparison may have hours to
        go.
        """
        now_ms = int(time.time() * 1000)
        try:
            self.client.log_batch(
                run_id,
                tags=[RunTag(name, value[:FULL_LETTERS]) for name, value in tags.items()],
                params=[Param(name, value) for name, value in (params or {}).items()],
                metrics=[Metric(k, value, now_ms, step) for k, value in (metrics or {}).items()],
            )
        except Exception as error:  # of any store
            print(mlflow_store.explain_error(error, self.where), file=sys.stderr)

    def keep_view(self, view: ComparisonView) -> None:
        """Save the view of a comparison; the oldest of too many go.

        Where that is refused, it is printed, and no more.
        """
        key, value = view.make_tag()
        try:
            self.client.set_experiment_tag(self.experiment_id, key, value)
            for old in find_old_comparisons(self.client.get_experiment(self.experiment_id).tags):
                self.client.delete_experiment_tag(self.experiment_id, old)
        except Exception as error:  # of any store
            print(mlflow_store.explain_error(error, self.where), file=sys.stderr)

    @_explain_errors
    def end(self, run_id: str, *, status: str, text: str = "", files: Sequence[Path] = ()) -> None:
        """Send the files and the text, and end the run with this status."""
        for file in files:
            self.client.log_artifact(run_id, str(file), "plots" if file.suffix == ".png" else None)
        if text:
            self.client.set_tag(run_id, "mlflow.note.content", text[:FULL_LETTERS])
        self.client.set_terminated(run_id, status)

    @_explain_errors
    def read_runs(self, ids: Sequence[str]) -> list[dict[str, Any]]:
        """Return these runs as MLflow has them.

        Raises TrackingError with every one that is no training.
        """
        runs, problems, store = [], [], redact(self.where.tracking_uri)
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
                runs.append(_describe_run(run))
            else:
                problems.append(f"--runs {run_id[:80]}: is no training that tells {NEEDED_METRIC}")
        if problems:
            raise TrackingError("\n".join(problems))
        return runs

    @_explain_errors
    def read_newest(self, *, last: int | None, query: str = "") -> list[dict[str, Any]]:
        """Return the `last` newest trainings that MLflow's query finds, the oldest first.

        Raises TrackingError for a query that MLflow refuses.
        """
        newest = []
        with pause_collection():
            for run in self._search_runs(query, at_once=min(PAGE, (last or PAGE) + OTHERS)):
                if _is_training(run):
                    newest.append(_describe_run(run))
                    if len(newest) == last:
                        break
        return newest[::-1]

    def _search_runs(self, query: str, *, at_once: int) -> Iterator[Run]:
        token = None
        while True:
            try:
                page = self.client.search_runs(
                    [self.experiment_id],
                    query,
                    max_results=at_once,
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

    @_explain_errors
    def read_series(self, run_id: str, name: str, *, most: int) -> list[tuple[int, int, float]]:
        """Return step, Unix ms and value of a metric, by step, at about `most` points."""
        points = {
            point.step: (point.step, point.timestamp, point.value)
            for point in self.client.get_metric_history(run_id, name)
        }
        series = [points[step] for step in sorted(points)]
        return series[:: -(-len(series) // most) or 1]


def _is_training(run: Run) -> bool:
    is_measured = NEEDED_METRIC in run.data.metrics
    is_one = is_measured or (run.info.status != "FINISHED" and "device" in run.data.tags)
    return is_one and COMPARISON not in run.data.tags


def _describe_run(run: Run) -> dict[str, Any]:
    """Return a training. Names of a server of anybody's are shown as they are from here on."""
    tags: Mapping[str, str] = run.data.tags
    params, metrics = (
        {_clean_name(name): value for name, value in named.items()}
        for named in (run.data.params, run.data.metrics)
    )
    return {
        "run_id": _clean_name(run.info.run_id),
        "name": _clean_name(run.info.run_name or ""),
        "status": _clean_name(run.info.status),
        "params": params,
        "tags": tags,
        "metrics": metrics,
        "error": tags.get("end.reason", tags.get("failure", "")),
    }


def _clean_name(name: str) -> str:
    return name if name.isprintable() else make_printable(name, limit=NAME_LETTERS)


def main() -> None:
    """Answer the question on standard input: where, alike, wanted."""
    order = json.load(sys.stdin)
    where = TrackingSettings(**order["where"])
    try:
        client = make_client(where.tracking_uri)
        experiment = client.get_experiment_by_name(where.experiment)
    except MlflowException as error:
        print(f"no past: {redact(str(error))}", file=sys.stderr)
        experiment = None
    answer = {}
    if experiment is not None:
        answer = find_newest_metrics(
            client, experiment.experiment_id, order["alike"], order["wanted"]
        )
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
