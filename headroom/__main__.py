"""The command `headroom`, also as `python -m headroom`: a subcommand for each command of this
project, which is `python -m flows.train` under another name. It works from any folder, also from
one that has packages `flows` and `tasks` of its own. It imports nothing slow.
"""

from __future__ import annotations

import runpy
import sys
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

from headroom.base import program

ROOT = Path(__file__).absolute().parent.parent  # also holds the packages flows and tasks
FLOWS = ("flows", "tasks")
# The module that a subcommand runs, the first words it is given, and what it does.
COMMANDS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "train": ("flows.train", (), "train a model on the best device here"),
    "predict": ("flows.predict", (), "predict the rows of a file with a trained model"),
    "compare": ("flows.compare", (), "train or read several runs, and say what differs"),
    "judge": ("flows.judge", (), "say whether a change is better: keep or discard"),
    "session": ("flows.session", (), "judge many changes with one error budget"),
    "forecast": ("flows.forecast", (), "tell what a step of your own loop takes on a GPU"),
    "runs": ("flows.runs", (), "show what trains, and what has ended"),
    "verdict": ("flows.verdict", (), "say what held a run back, and what to do next"),
    "verify": ("flows.verify", (), "train a part of a run anew: is it the same to the bit?"),
    "stop": ("flows.stop", (), "end a training that lives"),
    "tidy": ("flows.tidy", (), "put right what trainings left behind that died"),
    "new": ("flows.new", (), "write a project of your own, which trains at once"),
    "serve": ("headroom.services.serve", ("up",), "start Prefect, a worker, schedules and MLflow"),
    "serve-down": ("headroom.services.serve", ("down",), "end exactly those"),
    "ui": ("headroom.services.serve", ("ui",), "show the runs in MLflow"),
}


def main() -> int:
    """Run the subcommand that the command line names; return the exit code."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: headroom COMMAND ...\n")
        for command, (_, _, purpose) in COMMANDS.items():
            print(f"  {command:<12}{purpose}")
        print("\nheadroom COMMAND --help tells more; headroom --version tells which one this is.")
        return 0
    if name == "--version":
        from importlib.metadata import version

        print(f"headroom {version('headroom')}")
        return 0
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(COMMANDS)}"
        print(f"headroom: there is no command {name!r}; {hint}", file=sys.stderr)
        return 2
    own_the_flows()
    module, first, _ = COMMANDS[name]
    program.is_headroom = True
    sys.argv = [f"headroom {name}", *first, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def own_the_flows() -> None:
    """Let `flows` and `tasks` mean the packages of this project, before those of the same names
    that the working directory or another distribution may have; the modules of these are still
    found.

    Raises ImportError where such a package is imported already.
    """
    for name in FLOWS:
        ours = ROOT / name
        if name in sys.modules:
            if str(ours) not in map(str, getattr(sys.modules[name], "__path__", ())):
                raise ImportError(
                    f"this program has a package `{name}` of its own, so the flows of Headroom "
                    "cannot be imported into it: run `headroom train`, a process of its own"
                )
            continue
        spec = ModuleSpec(name, None, is_package=True)
        others = [Path(entry or ".").absolute() / name for entry in sys.path]
        spec.submodule_search_locations = [
            str(folder) for folder in dict.fromkeys([ours, *others]) if folder.is_dir()
        ]
        sys.modules[name] = module_from_spec(spec)


if __name__ == "__main__":
    sys.exit(main())
