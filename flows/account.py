"""Accounts for a loop of your own, in a script or a notebook:

from flows.account import account

with account(run_name="gan", params={"lr": 2e-4}, model=net, optimizer=opt) as run:
    for x, y in run.batches(loader):
        with run.step():
            ...
        run.log({"train/loss": loss})

It imports neither Prefect nor MLflow. docs/own-loop.md tells the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.run.account import Account


def account(
    *,
    run_name: str | None = None,
    params: Mapping[str, Any] | None = None,
    model: Any = None,
    optimizer: Any = None,
    device: Any = None,
    experiment: str | None = None,
    quiet: bool = False,
) -> Account:
    """Return the account of a loop: a context manager, whose inside is the run.

    Args:
        run_name: Of the run in MLflow; by default that of the program's file.
        params: What the loop was asked to do; logged as params.
        model: The model whose passes are told apart, or several in a list; more by `run.watch`.
        optimizer: The same of optimizers. Where the loop marks no steps, that of the last one
            given ends one.
        device: Where the loop computes; by default where the model is.
        experiment: In MLflow; by default that of mlflow.yaml.
        quiet: Print no report at the end.
    """
    return Account(
        run_name=run_name,
        params=params,
        model=model,
        optimizer=optimizer,
        device=device,
        experiment=experiment,
        quiet=quiet,
    )
