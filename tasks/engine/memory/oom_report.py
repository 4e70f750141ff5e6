"""Why memory ran out, in words: what was asked for and what was free, which sizes of a micro-batch
were tried, who held the memory, and what to change. It says what the error, the allocator and the
ledger tell, and leaves out what none of them does.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tasks.engine.base.field_types import is_import
from tasks.engine.base.units import mebibytes, number, printable
from tasks.engine.memory.allocation_log import ACTIVATIONS, MIB, REST, AllocationLog, Entry
from tasks.engine.memory.oom_message import Told, told_by
from tasks.engine.settings.data_config import TOKEN_SOURCES
from tasks.engine.settings.run_config import RunConfig

SHOWN = 5  # of the largest holdings
PHASES = {
    "forward": "forward pass",
    "backward": "backward pass",
    "optimizer": "optimizer step",
    "eval": "evaluation",
    "sending": "sending of a batch",
}


@dataclass(frozen=True)
class Holding:
    """What one owner holds by one line of code."""

    owner: str
    bytes: int
    count: int  # storages
    what: str  # the largest of them: "mm (128, 256) float32"
    line: str  # empty for what was there before anybody counted


@dataclass(frozen=True)
class Explanation:
    """One end for lack of memory, in plain values."""

    device: str
    phase: str
    step: int
    batch_shape: tuple[int, ...]
    told: Told
    owners: Mapping[str, int]  # bytes of tensors when it ran out; empty where nobody counted
    holdings: tuple[Holding, ...]  # the largest first, a few
    fragmentation_pct: float | None  # split blocks that lie idle, of what is reserved
    tried: tuple[int, ...]  # rows of the micro-batches that did not fit
    fitted: int | None  # of the largest that did
    setting: str  # the one to change
    remedy: str

    @property
    def sentence(self) -> str:
        """All of it on one line."""
        told = self.told
        parts = [
            f"{self.setting}: memory ran out on {self.device} in {self._where()}{self._with()}"
        ]
        if told.asked_bytes is not None:
            free = "" if told.free_bytes is None else f" and {_words(told.free_bytes)} free"
            parts.append(f"{_words(told.asked_bytes)} asked for{free}")
        if self.owners:
            owner, most = max(self.owners.items(), key=lambda item: item[1])
            share = f"{_words(most)} of {_words(sum(self.owners.values()))}"
            parts.append(f"most is held by {owner.replace('_', ' ')}: {share}")
        return "; ".join([*parts, self.remedy])

    def markdown(self) -> str:
        """The sentence, and a table of who held most."""
        lines = [f"**Out of memory.** {_cell(self.sentence)}"]
        if self.told.idle_bytes is not None:
            lines += ["", f"Reserved, and in no tensor: {_words(self.told.idle_bytes)}."]
        if self.fragmentation_pct is not None:
            lines += ["", f"Fragmentation: {number(self.fragmentation_pct)} %."]
        if self.holdings:
            lines += [
                "",
                "| held by | size | tensors | the largest | line |",
                "|:--|--:|--:|:--|:--|",
            ]
        for held in self.holdings:
            cells = held.owner, _words(held.bytes), number(held.count), held.what, held.line
            lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "sentence": self.sentence}, indent=1)

    def _where(self) -> str:
        shape = "x".join(str(size) for size in self.batch_shape)
        batch = f" (a batch of {shape})" if shape else ""
        step = f" of step {self.step}" if self.step else ""
        return f"the {PHASES.get(self.phase, self.phase)}{step}{batch}"

    def _with(self) -> str:
        if not self.tried:
            return ""
        fitted = "none fits" if self.fitted is None else f"{self.fitted:,} fitted before"
        return f", with micro-batches of {_listed(self.tried)} rows ({fitted})"


def explain(
    text: str,
    ledger: AllocationLog,
    *,
    config: RunConfig,
    device: str,
    precision: str,
    phase: str,
    step: int,
    batch_shape: Sequence[int],
    allocator: Mapping[str, int],
    tried: Sequence[int],
    fitted: int | None,
) -> Explanation:
    """Why the last attempt of a run failed, with `text`, under `ledger`.

    phase: "training" where it is the ledger that knows whether it was the forward or the backward
    pass. The ledger is told which phase failed. allocator: what Allocator.read() told. precision:
    as resolved for the device.
    """
    held = ledger.at_failure()
    if held:
        done = [name for _, name in ledger.phases()]
        if phase == "training":
            phase = "backward" if done[-1:] == ["forward"] else "forward"
        ledger.failed_in(phase)
    owners = _owners(held)
    told = told_by(text)
    if told.idle_bytes is None and {"reserved", "allocated"} <= set(allocator):
        told = replace(told, idle_bytes=allocator["reserved"] - allocator["allocated"])
    split, reserved = allocator.get("inactive_split"), allocator.get("reserved")
    setting, remedy = _remedy(config, precision, phase, told, owners, tried)
    return Explanation(
        device=device,
        phase=phase,
        step=step,
        batch_shape=tuple(batch_shape),
        told=told,
        owners=owners,
        holdings=_holdings(held),
        fragmentation_pct=100 * split / reserved if split is not None and reserved else None,
        tried=tuple(tried),
        fitted=fitted,
        setting=setting,
        remedy=remedy,
    )


def _remedy(
    config: RunConfig,
    precision: str,
    phase: str,
    told: Told,
    owners: Mapping[str, int],
    tried: Sequence[int],
) -> tuple[str, str]:
    """The setting to change first, and what may be done."""
    if tried and min(tried) > 1 and phase != "optimizer":
        parts = -(-config.train.batch_size // (min(tried) // 2))
        return (
            "train.accumulate",
            f"set train.accumulate to {parts:,} (got {config.train.accumulate})",
        )
    rows = config.train.batch_size
    if phase == "sending" and rows > 1 and not is_import(config.data.source):
        return "train.batch_size", f"set train.batch_size to {rows // 2:,} (got {rows:,})"
    setting, ways = _shrink(max(owners, key=lambda o: owners[o], default=REST), config, precision)
    if config.memory.limit_mib is not None:
        ways.append(f"raise memory.limit_mib (got {config.memory.limit_mib:g})")
    if told.idle_bytes is not None and told.asked_bytes and told.idle_bytes >= told.asked_bytes:
        # Enough is there, in pieces: https://docs.pytorch.org/docs/stable/notes/cuda.html
        ways.append("set the environment's PYTORCH_ALLOC_CONF to expandable_segments:True")
    return setting, ", or ".join(ways)


def _shrink(owner: str, config: RunConfig, precision: str) -> tuple[str, list[str]]:
    smaller = "make the model smaller by model.args"
    if owner == "data":
        where = "data.rows" if config.data.source == "synthetic" else "data.path"
        return where, [f"give fewer rows ({where}), which live on the device"]
    if owner == "optimizer_state":
        if config.optim.name != "sgd":
            half = "half of the state" if config.optim.name == "adamw" else "less state"
            return "optim.name", [
                f"set optim.name to sgd, with {half} (got {config.optim.name})",
                smaller,
            ]
        if config.optim.momentum > 0:
            got = f"(got {config.optim.momentum:g})"
            return "optim.momentum", [
                f"set optim.momentum to 0, which needs no state {got}",
                smaller,
            ]
    if owner not in (ACTIVATIONS, REST, "batch"):
        return "model.args", [smaller]
    is_text = config.data.source in TOKEN_SOURCES
    ways = [f"shorten data.context (got {config.data.context})"] if is_text else []
    ways.append(smaller)
    if precision in ("fp32", "tf32"):
        ways.append(f"set train.precision to bf16 (got {precision})")
    return "data.context" if is_text else "model.args", ways


def _owners(held: Iterable[Entry]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for entry in held:
        found[entry.owner] += entry.bytes
    return dict(found)


def _holdings(held: Iterable[Entry]) -> tuple[Holding, ...]:
    """Grouped by owner and line; `held` has the largest first."""
    groups: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in held:
        groups[entry.owner, entry.line].append(entry)
    found = [
        Holding(owner, sum(e.bytes for e in group), len(group), group[0].what, line)
        for (owner, line), group in groups.items()
    ]
    return tuple(sorted(found, key=lambda holding: -holding.bytes)[:SHOWN])


def _listed(sizes: Sequence[int]) -> str:
    words = [f"{size:,}" for size in dict.fromkeys(sizes)]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _words(size_bytes: int) -> str:
    return mebibytes(size_bytes / MIB)


def _cell(text: str) -> str:
    return printable(text, limit=1000).replace("|", "\\|")
