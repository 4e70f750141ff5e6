"""Functions of tests that several ranks play together: real processes that talk over gloo. One
process imports PyTorch, and neither Prefect nor MLflow, and forks for each rank.
"""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import PYTHON, ROOT, free_port


def on_ranks(
    size: int, function: Callable[..., Any], *args: Any, joined: bool = True, timeout_s: float = 150
) -> list[Any]:
    """What `function(*args)` returns on each of `size` ranks, by rank. It stands at the top of its
    module; arguments and results can be pickled. joined: in a process group of gloo; without it
    only the variables are set that torchrun sets. Raises AssertionError with the traceback of the
    rank that failed first."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "order").write_bytes(pickle.dumps((size, function, args, joined)))
        process = subprocess.Popen(
            [PYTHON, "-m", "tests.rank_processes", folder],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            told, _ = process.communicate(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                told = process.communicate()[0]
                print(told)
        assert process.returncode == 0, told
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in range(size)]


def _play(folder: Path) -> None:
    """All ranks of an order, until they end or the first has failed."""
    import torch.distributed.fsdp  # once, and not in each rank
    import torch.multiprocessing

    size, *_ = pickle.loads((folder / "order").read_bytes())
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {**given, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    torch.multiprocessing.start_processes(_rank, (folder,), size, start_method="fork")


def _rank(rank: int, folder: Path) -> None:
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    _, function, args, joined = pickle.loads((folder / "order").read_bytes())
    if joined:
        dist.init_process_group("gloo")
    try:
        result = function(*args)
    except BaseException:
        traceback.print_exc()  # this rank's own, whichever is told of
        raise
    (folder / str(rank)).write_bytes(pickle.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    _play(Path(sys.argv[1]))
