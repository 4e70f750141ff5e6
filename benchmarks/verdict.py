"""Whether the verdict on a run is right: loops with a planted cause (benchmarks/planted_causes.py),
each in a process of its own, with its cause and without, held against what the loop knows by clocks
of its own; and healthy trainings, of which no cause should be told.

`python -m benchmarks.verdict [--only NAME ...] [--watch told plain] [--keep FOLDER]` prints the
table of causes and keeps it in benchmarks/results; `--healthy N` that of N healthy runs.
`--figures` shows what is measured of each loop beside its own clocks. FOLDER keeps what a process
has said, and what lies there is not run again. `--checkout` is the project whose verdict it is.
TraceML stands beside it where `--traceml` names the folder that it was installed into.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.conditions import publish
from benchmarks.planted_causes import CAUSES, SECONDS, Cause

HERE = Path(__file__).parent
LIMIT_S = 120.0  # of a process
BUSY_CORES = 0.3  # that others had, from which a machine was not free
POINTS, SLACK = 10.0, 1.05  # that a share may be off; what a gain may be above the promised one
TRACEML_SAYS = ("Verdict", "Why", "Next")
PARTS = ("data", "forward", "backward", "optimizer", "beside")
# How the record calls the parts that a loop times by its own clocks.
STEP_METRICS = {
    "data": ("data_wait", "h2d"),
    "forward": ("forward",),
    "backward": ("backward", "communication"),
    "optimizer": ("optimizer",),
}
BESIDE_METRICS = ("time/eval_s", "time/log_s", "time/checkpoint_s")


@dataclass(frozen=True)
class Outcome:
    """What a process has said: its own truth, and the run that a tool has of it."""

    truth: Mapping[str, Any]
    run: Mapping[str, Any]

    @property
    def rows_per_s(self) -> float:
        return self.truth["rows"] / max(self.truth["loop_s"], 1e-9)

    @property
    def tags(self) -> Mapping[str, str]:
        tags: Mapping[str, str] = self.run.get("tags", {})
        return tags

    @property
    def metrics(self) -> Mapping[str, float]:
        metrics: Mapping[str, float] = self.run.get("metrics", {})
        return metrics

    @property
    def bound(self) -> str:
        return self.tags.get("bound", "")

    @property
    def why(self) -> str:
        return self.tags.get("bound.why", "")

    def compute_share(self, of: str) -> float:
        """Return the per cent of the loop that this part took by its own clocks."""
        truth = self.truth
        parts = truth["parts_s"]
        seconds = {
            "planted": truth["planted_s"],
            "compute": sum(parts.get(part, 0.0) for part in ("forward", "backward", "optimizer")),
        }
        return 100.0 * seconds.get(of, parts.get(of, 0.0)) / max(truth["loop_s"], 1e-9)


@dataclass(frozen=True)
class Runner:
    """Runs loops of one checkout of the project, and keeps what they say."""

    folder: Path
    checkout: Path
    seconds: float
    traceml: Path | None

    def run(self, name: str, watch: str, *, is_planted: bool) -> Outcome | None:
        """Return what the loop said; None where it came to nothing."""
        out = self.folder / f"{name}.{watch}.{'with' if is_planted else 'without'}.json"
        if not out.exists():
            asked = ["--watch", watch, "--seconds", str(self.seconds)]
            asked += [] if is_planted else ["--without"]
            first = ["-P"] if CAUSES[name].ranks == 1 else _launch(CAUSES[name].ranks)
            self._start([*first, *_name_script(), name, "--out", str(out), *asked], out)
        if not out.exists():
            return None
        return Outcome(**json.loads(out.read_text()))

    def trace(self, name: str) -> str:
        """Return what TraceML says of the loop: its verdict, the reason and what to do next."""
        if self.traceml is None:
            return ""
        out = self.folder / f"{name}.traceml.with.json"
        logs = self.folder / f"{out.stem}.logs"
        if not out.exists():
            ranks = CAUSES[name].ranks
            asked = ["--logs-dir", str(logs), "--run-name", "run", "--nproc-per-node", str(ranks)]
            mine = [name, "--out", str(out), "--watch", "traceml", "--seconds", str(self.seconds)]
            launch = ["-P", "-m", "traceml_ai.launcher.cli", "run", "--mode", "summary"]
            self._start([*launch, *_name_script(), *asked, "--args", *mine], out)
        summary = logs / "run" / "final_summary.txt"
        said = summary.read_text() if summary.exists() else ""
        found = [re.search(rf"{word}: +(.*?) *(?:\||$)", said, re.M) for word in TRACEML_SAYS]
        return " ".join(match[1] for match in found if match) or "no verdict"

    def _start(self, command: Sequence[str], out: Path) -> None:
        """Run this in a folder of its own; what it prints lies beside `out`."""
        scratch = self.folder / f"{out.stem}.scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        with out.with_suffix(".log").open("w") as log:
            subprocess.run(
                [*_time_out(), sys.executable, *command],
                cwd=scratch,
                env=self._make_env(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _make_env(self) -> dict[str, str]:
        paths = [str(self.checkout), *([str(self.traceml)] if self.traceml else [])]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONSAFEPATH": "1",  # benchmarks/headroom.py is not the library
        }


def _name_script() -> list[str]:
    return [str(HERE / "planted_causes.py")]


def _launch(ranks: int) -> list[str]:
    return ["-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def _time_out() -> list[str]:
    return ["timeout", "--signal=INT", "--kill-after=20", f"{LIMIT_S:.0f}"]


def main() -> None:
    """Run what is asked for, print the tables and keep them."""
    here = argparse.ArgumentParser()
    here.add_argument("--only", nargs="*", default=[n for n in CAUSES if CAUSES[n].device == "cpu"])
    here.add_argument("--watch", nargs="*", default=["told", "plain"])
    here.add_argument("--seconds", type=float, default=SECONDS)
    here.add_argument("--keep", type=Path)
    here.add_argument("--checkout", type=Path, default=HERE.parent)
    here.add_argument("--traceml", type=Path)
    here.add_argument("--figures", action="store_true")
    given = here.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        runner = Runner(folder, given.checkout.absolute(), given.seconds, given.traceml)
        if given.figures:
            for watch in given.watch:
                for line in _compare_figures(runner, given.only, watch):
                    print(line, flush=True)
            return
        publish("verdict", "Whether the verdict on a run is right", _report(runner, given))


def _report(runner: Runner, given: argparse.Namespace) -> Iterator[str]:
    for watch in given.watch:
        yield from ("", f"## Loops, {watch}", "")
        yield from _judge_causes(runner, given.only, watch)


# The figures of a run beside the clocks of its loop.


def _compare_figures(runner: Runner, names: Sequence[str], watch: str) -> Iterator[str]:
    yield from ("", f"Loops, {watch}. Per cent of the loop: by its own clocks / by Headroom.", "")
    yield (
        "| cause | steps | data | forward | backward | optimizer | beside | named beside | "
        "unaccounted | other | worst, points | core wait, own | cores, others' | step ms, first, "
        "last tenth | rss MiB |"
    )
    yield "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for name in names:
        for is_planted in (True, False):
            found = runner.run(name, watch, is_planted=is_planted)
            label = name if is_planted else f"{name}, without"
            yield f"| {label} | failed |" if found is None else _show_figures(label, found)


def _show_figures(label: str, found: Outcome) -> str:
    truth, metrics = found.truth, found.metrics
    cells, worst = [], 0.0
    for part in PARTS:
        mine = found.compute_share(part)
        if part not in STEP_METRICS:
            cells.append(f"{mine:.1f}")
            continue
        theirs = _compute_our_share(found, *STEP_METRICS[part])
        worst = max(worst, abs(mine - theirs))
        cells.append(f"{mine:.1f} / {theirs:.1f}")
    whole = metrics.get("time/train_model_s", 0.0) or 1.0
    beside = 100 * sum(metrics.get(name, 0.0) for name in BESIDE_METRICS) / whole
    waits = (metrics.get(f"time/core_wait{of}_pct", float("nan")) for of in ("", "_own"))
    return (
        f"| {label} | {truth['steps']} | {' | '.join(cells)} | {beside:.1f} | "
        f"{metrics.get('time/unaccounted_pct', float('nan')):.1f} | "
        f"{_compute_our_share(found, 'other'):.1f} | {worst:.1f} | "
        f"{' , '.join(f'{wait:.0f}' for wait in waits)} | "
        f"{truth['cores']:.2f} , {truth['others']:.2f} | "
        f"{truth['first_ms']:.1f} , {truth['last_ms']:.1f} | "
        f"{metrics.get('memory/host_rss_mib', 0.0):.0f} |"
    )


def _compute_our_share(found: Outcome, *phases: str) -> float:
    """Return the per cent of the training that these phases of its steps took by the record."""
    metrics, steps = found.metrics, found.truth["steps"]
    step_ms = sum(metrics.get(f"time/{phase}_ms", 0.0) for phase in phases)
    return 0.1 * step_ms * steps / (metrics.get("time/train_model_s", 0.0) or 1.0)


# The verdict beside the truth.


def _judge_causes(runner: Runner, names: Sequence[str], watch: str) -> Iterator[str]:
    yield (
        "| cause | right words | share by its clock | ours | right | its sentence | share told | "
        "within | gain promised | measured | holds | without it | TraceML |"
    )
    yield "|:--|:--|--:|:--|:--|:--|--:|:--|--:|--:|:--|:--|:--|"
    right = total = 0
    for name in names:
        cause = CAUSES[name]
        found = runner.run(name, watch, is_planted=True)
        without = runner.run(name, watch, is_planted=False)
        if found is None or without is None:
            yield f"| {name} | failed |"
            continue
        total += 1
        right += found.bound in cause.words
        yield _judge(name, cause, found, without, runner.trace(name))
    yield from ("", f"Right: {right} of {total}.")


def _judge(name: str, cause: Cause, found: Outcome, without: Outcome, other: str) -> str:
    gain = without.rows_per_s / max(found.rows_per_s, 1e-9)
    share = 100 * (1 - 1 / gain) if cause.of == "gain" else found.compute_share(cause.of)
    said, promised = read_share(found.why), read_gain(found.why)
    names_it = bool(re.search(cause.says, found.why, re.IGNORECASE))
    is_within = said is not None and abs(said - share) <= POINTS
    holds = promised is not None and gain <= promised * SLACK and gain - 1 >= (promised - 1) / 2
    is_busy = max(found.truth["others"], without.truth["others"]) > BUSY_CORES
    return " | ".join(
        (
            f"| {name}",
            " ".join(cause.words),
            f"{share:.0f}" if cause.of else "",
            found.bound or "-",
            _mark(found.bound in cause.words, found.bound),
            (_mark(names_it, found.why) + f": {found.why}") if found.why else "-",
            "-" if said is None else f"{said:.0f}",
            _mark(is_within, said if cause.of else None),
            "-" if promised is None else f"{promised:.1f}x",
            f"{gain:.1f}x" + (" (busy)" if is_busy and name != "contention" else ""),
            _mark(holds, promised if cause.words[0] != "compute" else None),
            without.bound or "-",
            f"{other or '-'} |",
        )
    )


def _mark(is_so: bool, asked: object) -> str:
    """Return yes or no, or a dash where there is nothing to ask."""
    return "-" if asked in (None, "") else "yes" if is_so else "**no**"


def read_share(why: str) -> float | None:
    """Return the first per cent of a sentence."""
    found = re.search(r"(\d+(?:\.\d+)?) ?%", why)
    return float(found[1]) if found else None


def read_gain(why: str) -> float | None:
    """Return by how much a sentence says that the run would be faster at most."""
    found = re.search(r"up to (\d+(?:\.\d+)?) ?(?:x|times)", why)
    return float(found[1]) if found else None


if __name__ == "__main__":
    main()
