"""Reads the command lines of a judgement and of a session of them. Every flag that they do not
know themselves is one of `python -m flows.train`, for both sides alike.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flows.cli import flags
from headroom.base.program import Parser, print_answer
from headroom.base.units import make_printable, parse_seconds
from headroom.comparison.grid import parse_count
from headroom.comparison.session import (
    SESSIONS,
    CannotJudge,
    Rules,
    Session,
    hold_session,
    list_sessions,
    read_session,
)
from headroom.comparison.session_report import describe_session, make_session_text, make_text
from headroom.comparison.sides import Side, parse_side
from headroom.process.redaction import redact_output
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.tracking.tracking_settings import (
    TrackingError,
    TrackingSettings,
    read_tracking_settings,
)

CODES = {"keep": 0, "discard": 1, "refused": 1, "undecided": 3}
FAILED = 4  # the base itself could not be trained
_SIDES = """\
A side is one of
  optim.lr=0.01 train.batch_size=128     settings, over those of the base
  git:BRANCH optim.lr=0.01               the code of a commit, in a worktree of its own
  cmd:python loop.py --seed {seed}       a command that trains with headroom.account
"""
_CODES = """\
exit codes: 0 keep, 1 discard, 3 undecided, 4 the base could not be trained or judged,
2 bad input, 130 interrupted, 143 terminated
"""
_JUDGE = f"""\
{_SIDES}
examples:
  headroom judge --candidate optim.lr=0.01
  headroom judge --candidate git:wider --goal val/loss --not-worse speed/samples_per_s:2%
  headroom judge --base 'model.name=mlp' --candidate 'model.name=cnn' --for 5min --json

Interrupted, the same command goes on. Of many candidates use a session: each judgement alone
keeps one change in twenty that is no better.

{_CODES}"""
_SESSION = f"""\
{_SIDES}
examples:
  headroom session new night --data.path rows.csv --train.epochs 5
  headroom session judge night --candidate optim.lr=0.01
  headroom session status night --json
  headroom session close night

In a session the probability that any change is kept that is no better is at most 5 %, however
many are tried. What is kept is the base of the next.

{_CODES}"""


def main(argv: Sequence[str]) -> int:
    """Judge what the command line says. Returns the exit code."""
    parser = _make_parser(
        "headroom judge", "Say whether a change is better: keep or discard.", _JUDGE
    )
    _add_rules(parser)
    parser.add_argument("--candidate", metavar="SIDE", required=True, help="What is judged.")
    _add_limits(parser)
    return _run(argv, parser, _judge_once)


def main_session(argv: Sequence[str]) -> int:
    """Do with a session what the command line says. Returns the exit code."""
    words = list(argv)
    what = words.pop(0) if words and not words[0].startswith("-") else ""
    acts = {"new": _begin, "judge": _judge_in, "status": _show, "close": _close}
    text = "Judge many changes, one after another, with one error budget."
    parser = _make_parser("headroom session new|judge|status|close NAME", text, _SESSION)
    parser.add_argument("name", metavar="NAME", nargs="?", help="Of the session.")
    if what == "new" or not what:
        _add_rules(parser)
    if what == "judge" or not what:
        parser.add_argument("--candidate", metavar="SIDE", help="What is judged.")
        _add_limits(parser)
    else:
        parser.add_argument("--json", action="store_true", help="One line of JSON.")
    if what not in acts:
        parser.parse_args(["--help"] if {"-h", "--help"} & set(words) else [])
        print("session: say new, judge, status or close; see --help", file=sys.stderr)
        return 2
    return _run(words, parser, acts[what])


Act = Callable[[argparse.Namespace, list[str], TrackingSettings], int]


def _run(argv: Sequence[str], parser: argparse.ArgumentParser, act: Act) -> int:
    redact_output()
    return _tell_refusals(lambda: act(*_parse(argv, parser), read_tracking_settings()))


def _parse(
    argv: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[argparse.Namespace, list[str]]:
    return parser.parse_known_args(flags.tie_values(argv))


def _tell_refusals(call: Callable[[], int]) -> int:
    """Return the exit code of a call, also where it is refused, which is printed."""
    try:
        return call()
    except (ConfigError, TrackingError) as error:
        print(error, file=sys.stderr)
        return 2
    except CannotJudge as error:
        print(error, file=sys.stderr)
        return FAILED
    except OSError as error:  # a full disk
        print(f"failed: {error}", file=sys.stderr)
        return FAILED


def _make_parser(prog: str, text: str, epilog: str) -> Parser:
    return Parser(
        prog=prog,
        usage=f"{prog} [--candidate SIDE] [--NAME VALUE ...]",
        description=text,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_rules(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base", metavar="SIDE", default="", help="What it is judged by. Default: as it is.")
    add("--goal", metavar="METRIC", default="", help="Such as val/loss or max:val/own.")
    add(
        "--not-worse",
        metavar="METRIC:SHARE",
        action="append",
        default=[],
        help="Another figure, which may be worse by so much: speed/samples_per_s:2%%.",
    )
    add("--for", dest="time", metavar="TIME", default="", help="That each run has, as 5min.")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--runs", metavar="N", type=parse_count, help="Trainings that this call may take.")
    add("--json", action="store_true", help="One line of JSON.")


def _parse_margin(text: str) -> tuple[str, float]:
    name, _, share = text.rpartition(":")
    try:
        margin = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        margin = -1.0
    if not name or not 0 <= margin < 1:
        shown = make_printable(text, limit=80)
        raise ConfigError(f"--not-worse {shown}: must be METRIC:SHARE, as speed/samples_per_s:2%")
    return name, margin


def _make_resolve(words: Sequence[str], time: str) -> Callable[[Mapping[str, str]], RunConfig]:
    """Return how settings of a side become those of a training."""
    own = {"train.end": time} if time else {}

    def resolve(settings: Mapping[str, str]) -> RunConfig:
        named = [f"--{name}={value}" for name, value in {**settings, **own}.items()]
        kept = [word for word in words if word.partition("=")[0][2:] not in settings]
        config: RunConfig = flags.parse_training([*kept, *named]).config
        return config

    return resolve


def _read_rules(options: argparse.Namespace, rest: list[str]) -> Rules:
    if options.time and parse_seconds(options.time) is None:
        raise ConfigError(f"--for {options.time[:40]}: must be a time, such as 90s, 5min or 1h")
    for word in rest:
        if word.partition("=")[0] in ("--resume", "--forecast", "--explain-device", "--train.end"):
            raise ConfigError(f"{word.partition('=')[0]}: goes not with a judgement")
    words = flags.tie_values(rest)
    base = flags.parse_training(words).config
    not_worse = dict(map(_parse_margin, options.not_worse))
    return Rules(words, options.goal, not_worse, options.time, base.run.experiment)


def _find_place(where: TrackingSettings) -> Path:
    return Path(where.runs).parent / SESSIONS


def _find_folder(options: argparse.Namespace, where: TrackingSettings) -> Path:
    """Return the folder of the session that is named, or of the only one that is open."""
    place = _find_place(where)
    if options.name is None:
        named = [s for s in list_sessions(place) if not (s.is_closed or s.is_of_one)]
        if len(named) != 1:
            names = ", ".join(session.name for session in named) or "none is open"
            raise ConfigError(f"session: name one ({names})")
        return named[0].folder
    if not options.name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        shown = make_printable(options.name, limit=60)
        raise ConfigError(f"session: {shown}: a name is letters, digits, - and _")
    return place / str(options.name)


def _judge_once(options: argparse.Namespace, rest: list[str], where: TrackingSettings) -> int:
    from headroom.comparison.referee import begin_session  # imports PyTorch

    rules, home = _read_rules(options, rest), Path.cwd()
    base = parse_side(options.base, option="--base", folder=home)
    change = parse_side(options.candidate, option="--candidate", folder=home)
    resolve = _make_resolve(rules.words, rules.time)
    begun = begin_session(_find_place(where), "", rules, base, resolve, is_of_one=True)
    with hold_session(begun.folder) as session:
        return _judge(session, change, options, where, rules.experiment)


def _judge(
    session: Session,
    change: Side,
    options: argparse.Namespace,
    where: TrackingSettings,
    experiment: str | None,
) -> int:
    from flows.cli.train_command import run_with_server
    from headroom.comparison.referee import judge_candidate

    resolve = _make_resolve(session.words, session.time)
    answers: list[dict[str, Any]] = []

    def judge() -> int:
        from headroom.prefect import this_flow_run

        this_flow_run.raise_signals()
        answer = judge_candidate(
            session,
            change,
            resolve=resolve,
            where=where,
            experiment=experiment,
            most_runs=options.runs,
        )
        answers.append(answer)
        return 0

    code = run_with_server(partial(_tell_refusals, judge), debug=False)
    if not answers:
        return FAILED if code == 1 else code  # 1 is a decision
    _print(answers[0], options, make_text(session, answers[0]))
    return CODES[str(answers[0]["verdict"])]


def _print(answer: Any, options: argparse.Namespace, lines: Sequence[str]) -> None:
    if options.json:
        print_answer(answer)
    else:
        print("\n".join(lines))


def _begin(options: argparse.Namespace, rest: list[str], where: TrackingSettings) -> int:
    from headroom.comparison.referee import begin_session  # imports PyTorch

    if options.name is None:
        raise ConfigError("session new: say its name")
    rules = _read_rules(options, rest)
    folder = _find_folder(options, where)
    base = parse_side(options.base, option="--base", folder=Path.cwd())
    resolve = _make_resolve(rules.words, rules.time)
    session = begin_session(folder.parent, folder.name, rules, base, resolve)
    line = f"{session.name}: base {base.label}, judged by {session.goal_name}"
    _print(describe_session(session), options, [line])
    return 0


def _judge_in(options: argparse.Namespace, rest: list[str], where: TrackingSettings) -> int:
    from headroom.comparison.referee import check_inputs  # imports PyTorch

    if rest:
        raise ConfigError(f"{rest[0][:60]}: settings of both sides are given to `session new`")
    if not options.candidate:
        raise ConfigError("session judge: --candidate says what is judged")
    with hold_session(_find_folder(options, where)) as session:
        if session.is_closed:
            raise ConfigError(f"session: {session.name} is closed; begin another by `session new`")
        change = parse_side(options.candidate, option="--candidate", folder=Path.cwd())
        check_inputs(session, _make_resolve(session.words, session.time))
        experiment = flags.parse_training(session.words).config.run.experiment
        return _judge(session, change, options, where, experiment)


def _show(options: argparse.Namespace, rest: list[str], where: TrackingSettings) -> int:
    return _print_session(read_session(_find_folder(options, where)), options)


def _close(options: argparse.Namespace, rest: list[str], where: TrackingSettings) -> int:
    from headroom.comparison.referee import close_session  # imports PyTorch

    with hold_session(_find_folder(options, where)) as session:
        close_session(session)
    return _print_session(session, options)


def _print_session(session: Session, options: argparse.Namespace) -> int:
    _print(describe_session(session), options, make_session_text(session))
    return 0
