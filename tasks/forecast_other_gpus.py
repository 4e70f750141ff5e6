"""Whether a training would fit on GPUs that are not here, and the largest batches that would: from
the same forecast as for a GPU that is, and a table of how much memory each has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from tasks.engine.base.facts import DataFacts, DeviceFacts
from tasks.engine.base.units import mebibytes, printable
from tasks.engine.data.preparation import check, prepare
from tasks.engine.device.detection import detect
from tasks.engine.forecast.forecast import forecast, largest_micro_batch
from tasks.engine.settings.import_path_checks import check as check_imports
from tasks.engine.settings.read_settings import ConfigError, override
from tasks.engine.settings.run_config import RunConfig
from tasks.engine.step.plan import make_plan
from tasks.engine.training import check_training

if TYPE_CHECKING:
    from rich.table import Table

MIB = 1024**2
# MiB in all as nvidia-smi tells them: https://github.com/modal-labs/modal-client/pull/2797
SIZES_MIB = {
    "t4": 15360,
    "a10": 23028,
    "a10g": 23028,
    "l4": 23034,
    "l40s": 46068,
    "a100-40": 40960,
    "a100-80": 81920,
    "h100": 81559,
}
# What the driver keeps (some 430 to 570 MiB: PyTorch told 14.58 GiB of a T4 and 79.10 of an H100)
# and the context of a process takes.
TAKEN_MIB = 1024
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|mib)", re.IGNORECASE)
MOST_DOUBLINGS = 20


@dataclass(frozen=True)
class Elsewhere:
    """A training on one of them."""

    name: str
    room_mib: float
    needed_mib: float  # of the batch that was asked for, in one piece
    micro_batch: int | None  # the largest that fits; None: not even one row
    batch: int | None  # the largest of the asked one and its doubles that fits in one piece

    @property
    def fits(self) -> bool:
        return self.needed_mib <= self.room_mib


def sizes(text: str) -> dict[str, float]:
    """MiB of each that was asked for: names of SIZES_MIB, or sizes such as 24GiB.

    Raises ConfigError.
    """
    found, problems = {}, []
    for name in (word.strip().lower() for word in text.split(",")):
        size = _SIZE.fullmatch(name)
        if name in SIZES_MIB:
            found[name] = float(SIZES_MIB[name])
        elif size is not None and float(size[1]) > 0:
            found[name] = float(size[1]) * (1024 if size[2] == "gib" else 1)
        else:
            near = get_close_matches(name, SIZES_MIB, 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(SIZES_MIB)}"
            told = printable(name, limit=60)
            problems.append(f"--for {told}: is neither a GPU that is known nor 24GiB; {hint}")
    if problems:
        raise ConfigError(*problems)
    return found


def forecast_on(config: RunConfig, asked: dict[str, float]) -> list[Elsewhere]:
    """Each of them. Raises what a training with these settings is refused by."""
    check_imports(config)
    check(config.data)
    here = detect("cpu")
    data = prepare(config.data, batch_size=config.train.batch_size, seed=config.train.seed)
    check_training.check(make_plan(config, here, data))
    return [_on(config, data, here, name, size) for name, size in asked.items()]


def _on(
    config: RunConfig, data: DataFacts, here: DeviceFacts, name: str, size_mib: float
) -> Elsewhere:
    room = max(0, int((size_mib - TAKEN_MIB) * MIB))
    device = replace(
        here, name="cuda:0", kind="cuda", index=0, total_bytes=room, free_bytes=room, bf16=True
    )
    whole = override(config, {"train.accumulate": 1})

    def needed(rows: int) -> int:
        larger = override(whole, {"train.batch_size": rows})
        return forecast(make_plan(larger, device, data)).needed_bytes

    asked, largest = config.train.batch_size, None
    first = takes = needed(asked)
    for rows in (asked << n for n in range(MOST_DOUBLINGS)):
        takes = takes if rows == asked else needed(rows)
        if takes > room:
            break
        largest = rows
        if 2 * rows > data.train_rows:
            break
    micro = largest
    if micro is None:
        micro = largest_micro_batch(make_plan(whole, device, data), room)
    return Elsewhere(name, room / MIB, first / MIB, micro, largest)


def table(found: list[Elsewhere], config: RunConfig) -> Table:
    """One line each."""
    from rich.table import Table

    rows = config.train.batch_size
    table = Table("", title=f"a batch of {rows} rows on GPUs that are not here")
    table.title_justify = "left"
    for name in ("room", "takes", "left", "largest batch", "largest micro-batch"):
        table.add_column(name, justify="right")
    table.add_column("fits")
    for one in found:
        table.add_row(
            one.name,
            mebibytes(one.room_mib),
            mebibytes(one.needed_mib),
            mebibytes(one.room_mib - one.needed_mib) if one.fits else "",
            f"{one.batch:,}" if one.batch else "none in one piece",
            f"{one.micro_batch:,}" if one.micro_batch else "none",
            "yes" if one.fits else "NO",
        )
    return table
