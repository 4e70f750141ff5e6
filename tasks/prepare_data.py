"""The second task of the flow: prepares the data, checked, split and scaled, as arrays on
disk. It returns facts about them and never the arrays; it refuses what cannot be learnt
from.
"""

from __future__ import annotations

import threading

from headroom.base import scores
from headroom.base.facts import DataFacts
from headroom.data.preparation import prepare_dataset
from headroom.prefect.run_task import run_task
from headroom.settings.run_config import DataConfig


@run_task
def prepare_data(data: DataConfig, *, batch_size: int = 64, seed: int = 0) -> DataFacts:
    """Return the facts of the prepared data. Raises DataError where it cannot be used.

    batch_size, seed: of the training, for a source of the user's own.
    """
    facts = prepare_dataset(data, batch_size=batch_size, seed=seed)
    if facts.task == "multilabel":
        # While the run is opened, which waits for the process that imports MLflow.
        threading.Thread(target=scores.load_sklearn, daemon=True).start()
    return facts
