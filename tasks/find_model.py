"""The first task of a prediction: which logged model, with its files at hand and the head of the
input held against it, so that what cannot fit is refused before a device is touched.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tasks.engine.base.facts import ModelFacts
from tasks.engine.predict import prediction
from tasks.engine.predict.request import Order
from tasks.run_task import run_task
from tasks.tracking import model_store
from tasks.tracking.where import where


@run_task
def find_model(order: Order, *, folder: str) -> ModelFacts:
    """The model that predicts; files that are not on this machine are put into `folder`. latest is
    the newest that can take the input.

    Raises TrackingError where there is none, DataError where it cannot take the input.
    """
    place = where()
    place = place.model_copy(update={"experiment": order.experiment or place.experiment})
    fits = partial(prediction.check, order)
    return model_store.model_of(order.run, place, folder=Path(folder), check=fits)
