"""The task that predicts. It hands facts to the engine and facts back, and shows how far it is;
whatever it allocated on the device is freed when it returns, and when it raises.
"""

from __future__ import annotations

from tasks.engine.base.facts import DeviceFacts, ModelFacts, PredictFacts
from tasks.engine.predict import prediction
from tasks.engine.predict.request import Order
from tasks.rows_progress import RowsProgress
from tasks.run_task import run_task


@run_task
def predict_rows(order: Order, device: DeviceFacts, model: ModelFacts) -> PredictFacts:
    """Predict all rows of the input into the output, which is there when this returns."""
    with RowsProgress(prediction.total(order, model)) as progress:
        return prediction.predict(order, device, model, told=progress.told)
