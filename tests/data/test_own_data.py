"""A user's own data: arrays are prepared like those of a file, data sets and loaders feed the loop
as they are, and whatever cannot be learnt from is told in one sentence before anything is spent."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headroom.base.facts import DataFacts
from headroom.data.dataloaders import LoaderBatches, TargetConverter
from headroom.data.own_data import LoaderOptions, Loaders, call_data_factory, open_loaders
from headroom.data.preparation import load_arrays, prepare_dataset
from headroom.data.source_data import DataError
from headroom.settings.run_config import DataConfig, RunConfig

Own = Callable[[str, str], None]
CPU = torch.device("cpu")
NO_ORDER = torch.arange(0)
HEAD = """
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
x = np.arange(60.0).reshape(20, 3)
y = np.arange(20) % 2
X, Y = torch.tensor(x).float(), torch.tensor(y)
class Stream(IterableDataset):
    def __len__(self): return 20
    def __iter__(self): return iter(zip(X, Y))
class Named(TensorDataset):
    classes = ["no", "yes"]
class Rows(list):
    pass
"""


def _facts(own: Own, returns: str, *, more: str = "", **data: Any) -> DataFacts:
    own("mine", f"{HEAD}{more}\ndef f(**given):\n    return {returns}\n")
    return prepare_dataset(_config(**data).data, batch_size=8, seed=3)


def _config(**data: Any) -> RunConfig:
    data = {"source": "mine:f", "cache": "cache", **data}
    return RunConfig.model_validate({"data": data, "train": {"batch_size": 8, "seed": 3}})


def _loaded(
    config: RunConfig, facts: DataFacts, device: torch.device
) -> tuple[LoaderBatches, LoaderBatches]:
    return open_loaders(config.data, config.train, facts, device)


@pytest.mark.parametrize("returns", ["(x, y)", "(X, Y)", "[x, Y]", "(x, y[:, None])"])
def test_arrays_are_prepared_like_those_of_a_file(own: Own, returns: str) -> None:
    facts = _facts(own, returns)
    assert (facts.task, facts.train_rows, facts.val_rows) == ("classification", 16, 4)
    assert facts.class_rows == (8, 8) and facts.batch is None and facts.fingerprint
    assert load_arrays(facts).train_x.mean() == pytest.approx(0, abs=1e-6), "scaled"
    assert Path(facts.folder).name.startswith("own-")


def test_arrays_are_kept_by_their_content(own: Own) -> None:
    more = "def g(scale=1.0): return x * scale, y\n"
    own("mine", HEAD + more)
    first = prepare_dataset(_config(source="mine:g").data)
    again = prepare_dataset(_config(source="mine:g").data)
    other = prepare_dataset(_config(source="mine:g", args={"scale": 2.0}).data)
    assert again.reused and again.folder == first.folder
    assert not other.reused and other.fingerprint != first.fingerprint


def test_what_is_prepared_is_for_its_user_alone_and_without_logins(own: Own) -> None:
    """The manifest had the URL of the rows with its password, for everybody to read."""
    facts = [
        _facts(own, "(x, y)", args={"url": f"postgresql://ann:{password}@db/x"})
        for password in ("Hunter", "of-the-next-night")
    ]
    files = [*Path(facts[0].folder).iterdir()]
    assert [facts[1].reused, facts[1].folder] == [True, facts[0].folder]
    assert not [file for file in files if b"Hunter" in file.read_bytes()]
    assert b"ann:***@db/x" in Path(facts[0].folder, "manifest.json").read_bytes()
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    above = Path(facts[0].folder), Path(facts[0].folder).parent
    assert {folder.stat().st_mode & 0o777 for folder in above} == {0o700}


def test_a_given_split_is_kept(own: Own) -> None:
    facts = _facts(own, "((x[:13], y[:13]), (x[13:], y[13:]))", scale=False)
    assert (facts.train_rows, facts.val_rows) == (13, 7)
    assert np.array_equal(load_arrays(facts).val_x, np.arange(39.0, 60).reshape(7, 3))


def test_text_labels_and_named_columns_come_along(own: Own) -> None:
    more = "import pandas as pd\n"
    returns = "(pd.DataFrame(x, columns=['a', 'b', 'c']), np.where(y, 'cat', 'dog'))"
    facts = _facts(own, returns, more=more)
    assert (facts.feature_names, facts.class_names) == (("a", "b", "c"), ("cat", "dog"))


@pytest.mark.parametrize(
    ("returns", "task", "shape", "outputs"),
    [
        ("(x, x[:, 0] + 0.5)", "regression", (3,), 1),
        ("(x, np.stack([y, 1 - y], 1))", "multilabel", (3,), 2),
        ("(x, x[:, :2] + 0.5)", "regression", (3,), 2),
        ("(X.reshape(20, 1, 3), Y)", "classification", (1, 3), 2),
        ("TensorDataset(X, Y)", "classification", (3,), 0),
        ("Named(X, Y)", "classification", (3,), 2),
        ("TensorDataset(X, X[:, 0])", "regression", (3,), 1),
        ("TensorDataset(X, Y.float()[:, None])", "regression", (3,), 1),
        ("TensorDataset(X, torch.stack([Y, 1 - Y], 1).float())", "multilabel", (3,), 2),
        ("TensorDataset(X.long(), X.long())", "tokens", (3,), 0),
        ("DataLoader(Named(X, Y), batch_size=8, shuffle=True)", "classification", (3,), 2),
        ("(DataLoader(Named(X, Y), 4), DataLoader(Named(X, Y), 4))", "classification", (3,), 2),
        ("(Stream(), Stream())", "classification", (3,), 0),
        ("(DataLoader(Stream(), 4), TensorDataset(X, Y))", "classification", (3,), 0),
        ("Rows({'a': r, 'labels': l} for r, l in zip(X, Y))", "", (), 0),
    ],
)
def test_what_is_learnt_is_told_by_the_targets(
    own: Own, returns: str, task: str, shape: tuple[int, ...], outputs: int
) -> None:
    if not task:  # a list is no data set: nobody could tell it from arrays
        with pytest.raises(DataError, match=r"must return .* \(got a Rows of 20"):
            _facts(own, returns)
        return
    facts = _facts(own, returns)
    assert (facts.task, facts.input_shape, facts.outputs) == (task, shape, outputs)
    assert (facts.fingerprint == "") == (facts.batch is not None)


@pytest.mark.parametrize(
    "returns", ["TensorDataset(X, Y)", "DataLoader(TensorDataset(X, Y), 8, shuffle=True)"]
)
def test_a_data_set_is_split_by_the_settings_and_shuffled_by_the_seed(
    own: Own, returns: str
) -> None:
    facts = _facts(own, returns, validation_fraction=0.25)
    assert (facts.train_rows, facts.val_rows, facts.batch_rows) == (15, 5, 8)
    orders = []
    for _ in range(2):
        train, val = _loaded(_config(validation_fraction=0.25), facts, CPU)
        epochs = [
            torch.cat([x for x, *_ in train.iterate_shuffled(8, NO_ORDER, _nothing)]) for _ in "ab"
        ]
        assert not torch.equal(*epochs)
        held = torch.cat([x for x, *_ in val.iterate_in_order(8)])
        assert sorted(torch.cat((epochs[0], held))[:, 0].tolist()) == list(range(0, 60, 3))
        orders.append(epochs[0])
    assert torch.equal(*orders), "the same seed gives the same order"


def _nothing(phase: str) -> None:
    pass


def test_a_dict_with_labels_keeps_them_among_the_inputs(own: Own) -> None:
    more = """
class Dicts(Dataset):
    def __len__(self): return 10
    def __getitem__(self, i): return {"ids": torch.arange(4) + i, "labels": torch.tensor(i % 2)}
"""
    facts = _facts(own, "Dicts()", more=more)
    assert facts.task == "classification" and facts.input_shape == (4,)
    (x, y, *_), *_ = _loaded(_config(), facts, CPU)[0].iterate_in_order(8)
    assert set(x) == {"ids", "labels"} and torch.equal(x["labels"], y)


def test_a_factory_is_given_batch_size_and_seed_where_it_takes_them(own: Own) -> None:
    own(
        "mine",
        HEAD + "def f(batch_size, seed, rows=20):\n"
        "    assert (batch_size, seed, rows) == (8, 3, 10)\n"
        "    return DataLoader(Named(X[:rows], Y[:rows]), batch_size)\n",
    )
    assert prepare_dataset(_config(args={"rows": 10}).data, batch_size=8, seed=3).train_rows == 8


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_of_a_users_loader_end_with_the_preparation(own: Own) -> None:
    facts = _facts(own, "DataLoader(Named(X, Y), batch_size=8, num_workers=2)")
    assert facts.train_rows == 16 and not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("returns", "words"),
    [
        ("None", r"must return \(x, y\) tensors .* \(got None\); change what it returns"),
        ("x", r"must return .* \(got a ndarray\)"),
        ("(x, y, y)", r"must return .* \(got a tuple of 3: ndarray, ndarray, ndarray\)"),
        ("{'x': x, 'y': y}", r"must return .* \(got a dict\)"),
        ("1 / 0", "mine:f raised: mine.py:16: ZeroDivisionError"),
        ("np.empty(2**55)", "mine:f needs more memory than this host has; return a Dataset"),
        ("int('memory')", "mine:f raised: mine.py:16: ValueError: .*'memory'"),
        ("exit(2)", "mine:f raised: mine.py:16: it exits with 2"),
        ("(x[:0], y[:0])", "gives no training rows; give some"),
        ("(x[:, :0], y)", r"gives no training rows; give some \(got x of shape \(20, 0\)\)"),
        ("(x[:5], y)", "gives 5 rows of training x and 20 of y; give one y for each row"),
        ("((x, y), (x[:0], y[:0]))", "gives no validation rows; give some"),
        ("((x, y), (x[:, :2], y))", r"training rows of \(3,\) and validation rows of \(2,\)"),
        ("(np.array([['a']] * 4), y[:4])", "training x must hold numbers"),
        ("(np.array([[{}]] * 4), y[:4])", "training x must hold numbers"),
        ("(X.to_sparse(), Y)", "training x cannot be made an array"),
        ("(x, np.array(1.0))", "must have rows"),
        ("TensorDataset(X[:0], Y[:0])", r"the training data set \(mine:f\) has no rows"),
        ("TensorDataset(X[:1], Y[:1])", "gives 1 row, and a split needs at least 2"),
        ("Stream()", "gives no validation rows, and an IterableDataset cannot be split"),
        ("DataLoader(Stream(), 4)", "and an IterableDataset cannot be split; return two"),
        ("TensorDataset(X)", r"must be a pair .* \(got a list of 1\)"),
        ("TensorDataset(X, Y - 1)", r"batch 1 of the \w+ loader, row \d+: a label must be .*-1"),
        ("TensorDataset(X, Y - 100)", r"a label must be from 0 on \(got -100, the label that"),
        ("Named(X, Y + 1)", r"a label must be from 0 to 1 \(got 2\); mend or drop"),
        ("TensorDataset(X * float('nan'), Y)", "row 1: inputs must hold finite numbers .got nan"),
        ("TensorDataset(X, X[:, 0] / 0)", "a target must be a finite number"),
        ("(Named(X, Y), Named(X.long(), Y))", "of inputs 1-D int64 to validate on and of inputs"),
        ("Broken()", "the loader raised: mine.py:16: KeyError: 'row 0'"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused_in_one_sentence(
    own: Own, returns: str, words: str
) -> None:
    more = """class Broken(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): raise KeyError(f"row {i - i}")
"""
    if "Broken" not in returns:
        more = ""
    with pytest.raises(DataError, match=f"^data.source: .*{words}") as got:
        _facts(own, returns, more=more)
    assert "\n" not in str(got.value)
    assert not Path("cache").exists() or not list(Path("cache").iterdir()), "nothing half-written"


def test_a_worker_that_raises_is_told_by_its_line(own: Own) -> None:
    more = """class Broken(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): raise KeyError("row")
"""
    with pytest.raises(DataError, match=r"the loader raised: mine.py:16: KeyError: 'row'"):
        _facts(own, "(DataLoader(Broken(), 2, num_workers=1),) * 2", more=more)


def test_labels_of_every_batch_are_looked_at_on_the_host(own: Own) -> None:
    more = "late = Y.clone(); late[17] = 5\n"
    facts = _facts(own, "(DataLoader(Named(X, late), 8), DataLoader(Named(X, Y), 8))", more=more)
    train, _ = _loaded(_config(), facts, torch.device("meta"))
    with pytest.raises(DataError, match="batch 3 of the training loader, row 2: a label .*got 5"):
        list(train.iterate_shuffled(8, NO_ORDER, _nothing))


def test_wrong_arguments_are_told_by_name(own: Own) -> None:
    own("mine", HEAD + "def f(path, rows=3): return x, y\n")
    with pytest.raises(DataError, match=r"^data.args: 'path' is missing; f takes path, rows"):
        prepare_dataset(_config().data)
    with pytest.raises(DataError, match=r"^data.args: 'row' is unknown; did you mean rows\?"):
        prepare_dataset(_config(args={"path": "a", "row": 1}).data)


def test_rows_that_lie_on_a_device_are_not_pinned_and_their_targets_not_read(own: Own) -> None:
    """PyTorch refuses to pin them; and a row of targets stayed flat, which broadcasts in a loss."""
    own("mine", f"{HEAD}def f(where): return TensorDataset(X.to(where), Y.to(where))\n")
    for where, pinned in (("cpu", True), ("meta", False)):
        feeds = call_data_factory(_config(args={"where": where}).data, LoaderOptions(), pins=True)
        assert isinstance(feeds, Loaders) and feeds.train.pin_memory is pinned
    far = torch.zeros(5, 1, device="meta")
    assert TargetConverter("regression", 1, "training")(far[:, 0], 1).shape == (5, 1)
    labels = TargetConverter("classification", 2, "training")(far.bool(), 1)
    assert labels.shape == (5,) and labels.dtype == torch.int64


def test_a_first_row_that_raises_is_told_in_one_sentence(own: Own) -> None:
    more = "class Bad(Dataset):\n    def __len__(self): return 20\n"
    own(
        "mine",
        f"{HEAD}{more}    def __getitem__(self, i): raise KeyError(i)\ndef f(): return Bad()",
    )
    with pytest.raises(DataError, match=r"^data.source: the data set raised: mine.py:\d+: KeyErr"):
        call_data_factory(_config().data, LoaderOptions(), pins=True)


@pytest.mark.parametrize("body", ["return 'many'", "raise KeyError('rows')"])
def test_a_length_that_is_none_is_told_as_that_of_the_data_set(own: Own, body: str) -> None:
    code = "class Rows:\n    def __getitem__(self, i):\n        return 1, 2\n"
    code += f"    def __len__(self):\n        {body}\ndef make():\n    return Rows(), Rows()\n"
    own("rows", code)
    with pytest.raises(DataError, match=r"^data.source: len\(\) of the data set raised: "):
        call_data_factory(DataConfig(source="rows:make"), LoaderOptions())
