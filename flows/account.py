"""Accounts for a loop of your own, in a script or a notebook:

from flows.account import account

with account(run_name="gan", params={"lr": 2e-4}, model=net, optimizer=opt) as run:
    for x, y in run.batches(loader):
        with run.step():
            ...
        run.log({"train/loss": loss})

It imports neither Prefect nor MLflow. docs/own-loop.md tells the rest.
"""

from tasks.run.account import Account as account

__all__ = ["account"]
