"""What the text of an out-of-memory error tells: the bytes that were asked for, that were free, and
that the allocator kept for itself. Each library has its own words, old and new; what a text does
not tell is None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# All count in steps of 1024, also those that write "GB", as older ones on Metal do.
_UNITS = {"bytes": 0, "B": 0, "KB": 1, "MB": 2, "GB": 3, "TB": 4}
_SIZE = r"([\d.,]+) ?(bytes|B|[KMGT]i?B)"
_ASKED = re.compile(rf"(?:[Tt]ried to allocate|Unable to allocate|Invalid buffer size:) {_SIZE}")
_FREE = re.compile(rf"of which ?{_SIZE} is free|; {_SIZE} free;|; {_SIZE} of the limit")
_ALLOWED = re.compile(rf"{_SIZE} allowed;|max allowed: {_SIZE}|of the limit of {_SIZE}")
_ALLOCATED = re.compile(
    rf"{_SIZE} is allocated by PyTorch|{_SIZE} already allocated|MPS allocated: {_SIZE}"
)
_IDLE = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_RESERVED = re.compile(rf"{_SIZE} reserved in total by PyTorch")
_OTHER = re.compile(rf"other allocations: {_SIZE}")
_TOTAL = re.compile(rf"total capacity of {_SIZE}")
# Of a process on a GPU beside its tensors: the context, and what libraries keep. That texts tell it
# is no help: in a container they take this process for another one, or the others for this one.
CONTEXT_BYTES = 2**30


@dataclass(frozen=True)
class Told:
    """What the text of an out-of-memory error tells, in bytes; None where it does not."""

    asked_bytes: int | None
    free_bytes: int | None
    idle_bytes: int | None  # reserved by the allocator, and in no tensor
    others_bytes: int | None = None  # at least so many are other processes'

    @property
    def others_hold_it(self) -> bool:
        """Whether there would have been room without the other processes."""
        if self.asked_bytes is None or not self.others_bytes:
            return False
        return self.asked_bytes <= self.others_bytes + (self.free_bytes or 0)


def told_by(text: str) -> Told:
    """What the text tells, be it of CUDA, HIP, XPU, MPS, a CPU's allocator, numpy or a ledger."""
    free, idle = _found(_FREE, text), _found(_IDLE, text)
    allocated, reserved = _found(_ALLOCATED, text), _found(_RESERVED, text)
    if idle is None and allocated is not None and reserved is not None:
        idle = max(0, reserved - allocated)
    allowed, other = _found(_ALLOWED, text), _found(_OTHER, text)
    if allowed is not None and allocated is not None:
        # Under a limit the driver's free memory is not the run's.
        left = allowed - allocated - (idle or 0) - (other or 0)
        if left >= 0 or other is None:  # Metal's count of the others is known to overflow
            free = max(0, left) if free is None else min(free, max(0, left))
    total, others = _found(_TOTAL, text), None
    if None not in (total, free, allocated) and allowed is None:
        taken = total - free - allocated - (idle or 0)  # type: ignore[operator]
        others = max(0, taken - CONTEXT_BYTES)
    return Told(_found(_ASKED, text), free, idle, others)


def _found(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None:
        return None
    value, unit = [group for group in match.groups() if group is not None]
    return round(float(value.replace(",", "").rstrip(".")) * 1024 ** _UNITS[unit.replace("i", "")])
