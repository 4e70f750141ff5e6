"""What a report says about memory: how much was in use, who owned it, and whether it was given
back, with what is left named. A CPU has no pool of its own, so it says less there: never a zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from tasks.engine.base.units import mebibytes, number, printable
from tasks.engine.report.report_parts import Block, Numbers, Section, bars, joined, said

OWNERS = tuple(
    (label, f"memory/{owner}_mib")
    for label, owner in (
        ("parameters", "parameters"),
        ("buffers", "buffers"),
        ("best weights", "best_weights"),
        ("gradients", "gradients"),
        ("optimizer", "optimizer_state"),
        ("data", "data"),
        ("batch", "batch"),
        ("activations", "activations"),
        ("libraries", "libraries"),
        ("recorded graph", "graph"),
        ("the rest", "rest"),
    )
)
PHASE_PEAKS = tuple(
    (phase, f"memory/peak_{phase}_mib") for phase in ("forward", "backward", "optimizer", "eval")
)
LEAKS_SHOWN = 6


def memory(metrics: Numbers) -> Section:
    """The most that was in use, by owner and by phase, and what the host process held."""
    peak_mib = metrics.get("memory/run_peak_allocated_mib")
    owners = [(label, metrics[k]) for label, k in OWNERS if metrics.get(k)]
    peaks = [(label, metrics[k]) for label, k in PHASE_PEAKS if k in metrics]
    pool = said(
        metrics,
        ("memory/run_peak_allocated_mib", "peak {} allocated"),
        ("memory/run_peak_reserved_mib", "{} reserved"),
        ("memory/predicted_peak_mib", "{} predicted"),
        ("memory/headroom_mib", "headroom {}"),
        ("memory/fragmentation_pct", "{} % idle at the peak"),
    )
    trouble = [
        template.format(number(metrics[key]))
        for key, template in (
            ("memory/alloc_retries", "{} allocation retries"),
            ("memory/ooms_recovered", "{} out-of-memory errors recovered"),
        )
        if metrics.get(key)
    ]
    host = said(
        metrics,
        ("memory/host_rss_mib", "host process {}"),
        ("memory/host_rss_peak_mib", "its peak {}"),
    )
    whole = peak_mib or sum(mib for _, mib in owners)
    title = "by owner, of the peak" if peak_mib else "by owner"
    top = peak_mib or max((mib for _, mib in peaks), default=0.0)
    blocks = (
        Block(title, bars(owners, whole=whole, words=mebibytes)),
        Block("highest in each phase", bars(peaks, whole=top, words=mebibytes)),
    )
    lines = (*joined(pool), *joined(trouble), *joined(host))
    return Section("Memory", lines, tuple(b for b in blocks if b.bars))


def ran_out(run: Mapping[str, Any], *, limit: int) -> Section:
    """Who held the memory when a run ended for lack of it, the largest first."""
    holdings = (run.get("oom") or {}).get("holdings") or ()
    lines = [
        printable(
            f"{mebibytes(_bytes(held) / 1024**2)} of {held.get('owner')} in "
            f"{number(held.get('count') or 0)} tensors, the largest {held.get('what')}"
            + (f", at {held['line']}" if held.get("line") else ""),
            limit=limit,
        )
        for held in holdings
        if isinstance(held, Mapping)
    ]
    return Section("Ran out", tuple(lines))


def released(run: Mapping[str, Any], metrics: Numbers, *, limit: int) -> Section:
    """What was given back; what was not, by name and largest first, each cut to `limit`."""
    proof = said(
        metrics,
        ("memory/released_mib", "{} given back"),
        ("memory/baseline_mib", "{} in use before the run"),
        ("memory/residual_mib", "{} kept by libraries"),
        ("memory/leaked_mib", "{} leaked"),
        ("memory/reserved_residual_mib", "{} still reserved"),
    )
    ok = bool(metrics["memory/release_ok"]) if "memory/release_ok" in metrics else None
    verdict = {True: ["OK"], False: ["NOT ALL GIVEN BACK"], None: []}[ok]
    owners = [o for o in run.get("owners") or () if isinstance(o, Mapping)]
    owners.sort(key=lambda o: -_bytes(o))
    held = [_leak(o, limit) for o in owners[:LEAKS_SHOWN]]
    why = (run.get("tags") or {}).get("memory.release")
    if why:
        held.append(printable(why, limit=limit))
    if owners[LEAKS_SHOWN:]:
        rest = sum(_bytes(o) for o in owners[LEAKS_SHOWN:])
        held.append(f"and {len(owners) - LEAKS_SHOWN:,} more, {mebibytes(rest / 1024**2)}")
    kept = [
        printable(
            f"{o.get('name')}: {mebibytes(_bytes(o) / 1024**2)} more than before", limit=limit
        )
        for o in run.get("kept") or ()
        if isinstance(o, Mapping)
    ]
    return Section("Release", (*joined([*verdict, *proof]), *held, *kept), ok=ok)


def _bytes(owner: Mapping[str, Any]) -> float:
    size = owner.get("bytes")
    return float(size) if isinstance(size, Real) and math.isfinite(size) else 0.0


def _leak(owner: Mapping[str, Any], limit: int) -> str:
    shape = "x".join(str(n) for n in owner.get("shape") or ())
    what = [str(owner.get("kind") or "object"), shape, str(owner.get("dtype") or "")]
    size = [mebibytes(_bytes(owner) / 1024**2)] if owner.get("bytes") is not None else []
    held = [f"held by {owner['held_by']}"] if owner.get("held_by") else []
    return printable(", ".join([" ".join(w for w in what if w), *size, *held]), limit=limit)
