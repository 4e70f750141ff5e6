"""The simulated server and disk answer as the real ones do."""

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag, ViewType
from mlflow.exceptions import MlflowException

from headroom.tracking.mlflow_store import make_database
from tests.simulation import stand_ins
from tests.simulation.server import Client, Server
from tests.simulation.stand_ins import played_in
from tests.simulation.world import World

TAGS = {"host": "here", "journal": "one"}


def _ask_all(client: Any, experiment: str) -> list[Any]:
    """What the record asks of MLflow, and what comes of it: answers, or the codes of errors."""
    answers: list[Any] = []

    def ask(call: Callable[[], Any]) -> Any:
        try:
            answer = call()
        except MlflowException as error:
            answers.append(error.error_code)
            return None
        answers.append(describe(answer))
        return answer

    def describe(answer: Any) -> Any:
        if isinstance(answer, list):
            return [describe(one) for one in answer]
        if not hasattr(answer, "info"):
            return answer if answer is None else "an answer"
        tags = {k: v for k, v in answer.data.tags.items() if not k.startswith("mlflow.")}
        newest = sorted((m.key, m.step, m.timestamp, m.value) for m in answer.data._metric_objs)
        info = answer.info
        said = (info.status, info.lifecycle_stage, info.end_time, info.start_time, info.run_name)
        return said, tags, dict(answer.data.params), dict(answer.data.metrics), newest

    run = ask(lambda: client.create_run(experiment, 1000, TAGS, "a"))
    other = ask(lambda: client.create_run(experiment, 2000, TAGS, "b"))
    id, late = run.info.run_id, other.info.run_id
    points = [
        Metric("loss", 1.0, 5000, 1),
        Metric("loss", 2.0, 6000, 2),
        Metric("lr", 3.0, 5000, 1),
    ]
    for metrics in (points, points, [Metric("loss", 9.0, 7000, 1)], [Metric("loss", 2.5, 6000, 2)]):
        ask(lambda metrics=metrics: client.log_batch(id, metrics=metrics))  # type: ignore[misc]
        ask(lambda: client.get_run(id))
    ask(lambda: client.log_batch(id, params=[Param("p", "1")]))
    ask(lambda: client.log_batch(id, params=[Param("p", "1")]))
    ask(lambda: client.log_batch(id, params=[Param("p", "2")]))
    ask(lambda: client.log_batch(id, tags=[RunTag("host", "there"), RunTag("x", "y")]))
    ask(lambda: client.set_tag(id, "z", "1"))
    ask(lambda: client.delete_tag(id, "z"))
    ask(lambda: client.delete_tag(id, "z"))
    ask(lambda: client.search_runs([experiment], "tags.journal = 'one'", max_results=1))
    ask(lambda: client.set_terminated(id, "FAILED", 9000))
    ask(lambda: client.get_run(id))
    running = "attributes.status = 'RUNNING' and tags.host = 'here'"
    ask(lambda: client.search_runs([experiment], running, ViewType.ALL, max_results=100))
    ask(lambda: client.update_run(id, status="RUNNING"))
    ask(lambda: client.get_run(id).info.status)
    ask(lambda: client.delete_run(late))
    ask(lambda: client.log_batch(late, metrics=points))
    ask(lambda: client.set_tag(late, "a", "b"))
    ask(lambda: client.set_terminated(late, "KILLED", 1))
    ask(lambda: client.get_run(late))
    ask(lambda: client.search_runs([experiment], "tags.journal = 'one'"))
    ask(lambda: client.get_run("0" * 32))
    return answers


def test_the_server_answers_as_mlflow_does(tmp_path: Path) -> None:
    database = tmp_path / "mlflow.db"
    make_database(database)
    client = MlflowClient(f"sqlite:///{database}")
    real = _ask_all(client, client.create_experiment("one", tmp_path.as_uri()))
    world = World(0, (), switch=0.0, lies=False)
    answers: list[Any] = []

    def ask() -> None:
        answers.extend(_ask_all(Client(Server(world)), "1"))

    with played_in(world):
        world.run(ask)
    assert answers == real


@pytest.mark.parametrize("seed", range(30))
def test_the_disk_is_as_a_folder(tmp_path: Path, seed: int) -> None:
    world, found = World(0, (), switch=0.0, lies=False), []
    real = _use_disk(random.Random(seed), tmp_path, Path, open, os)

    def use() -> None:
        stand_ins.Path("/place").mkdir()
        place = stand_ins.Path("/place")
        found.extend(
            _use_disk(random.Random(seed), place, stand_ins.Path, stand_ins.open_file, stand_ins.os)
        )

    with played_in(world):
        world.run(use)
    assert found == real


def _use_disk(drawn: random.Random, place: Any, path: Any, open: Any, os: Any) -> list[Any]:
    """Do what the record does with files, in any order; return what came of it."""
    came: list[Any] = []
    for _ in range(60):
        name, other = (place / drawn.choice(("a", "b", "c/d", "c/e")) for _ in range(2))
        data = bytes(drawn.choice(b"ab\n") for _ in range(drawn.randint(0, 9)))
        how = drawn.randrange(12)
        try:
            came.append(_do(how, name, other, data, place, open, os))
        except OSError as error:
            came.append(type(error).__name__)
    with suppress(OSError):
        came.append(sorted(str(f.relative_to(place)) for f in place.rglob("*")))
    assert path
    return came


def _do(how: int, name: Any, other: Any, data: bytes, place: Any, open: Any, os: Any) -> Any:
    if how == 0:
        with open(name, "ab+", buffering=0) as file:
            return file.write(data), file.tell(), file.seek(0), file.read()
    if how == 1:
        return name.write_text(data.decode())
    if how == 2:
        return name.read_bytes()
    if how == 3:
        name.rename(other)
    elif how == 4:
        name.unlink(missing_ok=len(data) % 2 == 0)
    elif how == 5:
        (place / "c").mkdir(exist_ok=True)
    elif how == 6:
        with open(name, "rb+") as file:
            return list(file), file.truncate(len(data))
    elif how == 7:
        number = os.open(name, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(number, data, 3)
        os.ftruncate(number, 5)
        found = os.pread(number, 99, 1), os.fstat(number).st_size
        os.close(number)
        return found
    elif how == 8:
        return name.exists(), name.is_file(), (place / "c").is_dir()
    elif how == 9:
        return sorted(f.name for f in place.glob("*/d")), sorted(f.name for f in place.iterdir())
    elif how == 10:
        (place / "c").rmdir()
    else:
        return name.stat().st_size
    return None
