"""What a launcher such as torchrun tells this process, and is told by it. By the environment: the
rank, checked before anything slow is imported. By the exit code: the launcher starts processes
again whatever the reason was, so what is wrong for good is kept for those that come after, and told
once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from headroom.settings.read_settings import ConfigError

ATTEMPTS_FOLDER = "HEADROOM_ATTEMPTS"  # of this machine and this training
_ELASTIC = "torch.distributed.elastic"  # how the loggers of PyTorch's agent begin
AGAIN = 3  # exit code of a process that is to begin again, with the others


def is_launched() -> bool:
    """Return whether a launcher such as torchrun has started this process."""
    return "RANK" in os.environ


def read_rank() -> int:
    """Return the rank that a launcher has given this process; 0 where none has.

    Raises ConfigError where what the launcher must set is missing or makes no sense.
    """
    if not is_launched():
        size_text = os.environ.get("WORLD_SIZE", "") or "1"
        if not size_text.isdecimal() or int(size_text) > 1:
            raise ConfigError(
                f"RANK: is not set, while WORLD_SIZE is {size_text:.40}; set it to the number of "
                "this process, from 0 on, or unset WORLD_SIZE to train alone"
            )
        nodes = os.environ.get("PET_NNODES", "").rpartition(":")[2]  # or at least:at most
        if nodes.isdecimal() and int(nodes) > 1:  # Kubeflow's: torchrun reads them
            raise ConfigError(
                f"RANK: is not set, while PET_NNODES is {nodes}; start by torchrun, which sets it: "
                "torchrun -m flows.train ..., or unset PET_NNODES to train alone"
            )
        return 0
    variables = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE")}
    for name, text in variables.items():
        if not text.isdecimal():
            value = f"got {text!r:.40}" if text else "it is not set"
            raise ConfigError(f"{name}: must be a whole number where RANK is set ({value})")
    rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    if rank >= size:
        raise ConfigError(f"RANK: must be below WORLD_SIZE, {size} (got {rank})")
    local = os.environ.get("LOCAL_RANK", "0")
    if not local.isdecimal():
        raise ConfigError(f"LOCAL_RANK: must be a whole number (got {local!r:.40})")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if size > 1 and missing:
        raise ConfigError(
            f"{missing[0]}: is not set, while RANK and WORLD_SIZE are; give the host of rank 0 as "
            "MASTER_ADDR and a free port of it as MASTER_PORT"
        )
    port = os.environ.get("MASTER_PORT", "")
    if size > 1 and not (port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(f"MASTER_PORT: must be a port, 1 to 65535 (got {port!r:.40})")
    return rank


def silence_agent() -> None:
    """Have PyTorch's elastic agent log nothing: the ranks tell. It must have been imported."""
    for name in [n for n in logging.root.manager.loggerDict if n.startswith(_ELASTIC)]:
        logging.getLogger(name).setLevel(logging.CRITICAL)


@contextmanager
def keep_exit_codes() -> Iterator[None]:
    """Keep, inside, the exit codes of the processes that this one starts."""
    with TemporaryDirectory(prefix="headroom-") as folder:
        os.environ[ATTEMPTS_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[ATTEMPTS_FOLDER]


def read_final_code() -> int | None:
    """Return the exit code of a process here that would end the same way again; None where
    none was kept."""
    folder = os.environ.get(ATTEMPTS_FOLDER)
    if folder is None or not (Path(folder) / "code").exists():
        return None
    return int((Path(folder) / "code").read_text())


def keep_exit_code(code: int) -> int:
    """Return the exit code, and keep it where it is one of bad input or of a failure."""
    if code in (1, 2) and (folder := os.environ.get(ATTEMPTS_FOLDER)) is not None:
        (Path(folder) / "code").write_text(str(code))
    return code
