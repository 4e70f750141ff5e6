"""Asks the package index for known advisories of the pinned versions, for `make advisories`. One
with a mended version fails, unless accepted.txt beside it has it with a reason and a day on which
that ends. What could not be asked is told and is no failure: a clean answer and none differ."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
ACCEPTED = Path(__file__).resolve().parent / "accepted.txt"
INDEX = "https://pypi.org"
TIMEOUT_S = 10.0
AT_ONCE = 8


class Advisory(NamedTuple):
    pin: str
    name: str  # such as GHSA-... or PYSEC-...
    names: frozenset[str]  # that and its others, such as CVE-...
    mended: tuple[str, ...]


def main() -> int:
    index = os.environ.get("HEADROOM_ADVISORIES", INDEX)
    pins = read_pins((ROOT / "constraints.txt").read_text())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = dict(zip(pins, pool.map(lambda pin: _ask(index, *pin), pins), strict=True))
    unasked = [name for (name, _), answer in answers.items() if answer is None]
    found = [one for (n, v), a in answers.items() for one in read_advisories(f"{n}=={v}", a or ())]
    accepted = read_accepted(ACCEPTED.read_text(), datetime.now(UTC).date())
    bad = [one for one in found if one.mended and not one.names & accepted]
    for one in found:
        told = "" if one in bad else ", accepted" if one.mended else ", for which there is none yet"
        print(f"{one.pin}: {one.name}, mended in {', '.join(one.mended) or 'no version'}{told}")
    asked = len(answers) - len(unasked)
    print(f"{asked} of {len(answers)} pins asked for at {index}: {len(found)} advisories")
    if unasked:
        print(f"could not be asked for, which says nothing of them: {', '.join(unasked)}")
    return 1 if bad else 0


def read_pins(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(?m)^([\w.-]+)==(\S+)", text)


def read_advisories(pin: str, answer: Iterable[Mapping[str, Any]]) -> list[Advisory]:
    return [
        Advisory(pin, one["id"], frozenset([one["id"], *one["aliases"]]), tuple(one["fixed_in"]))
        for one in answer
        if not one.get("withdrawn")
    ]


def read_accepted(text: str, today: date) -> set[str]:
    """Return the advisories that are accepted today. A line: name, last day, reason."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    rows = [line.split(maxsplit=2) for line in lines]
    if short := [line for line, row in zip(lines, rows, strict=True) if len(row) < 3]:
        sys.exit(f"pins/accepted.txt: {short[0]!r} is no name, day and reason")
    return {name for name, day, _ in rows if date.fromisoformat(day) >= today}


def _ask(index: str, name: str, version: str) -> list[Mapping[str, Any]] | None:
    """Return the advisories of this version, or None where nobody said. An index may answer for
    the newest version alone."""
    for path in (f"{name}/{version}/json", f"{name}/json"):
        try:
            with urlopen(f"{index}/pypi/{path}", timeout=TIMEOUT_S) as answer:
                told = json.load(answer)
            if told["info"]["version"] == version:
                return told["vulnerabilities"]
        except HTTPError as error:
            with error:  # it is an answer, too
                if error.code != 404:
                    return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
    return None


if __name__ == "__main__":
    sys.exit(main())
