"""Cleans up what trainings left behind, from a command line: it is listed first, and done
with --yes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from headroom.base.program import Parser
from headroom.base.units import make_printable, parse_seconds
from headroom.process.redaction import redact_output
from headroom.run.tidy import TidyAction, clean_up
from headroom.settings.read_settings import ConfigError
from headroom.tracking.tracking_settings import TrackingError, read_tracking_settings

PAST = {"end": "ended", "send": "sent", "set": "set", "remove": "removed"}
_EXAMPLES = """\
examples:
  python -m flows.tidy                          # what there is to put right
  python -m flows.tidy --yes                    # puts it right
  python -m flows.tidy --older-than 30d --yes   # old journals and checkpoints too

exit codes: 0 done or nothing to do, 1 something could not be done, 2 bad input
"""


def main(argv: Sequence[str]) -> int:
    """Tidy as the command line says. Returns the exit code."""
    redact_output()
    options = _make_parser().parse_args(list(argv))
    actions = []
    try:
        older_s = parse_age_s(options.older_than)
        for action in clean_up(read_tracking_settings(), older_s=older_s, does=options.yes):
            print(
                describe_action(action, does=options.yes),
                file=sys.stderr if action.problem else sys.stdout,
            )
            actions.append(action)
    except (ConfigError, TrackingError) as error:
        print(error, file=sys.stderr)
        return 2
    if not actions:
        print("Nothing is left behind.")
    elif not options.yes and not all(action.problem for action in actions):
        print("Nothing was changed; with --yes it is.")
    return int(any(action.problem for action in actions))


def describe_action(action: TidyAction, *, does: bool) -> str:
    """Return the line about an action."""
    if action.problem:
        return f"can't {action.verb} {action.what}: {action.problem}"
    return f"{PAST[action.verb] if does else f'would {action.verb}'} {action.what}"


def parse_age_s(text: str | None) -> float | None:
    """Return the seconds of 30d, 12h, ... Raises ConfigError."""
    if text is None:
        return None
    if not (age_s := parse_seconds(text)):
        got = make_printable(text, limit=40)
        raise ConfigError(f"--older-than: must be a time such as 12h, 30d or 8w (got {got!r})")
    return age_s


def _make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m flows.tidy",
        description="Put right what trainings of this host left behind when they or a server died.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = "Also remove journals and checkpoints of runs that MLflow has, from that age on: 30d."
    parser.add_argument("--older-than", metavar="AGE", help=words)
    parser.add_argument("--yes", action="store_true", help="Do it; without, it is only told.")
    return parser
