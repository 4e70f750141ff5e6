"""The command line of a run: every setting is a flag of its dotted name, and --help lists them all.
It refuses abbreviations, unknown words and a setting given twice, and imports nothing slow, so that
--help and every bad setting are answered at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tasks.engine.base.secret_names import HIDDEN, is_secret
from tasks.engine.settings.read_settings import ConfigError, resolve
from tasks.engine.settings.table import MAPPINGS, Setting, described, table

_SWITCHES = {
    "--dry-run": "Print the resolved settings and the device decision; train nothing.",
    "--forecast": "Print the memory that the training will take, and if it fits; train nothing.",
    "--explain-device": "Print every check of this machine's devices, with its remedy.",
    "--debug": "Show tracebacks and Prefect's own log.",
}
_ALONE = (*_SWITCHES, "-h", "--help")  # take no value
_OPTIONS = (*_SWITCHES, "--help", "--config", "--resume", "--for")
_METAVARS = {
    "integer": "N",
    "number": "NUMBER",
    "one": "WORD",
    "dictionary": "YAML",
    "boolean": "BOOL",
}
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
--forecast: 0 it fits, 2 it does not
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """What the words ask for: config (a RunConfig), config_file, dry_run, forecast, elsewhere (the
    GPUs of --for, or None), explain_device, debug; and the words themselves.

    Raises ConfigError with every problem of the words, the file and the flags. --help prints and
    exits with 0.
    """
    words, problems = _joined(argv)
    known, unknown = _parser().parse_known_args(words)
    given: dict[str, list[Any]] = {k: v for k, v in vars(known).items() if isinstance(v, list)}
    for word in unknown:
        name, equals, value = word.removeprefix("--").partition("=")
        near = [] if "." in name else get_close_matches(f"--{name[:80]}", _OPTIONS, 1, 0.75)
        if near:
            problems.append(f"--{name}: unknown option; did you mean {near[0]}?")
        else:
            given.setdefault(name, []).append(value if equals else None)
    for name, values in given.items():
        if len(values) > 1:
            told = ", then ".join(
                HIDDEN if is_secret(name, str(value)) else repr(value)[:60] for value in values
            )
            problems.append(f"{name}: is given {len(values)} times ({told}); keep one")
    flags = {name: values[-1] for name, values in given.items()}
    file, resume = flags.pop("--config", None), flags.pop("--resume", None)
    elsewhere = flags.pop("--for", None)
    if elsewhere is not None and not known.forecast:
        problems.append("--for: goes with --forecast")
    if resume is not None:
        from tasks.resume import asked_for  # imports PyTorch
        from tasks.tracking.where import where

        # The settings that it was begun with, and those of now over them.
        resume = str(asked_for(Path(where().runs), resume))
        file = file or str(Path(resume) / "config.yaml")
    try:
        config = resolve(file, flags)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    if problems:
        raise ConfigError(*problems)
    return argparse.Namespace(
        words=list(argv),
        config=config,
        config_file=file,
        resume=resume,
        dry_run=known.dry_run,
        forecast=known.forecast,
        elsewhere=elsewhere,
        explain_device=known.explain_device,
        debug=known.debug,
    )


def resumed(argv: Sequence[str], folder: Path) -> list[str]:
    """The words that go on with the run of this folder, by its own settings; flags stay."""
    words, _ = _joined(argv)
    kept = [word for word in words if word.partition("=")[0] not in ("--config", "--resume")]
    return [*kept, f"--resume={folder}"]


def _joined(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words with each flag tied to its value by "=", so that -0.1 is a value and no flag; and
    what is wrong with words that are no flags, or lack a value, or have one too many."""
    words: list[str] = []
    problems: list[str] = []
    rest = list(reversed(argv))
    while rest:
        word = rest.pop()
        name, equals, value = word.partition("=")
        if word in _ALONE:
            words.append(word)
        elif name in _ALONE:
            problems.append(f"{name}: takes no value (got {value!r})")
        elif not word.startswith("--") or name == "--":
            problems.append(f"{word}: unknown word; settings are given as --section.name VALUE")
        elif equals:
            words.append(word)
        elif rest and not rest[-1].startswith("--") and rest[-1] not in _ALONE:
            words.append(f"{word}={rest.pop()}")
        elif (example := _example(word)) == "true":
            words.append(f"{word}=true")
        elif example:
            said = word.removeprefix("--") if "." in word else word
            problems.append(f"{said}: needs a value, as in {word} {example}")
        else:
            words.append(word)
    return words, problems


def _example(flag: str) -> str | None:
    """A value for the flag; "true" for one that may stand alone, None for an unknown one."""
    row = next((row for row in table() if f"--{row.name}" == flag), None)
    if row is None:
        inner = flag.startswith(tuple(f"--{mapping}." for mapping in MAPPINGS))
        return {"--config": "FILE", "--resume": "latest", "--for": "t4,24GiB"}.get(
            flag, "YAML" if inner else None
        )
    if row.kind == "boolean":
        return "true"
    return _metavar(row) if row.default in ("null", "{}") else row.default


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows.train",
        usage="python -m flows.train [--config FILE] [--resume RUN] [--NAME VALUE ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=_page,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument(
        "--config",
        dest="--config",
        metavar="FILE",
        action="append",
        help="Settings in YAML: sections, or dotted names.",
    )
    parser.add_argument(
        "--resume",
        dest="--resume",
        metavar="RUN",
        action="append",
        help="Go on with a run from its newest checkpoint: its id, its folder, or latest.",
    )
    parser.add_argument(
        "--for",
        dest="--for",
        metavar="GPU,GPU",
        action="append",
        help="With --forecast: on GPUs that are not here, such as t4, a100-40 or 24GiB.",
    )
    for switch, text in _SWITCHES.items():
        parser.add_argument(switch, action="store_true", help=text)
    groups = {name: parser.add_argument_group(f"{name} ({text})") for name, text in TITLES.items()}
    for row in table():
        groups[row.name.partition(".")[0]].add_argument(
            f"--{row.name}",
            metavar=_metavar(row),
            action="append",
            help=_help(row),
        )
    return parser


def _page(prog: str) -> argparse.HelpFormatter:
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=8, width=80)


def _metavar(row: Setting) -> str:
    return _METAVARS.get(row.kind.partition(" ")[0], "TEXT")


def _help(row: Setting) -> str:
    return described(row).replace("%", "%%")
