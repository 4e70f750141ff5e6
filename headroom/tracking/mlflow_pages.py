"""Makes the addresses of MLflow's pages for a training or a comparison, and the views in which
they show it: a view is a tag of the experiment, with the columns and the charts that a person
asks for, which runs it shows and how it sorts them. It imports no mlflow.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote

from headroom.base.names import Place, list_shown

# Else MLflow opens its pages for language models, whatever the kind of the experiment.
TRAINING = "workflowType=machine_learning"
EXPERIMENTS_PAGE = f"/#/experiments?{TRAINING}"
VIEW = "headroom"  # its key in an address
VIEWS = "mlflow.sharedViewState."  # what the tags of views begin with
VIEW_TAG = f"{VIEWS}{VIEW}"
COMPARISONS = "of-"  # what the keys of comparisons' views begin with
MOST_COMPARISONS = 20  # views of them that are kept: MLflow's pages take no more than 40
CREATED_MS = 1_767_225_600_000  # the same at each writing, so that it is seen to be there
SETTINGS = ("optim.lr", "train.batch_size")  # that people vary most; a run's name has the others
DURATION = "duration"  # a column that is always there
LAST_COLUMNS = (
    *("tags.`bound`", "tags.`gate`", "tags.`warnings`", DURATION, "tags.`device`"),
    *(f"metrics.`{name}`" for name in list_shown(Place.MLFLOW_COLUMN)),
    "attributes.`Dataset`",
)
# Not `attributes.start_time`: sorted by that MLflow hides the runs of a comparison in a closed row.
NEWEST_FIRST = {"orderByKey": "attributes.`start_time`", "orderByAsc": False}
# The losses first; what a run does not measure is not drawn.
CURVES = sorted(list_shown(Place.MLFLOW_CHART), key=lambda name: not name.endswith("/loss"))
FIRST = "Loss, validation, speed, memory"
OTHERS = (
    "val",
    "test",
    "train",
    "speed",
    "time",
    "bound",
    "memory",
    "checkpoint",
)  # closed until opened


def make_experiment_path(experiment_id: str) -> str:
    """Return the path of the page of all runs, in the view."""
    return f"/#/experiments/{experiment_id}/runs?{TRAINING}&viewStateShareKey={VIEW}"


def make_run_path(experiment_id: str, run_id: str) -> str:
    """Return the path of the page of one run."""
    # Of a server of anybody's, and copied from a terminal into a shell.
    ids = (quote(part, safe="") for part in (experiment_id, run_id))
    return "/#/experiments/{}/runs/{}?{}".format(*ids, TRAINING)


def make_comparison_path(experiment_id: str, run_id: str) -> str:
    """Return the path of the page that shows the runs of a comparison and their charts, in its
    own view."""
    view = f"viewStateShareKey={_make_key(run_id)}&compareRunsMode=CHART"
    return f"/#/experiments/{experiment_id}/runs?{TRAINING}&{view}"


def _make_key(run_id: str) -> str:
    """Return the key of a comparison's view: so short that no filter takes it for a secret."""
    return f"{COMPARISONS}{run_id[:8]}"


@cache
def make_view_tag() -> str:
    """Return the value of VIEW_TAG: a saved view as MLflow's pages write and read it.

    See savedViewEnvelope, ExperimentPageUIState and runs-charts.types in MLflow's sources.
    """
    columns = _list_columns(list_shown(Place.GOAL), SETTINGS)
    return _pack("Headroom", CREATED_MS, _make_view(columns, _make_cards()) | NEWEST_FIRST)


@dataclass(frozen=True)
class ComparisonView:
    """What the view of a comparison shows: runs of one parent."""

    run_id: str  # of the run that holds the others
    name: str
    varied: Sequence[str]  # settings
    score: str  # the metric by which they are judged; empty where they share none
    is_lower_better: bool = False
    is_grouped: bool = False  # several runs of each setting
    has_curves: bool = True  # they were evaluated more than twice

    def make_tag(self) -> tuple[str, str]:
        """Return key and value of the experiment's tag."""
        scores = (self.score,) if self.score else ()
        view = _make_view(_list_columns(scores, self.varied), self._make_cards())
        view |= {"searchFilter": f"tags.`mlflow.parentRunId` = '{self.run_id}'", **NEWEST_FIRST}
        if self.score:
            view |= {"orderByKey": f"metrics.`{self.score}`", "orderByAsc": self.is_lower_better}
        if self.is_grouped and self.varied:
            keys = [{"mode": "param", "groupByData": name} for name in self.varied]
            view["groupBy"] = {"aggregateFunction": "average", "groupByKeys": keys}
        key = f"{VIEWS}{_make_key(self.run_id)}"
        return key, _pack(self.name, int(time.time() * 1000), view)

    def _make_cards(self) -> list[dict[str, Any]]:
        metrics = [self.score, *list_shown(Place.MLFLOW_BARS)]
        metrics = [name for name in metrics if name]
        axes = {"selectedParams": [*self.varied], "selectedMetrics": metrics[1::-1]}
        first = [{"type": "PARALLEL", "showAllRuns": True, "isGenerated": False, **axes}]
        bars = [{"type": "BAR", "metricKey": name, "displayName": name} for name in metrics]
        curves = _make_cards()
        if not self.has_curves:
            curves = [one for one in curves if not one.get("metricKey", "").startswith("val/")]
        return [*first, *bars, *curves]


def find_old_comparisons(tags: Mapping[str, str]) -> list[str]:
    """Return the tags of the views of comparisons that are more than are kept, the oldest."""
    keys = [key for key in tags if key.startswith(f"{VIEWS}{COMPARISONS}")]
    keys.sort(key=lambda key: _read_created_ms(tags[key]))
    return keys[: max(0, len(keys) - MOST_COMPARISONS)]


def _read_created_ms(value: str) -> int:
    try:
        return int(json.loads(value)["createdAt"])
    except (ValueError, TypeError, KeyError):
        return 0


def _pack(name: str, created_ms: int, view: Mapping[str, Any]) -> str:
    text = json.dumps(view, separators=(",", ":")).encode()
    state = "deflate;" + base64.b64encode(zlib.compress(text, 9)).decode()
    return json.dumps({"name": name, "createdAt": created_ms, "state": state})


def _list_columns(scores: Sequence[str], settings: Sequence[str]) -> list[str]:
    metrics, params = (f"metrics.`{name}`" for name in scores), (f"params.`{n}`" for n in settings)
    return [*metrics, *params, *LAST_COLUMNS]


def _make_view(columns: Sequence[str], cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sections = [
        _make_section(FIRST, is_open=True),
        *(_make_section(s, is_open=False) for s in OTHERS),
    ]
    return {
        "selectedColumns": [name for name in columns if name != DURATION],
        "columnOrder": columns,
        "columnWidths": {name: _compute_column_width(name) for name in columns},
        "compareRunCharts": [
            {"uuid": f"{VIEW}-{i}", "metricSectionId": FIRST, "deleted": False, **card}
            for i, card in enumerate(cards)
        ],
        "compareRunSections": sections,
        "isAccordionReordered": True,  # else they are sorted by their names
        "hideEmptyCharts": True,
        "runsHiddenMode": "FIRST_20_RUNS",
    }


def _make_cards() -> list[dict[str, Any]]:
    difference = {
        "type": "DIFFERENCE",
        "chartName": "What differs between the runs",
        "compareGroups": ["Parameters"],
        "showDifferencesOnly": True,
        "showChangeFromBaseline": False,
        "baselineColumnUuid": "",
    }
    return [*map(_make_curve, CURVES), {"isGenerated": False, **difference}]


def _compute_column_width(column: str) -> int:
    """Return the width in pixels, by the column's head where it is longer than a number."""
    named = {DURATION: 100, "attributes.`Dataset`": 190, "tags.`gate`": 80}
    return named.get(column) or max(100, 28 + 7 * len(column.split("`")[1]))


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
