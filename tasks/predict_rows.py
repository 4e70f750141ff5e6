"""The task that predicts. It hands facts to the engine and facts back, and shows how far it is;
whatever it allocated on the device is freed when it returns, and when it raises.
"""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.engine import predicting
from tasks.engine.facts import DeviceFacts, ModelFacts, PredictFacts
from tasks.engine.predict_order import Order
from tasks.redaction import redacted_errors
from tasks.rows_progress import RowsProgress


@task(cache_policy=NO_CACHE)
def predict_rows(order: Order, device: DeviceFacts, model: ModelFacts) -> PredictFacts:
    """Predict all rows of the input into the output, which is there when this returns."""
    with redacted_errors(), RowsProgress(predicting.total(order, model)) as progress:
        return predicting.predict(order, device, model, told=progress.told)
