"""A simulated MLflow server, asked as MlflowClient is: what the record asks of it, with MLflow's
own rules. A point that is sent twice is there once; one of another time is another one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

from mlflow.entities import Metric, ViewType
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_DOES_NOT_EXIST
from requests.exceptions import ChunkedEncodingError, ConnectionError

from tests.simulation.world import World

Answer = TypeVar("Answer")
EXPERIMENT = "1"
ANSWER_S = 0.004
QUERIES = (
    re.compile(r"attributes.status = '(?P<status>\w+)' and tags\.(?P<tag>[\w.]+) = '(?P<text>.*)'"),
    re.compile(r"tags\.(?P<tag>[\w.]+) = '(?P<text>.*)'"),
)
OVER = ("FINISHED", "FAILED", "KILLED")


@dataclass(eq=False)
class StoredRun:
    """A run as the server keeps it."""

    run_id: str
    name: str
    start_ms: int
    number: int
    status: str = "RUNNING"
    stage: str = "active"
    end_ms: int | None = None
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    points: set[tuple[str, float, int, int]] = field(default_factory=set)
    latest: dict[str, tuple[int, int, float]] = field(default_factory=dict)
    artifacts: set[str] = field(default_factory=set)

    def describe(self) -> Any:
        latest = {k: (step, ms, value) for k, (step, ms, value) in self.latest.items()}
        return SimpleNamespace(
            info=SimpleNamespace(
                run_id=self.run_id,
                experiment_id=EXPERIMENT,
                run_name=self.name,
                status=self.status,
                lifecycle_stage=self.stage,
                start_time=self.start_ms,
                end_time=self.end_ms,
            ),
            data=SimpleNamespace(
                tags=dict(self.tags),
                params=dict(self.params),
                metrics={k: value for k, (_, _, value) in latest.items()},
                _metric_objs=[Metric(k, v, ms, step) for k, (step, ms, v) in latest.items()],
            ),
        )

    def add(self, key: str, value: float, ms: int, step: int) -> None:
        self.points.add((key, value, ms, step))
        if key not in self.latest or (step, ms, value) > self.latest[key]:
            self.latest[key] = (step, ms, value)


class Server:
    """The server, and what its runs are."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.runs: dict[str, StoredRun] = {}
        self.made = 0

    def ask(self, call: Callable[[], Answer]) -> Answer:
        """Carry out a request, and answer it, but for the faults of the history."""
        here = self.world
        here.touch("server")
        if here.mono < here.away_until:
            here.answer_fault = ""
            raise make_away()
        fault, here.answer_fault = here.answer_fault, ""
        if fault == "dropped":
            raise make_away()
        answer = call()
        here.done()
        here.wait(None, ANSWER_S)  # it is on its way, and others go on
        if fault == "twice":
            with suppress(MlflowException):
                answer = call()
        elif fault == "lost":
            raise make_away(ChunkedEncodingError("the connection was closed"))
        return answer


def make_away(cause: Exception | None = None) -> MlflowException:
    """Return what MLflow raises where its server does not answer."""
    error = MlflowException("API request to http://mlflow/api failed with exception")
    error.__cause__ = cause or ConnectionError("connection refused")
    return error


def _refuse(text: str, code: int) -> MlflowException:
    return MlflowException(text, error_code=code)


class Client:
    """MlflowClient, of the simulated server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def _get(self, run_id: str) -> StoredRun:
        try:
            return self._server.runs[run_id]
        except KeyError:
            raise _refuse(f"Run with id={run_id} not found", RESOURCE_DOES_NOT_EXIST) from None

    def _get_active(self, run_id: str) -> StoredRun:
        run = self._get(run_id)
        if run.stage != "active":
            raise _refuse(
                f"The run {run_id} must be in the 'active' state. Current state is {run.stage}.",
                INVALID_PARAMETER_VALUE,
            )
        return run

    def create_run(
        self, experiment_id: str, start_time: int | None, tags: dict[str, str], run_name: str
    ) -> Any:
        def do() -> Any:
            here = self._server
            here.made += 1
            run_id = f"run{here.made}"
            run = StoredRun(run_id, run_name, start_time or 0, here.made, tags=dict(tags))
            here.runs[run_id] = run
            return run.describe()

        return self._server.ask(do)

    def get_run(self, run_id: str) -> Any:
        return self._server.ask(lambda: self._get(run_id).describe())

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        def do() -> None:
            run = self._get_active(run_id)
            for param in params:
                if run.params.get(param.key, param.value) != param.value:
                    raise _refuse(f"Changing param values: {param.key}", INVALID_PARAMETER_VALUE)
            for metric in metrics:
                run.add(metric.key, metric.value, metric.timestamp, metric.step)
            run.params |= {param.key: param.value for param in params}
            run.tags |= {tag.key: tag.value for tag in tags}

        self._server.ask(do)

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        def do() -> list[Any]:
            found = sorted(p for p in self._get(run_id).points if p[0] == key)
            return [Metric(k, value, ms, step) for k, value, ms, step in found]

        return self._server.ask(do)

    def log_inputs(self, run_id: str, inputs: Any) -> None:
        self._server.ask(lambda: self._get_active(run_id) and None)

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self._server.ask(lambda: self._get_active(run_id).tags.update({key: value}))

    def delete_tag(self, run_id: str, key: str) -> None:
        def do() -> None:
            run = self._get_active(run_id)
            if key not in run.tags:
                raise _refuse(
                    f"No tag with name: {key} in run with id {run_id}", RESOURCE_DOES_NOT_EXIST
                )
            del run.tags[key]

        self._server.ask(do)

    def set_terminated(
        self, run_id: str, status: str | None = None, end_time: int | None = None
    ) -> None:
        def do() -> None:
            run = self._get_active(run_id)
            run.status, run.end_ms = status or "FINISHED", end_time

        self._server.ask(do)

    def update_run(self, run_id: str, status: str | None = None, name: str | None = None) -> None:
        def do() -> None:
            run = self._get_active(run_id)
            run.status = status or run.status

        self._server.ask(do)

    def delete_run(self, run_id: str) -> None:
        def do() -> None:
            self._get_active(run_id).stage = "deleted"

        self._server.ask(do)

    def search_runs(
        self,
        experiment_ids: list[str],
        filter_string: str = "",
        run_view_type: int = ViewType.ACTIVE_ONLY,
        max_results: int = 1000,
        order_by: Any = None,
    ) -> list[Any]:
        asked = next(m for q in QUERIES if (m := q.fullmatch(filter_string))).groupdict()

        def do() -> list[Any]:
            found = [
                run
                for run in self._server.runs.values()
                if run.tags.get(asked["tag"]) == asked["text"]
                and asked.get("status") in (None, run.status)
                and (run_view_type == ViewType.ALL or run.stage == "active")
            ]
            found.sort(key=lambda run: (-run.start_ms, run.run_id))
            return [run.describe() for run in found[:max_results]]

        return self._server.ask(do)

    def search_experiments(self) -> list[Any]:
        return self._server.ask(lambda: [SimpleNamespace(experiment_id=EXPERIMENT)])

    def get_logged_model(self, model_id: str) -> Any:
        raise _refuse(f"no model {model_id}", RESOURCE_DOES_NOT_EXIST)

    def log_artifact(self, run_id: str, path: str) -> None:
        name = path.rpartition("/")[2]
        self._server.ask(lambda: self._get_active(run_id).artifacts.add(name))

    def log_artifacts(self, run_id: str, path: str, name: str = "") -> None:
        self.log_artifact(run_id, path)

    def insert(self, run_id: str, samples: Any) -> bool:
        """Write straight into the tables, all or none."""

        def do() -> bool:
            run = self._server.runs.get(run_id)
            if run is None or run.stage != "active":
                return False
            for key, value, ms, step in samples:
                run.add(key, value, ms, step)
            return True

        return self._server.ask(do)
