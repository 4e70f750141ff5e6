"""The task that predicts. It takes facts and returns facts, and shows its progress;
whatever it allocated on the device is freed when it returns, and when it raises.
"""

from __future__ import annotations

from headroom.base.facts import DeviceFacts, ModelFacts, PredictFacts
from headroom.prediction import prediction
from headroom.prediction.request import Order
from headroom.prefect.run_task import run_task
from headroom.run.progress import RowsProgress


@run_task
def predict_rows(order: Order, device: DeviceFacts, model: ModelFacts) -> PredictFacts:
    """Predict all rows of the input into the output, which is there when this returns."""
    with RowsProgress(prediction.measure_total(order, model)) as progress:
        return prediction.predict(order, device, model, show_progress=progress.show_rows)
