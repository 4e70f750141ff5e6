"""What a run tells of itself: where it is and on what it trains, as tags and inputs of MLflow; what
it has measured so far, which its report is made from; and how long its stages took."""

from __future__ import annotations

import getpass
import json
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, time
from typing import Any

import psutil

from headroom.base.facts import Column, DataFacts, DeviceFacts, Owner, ReleaseFacts, TrainFacts
from headroom.prefect.prefect_http import compute_uptime
from headroom.run.failures import Failure, classify_failure
from headroom.settings.run_config import DataConfig
from headroom.watch.leaks import make_release_metrics
from headroom.watch.memory_meter import MIB
from headroom.watch.oom_report import OutOfMemory
from headroom.watch.phases import Stopwatch


class RunClock:
    """How long a run takes: its stages, and all of it since a person began to wait."""

    def __init__(self, waited_s: float) -> None:
        """waited_s: how long a person has been waiting by now, for imports and servers."""
        self._watch = Stopwatch()
        self.stages = {"time/start_s": waited_s}

    @property
    def began_at(self) -> float:
        """Unix time of the run's beginning, imports and servers left out."""
        return time() - self._watch.compute_total_s()

    def time_stage(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what the call returns; keep how long it took under its name."""
        began = perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self.stages[f"time/{name}_s"] = perf_counter() - began

    def total_s(self) -> float:
        """Return the seconds of this start, those before it that were waited for included."""
        return self.stages["time/start_s"] + self._watch.compute_total_s()


@dataclass
class Findings:
    """What a run has found so far: measurements, tags, warnings, and why it ended."""

    series: dict[str, float] = field(default_factory=dict)  # last values
    summary: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    stopped: str = ""  # why it ended before it was done
    failure: Failure | None = None  # the first one
    oom: dict[str, Any] | None = None  # how memory ran out
    classes: Any = None
    layers: dict[str, Any] = field(default_factory=dict)  # of its peak; see describe_layers
    profile: dict[str, Any] = field(default_factory=dict)  # of its loop; see Accounts.describe
    held_bytes: int = 0  # at the end of the training
    leaks: tuple[Owner, ...] = ()
    owners: list[dict[str, Any]] = field(default_factory=list)
    kept: list[dict[str, Any]] = field(default_factory=list)  # memory that no tensor holds, by name

    def warn(self, *warnings: str) -> None:
        """Keep what a person should doubt, for the report and as a tag."""
        self.warnings += warnings
        if self.warnings:
            self.tags["warnings"] = "\n".join(self.warnings)

    def fail(self, error: BaseException) -> None:
        """Keep why the run failed. The first failure is the reason: what the release says after
        it must not hide it."""
        if self.failure is None:
            self.failure = classify_failure(error)
            if isinstance(error, OutOfMemory):
                self.oom = asdict(error.explanation)

    def add_training(self, facts: TrainFacts) -> None:
        """Keep what the training measured."""
        self.held_bytes, self.leaks = facts.held_bytes, facts.leaks
        self.summary |= facts.metrics
        self.classes = facts.classes
        self.profile = facts.profile
        self.tags |= facts.tags
        self.stopped = facts.stopped
        self.warn(*facts.warnings)

    def add_release(self, facts: ReleaseFacts) -> None:
        """Keep the proof that the memory was given back."""
        self.summary |= make_release_metrics(facts)
        if facts.broken:  # whose memory it is, nobody can tell any more
            self.tags["memory.release"] = facts.broken
            self.failure = self.failure and self.failure.blame_device()
            return
        self.kept = [asdict(kept) for kept in facts.kept]
        self.owners = [asdict(owner) for owner in facts.owners]

    def add_end(self) -> None:
        """Keep how the run ended, as tags."""
        if self.failure is not None:
            self.tags |= {"end.reason": self.failure.said, "failure": self.failure.kind}
        elif self.stopped:
            self.tags["end.reason"] = self.stopped
            self.warn(f"{self.stopped}: the training is not done")

    def make_report(self) -> dict[str, Any]:
        """Return these as the report and run.json have them."""
        return {
            "classes": self.classes,
            "status": self.failure.status if self.failure else "FINISHED",
            "stopped": self.stopped,
            "tags": self.tags,
            "metrics": {**self.series, **self.summary},
            "warnings": self.warnings,
            "layers": self.layers,
            "profile": self.profile,
            "owners": self.owners,
            "kept": self.kept,
            "error": self.failure.said if self.failure else None,
            "oom": self.oom,
        }


def make_device_tags(device: DeviceFacts, source: str = "flows/train.py") -> dict[str, str]:
    """Return the tags of the device and of this process, which the file `source` runs in; what is
    not known has none."""
    tags = {
        "device": device.name,
        "device.kind": device.kind,
        "device.model": device.model,
        "device.uuid": device.uuid,
        "device.reason": device.reason,
        "device.total_mib": None
        if device.total_bytes is None
        else f"{device.total_bytes / MIB:.0f}",
        "torch.version": device.torch_version,
        "accelerator.runtime": device.runtime,
        "driver.version": device.driver_version,
    }
    return {k: v for k, v in tags.items() if v is not None} | make_process_tags(source)


def make_process_tags(source: str) -> dict[str, str]:
    """Return the tags of this process and of its source file.

    By these a run is found whose process died.
    """
    me = psutil.Process()
    tags = {
        "host": socket.gethostname(),
        "pid": str(me.pid),
        "process.started_at": f"{me.create_time():.2f}",
        "process.uptime_s": compute_uptime(me),
        "mlflow.source.name": source,
        "mlflow.source.type": "LOCAL",
        "mlflow.user": _find_user(),
    }
    return {k: v for k, v in tags.items() if v is not None}


def make_device_json(device: DeviceFacts) -> str:
    """Return all that is known of the device, and every check on the way to it, as JSON."""
    facts = asdict(device)
    checks = facts.pop("checks")
    return json.dumps({**facts, "checks": checks}, indent=1)


def _find_user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return None


SCHEMA_LIMIT = 2**20 - 1  # characters that MLflow takes; of what is larger nothing is told


def make_data_inputs(data: DataConfig, facts: DataFacts) -> list[dict[str, str]]:
    """Return the inputs by the names of MLflow's entity Dataset, each with its context."""
    if not facts.fingerprint:
        return []
    kind, source = "code", json.dumps({"tags": {"mlflow.source.name": data.source}})
    if data.path is not None:
        kind, source = "local", json.dumps({"uri": str(Path(data.path).absolute())})
    name, schema = Path(data.path or data.source).name, json.dumps(_make_schema(facts))
    description = {"source_type": kind, "source": source, "digest": facts.fingerprint[:36]}
    if len(schema) <= SCHEMA_LIMIT:
        description["schema"] = schema
    parts: tuple[tuple[str, str, int], ...] = (
        ("training", name, facts.train_rows),
        ("validation", f"{name} (val)", facts.val_rows),
    )
    if facts.test_rows:
        parts += (("test", f"{name} (test)", facts.test_rows),)
    return [
        {**description, "context": part, "name": called, "profile": json.dumps({"num_rows": rows})}
        for part, called, rows in parts
    ]


def _make_schema(facts: DataFacts) -> dict[str, object]:
    """Return a table's columns as its user has them.

    For other data the shapes that the model gets.
    """
    if facts.columns is not None:
        return {"mlflow_colspec": [_make_column(column) for column in facts.columns]}
    rows = [-1, *facts.input_shape]
    if facts.task == "tokens":
        x, y = ("int64", rows), ("int64", rows)
    elif facts.task == "classification":
        x, y = ("float32", rows), ("int64", [-1])
    else:
        x, y = ("float32", rows), ("float32", [-1, facts.outputs])
    return {"mlflow_tensorspec": {"features": _make_tensor(*x), "targets": _make_tensor(*y)}}


def _make_column(column: Column) -> dict[str, object]:
    number = "long" if column.whole else "double"
    kind = {"category": "string", "date": "datetime"}.get(column.kind, number)
    return {"name": column.name, "type": kind, "required": column.fill is None}


def _make_tensor(dtype: str, shape: list[int]) -> str:
    return json.dumps([{"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": shape}}])
