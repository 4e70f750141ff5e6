"""The task that trains. It takes facts and returns facts; whatever it allocated on the
device is freed when it returns, and when it raises.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from headroom.base.facts import TrainFacts
from headroom.launch.placement import count_processes
from headroom.launch.rank import Job, train_together
from headroom.prefect.run_task import run_task
from headroom.process import signals
from headroom.ranks.ranks import read_ranks_from_environment as ranks_asked
from headroom.settings.read_settings import ConfigError
from headroom.training import trainer
from headroom.training.admission import PastRuns
from headroom.training.kept_steps import CHECKPOINTS, list_steps
from headroom.training.loop import StopRequest
from headroom.training.plan import Plan


@run_task
def train_model(
    plan: Plan,
    past: PastRuns,
    folder: Path,
    log: Callable[[dict[str, float], int], None],
    *,
    resumes: bool = False,
) -> TrainFacts:
    """Train as planned; the model, its checkpoints, and what memory has to tell, are left in
    `folder`. resumes: from the newest checkpoint there. A signal that ends it leaves one."""
    if resumes and not list_steps(folder / CHECKPOINTS):
        # From the start, in the same run, each point would be told twice.
        raise ConfigError(
            f"--resume {folder}: its checkpoints were removed; train without --resume"
        )
    with signals.defer_signals() as came:

        def check_stop() -> StopRequest | None:
            number = came()
            if number is None:
                return None
            return StopRequest("", ends=number != signal.SIGUSR1, act=signals.deliver_signal)

        ranks, config, device = ranks_asked(), plan.settings, plan.device
        processes = count_processes(config.launch, device)
        if processes > 1:
            job = Job(config, plan.data, past, folder, resumes)
            if not ranks.is_alone:  # it was started as one of them
                return train_together(
                    job, device, ranks, log=log, check_stop=check_stop, is_flow=True
                )
            # Imports PyTorch's elastic agent, a tenth of a second.
            from headroom.launch.processes import train_in_processes

            return train_in_processes(
                job,
                device,
                processes=processes,
                restarts=config.run.retries,
                log=log,
                check_stop=check_stop,
            )
        return trainer.train(
            plan,
            past=past,
            folder=folder,
            log=log,
            resumes=resumes,
            check_stop=check_stop,
        )
