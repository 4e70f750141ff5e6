"""A DataLoader's worker processes end well in a flow, where Prefect's services run beside them."""

import multiprocessing

import pytest
import torch
from prefect import flow
from prefect.events import emit_event
from torch.utils.data import DataLoader, TensorDataset

from headroom.prefect.run_task import run_task

# Python 3.12 warns of fork() in a process with threads, PyTorch's own among them.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def test_worker_processes_end_well_in_a_flow(prefect_api: str) -> None:
    @run_task
    def read_in_workers() -> tuple[list[int], int | None]:
        loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=8, num_workers=2)
        child = multiprocessing.get_context("fork").Process(target=int)
        child.start()
        child.join()
        return [len(rows) for (rows,) in loader], child.exitcode

    @flow
    def reads() -> tuple[list[int], int | None]:
        emit_event("a.service.runs", {"prefect.resource.id": "tests"})
        return read_in_workers()

    assert reads() == ([8, 8, 4], 0)
