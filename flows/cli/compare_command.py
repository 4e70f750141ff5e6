"""Reads the command line of a comparison: what to train, or which runs to read, and what is
shown. Every flag that it does not know itself is one of `python -m flows.train`, for all
trainings alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flows.cli import flags
from headroom.base.program import Parser
from headroom.comparison import grid, search_space
from headroom.comparison.grid import ComparisonRequest
from headroom.comparison.search_space import Range, Search
from headroom.process.command import pause_collection
from headroom.process.redaction import redact, redact_output
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.tracking.tracking_settings import TrackingError, read_tracking_settings

INSTALL = "pip install -c constraints.txt -e '.[search]' brings it"
_EXAMPLES = """\
examples:
  python -m flows.compare --devices all
  python -m flows.compare --vary train.batch_size=64,256,1024 --repeats 3
  python -m flows.compare --vary optim.lr=1e-2,1e-3 --vary optim.name=sgd,adamw --train.epochs 5
  python -m flows.compare --config config.yaml --devices cpu,cuda:0 --train.end 60s
  python -m flows.compare --search tpe --trials 30 --vary optim.lr=1e-5..1e-1 --repeats 5
  python -m flows.compare --runs ID,ID
  python -m flows.compare --last 20
  python -m flows.compare --filter "params.`model.name` = 'mlp' and metrics.`val/loss` < 1"

Interrupted, the same command goes on where it was; --anew begins anew.

exit codes: 0 compared, 1 no training came to its end, 2 bad input,
130 interrupted, 143 terminated
"""


def main(argv: Sequence[str]) -> int:
    """Compare what the command line says. Returns the exit code."""
    redact_output()
    try:
        request = parse_comparison(argv)
        read_tracking_settings()
        if request.dry_run:
            print("\n".join(_describe_plan(request)))
            return 0
    except (ConfigError, TrackingError) as error:
        print(error, file=sys.stderr)
        return 2
    if not request.cells:
        return _print_existing(request)
    from flows.cli.train_command import run_with_server

    message = f"{request.count} trainings: looking at data, devices and models ..."
    print(message, file=sys.stderr, flush=True)
    return run_with_server(partial(_run_flow, list(argv), request), debug=request.debug)


def _describe_plan(request: ComparisonRequest) -> list[str]:
    search = request.search
    if search is None:
        return [f"{cell.number}. {cell.called}" for cell in request.cells]
    axes = {
        n: v.description if isinstance(v, Range) else ", ".join(v) for n, v in search.axes.items()
    }
    head = f"{search.trials} trials by {search.how}, pruner {search.pruner}, of"
    again = [f"then {search.repeats} more times the best"] if search.repeats else []
    return [head, *(f"{name}: {said}" for name, said in axes.items()), *again]


def _print_existing(request: ComparisonRequest) -> int:
    """Compare runs that exist, which needs neither PyTorch nor Prefect. Returns the exit code."""
    with pause_collection():  # of imports
        from headroom.comparison.comparison import open_existing

    try:
        open_existing(request).run()
    except TrackingError as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:
        if request.debug:
            raise
        print(f"failed: {redact(str(error))}", file=sys.stderr)
        return 1
    return 0


def _run_flow(argv: list[str], request: ComparisonRequest) -> int:
    from flows.compare import compare
    from headroom.prefect import this_flow_run
    from headroom.prefect_flows.flow_run import run_at_desk

    this_flow_run.raise_signals()
    answer = run_at_desk(compare, compare.fn, words=argv, plan=request)
    return 0 if answer["status"] == "FINISHED" else 1


def compare_from_python(
    run_flow: Callable[..., Any], words: Sequence[str], plan: ComparisonRequest | None = None
) -> dict[str, Any]:
    """Compare as the command line with these words does, and return the answer. plan: what they
    mean, where the command has asked. Raises ConfigError and what the flow raises."""
    from prefect.context import FlowRunContext

    from flows.cli.train_command import set_up_call
    from flows.compare import compare
    from headroom.prefect_flows.flow_run import run_at_desk
    from headroom.run.preflight import BAD_INPUT

    answer: dict[str, Any]
    if plan is not None or FlowRunContext.get() is not None:  # or it is a step of another flow
        answer = run_flow(words=words, plan=plan)
        return answer
    try:
        request = parse_comparison(words)
        with set_up_call():
            answer = run_at_desk(run_flow, compare.fn, words=[*words], plan=request)
    except BAD_INPUT as error:
        raise error.with_traceback(None) from None
    return answer


def parse_comparison(argv: Sequence[str]) -> ComparisonRequest:
    """Return what the command line asks for.

    Raises ConfigError with every problem. --help prints and exits with 0.
    """
    options, rest = _make_parser().parse_known_args(flags.tie_values(argv))
    problems = []
    reads = [
        f"--{name}" for name in ("runs", "last", "filter") if getattr(options, name) is not None
    ]
    own = {"--vary": options.vary, "--devices": options.devices, "--search": options.search}
    trains = [name for name, value in own.items() if value]
    if reads and trains:
        problems.append(f"{trains[0]}: trains anew, and {reads[0]} reads runs that exist; keep one")
    if "--runs" in reads and len(reads) > 1:
        problems.append(f"--runs: names the runs already; drop {reads[1]}")
    if options.search is None:
        alone = [n for n in ("trials", "pruner", "goal") if getattr(options, n) is not None]
        problems += [f"--{name}: goes with --search" for name in alone]
    elif not search_space.is_optuna_here():
        problems.append(f"--search: needs Optuna, which is not installed; {INSTALL}")
    elif not options.vary:
        problems.append("--search: needs a --vary NAME=LOW..HIGH or NAME=A,B to search in")
    if options.anew and reads:
        problems.append(f"--anew: trains nothing beside {reads[0]}")
    if not reads and not trains and (options.repeats or 1) == 1:
        problems.append("--vary: nothing varies; see --help for --vary, --devices and --runs")
    for word in (word.partition("=")[0] for word in rest if word.startswith("--")):
        if word in ("--resume", "--forecast", "--explain-device"):
            problems.append(f"{word}: is of `python -m flows.train`")
        elif reads and word not in ("--debug", "--json", "--run.experiment"):
            problems.append(f"{word}: trains nothing beside {reads[0]}")
    if problems:
        raise ConfigError(*problems)
    axes = {} if reads else grid.parse_axes(options.vary, options.devices)
    if axes.get(grid.DEVICE) == [grid.ALL]:
        axes[grid.DEVICE] = grid.GridCheck([]).answer()

    def resolve_words(settings: Mapping[str, str]) -> argparse.Namespace:
        return flags.parse_training([*rest, *(f"--{n}={v}" for n, v in settings.items())])

    def resolve_settings(settings: Mapping[str, str]) -> RunConfig:
        return resolve_words(settings).config

    search = None if options.search is None else _make_search(options, axes, rest, resolve_settings)
    if search is None:
        search_space.parse_ranges(axes, how="")
    combinations = (
        search_space.make_probes(search)
        if search is not None
        else search_space.make_combinations(axes)
    )
    made = (
        []
        if reads
        else grid.make_cells(combinations, resolve=resolve_settings, repeats=options.repeats or 1)
    )
    base = resolve_words(made[0].settings if made else {})
    ids = [] if options.runs is None else list(dict.fromkeys(options.runs.split(",")))
    return ComparisonRequest(
        words=list(argv),
        base=base.config,
        cells=made,
        varied=list(axes if search is None else search.axes),
        runs=ids,
        last=options.last,
        filter=options.filter or "",
        dry_run=base.dry_run,
        debug=base.debug,
        json=base.json,
        search=search,
        is_anew=options.anew,
    )


def _make_search(
    options: argparse.Namespace,
    axes: dict[str, list[str]],
    words: list[str],
    resolve: Callable[[Mapping[str, str]], RunConfig],
) -> Search:
    devices = axes.pop(grid.DEVICE, []) if options.devices else []
    if grid.DEVICE in axes:
        raise ConfigError(f"--vary {grid.DEVICE}: a search takes its devices from --devices")
    how = options.search
    search = Search(
        how=how,
        trials=options.trials or search_space.TRIALS,
        pruner=options.pruner or search_space.PRUNERS[0],
        goal=options.goal or "",
        axes=search_space.parse_ranges(axes, how=how),
        devices=devices,
        words=[word for word in words if word not in ("--debug", "--dry-run")],
        resolve=resolve,
        repeats=options.repeats or 0,
    )
    if how != "grid":
        return search
    count = len(search.combinations)
    return replace(search, trials=min(options.trials or count, count))


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m flows.compare",
        usage="python -m flows.compare [--vary NAME=A,B ...] [--devices A,B] [--NAME VALUE ...]",
        description="Train the same model in several ways, or read runs that exist, and tell what\n"
        "makes one faster, larger or better than another.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--vary", metavar="NAME=A,B", action="append", default=[], help="A setting's values.")
    add("--devices", metavar="A,B", help="Devices to train on: names, or all.")
    add(
        "--repeats",
        metavar="N",
        type=grid.parse_count,
        help="Of each, in turns, with seeds of their own; of a search, of the best at its end.",
    )
    add("--anew", action="store_true", help="Begin anew where the same words would go on.")
    add(
        "--search",
        choices=search_space.SAMPLERS,
        help="Draw the trainings, by Optuna; --vary also takes LOW..HIGH.",
    )
    add(
        "--trials",
        metavar="N",
        type=grid.parse_count,
        help=f"Of a search. Default: {search_space.TRIALS}; of a grid all.",
    )
    add(
        "--pruner",
        choices=search_space.PRUNERS,
        help="What ends a poor trial early. Default: median.",
    )
    add("--goal", metavar="METRIC", help="Such as val/loss or max:val/own. Default: by the task.")
    add("--runs", metavar="ID,ID", help="Runs to read, by their ids; trains nothing.")
    add("--last", metavar="N", type=grid.parse_count, help="Read so many of the newest runs.")
    add("--filter", metavar="QUERY", help="Read the runs that MLflow's search finds.")
    return parser
