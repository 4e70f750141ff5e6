"""The task that predicts. It takes facts and returns facts, and shows its progress;
whatever it allocated on the device is freed when it returns, and when it raises.
"""

from __future__ import annotations

from tasks.engine.base.facts import DeviceFacts, ModelFacts, PredictFacts
from tasks.engine.predict import prediction
from tasks.engine.predict.request import Order
from tasks.process.run_task import run_task
from tasks.run.progress import RowsProgress


@run_task
def predict_rows(order: Order, device: DeviceFacts, model: ModelFacts) -> PredictFacts:
    """Predict all rows of the input into the output, which is there when this returns."""
    with RowsProgress(prediction.measure_total(order, model)) as progress:
        return prediction.predict(order, device, model, told=progress.show_rows)
