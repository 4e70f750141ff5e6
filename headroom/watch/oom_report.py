"""Explains the end of a loop for lack of memory, in one sentence and in a file beside it: what was
asked for and what was free, which sizes of a micro-batch were tried, who held the memory, and what
to change: a setting, or a part of a loop that has none. Each library words its error in its own
way; what is not told is left out, and a file that cannot be written is no reason to hide the
sentence.
"""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from headroom.base.import_paths import is_import_path
from headroom.base.names import PHASES
from headroom.base.units import format_mebibytes
from headroom.settings.run_config import TOKEN_SOURCES, RunConfig
from headroom.watch.allocation_log import (
    ACTIVATIONS,
    MIB,
    REST,
    AllocationLog,
    Entry,
    sum_by_layer,
    sum_by_owner,
)
from headroom.watch.out_of_memory import MemoryFailure

log = logging.getLogger(__name__)

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
class OomMessage:
    """The numbers in the text of an out-of-memory error, in bytes; None for those it does not
    give."""

    asked_bytes: int | None
    free_bytes: int | None
    idle_bytes: int | None  # reserved by the allocator, and in no tensor
    others_bytes: int | None = None  # at least so many are other processes'

    @property
    def is_held_by_others(self) -> bool:
        """Return whether there would have been room without the other processes."""
        if self.asked_bytes is None or not self.others_bytes:
            return False
        return self.asked_bytes <= self.others_bytes + (self.free_bytes or 0)


def parse_oom_message(text: str) -> OomMessage:
    """Read the numbers in the text of an out-of-memory error of CUDA, HIP, XPU, MPS, a CPU's
    allocator, numpy or an allocation log."""
    free, idle = _parse_size(_FREE, text), _parse_size(_IDLE, text)
    allocated, reserved = _parse_size(_ALLOCATED, text), _parse_size(_RESERVED, text)
    if idle is None and allocated is not None and reserved is not None:
        idle = max(0, reserved - allocated)
    allowed, other = _parse_size(_ALLOWED, text), _parse_size(_OTHER, text)
    if allowed is not None and allocated is not None:
        # Under a limit the driver's free memory is not the run's.
        left = allowed - allocated - (idle or 0) - (other or 0)
        if left >= 0 or other is None:  # Metal's count of the others is known to overflow
            free = max(0, left) if free is None else min(free, max(0, left))
    total, others = _parse_size(_TOTAL, text), None
    if None not in (total, free, allocated) and allowed is None:
        taken = total - free - allocated - (idle or 0)  # type: ignore[operator]
        others = max(0, taken - CONTEXT_BYTES)
    return OomMessage(_parse_size(_ASKED, text), free, idle, others)


def _parse_size(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    if match is None:
        return None
    value, unit = [group for group in match.groups() if group is not None]
    return round(float(value.replace(",", "").rstrip(".")) * 1024 ** _UNITS[unit.replace("i", "")])


SHOWN = 5  # of the largest holdings


@dataclass(frozen=True)
class Holding:
    """What one owner holds by one line of code."""

    owner: str
    bytes: int
    count: int  # storages
    what: str  # the largest of them: "mm (128, 256) float32"
    line: str  # empty for what was there before anybody counted


@dataclass(frozen=True)
class OomExplanation:
    """The explanation of one out-of-memory failure, in plain values."""

    device: str
    phase: str
    step: int
    batch_shape: tuple[int, ...]
    message: OomMessage
    owners: Mapping[str, int]  # bytes of tensors when it ran out; empty where nobody counted
    holdings: tuple[Holding, ...]  # the largest first, a few
    fragmentation_pct: float | None  # split blocks that lie idle, of what is reserved
    tried: tuple[int, ...]  # rows of the micro-batches that did not fit
    fitted: int | None  # of the largest that did
    setting: str  # the one to change
    remedy: str
    unrepeated: str = ""  # why it was not tried again
    layer: str = ""  # in which it ran out; empty where that is not known
    # Of `owners`, by the path of the layer that it lies in.
    layers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """Return all of it on one line."""
        message = self.message
        parts = [
            f"{self.setting}: memory ran out on {self.device} in {self._describe_place()}"
            f"{self._describe_tries()}"
        ]
        if message.asked_bytes is not None:
            free_bytes = message.free_bytes
            free = "" if free_bytes is None else f" and {_format_size(free_bytes)} free"
            parts.append(f"{_format_size(message.asked_bytes)} asked for{free}")
        if self.owners:
            owner, most = max(self.owners.items(), key=lambda item: item[1])
            share = f"{_format_size(most)} of {_format_size(sum(self.owners.values()))}"
            parts.append(f"most is held by {owner.replace('_', ' ')}: {share}")
        parts += [self.unrepeated] if self.unrepeated else []
        return "; ".join([*parts, self.remedy])

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "sentence": self.sentence}, indent=1)

    def _describe_place(self) -> str:
        shape = "x".join(str(size) for size in self.batch_shape)
        batch = f" (a batch of {shape})" if shape else ""
        step = f" of step {self.step}" if self.step else ""
        failed_in = {phase.name: phase.failed_in for phase in PHASES if phase.failed_in}
        phase = {**failed_in, "sending": "sending of a batch"}.get(self.phase, self.phase)
        layer = f", in the layer {self.layer}" if self.layer else ""
        return f"the {phase}{step}{batch}{layer}"

    def _describe_tries(self) -> str:
        if not self.tried:
            return ""
        fitted = "none fits" if self.fitted is None else f"{self.fitted:,} fitted before"
        return f", with micro-batches of {_join_sizes(self.tried)} rows ({fitted})"


# What has to change, by the failure, the numbers of its text and the owners of what was held: the
# setting or the thing itself, and how.
FindRemedy = Callable[[MemoryFailure, OomMessage, Mapping[str, int]], tuple[str, str]]


class OutOfMemory(RuntimeError):
    """A run ended for lack of memory: what was tried, what was free and what to change."""

    def __init__(self, explanation: OomExplanation) -> None:
        super().__init__(explanation.sentence)
        self.explanation = explanation


def explain_out_of_memory(
    failure: MemoryFailure,
    ledger: AllocationLog,
    *,
    find_remedy: FindRemedy,
    device: str,
    folder: Path,
) -> OomExplanation:
    """Return why a loop of steps found no memory, left in `folder`/memory/oom.json as well.

    ledger: knows who held what when it ran out; the failed phase is ended there.
    """
    explanation = make_explanation(failure, ledger, find_remedy=find_remedy, device=device)
    try:
        (folder / "memory").mkdir(parents=True, exist_ok=True)
        (folder / "memory" / "oom.json").write_text(explanation.to_json())
    except OSError as error:
        log.warning("memory/oom.json could not be written: %s", error)
    return explanation


def make_explanation(
    failure: MemoryFailure, ledger: AllocationLog, *, find_remedy: FindRemedy, device: str
) -> OomExplanation:
    """Return the explanation of a failure by the allocation log, in which the failed phase ends.

    A phase called "training" is told apart by the log: the forward pass or the backward pass.
    """
    held, allocator = ledger.list_at_failure(), failure.allocator
    if held:
        failure = replace(failure, phase=_find_phase(failure.phase, ledger))
        ledger.end_failed_phase(failure.phase)
    owners = sum_by_owner(held)
    message = parse_oom_message(failure.text)
    if message.idle_bytes is None and {"reserved", "allocated"} <= set(allocator):
        message = replace(message, idle_bytes=allocator["reserved"] - allocator["allocated"])
    split, reserved = allocator.get("inactive_split"), allocator.get("reserved")
    setting, remedy = find_remedy(failure, message, owners)
    if owners and ledger.device.type != "cpu":
        # No Python object leads to what libraries keep, nor to what autograd holds in between.
        unseen = allocator.get("allocated", 0) - sum(owners.values())
        if unseen > 0:
            owners[REST] = owners.get(REST, 0) + unseen
    return OomExplanation(
        device=device,
        phase=failure.phase,
        step=failure.step,
        batch_shape=failure.batch_shape,
        message=message,
        owners=owners,
        holdings=_group_holdings(held),
        fragmentation_pct=100 * split / reserved if split is not None and reserved else None,
        tried=failure.tried,
        fitted=failure.fitted,
        setting=setting,
        remedy=remedy,
        unrepeated=failure.unrepeated,
        layer=(held and ledger.failed_layer) or "",
        layers=sum_by_layer(held),
    )


def _find_phase(phase: str, ledger: AllocationLog) -> str:
    if phase != "training":
        return phase
    done = [name for _, name in ledger.list_phases()]
    return "backward" if done[-1:] == ["forward"] else "forward"


def find_setting(
    failure: MemoryFailure,
    message: OomMessage,
    owners: Mapping[str, int],
    *,
    config: RunConfig,
    precision: str,
) -> tuple[str, str]:
    """Return the setting of a training to change first, and what may be done."""
    tried, phase = failure.tried, failure.phase
    if tried and min(tried) > 1 and phase not in ("optimizer", "eval"):
        parts = -(-config.train.batch_size // (min(tried) // 2))
        return (
            "train.accumulate",
            f"set train.accumulate to {parts:,} (got {config.train.accumulate})",
        )
    rows = config.train.batch_size
    if phase == "sending" and rows > 1 and not is_import_path(config.data.source):
        return "train.batch_size", f"set train.batch_size to {rows // 2:,} (got {rows:,})"
    setting, ways = _suggest_shrinking(_find_largest(owners), config, precision)
    if config.memory.limit_mib is not None:
        ways.append(f"raise memory.limit_mib (got {config.memory.limit_mib:g})")
    return setting, ", or ".join([*ways, *_suggest_joining(message)])


def find_part(
    failure: MemoryFailure, message: OomMessage, owners: Mapping[str, int]
) -> tuple[str, str]:
    """Return the part of a loop without settings to change first, and what may be done."""
    part, way = {
        "parameters": ("model", "make the model smaller"),
        "buffers": ("model", "make the model smaller"),
        "gradients": ("model", "make the model smaller"),
        "optimizer_state": ("optimizer", "use an optimizer with less state, such as SGD"),
    }.get(
        _find_largest(owners),
        ("batch", "make the batch smaller, accumulate gradients, or use torch.autocast"),
    )
    return part, ", or ".join([way, *_suggest_joining(message)])


def _find_largest(owners: Mapping[str, int]) -> str:
    return max(owners, key=lambda owner: owners[owner], default=REST)


def _suggest_joining(message: OomMessage) -> list[str]:
    """Return what helps where enough is there, in pieces:
    https://docs.pytorch.org/docs/stable/notes/cuda.html"""
    idle, requested = message.idle_bytes, message.asked_bytes
    if idle is None or not requested or idle < requested:
        return []
    return ["set the environment's PYTORCH_ALLOC_CONF to expandable_segments:True"]


def _suggest_shrinking(owner: str, config: RunConfig, precision: str) -> tuple[str, list[str]]:
    smaller = "make the model smaller by model.args"
    if owner == "data":
        where = "data.args.rows" if config.data.source == "synthetic" else "data.path"
        return where, [f"give fewer rows ({where}), which live on the device"]
    if owner == "optimizer_state":
        if config.optim.name != "sgd":
            half = "half of the state" if config.optim.name == "adamw" else "less state"
            return "optim.name", [
                f"set optim.name to sgd, with {half} (got {config.optim.name})",
                smaller,
            ]
        if config.optim.has_momentum:
            return "optim.args.momentum", [
                "set optim.args.momentum to 0, which needs no state",
                smaller,
            ]
    if owner not in (ACTIVATIONS, REST, "batch"):
        return "model.args", [smaller]
    is_text = config.data.source in TOKEN_SOURCES
    ways = [f"shorten data.args.context (got {config.data.tokens.context})"] if is_text else []
    ways.append(smaller)
    if precision in ("fp32", "tf32"):
        ways.append(f"set train.precision to bf16 (got {precision})")
    return "data.args.context" if is_text else "model.args", ways


def _group_holdings(held: Iterable[Entry]) -> tuple[Holding, ...]:
    """Group the entries by owner and line; `held` has the largest first."""
    groups: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in held:
        groups[entry.owner, entry.line].append(entry)
    holdings = [
        Holding(owner, sum(e.bytes for e in group), len(group), group[0].what, line)
        for (owner, line), group in groups.items()
    ]
    return tuple(sorted(holdings, key=lambda holding: -holding.bytes)[:SHOWN])


def _join_sizes(sizes: Sequence[int]) -> str:
    words = [f"{size:,}" for size in dict.fromkeys(sizes)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _format_size(size_bytes: int) -> str:
    return format_mebibytes(size_bytes / MIB)
