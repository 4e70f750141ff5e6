"""Format numbers and names for people: seconds, MiB, shares, and text that cannot move the
cursor, forge a line or break a table. Nothing is refused: odd input is shown as it is, cut and
made printable. What is not known never gets here; the caller leaves it out. And read the durations
and sizes that people write, such as 6h and 24 GiB.
"""

from __future__ import annotations

import math
import re

ELLIPSIS = "..."
UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*(gib|mib)", re.ASCII | re.IGNORECASE)
_PART = re.compile(rf"([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)({'|'.join(UNITS_S)})")


def parse_seconds(text: str) -> float | None:
    """Return the seconds of a duration, such as 90s, 45min, 6h, 1h30min or 30d; None where it is
    none, and so of a number without its unit."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return sum(float(number) * UNITS_S[unit] for number, unit in parts)


def parse_mebibytes(text: str) -> float | None:
    """Return the MiB of a size in GiB or MiB, such as 24GiB or 900 MiB; None where it is none."""
    size = _SIZE.fullmatch(text.strip())
    if size is None:
        return None
    return float(size[1]) * (1024 if size[2].lower() == "gib" else 1)


def format_seconds(value_s: float) -> str:
    """Format a duration with about three digits: "4.2 ms", "1.31 s", "12 min 05 s", "3 h 20
    min"."""
    if not math.isfinite(value_s):
        return f"{value_s} s"
    if value_s < 0.1:
        return format_milliseconds(value_s * 1000)
    if value_s < 9.995:
        return f"{value_s:.2f} s"
    if value_s < 99.95:
        return f"{value_s:.1f} s"
    whole_s = round(value_s)
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60:02d} s"
    minutes = round(value_s / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def format_milliseconds(value_ms: float) -> str:
    """Format a short duration: "0.0040 ms", "0.91 ms", "12.3 ms", "1,250 ms"."""
    if value_ms == 0 or not math.isfinite(value_ms):
        return f"{value_ms:.0f} ms"
    if abs(value_ms) < 0.00005:  # below what is told, on either side of 0
        return "0 ms"
    for limit, digits in ((0.00995, 4), (0.0995, 3), (9.995, 2), (99.95, 1)):
        if abs(value_ms) < limit:
            return f"{value_ms:.{digits}f} ms"
    return f"{value_ms:,.0f} ms"


def format_clock(value_s: float) -> str:
    """Format the time left as a clock shows it: "0:12", "4:05", "1:02:09"."""
    whole_s = max(0, round(value_s))
    hours, rest_s = divmod(whole_s, 3600)
    minutes = f"{rest_s // 60:02d}" if hours else f"{rest_s // 60}"
    return (f"{hours}:" if hours else "") + f"{minutes}:{rest_s % 60:02d}"


def format_mebibytes(value_mib: float) -> str:
    """Format a size given in MiB: "160 B", "4.00 KiB", "0.25 MiB", "812 MiB", "6.10 GiB"."""
    if value_mib == 0 or not math.isfinite(value_mib):
        return f"{value_mib:.0f} MiB"
    if abs(value_mib) < 1 / 1024:
        return f"{value_mib * 1024**2:.0f} B"
    for unit, size in (("KiB", value_mib * 1024), ("MiB", value_mib), ("GiB", value_mib / 1024)):
        if abs(size) < (10.235 if unit == "KiB" else 999.5):
            break
    digits = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    return f"{size:,.{digits}f} {unit}"


def format_number(value: float) -> str:
    """Format a plain number with four digits: "0.9833", "41,200", "1.8e+308"."""
    if not math.isfinite(value):
        return str(value)
    if value == round(value) and abs(value) < 1e9:
        return f"{value:,.0f}"
    if 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_percent(share: float) -> str:
    """Format a share of one as a percentage: "42 %", "<1 %", ">99 %"."""
    if 0.995 <= share < 1:
        return ">99 %"
    return "<1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def make_printable(text: object, *, limit: int) -> str:
    """Return the text on one line, at most `limit` characters, without control or direction
    marks."""
    cut = str(text)[: 4 * limit + 64]  # nobody waits for a megabyte to be cleaned
    line = " ".join(_escape(cut).split())
    return line if len(line) <= limit else line[: limit - len(ELLIPSIS)].rstrip() + ELLIPSIS


def format_command(text: str, *, limit: int) -> str:
    """Return the command on one line with its spaces kept, at most `limit` characters."""
    line = _escape(text[: limit + 1])
    return line if len(line) <= limit else line[: limit - len(ELLIPSIS)] + ELLIPSIS


def _escape(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
