"""Turn rows as a user has them into the inputs that a model was trained on. Of a table, text
becomes its category, a date its parts, a missing value what the training put in its place; rows
for a model of the user's own are an array, or arrays by the names of its inputs. Text where
numbers belong and arrays of another shape are refused; a row with a missing value that nothing
replaces is marked and never guessed. It travels with logged models, and imports no PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from typing import Any

import numpy as np

NUMBER, CATEGORY, DATE = "number", "category", "date"
DAY_S = 86_400
WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
# Of a date: days since 1970 with their fractions, how far the year is as a place on a circle, and 1
# for its day of the week.
SEASON_PARTS = ("month", "year_sin", "year_cos")
DATE_PARTS = ("days", "year", *SEASON_PARTS, *WEEKDAYS)
TIME_PARTS = ("hour", "day_sin", "day_cos")  # where there are times of day
YEAR_DAYS = 365.2425
LARGEST = 1e30  # of a number, here and in training: beyond it float32 overflows soon
# What spreadsheets and pandas write for nothing, and Arrow reads as such in a CSV.
NOTHING = {"", "NA", "N/A", "n/a", "#N/A", "#N/A N/A", "#NA", "NULL", "null", "NaN", "nan"}
NOTHING |= {"-NaN", "-nan", "1.#IND", "1.#QNAN", "-1.#IND", "-1.#QNAN"}


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model: x (rows, inputs) float32; whole (rows,) booleans: no value is
    missing that nothing replaces. Other rows are 0 there."""

    x: np.ndarray
    whole: np.ndarray


def count_inputs(columns: Sequence[Mapping[str, Any]]) -> int:
    """Return how many inputs these columns become."""
    return sum(len(c["values"]) or 1 for c in columns)


def make_inputs(
    rows: Any,
    columns: Sequence[Mapping[str, Any]],
    *,
    missing: str,
    na: Sequence[str] | None = None,
) -> Inputs:
    """Return the inputs of raw rows: of a DataFrame with these columns among others in any
    order, or of an array that has them in their order, or already holds the inputs.

    columns: of the model's description; missing: what the training did about missing values;
    na: the words that meant missing in it, None: those that spreadsheets and pandas write.
    Raises ValueError for a column that is not there, text where numbers belong, and a missing
    value where the training allowed none.
    """
    nothing = NOTHING if na is None else {"", *na}
    frame = hasattr(rows, "columns")
    if not frame:
        rows = np.asarray(rows)
        if rows.ndim != 2 or rows.shape[1] not in (len(columns), count_inputs(columns)):
            raise ValueError(f"rows: must have the shape (rows, {len(columns)}) (got {rows.shape})")
        if rows.shape[1] != len(columns):
            return Inputs(np.ascontiguousarray(rows, np.float32), np.ones(len(rows), dtype=bool))
    x = np.zeros((len(rows), count_inputs(columns)), dtype=np.float32)
    whole, at = np.ones(len(rows), dtype=bool), 0
    for place, column in enumerate(columns):
        cells = _get_column(rows, column, columns, missing) if frame else rows[:, place]
        if column["kind"] == CATEGORY:
            chosen, empty = _parse_categories(cells, column, nothing)
            there = np.flatnonzero(chosen >= 0)
            x[there, at + chosen[there]] = 1
            at += len(column["values"])
        elif column["kind"] == DATE:
            parts, empty = _parse_dates(cells, column, nothing)
            x[:, at : at + len(parts)] = parts.T
            at += len(parts)
        else:
            x[:, at], empty = _parse_numbers(cells, column, nothing)
            at += 1
        if empty.any() and missing == "fail":
            raise ValueError(
                f"rows: the column {column['name']!r} has a missing value, and the model was "
                "trained on rows without (data.args.missing: fail); fill it in"
            )
        whole &= ~empty
    x[~whole] = 0
    return Inputs(x, whole)


def make_array(rows: Any, names: Sequence[str] | None, shape: tuple[int, ...]) -> np.ndarray:
    """Return rows of numbers as float32 (rows, *shape): of an array, or of a DataFrame with the
    columns `names` among others.

    Raises ValueError for another shape, a column that is not there and a number out of bounds.
    """
    if hasattr(rows, "columns") and names:
        missing = [name for name in names if name not in rows.columns]
        if missing:
            raise ValueError(f"rows: the column {missing[0]!r} is missing; needs {names}")
        rows = rows[names]
    with np.errstate(over="ignore"):  # told below
        x = np.ascontiguousarray(rows, dtype=np.float32)
    if x.ndim == 2 and x.shape[1] == math.prod(shape):
        x = x.reshape(len(x), *shape)
    if x.shape[1:] != shape:
        sizes = ", ".join(map(str, shape))
        raise ValueError(f"rows: must have the shape (rows, {sizes}) (got {x.shape})")
    far = np.argwhere(np.abs(x) > LARGEST)
    if len(far):
        _, *at = far[0].tolist()
        column = repr(names[at[0]]) if names else ", ".join(str(i + 1) for i in at)
        raise ValueError(f"rows: {_describe_too_large(column, x[tuple(far[0])].item())}")
    return x


def refuse_no_number(outputs: np.ndarray, task: str) -> None:
    """Raise ValueError where one of these outputs is not a number, though its row misses
    nothing."""
    if np.isnan(outputs).any() or (task == "regression" and np.isinf(outputs).any()):
        raise ValueError(
            "rows: the model gives no number for a row that misses none; the row may lie too far "
            "from those that it was trained on: mend or drop it"
        )


def _get_column(
    rows: Any, column: Mapping[str, Any], columns: Sequence[Mapping[str, Any]], missing: str
) -> Any:
    name = column["name"]
    if name in rows.columns:
        cells = rows[name]
        if cells.ndim != 1:
            raise ValueError(f"rows: the column {name!r} is there twice; keep one")
        return cells
    if missing == "fail":
        needs = [c["name"] for c in columns]
        raise ValueError(f"rows: the column {name!r} is missing; needs {needs}")
    return np.full(len(rows), None, dtype=object)


def _parse_numbers(
    raw: Any, column: Mapping[str, Any], nothing: set[str]
) -> tuple[np.ndarray, np.ndarray]:
    """float32 values, and where nothing stands for a missing one."""
    values = np.asarray(raw)
    if values.dtype.kind not in "fiub":
        values = np.array(
            [_parse_number(v, column["name"], nothing) for v in values.tolist()], dtype=np.float64
        )
    values = values.astype(np.float64)
    for missing in find_numbers(nothing):
        values[values == missing] = np.nan
    empty = np.isnan(values)
    if column["fill"] is not None:
        values[empty], empty = column["fill"], np.zeros_like(empty)
    far = np.flatnonzero(np.abs(values) > LARGEST)
    if len(far):
        raise ValueError(
            f"rows: {_describe_too_large(repr(column['name']), values[far[0]].item())}"
        )
    return values.astype(np.float32), empty


def compute_date_parts(seconds: np.ndarray, parts: Sequence[str]) -> np.ndarray:
    """Return the parts, (parts, rows) float64, of times in seconds since 1970; NaN for one that
    is NaN."""
    finite_seconds = np.nan_to_num(seconds)
    day = np.floor(finite_seconds / DAY_S)
    date = day.astype(np.int64).astype("datetime64[D]")
    weekday = (day + 3) % 7  # 1970 began on a Thursday
    hour = (finite_seconds - day * DAY_S) / 3600
    of_year = 2 * np.pi / YEAR_DAYS * (date - date.astype("datetime64[Y]")).astype(np.float64)
    of_day = 2 * np.pi / 24 * hour
    functions: dict[str, Callable[[], np.ndarray]] = {
        "days": lambda: finite_seconds / DAY_S,
        "year": lambda: date.astype("datetime64[Y]").astype(np.int64) + 1970,
        "month": lambda: date.astype("datetime64[M]").astype(np.int64) % 12 + 1,
        "year_sin": lambda: np.sin(of_year),
        "year_cos": lambda: np.cos(of_year),
        **{name: partial(np.equal, weekday, i) for i, name in enumerate(WEEKDAYS)},
        "hour": lambda: hour,
        "day_sin": lambda: np.sin(of_day),
        "day_cos": lambda: np.cos(of_day),
    }
    return np.where(np.isnan(seconds), np.nan, np.array([functions[part]() for part in parts]))


def _parse_dates(
    raw: Any, column: Mapping[str, Any], nothing: set[str]
) -> tuple[np.ndarray, np.ndarray]:
    """(parts, rows) float64, and where nothing stands for a missing one."""
    values = np.asarray(raw)
    if values.dtype.kind == "M":
        values = np.where(
            np.isnat(values), np.nan, values.astype("datetime64[us]").astype(np.int64) / 1e6
        )
    else:
        values = np.array([_parse_seconds(v, column["name"], nothing) for v in values.tolist()])
    empty = np.isnan(values)
    parts = compute_date_parts(values.astype(np.float64), column["values"])
    if column["fill"] is not None:
        parts = np.where(empty, np.array(column["fill"])[:, None], parts)
        empty = np.zeros_like(empty)
    return parts, empty


def _parse_seconds(value: Any, name: str, nothing: set[str]) -> float:
    """Since 1970; a time that does not tell its zone is one of UTC."""
    if _is_nothing(value, nothing):
        return float("nan")
    if isinstance(value, str):
        with suppress(ValueError):
            value = datetime.fromisoformat(value.strip())
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise ValueError(
            f"rows: the column {name!r} must hold dates, such as 2026-11-22 or "
            f"2026-11-22T18:30:00 (got {str(value)[:60]!r})"
        )
    return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()


def _describe_too_large(column: str, value: float) -> str:
    """Describe a number beyond the bound."""
    return (
        f"the column {column} must hold numbers of at most {LARGEST:g} in size (got {value:.6g}); "
        "mend or drop such rows"
    )


def find_numbers(words: Iterable[str]) -> list[float]:
    """Return the numbers, such as -999, among the words for a missing value."""
    numbers = []
    for word in words:
        with suppress(ValueError):
            numbers.append(float(word))
    return [number for number in numbers if number == number]


def _parse_number(value: Any, name: str, nothing: set[str]) -> float:
    if _is_nothing(value, nothing):
        return float("nan")
    if isinstance(value, str):
        raise ValueError(f"rows: the column {name!r} must hold numbers (got {value[:60]!r})")
    try:
        return float(value)
    except (TypeError, ValueError):
        kind = type(value).__name__
        raise ValueError(f"rows: the column {name!r} must hold numbers (got {kind})") from None


def _is_nothing(value: Any, nothing: set[str]) -> bool:
    if isinstance(value, str):
        return value.strip() in nothing
    # NaN and NaT differ from themselves; pandas' NA has no truth.
    if isinstance(value, np.ndarray):
        return False
    return value is None or type(value).__name__ == "NAType" or bool(value != value)


def _parse_categories(
    raw: Any, column: Mapping[str, Any], nothing: set[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Each row's place among the values, -1 for one that training never saw; and where nothing
    stands for a missing one."""
    places = {value: i for i, value in enumerate(column["values"])}
    cache: dict[Any, tuple[int, bool]] = {}
    answers = []
    for value in np.asarray(raw, dtype=object).tolist():
        key = (type(value), value)
        try:
            answer = cache.get(key)
        except TypeError:  # a list, or what else has no hash
            kind = type(value).__name__
            raise ValueError(
                f"rows: the column {column['name']!r} must hold text (got {kind})"
            ) from None
        if answer is None:
            answer = _parse_category(value, column, places, nothing)
            if len(cache) < 1 << 16 and isinstance(value, str | int):
                cache[key] = answer
        answers.append(answer)
    both = np.array(answers, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1].astype(bool)


def _parse_category(
    value: Any, column: Mapping[str, Any], places: dict[str, int], nothing: set[str]
) -> tuple[int, bool]:
    filled = places.get(column["fill"], -1), column["fill"] is None
    if not isinstance(value, str) and _is_nothing(value, nothing):
        return filled
    text = str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if text.strip() in places:  # also where it reads like nothing, as the code of Namibia
        return places[text.strip()], False
    return (
        filled if _is_nothing(text, nothing) else (places.get(column.get("rest") or "", -1), False)
    )


def is_unseen(value: Any, column: Mapping[str, Any], nothing: set[str]) -> bool:
    """Return whether a value is none of those of a category, nor missing. nothing: the words for a
    missing one."""
    places = {word: i for i, word in enumerate(column["values"])}
    return _parse_category(value, column, places, nothing) == (-1, False)


def _find_best(part: np.ndarray) -> list[tuple[int, list[float]]]:
    return list(zip(part.argmax(axis=1).tolist(), part.tolist(), strict=True))


def _format_iso(parts: np.ndarray, names: Sequence[str]) -> list[str]:
    """(rows, parts) as ISO 8601 writes them, to the minute: float32 holds days to some of them."""
    days = parts[:, list(names).index("days")]
    if "hour" not in names:
        return [str(day) for day in np.round(days).astype(np.int64).astype("datetime64[D]")]
    minutes = np.round(60 * parts[:, list(names).index("hour")])
    # The day is that at whose hour the days lie: near midnight their fraction may be rounded.
    whole = np.round(days - minutes / 1440) * 1440 + minutes
    return [str(minute) for minute in whole.astype(np.int64).astype("datetime64[m]")]


def restore_raw_values(x: np.ndarray, columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the raw values of inputs (rows, inputs) that are not scaled, by column."""
    raw_values: dict[str, list[Any]] = {}
    at = 0
    for column in columns:
        if column["kind"] == CATEGORY:
            values = column["values"]
            part = x[:, at : at + len(values)]
            words = [values[i] if any(row) else None for i, row in _find_best(part)]
            raw_values[column["name"]] = [
                None if word == column["fill"] else word for word in words
            ]
            at += len(values)
        elif column["kind"] == DATE:
            parts = x[:, at : at + len(column["values"])].astype(np.float64)
            raw_values[column["name"]] = _format_iso(parts, column["values"])
            at += len(column["values"])
        else:
            numbers = x[:, at].astype(np.float64)
            numbers = np.round(numbers) if column.get("whole") else numbers
            raw_values[column["name"]] = numbers.tolist()
            at += 1
    return raw_values


LABELS = ("labels", "label")
NamedArrays = dict[str, np.ndarray]


def is_structured(spec: Mapping[str, Any]) -> bool:
    """Return whether the inputs are other than one array of floating-point numbers."""
    inputs = spec.get("inputs")
    return inputs is not None and not (inputs["kind"] == "rows" and "float" in inputs["dtype"])


def describe_inputs(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what each input is: {"name": {"shape": ..., "dtype": ...}}; the only one is called
    x."""
    inputs = spec["inputs"]
    if inputs["kind"] == "rows":
        return {"x": inputs}
    of = inputs["of"]
    named = of.items() if isinstance(of, dict) else ((str(i), part) for i, part in enumerate(of))
    labels = {*LABELS, *spec.get("labels", ())}
    return {n: p for n, p in named if p["kind"] == "rows" and n not in labels}


def check_inputs(rows: Any, spec: Mapping[str, Any]) -> NamedArrays:
    """Return the rows as arrays of the right types. Raises ValueError.

    rows: a dict or a DataFrame with the names of the inputs, or the array itself where it is one.
    """
    needs = describe_inputs(spec)
    if not isinstance(rows, Mapping) and not hasattr(rows, "columns"):
        if len(needs) > 1:
            raise ValueError(f"rows: must be a dict of arrays with {', '.join(needs)}")
        rows = {next(iter(needs)): rows}
    checked: NamedArrays = {}
    for name, need in needs.items():
        if name not in rows:
            raise ValueError(f"rows: the input {name!r} is missing; needs {', '.join(needs)}")
        # The cells of a column may be lists.
        value = rows[name].tolist() if hasattr(rows, "columns") else rows[name]
        array = np.asarray(value)
        kinds = "fiub" if "float" in need["dtype"] else "iub"
        axes = len(need["shape"]) + 1
        if array.dtype.kind not in kinds or array.ndim != axes:
            sizes = ", ".join(["rows", *map(str, need["shape"])])
            raise ValueError(
                f"rows: the input {name!r} must be {need['dtype']} of about the shape ({sizes}) "
                f"(got {array.dtype} {array.shape})"
            )
        checked[name] = array.astype("float32" if "float" in need["dtype"] else need["dtype"])
    rows_of = {name: len(array) for name, array in checked.items()}
    if len(set(rows_of.values())) > 1:
        raise ValueError(f"rows: all inputs must have as many rows (got {rows_of})")
    return checked
