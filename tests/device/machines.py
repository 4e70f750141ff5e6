"""Machines that are made up: what a driver would tell of their GPUs."""

from collections.abc import Mapping, Sequence
from typing import Any

from headroom.device.checks import Gpu, Holder
from headroom.device.nvml import Nvml


def make_driver(held: Mapping[str, Sequence[tuple[Any, ...]]]) -> Nvml:
    """A driver that tells of these GPUs, by their UUID, and of the processes that hold memory of
    each: the pid, then the name and the bytes, as far as they are known."""
    return Nvml(
        gpus=tuple(
            Gpu(uuid, "cuda", uuid=uuid, holders=tuple(Holder(*one) for one in holders))
            for uuid, holders in held.items()
        )
    )
