"""The whole of `python -m flows.predict`, with models that the flow `train` has logged."""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
from mlflow import MlflowClient

from flows.cli import predict_command
from flows.predict import predict
from flows.train import train
from headroom.data.source_data import DataError
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.tracking.tracking_settings import read_tracking_settings
from tests.conftest import ROOT, desk_environment

pytestmark = pytest.mark.usefixtures("prefect_api", "there")


@dataclass(frozen=True)
class Trained:
    """A folder with finished runs in it, each in an experiment of its own."""

    folder: Path
    runs: dict[str, str]  # ids by experiment: digits, table, houses, text


@pytest.fixture(scope="module")
def trained(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "mlflow.yaml").write_text((ROOT / "mlflow.yaml").read_text())
    random = np.random.default_rng(0)
    table = pd.DataFrame({"a": random.normal(size=200), "b": random.normal(size=200)})
    table["label"] = np.where(table["a"] + table["b"] > 0, "high", "low")
    table["colour"] = random.choice(["red", "green", ""], size=200)
    table.loc[::7, "b"] = np.nan
    table.to_csv(folder / "table.csv", index=False)
    area = random.uniform(40, 250, 300)
    houses = pd.DataFrame({"area": area, "price": 3000 * area + random.normal(0, 20_000, 300)})
    houses.to_csv(folder / "houses.csv", index=False)
    (folder / "book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    sections: dict[str, dict[str, Any]] = {
        "digits": {},
        "table": {"data": {"source": "csv", "path": "table.csv", "args": {"missing": "mean"}}},
        "houses": {
            "data": {"path": "houses.csv", "target": "price"},
            "optim": {"lr": 0.05},
            "train": {"epochs": 4},
        },
        "text": {
            "data": {"source": "text", "path": "book.txt", "args": {"context": 16}},
            "model": {"name": "transformer", "args": {"layers": 1, "heads": 2, "width": 16}},
        },
    }
    runs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, given in sections.items():
            config = {"train": {"epochs": 1}, **given, "run": {"experiment": name}}
            runs[name] = train(RunConfig.model_validate(config))["run_id"]
    yield Trained(folder, runs)


@pytest.fixture
def there(trained: Trained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trained:
    monkeypatch.chdir(trained.folder)
    # mlflow.set_tracking_uri() would reach into os.environ, and the next test.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", read_tracking_settings().tracking_uri)
    return trained


def _model_id(run_id: str) -> str:
    run = MlflowClient().get_run(run_id)
    return str(run.outputs.model_outputs[0].model_id)


def _expected(run_id: str, rows: Any) -> pd.DataFrame:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mlflow.pyfunc.load_model(f"models:/{_model_id(run_id)}").predict(rows)


def _same(found: pd.DataFrame, expected: pd.DataFrame) -> None:
    assert found["prediction"].astype(str).tolist() == expected["prediction"].tolist()
    np.testing.assert_allclose(found["probability"], expected["probability"], rtol=1e-4)


def _digits(folder: Path, rows: int = 300) -> tuple[str, np.ndarray]:
    x = np.random.default_rng(1).integers(0, 17, (rows, 1, 8, 8)).astype(np.float32)
    np.save(folder / "x.npy", x)
    return str(folder / "x.npy"), x


def test_each_row_gets_what_the_logged_model_gives_it(there: Trained, tmp_path: Path) -> None:
    source, x = _digits(tmp_path)
    run_id = there.runs["digits"]
    done = predict(source, str(tmp_path / "out.csv"), run=run_id)
    assert (done["run_id"], done["rows"], done["device"]) == (run_id, 300, "cpu")
    assert done["release_ok"] and done["released_bytes"] > 0
    _same(pd.read_csv(tmp_path / "out.csv"), _expected(run_id, x))


def test_a_raw_table_with_text_and_holes_is_predicted_beside_the_columns_kept(
    there: Trained, tmp_path: Path
) -> None:
    rows = pd.read_csv("table.csv").drop(columns="label")
    rows.loc[3, "colour"] = "never seen"
    rows = rows[["colour", "b", "a"]]
    rows.assign(name=[f"row {i}" for i in range(200)]).to_csv(tmp_path / "rows.csv", index=False)
    predict(
        str(tmp_path / "rows.csv"),
        str(tmp_path / "out.parquet"),
        experiment="table",
        keep=["name"],
    )
    found = pd.read_parquet(tmp_path / "out.parquet")
    assert found["name"].tolist() == [f"row {i}" for i in range(200)]
    _same(found, _expected(there.runs["table"], rows))


def test_amounts_are_predicted_in_the_units_of_their_column(there: Trained, tmp_path: Path) -> None:
    run_id = there.runs["houses"]
    predict("houses.csv", str(tmp_path / "out.csv"), run=run_id)
    found, houses = pd.read_csv(tmp_path / "out.csv"), pd.read_csv("houses.csv")
    np.testing.assert_allclose(found, _expected(run_id, houses), rtol=1e-6)
    measured = MlflowClient().get_run(run_id).data.metrics
    off = (found["prediction"] - houses["price"]).abs().mean()
    assert measured["val/r2"] > 0.8 and off == pytest.approx(measured["val/mae"], rel=0.3)


def test_a_text_a_line_is_continued(there: Trained, tmp_path: Path) -> None:
    texts = ["the quick brow", "the lazy do", "q"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    mlflow.register_model(f"models:/{_model_id(there.runs['text'])}", "writer")
    MlflowClient().set_registered_model_alias("writer", "best", "1")
    predict(str(tmp_path / "texts.txt"), str(tmp_path / "o.jsonl"), run="models:/writer@best")
    found = pd.read_json(tmp_path / "o.jsonl", lines=True)
    _same(found, _expected(there.runs["text"], pd.DataFrame({"text": texts})))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"experiment": "table"},
            DataError,
            "^input: the model takes text in 'colour', and an npy",
        ),
        ({"run": "newest", "keep": ["a"]}, ConfigError, "^run: must be latest(.|\n)*keep: npy"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_leaves_nothing(
    there: Trained, tmp_path: Path, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    source, _ = _digits(tmp_path, rows=3)
    with pytest.raises(error, match=said):
        predict(source, str(tmp_path / "out.csv"), **{"experiment": "digits", **changes})
    assert [f.name for f in tmp_path.iterdir()] == ["x.npy"]


def _desk(folder: Path, *words: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "flows.predict", *words],
        cwd=folder,
        env=desk_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_one_command_predicts_and_says_what_it_did(there: Trained, tmp_path: Path) -> None:
    source, _ = _digits(tmp_path)
    words = ("--input", source, "--output", str(tmp_path / "o.csv"), "--experiment", "digits")
    out, err = _desk(there.folder, *words).communicate(timeout=120)
    assert out.startswith("300 rows predicted in ") and "on cpu by run" in out, err
    assert "300 rows  " in err and "rows/s" in err and "Traceback" not in err
    again = _desk(there.folder, *words)
    out, err = again.communicate(timeout=60)
    assert again.returncode == 2 and "exists; name another file, or overwrite it" in err


def test_a_prediction_that_is_ended_leaves_nothing(there: Trained, tmp_path: Path) -> None:
    # A sparse file: rows for minutes that take no room.
    np.lib.format.open_memmap(tmp_path / "x.npy", mode="w+", dtype="u1", shape=(10**8, 64))
    ended = {signal.SIGTERM: 143, signal.SIGINT: 130}
    words = ("--input", str(tmp_path / "x.npy"), "--experiment", "digits", "--output")
    started = {
        number: _desk(there.folder, *words, str(tmp_path / f"{number.name}.csv"))
        for number in ended
    }
    for number, process in started.items():
        part = tmp_path / f".{number.name}.csv.part"
        end = time.monotonic() + 90
        while not (part.exists() and part.stat().st_size) and time.monotonic() < end:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        os.kill(process.pid, number)
    for number, process in started.items():
        _, err = process.communicate(timeout=60)
        assert process.returncode == ended[number] and "Traceback" not in err, err
    assert [f.name for f in tmp_path.iterdir()] == ["x.npy"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "input: is needed"),
        (["--inptu", "x.csv"], "--inptu: unknown word; did you mean --input?"),
        (["--input", "a.csv", "--input", "b.csv"], "--input: is given 2 times; keep one"),
        (["--input"], "--input: expected one argument"),
        (["--limit_mib", "much"], "--limit_mib: invalid float value: 'much'"),
        (["--input", "nowhere.csv", "--output", "o.csv"], "nowhere.csv' does not exist"),
    ],
)
def test_a_wrong_word_is_told_at_once(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict_command.main(words) == 2
    assert said in capsys.readouterr().err


def test_wrong_words_are_answered_before_anything_slow_is_imported() -> None:
    code = (
        "import sys; from flows.cli.predict_command import main; main(['--run', 'x'])\n"
        "slow = ('torch', 'prefect', 'mlflow', 'pandas', 'pyarrow')\n"
        "print([m for m in slow if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]" and "run: must be latest" in done.stderr


def test_help_shows_every_parameter_of_the_flow(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        predict_command.main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in predict.parameters.properties)
    assert max(map(len, shown.splitlines())) <= 80
