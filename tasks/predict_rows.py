"""The task that predicts. It hands facts to the engine and facts back, and shows how far it is;
whatever it allocated on the device is freed when it returns, and when it raises.
"""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.engine.base.facts import DeviceFacts, ModelFacts, PredictFacts
from tasks.engine.predict import prediction
from tasks.engine.predict.request import Order
from tasks.process.redaction import redacted_errors
from tasks.rows_progress import RowsProgress


@task(cache_policy=NO_CACHE)
def predict_rows(order: Order, device: DeviceFacts, model: ModelFacts) -> PredictFacts:
    """Predict all rows of the input into the output, which is there when this returns."""
    with redacted_errors(), RowsProgress(prediction.total(order, model)) as progress:
        return prediction.predict(order, device, model, told=progress.told)
