"""docs/settings.md has the settings, and the arguments of what they name."""

from headroom.settings.table import make_arguments_table, make_markdown_table
from tests import pages


def make_parts() -> dict[str, str]:
    return {
        "settings": make_markdown_table().strip(),
        "arguments": make_arguments_table().strip(),
    }


def test_the_page_of_settings_shows_them_as_they_are() -> None:
    pages.check_page("settings.md", make_parts())
