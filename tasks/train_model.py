"""The task that trains. It hands facts to the engine and facts back; whatever it allocated on the
device is freed when it returns, and when it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks import forks
from tasks.engine import training
from tasks.engine.config import RunConfig
from tasks.engine.facts import DataFacts, DeviceFacts, TrainFacts
from tasks.engine.past import Past
from tasks.redaction import redacted_errors


@task(cache_policy=NO_CACHE)
def train_model(
    config: RunConfig,
    device: DeviceFacts,
    data: DataFacts,
    *,
    past: Past,
    folder: str,
    log: Callable[[dict[str, float], int], None],
) -> TrainFacts:
    """Train on `device`; the model, and what memory has to tell, are left in `folder`."""
    forks.let_them_end()
    with redacted_errors():
        return training.train(config, device, data, past=past, folder=Path(folder), log=log)
