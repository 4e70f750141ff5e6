"""What the ranks of a training have measured, told by the lead as one: least, median and most of
each figure, and which rank had the most. Of a process that trains alone there is nothing to tell.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from tasks.engine.distributed.ranks import Ranks

# Under their names in the run record; here after ranks/.
TOLD = (
    "memory/run_peak_allocated_mib",
    "memory/leaked_mib",
    "memory/ooms_recovered",
    "time/data_wait_ms",
    "time/communication_ms",
)


@dataclass(frozen=True)
class RankFacts:
    """Under the names of the run record."""

    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


def of_ranks(ranks: Ranks, device: str, measured: Mapping[str, float]) -> RankFacts:
    """What all ranks measured of TOLD. All must call it."""
    if ranks.is_alone:
        return RankFacts()
    ours = {name: measured[name] for name in TOLD if name in measured}
    found = ranks.all_of((f"{platform.node()} {device}", ours))
    metrics: dict[str, float] = {}
    tags = {"ranks": str(ranks.size)}
    if device != "cpu" or len({where for where, _ in found}) > 1:
        tags["ranks.devices"] = ", ".join(
            f"{rank}: {where}" for rank, (where, _) in enumerate(found)
        )
    for name in TOLD:
        told = name.partition("/")[2]
        values = [of[name] for _, of in found if name in of]
        if len(values) == ranks.size:
            spread = {"least": min(values), "median": median(values), "most": max(values)}
            metrics |= {f"ranks/{told}_{which}": value for which, value in spread.items()}
            if spread["most"] > spread["least"]:
                tags[f"ranks.{told}_most"] = f"rank {values.index(spread['most'])}"
    return RankFacts(metrics, tags)
