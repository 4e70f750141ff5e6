"""Warns of what a person should doubt in data and results, one sentence each, with the number
and a remedy: features and rows that give the answer away, targets without anything to learn,
and results that are no better than a guess. It refuses nothing, and says nothing of what it
does not know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from headroom.base.facts import DataFacts
from headroom.base.scores import Evaluation
from headroom.base.units import format_number, format_percent
from headroom.data import encoding
from headroom.data.source_data import RawData, shorten
from headroom.data.table_store import Table
from headroom.data.targets import Labels, iterate_row_blocks

MOST_LOOKED_UP = 1 << 14  # validation rows; their share among more than these is told of as many
MOST_COUNTED = 1 << 16  # tokens
LEAST_SHARED = 0.01  # of the validation rows: fewer move no metric by more than that
FILTER_BITS = 20
FEW_ROWS = 100  # of which a share is known to 10 %, one chance in twenty
# A test score is told to be far below: by more than that, and than three standard errors.
FAR = {"r2": 0.1, "accuracy": 0.05}
FAR_ERRORS, CHANCE_ERRORS = 3.0, 1.645
REMEDY = "train longer (train.epochs), or try another optim.lr, model or features"


class RowKeys:
    """Computes a number for each row, the same for the same inputs and target: the sum of its
    32-bit words, each times a random 64-bit factor, modulo 2**64."""

    def __init__(self, rows: int, width: int) -> None:
        """width: values of a row, those of its target included."""
        random = np.random.default_rng(0)
        self._factors = random.integers(1, 2**63, width, dtype=np.uint64) * np.uint64(2)
        self._factors += np.uint64(1)
        self._keys = np.empty(rows, dtype=np.uint64)

    def add(self, part: slice, x: np.ndarray, y: np.ndarray) -> None:
        """Add rows as they are written: x float32, y any numbers."""
        answers = y.reshape(len(y), -1).astype(np.float32)
        values = x.reshape(len(x), -1)
        key = np.einsum("ij,j->i", values.view(np.uint32), self._factors[: values.shape[1]])
        key += np.einsum("ij,j->i", answers.view(np.uint32), self._factors[values.shape[1] :])
        self._keys[part] = key

    def shared(self, validation: np.ndarray, training: np.ndarray) -> float:
        """Return the share of the validation rows that are training rows too, (rows,) booleans
        both."""
        rows = np.flatnonzero(validation)
        sought = self._keys[rows[:: -(-len(rows) // MOST_LOOKED_UP)]]
        # Most rows are not among them, as a small table tells: it spares a search for each.
        shift = np.uint64(64 - FILTER_BITS)
        table = np.zeros(1 << FILTER_BITS, dtype=bool)
        table[sought >> shift] = True
        shares = []
        for part in iterate_row_blocks(len(self._keys)):  # which keeps little beside them
            keys = self._keys[part]
            shares.append(keys[table.take((keys >> shift).view(np.int64)) & training[part]])
        return float(np.isin(sought, np.concatenate(shares)).mean())


def warn_of_data(
    raw: RawData, labels: Labels, rows: Mapping[str, np.ndarray], keys: RowKeys
) -> tuple[str, ...]:
    """Return the warnings about prepared rows. rows: of each part, (rows,) booleans."""
    validation, training = rows["val"], rows["train"]
    said = _find_constants(raw, labels, rows)
    answer = None if said else _find_answer(raw)
    if answer is not None:
        how = "leave it out" + " by data.args.drop" * isinstance(raw.features, Table)
        said.append(
            f"data.target: the feature {answer} equals the target {raw.target_name!r} in every "
            f"row, and tells the model what it should predict; {how}"
        )
    shared, held = keys.shared(validation, training), int(validation.sum())
    if shared == 1 and raw.validation is not None and 2 * held == len(validation):
        said.append(warn_of_same_rows(raw.label))
    elif shared >= LEAST_SHARED:
        about = "about " if held > MOST_LOOKED_UP else ""
        said.append(
            f"data.source: {about}{round(shared * held):,} of the {held:,} validation rows "
            f"({format_percent(shared)}) are training rows too, so that val/ metrics are better "
            "than on new rows; leave out rows that are there twice"
        )
    return tuple(said)


def warn_of_same_rows(source: str) -> str:
    """Return the warning about a source that has the same rows for training and validation."""
    return (
        f"data.source: {source} gives the same rows to train and to validate on, so that val/ "
        "metrics say nothing of new rows; give others to validate on, or none: a part is then "
        "held out"
    )


def compute_guess_accuracy(class_rows: Mapping[str, Sequence[int]] | None) -> float | None:
    """Compute the accuracy of the best answer that is the same for all validation rows.
    class_rows: of each part, by class."""
    return None if class_rows is None else max(class_rows["val"]) / sum(class_rows["val"])


def compute_guess_loss(values: np.ndarray) -> float:
    """Compute the loss of a model that knows how often each of these tokens occurs, in nats:
    their entropy, of a sample where there are many."""
    some = values[:: -(-len(values) // MOST_COUNTED)]
    shares = np.bincount(some.astype(np.int64)) / len(some)
    return float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())


def warn_of_results(
    data: DataFacts, evaluation: Evaluation, *, loss: str, best: str = "val/loss"
) -> tuple[str, ...]:
    """Return the warnings about a model's evaluation on the validation rows. loss: train.loss;
    best: the metric by which weights are the best."""
    said, metrics = [], evaluation.metrics
    r2, accuracy = metrics.get("val/r2", 0.0), metrics.get("val/accuracy")
    if r2 < 0:
        said.append(
            f"val/r2 is {format_number(r2)}, below 0: the mean of the target is the better answer; "
            f"{REMEDY}"
        )
    for figure, answer, error in (
        ("rmse", "mean", evaluation.mean_rmse),
        ("mae", "median", evaluation.median_mae),
    ):
        if error is not None and not said:
            said.append(
                f"val/{figure} is {format_number(metrics[f'val/{figure}'])}, and "
                f"{format_number(error)} "
                f"where each answer is the {answer} of the training rows: on "
                f"{data.val_rows:,} validation rows that is no better beyond chance; {REMEDY}"
            )
    share = metrics.get("val/largest_class_share")
    others = round((1 - share) * data.val_rows) if share is not None else FEW_ROWS
    if share is not None and others < FEW_ROWS:
        said.append(
            f"{format_percent(share)} of the validation rows are of one class, so that "
            f"val/accuracy says little and val/balanced_accuracy rests on {others} "
            f"{'row' if others == 1 else 'rows'} of others; raise data.validation_fraction, or add "
            "rows of these"
        )
    # Weights for rare classes cost accuracy, and what they gain is no guess.
    is_guess = evaluation.is_by_chance or data.task != "classification"
    if data.guess is not None and accuracy is not None and accuracy <= data.guess and is_guess:
        said.append(
            f"val/accuracy is {format_number(accuracy)}, not above {format_number(data.guess)}, "
            "the share of the "
            f"largest class in the validation rows: that class is as good an answer; {REMEDY}"
        )
    is_plain = data.task == "tokens" and loss in ("auto", "cross_entropy")
    if data.guess is not None and is_plain and metrics["val/loss"] >= data.guess:
        said.append(
            f"val/loss is {format_number(metrics['val/loss'])}, not below "
            f"{format_number(data.guess)}, the entropy of the validation tokens: how often each is "
            f"there is as good an answer; {REMEDY}"
        )
    if best not in metrics:
        said.append(
            f"{best} is not defined by these validation rows, so that no epoch was better than "
            "another and the last one's weights are logged; choose another train.best_metric"
        )
    elif not math.isfinite(metrics[best]):
        said.append(
            f"{best} is {metrics[best]}, so that no epoch was better than another and the "
            "last one's weights are logged; lower optim.lr, or set train.precision fp32"
        )
    if evaluation.is_constant:
        said.append(
            f"every one of the {data.val_rows:,} validation rows is given the same answer; lower "
            "optim.lr, keep data.scale on, or look at the model"
        )
    return tuple(said)


def warn_of_test(
    data: DataFacts, evaluation: Evaluation, tested: Evaluation | None
) -> tuple[str, ...]:
    """Return the warnings about the rows that were put aside, where their score is below 0 or far
    below the validation score, beyond chance. evaluation: on the validation rows; tested: on those
    put aside, None where there is none."""
    if tested is None:
        return ()
    r2 = tested.metrics.get("test/r2", 0.0)
    where = "later rows are others" if data.times is not None else "they are other rows"
    if r2 < -CHANCE_ERRORS * (tested.r2_error or 0.0):
        return (
            f"test/r2 is {format_number(r2)}, below 0, where val/r2 is "
            f"{_format_known(evaluation.metrics.get('val/r2'))}: of the test rows their mean is "
            f"the better answer; {where} than those learnt from: look at what changed",
        )
    for name, least in FAR.items():
        good = evaluation.metrics.get(f"val/{name}")
        then = tested.metrics.get(f"test/{name}")
        if good is None or then is None or not math.isfinite(good - then):
            continue
        if name == "r2":
            errors = evaluation.r2_error, tested.r2_error
        else:
            errors = (
                math.sqrt(good * (1 - good) / data.val_rows),
                math.sqrt(then * (1 - then) / data.test_rows),
            )
        bounds = [math.inf if error is None else error for error in errors]
        if good - then > max(least, FAR_ERRORS * math.hypot(*bounds)):
            return (
                f"test/{name} is {format_number(then)}, far below val/{name}, which is "
                f"{format_number(good)}: {where}, or too much was chosen by the validation rows; "
                "trust the test",
            )
    return ()


def _format_known(value: float | None) -> str:
    return "not known" if value is None else format_number(value)


def _find_constants(raw: RawData, labels: Labels, rows: Mapping[str, np.ndarray]) -> list[str]:
    """Of a regression, a part in which the target never changes."""
    if labels.task != "regression":
        return []
    for part, chosen, then in (
        ("training", rows["train"], "there is nothing to learn; choose another data.target"),
        ("validation", rows["val"], "val/r2 is not known; raise data.validation_fraction"),
    ):
        values = labels.values[chosen]
        if (values == values[:1]).all():
            shown = ", ".join(map(format_number, values[0].tolist()[:3]))
            return [
                f"data.target: {raw.target_name!r} is {shown} in every {part} row of {raw.label}, "
                f"so that {then}"
            ]
    return []


def _find_answer(raw: RawData) -> str | None:
    """The name of a feature that is the target itself; not among pixels, nor of several targets."""
    table = raw.features if isinstance(raw.features, Table) else None
    is_text = raw.target.dtype == object
    if raw.target.ndim > 1 or len(raw.features.shape) > 2 or (is_text and table is None):
        return None
    there = np.arange(raw.features.shape[1])
    if table is not None:
        there = np.flatnonzero(table.numeric != is_text)
    for part, columns in _read_columns(raw):
        target = raw.target[part]
        if not is_text:  # almost always the first row alone tells
            there = there[columns[there, 0] == target[0]]
        words = [None if table is None else table.columns[i].words for i in there]
        equal = [
            np.array_equal(_decode_column(columns[i], column_words), target)
            for i, column_words in zip(there, words, strict=True)
        ]
        there = there[np.array(equal, dtype=bool)]
        if not len(there):
            return None
    return f"{there[0] + 1}" if raw.feature_names is None else shorten(raw.feature_names[there[0]])


def _read_columns(raw: RawData) -> Iterator[tuple[slice, np.ndarray]]:
    """The features in blocks of rows, (columns, rows) float64."""
    table = raw.features
    if not isinstance(table, Table):
        yield from ((part, x.T) for part, x in encoding.iterate_feature_blocks(raw))
        return
    for part, values in table.map_blocks(
        lambda start, values: (slice(start, start + values.shape[1]), values)
    ):
        if values.size:
            yield part, values


def _decode_column(values: np.ndarray, words: tuple[str, ...] | None) -> np.ndarray:
    """A column as its user has it; what is missing is equal to nothing."""
    if words is None:
        return values
    codes = np.where(np.isnan(values), len(words), values).astype(np.int64)
    return np.array([*words, None], dtype=object)[codes]
