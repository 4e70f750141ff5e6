"""Whether the verdict on a run is right: loops with a planted cause (benchmarks/planted_causes.py)
and trainings of ours with the same (benchmarks/planted_trainings.py), each in a process of its own,
with its cause and without, held against what it knows by clocks of its own; and healthy runs
(benchmarks/healthy_runs.py), of which no cause should be told.

`python -m benchmarks.verdict [--kinds told plain ours] [--only NAME ...] [--keep FOLDER]` prints
the tables and keeps them in benchmarks/results; `--healthy N` adds that of N healthy runs.
`--figures` shows what is measured of each loop beside its own clocks. FOLDER keeps what a process
has said, and what lies there is not run again; `--again` judges it by the rules as they are now.
`--checkout` is the project whose verdict it is.
TraceML stands beside it where `--traceml` names the folder that it was installed into.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import psutil

from benchmarks.conditions import publish
from benchmarks.healthy_runs import KINDS
from benchmarks.planted_causes import CAUSES, OTHERS_CODE, SECONDS, Cause
from benchmarks.planted_trainings import TRAININGS
from headroom.report.verdict import judge_run

HERE = Path(__file__).parent
SCRIPT = str(HERE / "planted_causes.py")
PACKAGES = ("headroom", "flows", "tasks", "mlflow.yaml", "pyproject.toml")
OURS = "ours"  # trainings; the other kinds are loops with an account
# Of healthy runs: several threads that wait for each other get nowhere beside others.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
HEALTHY = ("compute", "mixed", "short")
LIMIT_S = 120.0  # of a process
TITLES = {
    "told": "Loops that mark batches, steps, evaluations, checkpoints and logs",
    "plain": "Loops with nothing but the account around them",
    OURS: "Trainings of ours",
}
NOTES = """
- right words: those that are right, the best one first. Its clock: per cent of the loop that the
  cause took, by clocks of the loop that know nothing of Headroom; of causes that no clock is
  around, what the loop gains without them. within: the share told is at most 10 points off.
- right, second: the word is contention, which is so, and the cause is named after it.
- sentence: names what the planted code is, by a pattern.
- gain: rows a second without the cause over those with it. holds: it is at most the promised one
  (5 % are the clock's), and at least half of that. Of several turns, with the cause and without in
  turns, both are medians. (busy): others had more than 0.3 cores.
- without it: what is said of the same loop without the cause.
"""
BUSY_CORES = 0.3  # that others had, from which a machine was not free
POINTS, SLACK = 10.0, 1.05  # that a share may be off; what a gain may be above the promised one
TRACEML_SAYS = ("Verdict", "Why", "Next")
BESIDE = "Beside it: "  # begins what a verdict names after its first cause
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

    @property
    def is_shared(self) -> bool:
        """Return whether others had cores of the machine meanwhile."""
        return self.truth["others"] > BUSY_CORES

    def is_right(self, cause: Cause) -> bool:
        """Return whether the word is one of the cause's; of a healthy loop beside others also that
        they had the cores."""
        is_so = self.bound == "contention" and self.is_shared
        return self.bound in cause.words or (cause.words[0] == "compute" and is_so)

    def is_right_beside(self, cause: Cause) -> bool:
        """Return whether it says first that others had the cores, which is so, and then names the
        cause."""
        names_it = re.search(cause.says, self.why, re.IGNORECASE)
        return self.bound == "contention" and self.is_shared and bool(names_it)

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
class Gain:
    """How many times as fast a loop is without its cause, and may be by the verdict."""

    measured: float
    promised: float | None


@dataclass(frozen=True)
class Runner:
    """Runs loops of one checkout of the project, and keeps what they say."""

    folder: Path
    checkout: Path
    seconds: float
    traceml: Path | None
    again: bool  # runs are judged anew, by the rules as they are now

    def run(self, name: str, kind: str, *, is_planted: bool, turn: int = 0) -> Outcome | None:
        """Return what the loop, or the training, said; None where it came to nothing."""
        again = f".{turn}" if turn else ""
        planted = "with" if is_planted else "without"
        out = self.folder / f"{name}.{kind}.{planted}{again}.json"
        asked = [name, "--out", str(out), *([] if is_planted else ["--without"])]
        if kind == OURS:
            code = "from benchmarks.planted_trainings import main; main()"
            command = ["-P", "-c", code, *asked]
        else:
            first = ["-P"] if CAUSES[name].ranks == 1 else _launch(CAUSES[name].ranks)
            more = ["--watch", kind, "--seconds", str(self.seconds)]
            command = [*first, SCRIPT, *asked, *more]
        return self._read(command, out)

    def run_healthy(self, kind: str, seed: int, *, is_busy: bool) -> Outcome | None:
        """Return what a healthy run said, and how many cores others had; None where it came to
        nothing. is_busy: others compute beside it."""
        out = self.folder / f"{kind}.{seed}.{'busy' if is_busy else 'idle'}.json"
        command = ["-P", "-m", "benchmarks.healthy_runs", kind, "--seed", str(seed)]
        asks = [sys.executable, "-c", OTHERS_CODE, str(os.getpid()), str(2 * is_busy)]
        known = out.exists()
        others = [] if known else subprocess.check_output(asks).split()
        before = _read_busy_s()
        try:
            found = self._read([*command, "--out", str(out)], out, ONE_THREAD)
        finally:
            for other in others:
                os.kill(int(other), signal.SIGKILL)
        if found is None or known:
            return found
        own_s, all_s, gone_s = (b - a for a, b in zip(before, _read_busy_s(), strict=True))
        truth = {**found.truth, "others": (all_s - own_s) / gone_s}
        out.write_text(json.dumps({"truth": truth, "run": found.run}))
        return Outcome(truth, found.run)

    def _read(
        self, command: Sequence[str], out: Path, env: Mapping[str, str] = MappingProxyType({})
    ) -> Outcome | None:
        if not out.exists():
            self._start(command, out, env)
        if not out.exists():
            return None
        found = Outcome(**json.loads(out.read_text()))
        verdict = judge_run(found.run) if self.again and found.run else None
        if verdict is None:
            return found
        tags = {**found.tags, **verdict.make_tags()}
        return Outcome(found.truth, {**found.run, "tags": tags})

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
            self._start([*launch, SCRIPT, *asked, "--args", *mine], out)
        summary = logs / "run" / "final_summary.txt"
        said = summary.read_text() if summary.exists() else ""
        found = [re.search(rf"{word}: +(.*?) *(?:\||$)", said, re.M) for word in TRACEML_SAYS]
        return " ".join(match[1] for match in found if match) or "no verdict"

    def _start(
        self, command: Sequence[str], out: Path, env: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Run this in a folder of its own; what it prints lies beside `out`."""
        scratch = self.folder / f"{out.stem}.scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        with out.with_suffix(".log").open("w") as log:
            subprocess.run(
                [*_time_out(), sys.executable, *command],
                cwd=scratch,
                env={**self._make_env(), **env},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _make_env(self) -> dict[str, str]:
        known = os.environ.get("PYTHONPATH", "")
        paths = [str(self._find_root()), *([str(self.traceml)] if self.traceml else []), known]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONSAFEPATH": "1",  # benchmarks/headroom.py is not the library
        }

    def _find_root(self) -> Path:
        """Return where the packages are: of another checkout all but these benchmarks."""
        if self.checkout == HERE.parent:
            return self.checkout
        root = self.folder / "packages"
        root.mkdir(exist_ok=True)
        for source in [*(self.checkout / name for name in PACKAGES), HERE]:
            link = root / source.name
            if not link.is_symlink():
                link.symlink_to(source)
        return root


def _read_busy_s() -> tuple[float, float, float]:
    """Return the seconds that cores were busy with processes of this one that have ended, and with
    all, and those of the clock."""
    now, ended = psutil.cpu_times(), os.times()
    all_s = sum(now) - now.idle - getattr(now, "iowait", 0.0)
    return ended.children_user + ended.children_system, all_s, time.perf_counter()


def _launch(ranks: int) -> list[str]:
    return ["-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def _time_out() -> list[str]:
    return ["timeout", "--signal=INT", "--kill-after=20", f"{LIMIT_S:.0f}"]


def main() -> None:
    """Run what is asked for, print the tables and keep them."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--kinds", nargs="*", default=["told", "plain", OURS])
    asked.add_argument("--only", nargs="*")
    asked.add_argument("--turns", type=int, default=1, help="of each loop, for its gain")
    asked.add_argument("--healthy", type=int, default=0)
    asked.add_argument("--seconds", type=float, default=SECONDS)
    asked.add_argument("--keep", type=Path)
    asked.add_argument("--checkout", type=Path, default=HERE.parent)
    asked.add_argument("--traceml", type=Path)
    asked.add_argument("--again", action="store_true")
    asked.add_argument("--figures", action="store_true")
    asked.add_argument("--device", default="cpu")
    given = asked.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (given.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        root, seconds, traceml = given.checkout.absolute(), given.seconds, given.traceml
        runner = Runner(folder, root, seconds, traceml, given.again)
        if given.figures:
            for kind in given.kinds:
                for line in _compare_figures(runner, _list_causes(kind, given), kind):
                    print(line, flush=True)
            return
        publish("verdict", "Whether the verdict on a run is right", _report(runner, given))


def _list_causes(kind: str, given: argparse.Namespace) -> list[str]:
    known = [name for name in CAUSES if CAUSES[name].device == given.device]
    names = list(TRAININGS) if kind == OURS else known
    return [name for name in names if not given.only or name in given.only]


def _report(runner: Runner, given: argparse.Namespace) -> Iterator[str]:
    yield NOTES.rstrip()
    for kind in given.kinds:
        yield from ("", f"## {TITLES[kind]}", "")
        yield from _judge_causes(runner, _list_causes(kind, given), kind, turns=given.turns)
    if given.healthy:
        yield from ("", "## Healthy runs", "")
        yield from _judge_healthy(runner, given.healthy)


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


def _judge_causes(runner: Runner, names: Sequence[str], kind: str, *, turns: int) -> Iterator[str]:
    yield (
        "| cause | right words | share by its clock | ours | right | its sentence | share told | "
        "within | gain promised | measured | holds | without it | TraceML |"
    )
    yield "|:--|:--|--:|:--|:--|:--|--:|:--|--:|--:|:--|:--|:--|"
    right = beside = total = clean = 0
    for name in names:
        cause = TRAININGS[name].cause if kind == OURS else CAUSES[name]
        pairs = [
            tuple(runner.run(name, kind, is_planted=p, turn=turn) for p in (True, False))
            for turn in range(turns)
        ]
        found, without = pairs[0]
        if found is None or without is None:
            yield f"| {name} | failed |"
            continue
        gains = [b.rows_per_s / max(a.rows_per_s, 1e-9) for a, b in pairs if a and b]
        promises = [read_gain(a.why) for a, _ in pairs if a is not None and a.is_right(cause)]
        gain = Gain(median(gains), median([p for p in promises if p] or [0.0]) or None)
        total += 1
        right += found.is_right(cause)
        beside += not found.is_right(cause) and found.is_right_beside(cause)
        is_so = without.bound == "contention" and without.is_shared
        clean += without.bound not in cause.words or without.bound in HEALTHY or is_so
        other = runner.trace(name) if kind == "told" else ""
        yield _judge(name, cause, found, without, gain, other)
    yield ""
    yield (
        f"Right: {right} of {total}, and {beside} after the others who had the cores. Without the "
        f"cause it is told of {total - clean}."
    )


def _judge(
    name: str, cause: Cause, found: Outcome, without: Outcome, gains: Gain, other: str
) -> str:
    gain = gains.measured
    share = 100 * (1 - 1 / gain) if cause.of == "gain" else found.compute_share(cause.of)
    names_it = bool(re.search(cause.says, found.why, re.IGNORECASE))
    told = found.why.partition(BESIDE)[2] if found.is_right_beside(cause) else found.why
    said, promised = read_share(told), gains.promised or read_gain(told)
    is_within = said is not None and abs(said - share) <= POINTS
    holds = promised is not None and gain <= promised * SLACK and gain - 1 >= (promised - 1) / 2
    is_busy = found.is_shared or without.is_shared
    right = "second" if found.is_right_beside(cause) else "**no**"
    return " | ".join(
        (
            f"| {name}",
            " ".join(cause.words),
            f"{share:.0f}" if cause.of else "",
            found.bound or "-",
            "-" if not found.bound else "yes" if found.is_right(cause) else right,
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


def _judge_healthy(runner: Runner, count: int) -> Iterator[str]:
    yield "| kind | alone | false | beside others | false |"
    yield "|:--|:--|--:|:--|--:|"
    said: dict[str, dict[bool, list[str]]] = {kind: {False: [], True: []} for kind in KINDS}
    false: dict[str, dict[bool, int]] = {kind: {False: 0, True: 0} for kind in KINDS}
    lines, total = [], 0
    for at in range(count):
        kind, is_busy = list(KINDS)[at % len(KINDS)], bool(at // len(KINDS) % 2)
        found = runner.run_healthy(kind, at, is_busy=is_busy)
        if found is None:
            said[kind][is_busy].append("failed")
            continue
        total += 1
        right = (*HEALTHY, "") + (("contention",) if is_busy or found.is_shared else ())
        said[kind][is_busy].append(found.bound or "-")
        if found.bound not in right:
            false[kind][is_busy] += 1
            of = f"others had {found.truth['others']:.1f} cores"
            lines.append(f"- {kind} {at}, {of}: {found.bound}: {found.why}")
    for kind in KINDS:
        cells = (f"{_count(said[kind][b])} | {false[kind][b]}" for b in (False, True))
        yield f"| {kind} | {' | '.join(cells)} |"
    wrong = len(lines)
    yield from (
        "",
        f"A cause that is none: {wrong} of {total}, {100 * wrong / max(total, 1):.1f} %.",
    )
    yield from ("", *lines)


def _count(words: Sequence[str]) -> str:
    """Return each word with how often it was said."""
    return ", ".join(f"{word} {words.count(word)}" for word in dict.fromkeys(words))


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
