"""Verifies a run from a command line: finds it, trains a window of it anew, and says what came out
in sentences or as JSON.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from headroom.base.import_paths import describe_error
from headroom.base.program import Parser, print_answer
from headroom.base.units import make_printable
from headroom.process import signals
from headroom.process.redaction import redact_output
from headroom.run.known_runs import KnownRun, find_called_runs, find_newest_run, list_known_runs
from headroom.settings.read_settings import ConfigError
from headroom.tracking.tracking_settings import TrackingError, read_tracking_settings

if TYPE_CHECKING:
    from headroom.comparison.verification import Flip, Verification

_EXAMPLES = """\
examples:
  python -m flows.verify                        # the run begun or gone on with last
  python -m flows.verify night --from 0 --steps 200
  python -m flows.verify night --flip           # must say that something differs

exit codes: 0 equal, 1 something differs, 2 bad input, or nothing to compare with, 3 something
differs, but operations that are not deterministic on this device are named
"""


def main(argv: Sequence[str]) -> int:
    """Verify as the command line says. Returns the exit code."""
    redact_output()
    options = _make_parser().parse_args(list(argv))
    try:
        run = _find_run(options.run, Path(read_tracking_settings().runs))
        from headroom.comparison.verification import verify_run  # imports PyTorch

        flip = None if options.flip is None else _parse_flip(options.flip)
        signals.enable_signal_exceptions()  # from here on a folder is to be removed
        found = verify_run(Path(run.folder), begin=options.begin, steps=options.steps, flip=flip)
    except (KeyboardInterrupt, SystemExit):  # a signal
        print(signals.describe_signal(), file=sys.stderr)
        return signals.find_exit_code() or 130
    except Exception as error:  # 1 would say that something differs
        is_ours = type(error).__module__.startswith("headroom.")  # it says what to do
        said = str(error) if is_ours else f"RUN: not verified: {describe_error(error)}"
        print(said, file=sys.stderr)
        return 2
    finally:
        signals.disable_signal_exceptions()
    if options.json:
        print_answer(
            {
                "name": run.name,
                "run_id": run.run_id,
                "equal": found.difference is None,
                **asdict(found),
                "notes": _describe_limits(found),
            }
        )
    else:
        print("\n".join(_describe(run.name, found)))
    if found.difference is None:
        return 0
    return 3 if found.operations else 1


def _find_run(word: str | None, runs: Path) -> KnownRun:
    if word is None:
        newest = find_newest_run(runs)
        if newest is None:
            raise TrackingError(f"RUN: {runs} holds no run yet")
        return newest
    matches = find_called_runs(word, list_known_runs(runs))
    shown = make_printable(word, limit=80)
    if len(matches) > 1:
        ids = ", ".join(run.run_id[:8] for run in matches)
        raise TrackingError(f"RUN: {shown} is {len(matches)} runs; name one by its id: {ids}")
    if not matches:
        raise TrackingError(
            f"RUN: no run here is called {shown}; `python -m flows.runs` shows them. Its folder is "
            "needed, so it is verified on the machine that trained it"
        )
    return matches[0]


def _parse_flip(text: str) -> Flip:
    from headroom.comparison.verification import Flip

    step, tensor, element, bit = [*text.split(":"), "", "", "", ""][:4]
    try:
        return Flip(int(step or 0), tensor, int(element or 0), int(bit or 0))
    except ValueError:
        raise ConfigError(
            f"--flip: must be STEP:TENSOR:ELEMENT:BIT, such as 7:weight/0.bias:3:0 (got {text!r})"
        ) from None


def _describe(name: str, found: Verification) -> list[str]:
    """Return the lines for a terminal."""
    where = f"the checkpoint of step {found.begin:,}" if found.begin else "its start"
    trained = f"trained anew from {where} to step {found.end:,}"
    changes = [f"  changed since: {change}" for change in found.environment]
    if found.difference is None:
        return [
            f"{name}: equal to the bit, {trained}.",
            *(f"  {line}" for line in _describe_compared(found)),
            *(f"  {line}" for line in _describe_limits(found)),
            *changes,
        ]
    first = found.difference
    where = f"at step {first.step:,}, first in {first.tensor}; {trained}."
    verdict = f"{name}: DIFFERS {where}"
    why = [first.why]
    if found.operations:
        verdict = f"{name}: not deterministic by: {', '.join(found.operations)}"
        why = [
            f"otherwise {where}",
            "That is no fault: they need not come out the same to the bit on this device. Set "
            "train.deterministic, where each of them has a deterministic kind.",
        ]
    return [
        verdict,
        *(f"  {line}" for line in (first.what, first.more, *why) if line),
        *(changes or ["  No change of the environment is known since it was trained."]),
    ]


def _describe_compared(found: Verification) -> list[str]:
    lines = []
    if found.digest_steps:
        lines.append(
            f"{found.digest_steps:,} steps, each by digests of {found.tensors} tensors: loss, "
            "gradients, weights, buffers, optimizer state, random numbers"
        )
    if found.logged:
        lines.append(f"{found.logged:,} logged values: loss, rate, gradient norm, evaluations")
    if found.state_step is not None:
        lines.append(
            f"the whole checkpoint of step {found.state_step:,}: {found.state_tensors} tensors"
        )
    return lines


def _describe_limits(found: Verification) -> list[str]:
    """Return what was not compared."""
    missing = found.end - found.begin - found.digest_steps
    if found.difference is not None or missing <= 0:
        return []
    if found.digest_steps:
        from headroom.training.step_digests import FIRST_STEPS

        why = f"behind step {FIRST_STEPS:,} each tenth does, as far as there is room"
    else:
        why = "a run with train.deterministic does"
    if found.other_digests:
        why = "those of another version of Headroom can't be compared"
    return [f"not step by step: {missing:,} of the steps have no digests; {why}"]


def _parse_steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on (got {text!r})")
    return int(text)


def _parse_begin(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a step, or 0 for the start (got {text!r})")
    return int(text)


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m flows.verify",
        description="Train a window of a run anew, and say whether it comes out the same, to the "
        "bit, step by step. The run is only read.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = "Its id in MLflow or 6 letters of that, its name, key or folder."
    default = "Default: the one that was begun or gone on with last."
    parser.add_argument("run", metavar="RUN", nargs="?", help=f"{words} {default}")
    words = "Train from the checkpoint of that step; 0: from the start. Default: from the newest "
    words += "checkpoint that something is recorded behind, else from the start."
    parser.add_argument("--from", dest="begin", type=_parse_begin, metavar="STEP", help=words)
    words = "How many steps at most. Default: 1000."
    parser.add_argument("--steps", type=_parse_steps, default=1000, metavar="N", help=words)
    words = "For a test of this command: flip one bit in the training anew, by default the lowest "
    words += "of the first weight, in the middle of the window."
    parser.add_argument(
        "--flip", nargs="?", const="", metavar="STEP:TENSOR:ELEMENT:BIT", help=words
    )
    parser.add_argument("--json", action="store_true", help="One line of JSON.")
    return parser
