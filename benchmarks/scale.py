"""What becomes of it at scale, on a real MLflow on SQLite or PostgreSQL: 10,000 runs in one
experiment, a run of a million points or of a thousand metric names, fifty trainings that begin at
once, 300 that go eight at once, sixteen that need this host's GPUs while some are killed, 1,000
flow runs in Prefect. Each part is measured alone, and gets its section of one file in
benchmarks/results.

`python -m benchmarks.scale runs|train|points|names|begin|soak|leases|prefect [--store postgresql]`
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import psutil
import torch
from sqlalchemy import create_engine, text

from benchmarks.conditions import RESULTS, conditions
from benchmarks.contention import WORDS, Contention, contend
from benchmarks.turns import in_turns, median_ratio
from headroom.prefect.local_prefect import LINGER_S, share_server
from headroom.prefect.prefect_http import call_api
from headroom.tracking.journal import Journal
from headroom.tracking.mlflow_pages import make_run_path
from headroom.tracking.tracking_settings import TrackingSettings

ROOT = Path(__file__).parents[1]
FIRST = ("--train.epochs", "1", "--run.name", "first")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TURNS = 3
AT_ONCE = 8
BLOCK_STEPS = 20  # of a loop, with a record and without
SHORT_STEPS = 10  # of a run whose chart shows what a page takes without its points
LEAVES_S = 60  # that a server may take to end itself on a host that is busy
RUNS_BAR_S, COMPARE_BAR_S, PAGE_BAR_S = 1.0, 3.0, 3.0
# What a run has in MLflow's tables: what is another one in each copy, else it is copied. `c` is the
# row of the copy, with its number `n` and its run `id`.
COPIED = {
    "runs": {
        "run_uuid": "c.id",
        "name": "t.name || ' ' || c.n",
        "start_time": "t.start_time - 60000 * c.n",
        "end_time": "t.end_time - 60000 * c.n",
        "artifact_uri": "replace(t.artifact_uri, :run, c.id)",
    },
    "params": {"run_uuid": "c.id"},
    "tags": {
        "run_uuid": "c.id",
        "value": "CASE WHEN t.key IN ('journal', 'mlflow.runName') THEN t.value || ' ' || c.n"
        " ELSE t.value END",
    },
    "metrics": {
        "run_uuid": "c.id",
        "value": "t.value * (1 + 0.00001 * c.n)",
        "timestamp": "t.timestamp - 60000 * c.n",
    },
    "latest_metrics": {
        "run_uuid": "c.id",
        "value": "t.value * (1 + 0.00001 * c.n)",
        "timestamp": "t.timestamp - 60000 * c.n",
    },
    "logged_models": {
        "model_id": "'m-' || c.id",
        "source_run_id": "c.id",
        "artifact_location": "replace(t.artifact_location, t.model_id, 'm-' || c.id)",
    },
}
WHOSE = {"logged_models": "source_run_id"}  # else run_uuid
LINKS = """
INSERT INTO inputs (input_uuid, source_type, source_id, destination_type, destination_id, step)
SELECT substr(c.id, 1, 30) || substr(t.input_uuid, 1, 2), t.source_type,
 CASE WHEN t.source_id = :run THEN c.id ELSE t.source_id END, t.destination_type,
 CASE WHEN t.destination_id = :run THEN c.id ELSE 'm-' || c.id END, t.step
FROM inputs t CROSS JOIN copies c WHERE :run IN (t.source_id, t.destination_id)
"""


@dataclass(frozen=True)
class Place:
    """A folder in which trainings run, with a Prefect and leases of its own."""

    folder: Path
    uri: str

    @property
    def env(self) -> dict[str, str]:
        drop = ("PREFECT_", "MLFLOW_", "HEADROOM_")
        return {k: v for k, v in os.environ.items() if not k.startswith(drop)} | {
            "PREFECT_HOME": str(self.folder / "prefect"),
            "HEADROOM_LEASES": str(self.folder / "leases"),
            "MLFLOW_TRACKING_URI": self.uri,
            # A stand-in for GPUs has a folder of its own there.
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }

    @property
    def runs(self) -> Path:
        return self.folder / ".headroom" / "runs"

    def call(self, module: str, *words: str) -> Call:
        """Run a command to its end. Raises RuntimeError where it fails."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began, at_s = time.perf_counter(), time.time()
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
        )
        took_s = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise RuntimeError(f"{module} {words}: {done.stdout}{done.stderr}")
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Call(took_s, cpu_s, at_s, done.stdout)

    def query(self, asked: str, **given: Any) -> list[Any]:
        engine = create_engine(self.uri)
        try:
            with engine.begin() as opened:
                done = opened.execute(text(asked), given)
                return list(done) if done.returns_rows else []
        finally:
            engine.dispose()

    def measure_database_bytes(self) -> int:
        if self.uri.startswith("sqlite"):
            return (self.folder / "mlflow.db").stat().st_size
        return int(self.query("SELECT pg_database_size('mlflow')")[0][0])


@dataclass(frozen=True)
class Call:
    """What a command took. cpu_s: with the processes that it waited for."""

    took_s: float
    cpu_s: float
    began_at: float
    output: str


@contextmanager
def open_place(store: str, kept: Path | None, name: str = "place") -> Iterator[Place]:
    """Yield a place with an empty store. kept: a folder that stays, with what is in it."""
    with ExitStack() as opened:
        base = kept or Path(opened.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        folder = base / name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "mlflow.yaml", folder)
        uri = f"sqlite:///{folder}/mlflow.db"
        if store == "postgresql":
            from tests.team import run_postgres  # it needs the extra `team`

            uri = opened.enter_context(run_postgres("scale")).uri
        yield Place(folder, uri)


def fill_runs(place: Place, count: int) -> str:
    """Train once, and let MLflow's tables hold `count` copies of that run, as older ones; return
    its id."""
    if place.uri.startswith("sqlite") and (place.folder / "mlflow.db").exists():
        known = place.query("SELECT run_uuid FROM runs WHERE name = 'first'")
        if known and place.query("SELECT count(*) FROM runs")[0][0] >= count:
            return str(known[0][0])
    place.call("flows.train", *FIRST)
    run = str(place.query("SELECT run_uuid FROM runs WHERE name = 'first'")[0][0])
    engine = create_engine(place.uri)
    with engine.begin() as opened:
        opened.execute(text("CREATE TABLE copies (n INTEGER PRIMARY KEY, id VARCHAR(32))"))
        rows = [{"n": n, "id": f"{n:08x}{run[8:]}"} for n in range(1, count)]
        opened.execute(text("INSERT INTO copies VALUES (:n, :id)"), rows)
        for table, changed in COPIED.items():
            names = opened.execute(text(f"SELECT * FROM {table} LIMIT 0")).keys()
            columns = ", ".join(f'"{name}"' for name in names)
            values = ", ".join(changed.get(name, f't."{name}"') for name in names)
            whose = WHOSE.get(table, "run_uuid")
            asked = f"INSERT INTO {table} ({columns}) SELECT {values} FROM {table} t"
            asked += f" CROSS JOIN copies c WHERE t.{whose} = :run"
            opened.execute(text(asked), {"run": run} if ":run" in asked else {})
        opened.execute(text(LINKS), {"run": run})
        opened.execute(text("DROP TABLE copies"))
    engine.dispose()
    return run


def copy_folders(place: Place, count: int) -> None:
    """Let the newest of the runs have their folders, as `keep_runs` leaves them."""
    (first,) = (p for p in place.runs.iterdir() if (p / "start.json").exists())
    start = json.loads((first / "start.json").read_text())
    for n in range(1, count):
        folder = place.runs / f"{first.name}-{n}"
        shutil.copytree(first, folder)
        id = f"{n:08x}{start['run_id'][8:]}"
        new = {**start, "run_id": id, "name": f"first {n}", "made_at": start["made_at"] - 60 * n}
        (folder / "start.json").write_text(json.dumps(new))


def measure_first_step(place: Place, *words: str) -> float:
    """Train, and return the seconds from the start of the command to its first logged step."""
    before = set(place.runs.glob("*/events.jsonl"))
    call = place.call("flows.train", "--train.epochs", "1", *words)
    (log,) = set(place.runs.glob("*/events.jsonl")) - before
    steps = (json.loads(line) for line in log.read_text().splitlines())
    first_ms = next(one["t"] for one in steps if "metrics" in one)
    return float(first_ms / 1000 - call.began_at)


@contextmanager
def open_pages(place: Place) -> Iterator[str]:
    """Yield the address that `serve ui` prints."""
    from tests.team import find_free_port

    port = find_free_port()
    with open(place.folder / "ui.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "headroom.services.serve", "ui"],
            cwd=place.folder,
            env=place.env | {"HEADROOM_MLFLOW_PORT": str(port)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        assert server.stdout is not None
        found = (re.search(r"MLflow: (http\S+)", line) for line in server.stdout)
        printed = next(filter(None, found), None)
        assert printed is not None, (place.folder / "ui.log").read_text()
        yield printed[1]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


def measure_page(address: str, awaited: Callable[[Any], None], picture: Path) -> list[float]:
    """Return the seconds from the address to what is awaited on the page, in a browser that has
    never been there, and then in the same one again; and keep a picture."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, BROWSERS)))
    took_s = []
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        for _ in range(TURNS):
            page = context.new_page()
            page.set_default_timeout(120_000)
            began = time.perf_counter()
            page.goto(address)
            awaited(page)
            took_s.append(time.perf_counter() - began)
            page.screenshot(path=str(picture))
            page.close()
        browser.close()
    return took_s


def describe_load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def measure_calls(name: str, bar_s: float, call: Callable[[], Call]) -> str:
    """Return the row of a command that is called several times."""
    calls = [call() for _ in range(TURNS)]
    took_s, cpu_s = [c.took_s for c in calls], [c.cpu_s for c in calls]
    cells = f"{median(took_s):.2f} s | {min(took_s):.2f} s | {median(cpu_s):.2f} s"
    return f"| {name} | {cells} | {bar_s:g} s | {describe_load()} |"


def measure_runs(store: str, count: int, kept: Path | None) -> Iterator[str]:
    """10,000 runs of one kind in one experiment."""
    with open_place(store, kept) as place:
        fill_runs(place, count)
        if len(list(place.runs.glob("*/start.json"))) < 2:
            copy_folders(place, min(count, 200))
        tables = ("metrics", "latest_metrics", "params", "tags")
        rows = {t: place.query(f"SELECT count(*) FROM {t}")[0][0] for t in tables}
        keys = sum(rows[t] for t in tables[1:]) / count
        size = place.measure_database_bytes()
        yield f"""
{count:,} runs, copies of a real one with {keys:.0f} metrics, params and tags, all of one kind, with
their models and data sets; 200 of them with a folder on this host, as `keep_runs` leaves them. The
database takes {size / 2**20:,.0f} MiB, {size / count / 1024:.0f} KiB a run.

| | median | least | processor time, median | bar | load |
|:--|--:|--:|--:|--:|--:|"""
        yield measure_calls("`flows.runs`", RUNS_BAR_S, partial(place.call, "flows.runs"))
        newest = partial(place.call, "flows.compare", "--last", "2")
        yield measure_calls("`flows.compare --last 2`", COMPARE_BAR_S, newest)
        picture = Path(tempfile.gettempdir()) / f"scale-runs-{store}.png"
        with open_pages(place) as address:
            name = place.query("SELECT name FROM runs ORDER BY start_time DESC LIMIT 1")[0][0]
            link = {"name": str(name), "exact": True}
            took_s = measure_page(
                address, lambda page: page.get_by_role("link", **link).first.wait_for(), picture
            )
        cells = f"{median(took_s):.2f} s | {min(took_s):.2f} s | | {PAGE_BAR_S:g} s"
        yield f"| the saved view's first page in MLflow | {cells} | {describe_load()} |"


def measure_train(store: str, count: int, kept: Path | None) -> Iterator[str]:
    """Whether a training starts later with so many runs in the store. A place that is kept has had
    its warm-up, where something has trained in it."""
    with open_place(store, kept) as place, open_place(store, kept, "none") as empty:
        fill_runs(place, count)
        yield compare_starts(place, empty, f"{count:,} runs in the store")


def measure_prefect(store: str, count: int, kept: Path | None) -> Iterator[str]:
    """Whether a training starts later with so many flow runs in Prefect's database."""
    with open_place(store, kept, "flow-runs") as place, open_place(store, kept, "none") as empty:
        home = place.folder / "prefect"
        with patch.dict(os.environ, {"PREFECT_HOME": str(home)}), share_server(home) as api:
            before = measure_prefect_bytes(place)
            flow = call_api("POST", f"{api}/flows/", {"name": "train"})["id"]
            state = {"type": "COMPLETED", "name": "Completed"}
            for n in range(count):
                run = {"name": f"train {n}", "flow_id": flow, "state": state}
                call_api("POST", f"{api}/flow_runs/", run)
        taken = measure_prefect_bytes(place) - before
        yield f"\nA flow run that has no tasks takes {taken / count / 1024:.1f} KiB."
        yield compare_starts(place, empty, f"{count:,} flow runs in Prefect's database")


def measure_prefect_bytes(place: Place) -> int:
    """Return the size of Prefect's database, with what SQLite has not moved into it yet."""
    return sum(file.stat().st_size for file in (place.folder / "prefect").glob("prefect.db*"))


def compare_starts(place: Place, empty: Place, what: str) -> str:
    """Return what is told of trainings that start where there is much, and where there is not."""
    for one in (place, empty):
        if not list(one.runs.glob("*/start.json")):
            measure_first_step(one)
    places = {"none": partial(measure_first_step, empty)}
    places |= {"many": partial(measure_first_step, place)}
    found = in_turns(places, TURNS, warm_up=False)
    ratio = median_ratio(found["many"], found["none"])
    all_s = {name: ", ".join(f"{s:.1f} s" for s in of) for name, of in found.items()}
    return f"""
`train` reaches its first logged step after {all_s["many"]} with {what}, and
after {all_s["none"]} with next to none: the median of {TURNS} turns' ratios is {ratio:.3f} (bar: no
later). Load: {describe_load()}."""


@contextmanager
def open_record(place: Place, name: str) -> Iterator[Journal]:
    """Yield the record of a run of that name, by the door that a training has to MLflow, and with
    its own sending process."""
    where = TrackingSettings.model_validate(
        {
            "tracking_uri": place.uri,
            "artifacts": str(place.folder / "mlartifacts"),
            "runs": str(place.runs),
            "give_up_s": 3600,
            "required": True,
        }
    )
    with Journal(where, place.runs / name.replace(", ", "-").replace(" ", "-")) as journal:
        journal.open(None)
        journal.create(name=name, params={}, tags={})
        yield journal


def end_record(journal: Journal) -> None:
    """End the run, and wait until MLflow has all of it."""
    journal.close({"status": "FINISHED", "name": "", "params": {}, "tags": {}, "metrics": {}})


def name_metrics(count: int) -> list[str]:
    return [f"train/m{n:04d}" for n in range(count)]


def log_points(place: Place, *, names: int, steps: int) -> Logged:
    """Log so many metrics at each of so many steps to a run of their own, and wait until MLflow has
    them."""
    with open_record(place, f"{names} names, {steps} steps") as journal:
        sender = psutil.Process(children_of_this()[-1])
        metrics = name_metrics(names)
        began_s = time.process_time()
        for step in range(1, steps + 1):
            journal.log({key: step / (n + 1) for n, key in enumerate(metrics)}, step)
        logging_s = time.process_time() - began_s
        with watch_cpu(sender) as spent:
            end_record(journal)
        run_id, experiment_id = journal.run_id, journal.experiment_id
    return Logged(run_id, experiment_id, logging_s, spent[-1])


def make_step() -> Callable[[], None]:
    """Return a training step of a small net, of some 5 ms on one thread."""
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    x, y = torch.randn(512, 256), torch.randint(10, (512,))

    def train() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    return train


def measure_step(place: Place, *, names: int, steps: int) -> str:
    """Train with a record of so many metrics a step and without, in turns of some steps each."""
    train, metrics = make_step(), name_metrics(names)
    with open_record(place, f"{names} names, {steps} trained steps") as journal:
        done = iter(range(1, 2 * steps + 1))

        def keep(values: Mapping[str, float]) -> None:
            journal.log(values, next(done))

        def run_block(log: Callable[[Mapping[str, float]], None]) -> tuple[float, float]:
            began, began_cpu = time.perf_counter(), time.thread_time()
            for _ in range(BLOCK_STEPS):
                train()
                log({key: 1 / (n + 1) for n, key in enumerate(metrics)})
            return time.perf_counter() - began, time.thread_time() - began_cpu

        gc.freeze()
        blocks = {"without": lambda: run_block(lambda _: None), "with": lambda: run_block(keep)}
        found = in_turns(blocks, steps // BLOCK_STEPS)
        end_record(journal)
    step_ms = 1000 * median(cpu for _, cpu in found["without"]) / BLOCK_STEPS
    wall, cpu = (
        [bare[at] / kept[at] for bare, kept in zip(found["without"], found["with"], strict=True)]
        for at in (0, 1)
    )
    return f"""
A step of {step_ms:.1f} ms, on one thread, that logs {names:,} metrics keeps
{describe_ratios(wall)} of its speed by the clock, and {describe_ratios(cpu)}
by the processor time of the thread that trains
({len(cpu)} turns of {BLOCK_STEPS} steps; bar: 0.995). Load: {describe_load()}."""


def describe_ratios(ratios: Sequence[float]) -> str:
    low, _, high = quantiles(ratios, n=4)
    error = 1.253 * (high - low) / 1.349 / len(ratios) ** 0.5  # of a median, as of a normal law
    return f"{median(ratios):.4f} +- {error:.4f}"


@dataclass(frozen=True)
class Logged:
    """A run of many points. cpu_s: of the sending process, from its start to its end."""

    run_id: str
    experiment_id: str
    logging_s: float  # of this process, for all log calls
    cpu_s: float


def children_of_this() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


@contextmanager
def watch_cpu(process: psutil.Process) -> Iterator[list[float]]:
    """Yield a list of the processor seconds that the process has taken, as it grows."""
    spent = [0.0]
    is_over = threading.Event()

    def look() -> None:
        while True:
            with suppress(psutil.Error):
                times = process.cpu_times()
                spent.append(times.user + times.system)
            if is_over.wait(0.1):
                return

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    yield spent
    is_over.set()
    watching.join()


def measure_points(store: str, count: int, kept: Path | None) -> Iterator[str]:
    """One run of a million points: 100 metrics."""
    yield from measure_logged(store, 100, count // 100, kept)


def measure_names(store: str, count: int, kept: Path | None) -> Iterator[str]:
    """One run of a thousand names."""
    yield from measure_logged(store, count, 100, kept)


def measure_logged(store: str, names: int, steps: int, kept: Path | None) -> Iterator[str]:
    """One run, logged as a training logs, and its charts in MLflow."""
    with open_place(store, kept, f"points-{names}") as place:
        logged = log_points(place, names=names, steps=steps)
        asked = "SELECT count(*) FROM metrics WHERE run_uuid = :run AND key LIKE 'train/m%'"
        found = place.query(asked, run=logged.run_id)[0][0]
        yield f"""
{names:,} metrics at each of {steps:,} steps: {names * steps:,} points, of which MLflow has
{found:,}. A log call takes {1e6 * logged.logging_s / steps:,.0f} us of processor time; the sending
process took {logged.cpu_s:.1f} s in all, with its start and its report. Load: {describe_load()}."""
        yield measure_step(place, names=names, steps=steps)
        short = log_points(place, names=names, steps=SHORT_STEPS)
        with open_pages(place) as address:
            pages = {
                run: partial(measure_chart, address, run, f"scale-{names}-{store}")
                for run in (logged, short)
            }
            took_s = in_turns(pages, TURNS, warm_up=False)
        yield f"""
The first chart of the run's page in MLflow is there after {describe_range(took_s[logged])} s
(bar: 1 s). Of a run that has {SHORT_STEPS} points of each metric, in turns with it:
{describe_range(took_s[short])} s. Load: {describe_load()}."""


def measure_chart(address: str, logged: Logged, picture: str) -> float:
    """Return the seconds to the first chart of the run's page, in a browser that has been there."""
    path = make_run_path(logged.experiment_id, logged.run_id).replace("?", "/model-metrics?")
    file = Path(tempfile.gettempdir()) / f"{picture}.png"
    return median(
        measure_page(
            address.partition("/#/")[0] + path,
            lambda page: page.locator(".js-plotly-plot").first.wait_for(),
            file,
        )
    )


def describe_range(took_s: Sequence[float]) -> str:
    return f"{median(took_s):.2f} ({min(took_s):.2f} to {max(took_s):.2f})"


def measure_begin(store: str, count: int, kept: Path | None) -> Iterator[str]:
    """Trainings that begin at once, each a command of its own, on one host and one store."""
    with open_place(store, kept, "begin") as place:
        began_at = time.perf_counter()
        trainings = []
        for n in range(count):
            trainings.append(start_training(place, n))
            time.sleep(max(0.0, began_at + 10 * n / count - time.perf_counter()))
        codes = [training.wait() for training in trainings]
        told = describe_ends(place, codes, time.perf_counter() - began_at)
        yield f"\n{count} commands begun within 10 s: {told}"


def measure_soak(store: str, count: int, kept: Path | None) -> Iterator[str]:
    """Trainings one after another, eight at once, as a shelf of machines would for weeks."""
    with open_place(store, kept, "soak") as place, ThreadPoolExecutor(AT_ONCE) as pool:
        began_at = time.perf_counter()
        codes = [*pool.map(lambda n: start_training(place, n).wait(), range(count))]
        told = describe_ends(place, codes, time.perf_counter() - began_at)
        yield f"\n{count} commands, {AT_ONCE} at once: {told} {watch_left_processes(place)}"


def watch_left_processes(place: Place) -> str:
    """Return which processes are left at the end, and which still after the time that Prefect's
    server of single runs stays, for a run that may come."""
    began_at, first = time.perf_counter(), name_processes(place)
    left = first
    while left and (waited_s := time.perf_counter() - began_at) < LINGER_S + LEAVES_S:
        time.sleep(0.5)
        left = name_processes(place)
    if not first:
        return "\nNo process is left."
    still = f"after {waited_s:.0f} s {', '.join(left) or 'none'}"
    return f"\nProcesses left at the end: {', '.join(first)}; {still}."


def name_processes(place: Place) -> list[str]:
    """Return the processes that work in that folder, with their age."""
    named = []
    for process in psutil.process_iter(["cwd", "cmdline", "create_time"]):
        if process.info["cwd"] == str(place.folder):
            words = [Path(word).name for word in process.info["cmdline"] or ["a zombie"]]
            age_s = time.time() - process.info["create_time"]
            named.append(f"`{' '.join(words[:4])}` ({age_s:.0f} s old)")
    return named


def make_training(number: int, *more: str) -> list[str]:
    words = ["--train.epochs", "1", "--run.name", f"at once {number}", *more]
    return [sys.executable, "-m", "flows.train", *words]


def start_training(place: Place, number: int) -> subprocess.Popen[bytes]:
    with open(place.folder / f"{number}.log", "w") as log:
        own: dict[str, Any] = {"cwd": place.folder, "env": place.env}
        return subprocess.Popen(make_training(number), stdout=log, stderr=log, **own)


def describe_ends(place: Place, codes: Sequence[int], took_s: float) -> str:
    """Return how the trainings ended, and how much of their logs MLflow has."""
    kept_points, sent = count_points(place)
    return f"""{codes.count(0)} ended with 0, and MLflow has {list_ends(place)}.
Their logs hold {kept_points:,} points of metrics, of which MLflow lacks {kept_points - sent:,}. It
took {took_s:.0f} s. Load: {describe_load()}. {describe_leased(place)}"""


def describe_leased(place: Place) -> str:
    """Return which devices were leased, each of which has left a file."""
    names = [file.stem for file in sorted((place.folder / "leases").glob("*.lock"))]
    if not names:
        return "No device was leased: this host has none but its\nprocessor."
    return f"{len(names)} devices were leased."


def count_points(place: Place) -> tuple[int, int]:
    """Return how many points the runs' logs have, and how many of these MLflow has."""
    kept = sent = 0
    for log in place.runs.glob("*/events.jsonl"):
        run_id = json.loads((log.parent / "sent.json").read_text())["run_id"]
        asked = "SELECT key, step FROM metrics WHERE run_uuid = :run"
        there = {(key, step) for key, step in place.query(asked, run=run_id)}
        here = set()
        for line in log.read_text().splitlines():
            point = json.loads(line)
            here |= {(name, point["step"]) for name in point.get("metrics", {})}
        kept, sent = kept + len(here), sent + len(here & there)
    return kept, sent


def measure_leases(store: str, count: int, kept: Path | None) -> Iterator[str]:
    """Trainings that begin at once and need a GPU each, of which this host has a few."""
    here = torch.cuda.device_count()
    if here < 2:
        raise SystemExit("leases: needs two CUDA devices or a stand-in that has them")
    with open_place(store, kept, "leases") as place:
        commands = [make_training(n, *word_lease(n, count), *WORDS) for n in range(count)]
        kills = count // 5
        began_at = time.perf_counter()
        found = contend(place.folder, place.env, commands, kills=kills, within_s=10)
        took_s = time.perf_counter() - began_at
        yield f"""
{count} commands begun within 10 s on {here} devices ({torch.cuda.get_device_name()}, PyTorch
{torch.__version__}), every fourth for cuda:1 by name, the last two waiting no longer than 2 s,
{kills} killed by kill -9 while they computed:{describe_contention(place, found, took_s)}"""


def word_lease(number: int, count: int) -> tuple[str, ...]:
    """Return what that training asks of the leases."""
    if number >= count - 2:
        return ("--device.name", "gpu", "--device.wait_s", "2")
    return ("--device.name", "cuda:1" if number % 4 == 3 else "gpu")


def describe_contention(place: Place, found: Contention, took_s: float) -> str:
    """Return how they ended, and who had which device, by the record and seen from outside."""
    statuses = list_ends(place)
    place.call("flows.tidy", "--yes")
    refused = sum("device.wait_s: GPU-" in log.read_text() for log in place.folder.glob("*.log"))
    tags = "SELECT p.value, d.value FROM tags p JOIN tags d ON p.run_uuid = d.run_uuid"
    tags += " WHERE p.key = 'pid' AND d.key = 'device.uuid'"
    told = {(int(pid), device) for pid, device in place.query(tags)}
    seen = {(one.pid, one.device) for one in found.computed}
    leases = place.folder / "leases"
    left = [file.name for file in leases.iterdir() if file.suffix != ".lock"]
    returns = ", ".join(f"{s:.1f} s" for s in found.list_returns_s())
    faults = found.find_faults()
    codes = list(found.codes.values())
    devices = {one.device for one in found.computed}
    return f"""
{codes.count(0)} ended with 0, {refused} were refused for device.wait_s ({codes.count(2)} exit codes
2), and MLflow had {statuses}; after `flows.tidy --yes` {list_ends(place)}.
{len(found.computed):,} forward passes were seen, of {len(seen)} processes on {len(devices)} GPUs.
Computed without the device's lease, or two on one device at once: {len(faults)}{list_few(faults)}.
Processes whose device MLflow tells otherwise: {len(told ^ seen)}. The devices of those that were
killed were another's after {returns or "the end: nobody waited"}. Left leased: 0; left beside the
leases: {", ".join(left) or "nothing"}. It took {took_s:.0f} s. Load: {describe_load()}."""


def list_few(faults: Sequence[str]) -> str:
    return f" ({'; '.join(faults[:3])})" if faults else ""


def list_ends(place: Place) -> str:
    asked = "SELECT status, count(*) FROM runs WHERE name LIKE 'at once %' GROUP BY status"
    return ", ".join(f"{n} {status}" for status, n in place.query(asked))


PARTS: dict[str, tuple[Callable[[str, int, Path | None], Iterator[str]], int]] = {
    "runs": (measure_runs, 10_000),
    "train": (measure_train, 10_000),
    "points": (measure_points, 1_000_000),
    "names": (measure_names, 1_000),
    "begin": (measure_begin, 50),
    "soak": (measure_soak, 300),
    "leases": (measure_leases, 16),
    "prefect": (measure_prefect, 1_000),
}


def main(argv: Sequence[str]) -> None:
    """Measure a part, print, keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--count", type=int, help="Less than the whole is not kept as that.")
    parser.add_argument("--place", type=Path, help="A folder that stays, to measure in it again.")
    options = parser.parse_args(argv)
    measure, count = PARTS[options.part]
    shown = []
    whole = options.count or count
    now = conditions()
    heading = f"{options.part}, {whole:,}, on {options.store}"
    head = f"{now['processor']}, {now['memory']}; load at its start {now['load']}"
    for line in chain([head], measure(options.store, whole, options.place)):
        print(line, flush=True)
        shown += [line]
        keep_section(heading, "\n".join(shown))  # a later row may take hours


def keep_section(heading: str, body: str) -> None:
    """Put the section into the day's file, in the place of an older one of that heading."""
    file = RESULTS / f"scale-{date.today()}-cpu.md"
    title = [f"# Many runs, many points, many at once, {date.today()}", ""]
    title += [f"- {name}: {value}" for name, value in conditions().items() if name != "load"]
    before = file.read_text().split("\n## ")[1:] if file.exists() else []
    if before and torch.cuda.is_available():  # the other sections are of a processor alone
        title = [file.read_text().partition("\n## ")[0].rstrip()]
    others = [one.strip() for one in before if one.partition("\n")[0] != heading]
    sections = [*others, f"{heading}\n\n{body.strip()}"]
    file.write_text("\n".join(title) + "\n\n## " + "\n\n## ".join(sections) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
