"""A model that was logged by an earlier version of this project loads and predicts as it did."""

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tasks.engine.models import predictor

MODELS = Path(__file__).parent.parent / "logged_models"
PREDICT = """
import sys, mlflow, pandas as pd
{first}
model = mlflow.pyfunc.load_model(sys.argv[1])
model.predict(pd.read_csv(sys.argv[2])).to_csv(sys.argv[3], index=False)
"""


@pytest.mark.parametrize("first", ["", "import tasks.engine, tasks.engine.base.units"])
def test_mlflow_loads_it_where_this_project_is_and_where_it_was_imported(
    tmp_path: Path, first: str
) -> None:
    found = tmp_path / "found.csv"
    command = [sys.executable, "-c", PREDICT.format(first=first), str(MODELS / "table_0_1")]
    command += [str(MODELS / "table_0_1.csv"), str(found)]
    warm = {**os.environ, "TESTS_WARM_KIND": "models"}
    done = subprocess.run(command, env=warm, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _are_as_they_were(pd.read_csv(found))


def test_this_project_loads_it() -> None:
    model = predictor.load(MODELS / "table_0_1" / "data")
    _are_as_they_were(model.predict(pd.read_csv(MODELS / "table_0_1.csv")))


def _are_as_they_were(found: pd.DataFrame) -> None:
    expected = pd.read_csv(MODELS / "table_0_1.predictions.csv")
    pd.testing.assert_frame_equal(found, expected, rtol=1e-5, check_dtype=False)
