"""docs/metrics.md has the names of the record."""

from headroom.base.names import make_markdown_tables
from tests import pages


def make_parts() -> dict[str, str]:
    return make_markdown_tables()


def test_the_page_of_metrics_shows_the_names_as_they_are() -> None:
    pages.check_page("metrics.md", make_parts())
