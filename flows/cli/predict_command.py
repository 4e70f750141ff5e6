"""Runs a prediction from a command line: its words, the line that says what was done, and
an exit code: 0 predicted, 1 failed, 2 bad input, 130 interrupted, 143 terminated. What is
slow to import is imported when words and files are right.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

from flows.cli.train_command import run_with_server
from headroom.base.program import Parser
from headroom.prediction.request import ARRAY_FILES, make_order
from headroom.process.redaction import redact_output
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import TABLE_FILES
from headroom.tracking import ask_mlflow
from headroom.tracking.tracking_settings import TrackingError, read_tracking_settings

_DESCRIPTION = """\
Predict every row of a file with a model that was trained here, on any device,
in batches, into a new file: a row for each row, in the same order."""
_EXAMPLES = """\
examples:
  python -m flows.predict --input rows.csv --output predictions.csv
  python -m flows.predict --run models:/churn@champion --input parts/ \\
      --output predictions.parquet --keep customer_id
  python -m flows.predict --run latest --device cpu --input x.npy \\
      --output predictions.jsonl

exit codes: 0 predicted, 1 failed, 2 bad input, 130 interrupted, 143 terminated
"""
_VALUES = {
    "--run": ("RUN", "latest, a run's id, models:/NAME@ALIAS or models:/NAME/3. Default: latest."),
    "--input": (
        "FILE",
        f"{', '.join((*TABLE_FILES, *ARRAY_FILES))}, a folder of parquet; txt: a text a line.",
    ),
    "--output": ("FILE", "csv, tsv, parquet, npy or jsonl, by its ending."),
    "--keep": ("NAMES", "Columns of the input that go to the output too: id,name."),
    "--device": ("NAME", "auto, cpu, cuda, cuda:1, mps, rocm or xpu. Default: auto."),
    "--experiment": ("NAME", "Where latest is looked for. Default: what mlflow.yaml says."),
    "--limit_mib": ("NUMBER", "The most memory to allocate on the device, in MiB."),
}
_SWITCHES = {
    "--overwrite": "Replace an output that exists.",
    "--debug": "Show tracebacks and Prefect's own log.",
}


def main(argv: Sequence[str]) -> int:
    """Predict what the command line says. Returns the exit code."""
    redact_output()
    try:
        request = parse_prediction(argv)
        debug = request.pop("debug")
        make_order(**request)
        read_tracking_settings()
        ask_mlflow.warm_up()
        return run_with_server(partial(_run_flow, request), debug=debug)
    except (ConfigError, TrackingError) as error:
        print(error, file=sys.stderr)
        return 2


def parse_prediction(argv: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of the flow `predict`, and debug.

    Raises ConfigError for words that are wrong. --help prints and exits with 0.
    """
    problems: list[str] = []
    try:
        options, unknown = _make_parser().parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}") from None
    for word in unknown:
        near = get_close_matches(word.partition("=")[0][:80], [*_VALUES, *_SWITCHES], 1)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        problems.append(f"{word}: unknown word; {hint}")
    words: dict[str, Any] = {}
    for name, values in vars(options).items():
        if isinstance(values, list):
            if len(values) > 1:
                problems.append(f"--{name}: is given {len(values)} times; keep one")
            values = values[-1]
        if values is not None:
            words[name] = values
    if problems:
        raise ConfigError(*problems)
    if "keep" in words:
        words["keep"] = [name.strip() for name in words["keep"].split(",")]
    return {"input": None, "output": None, **words}


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m flows.predict",
        usage="python -m flows.predict --input FILE --output FILE [--run RUN] [...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    for name, (value, text) in _VALUES.items():
        kind = float if value == "NUMBER" else str
        parser.add_argument(name, metavar=value, type=kind, action="append", help=text)
    for name, text in _SWITCHES.items():
        parser.add_argument(name, action="store_true", help=text)
    return parser


def _run_flow(request: dict[str, Any]) -> int:
    from flows.predict import predict
    from headroom.base.units import format_number, format_seconds
    from headroom.prefect import this_flow_run
    from headroom.prefect_flows.flow_run import run_at_desk

    this_flow_run.raise_signals()
    done = run_at_desk(predict, predict.fn, **request)
    speed = format_number(done["rows"] / done["predict_s"])
    print(
        f"{done['rows']:,} rows predicted in {format_seconds(done['predict_s'])} ({speed} "
        "rows/s) on "
        f"{done['device']} by run {done['run_id']}: {done['output']}"
    )
    return 0
