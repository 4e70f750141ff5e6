"""What trainings cost the servers of a team (docs/team.md): processor time, requests and bytes,
measured on PostgreSQL on this machine; and by simulation what that makes of 1,000 GPUs and of
10,000 runs a day. Needs PostgreSQL, `git` and the extra `team`; what it starts is compose.yaml's.

`python -m benchmarks.team [RUNS]`
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from mlflow import MlflowClient
from mlflow.entities import Metric

from benchmarks.conditions import publish
from benchmarks.queueing import simulate
from headroom.prefect.prefect_http import call_api
from tests.team import Team, run_team

RUNS = 12
REQUESTS = 400
SERVERS = ("mlflow", "prefect", "postgres", "s3")
CLIENTS = 16
PER_BATCH = 10  # metrics of one request: a log point of a training
RUNS_A_DAY, DAY_S = 10_000, 86_400
GPUS = 1_000
POLL_S, BEAT_S = 10.0, 30.0  # of Prefect's worker, by default
FLUSHES_S = (2, 10, 30)  # flush_s of mlflow.yaml


def _measure_cpu_s(team: Team) -> dict[str, float]:
    """Processor time that each server has taken by now, with what it started."""
    parts = {**team.parts, "postgres": team.postgres.process}
    return {name: _cpu_s(parts[name]) for name in SERVERS}


def _measure_stored(team: Team) -> dict[str, float]:
    """Bytes and transactions of the databases, and bytes of the S3 store."""
    asked = "SELECT datname, pg_database_size(datname), xact_commit FROM pg_stat_database"
    asked += " WHERE datname IN ('mlflow', 'prefect')"
    team.postgres.query("CHECKPOINT")
    rows: list[Any] = team.postgres.query(asked)
    found = {f"{name} bytes": float(size) for name, size, _ in rows}
    found |= {f"{name} transactions": float(count) for name, _, count in rows}
    kept = (f for f in (team.folder / "s3" / "mlflow").rglob("*") if f.is_file())
    return found | {"s3 bytes": float(sum(f.stat().st_size for f in kept))}


def main(runs: int) -> None:
    """Measure, simulate, print, keep."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    with run_team(Path(__file__).parents[1], env) as team:
        publish("team", "What trainings cost a team's servers", _lines(team, runs))


def _lines(team: Team, runs: int) -> Iterator[str]:
    spent, slept_s = _spent(team, lambda: time.sleep(60))
    idle = {name: s / slept_s for name, s in spent.items()}
    yield f"""
All servers and the trainings share this machine. Processor time of a server: of its processes.

## Measured

| processor ms | {" | ".join(SERVERS)} |
|:--|{"--:|" * len(SERVERS)}
| a second in which nothing is trained, two workers | {_row(idle.values())} |"""
    before = _measure_stored(team)
    each, took_s = _of_runs(team, runs, idle)
    stored = {name: (after - before[name]) / runs for name, after in _measure_stored(team).items()}
    yield f"| a run, from its order to its end (mlp on digits, 3 epochs) | {_row(each.values())} |"
    batch = _of_requests(team, _batches(team), idle)
    yield f"| a request with {PER_BATCH} metrics of a step | {_row(batch.values())} |"
    poll = _of_requests(team, _polls(team), idle)
    yield f"| a worker asks whether there is work | {_row(poll.values())} |"
    beat = _of_requests(team, _beats(team), idle)
    yield f"| a worker says that it lives | {_row(beat.values())} |"
    kib = {
        name: f"{stored[f'{name} bytes'] / 1024:.0f} KiB" for name in ("mlflow", "prefect", "s3")
    }
    count = {name: f"{stored[f'{name} transactions']:.0f}" for name in ("mlflow", "prefect")}
    yield f"""
A run leaves {kib["mlflow"]} in MLflow's database, {kib["prefect"]} in Prefect's and {kib["s3"]} in
the S3 store, by {count["mlflow"]} and {count["prefect"]} transactions. {runs} runs by two workers
took {took_s:.0f} s.

## {RUNS_A_DAY:,} runs a day, spread evenly

| server | cores busy | GiB a year |
|:--|--:|--:|"""
    grown = {"mlflow": "mlflow bytes", "prefect": "prefect bytes", "s3": "s3 bytes"}
    for name in SERVERS:
        cores = each[name] * RUNS_A_DAY / DAY_S
        kept = stored[grown[name]] * RUNS_A_DAY * 365 / 2**30 if name in grown else 0.0
        yield f"| {name} | {cores:.3f} | {f'{kept:,.0f}' if kept else ''} |"
    yield f"""
## {GPUS:,} trainings at once, each telling MLflow every `flush_s`

Simulated: each sends its next request `flush_s` after the answer to the last; requests are served
in their order by so many processes of MLflow, each taking the processor time measured above. Lag:
how much later than `flush_s` a value is in MLflow. The database's cores come beside them.

| flush_s | MLflow's processes | busy | lag, median | lag, 99 of 100 | PostgreSQL, cores busy |
|--:|--:|--:|--:|--:|--:|"""
    for flush_s in FLUSHES_S:
        for servers in (2, 4, 8, 16):
            busy, lags, rate = simulate(GPUS, flush_s, batch["mlflow"], servers=servers)
            low, high = median(lags), sorted(lags)[int(len(lags) * 0.99)]
            database = batch["postgres"] * rate
            yield (
                f"| {flush_s} | {servers} | {busy:.0%} | {_span(low)} | {_span(high)} | "
                f"{database:.2f} |"
            )
    alone = poll["prefect"] / POLL_S + beat["prefect"] / BEAT_S
    yield f"""
## {GPUS:,} GPUs, and who asks Prefect for work

A worker asks every {POLL_S:g} s, and says every {BEAT_S:g} s that it lives. Prefect's server is one
process, so that one core is all that it has: {1 / alone:,.0f} workers, and fewer with runs.

| workers | GPUs of each | Prefect's server, cores busy | with {RUNS_A_DAY:,} runs a day |
|--:|--:|--:|--:|"""
    for of_each in (1, 4, 8):
        workers = GPUS // of_each
        own = workers * alone
        with_runs = own + each["prefect"] * RUNS_A_DAY / DAY_S
        yield f"| {workers:,} | {of_each} | {own:.2f} | {with_runs:.2f} |"
    measured, foretold = _together(team, batch["mlflow"] + batch["postgres"])
    yield f"""
## Whether that is right

{CLIENTS} clients that send such requests without a pause, on this machine, whose cores they share
with the servers: {measured:.0f} requests a second. Simulated with its cores, and the processor time
that all of them take: {foretold:.0f}."""


def _together(team: Team, served_s: float) -> tuple[float, float]:
    """Requests a second of clients that do not pause: measured, and simulated."""
    send = [_batches(team) for _ in range(CLIENTS)]
    each = REQUESTS // CLIENTS

    def play(one: Callable[[int], Any]) -> None:
        for n in range(each):
            one(n)

    begun, before_s = time.monotonic(), time.process_time()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(play, send))
    took_s, own_s = time.monotonic() - begun, time.process_time() - before_s
    all_s = served_s + own_s / (CLIENTS * each)
    cores = psutil.cpu_count() or 1
    return CLIENTS * each / took_s, simulate(CLIENTS, 0, all_s, servers=cores)[2]


def _of_runs(team: Team, runs: int, idle: dict[str, float]) -> tuple[dict[str, float], float]:
    api = f"{team.address('prefect')}/api"
    deployment = call_api("GET", f"{api}/deployments/name/train/train-team")["id"]
    order = {"parameters": {"config": {}, "overrides": {"train.epochs": 3}}}
    url = f"{api}/deployments/{deployment}/create_flow_run"

    def play(count: int) -> None:
        ids = [call_api("POST", url, order)["id"] for _ in range(count)]
        while ids:
            states = {i: call_api("GET", f"{api}/flow_runs/{i}")["state"]["type"] for i in ids}
            if bad := [s for s in states.values() if s in ("FAILED", "CRASHED", "CANCELLED")]:
                raise RuntimeError(f"a run ended as {bad[0]}; see {team.folder}")
            ids = [i for i, state in states.items() if state != "COMPLETED"]
            time.sleep(2)

    play(2)  # each worker clones, and prepares its data
    spent, took_s = _spent(team, lambda: play(runs))
    return {n: (s - idle[n] * took_s) / runs for n, s in spent.items()}, took_s


def _of_requests(team: Team, ask: Callable[[int], Any], idle: dict[str, float]) -> dict[str, float]:
    """Processor seconds of each server for one of them."""
    ask(0)
    spent, took_s = _spent(team, lambda: list(map(ask, range(REQUESTS))))
    return {n: max(0.0, s - idle[n] * took_s) / REQUESTS for n, s in spent.items()}


def _batches(team: Team) -> Callable[[int], Any]:
    client = MlflowClient(team.address("mlflow"))
    run_id = client.create_run("0").info.run_id

    def ask(step: int) -> None:
        now_ms = int(time.time() * 1000)
        metrics = [Metric(f"m{i}", 0.5, now_ms, step) for i in range(PER_BATCH)]
        client.log_batch(run_id, metrics=metrics)

    return ask


def _polls(team: Team) -> Callable[[int], Any]:
    url = f"{team.address('prefect')}/api/work_pools/headroom/get_scheduled_flow_runs"
    return lambda _: call_api("POST", url, {"limit": 1})


def _beats(team: Team) -> Callable[[int], Any]:
    url = f"{team.address('prefect')}/api/work_pools/headroom/workers/heartbeat"
    return lambda n: call_api(
        "POST", url, {"name": f"w{n % 100}", "heartbeat_interval_seconds": 30}
    )


def _spent(team: Team, play: Callable[[], Any]) -> tuple[dict[str, float], float]:
    """Processor seconds of each server while it plays, and the seconds of that."""
    before, begun = _measure_cpu_s(team), time.monotonic()
    play()
    took_s = time.monotonic() - begun
    return {name: after - before[name] for name, after in _measure_cpu_s(team).items()}, took_s


def _cpu_s(process: psutil.Process) -> float:
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def _row(seconds: Any) -> str:
    return " | ".join(f"{1000 * s:.3g}" for s in seconds)


def _span(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else RUNS)
