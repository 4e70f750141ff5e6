"""Parses the command line of a training: every setting is a flag of its dotted name, and
--help lists them all. It refuses abbreviations, unknown words and a setting given twice,
and imports nothing slow, so that --help and every bad setting are answered at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from headroom.base.program import Parser
from headroom.base.secret_names import HIDDEN, is_secret
from headroom.settings.read_settings import ConfigError, resolve_config
from headroom.settings.table import MAPPINGS, describe_setting, list_settings

_VALUES = {
    "--config": ("FILE", "Settings in YAML: sections, or dotted names."),
    "--resume": (
        "RUN",
        "Go on with a run from its newest checkpoint: its id, its folder, or latest.",
    ),
    "--for": (
        "GPU,GPU",
        "With --forecast: on GPUs that are not here, such as t4, a100-40 or 24GiB.",
    ),
    "--require": (
        "GPU",
        "With --forecast: a GPU that it has to fit; once for each. Else the exit code is 1.",
    ),
}
_SWITCHES = {
    "--dry-run": "Print the resolved settings and the device decision; train nothing.",
    "--forecast": "Print the memory that the training will take, and if it fits; train nothing.",
    "--explain-device": "Print every check of this machine's devices, with its remedy.",
    "--json": "Print one line of JSON instead of the report or the forecast.",
    "--debug": "Show tracebacks and Prefect's own log.",
}
_ALONE = (*_SWITCHES, "-h", "--help")  # take no value
_OPTIONS = (*_SWITCHES, "--help", *_VALUES)
_METAVARS = {
    "integer": "N",
    "number": "NUMBER",
    "one": "WORD",
    "dictionary": "YAML",
    "boolean": "BOOL",
}
_BARE: dict[str, dict[str, Any]] = {"boolean": {"nargs": "?", "const": "true"}}  # may stand alone
TITLES = {
    "device": "where to train",
    "data": "what to learn from",
    "model": "what is trained",
    "optim": "how it learns",
    "train": "how long, and in what arithmetic",
    "checkpoint": "what it goes on from",
    "memory": "what it may take",
    "gate": "what it is compared with",
    "launch": "how many processes train together",
    "run": "what it is called in MLflow",
}
_DESCRIPTION = """\
Train a model on the best device here; MLflow then tells where it ran and why,
where its time and memory went, and whether the device was given back."""
_EXAMPLES = """\
A flag wins over the file, the file over the default. `none` clears a setting
whose default is null. In a file:

  optim: {lr: 1e-3}
  train.epochs: 5

examples:
  python -m flows.train
  python -m flows.train --config config.yaml --optim.lr 0.01
  python -m flows.train --data.source csv --data.path rows.csv --data.target y
  python -m flows.train --model.name mlp --model.args '{hidden: [64, 32]}'
  python -m flows.train --model.args.dropout 0.1 --device.name cuda:1 --dry-run

exit codes: 0 trained, 1 failed, 2 bad input, 130 interrupted, 143 terminated;
--forecast: 0 it fits, 2 it does not; with --require: 1 it does not
"""


def parse_training(argv: Sequence[str]) -> argparse.Namespace:
    """Return what the words ask for.

    A namespace of config (a RunConfig), config_file, resume, dry_run, forecast, elsewhere
    (the GPUs of --for, or None), required (each --require), explain_device, debug; and the words
    themselves. Raises ConfigError with every problem of the words, the file and the flags.
    --help prints and exits with 0.
    """
    try:
        options, unknown = _make_parser().parse_known_args(tie_values(argv))
    except argparse.ArgumentError as error:  # a value that is missing, or one too many
        raise ConfigError(f"{error.argument_name}: {error.message}; see --help") from None
    flag_values: dict[str, list[Any]] = {
        k: v for k, v in vars(options).items() if isinstance(v, list)
    }
    required = flag_values.pop("--require", [])
    problems = []
    for word in unknown:
        name, equals, value = word.removeprefix("--").partition("=")
        near = [] if "." in name else get_close_matches(f"--{name[:80]}", _OPTIONS, 1, 0.75)
        if not word.startswith("--") or word == "--":
            problems.append(f"{word}: unknown word; settings are given as --section.name VALUE")
        elif near:
            problems.append(f"--{name}: unknown option; did you mean {near[0]}?")
        elif not equals and name.startswith(tuple(f"{mapping}." for mapping in MAPPINGS)):
            problems.append(f"{name}: expected one argument; see --help")
        else:
            flag_values.setdefault(name, []).append(value if equals else None)
    for name, values in flag_values.items():
        if len(values) > 1:
            order = ", then ".join(
                HIDDEN if is_secret(name, str(value)) else repr(value)[:60] for value in values
            )
            problems.append(f"{name}: is given {len(values)} times ({order}); keep one")
    flags = {name: values[-1] for name, values in flag_values.items()}
    file, resume = flags.pop("--config", None), flags.pop("--resume", None)
    elsewhere = flags.pop("--for", None)
    for name, given in (("--for", elsewhere), ("--require", required)):
        if given and not options.forecast:
            problems.append(f"{name}: goes with --forecast")
    if resume is not None:
        from headroom.run.resume import find_resumed_folder  # imports PyTorch
        from headroom.tracking.tracking_settings import read_tracking_settings

        # The settings that it was begun with, and those of now over them.
        resume = str(find_resumed_folder(Path(read_tracking_settings().runs), resume))
        file = file or str(Path(resume) / "config.yaml")
    try:
        config = resolve_config(file, flags)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    if problems:
        raise ConfigError(*problems)
    return argparse.Namespace(
        words=list(argv),
        config=config,
        config_file=file,
        resume=resume,
        dry_run=options.dry_run,
        forecast=options.forecast,
        elsewhere=elsewhere,
        required=required,
        explain_device=options.explain_device,
        json=options.json,
        debug=options.debug,
    )


def make_resume_words(argv: Sequence[str], folder: Path) -> list[str]:
    """Return the words that go on with the run of this folder, by its own settings.

    Flags stay.
    """
    replaced = ("--config", "--resume")
    kept = [word for word in tie_values(argv) if word.partition("=")[0] not in replaced]
    return [*kept, f"--resume={folder}"]


def tie_values(argv: Sequence[str]) -> list[str]:
    """Return the words, each flag tied to its value by "=", so that -1e-3 is a value and no
    flag."""
    words: list[str] = []
    for word in argv:
        last = words[-1] if words else ""
        is_open = last.startswith("--") and "=" not in last and last not in ("--", *_ALONE)
        if is_open and not word.startswith("--") and word not in _ALONE:
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m flows.train",
        usage="python -m flows.train [--config FILE] [--resume RUN] [--NAME VALUE ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=8, width=80
        ),
        allow_abbrev=False,
        exit_on_error=False,
    )
    for name, (metavar, text) in _VALUES.items():
        parser.add_argument(name, dest=name, metavar=metavar, action="append", help=text)
    for name, text in _SWITCHES.items():
        parser.add_argument(name, action="store_true", help=text)
    groups = {name: parser.add_argument_group(f"{name} ({text})") for name, text in TITLES.items()}
    for row in list_settings():
        groups[row.name.partition(".")[0]].add_argument(
            f"--{row.name}",
            metavar=_METAVARS.get(row.kind.partition(" ")[0], "TEXT"),
            action="append",
            help=describe_setting(row).replace("%", "%%"),
            **_BARE.get(row.kind, {}),
        )
    return parser
