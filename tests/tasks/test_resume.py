"""What a run is called that nobody gave a name."""

from __future__ import annotations

import pytest

from tasks.engine.settings.read_settings import resolve
from tasks.resume import default_name


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({}, "mlp-digits"),
        ({"optim.lr": "0.01", "run.key": "night", "device.name": "cpu"}, "mlp-digits lr=0.01"),
        ({"data.path": "here/houses.csv", "data.target": "Price"}, "mlp-houses target=Price"),
        ({"optim.name": "sgd", "train.seed": "7"}, "mlp-digits optim=sgd seed=7"),
        ({"run.name": "mine", "optim.lr": "0.01"}, "mine"),
    ],
)
def test_a_run_is_called_by_what_was_varied(asked: dict[str, str], name: str) -> None:
    """Each was called by the time it began at, which told nothing where runs are compared."""
    assert default_name(resolve(None, asked)) == name


def test_a_long_name_says_how_much_it_leaves_out() -> None:
    asked = {"optim.lr": "0.01", "optim.weight_decay": "0.5", "train.epochs": "3"}
    name = default_name(resolve(None, {**asked, "train.seed": "7", "train.batch_size": "16"}))
    assert name.startswith("mlp-digits lr=0.01") and name.endswith(" +2") and len(name) <= 52
