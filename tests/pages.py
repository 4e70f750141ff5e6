"""Pages under docs/ of which parts are generated: each stands between two comments of its name."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def write_page(name: str, parts: Mapping[str, str]) -> None:
    (DOCS / name).write_text(_put_in((DOCS / name).read_text(), parts))


def check_page(name: str, parts: Mapping[str, str], *, counts: str = r"(?!)") -> None:
    """Assert that the page has these parts as they are now. counts: a pattern of numbers of which
    a fifth more or less is no matter."""
    told, numbers = (DOCS / name).read_text(), re.compile(counts)
    true = _put_in(told, parts)
    assert numbers.sub("", told) == numbers.sub("", true), "`make docs` writes it anew"
    for one, other in zip(numbers.findall(told), numbers.findall(true), strict=True):
        assert int(one) == pytest.approx(int(other), rel=0.2, abs=40), "`make docs` counts again"


def _put_in(page: str, parts: Mapping[str, str]) -> str:
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{part}{end}{rest.partition(end)[2]}"
    return page
