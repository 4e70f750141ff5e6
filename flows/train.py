"""The score of one training: detect the device, prepare the data, train, give the memory back.

`python -m flows.train` plays it at a desk; Prefect deployments play it by the entrypoint
`flows/train.py:train`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from tasks.process import home, restart, signals, streams

    streams.keep()
    signals.catch()
    home.provide()
    restart.begin()
    # It answers --help and bad settings before prefect is imported.
    from flows.cli.train_command import leave, main

    leave(main(sys.argv[1:]))

from functools import partial
from typing import Any

from prefect.runtime import flow_run

from flows.cli.from_python import training
from tasks.detect_device import detect_device
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.step.plan import make_plan
from tasks.flow_run import (
    describe,
    ended_as,
    own_key,
    publish,
    retried,
    run_name,
    untagged,
    waited_s,
)
from tasks.preflight import check_fit, resolved
from tasks.prepare_data import prepare_data
from tasks.process.redaction import redacted_errors
from tasks.record import Record
from tasks.release_memory import release_memory
from tasks.train_model import train_model


@partial(training, name="train", flow_run_name=run_name)
def train(
    config: RunConfig = RunConfig(),  # noqa: B008 (frozen; Prefect's form shows it)
    overrides: dict[str, Any] | None = None,
    resume: str | None = None,
) -> Any:
    """Train one model on the best device here, and leave its whole story in MLflow.

    Args:
        config: What to train, on what, and how.
        overrides: Dotted names over `config`, e.g. {"optim.lr": 0.01, "train.epochs": 5}. Prefect
            merges nested parameters of a deployment shallowly; this merges them truly.
        resume: A run to go on with from its newest checkpoint: its id, its folder, or latest.
    """
    with redacted_errors():
        config = resolved(config, overrides)
    with redacted_errors():
        named = Record(
            config,
            flow_run=describe(),
            name=flow_run.name,
            waited_s=waited_s(),
            resume=resume,
            key=own_key(),
        )
    with retried(named), redacted_errors(), untagged(), named as record:
        device = record.timed(
            detect_device,
            config.device,
            precision=config.train.precision,
            limit_mib=config.memory.limit_mib,
            launch=config.launch,
            leases=record.leases,
        )
        data = record.timed(
            prepare_data,
            config.data,
            batch_size=config.train.batch_size,
            seed=config.train.seed,
        )
        plan = make_plan(config, device, data)
        check_fit(plan)
        record.check_resume(plan)
        past = record.begin(plan)
        try:
            facts = record.timed(
                train_model,
                plan,
                past=past,
                folder=str(record.folder),
                log=record.log,
                resumes=record.resumes,
            )
            record.trained(facts)
        finally:
            record.released(
                record.timed(
                    release_memory,
                    device.name,
                    baseline_bytes=device.baseline_bytes,
                    held_bytes=record.held_bytes,
                    leaks=record.leaks,
                    on_leak=config.memory.on_leak,
                )
            )
    publish(record.run)
    return ended_as(record.run)
