"""Inputs made of a table's columns, against scikit-learn's and against exact fractions."""

from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import OneHotEncoder, StandardScaler

from headroom.data import encoding
from headroom.data.columns import LearntColumn
from headroom.data.source_data import DataError, RawData
from headroom.data.table_store import RowStore, Table

RED, WORDS = 1, ("red", "blue", "never", "green")


def _raw(
    columns: list[np.ndarray],
    *,
    words: tuple[tuple[str, ...] | None, ...] | None = None,
    missing: str = "fail",
    block_rows: int = 7,
    kept: np.ndarray | None = None,
) -> RawData:
    """Of columns of numbers and of codes of words, in blocks of so many rows."""
    with TemporaryDirectory() as folder:  # of which nothing is needed later
        store = RowStore(len(columns), Path(folder), block_rows=block_rows)
    store.reserve(len(columns[0]))
    for i, column in enumerate(columns):
        store.put(i, 0, column)
    names = tuple("abcdef"[: len(columns)])
    learnt = tuple(
        LearntColumn(name, known, holes=int(np.isnan(column).sum()))
        for name, column, known in zip(names, columns, words or (None,) * len(columns), strict=True)
    )
    table = Table(learnt, store, missing, kept)
    return RawData(table, np.zeros(0), names, "y", "given.csv", kept=kept)


def _inputs(made: encoding.Encoding) -> np.ndarray:
    """Of all rows; the slices say where each block belongs."""
    rows, parts = len(made.raw.features), list(made.blocks())
    inputs = np.full((rows, len(made.names)), np.nan, np.float32)
    for where, part in parts:
        inputs[where] = part
    assert [part.start for part, _ in parts[1:]] == [part.stop for part, _ in parts[:-1]]
    assert parts[-1][0].stop == rows
    assert all(part.size <= max(encoding.ENCODED_VALUES, len(made.names)) for _, part in parts)
    return inputs


@pytest.mark.parametrize("missing", ["fail", "mean", "drop"])
@pytest.mark.parametrize("most", [1, 15, 1 << 20])
@pytest.mark.parametrize("scale", [True, False])
def test_inputs_are_those_of_scikit_learn(
    monkeypatch: pytest.MonkeyPatch, missing: str, most: int, scale: bool
) -> None:
    """However rows are cut, first as they are read and then as they are encoded."""
    monkeypatch.setattr(encoding, "ENCODED_VALUES", most)
    random = np.random.default_rng(2)
    a, b = random.normal(5, 3, 40), random.normal(-1e6, 1e-2, 40)
    colour, size = random.choice([0.0, 1.0, 3.0], 40), random.choice([0.0, 1.0], 40)
    colour[:2], size[:3] = RED, (0, 1, 1)
    if missing != "fail":
        a[[3, 17, 39]] = b[[3, 8]] = colour[[1, 20]] = np.nan
    whole = ~np.isnan([a, b, colour]).any(axis=0)
    kept = whole if missing == "drop" else None
    words = (None, WORDS, None, ("small", "large"))
    raw = _raw([a, colour, b, size], words=words, missing=missing, kept=kept)
    rows = kept if kept is not None else np.ones(40, dtype=bool)
    for_training = random.random(int(rows.sum())) < 0.7
    made = encoding.fit_encoding(raw, for_training=for_training, scale=scale)

    numbers = np.array([a, b]).T[rows]
    numbers = SimpleImputer().fit(numbers[for_training]).transform(numbers)
    if scale:
        numbers = StandardScaler().fit(numbers[for_training]).transform(numbers)
    named = [
        np.array([*WORDS, "missing"])[np.where(np.isnan(c), 4, c).astype(int)] for c in [colour]
    ]
    named.append(np.array(["small", "large"])[size.astype(int)])
    encoder = OneHotEncoder(sparse_output=False).fit(np.array(named).T[rows])
    texts = encoder.transform(np.array(named).T[rows])
    of_colour = len(encoder.categories_[0])
    expected = np.column_stack(
        [numbers[:, 0], texts[:, :of_colour], numbers[:, 1], texts[:, of_colour:]]
    )
    colours, sizes = ([str(v) for v in values] for values in encoder.categories_)
    assert list(made.names) == ["a", *(f"b={v}" for v in colours), "c", *(f"d={v}" for v in sizes)]
    np.testing.assert_allclose(_inputs(made), expected, rtol=1e-5, atol=1e-5)
    assert [column.fill is not None for column in made.columns] == [missing == "mean"] * 4


def test_a_value_that_is_once_in_each_block_is_a_category() -> None:
    """Counts of the blocks are added up."""
    codes = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    raw = _raw([codes, np.arange(6.0)], words=(("u", "v"), None), block_rows=3)
    made = encoding.fit_encoding(raw, for_training=np.ones(6, dtype=bool), scale=True)
    assert made.columns[0].values == ("u", "v")
    np.testing.assert_array_equal(_inputs(made)[:, :2], np.eye(2)[codes.astype(int)])


def test_what_became_of_a_column_is_told() -> None:
    holes, whole = np.array([1.0, np.nan, 3, np.nan]), np.arange(4.0)
    words, codes = ("u", "v"), np.array([0.0, 1.0, np.nan, 1.0])
    of = (None, None, words, words)
    raw = _raw([holes, whole, codes, whole % 2], words=of, missing="mean")
    assert encoding.fit_encoding(raw, for_training=np.ones(4, dtype=bool), scale=True).notes == (
        "2 missing values of 'a' became 2, the mean of the training rows",
        "'c' became 3 inputs, one for each text, 1 missing ones as missing",
        "'d' became 2 inputs, one for each text",
    )
    kept = np.array([True, False, True, False])
    raw = _raw([holes, whole], missing="drop", kept=kept)
    assert not encoding.fit_encoding(raw, for_training=np.ones(2, dtype=bool), scale=True).notes


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("row", [0, 9, 19])
@pytest.mark.parametrize("most", [4, 1 << 20])
def test_a_value_too_far_from_the_training_rows_is_named_by_its_row(
    monkeypatch: pytest.MonkeyPatch, sign: int, row: int, most: int
) -> None:
    """Up to 1e30 deviations it is an input."""
    monkeypatch.setattr(encoding, "ENCODED_VALUES", most)
    far = np.arange(20.0)
    far[row] = sign * 1e30
    codes = np.arange(20.0) % 2
    made = encoding.fit_encoding(
        _raw([codes, far, codes], words=(("u", "v"), None, None)),
        for_training=np.ones(20, dtype=bool),
        scale=False,
    )
    assert _inputs(made)[row, 2] == np.float32(sign * 1e30)
    far[row:] = sign * np.nextafter(1e30, np.inf)  # the first is named
    raw = _raw([codes, codes, far], words=(("u", "v"), None, None))
    made = encoding.fit_encoding(raw, for_training=np.ones(20, dtype=bool), scale=False)
    with pytest.raises(DataError, match=f"given.csv row {row + 1}, column 'c': lies more than 1e"):
        _inputs(made)
    # Where the value at the border is not the one that is refused.
    codes[row] = sign * 1e30
    raw = _raw([codes, far])
    made = encoding.fit_encoding(raw, for_training=np.ones(20, dtype=bool), scale=False)
    with pytest.raises(DataError, match=f"given.csv row {row + 1}, column 'b': lies more than 1e"):
        _inputs(made)


def _exact(column: np.ndarray, chosen: np.ndarray) -> tuple[int, Fraction, Fraction]:
    """Count, mean and the sum of the squares of the differences from it."""
    values = [Fraction(v) for v, c in zip(column.tolist(), chosen, strict=True) if c and v == v]
    mean = sum(values, Fraction()) / len(values)
    return len(values), mean, sum(((v - mean) ** 2 for v in values), Fraction())


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("offset", [0.0, 2.0**52])
def test_moments_are_exact_beside_a_mean_that_no_float_holds(holes: bool, offset: float) -> None:
    """A mean of 2**52 and a quarter is rounded, and each difference from it is wrong by as much."""
    values = np.array([[k + offset for k in (0, 1, 1, 4, 5, 7, 9, 2)], [0.1] * 8])
    chosen = np.array([1.0, 1, 1, 1, 0, 1, 1, 1])
    if holes:
        values[:, 2] = np.nan
    found = encoding.compute_moments(values, chosen, holes=holes)
    for i, column in enumerate(values):
        count, mean, squares = _exact(column, chosen)
        assert found.count[i] == count
        assert abs(Fraction(found.mean[i]) - mean) <= abs(mean) * Fraction(2.0**-52)
        assert found.squares[i] == pytest.approx(float(squares), rel=1e-12, abs=1e-30)


@pytest.mark.parametrize(("rows", "value"), [(421411, 0.023237291963930387),
                                             (482299, 0.007374101339780593)])  # fmt: skip
def test_the_rounding_of_a_long_constant_column_has_no_root_to_take(
    rows: int, value: float
) -> None:
    """What the mean is wrong by gave a sum of squares below 0."""
    moments = encoding.compute_moments(np.full((1, rows), value), np.ones(rows), holes=False)
    assert encoding.compute_mean_deviation(moments, rows)[1] == 1


def test_moments_of_blocks_together_are_those_of_all_rows() -> None:
    values = np.array([[1e9 + k for k in (0, 1, 1, 4, 5, 7, 9, 2)], [3.0] * 8])
    blocks = [encoding.compute_moments(v, np.ones(v.shape[1]), holes=False) for v in
              (values[:, :1], values[:, 1:4], values[:, 4:])]  # fmt: skip
    found = blocks[0].plus(blocks[1]).plus(blocks[2])
    for i, column in enumerate(values):
        count, mean, squares = _exact(column, np.ones(8))
        assert (found.count[i], found.mean[i]) == (count, pytest.approx(float(mean), rel=1e-15))
        assert found.squares[i] == pytest.approx(float(squares), rel=1e-6)


def test_a_column_of_which_nothing_can_be_learnt_is_refused_by_name() -> None:
    codes, empty, alone = np.arange(4.0) % 2, np.full(4, np.nan), np.zeros(4)
    raw = _raw([codes, alone, empty, codes], words=(("u", "v"), WORDS, None, None), missing="mean")
    with pytest.raises(DataError) as told:
        encoding.fit_encoding(raw, for_training=np.ones(4, dtype=bool), scale=True)
    assert str(told.value).splitlines() == [
        "data.path: given.csv column 'c': has no value in any training row, of which to take the "
        "mean; leave the column out by data.args.drop",
        "data.path: given.csv column 'b': holds 'red' in every row that is left, of which nothing "
        "can be learnt; leave the column out by data.args.drop",
    ]


@pytest.mark.parametrize("holes", [False, True])
def test_no_rows_have_no_moments_and_change_none(holes: bool) -> None:
    values = np.array([[1.0, 3.0]])
    none = encoding.compute_moments(values, np.zeros(2), holes=holes)
    both = encoding.compute_moments(values, np.ones(2), holes=False).plus(none).plus(none)
    assert (none.count, both.count, both.mean, both.squares) == (0, 2, 2, 2)
    assert none.plus(none).count == 0
    one = encoding.compute_moments(values[:, 1:], np.ones(1), holes=False)
    assert (none.plus(one).mean, none.plus(one).squares) == (3, 0)


def test_constants_get_deviation_1() -> None:
    """Zeros too, whose deviation and rounding are both 0; a deviation above rounding counts."""
    columns = np.array([[0.0] * 4, [0.1] * 4, [1.0, 1 + 1e-14, 1, 1 + 1e-14], [0, 2, 0, 2]])
    moments = encoding.compute_moments(columns, np.ones(4), holes=False)
    mean, deviation = encoding.compute_mean_deviation(moments, 4)
    np.testing.assert_allclose(mean, columns.mean(axis=1))
    np.testing.assert_allclose(deviation, [1, 1, columns[2].std(), 1], rtol=1e-3)
