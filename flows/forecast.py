"""Tells what a step of your own loop takes on a GPU, and which it would fit, before you have one:

python -m flows.forecast model:make_model --batch 64x3x224x224 --optimizer adamw

It trains nothing and takes no memory of a model whose constructor does not compute. Exit codes: 0
it fits one of the GPUs at least, 2 none of them, or bad input; with --require: 0 it fits all that
are required, 1 it does not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from headroom.base.program import Parser, print_answer
from headroom.process.redaction import redact_output
from headroom.settings.read_settings import ConfigError


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what was asked for."""
    parser = Parser(prog="python -m flows.forecast", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("model", metavar="MODULE:NAME", help="a function or class that makes the model")
    add("--batch", metavar="[NAME=]64x3x224x224[:int64]", action="append", required=True)
    add("--optimizer", default="adamw", help="of torch.optim, such as sgd (default: adamw)")
    add("--optimizer-arg", action="append", default=[], metavar="momentum=0.9")
    add("--loss", metavar="MODULE:NAME", help="a function of what the model returns")
    add("--autocast", choices=("bf16", "fp16"), help="the type that torch.autocast is given")
    add("--for", dest="gpus", metavar="t4,24GiB", help="(default: t4,l4,a100-40,a100-80,h100)")
    add("--require", action="append", default=[], metavar="t4", help="a GPU that it has to fit")
    add("--json", action="store_true", help="one line of JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the forecast; return the exit code."""
    redact_output()
    options = parse(arguments)
    from headroom.training.gpu_fit import (
        conclude_fits,
        describe_fits,
        describe_memory,
        parse_asked_sizes,
    )
    from headroom.training.loop_forecast import forecast_own_step

    try:
        sizes, required = parse_asked_sizes(options.gpus, options.require)
        forecast: Any = forecast_own_step(
            options.model,
            options.batch,
            optimizer=options.optimizer,
            optimizer_args=options.optimizer_arg,
            loss=options.loss,
            autocast=options.autocast,
            sizes_mib=sizes,
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        answer = describe_fits(forecast.gpus, required)
        print_answer({**answer, "memory": describe_memory(forecast.memory)})
    else:
        print(forecast)
    return conclude_fits(forecast.gpus, required)


if __name__ == "__main__":
    sys.exit(main())
