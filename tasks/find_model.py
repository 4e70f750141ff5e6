"""The first task of a prediction: finds the logged model, brings its files to this machine,
and checks the head of the input with it, so that what cannot fit is refused before a device
is touched.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from headroom.base.facts import ModelFacts
from headroom.prediction import prediction
from headroom.prediction.request import Order
from headroom.prefect.run_task import run_task
from headroom.tracking import ask_mlflow
from headroom.tracking.tracking_settings import read_tracking_settings


@run_task
def find_model(order: Order, *, folder: str) -> ModelFacts:
    """Return the model that predicts; files that are not on this machine are put into `folder`.

    latest is the newest that can take the input. Raises TrackingError where there is none,
    DataError where it cannot take the input.
    """
    place = read_tracking_settings()
    place = place.model_copy(update={"experiment": order.experiment or place.experiment})
    fits = partial(prediction.check_order, order)
    return ask_mlflow.find_logged_model(order.run, place, folder=Path(folder), check=fits)
