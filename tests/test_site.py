"""The site of the pages (`make site`): whole, with its front page, and from this machine alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytest.importorskip("material", reason="headroom[site] is not installed")


def _build(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder, *more],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make site` does: a dead link, or a page that no menu has, refuses it."""
    folder = tmp_path_factory.mktemp("site")
    done = _build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_readme_is_its_front_page_and_leads_to_every_page_that_it_names(site: Path) -> None:
    front = (site / "index.html").read_text()
    named = re.findall(r"\]\(docs/([\w-]+)\.md", (ROOT / "README.md").read_text())
    assert len(named) > 20
    for name in named:
        assert f'href="{name}.html' in front and (site / f"{name}.html").is_file(), name
    assert 'src="report.png"' in front and (site / "report.png").is_file()


def test_its_pages_ask_no_other_machine_for_anything(site: Path) -> None:
    for page in site.rglob("*.html"):
        asked = re.findall(
            r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*>', text(page)
        )
        assert asked and not [tag for tag in asked if "//" in tag], page.name


def test_what_lies_beside_docs_is_named_and_not_linked(site: Path) -> None:
    assert "(<code>benchmarks/results</code>)" in text(site / "verdict.html")
    for page in site.glob("*.html"):
        assert 'href="../' not in text(page), page.name
    assert not list(site.rglob("*.py"))


def test_a_page_that_no_menu_has_is_named(tmp_path: Path) -> None:
    """It would be there, and found by nobody."""
    menu = (ROOT / "mkdocs.yml").read_text()
    (config := tmp_path / "mkdocs.yml").write_text(
        menu.replace("  - memory.md\n", "")
        .replace("docs_dir: docs", f"docs_dir: {ROOT}/docs")
        .replace("docs/site_hooks.py", f"{ROOT}/docs/site_hooks.py")
    )
    done = _build(tmp_path / "site", "--config-file", str(config))
    assert done.returncode == 1 and "memory.md" in done.stderr, done.stderr


def text(page: Path) -> str:
    return page.read_text()
