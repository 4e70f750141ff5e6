"""Machines that train one model together: the same command is given on each of them. They meet at
the first by name, which tells who is missing, and then PyTorch's launcher (torchrun) starts their
processes. It waits no longer than it was asked to.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api

from headroom.base.program import list_training_words
from headroom.device.detection import DeviceError, detect_best_device
from headroom.launch import launcher
from headroom.launch.placement import count_threads
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import LaunchConfig, RunConfig

ASK_EVERY_S = 0.2
ANSWER_S = 5.0  # of a store whose port is open
log = logging.getLogger(__name__)


def train_on_machines(config: RunConfig, arguments: Sequence[str]) -> int:
    """Take part, on this machine, in the training `python -m flows.train *arguments`. Returns the
    exit code. Raises ConfigError where a machine is missing or unknown, or none of them is this
    one, and where it has no such device."""
    try:  # what its processes would refuse as often as they are started
        detect_best_device(config.device.name)
    except DeviceError as error:
        raise ConfigError(str(error)) from None
    here = 1 if config.device.name == "cpu" else torch.accelerator.device_count()
    count = config.launch.count or max(1, here)
    with _meet_machines(config.launch) as (own_name, run_id), launcher.keep_exit_codes():
        os.environ.setdefault("OMP_NUM_THREADS", str(count_threads(count)))
        launcher.silence_agent()
        start = api.elastic_launch(
            api.LaunchConfig(
                min_nodes=1,  # so many go on where others are lost
                max_nodes=len(config.launch.machines),
                nproc_per_node=count,
                run_id=run_id,
                rdzv_backend="c10d",
                rdzv_endpoint=_make_address(config.launch),
                rdzv_configs={"is_host": False},
                max_restarts=config.run.retries,
                local_addr=own_name,
            ),
            sys.executable,
        )
        try:
            start("-u", "-m", *list_training_words(), *arguments)
            return 0
        except SignalException as error:
            return 128 + error.sigval
        except ChildFailedError as error:
            code = error.get_first_failure()[1].exitcode
        except RendezvousError:
            code = launcher.AGAIN
        code = launcher.read_final_code() or code
    if code != launcher.AGAIN:
        return 128 - code if code < 0 else code
    if own_name != config.launch.machines[0]:
        log.error("launch.nodes: %s has ended, and told why", config.launch.machines[0])
    return 1


@contextmanager
def _meet_machines(launch: LaunchConfig) -> Iterator[tuple[str, str]]:
    """Yields the name of this machine among them, and that of the training, when all are there."""
    names, until = launch.machines, time.monotonic() + launch.wait_s
    ours = [name for name in names if _is_here(name)]
    if not ours:
        raise ConfigError(f"launch.nodes: none of {', '.join(names)} is an address of this machine")
    store = _open_store(launch, ours, until)
    try:
        theirs = store.compare_set("nodes", "", ",".join(names)).decode()
        if theirs != ",".join(names):
            raise ConfigError(f"launch.nodes: is {','.join(names)} here and {theirs} on {names[0]}")
        name = _claim_name(store, ours)
        if name is None:
            raise ConfigError(_describe_taken(launch))
        missing, is_told = list(names), False
        while missing := [n for n in missing if not store.check([f"here/{n}"])]:
            text = f"launch.nodes: {', '.join(missing)}"
            if time.monotonic() > until:
                raise ConfigError(
                    f"{text} did not come to {_make_address(launch)} within {launch.wait_s:g} "
                    "s; start "
                    "the same command there"
                )
            if not is_told:
                log.info("%s: waited for, up to %g s", text, launch.wait_s)
                is_told = True
            time.sleep(ASK_EVERY_S)
        run_id = store.compare_set("id", "", uuid.uuid4().hex).decode()
        log.info("launch.nodes: all %d are there; %s tells of the run", len(names), names[0])
    except dist.DistError:
        raise ConfigError(f"launch.nodes: {names[0]} was there and is gone again") from None
    yield name, run_id  # the store is kept: the launchers meet there too


def _open_store(launch: LaunchConfig, ours: Sequence[str], until: float) -> TCPStore:
    """Where the machines meet: served here, or by the first of them."""
    first, port = launch.machines[0], launch.port
    if first in ours:
        with suppress(dist.DistNetworkError):  # another process on this machine serves it
            return TCPStore(first, port, is_master=True, wait_for_workers=False)
        if len(ours) == 1:
            raise ConfigError(_describe_taken(launch))
    while True:
        try:
            socket.create_connection((first, port), timeout=ANSWER_S).close()
            break
        except OSError as error:
            if time.monotonic() > until:
                raise ConfigError(
                    f"launch.nodes: {first} did not come to {_make_address(launch)} within "
                    f"{launch.wait_s:g} s ({error.strerror or error}); start the same command there"
                ) from None
        time.sleep(ASK_EVERY_S)
    try:
        return TCPStore(first, port, timeout=timedelta(seconds=ANSWER_S))
    except dist.DistError:
        raise ConfigError(_describe_taken(launch)) from None


def _describe_taken(launch: LaunchConfig) -> str:
    return f"launch.port: {_make_address(launch)} is in use by something else; choose another"


def _claim_name(store: TCPStore, ours: Sequence[str]) -> str | None:
    """The name that this process has; None where others have all that this machine is known by."""
    claim = uuid.uuid4().hex
    for name in ours:
        if store.compare_set(f"here/{name}", "", claim).decode() == claim:
            return name
    return None


def _is_here(name: str) -> bool:
    """True if it is an address of this machine. Raises ConfigError where nobody knows it."""
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"launch.nodes: {name} is not known here ({error.strerror})") from None
    for family, kind, protocol, _, address in addresses:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _make_address(launch: LaunchConfig) -> str:
    return f"{launch.machines[0]}:{launch.port}"
