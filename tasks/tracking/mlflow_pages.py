"""Makes the addresses of MLflow's pages for a training, and the view in which they show it:
a view of the experiment, kept as one of its tags, with the columns and the charts that a
person asks for. It imports no mlflow.
"""

from __future__ import annotations

import base64
import json
import zlib
from functools import cache
from typing import Any

# Else MLflow opens its pages for language models, whatever the kind of the experiment.
TRAINING = "workflowType=machine_learning"
EXPERIMENTS_PAGE = f"/#/experiments?{TRAINING}"
VIEW = "headroom"  # its key in an address
VIEW_TAG = f"mlflow.sharedViewState.{VIEW}"
CREATED_MS = 1_767_225_600_000  # the same at each writing, so that it is seen to be there
COLUMNS = (
    *(f"metrics.`val/{name}`" for name in ("accuracy", "r2", "perplexity", "loss")),
    *("tags.`gate`", "tags.`device`"),
    *(f"metrics.`speed/{name}`" for name in ("samples_per_s", "tokens_per_s")),
    "metrics.`time/plain_step_ms`",
    *(f"metrics.`memory/{name}`" for name in ("run_peak_allocated_mib", "leaked_mib")),
    "attributes.`Dataset`",
)
# In this order; what a run does not measure is not drawn.
CURVES = (
    *("train/loss", "val/loss", "val/accuracy", "val/r2", "val/mae", "val/perplexity"),
    *("speed/samples_per_s", "speed/tokens_per_s"),
    *("memory/peak_allocated_mib", "memory/host_rss_mib"),
)
FIRST = "Loss, validation, speed, memory"
OTHERS = ("val", "test", "train", "speed", "time", "memory", "checkpoint")  # closed until opened


def make_experiment_path(experiment_id: str) -> str:
    """Return the path of the page of all runs, in the view."""
    return f"/#/experiments/{experiment_id}/runs?{TRAINING}&viewStateShareKey={VIEW}"


def make_run_path(experiment_id: str, run_id: str) -> str:
    """Return the path of the page of one run."""
    return f"/#/experiments/{experiment_id}/runs/{run_id}?{TRAINING}"


@cache
def make_view_tag() -> str:
    """Return the value of VIEW_TAG: a saved view as MLflow's pages write and read it.

    See savedViewEnvelope, ExperimentPageUIState and runs-charts.types in MLflow's sources.
    """
    text = json.dumps(_make_view_state(), separators=(",", ":")).encode()
    state = "deflate;" + base64.b64encode(zlib.compress(text)).decode()
    return json.dumps({"name": "Headroom", "createdAt": CREATED_MS, "state": state})


def _make_view_state() -> dict[str, Any]:
    difference = {
        "type": "DIFFERENCE",
        "chartName": "What differs between the runs",
        "compareGroups": ["Parameters"],
        "showDifferencesOnly": True,
        "showChangeFromBaseline": False,
        "baselineColumnUuid": "",
    }
    cards: list[dict[str, Any]] = [_make_curve(name) for name in CURVES]
    sections = [
        _make_section(FIRST, is_open=True),
        *(_make_section(s, is_open=False) for s in OTHERS),
    ]
    return {
        "selectedColumns": COLUMNS,
        "columnOrder": COLUMNS,
        "columnWidths": {name: _compute_column_width(name) for name in COLUMNS},
        "compareRunCharts": [
            {"uuid": f"{VIEW}-{i}", "metricSectionId": FIRST, "deleted": False, **card}
            for i, card in enumerate([*cards, {"isGenerated": False, **difference}])
        ],
        "compareRunSections": sections,
        "isAccordionReordered": True,  # else they are sorted by their names
        "hideEmptyCharts": True,
    }


def _compute_column_width(column: str) -> int:
    """Return the width in pixels, by the column's head where it is longer than a number."""
    return max(112, 28 + 7 * len(column.split("`")[1])) if "Dataset" not in column else 190


def _make_curve(name: str) -> dict[str, Any]:
    return {
        "type": "LINE",
        "metricKey": name,
        "displayName": name,
        "isGenerated": True,
        "runsCountToCompare": 10,
        "lineSmoothness": 0,
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {},
        "xAxisKey": "step",
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }


def _make_section(name: str, *, is_open: bool) -> dict[str, Any]:
    return {
        "uuid": name,
        "name": name,
        "display": is_open,
        "isReordered": True,
        "deleted": False,
        "isGenerated": True,
    }
