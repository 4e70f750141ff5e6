"""What a report says, before it is said in Markdown, on a terminal or in HTML: a finished run, as
a plain dict of run-record names, becomes a headline and a few sections of lines and bars. All
three faces are made from these, so they cannot disagree. It refuses to guess: what was not
measured has no line, and is never a zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from tasks.engine.base.units import mebibytes, milliseconds, number, percent, printable, seconds
from tasks.engine.report.class_section import classes
from tasks.engine.report.memory_section import memory, ran_out, released
from tasks.engine.report.report_parts import Block, Numbers, Report, Section, bars, joined, said

STAGES = (
    ("start", "time/start_s"),
    ("detect", "time/detect_device_s"),
    ("prepare", "time/prepare_data_s"),
    ("open the run", "time/open_run_s"),
    ("train", "time/train_model_s"),
    ("release", "time/release_memory_s"),
    ("close", "time/close_s"),
)
PHASES = tuple(
    (phase.replace("_", " "), f"time/{phase}_ms")
    for phase in ("data_wait", "h2d", "forward", "backward", "communication", "optimizer")
)
RANKS = {
    "run_peak_allocated_mib": ("peak memory", mebibytes),
    "leaked_mib": ("leaked", mebibytes),
    "data_wait_ms": ("wait for data", milliseconds),
    "communication_ms": ("communication", milliseconds),
}
DATA_PHASES = ("data wait", "h2d")
HEADLINE_METRICS = (
    "val/accuracy",
    "val/r2",
    "val/perplexity",
    "val/mae",
    "val/loss",
    "train/loss",
)
FIGURES = (
    *HEADLINE_METRICS[:2],
    *("val/balanced_accuracy", "val/macro_f1", "val/top5_accuracy", "val/largest_class_share"),
    *("val/f1", "val/average_precision"),
    *("val/perplexity", "val/mae", "val/rmse", "val/loss"),
)


def sections(run: Mapping[str, Any], *, limit: int = 400) -> Report:
    """The report of a run, each free text cut to `limit` characters; keys may be absent."""
    learned = _numbers(run, finite=False)
    metrics = _numbers(run, finite=True)
    tags = _texts(run, limit)
    warnings = tuple(printable(words, limit=limit) for words in run.get("warnings") or ())
    found = (
        Section("Warnings", warnings, ok=False),
        _gate(tags),
        _trained(run, learned, limit),
        classes(run, limit=limit),
        _device(
            tags, metrics, is_shared=(run.get("params") or {}).get("device.share") in ("True", True)
        ),
        _time(metrics),
        memory(metrics),
        ran_out(run, limit=limit),
        released(run, metrics, limit=limit),
    )
    return Report(
        name=printable(run.get("name") or run.get("run_id") or "run", limit=min(limit, 120)),
        status=printable(run.get("status") or "", limit=20),
        headline=_headline(learned, metrics, tags),
        error=printable(run["error"], limit=limit) if run.get("error") else None,
        sections=tuple(s for s in found if s.lines or s.blocks),
    )


def _numbers(run: Mapping[str, Any], *, finite: bool) -> dict[str, float]:
    given = (run.get("metrics") or {}).items()
    known = {k: float(v) for k, v in given if isinstance(v, Real)}
    return {k: v for k, v in known.items() if not finite or math.isfinite(v)}


def _texts(run: Mapping[str, Any], limit: int) -> dict[str, str]:
    given = (run.get("tags") or {}).items()
    texts = {k: printable(v, limit=limit) for k, v in given if v is not None}
    return {k: text for k, text in texts.items() if text}


def _headline(learned: Numbers, metrics: Numbers, tags: Mapping[str, str]) -> tuple[str, ...]:
    uneven = ("val/balanced_accuracy",) if "val/largest_class_share" in learned else ()
    metric = next((k for k in (*uneven, *HEADLINE_METRICS) if k in learned), None)
    return (
        *([f"{metric} {number(learned[metric])}"] if metric else []),
        *said(metrics, ("time/total_s", "{} in all")),
        *([f"on {tags['device']}"] if "device" in tags else []),
    )


def _trained(run: Mapping[str, Any], learned: Numbers, limit: int) -> Section:
    params = {k: v for k, v in (run.get("params") or {}).items() if v is not None}
    asked = (
        (("model.name",), "{} on {}"),
        (("optim.name", "optim.lr"), "{} at lr {}"),
        (("train.batch_size",), "batch {}"),
        (("train.epochs",), "{} epochs"),
        (("train.max_steps",), "at most {} steps"),
        (("train.seed",), "seed {}"),
    )
    source = params.get("data.path") or params.get("data.source") or "unknown data"
    recipe = [
        template.format(*(printable(params[k], limit=min(limit, 60)) for k in keys), source)
        for keys, template in asked
        if all(k in params for k in keys)
    ]
    recipe = ["1 epoch" if part == "1 epochs" else part for part in recipe]
    shown = [k for k in ("train/loss", *FIGURES) if k in learned]
    results = [f"{k} {number(learned[k])}" for k in dict.fromkeys(shown)]
    tests = (k.replace("val/", "test/") for k in FIGURES)
    tested = [f"{k} {number(learned[k])}" for k in tests if k in learned]
    kept = []
    if {"train/best_epoch", "train/epoch"} <= learned.keys():
        best, last = (number(learned[k]) for k in ("train/best_epoch", "train/epoch"))
        kept.append(f"the weights are those of epoch {best} of {last}: its val/loss is the lowest")
    pace = said(
        learned,
        ("speed/samples_per_s", "{} samples/s"),
        ("speed/tokens_per_s", "{} tokens/s"),
        ("speed/steps_per_s", "{} steps/s"),
    )
    if "speed/mfu" in learned:
        pace.append(f"{percent(learned['speed/mfu'])} of the device's peak (MFU)")
    recipe = [printable(part, limit=min(limit, 160)) for part in recipe]
    return Section(
        "Trained", (*joined(recipe), *joined(results), *joined(tested), *kept, *joined(pace))
    )


def _device(tags: Mapping[str, str], metrics: Numbers, *, is_shared: bool) -> Section:
    total = tags.get("device.total_mib", "")
    try:
        total = mebibytes(float(total))
    except ValueError:
        total = ""
    names = [tags.get(k, "") for k in ("device", "device.model")]
    versions = [tags.get("accelerator.runtime", "")]
    versions += [f"driver {tags['driver.version']}"] if "driver.version" in tags else []
    versions += [f"torch {tags['torch.version']}"] if "torch.version" in tags else []
    how = [tags.get("precision", "")]
    if tags.get("compiled", "no") != "no":
        how.append(f"compiled ({tags['compiled']})")
    where = {"device": "data on the device", "pinned": "data in pinned host memory"}
    where["host"] = "data in host memory"
    how.append(where.get(tags.get("data.residency", ""), ""))
    how += [f"micro-batch {tags['micro_batch']}"] if "micro_batch" in tags else []
    how += [f"resumed from step {tags['resumed_from_step']}"] if "resumed_from_step" in tags else []
    watched = said(
        metrics,
        ("gpu/utilization_pct", "{} % busy"),
        ("gpu/power_w", "{} W"),
        ("gpu/temperature_c", "{} C"),
        ("gpu/energy_j", "{} J used" + (" by all that share the GPU" if is_shared else "")),
    )
    watched += ["throttled"] if metrics.get("gpu/throttled") else []
    reason = (tags["device.reason"],) if "device.reason" in tags else ()
    facts = (*joined([*names, total, *versions]), *reason, *joined([*how, *watched]))
    return Section("Device", (*facts, *_ranks(tags, metrics)))


def _ranks(tags: Mapping[str, str], metrics: Numbers) -> tuple[str, ...]:
    """What several processes have measured, from the least to the most."""
    if "ranks" not in tags:
        return ()
    told = []
    for name, (words, unit) in RANKS.items():
        least, most = (metrics.get(f"ranks/{name}_{which}") for which in ("least", "most"))
        if least is None or most is None or not most:
            continue
        where = tags.get(f"ranks.{name}_most")
        most_words = f"{unit(most)} on {where}" if where else unit(most)
        told.append(
            f"{words} {unit(least)} to {most_words}" if most > least else f"{words} {unit(most)}"
        )
    again = tags.get("ranks.restarts")
    again_words = [f"began again {again} times after a lost one"] if again else []
    return tuple(joined([f"{tags['ranks']} processes", *again_words, *told]))


def _gate(tags: Mapping[str, str]) -> Section:
    if tags.get("gate", "ok") in ("ok", "new"):
        return Section("Gate", ())
    why = tags.get("gate.why", "").split("; ")
    return Section("Gate", (f"{tags['gate']} than the runs before: {why[0]}", *why[1:]), ok=False)


def _step(name: str, phases: list[tuple[str, float]]) -> Block:
    whole_ms = sum(ms for _, ms in phases)
    return Block(
        f"{name}, {milliseconds(whole_ms)}", bars(phases, whole=whole_ms, words=milliseconds)
    )


def _time(metrics: Numbers) -> Section:
    total_s = metrics.get("time/total_s")
    stages = [(label, metrics[k]) for label, k in STAGES if k in metrics]
    if total_s is not None and stages and total_s > sum(s for _, s in stages):
        stages.append(("other", total_s - sum(s for _, s in stages)))
    phases = [(label, metrics[k]) for label, k in PHASES if k in metrics]
    replay_ms = metrics.get("time/replay_ms")
    steps = {"one step": phases}
    if replay_ms is not None:  # the wait for data is then that of replayed steps
        waits = [(label, ms) for label, ms in phases if label in DATA_PHASES]
        steps = {
            "one replayed step": [*waits, ("replay", replay_ms)],
            "one step taken plainly": [one for one in phases if one not in waits],
        }
    is_below = metrics.get("time/unaccounted_pct", 0) >= 0  # else phases, times steps, are more
    besides = said(
        metrics,
        ("time/first_step_s", "first step {}"),
        ("time/eval_s", "eval {}"),
        ("time/log_s", "log {}"),
        ("time/checkpoint_s", "checkpoint {}"),
        *((("time/unaccounted_pct", "{} % unaccounted"),) if is_below else ()),
        ("time/timed_steps", "phases of {} steps timed"),
        ("time/core_wait_pct", "other work had its cores {} % of the time"),
        ("time/core_wait_own_pct", "its own helpers {} %"),
    )
    blocks = (
        Block("stages of the run", bars(stages, whole=total_s, words=seconds)),
        *(_step(name, parts) for name, parts in steps.items()),
    )
    return Section(
        "Time",
        joined(besides),
        tuple(b for b in blocks if b.bars),
    )
