"""List every setting and every argument as a row of text, and suggest which one a wrong name
probably meant. The rows come from the fields, docstrings and limits of the config, so that --help
and the page of settings cannot differ from what is enforced; only the words of other tools, and the
names that settings once had, are written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

from headroom.settings.arguments import ARGUMENTS, SOURCE_ARGS
from headroom.settings.run_config import GroupConfig, RunConfig

# Settings that hold values by names, which a flag may give one by one.
MAPPINGS = (
    *("model.args", "data.args", "train.loss_args", "train.metrics"),
    *("optim.args", "optim.schedule_args", "optim.groups"),
)
# What was a setting once, and what is to be given in its place.
MOVED = {
    **{
        f"data.{name}": f"data.args.{name}"
        for kind in SOURCE_ARGS.values()
        for name in kind.model_fields
    },
    "data.scale_target": "data.target_transform: scale for true, raw for false",
    "data.split_column": "data.split as time:COLUMN or group:COLUMN",
    "device.require": "device.name gpu",
    "launch.wait_s": "launch.timeout_s",
    "train.label_smoothing": "train.loss_args.label_smoothing",
    "train.class_weights": "train.loss_args.class_weights",
    "train.max_s": "train.end as 90s, 45min or 6h",
    "train.until": "train.end, which takes the same times",
    "run.retry_wait_s": "run.retries alone: the wait is half a minute, then twice as long",
    "checkpoint.every_s": "checkpoint.every as 90s or 5min",
    "checkpoint.every_steps": "checkpoint.every as 500steps",
    "gate.last": "gate.fail alone: the median is always that of the last 20 good runs",
    "optim.momentum": "optim.args.momentum, or of adamw the first of optim.args.betas",
    "optim.beta2": "the second of optim.args.betas",
    "optim.min_lr_fraction": "optim.schedule_args.min_lr_fraction",
    "optim.gamma": "optim.schedule_args.gamma of step, optim.schedule_args.factor of plateau",
    "optim.step_epochs": "optim.schedule_args.step_size",
    "optim.plateau_patience": "optim.schedule_args.patience",
    "optim.warmup_fraction": "optim.warmup, a share of all steps below 1",
    "optim.warmup_steps": "optim.warmup, a number of steps from 1 on",
}
_AS_PYDANTIC_SAYS = {"array": "list", "object": "dictionary"}
_LIMITS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}
# What other tools call our settings, where no likeness of words would lead to them.
_OTHER_WORDS = {
    "data.path": "file",
    "data.source": "data.name dataset",
    "data.target": "label",
    "device.name": "gpu cuda accelerator",
    "memory.limit_mib": "memory_limit",
    "memory.recompute": "gradient_checkpointing",
    "model.args": "hidden dropout",
    "model.freeze": "frozen",
    "optim.clip_norm": "grad_clip max_grad_norm gradient_clip_val",
    "optim.ema_decay": "ema ema_momentum",
    "optim.args": "beta1 optimizer_args optimizer_params",
    "optim.groups": "param_groups parameter_groups",
    "optim.lr": "learning_rate",
    "optim.name": "optimizer optim.type",
    "optim.schedule": "lr_scheduler lr_scheduler_type scheduler",
    "optim.schedule_args": "eta_min",
    "optim.warmup": "warmup_ratio pct_start warmup_epochs",
    "train.accumulate": "grad_accum gradient_accumulation_steps",
    "train.best_metric": "monitor metric_for_best_model",
    "train.eval_every_steps": "eval_steps val_check_interval",
    "train.loss_args": "label_smoothing_factor",
    "train.min_delta": "threshold early_stopping_threshold",
    "train.patience": "early_stopping early_stopping_patience",
    "train.precision": "amp dtype fp16 bf16",
}


class Setting(NamedTuple):
    """A row of the table of settings; all of it text."""

    name: str
    kind: str  # "number", "integer or null", "one of"
    default: str
    limits: str  # "above 0, at most 1,000"; for "one of" the choices
    text: str


@cache
def list_settings() -> list[Setting]:
    """Return every setting in order, read from the config's own fields. Do not change the list
    in place."""
    rows = []
    for section, field in RunConfig.model_fields.items():
        schema = field.annotation.model_json_schema()  # type: ignore[union-attr]
        rows += [
            _make_row(f"{section}.{name}", about) for name, about in schema["properties"].items()
        ]
    return rows


@cache
def list_arguments() -> dict[str, Setting]:
    """Return every argument of a source, an optimizer, a schedule and a loss by its dotted name.
    Those of the same name are one row, which says what is of whom."""
    rows: dict[str, list[tuple[str, Setting]]] = {}
    for setting, owners in ARGUMENTS.items():
        for owner, kind in owners.items():
            for name, about in kind.model_json_schema().get("properties", {}).items():
                row = _make_row(f"{setting}.{name}", about)
                rows.setdefault(row.name, []).append((owner, row))
    return {name: _merge_rows(of_owners) for name, of_owners in rows.items()}


def find_kind(name: str) -> str:
    """Return the kind of the setting or argument of this name; empty where there is none."""
    settings = {row.name: row.kind for row in list_settings()}
    return settings.get(name) or (row.kind if (row := list_arguments().get(name)) else "")


def make_arguments_table() -> str:
    """Return the table of arguments for the page of settings."""
    lines = ["| argument | type | default | limits | what it does |", "|---|---|---|---|---|"]
    for row in list_arguments().values():
        lines.append(f"| `{row.name}` | {row.kind} | {row.default} | {row.limits} | {row.text} |")
    return "\n".join(lines) + "\n"


def make_markdown_table() -> str:
    """Return the table of settings for the README."""
    lines = ["| setting | type | default | limits | what it does |", "|---|---|---|---|---|"]
    for row in list_settings():
        name, kind, default, limits, text = (cell.replace("|", "\\|") for cell in row)
        lines.append(f"| `{name}` | {kind} | `{default}` | {limits} | {text} |")
    return "\n".join(lines) + "\n"


def describe_setting(row: Setting) -> str:
    """Describe what a setting does, its limits and its default, in sentences."""
    limits = f"One of {row.limits}" if row.kind.startswith("one of") else row.limits.capitalize()
    default = "" if "Default:" in row.text else f"Default: {row.default}."
    return " ".join(filter(None, [row.text, f"{limits}." if limits else "", default]))


def describe_unknown_setting(name: str) -> str:
    """Describe why the name is refused, and which setting was probably meant."""
    section = name.partition(".")[0]
    if new := MOVED.get(name):
        return f"is no setting any more; give {new}"
    if name.startswith("optim.groups."):
        return f"unknown; a group has {' and '.join(GroupConfig.model_fields)}"
    own = [row.name for row in list_settings() if row.name.startswith(f"{section}.")]
    if name == section and own:
        return f"is a section; give its settings by name, such as {own[0]}"
    if meant := _guess_name(name.lower().replace("-", "_")[:100]):
        return f"unknown setting; did you mean {meant}?"
    if own:
        return f"unknown setting; {section} has {', '.join(n.partition('.')[2] for n in own)}"
    return f"unknown setting; the sections are {', '.join(RunConfig.model_fields)}"


def format_value(value: Any) -> str:
    """Format a value as it would stand in the file, short enough for a line."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of over 4,300 digits
        return "a value too long to print"
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"


def _guess_name(name: str) -> str | None:
    """Return the setting that a wrong name stands for: another tool's word for it, else the
    same last part elsewhere, else a similar name or last part, else a last part with more words
    or fewer."""
    names = [row.name for row in list_settings()]
    leaves = [n.partition(".")[2] for n in names]
    own = {leaf: n for leaf, n in zip(leaves, names, strict=True) if leaves.count(leaf) == 1}
    others = {word: n for n, words in _OTHER_WORDS.items() for word in words.split()}
    arguments = {n.rpartition(".")[2]: n for n in reversed(list_arguments())}
    candidates = {**arguments, **others, **own, **{n: n for n in (*list_arguments(), *names)}}
    leaf = name.rpartition(".")[2]
    tries = ((name, 1), (leaf, 1), (name, 0.75), (leaf, 0.75))
    meant = [
        candidates[n] for part, like in tries for n in get_close_matches(part, candidates, 1, like)
    ]
    parts = set(leaf.split("_"))  # batch, random_seed
    meant += [own[n] for n in own if parts <= set(n.split("_")) or set(n.split("_")) <= parts]
    return meant[0] if meant else None


def _merge_rows(rows: Sequence[tuple[str, Setting]]) -> Setting:
    """Return one row of those of several owners."""
    defaults: dict[str, list[str]] = {}
    for owner, row in rows:
        defaults.setdefault(row.default, []).append(owner)
    default = ", ".join(
        f"`{value}`" + (f" ({', '.join(of)})" if len(defaults) > 1 else "")
        for value, of in defaults.items()
    )
    limits = " or ".join(dict.fromkeys(row.limits for _, row in rows if row.limits))
    texts: dict[str, list[str]] = {}
    for owner, row in rows:
        texts.setdefault(row.text, []).append(owner)
    text = " ".join(f"{text} Of {', '.join(of)}." for text, of in texts.items())
    return rows[0][1]._replace(default=default, limits=limits, text=text)


def _make_row(name: str, about: Mapping[str, Any]) -> Setting:
    core = {**about, **about.get("anyOf", [{}])[0]}
    kind = "one of" if "enum" in core else _AS_PYDANTIC_SAYS.get(core["type"], core["type"])
    limits = [f"{words} {core[key]:,}" for key, words in _LIMITS.items() if key in core]
    default = about.get("default", [] if kind == "list" else {})
    return Setting(
        name=name,
        kind=kind + (" or null" if "anyOf" in about else ""),
        default=default if isinstance(default, str) else format_value(default),
        limits=", ".join(core.get("enum", limits)),
        text=" ".join(about["description"].split()),
    )
