"""The files of each class, and what a report shows of them."""

import csv
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import classification_report, confusion_matrix

from headroom.base.scores import ConfusionCells, write_class_scores


def _lines(file: Path) -> list[dict[str, str]]:
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.mark.parametrize("names", [("red, dark", "green", "blue"), None])
def test_the_files_hold_what_scikit_learn_reports(tmp_path: Path, names) -> None:
    random = np.random.default_rng(0)
    y, told = random.integers(0, 3, 90), random.integers(0, 3, 90)
    shown = write_class_scores(ConfusionCells.of(told, y), names, tmp_path, part="val")
    report = classification_report(y, told, output_dict=True)
    lines = _lines(tmp_path / "scores" / "val_classes.csv")
    assert [line["class"] for line in lines] == list(names or "012")
    for k, line in enumerate(lines):
        expected = report[str(k)]
        told_of = [float(line[name]) for name in ("rows", "precision", "recall", "f1")]
        wanted = [expected[n] for n in ("support", "precision", "recall", "f1-score")]
        assert told_of == pytest.approx(wanted, abs=1e-6)
    pairs = _lines(tmp_path / "scores" / "val_confusion.csv")
    assert sum(int(pair["rows"]) for pair in pairs) == 90
    assert shown["matrix"] == confusion_matrix(y, told).tolist() and shown["count"] == 3


def test_of_many_classes_a_report_has_the_worst_and_the_most_confused(tmp_path: Path) -> None:
    y = np.repeat(np.arange(100), 10)
    told = y.copy()
    told[250:260], told[990:995] = 7, 3  # classes 25 and 99 are taken for 7 and 3
    shown = write_class_scores(ConfusionCells.of(told, y), None, tmp_path, part="test")
    assert len(_lines(tmp_path / "scores" / "test_classes.csv")) == 100
    assert len(shown["listed"]) == 20 and shown["count"] == 100
    assert {row[0] for row in shown["listed"][:4]} == {"25", "7", "99", "3"}
    assert len(shown["drawn"]) == 30 and {"25", "7", "99", "3"} <= set(shown["drawn"])
    at = shown["drawn"].index
    assert shown["matrix"][at("25")][at("7")] == 10 and shown["matrix"][at("99")][at("3")] == 5
