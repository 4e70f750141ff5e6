"""The parts a report is made of, and how measured numbers become its phrases and bars. It refuses
to invent: a metric that is not there makes no phrase, and a part without a whole has no share.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from headroom.base.names import LOWER_BOUND, Place, find_unit, list_shown, list_words
from headroom.base.units import (
    format_mebibytes,
    format_milliseconds,
    format_number,
    format_percent,
    format_seconds,
    make_printable,
)
from headroom.report.verdict import WHY
from headroom.settings.run_config import parse_best_metric
from headroom.watch.layer_groups import COLUMNS, group_layers

Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Bar:
    """One measured part: its name, its size in words, its share of the whole if known, and how
    long to draw it: 1 for the largest of its block."""

    label: str
    value: str
    share: float | None
    length: float


@dataclass(frozen=True)
class Grid:
    """A table of words, the first column of them names."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Block:
    """Parts of one whole, drawn as bars under a title."""

    title: str
    bars: tuple[Bar, ...]
    page: Grid | None = None  # what pages have in its place: more than a terminal has room for


@dataclass(frozen=True)
class Section:
    """One subject of the report: `ok` is its verdict, None where there is none to give."""

    title: str
    lines: tuple[str, ...]
    blocks: tuple[Block, ...] = ()
    ok: bool | None = None
    grids: tuple[Grid, ...] = ()  # on pages: a terminal has no room for them

    def split_for_pages(self) -> tuple[list[Block], list[Grid]]:
        """Return the blocks and the tables that pages have."""
        pages = [block.page for block in self.blocks if block.page is not None]
        return [block for block in self.blocks if block.page is None], [*pages, *self.grids]


@dataclass(frozen=True)
class Report:
    """Everything that a report shows. `headline` holds the key metric, the total time, the
    device; `verdict` what held the run back, in a sentence or none."""

    name: str
    status: str
    headline: tuple[str, ...]
    error: str | None
    sections: tuple[Section, ...]
    verdict: str = ""


def join_parts(parts: Iterable[str]) -> tuple[str, ...]:
    """Return the parts that are not empty as one line; no line where there are none."""
    line = ", ".join(part for part in parts if part)
    return (line,) if line else ()


def make_phrases(metrics: Numbers, place: Place) -> list[str]:
    """Return the phrases of the metrics of this place that were measured."""
    return [
        words.format(_choose_format(name)(metrics[name]))
        for name, words in list_words(place)
        if name in metrics
    ]


def _list_parts(metrics: Numbers, place: Place) -> list[tuple[str, float]]:
    """Return label and value of the metrics of this place that were measured."""
    return [(label, metrics[name]) for name, label in list_words(place) if name in metrics]


def _choose_format(name: str) -> Callable[[float], str]:
    """Return what puts a value of the metric into words, by its unit."""
    formats = {"MiB": format_mebibytes, "ms": format_milliseconds, "s": format_seconds}
    return formats.get(find_unit(name), format_number)


def make_bars(
    parts: list[tuple[str, float]], *, whole: float | None, words: Callable[[float], str]
) -> tuple[Bar, ...]:
    """Return the parts as bars, each with its share of the whole, where the whole is known."""
    largest = max((size for _, size in parts), default=0.0)
    return tuple(
        Bar(label, words(size), _compute_share(size, whole), _compute_share(size, largest) or 0.0)
        for label, size in parts
    )


def _compute_share(size: float, whole: float | None) -> float | None:
    return min(1.0, max(0.0, size / whole)) if whole and whole > 0 else None


PARTS = {"val": "validation", "test": "test"}
HEAD = ("class", "rows", "precision", "recall", "F1")
WORST = 3  # classes that the line names


def make_classes_section(run: Mapping[str, Any], *, limit: int) -> Section:
    """Return the section of the rows by class, for each part that was evaluated."""
    lines, grids = [], []
    for part, scores in (run.get("classes") or {}).items():
        listed = [(shorten_class_name(row[0], limit), *row[1:]) for row in scores["listed"]]
        worst = sorted(listed, key=lambda row: row[-1])[:WORST]
        sentence = ", ".join(
            f"{name}: {format_number(f1)} ({rows:,} rows)" for name, rows, *_, f1 in worst
        )
        lines.append(f"lowest F1 of the {PARTS[part]} rows: {sentence}")
        title = f"{PARTS[part]} rows by class"
        if len(listed) < scores["count"]:
            title += f", the {len(listed)} of {scores['count']} with the lowest F1"
        rows = tuple(
            (name, f"{count:,}", *(f"{value:.3f}" for value in values))
            for name, count, *values in listed
        )
        grids.append(Grid(title, HEAD, rows))
    return Section("Classes", tuple(lines), grids=tuple(grids))


def shorten_class_name(name: Any, limit: int) -> str:
    """Return the name of a class in at most `limit` letters, and no more than 40."""
    return make_printable(name, limit=min(limit, 40)) or "(empty)"


LEAKS_SHOWN = 6
LAYER_LETTERS = 40  # of a layer's path, beside a bar


def make_memory_section(run: Mapping[str, Any], metrics: Numbers, *, limit: int) -> Section:
    """Return the section of the peak, by owner, by phase and by layer, and of the host process's
    memory."""
    peak_mib = metrics.get("memory/run_peak_allocated_mib")
    owners = [(label, mib) for label, mib in _list_parts(metrics, Place.OWNERS) if mib]
    peaks = _list_parts(metrics, Place.PHASE_PEAKS)
    pool = make_phrases(metrics, Place.MEMORY)
    if metrics.get(LOWER_BOUND):
        pool = [re.sub("^peak ", "peak at least ", phrase) for phrase in pool]
    trouble = make_phrases({k: v for k, v in metrics.items() if v}, Place.TROUBLE)
    host = make_phrases(metrics, Place.HOST)
    if not metrics.get("memory/host_rss_mib"):
        host = [phrase.replace("its peak", "host process peak") for phrase in host]
    whole = peak_mib or sum(mib for _, mib in owners)
    title = "by owner, of the peak" if peak_mib else "by owner"
    top = peak_mib or max((mib for _, mib in peaks), default=0.0)
    blocks = (
        Block(title, make_bars(owners, whole=whole, words=format_mebibytes)),
        Block("highest in each phase", make_bars(peaks, whole=top, words=format_mebibytes)),
        *_make_layer_blocks(run.get("layers") or {}, limit),
    )
    lines = (*join_parts(pool), *join_parts(trouble), *join_parts(host))
    return Section("Memory", lines, tuple(b for b in blocks if b.bars))


def _make_layer_blocks(told: Mapping[str, Any], limit: int) -> list[Block]:
    """Return what the largest layers held at the peak of a counted step: in all as bars, by owner
    as a table; nothing of a model of one layer."""
    groups = group_layers(told)
    if len(told.get("layers", ())) < 2:
        return []
    sizes = [group.bytes / 1024**2 for group in groups]
    parts = [
        [format_mebibytes(size / 1024**2) if size else "" for size in group.split().values()]
        for group in groups
    ]
    rows = tuple(
        (_shorten_path(group.label, limit), *words, format_mebibytes(size))
        for group, words, size in zip(groups, parts, sizes, strict=True)
    )
    named = [
        (_shorten_path(group.label, LAYER_LETTERS), size)
        for group, size in zip(groups, sizes, strict=True)
    ]
    title = "by layer, at the peak of a counted step"  # which may lie below the run's
    bars = make_bars(named, whole=sum(sizes), words=format_mebibytes)
    return [Block(title, bars, page=Grid(title, ("layer", *COLUMNS, "in all"), rows))]


def _shorten_path(path: str, limit: int) -> str:
    """Return the path, of which the end says more than the beginning."""
    printable = make_printable(path, limit=400)
    return printable if len(printable) <= limit else f"...{printable[3 - limit :]}"


def make_oom_section(run: Mapping[str, Any], *, limit: int) -> Section:
    """Return the section of who held the memory when a run ended for lack of it, the largest
    first."""
    holdings = (run.get("oom") or {}).get("holdings") or ()
    lines = [
        make_printable(
            f"{format_mebibytes(_read_bytes(held) / 1024**2)} of {held.get('owner')} in "
            f"{format_number(held.get('count') or 0)} tensors, the largest {held.get('what')}"
            + (f", at {held['line']}" if held.get("line") else ""),
            limit=limit,
        )
        for held in holdings
        if isinstance(held, Mapping)
    ]
    return Section("Ran out", tuple(lines))


def make_release_section(run: Mapping[str, Any], metrics: Numbers, *, limit: int) -> Section:
    """Return the section of what was released, and of what was not, by name and largest first,
    each cut to `limit`."""
    proof = make_phrases(metrics, Place.RELEASE)
    ok = bool(metrics["memory/release_ok"]) if "memory/release_ok" in metrics else None
    verdict = {True: ["OK"], False: ["NOT ALL GIVEN BACK"], None: []}[ok]
    owners = [o for o in run.get("owners") or () if isinstance(o, Mapping)]
    owners.sort(key=lambda o: -_read_bytes(o))
    held = [_describe_leak(o, limit) for o in owners[:LEAKS_SHOWN]]
    why = (run.get("tags") or {}).get("memory.release")
    if why:
        held.append(make_printable(why, limit=limit))
    if owners[LEAKS_SHOWN:]:
        rest = sum(_read_bytes(o) for o in owners[LEAKS_SHOWN:])
        held.append(f"and {len(owners) - LEAKS_SHOWN:,} more, {format_mebibytes(rest / 1024**2)}")
    kept = [
        make_printable(
            f"{o.get('name')}: {format_mebibytes(_read_bytes(o) / 1024**2)} more than before",
            limit=limit,
        )
        for o in run.get("kept") or ()
        if isinstance(o, Mapping)
    ]
    return Section("Release", (*join_parts([*verdict, *proof]), *held, *kept), ok=ok)


def _read_bytes(owner: Mapping[str, Any]) -> float:
    size = owner.get("bytes")
    return float(size) if isinstance(size, Real) and math.isfinite(size) else 0.0


def _describe_leak(owner: Mapping[str, Any], limit: int) -> str:
    shape = "x".join(str(n) for n in owner.get("shape") or ())
    what = [str(owner.get("kind") or "object"), shape, str(owner.get("dtype") or "")]
    size = (
        [format_mebibytes(_read_bytes(owner) / 1024**2)] if owner.get("bytes") is not None else []
    )
    held = [f"held by {owner['held_by']}"] if owner.get("held_by") else []
    return make_printable(", ".join([" ".join(w for w in what if w), *size, *held]), limit=limit)


TOTAL = "time/total_s"
DATA_PHASES = ("data wait", "h2d")


def make_report(run: Mapping[str, Any], *, limit: int = 400) -> Report:
    """Return the report of a run, each free text cut to `limit` characters; keys may be absent."""
    learned = _read_numbers(run, finite=False)
    metrics = _read_numbers(run, finite=True)
    tags = _read_texts(run, limit)
    warnings = tuple(make_printable(words, limit=limit) for words in run.get("warnings") or ())
    sections = (
        Section("Warnings", warnings, ok=False),
        _make_gate_section(run, tags, limit),
        _make_training_section(run, learned, limit),
        make_classes_section(run, limit=limit),
        _make_device_section(
            tags, metrics, is_shared=(run.get("params") or {}).get("device.share") in ("True", True)
        ),
        _make_time_section(metrics),
        make_memory_section(run, metrics, limit=limit),
        make_oom_section(run, limit=limit),
        make_release_section(run, metrics, limit=limit),
    )
    return Report(
        name=make_printable(run.get("name") or run.get("run_id") or "run", limit=min(limit, 120)),
        status=make_printable(run.get("status") or "", limit=20),
        headline=_make_headline(learned, metrics, tags),
        error=make_printable(run["error"], limit=limit) if run.get("error") else None,
        sections=tuple(s for s in sections if s.lines or s.blocks),
        verdict=make_printable((run.get("tags") or {}).get(WHY) or "", limit=3 * limit),
    )


def _read_numbers(run: Mapping[str, Any], *, finite: bool) -> dict[str, float]:
    items = (run.get("metrics") or {}).items()
    numbers = {k: float(v) for k, v in items if isinstance(v, Real)}
    return {k: v for k, v in numbers.items() if not finite or math.isfinite(v)}


def _read_texts(run: Mapping[str, Any], limit: int) -> dict[str, str]:
    items = (run.get("tags") or {}).items()
    texts = {k: make_printable(v, limit=limit) for k, v in items if v is not None}
    return {k: text for k, text in texts.items() if text}


def _make_headline(learned: Numbers, metrics: Numbers, tags: Mapping[str, str]) -> tuple[str, ...]:
    uneven = list_shown(Place.UNEVEN) if "val/largest_class_share" in learned else ()
    choices = [*uneven, *list_shown(Place.HEADLINE), "train/loss"]
    metric = next((k for k in choices if k in learned), None)
    return (
        *([f"{metric} {format_number(learned[metric])}"] if metric else []),
        *([f"{format_seconds(metrics[TOTAL])} in all"] if TOTAL in metrics else []),
        *([f"on {tags['device']}"] if "device" in tags else []),
    )


def _make_training_section(run: Mapping[str, Any], learned: Numbers, limit: int) -> Section:
    params = {k: v for k, v in (run.get("params") or {}).items() if v is not None}
    settings = (
        (("model.name",), "{} on {}"),
        (("optim.name", "optim.lr"), "{} at lr {}"),
        (("train.batch_size",), "batch {}"),
        (("train.epochs",), "{} epochs"),
        (("train.max_steps",), "at most {} steps"),
        (("train.seed",), "seed {}"),
    )
    source = params.get("data.path") or params.get("data.source") or "unknown data"
    recipe = [
        template.format(*(make_printable(params[k], limit=min(limit, 60)) for k in keys), source)
        for keys, template in settings
        if all(k in params for k in keys)
    ]
    recipe = ["1 epoch" if part == "1 epochs" else part for part in recipe]
    scores = list_shown(Place.SCORES)
    results = [f"{k} {format_number(learned[k])}" for k in ("train/loss", *scores) if k in learned]
    tests = (k.replace("val/", "test/") for k in scores)
    tested = [f"{k} {format_number(learned[k])}" for k in tests if k in learned]
    kept = []
    if {"train/best_epoch", "train/epoch"} <= learned.keys():
        best, last = (format_number(learned[k]) for k in ("train/best_epoch", "train/epoch"))
        metric = parse_best_metric(str(params.get("train.best_metric", "val/loss")))
        end = "lowest" if metric.is_lower else "highest"
        kept.append(
            f"the weights are those of epoch {best} of {last}: its {metric.name} is the {end}"
        )
    pace = make_phrases(learned, Place.SPEED)
    if "speed/mfu" in learned:
        pace.append(f"{format_percent(learned['speed/mfu'])} of the device's peak (MFU)")
    recipe = [make_printable(part, limit=min(limit, 160)) for part in recipe]
    return Section(
        "Trained",
        (*join_parts(recipe), *join_parts(results), *join_parts(tested), *kept, *join_parts(pace)),
    )


def _make_device_section(tags: Mapping[str, str], metrics: Numbers, *, is_shared: bool) -> Section:
    total = tags.get("device.total_mib", "")
    try:
        total = format_mebibytes(float(total))
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
    watched = make_phrases(metrics, Place.DEVICE)
    if is_shared:
        watched = [
            f"{w} by all that share the GPU" if w.endswith(" J used") else w for w in watched
        ]
    watched += ["throttled"] if metrics.get("gpu/throttled") else []
    reason = (tags["device.reason"],) if "device.reason" in tags else ()
    facts = (*join_parts([*names, total, *versions]), *reason, *join_parts([*how, *watched]))
    return Section("Device", (*facts, *_describe_ranks(tags, metrics)))


def _describe_ranks(tags: Mapping[str, str], metrics: Numbers) -> tuple[str, ...]:
    """Return lines of what several processes have measured, from the least to the most."""
    if "ranks" not in tags:
        return ()
    lines = []
    memory_first = sorted(list_words(Place.RANKS), key=lambda one: find_unit(one[0]) != "MiB")
    for metric, words in memory_first:
        name, unit = metric.partition("/")[2], _choose_format(metric)
        least, most = (metrics.get(f"ranks/{name}_{which}") for which in ("least", "most"))
        if not words or least is None or most is None or not most:
            continue
        where = tags.get(f"ranks.{name}_most")
        most_words = f"{unit(most)} on {where}" if where else unit(most)
        lines.append(
            f"{words} {unit(least)} to {most_words}" if most > least else f"{words} {unit(most)}"
        )
    again = tags.get("ranks.restarts")
    again_words = [f"began again {again} times after a lost one"] if again else []
    return tuple(join_parts([f"{tags['ranks']} processes", *again_words, *lines]))


def _make_gate_section(run: Mapping[str, Any], tags: Mapping[str, str], limit: int) -> Section:
    if tags.get("gate", "ok") in ("ok", "new"):
        return Section("Gate", ())
    # Each part is cut by itself: the last is a command.
    whole = str((run.get("tags") or {}).get("gate.why") or "")
    why = [make_printable(part, limit=limit) for part in whole.split("; ")]
    return Section("Gate", (f"{tags['gate']} than the runs before: {why[0]}", *why[1:]), ok=False)


def _make_step_block(name: str, phases: list[tuple[str, float]]) -> Block:
    whole_ms = sum(ms for _, ms in phases)
    return Block(
        f"{name}, {format_milliseconds(whole_ms)}",
        make_bars(phases, whole=whole_ms, words=format_milliseconds),
    )


def split_training_time(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a training by part; they sum to `time/train_model_s`.

    Empty where that or the steps are not known, or where the parts are more: of a training that
    went on they are those of all its processes.
    """
    whole_s = metrics.get("time/train_model_s", 0.0)
    parts = dict(_list_parts(metrics, Place.TRAINING))
    other_s = whole_s - sum(parts.values())
    return {**parts, "other": other_s} if "steps" in parts and other_s >= 0 else {}


def _make_time_section(metrics: Numbers) -> Section:
    total_s = metrics.get("time/total_s")
    stages = _list_parts(metrics, Place.STAGES)
    if total_s is not None and stages and total_s > sum(s for _, s in stages):
        stages.append(("other", total_s - sum(s for _, s in stages)))
    phases = _list_parts(metrics, Place.STEP)
    replay_ms = metrics.get("time/replay_ms")
    steps = {"one step": phases}
    if replay_ms is not None:  # the wait for data is then that of replayed steps
        waits = [(label, ms) for label, ms in phases if label in DATA_PHASES]
        steps = {
            "one replayed step": [*waits, ("replay", replay_ms)],
            "one step taken plainly": [one for one in phases if one not in waits],
        }
    training = split_training_time(metrics)
    besides = [] if training else make_phrases(metrics, Place.TRAINING_WORDS)
    unaccounted = metrics.get("time/unaccounted_pct", 0.0)
    if unaccounted < 0:  # phases of the steps that were timed, times all steps
        besides.append(f"phases come to {format_number(-unaccounted)} % more than the time")
        metrics = {k: v for k, v in metrics.items() if k != "time/unaccounted_pct"}
    besides += make_phrases(metrics, Place.TIME)
    train_s = sum(training.values())
    bars = make_bars([*training.items()], whole=train_s, words=format_seconds)
    blocks = (
        Block("stages of the run", make_bars(stages, whole=total_s, words=format_seconds)),
        Block(f"training, {format_seconds(train_s)}", bars),
        *(_make_step_block(name, parts) for name, parts in steps.items()),
    )
    return Section(
        "Time",
        join_parts(besides),
        tuple(b for b in blocks if b.bars),
    )
