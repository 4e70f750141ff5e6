"""docs/verdict.md has the rules of the verdict."""

from headroom.report.verdict import make_markdown_table
from tests import pages


def make_parts() -> dict[str, str]:
    return {"rules": make_markdown_table()}


def test_the_page_of_the_verdict_shows_its_rules_as_they_are() -> None:
    pages.check_page("verdict.md", make_parts())
