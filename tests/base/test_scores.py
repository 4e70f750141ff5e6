"""The figures, against scikit-learn on all rows at once, and where they are not defined."""

import warnings

import numpy as np
import pytest
from sklearn import metrics as sk

from headroom.base import scores
from headroom.base.scores import ConfusionCells

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize("classes", [2, 7, 2000])  # of 2000 the whole matrix would be too large
def test_cells_are_those_of_the_confusion_matrix(classes: int) -> None:
    random = np.random.default_rng(0)
    y, told = (random.integers(0, classes, 500).astype(np.int16) for _ in range(2))
    so, given, rows = ConfusionCells.of(told, y).table
    matrix = sk.confusion_matrix(y, told, labels=range(classes))
    assert rows.sum() == 500 and (rows > 0).all() and len(rows) == (matrix > 0).sum()
    assert (matrix[so, given] == rows).all()


@pytest.mark.parametrize("missing", [None, "from the rows", "from the answers", "from both"])
def test_figures_of_classes_are_those_of_all_rows(missing: str | None) -> None:
    """A class that no row has and that is never given counts for nothing."""
    random = np.random.default_rng(1)
    y, told = random.integers(0, 4, 200), random.integers(0, 4, 200)
    y = np.where((y == 3) & (missing in ("from the rows", "from both")), 0, y)
    told = np.where((told == 3) & (missing in ("from the answers", "from both")), 1, told)
    found = scores.compute_class_scores(ConfusionCells.of(told, y))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of classes in the answers only
        expected = sk.balanced_accuracy_score(y, told), sk.f1_score(y, told, average="macro")
    assert tuple(found.values()) == pytest.approx(expected)
    by = scores.compute_scores_by_class(ConfusionCells.of(told, y))
    expected = sk.precision_recall_fscore_support(y, told, zero_division=0)
    np.testing.assert_allclose([by.precision, by.recall, by.f1, by.rows], expected)
    assert by.classes.tolist() == sorted({*y, *told})


def test_one_row_has_figures_and_rows_without_a_class_none() -> None:
    one = np.array([2])
    found = {"balanced_accuracy": 1, "macro_f1": 1, "largest_class_share": 1}
    assert scores.compute_class_scores(ConfusionCells.of(one, one)) == found
    assert scores.compute_class_scores(ConfusionCells.of(one, np.array([-100]))) == {}
    assert scores.compute_regression_scores(np.ones((1, 1)), np.zeros((1, 1))) == {
        "mae": 1,
        "rmse": 1,
    }
    assert scores.compute_regression_scores(np.ones((1, 1)), np.full((1, 1), 2.0)) == {
        "mae": 1,
        "rmse": 1,
        "mape": 50,
    }
    assert scores.compute_label_scores(np.ones((1, 1)), np.ones((1, 1), bool)) == {
        "macro_f1": 1,
        "average_precision": 1,
    }


@pytest.mark.parametrize("targets", [1, 3])
def test_the_percentage_error_is_scikit_learns_where_no_target_is_0(targets: int) -> None:
    random = np.random.default_rng(5)
    y, outputs = random.normal(5, 2, (80, targets)), random.normal(5, 2, (80, targets))
    y[:3] *= -1
    found = scores.compute_regression_scores(outputs, y)
    expected = 100 * sk.mean_absolute_percentage_error(y, outputs)
    assert found["mape"] == pytest.approx(expected, rel=1e-12)
    outputs[4, 0] = np.nan
    assert np.isnan(scores.compute_regression_scores(outputs, y)["mape"])


@pytest.mark.parametrize("zero", [0.0, -0.0, 2e-7])  # the last: 0 that was scaled, and back
def test_there_is_no_percentage_error_where_a_target_is_0(zero: float) -> None:
    """One such row of a thousand would make it 1e15 per cent, and hide all others."""
    y = np.linspace(1, 7, 1000)[:, None]
    assert "mape" in scores.compute_regression_scores(y + 1, y)
    y[17] = zero
    assert {*scores.compute_regression_scores(y + 1, y)} == {"mae", "rmse", "r2"}
    assert "mape" not in scores.compute_regression_scores(y * 0, y * 0)


@pytest.mark.parametrize("labels", [1, 2, 5])
def test_a_label_that_no_row_has_is_left_out(labels: int) -> None:
    random = np.random.default_rng(2)
    logits, so = random.normal(size=(60, labels + 1)), random.random((60, labels + 1)) > 0.6
    so[:, -1], logits[:, -1] = False, -1  # and that is never given
    found = scores.compute_label_scores(logits, so)
    each = [(so[:, k], logits[:, k]) for k in range(labels)]
    assert found == pytest.approx(
        {
            "macro_f1": np.mean([sk.f1_score(y, told > 0) for y, told in each]),
            "average_precision": np.mean([sk.average_precision_score(*pair) for pair in each]),
        }
    )
    logits[0, -1] = 1  # once given, it has an F1 of 0
    given = scores.compute_label_scores(logits, so)
    assert given["macro_f1"] == pytest.approx(found["macro_f1"] * labels / (labels + 1))
    assert given["average_precision"] == found["average_precision"]
    assert scores.compute_label_scores(-np.ones((4, 2)), np.zeros((4, 2), bool)) == {}


def test_outputs_of_another_shape_than_their_targets_have_no_errors() -> None:
    """Story: a mean and a deviation for each target were compared with it both."""
    assert scores.compute_regression_scores(np.ones((4, 2)), np.ones((4, 1))) == {}


NOTHING = None, None  # to compare with


@pytest.mark.parametrize("rows", [30, 200, 2000])
def test_an_error_that_is_not_below_a_guesss_beyond_chance_is_told_and_no_other(rows: int) -> None:
    """Answers of which the target knows nothing pass for better in one case of twenty; those that
    are right are never doubted. Of a skewed target the median is the better answer."""
    random, doubted, wronged = np.random.default_rng(rows), 0, 0
    for _ in range(300):
        y = random.exponential(size=(rows, 1))
        guess = ((1.0,), (float(np.log(2)),))
        by_chance = scores.compute_constant_baseline(
            np.full((rows, 1), 1.0) + random.normal(size=y.shape) / 20, y, guess
        )
        doubted += by_chance[0] is not None
        wronged += (
            scores.compute_constant_baseline(y + random.normal(size=y.shape) / 10, y, guess)
            != NOTHING
        )
    assert doubted >= 0.9 * 300 and wronged == 0
    mean_rmse, median_mae = scores.compute_constant_baseline(np.full((rows, 1), 1.0), y, guess)
    assert mean_rmse == pytest.approx(sk.root_mean_squared_error(y, np.ones_like(y)))
    assert median_mae == pytest.approx(sk.mean_absolute_error(y, np.full_like(y, np.log(2))))


def test_of_nothing_to_compare_nothing_is_told() -> None:
    y, guess = np.arange(4.0)[:, None], ((1.5,), (1.5,))
    assert scores.compute_constant_baseline(y * 0, y, None) == NOTHING
    assert scores.compute_constant_baseline(y[:1], y[:1], guess) == NOTHING
    assert scores.compute_constant_baseline(y * np.nan, y, guess) == NOTHING
    several = np.zeros((4, 2))
    assert scores.compute_constant_baseline(several, several, guess) == NOTHING


@pytest.mark.parametrize(("rows", "told"), [(10, False), (9, True)])
def test_the_share_of_the_largest_class_is_told_above_90_percent(rows: int, told: bool) -> None:
    y = np.array([0] * 89 + [1] * rows)
    found = scores.compute_class_scores(ConfusionCells.of(np.zeros_like(y), y))
    assert found.get("largest_class_share") == (89 / (89 + rows) if told else None)
    assert found["balanced_accuracy"] == 0.5


@pytest.mark.parametrize(("classes", "rows"), [(2, 60), (3, 400), (5, 60)])
def test_predictions_that_know_nothing_pass_for_knowing_in_one_case_of_twenty(
    classes: int, rows: int
) -> None:
    """Held against the balanced accuracies of shuffled predictions."""
    random, passed = np.random.default_rng(classes), 0
    shares = np.array([0.8] + [0.2 / (classes - 1)] * (classes - 1))
    for _ in range(400):
        y, told = (random.choice(classes, rows, p=shares) for _ in range(2))
        passed += not scores.is_by_chance(ConfusionCells.of(told, y))
    assert 0.02 <= passed / 400 <= 0.09
    told = np.where(random.random(rows) < 0.5, y, told)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        orders = [sk.balanced_accuracy_score(y, random.permutation(told)) for _ in range(400)]
        found = sk.balanced_accuracy_score(y, told)
    far = (found - np.mean(orders)) / np.std(orders)
    assert abs(far - 1.645) < 0.3 or scores.is_by_chance(ConfusionCells.of(told, y)) == (
        far < 1.645
    )
    same = np.zeros(rows, dtype=np.int64)
    assert scores.is_by_chance(ConfusionCells.of(same, y))
    assert not scores.is_by_chance(ConfusionCells.of(y, y))


def test_the_error_of_r2_is_what_it_scatters_by() -> None:
    random, found, told = np.random.default_rng(0), [], []
    for _ in range(400):
        y = random.normal(size=(300, 1))
        outputs = y + random.normal(size=y.shape) / 2
        found.append(scores.compute_regression_scores(outputs, y)["r2"])
        told.append(scores.compute_r2_error(outputs, y))
    assert np.mean(told) == pytest.approx(np.std(found), rel=0.15)
    assert scores.compute_r2_error(y[:2], y[:2]) is scores.compute_r2_error(y, 0 * y) is None


def test_six_rows_that_are_told_apart_are_no_chance_beside_a_large_class() -> None:
    y = (np.arange(1200) >= 1196).astype(int)
    for given, is_by_chance in (((np.arange(1200) >= 1190), False), (np.arange(1200) < 6, True)):
        cells = ConfusionCells.of(given.astype(int), y)
        found = scores.compute_class_scores(cells)
        assert (found["balanced_accuracy"] > 0.9974) != is_by_chance
        assert scores.is_by_chance(cells) == is_by_chance
