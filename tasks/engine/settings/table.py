"""Every setting as a row of text, and which one was probably meant by a name that is none. The rows
come from the config's own fields, docstrings and limits, so --help and the README cannot differ
from what is enforced; only the words that other tools use for our settings are written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

from tasks.engine.settings.run_config import RunConfig
from tasks.engine.settings.sentences import number, shown

MAPPINGS = ("model.args", "data.args", "train.metrics")  # inner names are the user's
_USUAL_TEXT_LENGTH = 4096
_SYNONYMS = {
    "learning_rate": "optim.lr",
    "learningrate": "optim.lr",
    "optimizer": "optim.name",
    "optim.type": "optim.name",
    "wd": "optim.weight_decay",
    "beta1": "optim.momentum",
    "scheduler": "optim.schedule",
    "lr_scheduler": "optim.schedule",
    "warmup": "optim.warmup_fraction",
    "clip": "optim.clip_norm",
    "grad_clip": "optim.clip_norm",
    "max_grad_norm": "optim.clip_norm",
    "batch": "train.batch_size",
    "bs": "train.batch_size",
    "epoch": "train.epochs",
    "steps": "train.max_steps",
    "max_iters": "train.max_steps",
    "max_epochs": "train.epochs",
    "num_epochs": "train.epochs",
    "amp": "train.precision",
    "dtype": "train.precision",
    "fp16": "train.precision",
    "bf16": "train.precision",
    "random_seed": "train.seed",
    "early_stopping": "train.patience",
    "save_best_only": "train.keep",
    "load_best_model_at_end": "train.keep",
    "grad_accum": "train.accumulate",
    "accumulate_grad_batches": "train.accumulate",
    "gradient_accumulation_steps": "train.accumulate",
    "log_interval": "train.log_every",
    "gpu": "device.name",
    "cuda": "device.name",
    "accelerator": "device.name",
    "data.name": "data.source",
    "dataset": "data.source",
    "file": "data.path",
    "label": "data.target",
    "val_fraction": "data.validation_fraction",
    "val_split": "data.validation_fraction",
    "normalize": "data.scale",
    "arch": "model.name",
    "hidden": "model.args",
    "dropout": "model.args",
    "memory_limit": "memory.limit_mib",
    "experiment_name": "run.experiment",
    "run_name": "run.name",
}


class Setting(NamedTuple):
    """A row of the table of settings; all of it text."""

    name: str
    kind: str  # "number", "whole number or null", "one of"
    default: str
    limits: str  # "above 0, at most 1,000"; for "one of" the choices
    text: str


@cache
def table() -> list[Setting]:
    """Every setting in order, as the config's own fields tell it. Not to be changed in place."""
    rows = []
    for section, field in RunConfig.model_fields.items():
        schema = field.annotation.model_json_schema()  # type: ignore[union-attr]
        rows += [_row(f"{section}.{name}", about) for name, about in schema["properties"].items()]
    return rows


def markdown_table() -> str:
    """The table of settings for the README."""
    lines = ["| setting | type | default | limits | what it does |", "|---|---|---|---|---|"]
    for row in table():
        name, kind, default, limits, text = (cell.replace("|", "\\|") for cell in row)
        lines.append(f"| `{name}` | {kind} | `{default}` | {limits} | {text} |")
    return "\n".join(lines) + "\n"


def described(row: Setting) -> str:
    """What a setting does, its limits and its default, in sentences."""
    limits = f"One of {row.limits}" if row.kind.startswith("one of") else row.limits.capitalize()
    default = "" if "Default:" in row.text else f"Default: {row.default}."
    return " ".join(filter(None, [row.text, f"{limits}." if limits else "", default]))


def unknown(name: str) -> str:
    """Why the name is refused, and which setting was probably meant."""
    sections = list(RunConfig.model_fields)
    if name in sections:
        first = next(row.name for row in table() if row.name.startswith(f"{name}."))
        return f"is a section; give its settings by name, such as {first}"
    meant = _meant_name(name.lower().replace("-", "_")[:100])
    if meant:
        return f"unknown setting; did you mean {meant}?"
    section = name.partition(".")[0]
    if section in sections:
        known = [
            row.name.partition(".")[2] for row in table() if row.name.startswith(f"{section}.")
        ]
        return f"unknown setting; {section} has {', '.join(known)}"
    return f"unknown setting; the sections are {', '.join(sections)}"


def _meant_name(name: str) -> str | None:
    """The setting that a wrong name stands for: a synonym, else the same or a similar last part in
    its section, else a similar name, else the same or a similar last part anywhere."""
    names = [row.name for row in table()]
    section, _, leaf = name.rpartition(".")
    if name in _SYNONYMS or leaf in _SYNONYMS:
        return _SYNONYMS.get(name) or _SYNONYMS[leaf]
    near = {n.partition(".")[2]: n for n in names if n.startswith(f"{section}.")}
    leaves = [n.partition(".")[2] for n in names]
    anywhere = {n.partition(".")[2]: n for n in names if leaves.count(n.partition(".")[2]) == 1}
    if leaf in anywhere:
        return anywhere[leaf]
    for words, part in (
        (near, leaf),
        ({n: n for n in names}, name),
        ({**_SYNONYMS, **anywhere}, leaf),
    ):
        found = get_close_matches(part, words, 1, 0.75)
        if found:
            return words[found[0]]
    return None


def _row(name: str, about: Mapping[str, Any]) -> Setting:
    kinds = {"integer": "whole number", "boolean": "true or false", "object": "mapping"}
    empty: Any = [] if about.get("type") == "array" else {}
    core = {**about, **about.get("anyOf", [{}])[0]}
    kind = "one of" if "enum" in core else kinds.get(core["type"], core["type"])
    kind = {"string": "text", "array": "list"}.get(kind, kind)
    limits = [
        f"{words} {number(core[key])}"
        for key, words in (
            ("exclusiveMinimum", "above"),
            ("minimum", "at least"),
            ("exclusiveMaximum", "below"),
            ("maximum", "at most"),
        )
        if key in core
    ]
    if core.get("maxLength", _USUAL_TEXT_LENGTH) != _USUAL_TEXT_LENGTH:
        limits.append(f"{core.get('minLength', 0)} to {core['maxLength']} characters")
    return Setting(
        name=name,
        kind=kind + (" or null" if "anyOf" in about else ""),
        default=_default(about.get("default", empty)),
        limits=", ".join(core.get("enum", limits)),
        text=" ".join(about["description"].split()),
    )


def _default(value: Any) -> str:
    return value if isinstance(value, str) else shown(value)
