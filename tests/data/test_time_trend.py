"""A column of times that splits the rows is learnt from, and a trend goes on beyond them."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score

from headroom.base.facts import DataFacts, TrainFacts
from headroom.data.preparation import load_arrays, prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.models import builtin, predictor
from headroom.settings.run_config import RunConfig
from headroom.training.plan import make_plan
from headroom.training.trainer import train

DAYS = 1100


def _sales(kind: str, days: int = DAYS, seed: int = 0) -> pd.DataFrame:
    """A trend, a season and weekends; a trend by shares; or stores with promotions."""
    random, day = np.random.default_rng(seed), pd.date_range("2021-01-01", periods=days)
    at, week = np.arange(days), 1.0 * (day.day_of_week >= 5)
    season = np.sin(2 * np.pi * at / 365.25)
    table = pd.DataFrame({"day": day.strftime("%Y-%m-%d"), "price": random.uniform(1, 3, days)})
    if kind == "shares":
        grown = 100 * np.exp(0.0009 * at + random.normal(0, 0.05, days))
        return table.assign(amount=grown * (1 + 0.2 * season) * (1 + 0.15 * week))
    plain = 0.15 * at + 30 * season + 25 * week
    if kind == "trend":
        return table.assign(amount=200 + plain + random.normal(0, 8, days))
    found = []
    for store, base in (("Basel", 80), ("Bern", 120), ("Zug", 60)):
        promotion = (random.random(days) < 0.15).astype(int)
        amount = base + plain / 2 + 40 * promotion + random.normal(0, 8, days)
        found.append(table.assign(store=store, promotion=promotion, amount=amount))
    return pd.concat(found).sort_values(["day", "store"], ignore_index=True)


def _config(folder: Path, table: pd.DataFrame, **more: dict) -> RunConfig:
    table.to_csv(folder / "sales.csv", index=False)
    data = {
        "path": str(folder / "sales.csv"),
        "cache": str(folder / "cache"),
        "target": "amount",
        "split": "time:day",
        "test_fraction": 0.1,
        **more.pop("data", {}),
    }
    return RunConfig.model_validate({"data": data, **more})


def _trained(folder: Path, config: RunConfig) -> tuple[DataFacts, TrainFacts]:
    facts = prepare_dataset(config.data)
    plan = make_plan(config, detect_best_device("cpu"), facts)
    return facts, train(plan, folder=folder, log=lambda *_: None)


def _score_references(table: pd.DataFrame, facts: DataFacts) -> list[float]:
    """R2 on the test rows of Ridge, with the date's parts, and of boosted trees."""
    day, train_rows, test = pd.to_datetime(table.day), facts.train_rows, facts.test_rows
    parts = {"days": (day - day[0]).dt.days, "weekday": day.dt.day_of_week, "month": day.dt.month}
    turn = 2 * np.pi * day.dt.day_of_year / 365.25
    x = pd.DataFrame(parts).assign(sine=np.sin(turn), cosine=np.cos(turn))
    x = pd.get_dummies(x, columns=["weekday", "month"])
    x = x.join(pd.get_dummies(table.drop(columns=["day", "amount"]))).astype(float)
    models = Ridge(), HistGradientBoostingRegressor(random_state=0)
    y = table.amount
    return [
        r2_score(y[-test:], model.fit(x[:train_rows], y[:train_rows]).predict(x[-test:]))
        for model in models
    ]


@pytest.mark.parametrize("kind", ["trend", "shares", "stores"])
def test_rows_split_by_time_are_forecast_as_well_as_by_ridge(tmp_path: Path, kind: str) -> None:
    """Story: the column of days was no feature, and test/r2 was -2.98 where Ridge had 0.886."""
    table = _sales(kind)
    facts, trained = _trained(tmp_path, _config(tmp_path, table))
    ridge, trees = _score_references(table, facts)
    assert trained.metrics["test/r2"] >= max(ridge, trees) - 0.05
    assert not any("test/" in said for said in trained.warnings)
    assert facts.times is not None and facts.times.slope
    assert bool(facts.target_log) == (kind == "shares")
    assert any("a line in 'day' goes on" in note for note in facts.notes)
    # The logged model, on raw rows beyond all that it has seen.
    model = predictor.load(trained.model_folder)
    test = table[-facts.test_rows :]
    found = model.predict(test)["prediction"]
    assert r2_score(test.amount, found) == pytest.approx(trained.metrics["test/r2"], abs=1e-4)
    later = table[-14:].assign(day=lambda t: pd.to_datetime(t.day) + pd.Timedelta(days=364))
    grown = model.predict(later)["prediction"].mean() - model.predict(table[-14:])["prediction"]
    assert grown.mean() > 0.5 * 364 * (0.075 if kind == "stores" else 0.15)


def test_without_a_trend_times_end_where_the_training_rows_do(tmp_path: Path) -> None:
    table = _sales("trend").assign(amount=np.random.default_rng(1).normal(size=DAYS))
    config = _config(tmp_path, table, train={"epochs": 1})
    facts, trained = _trained(tmp_path, config)
    assert facts.times is not None and not facts.times.slope
    assert any("the built-in mlp takes 'day' for what it was" in note for note in facts.notes)
    model = predictor.load(trained.model_folder)
    years = [table[:1].assign(day=f"{year}-06-06", price=2.0) for year in (2030, 2058)]
    first, then = (model.predict(rows)["prediction"].item() for rows in years)
    assert first == pytest.approx(then, abs=0.2)  # two Thursdays


@pytest.mark.parametrize("kind", ["parquet", "numbers", "dropped", "group", "classes"])
def test_what_else_splits_rows_by_time(tmp_path: Path, kind: str) -> None:
    table, more = _sales("trend", 300), {}
    table["amount"] = np.arange(300) / 5 + np.random.default_rng(0).normal(size=300)
    if kind == "numbers":
        table["day"] = np.arange(300) + 2000
    if kind == "dropped":
        more = {"args": {"drop": ["day"]}}
    if kind == "group":
        more = {"split": "group:day"}
    if kind == "classes":
        table["amount"] = np.where(np.arange(300) % 3, "few", "many")
    config = _config(tmp_path, table, data=more, train={"epochs": 1})
    if kind == "parquet":
        table.assign(day=pd.to_datetime(table.day)).to_parquet(tmp_path / "sales.parquet")
        config = _config(tmp_path, table, data={"path": str(tmp_path / "sales.parquet")})
    facts = prepare_dataset(config.data)
    is_feature = kind not in ("dropped", "group")
    assert ("day" in [column.name for column in facts.columns or ()]) == is_feature
    assert (facts.times is not None) == is_feature
    if facts.times is not None:
        assert bool(facts.times.slope) == (kind != "classes")
        x = load_arrays(facts).train_x[:, list(facts.times.places)]
        assert x.min(0).tolist() == list(facts.times.low)
        assert x.max(0).tolist() == list(facts.times.high)


def test_a_timed_net_is_its_layers_within_the_training_and_the_line_beyond() -> None:
    torch.manual_seed(0)
    times = {"places": (1,), "low": (-1.0,), "high": (1.0,), "slope": (0.5,), "intercept": 0.25}
    shape = {"input_shape": (2,), "outputs": 1, "args": {}}
    model = builtin.build_model("mlp", **shape, times=times)
    torch.manual_seed(0)
    plain = builtin.build_model("mlp", **shape)
    assert list(model.state_dict()) == list(plain.state_dict())
    x = torch.tensor([[0.3, 0.5], [0.3, 1.0], [0.3, 9.0], [7.0, -4.0]])
    within = torch.stack([x[:, 0], x[:, 1].clamp(-1, 1)], 1)
    assert torch.equal(model(x), plain(within) + 0.5 * x[:, 1:] + 0.25)
    assert type(builtin.build_model("linear", **shape, times=times)) is torch.nn.Sequential
