"""The figures of an evaluation, against scikit-learn's and torch's over all rows at once."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn

from headroom.base.facts import DataFacts
from headroom.base.scores import Evaluation
from headroom.data.dataset_batches import place_rows
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.training.evaluation import Evaluator, choose_eval_rows, evaluate
from headroom.training.losses import compute_token_loss, make_loss
from headroom.training.micro_batches import MemoryExhausted, SingleAttempt
from tests.watch.loop_watch import make_phases

CPU = torch.device("cpu")
# What weights may be chosen by, of twelve classes.
CHOSEN_BY = {
    "classification": (
        "val/accuracy",
        "val/balanced_accuracy",
        "val/macro_f1",
        "val/top5_accuracy",
        "val/loss",
    ),
    "multilabel": ("val/accuracy", "val/macro_f1", "val/f1", "val/average_precision", "val/loss"),
    "regression": ("val/r2", "val/mae", "val/rmse", "val/mape", "val/loss"),
    "tokens": ("val/perplexity", "val/loss"),
}
LOSSES = {
    "classification": nn.functional.cross_entropy,
    "multilabel": nn.functional.binary_cross_entropy_with_logits,
    "regression": nn.functional.mse_loss,
    "tokens": compute_token_loss,
}


class _Parts(SingleAttempt):
    """As many rows are read as given, and two of them at once go through the model."""

    def fit(self, attempt, batch):
        return attempt(batch, 2)


def _train_settings(**given: Any) -> Any:
    return RunConfig.model_validate({"train": given}).train


def _evaluated(
    task: str, outputs: np.ndarray, y: np.ndarray, *, rows_read: int = 3, part="val", **more
) -> Evaluation:
    """Of a model that gives those outputs, row by row."""
    evaluator = Evaluator(
        task, LOSSES[task], nullcontext, micro=_Parts(rows_read), phases=make_phases(), **more
    )
    rows = place_rows(outputs, y, device=CPU, room_bytes=10**9)
    return evaluate(nn.Identity(), rows, evaluator, part=part)


def _judged(task: str, outputs: np.ndarray, y: np.ndarray, **more) -> dict[str, float]:
    return _evaluated(task, outputs, y, **more).metrics


def _outputs(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# One batch, fewer than are folded, and more, the last one smaller.
@pytest.mark.parametrize("rows_read", [64, 10, 3])
@pytest.mark.parametrize("rows", [40, 41])
def test_a_classification_has_the_loss_and_accuracy_of_all_rows(rows_read: int, rows: int) -> None:
    outputs, y = _outputs(rows, 3), np.arange(rows) % 3
    found = _judged("classification", outputs, y, rows_read=rows_read)
    assert found == pytest.approx(
        {
            "val/loss": sk.log_loss(y, torch.tensor(outputs).softmax(1).numpy()),
            "val/accuracy": sk.accuracy_score(y, outputs.argmax(1)),
            "val/balanced_accuracy": sk.balanced_accuracy_score(y, outputs.argmax(1)),
            "val/macro_f1": sk.f1_score(y, outputs.argmax(1), average="macro"),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("rows_read", [64, 3])
def test_several_labels_have_the_accuracy_and_f1_of_all_labels_together(rows_read: int) -> None:
    outputs, y = _outputs(41, 4, seed=2), (_outputs(41, 4, seed=1) > 0.7).astype(np.float32)
    outputs[0], y[:3, 0] = 0, (0.25, 0.75, 0.5)  # a logit of 0 is no yes; soft labels round
    found = _judged("multilabel", outputs, y, rows_read=rows_read)
    told, so = (outputs > 0).ravel(), (y > 0.5).ravel()
    loss = LOSSES["multilabel"](torch.tensor(outputs), torch.tensor(y)).item()
    assert found == pytest.approx(
        {
            "val/loss": loss,
            "val/accuracy": sk.accuracy_score(so, told),
            "val/f1": sk.f1_score(so, told),
            "val/macro_f1": sk.f1_score(y > 0.5, outputs > 0, average="macro"),
            "val/average_precision": sk.average_precision_score(y > 0.5, outputs),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("classes", [10, 11])
def test_of_more_than_ten_classes_it_is_told_how_often_one_of_five_is_right(classes: int) -> None:
    outputs, y = _outputs(41, classes), np.arange(41) % classes
    found = _judged("classification", outputs, y)
    assert ("val/top5_accuracy" in found) == (classes > 10)
    if classes > 10:
        expected = sk.top_k_accuracy_score(y, outputs, k=5, labels=range(classes))
        assert found["val/top5_accuracy"] == pytest.approx(expected)


def _judge_every_figure(task: str) -> set[str]:
    """Return the names of all that evaluations of a task give."""
    logits = _outputs(60, 12)
    if task == "classification":
        mostly_one = np.where(np.arange(60) < 57, 0, np.arange(60) % 12)
        told = [(logits, np.arange(60) % 12), (np.eye(12, dtype="f")[[0] * 60], mostly_one)]
    elif task == "multilabel":
        told = [(logits, (logits > 0.5).astype(np.float32))]
    elif task == "regression":
        told = [(_outputs(60, 1), _outputs(60, 1, seed=1))]
    else:
        told = [(_outputs(60, 3, 12), np.zeros((60, 3), np.int64))]
    guess = ((0.0,), (0.0,))
    found = [_judged(task, *pair, guess=guess) for pair in told]
    return {name.removeprefix("val/") for of in found for name in of}


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression", "tokens"])
def test_every_figure_of_an_evaluation_is_no_name_for_an_own_metric(task: str) -> None:
    """Story: an own metric called macro_f1 took the place of the task's own: val/macro_f1 77."""
    names = _judge_every_figure(task)
    assert {f"val/{name}" for name in names} >= {*CHOSEN_BY[task]}
    assert task != "classification" or names >= {"top5_accuracy", "largest_class_share"}
    for name in names:
        with pytest.raises(ValueError, match=f"'{name}' is the name of a figure of the task"):
            _train_settings(metrics={name: "torch.nn.functional:l1_loss"})
    _train_settings(metrics={f"own_{name}": "torch.nn.functional:l1_loss" for name in names})


def test_a_part_of_its_own_names_its_figures() -> None:
    outputs, y = _outputs(5, 1), _outputs(5, 1, seed=1)
    assert set(_judged("regression", outputs, y, part="test")) == {
        *("test/loss", "test/r2", "test/mae", "test/rmse", "test/mape")
    }


def test_a_classification_leaves_its_cells_and_others_none() -> None:
    outputs, y = _outputs(40, 3), np.arange(40) % 3
    cells = _evaluated("classification", outputs, y).cells
    assert cells is not None
    matrix = np.zeros((3, 3), int)
    matrix[cells.table[0], cells.table[1]] = cells.table[2]
    assert (matrix == sk.confusion_matrix(y, outputs.argmax(1))).all()
    assert _evaluated("regression", outputs, outputs).cells is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_outputs_that_are_no_numbers_raise_nothing(bad: float) -> None:
    outputs, y = _outputs(12, 3), np.arange(12) % 3
    outputs[4, 1] = bad
    assert "val/macro_f1" in _judged("classification", outputs, y)
    labels = np.eye(3, dtype="f")[y]
    assert "val/average_precision" not in _judged("multilabel", outputs, labels)
    found = _judged("regression", outputs, labels)
    assert math.isnan(found["val/mae"]) and "val/r2" not in found


def test_no_label_told_of_none_there_is_is_an_f1_of_1() -> None:
    none = np.zeros((4, 2), dtype=np.float32)
    assert _judged("multilabel", none - 1, none)["val/f1"] == 1.0
    assert _judged("multilabel", none + 1, none)["val/f1"] == 0.0


@pytest.mark.parametrize("rows_read", [64, 3])
def test_a_regression_has_the_errors_of_all_rows_in_the_targets_units(rows_read: int) -> None:
    outputs, y = _outputs(41, 2), _outputs(41, 2, seed=1) + 3
    scale = np.array([10.0, 0.5])
    found = _judged("regression", outputs, y, rows_read=rows_read, to_units=scale.__mul__)
    whole_y, whole = y * scale, outputs * scale
    spread = ((whole_y - whole_y.mean(0)) ** 2).sum()
    assert found == pytest.approx(
        {
            "val/loss": sk.mean_squared_error(y, outputs),
            "val/mae": sk.mean_absolute_error(whole_y, whole),
            "val/rmse": sk.root_mean_squared_error(whole_y, whole),
            "val/mape": 100 * sk.mean_absolute_percentage_error(whole_y, whole),
            "val/r2": 1 - ((whole_y - whole) ** 2).sum() / spread,
        },
        rel=1e-5,
    )
    outputs, y = outputs[:, :1].copy(), y[:, :1].copy()
    one = _judged("regression", outputs, y, rows_read=rows_read)
    assert one["val/r2"] == pytest.approx(sk.r2_score(y[:, 0], outputs[:, 0]), rel=1e-5)
    assert one["val/mae"] == pytest.approx(sk.mean_absolute_error(y, outputs), rel=1e-5)


def test_r2_of_a_target_that_never_changes_is_not_known() -> None:
    outputs, y = _outputs(5, 1) / 1000, _outputs(5, 1, seed=1) / 1000
    assert _judged("regression", outputs, y)["val/r2"] == pytest.approx(sk.r2_score(y, outputs))
    assert "val/r2" not in _judged("regression", _outputs(5, 1), np.ones((5, 1), np.float32))


@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_the_perplexity_of_tokens_is_a_float_however_wrong_they_are(factor: float) -> None:
    """The exponential of more than 700 would be none."""
    outputs = _outputs(6, 5, 7) * factor
    tokens = np.arange(30).reshape(6, 5) % 7
    found = _judged("tokens", outputs, tokens)
    loss = LOSSES["tokens"](torch.tensor(outputs), torch.tensor(tokens)).item()
    assert found["val/loss"] == pytest.approx(loss, rel=1e-5)
    assert found["val/perplexity"] == pytest.approx(math.exp(min(700.0, loss)), rel=1e-4)
    assert (loss > 700) == (factor > 1)


def _largest(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs.max()


def test_a_metric_of_the_users_own_counts_each_batch_by_its_rows() -> None:
    outputs, y = _outputs(5, 3), np.arange(5) % 3
    found = _judged("classification", outputs, y, rows_read=3, metrics={"most": _largest})
    parts = [outputs[:2], outputs[2:3], outputs[3:5]]
    expected = sum(part.max() * len(part) for part in parts) / 5
    assert found["val/most"] == pytest.approx(expected)


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_the_same_answer_to_every_row_is_told_where_there_is_more_than_one(rows: int) -> None:
    classes = np.zeros((rows, 3), dtype=np.float32)
    classes[:, 2] = 1
    y = np.arange(rows) % 3
    assert _evaluated("classification", classes, y).is_constant == (rows > 1)
    values, targets = np.full((rows, 2), 0.3, np.float32), _outputs(rows, 2)
    assert _evaluated("regression", values, targets).is_constant == (rows > 1)
    if rows > 1:
        classes[-1, 1], values[-1, 1] = 2, 0.31
        assert not _evaluated("classification", classes, y).is_constant
        assert not _evaluated("regression", values, targets).is_constant


def test_of_labels_and_tokens_nobody_asks_if_the_answers_are_alike() -> None:
    labels = np.eye(4, 2, dtype=np.float32)
    assert not _evaluated("multilabel", np.ones((4, 2), np.float32), labels).is_constant


def test_as_many_rows_are_read_as_a_sixteenth_of_the_room_holds() -> None:
    """Not fewer than training takes, and not more than 1,024; tokens and loaders: as training."""

    def rows(room: float, *, batch_size: int = 8, size: int = 25_000, **facts: object) -> int:
        told = {
            "task": "classification",
            "batch": None,
            "bytes": size,
            "train_rows": 200,
            "test_rows": 0,
            "val_batch_rows": 0,
        }
        made = SimpleNamespace(**{**told, "val_rows": 50, **facts})
        return choose_eval_rows(made, batch_size, room_bytes=room)

    assert rows(16 * 100 * 20) == 20
    assert rows(16 * 100 * 20, size=200) == 1024
    assert rows(16 * 100 * 3) == 8
    assert rows(math.inf) == 1024
    assert rows(math.inf, batch_size=2000) == 2000
    assert rows(math.inf, task="tokens") == rows(math.inf, batch="loader") == 8


@pytest.mark.parametrize("residency", ["pinned", "device"])
def test_where_one_row_of_the_device_does_not_fit_it_ends(residency: str) -> None:
    """Rows that the device holds already take no room; reading fewer of them would not help."""
    batches = place_rows(_outputs(5, 3), np.arange(5) % 3, device=CPU, room_bytes=10**9)
    tried: list[int] = []

    class Narrow:
        def __init__(self) -> None:
            self.residency = residency

        def __len__(self) -> int:
            return len(batches)

        def iterate_in_order(self, rows: int):
            tried.append(rows)
            raise RuntimeError("CUDA out of memory.")

    evaluator = Evaluator(
        "classification",
        LOSSES["classification"],
        nullcontext,
        micro=SingleAttempt(7),
        phases=make_phases(),
    )
    with pytest.raises(MemoryExhausted, match="memory ran out in eval: CUDA out of memory"):
        evaluate(nn.Identity(), Narrow(), evaluator)
    assert tried == ([5, 3, 2, 1] if residency == "pinned" else [5])


def _facts(task: str, rows: tuple[int, ...] | None = None) -> DataFacts:
    return cast(DataFacts, SimpleNamespace(task=task, class_rows=rows, batch=None))


def test_smoothed_labels_give_the_loss_of_torch_and_none_in_an_evaluation() -> None:
    train = _train_settings(loss_args={"label_smoothing": 0.2})
    logits, classes = torch.from_numpy(_outputs(9, 4)), torch.arange(9) % 4
    theirs = nn.CrossEntropyLoss(label_smoothing=0.2)
    facts = _facts("classification", rows=(5, 10, 20, 40))
    assert torch.equal(make_loss(train, facts, CPU)(logits, classes), theirs(logits, classes))
    judged = make_loss(train, facts, CPU, is_judged=True)
    assert torch.equal(judged(logits, classes), nn.CrossEntropyLoss()(logits, classes))
    tokens, targets = torch.from_numpy(_outputs(2, 5, 4)), torch.arange(10).view(2, 5) % 4
    made = make_loss(train, _facts("tokens"), CPU)
    assert torch.equal(made(tokens, targets), theirs(tokens.transpose(1, 2), targets))
    weights = torch.tensor([75 / (4 * n) for n in (5, 10, 20, 40)])
    balanced = _train_settings(loss_args={"label_smoothing": 0.2, "class_weights": "balanced"})
    weighted = nn.CrossEntropyLoss(weights, label_smoothing=0.2, reduction="sum")
    found = make_loss(balanced, facts, CPU)(logits, classes)
    torch.testing.assert_close(found, weighted(logits, classes) / 9)


@pytest.mark.parametrize(
    ("task", "loss", "told"),
    [
        ("regression", "auto", "mse"),
        ("multilabel", "auto", "bce"),
    ],
)
def test_labels_are_smoothed_for_cross_entropy_alone(task: str, loss: str, told: str) -> None:
    train = _train_settings(loss_args={"label_smoothing": 0.1}, loss=loss)
    with pytest.raises(
        ConfigError, match=rf"label_smoothing: is for cross_entropy \(this is {told}\); drop it"
    ):
        make_loss(train, _facts(task), CPU)
