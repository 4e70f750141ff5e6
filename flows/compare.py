"""Compares trainings: the same one on several devices or over settings, each in a process
of its own and a child of one run in MLflow; or runs that exist. `python -m flows.compare`
runs it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from headroom.process.first_signals import answer_first_interrupt

    answer_first_interrupt()  # before the imports that take time
    from headroom.process.command import exit_process, start_command

    start_command()
    # It answers --help and bad settings, and compares runs that exist, before prefect is imported.
    from flows.cli.compare_command import main

    exit_process(main(sys.argv[1:]))

from contextlib import nullcontext
from functools import partial
from typing import Any

from prefect.runtime import flow_run

from flows.cli.compare_command import compare_from_python, parse_comparison
from headroom.base.notebook import show_answer
from headroom.base.units import make_printable
from headroom.comparison.comparison import open_existing
from headroom.comparison.grid import ComparisonRequest
from headroom.comparison.page import make_comparison_fragment
from headroom.comparison.trained_comparison import open_new
from headroom.prefect.this_flow_run import move_process_tag, show_markdown
from headroom.prefect_flows.flow_run import CalledFlow, mark_begun
from headroom.process.redaction import redact_command_line, redact_errors


def _hide_secrets(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"words": redact_command_line(parameters["words"])}


def _make_name() -> str:
    return make_printable(" ".join(["compare", *flow_run.parameters["words"]]), limit=100)


@partial(
    CalledFlow,
    name="compare",
    call=compare_from_python,
    shown=_hide_secrets,
    flow_run_name=_make_name,
    validate_parameters=False,
)
def compare(words: list[str], plan: ComparisonRequest | None = None) -> dict[str, Any]:
    """Train what the words of the command line ask for, or read the runs that they name; return
    the answer of `--json`, and the status of the comparison.

    Args:
        words: As behind `python -m flows.compare`, e.g. ["--vary", "train.batch_size=64,256"].
        plan: What they mean, where that is known already.
    """
    mark_begun()
    move_process_tag()
    with redact_errors():
        request = plan or parse_comparison(words)
        with (
            open_new(request) if request.cells else nullcontext(open_existing(request))
        ) as comparison:
            report = comparison.run()
        show_markdown(comparison.text, f"comparison-{comparison.folder.name}", comparison.title)
        answer = {**comparison.describe(report), "status": comparison.status}
        return show_answer(answer, partial(make_comparison_fragment, report))
