"""What a person sees in Prefect's own pages, in a browser: the form of a deployment, and the page
of the flow run that it starts.

TESTS_PICTURES names a folder, which then gets the pictures of docs/schedule.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.services.test_scheduled import Service, ended, service, wait_for  # noqa: F401
from tests.ui.test_mlflow_ui import browser, picture, playwright  # noqa: F401

pytestmark = [pytest.mark.ui, pytest.mark.timeout(300)]
WIDTH, HEIGHT = 1280, 800  # as the pictures of MLflow's pages


@pytest.fixture
def page(browser: playwright.Browser) -> Iterator[playwright.Page]:  # noqa: F811
    page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    page.set_default_timeout(60_000)
    yield page
    page.close()


def submit(page: playwright.Page) -> Any:
    """The flow run that the form made. 503 is what Prefect says where two write to its SQLite
    database at once: its clients ask again by themselves, in the form a person presses again."""
    for _ in range(20):
        with page.expect_response("**/create_flow_run") as answer:
            page.get_by_role("button", name="Submit").click()
        if answer.value.status != 503:
            break
    assert answer.value.status == 201, answer.value.text()
    return answer.value.json()


def test_the_form_begins_with_what_everybody_needs_and_starts_a_run_that_tells_its_result(
    service: Service,  # noqa: F811
    page: playwright.Page,
) -> None:
    """The form began with eighty fields without dotted names and limits, `overrides` below them;
    the run's page told neither a result nor where MLflow has it."""
    deployment = service.ask("GET", "deployments/name/train/train-on-demand")["id"]
    page.goto(f"{service.url}/deployments/deployment/{deployment}/run")
    overrides = page.locator("textarea").first
    overrides.wait_for()
    for text in ("overrides (Optional)", "resume (Optional)", "config (Optional)"):
        assert page.get_by_text(text, exact=True).bounding_box()["y"] < HEIGHT
    page.get_by_text("optim.lr (Optional)").wait_for()
    page.get_by_text("Peak learning rate. Above 0, at most 1,000. Default: 0.002.").wait_for()
    picture(page, "prefect-form.png", height=620)

    overrides.click()
    page.keyboard.press("Control+A")
    page.keyboard.type('{"train.epochs": 5}')
    asked = submit(page)
    assert asked["parameters"]["overrides"] == {"train.epochs": 5}
    flow_run = asked["id"]
    assert wait_for(lambda: ended(service, flow_run), service) == "COMPLETED"

    page.goto(f"{service.url}/runs/flow-run/{flow_run}")
    page.get_by_text("Artifacts", exact=True).last.click()
    for text in ("Completed", "device:cpu", "gate:new", "train-on-demand"):
        page.get_by_text(text, exact=True).first.wait_for()
    page.get_by_text("on cpu").first.wait_for()  # its result, on the report's card
    picture(page, "prefect.png", height=860)
    page.get_by_text("report-mlp-digits-epochs-5", exact=True).first.click()
    link = page.get_by_role("link", name="Open it in MLflow").get_attribute("href")
    made = service.mlflow_run(flow_run)
    assert made is not None and link is not None
    mlflow = f"http://127.0.0.1:{service.env['HEADROOM_MLFLOW_PORT']}/"
    assert link.startswith(mlflow) and made.info.run_id in link
    note = made.data.tags["mlflow.note.content"]
    back = re.search(r"\[Its flow run in Prefect\]\(<(.*)>\)", note)
    assert back is not None and back[1].startswith(f"{service.url}/")
    page.goto(back[1])
    page.get_by_text(made.info.run_name, exact=True).first.wait_for()
    assert flow_run in page.url
