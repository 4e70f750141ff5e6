"""The task that trains. It hands facts to the engine and facts back; whatever it allocated on the
device is freed when it returns, and when it raises.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.engine.base.facts import DataFacts, DeviceFacts, TrainFacts
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.training import trainer
from tasks.engine.training.loop import Stop
from tasks.engine.training.similar_runs import Past
from tasks.process import forks, signals
from tasks.process.redaction import redacted_errors


@task(cache_policy=NO_CACHE)
def train_model(
    config: RunConfig,
    device: DeviceFacts,
    data: DataFacts,
    *,
    past: Past,
    folder: str,
    log: Callable[[dict[str, float], int], None],
    resumes: bool = False,
) -> TrainFacts:
    """Train on `device`; the model, its checkpoints, and what memory has to tell, are left in
    `folder`. resumes: from the newest checkpoint there. A signal that ends it leaves one."""
    forks.let_them_end()
    with redacted_errors(), signals.between_steps() as came:

        def asked() -> Stop | None:
            number = came()
            if number is None:
                return None
            return Stop("", ends=number != signal.SIGUSR1, act=signals.deliver)

        return trainer.train(
            config,
            device,
            data,
            past=past,
            folder=Path(folder),
            log=log,
            resumes=resumes,
            asked=asked,
        )
