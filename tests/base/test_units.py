"""Numbers and names in words."""

import pytest

from headroom.base.units import (
    format_clock,
    format_mebibytes,
    format_milliseconds,
    format_number,
    format_percent,
    format_seconds,
    make_printable,
)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (format_seconds(0.0421), "42.1 ms"),
        (format_seconds(0.0996), "99.6 ms"),
        (format_seconds(9.996), "10.0 s"),
        (format_seconds(99.96), "1 min 40 s"),
        (format_seconds(3599.7), "1 h 00 min"),
        (format_seconds(12000), "3 h 20 min"),
        (format_seconds(0), "0 ms"),
        (format_milliseconds(0.0004), "0.0004 ms"),
        (format_milliseconds(1250), "1,250 ms"),
        (format_milliseconds(-0.00004), "0 ms"),
        (format_milliseconds(-0.0001), "-0.0001 ms"),
        (format_clock(59.6), "1:00"),
        (format_clock(3729), "1:02:09"),
        (format_clock(-5), "0:00"),
        (format_mebibytes(0), "0 MiB"),
        (format_mebibytes(5 / 1024**2), "5 B"),
        (format_mebibytes(1 / 256), "4.00 KiB"),
        (format_mebibytes(0.25), "0.25 MiB"),
        (format_mebibytes(999.4), "999 MiB"),
        (format_mebibytes(999.6), "0.98 GiB"),
        (format_mebibytes(143771), "140 GiB"),
        (format_mebibytes(-12), "-12.0 MiB"),
        (format_number(0.98333), "0.9833"),
        (format_number(41235.7), "41,236"),
        (format_number(float("nan")), "nan"),
        (format_number(1.797e308), "1.797e+308"),
        (format_percent(0.001), "<1 %"),
        (format_percent(0), "0 %"),
        (make_printable("a\r\n\tb\x1b[31m\u202e", limit=20), "a b [31m"),
        (make_printable("x" * 10**7, limit=8), "xxxxx..."),
    ],
)
def test_numbers_and_names_in_words(said: str, expected: str) -> None:
    assert said == expected
