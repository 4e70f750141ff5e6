"""What a person sees who opens the printed address: MLflow's own pages, in a browser, of real runs.

TESTS_PICTURES names a folder, which then gets the pictures of the README.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headroom.prefect.prefect_http import is_healthy
from tests.conftest import ROOT, desk_environment, free_port

playwright = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[ui]'")
pytestmark = [pytest.mark.ui, pytest.mark.timeout(600)]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ASKED = ((), ("--optim.lr", "0.01"), ("--train.batch_size", "32"))
NAMES = ("mlp-digits", "mlp-digits lr=0.01", "mlp-digits batch_size=32")
# Those of a regression, of tokens and of a GPU are not measured here, and so not drawn.
FIRST = ["train/loss", "val/loss", "val/accuracy", "speed/recent_samples_per_s"]
FIRST.append("memory/host_rss_mib")
WIDTH, HEIGHT = 1280, 800  # of a notebook
WAIT_MS = 60_000  # for what a page shows, on a busy machine


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three runs, of which two differ from the first in one setting."""
    place = tmp_path_factory.mktemp("runs")
    shutil.copy(ROOT / "mlflow.yaml", place)
    for words in ASKED:
        command = [sys.executable, "-m", "flows.train", "--train.epochs", "20", *words]
        subprocess.run(command, cwd=place, env=desk_environment(), check=True, timeout=300)
    return place


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    """The one that `make ui` prints, once it is served."""
    port = free_port()
    env = desk_environment() | {"HEADROOM_MLFLOW_PORT": str(port)}
    command = [sys.executable, "-m", "headroom.services.serve", "ui"]
    with open(place / "server.log", "w") as log:
        out, apart = subprocess.PIPE, True
        server = subprocess.Popen(
            command, cwd=place, env=env, stdout=out, stderr=log, text=True, start_new_session=apart
        )
    assert server.stdout is not None
    try:
        lines = iter(server.stdout.readline, "")  # until it answers, it says that it starts
        found = (re.search(r"MLflow: (http\S+)", line) for line in lines)
        printed = next(filter(None, found), None)
        assert printed is not None, (place / "server.log").read_text()
        until = time.monotonic() + 120
        while not is_healthy(f"http://127.0.0.1:{port}/health"):
            assert time.monotonic() < until, (place / "server.log").read_text()
            time.sleep(0.1)
        yield printed[1]
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is here")
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox"]  # as root there is none
        opened = started.chromium.launch(executable_path=found, args=arguments)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: playwright.Browser, address: str) -> Iterator[playwright.Page]:
    """The printed address in a browser that has never been there."""
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.set_default_timeout(WAIT_MS)
    page.goto(address)
    page.get_by_role("link", name=NAMES[0], exact=True).wait_for()
    yield page
    page.close()


def measured(place: Path, name: str) -> dict[str, float]:
    """By the run's name."""
    with sqlite3.connect(place / "mlflow.db") as database:
        found = database.execute(
            "select key, value from latest_metrics join runs using (run_uuid) where name = ?",
            (name,),
        )
        return dict(found.fetchall())


def shown(value: float) -> str:
    """The beginning of a number as the pages write it."""
    return f"{value:.12f}"[:6]


def picture(page: playwright.Page, name: str, *, height: int) -> None:
    """So much of the page, from its top, where pictures are asked for."""
    if folder := os.environ.get("TESTS_PICTURES"):
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": height}
        page.screenshot(path=str(ROOT / folder / name), clip=clip)


def to_charts(page: playwright.Page) -> None:
    page.locator("label", has=page.locator("input[value=CHART]")).click()
    page.get_by_text(FIRST[0], exact=True).wait_for()


def test_the_address_opens_the_runs_with_our_columns_among_the_pages_for_training(
    place: Path, page: playwright.Page
) -> None:
    """It opened pages for traces, judges and prompts, and a table without one of our numbers."""
    for column in ("val/accuracy", "optim.lr", "bound", "gate"):  # without scrolling
        page.get_by_role("columnheader", name=column, exact=True).first.wait_for()
    assert page.get_by_text("Judges", exact=True).count() == 0
    for name in NAMES:
        page.get_by_role("link", name=name, exact=True).wait_for()
        found = measured(place, name)
        page.get_by_text(shown(found["val/accuracy"])).first.wait_for()
    picture(page, "mlflow.png", height=440)
    page.set_viewport_size(
        {"width": 2000, "height": HEIGHT}
    )  # what is far to the right is not made
    for column in ("device", "speed/samples_per_s", "memory/leaked_mib"):
        page.get_by_role("columnheader", name=column, exact=True).first.wait_for()
    page.get_by_text(shown(measured(place, NAMES[0])["speed/samples_per_s"])).first.wait_for()
    page.get_by_text("digits (", exact=False).first.wait_for()  # the data, with its fingerprint


def test_the_assistant_stays_closed_until_somebody_opens_it(page: playwright.Page) -> None:
    """In a browser that was there for the first time it stood open over a quarter of each page."""
    button = page.locator("button[data-assistant-ui]")
    button.wait_for()  # which is there while the panel is not
    wide = page.locator("main").bounding_box()
    assert wide is not None and wide["width"] > WIDTH - 250
    button.click()
    page.get_by_role("button", name="Close", exact=True).wait_for()


def test_the_first_charts_are_curves_of_loss_validation_speed_and_memory(
    page: playwright.Page,
) -> None:
    """They were 24 charts of one dot each."""
    to_charts(page)
    page.get_by_text(FIRST[-1], exact=True).wait_for()
    text = page.locator("main").inner_text()
    places = [text.index(f"\n{title}\n") for title in FIRST]
    assert places == sorted(places)
    curves = page.locator(".scatterlayer .trace .js-line")
    curves.first.wait_for(state="attached")
    picture(page, "mlflow-charts.png", height=HEIGHT)


def test_a_run_shows_its_report_its_data_and_no_curve_of_one_value(
    place: Path, page: playwright.Page
) -> None:
    page.get_by_role("link", name=NAMES[1], exact=True).click()
    found = measured(place, NAMES[1])
    page.get_by_text("FINISHED").first.wait_for()
    page.get_by_text("digits (", exact=False).first.wait_for()
    page.get_by_text(shown(found["val/accuracy"])).first.wait_for()
    page.get_by_role("tab", name="Model metrics").click()
    page.get_by_text("memory", exact=True).first.wait_for()
    page.locator(".barlayer .point").first.wait_for(state="attached")


def test_compare_shows_what_was_varied_and_nothing_else(page: playwright.Page) -> None:
    page.get_by_role("checkbox", name="Select all runs").check(force=True)
    page.get_by_role("button", name="Compare", exact=True).click()
    lr = page.locator("tr", has_text="optim.lr").first
    lr.wait_for()
    epochs = page.locator("tr", has_text="train.epochs")
    if epochs.count():
        page.get_by_text("Show diff only").first.click()
    epochs.wait_for(state="detached")
    params = page.locator("tr", has_text=re.compile(r"^(optim|run|train)\."))
    told = [row.inner_text().split() for row in params.all()]
    assert [words[0] for words in told] == ["optim.lr", "train.batch_size"]
    assert sorted(told[0][1:]) == ["0.002", "0.002", "0.01"]


@pytest.fixture(scope="module")
def comparison(place: Path) -> str:
    """The path that `python -m flows.compare` prints to be opened: of six settings with two repeats
    each, in an experiment of their own."""
    varied = ("--vary", "optim.lr=0.002,0.01", "--vary", "train.batch_size=32,64,256")
    command = [sys.executable, "-m", "flows.compare", *varied, "--repeats", "2"]
    more = ("--train.epochs", "5", "--run.experiment", "grid")
    done = subprocess.run(
        [*command, *more], cwd=place, env=desk_environment(), timeout=500, text=True, check=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    found = re.search(r"Open .*(/#/experiments/\S+)", done.stdout)
    assert found is not None, done.stdout
    return found[1]


def test_what_a_comparison_prints_opens_its_settings_side_by_side(
    browser: playwright.Browser, comparison: str, address: str
) -> None:
    """It opened a page of one closed row, a dash in every column, and no chart."""
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.set_default_timeout(WAIT_MS)
    page.goto(address.partition("/#")[0] + comparison)
    page.get_by_text("Parallel Coordinates", exact=True).wait_for()
    page.locator(".barlayer .point").first.wait_for(state="attached")
    page.locator(".scatterlayer .trace .js-line").first.wait_for(state="attached")
    picture(page, "mlflow-compare.png", height=HEIGHT)
    page.locator("label", has=page.locator("input[value=TABLE]")).click()
    for column in ("val/accuracy", "optim.lr", "train.batch_size"):
        page.get_by_role("columnheader", name=column, exact=True).first.wait_for()
    for size in (32, 64, 256):  # repeats of one setting are one group, best first
        page.get_by_text(f"Group: optim.lr: 0.01, train.batch_size: {size}").first.wait_for()
    page.get_by_text("12 matching runs").wait_for()
    page.close()
