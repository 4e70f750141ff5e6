"""The flow of one training: detect the device, prepare the data, train, give the memory back.

`python -m flows.train` runs it from a command line; Prefect deployments run it by the entrypoint
`flows/train.py:train`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from headroom.process.first_signals import answer_first_interrupt

    answer_first_interrupt()  # before the imports that take time
    from headroom.process.command import exit_process, start_command

    start_command()
    # It answers --help and bad settings before prefect is imported.
    from flows.cli.train_command import main

    exit_process(main(sys.argv[1:]))

from typing import Any

from prefect import flow

from flows.cli.from_python import make_python_callable
from headroom.prefect_flows.flow_run import make_run_name, open_run, publish_run
from headroom.settings.run_config import RunConfig
from headroom.training.plan import make_plan
from tasks.detect_device import detect_device
from tasks.prepare_data import prepare_data
from tasks.release_memory import release_memory
from tasks.train_model import train_model


@make_python_callable  # a call from Python does what the command does
@flow(name="train", flow_run_name=make_run_name)
def train(
    config: RunConfig = RunConfig(),  # noqa: B008 (frozen; Prefect's form shows it)
    overrides: dict[str, Any] | None = None,
    resume: str | None = None,
) -> Any:
    """Train one model on the best device here, and leave its whole story in MLflow.

    Args:
        config: Every setting, in groups. To change a few, `overrides` does, which wins over it.
        overrides: Settings by their dotted names, e.g. {"data.path": "houses.csv", "optim.lr":
            0.01, "train.epochs": 5}. They win over `config`, setting by setting.
        resume: A run to go on with from its newest checkpoint: its id, its folder, or latest.
    """
    with open_run(config, overrides, resume=resume) as run:
        settings = run.config
        device = detect_device(
            settings.device,
            precision=settings.train.precision,
            limit_mib=settings.memory.limit_mib,
            launch=settings.launch,
            leases=run.leases,
        )
        data = prepare_data(
            settings.data, batch_size=settings.train.batch_size, seed=settings.train.seed
        )
        plan = run.begin(make_plan(settings, device, data))
        try:
            run.keep_training(train_model(plan, run.past, run.folder, run.log, resumes=run.resumes))
        finally:
            run.keep_release(
                release_memory(device, run.held_bytes, run.leaks, on_leak=settings.memory.on_leak)
            )
    return publish_run(run)
