"""What a person should doubt is said once, with its number, and only where it is so."""

import logging
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from headroom.base.facts import DataFacts, TrainFacts
from headroom.base.scores import Evaluation
from headroom.data import run_warnings
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.settings.run_config import DataConfig, RunConfig
from headroom.training.plan import make_plan
from headroom.training.trainer import train
from tests.base.recorded_names import list_unknown_metrics

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(200, 4)).astype(np.float32)
CLASSES = np.arange(200) % 5 // 2  # 40 %, 40 % and 20 %


@pytest.fixture(autouse=True)
def _no_prefect_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefect, once imported, warns of each line that is logged outside a flow."""
    monkeypatch.setattr(logging.getLogger("headroom"), "handlers", [])


def _npz(tmp_path: Path, x: np.ndarray, y: np.ndarray, **more) -> DataConfig:
    np.savez(tmp_path / "given.npz", x=x, y=y)
    return DataConfig(
        source="npz", path=str(tmp_path / "given.npz"), cache=str(tmp_path / "cache"), **more
    )


def _csv(tmp_path: Path, *rows: str) -> DataConfig:
    (tmp_path / "given.csv").write_text("\n".join(rows) + "\n")
    return DataConfig(source="csv", path=str(tmp_path / "given.csv"), cache=str(tmp_path / "cache"))


def _said(config: DataConfig, words: str) -> DataFacts:
    facts = prepare_dataset(config)
    assert len(facts.warnings) == 1 and words in facts.warnings[0], facts.warnings
    return facts


def test_data_without_anything_to_doubt_is_not_doubted(tmp_path: Path) -> None:
    facts = prepare_dataset(_npz(tmp_path, X, CLASSES))
    assert facts.warnings == () and facts.guess == pytest.approx(0.4)
    assert prepare_dataset(DataConfig(cache=str(tmp_path / "cache"))).warnings == ()  # digits


def test_a_feature_that_equals_the_target_is_named(tmp_path: Path) -> None:
    _said(_npz(tmp_path, X, X[:, 2]), "the feature 3 equals the target")


def test_a_column_that_equals_the_target_is_named_whether_text_or_numbers(tmp_path: Path) -> None:
    words = ["no", "yes", "maybe"]
    lines = [f"{i * 7 % 53},{words[i % 3]},{i % 2},{words[i % 3]}" for i in range(60)]
    _said(_csv(tmp_path, "a,b,c,target", *lines), "the feature 'b' equals the target 'target'")
    lines = [f"{i * 7 % 53},{words[i % 3]},{i % 2},{i % 2}" for i in range(60)]
    _said(_csv(tmp_path, "a,b,c,target", *lines), "the feature 'c' equals the target 'target'")


def test_a_warning_is_said_again_by_data_that_was_prepared_earlier(tmp_path: Path) -> None:
    config = _npz(tmp_path, X, X[:, 2])
    first, again = prepare_dataset(config), prepare_dataset(config)
    assert again.reused and again.warnings == first.warnings != ()


@pytest.mark.parametrize("part", ["training", "validation"])
def test_a_target_that_never_changes_is_told_by_its_value(tmp_path: Path, part: str) -> None:
    target = X[:, 0].copy()
    held = np.zeros(200, dtype=bool)
    whole = prepare_dataset(_npz(tmp_path, np.arange(200.0)[:, None], X[:, 0], scale=False))
    held[np.load(Path(whole.folder) / "val_x.npy")[:, 0].astype(int)] = True
    target[held if part == "validation" else ~held] = 3.5
    _said(_npz(tmp_path, X, target), f"'y' is 3.5 in every {part} row of given.npz")


def test_training_rows_among_those_to_validate_on_are_counted(tmp_path: Path) -> None:
    twice = np.r_[X, X[:40]]
    facts = _said(_npz(tmp_path, twice, np.r_[CLASSES, CLASSES[:40]]), "are training rows too")
    held = {name: np.load(Path(facts.folder) / f"{name}_x.npy") for name in ("train", "val")}
    known = {row.tobytes() for row in held["train"]}
    count = sum(row.tobytes() in known for row in held["val"])
    assert 0 < count < 20 and f" {count} of the {len(held['val'])} " in facts.warnings[0]


def test_rows_with_the_same_inputs_and_another_target_are_not_the_same(tmp_path: Path) -> None:
    assert prepare_dataset(_npz(tmp_path, np.r_[X, X], np.r_[X[:, 0], X[:, 1]] * 2)).warnings == ()


def test_rows_that_differ_in_one_small_whole_number_are_not_the_same() -> None:
    """Sums of 64-bit words took them for the same: the product keeps few bits of such a change."""
    x = np.zeros((4096, 6), dtype=np.float32)
    x[np.arange(4096), np.arange(4096) % 6] = np.arange(4096) + 1
    keys = run_warnings.RowKeys(4096, 7)
    keys.add(slice(0, 4096), x, np.zeros(4096))
    held = np.arange(4096) % 2 == 0
    assert keys.shared(held, ~held) == 0


def test_a_source_that_gives_the_same_rows_for_both_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "twins.py").write_text(
        "import numpy as np, torch\n"
        "from torch.utils.data import TensorDataset\n"
        "x = np.random.default_rng(0).normal(size=(60, 3)); y = np.arange(60) % 2\n"
        "def arrays(): return (x, y), (x.copy(), y)\n"
        "def sequences(): return (x[:, :, None], y), (x[:, :, None], y)\n"
        "def loaders():\n"
        "    both = TensorDataset(torch.tensor(x).float(), torch.tensor(y))\n"
        "    return both, both\n"
        "def apart(): return (x[:30, :, None], y[:30]), (x[30:, :, None], y[30:])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "twins", raising=False)
    cache = str(tmp_path / "cache")
    for name in ("arrays", "sequences", "loaders"):
        _said(DataConfig(source=f"twins:{name}", cache=cache), "gives the same rows to train and")
    assert prepare_dataset(DataConfig(source="twins:apart", cache=cache)).warnings == ()


class Same(nn.Module):
    """Answers every row with 0, or with the first class."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.detach() + 0 * self.weight + torch.zeros(len(x), len(self.weight))


def _trained(tmp_path: Path, data: DataConfig, named: str, **sections) -> TrainFacts:
    sections["train"] = {"epochs": 1, **sections.get("train", {})}
    made = {"model": {"name": named}, **sections}
    config = RunConfig.model_validate({"data": data.model_dump(), **made})
    logged: list[dict[str, float]] = []
    log = lambda metrics, step: logged.append(metrics)  # noqa: E731
    facts = train(
        make_plan(config, detect_best_device("cpu"), prepare_dataset(data)),
        folder=tmp_path,
        log=log,
    )
    unknown = list_unknown_metrics(name for found in (*logged, facts.metrics) for name in found)
    assert {*unknown} <= {"age_s"}  # how long ago it was
    return facts


def test_answers_that_are_all_the_same_are_told_and_no_better_than_the_largest_class(
    tmp_path: Path,
) -> None:
    facts = _trained(tmp_path, _npz(tmp_path, X, CLASSES), f"{__name__}:Same")
    accuracy, alike = facts.warnings
    assert "val/accuracy is 0.4, not above 0.4, the share of the largest class" in accuracy
    assert "every one of the 40 validation rows is given the same answer" in alike


def test_a_regression_worse_than_the_mean_is_told(tmp_path: Path) -> None:
    facts = _trained(tmp_path, _npz(tmp_path, X, X[:, 0] * 2 + 9), f"{__name__}:Same")
    assert facts.metrics["val/r2"] < 0
    r2, alike = facts.warnings
    assert f"val/r2 is {facts.metrics['val/r2']:.4g}"[:14] in r2 and "below 0" in r2
    assert "is given the same answer" in alike


def test_a_score_that_rests_on_four_rows_is_told(tmp_path: Path) -> None:
    """The accuracy was 0.998, the share of the largest class."""
    y = (np.arange(2000) % 100 == 0).astype(int)
    x = np.random.default_rng(0).normal(size=(2000, 3)) + 9 * y[:, None]
    facts = _trained(tmp_path, _npz(tmp_path, x.astype("f"), y), "linear")
    assert facts.metrics["val/largest_class_share"] == 0.99
    (said, *_) = facts.warnings
    assert said.startswith("99 % of the validation rows are of one class")
    assert "val/balanced_accuracy rests on 4 rows of others" in said
    many = _trained(tmp_path, _npz(tmp_path, X, CLASSES), "linear")
    assert not any("of one class" in said for said in many.warnings)


def test_a_validation_loss_that_is_no_number_is_told(tmp_path: Path) -> None:
    facts = prepare_dataset(DataConfig(cache=str(tmp_path / "cache")))
    (said,) = run_warnings.warn_of_results(
        facts, Evaluation({"val/loss": float("nan")}), loss="auto"
    )
    assert "val/loss is nan" in said and "last one's weights" in said


def test_of_a_target_that_never_changes_r2_is_not_known(tmp_path: Path) -> None:
    """It was NaN."""
    facts = _trained(tmp_path, _npz(tmp_path, X, np.full(200, 3.5)), "linear")
    assert "val/r2" not in facts.metrics and facts.metrics["val/mae"] >= 0


def test_tokens_no_better_told_than_by_their_shares_are_told(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abcd" * 500)
    data = DataConfig(
        source="text",
        path=str(tmp_path / "t.txt"),
        cache=str(tmp_path / "cache"),
        args={"context": 8},
    )
    model = {"name": "transformer", "args": {"layers": 1, "heads": 1, "width": 8}}
    facts = _trained(tmp_path, data, "", model=model, optim={"lr": 1e-9})
    (said,) = facts.warnings
    assert "not below 1.386, the entropy of the validation tokens" in said
    good = _trained(tmp_path, data, "", model=model, optim={"lr": 0.1}, train={"epochs": 5})
    assert good.metrics["val/loss"] < 1.386 and good.warnings == ()


def test_a_share_is_never_rounded_up_to_all(tmp_path: Path) -> None:
    """Story: 100 % of the validation rows were of one class, and four of others."""
    facts = replace(prepare_dataset(DataConfig(cache=str(tmp_path / "c"))), val_rows=4000)
    metrics = {"val/loss": 0.1, "val/largest_class_share": 0.999}
    (said,) = run_warnings.warn_of_results(facts, Evaluation(metrics), loss="auto")
    assert said.startswith(">99 % of the validation rows are of one class")
    assert "rests on 4 rows of others" in said


def test_classes_that_are_told_apart_are_no_worse_than_the_largest(tmp_path: Path) -> None:
    """Story: at a balanced accuracy of 0.9975 the majority was called as good an answer."""
    facts = prepare_dataset(DataConfig(cache=str(tmp_path / "c")))
    facts = replace(facts, val_rows=1200, guess=1196 / 1200)
    for accuracy, is_by_chance in ((1194 / 1200, False), (1190 / 1200, True)):
        metrics = {"val/loss": 0.1, "val/accuracy": accuracy}
        evaluation = Evaluation(metrics, is_by_chance=is_by_chance)
        said = run_warnings.warn_of_results(facts, evaluation, loss="auto")
        assert any("that class is as good an answer" in one for one in said) == is_by_chance


def _tested(
    tmp_path: Path,
    val: dict[str, float],
    test: dict[str, float] | None,
    *,
    r2_error: float | None = None,
) -> tuple[str, ...]:
    facts = replace(
        prepare_dataset(DataConfig(cache=str(tmp_path / "c"))), val_rows=400, test_rows=100
    )
    tested = None if test is None else Evaluation(test, r2_error=r2_error)
    return run_warnings.warn_of_test(facts, Evaluation(val, r2_error=r2_error), tested)


def test_a_test_score_far_below_the_validation_score_is_told(tmp_path: Path) -> None:
    """Story: val/r2 was 0.096 and test/r2 -2.98, without a word."""
    (said,) = _tested(tmp_path, {"val/r2": 0.096}, {"test/r2": -2.98}, r2_error=0.03)
    assert said.startswith("test/r2 is -2.98, below 0, where val/r2 is 0.096")
    (said,) = _tested(tmp_path, {"val/r2": 0.9}, {"test/r2": 0.6}, r2_error=0.03)
    assert said.startswith("test/r2 is 0.6, far below val/r2, which is 0.9")
    assert not _tested(tmp_path, {"val/r2": 0.9}, {"test/r2": 0.82}, r2_error=0.03)
    assert not _tested(tmp_path, {"val/r2": 0.1}, {"test/r2": -0.01}, r2_error=0.03)
    assert not _tested(tmp_path, {"val/r2": 0.1}, None)
    (said,) = _tested(tmp_path, {"val/accuracy": 0.95}, {"test/accuracy": 0.7})
    assert said.startswith("test/accuracy is 0.7, far below val/accuracy, which is 0.95")
    assert not _tested(tmp_path, {"val/accuracy": 0.95}, {"test/accuracy": 0.89})


def test_a_test_score_of_rows_alike_is_hardly_ever_told() -> None:
    """Of 2,000 pairs of parts whose rows are alike, at most 1 %."""
    facts = DataFacts(
        "", "csv", "regression", 1000, 400, (3,), 1, None, None, (0.0,), (1.0,), 0, "", False
    )
    random, told = np.random.default_rng(1), 0
    for _ in range(2000):
        noise, found = random.choice([0.3, 1.0, 2.0]), []
        for part, rows in (("val", random.choice([60, 400])), ("test", random.choice([30, 200]))):
            y = random.normal(size=(rows, 1))
            outputs = (y + noise * random.normal(size=y.shape)) / (1 + noise**2)
            errors, spread = np.square(outputs - y), np.square(y - y.mean())
            left = errors.sum() / spread.sum()
            influence = (errors - left * spread) / spread.mean()  # of each row on R2
            error = float(influence.std(ddof=1) / np.sqrt(rows))
            found.append(Evaluation({f"{part}/r2": float(1 - left)}, r2_error=error))
        told += bool(run_warnings.warn_of_test(facts, *found))
    assert told <= 20
