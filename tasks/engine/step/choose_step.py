"""Which way of taking a step is the fastest, found out by measuring: how many threads on a CPU, a
recorded graph on CUDA, and whether compiling pays, which a long run tries and a short run never
begins. It refuses to guess a gain.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tasks.engine.base.nested import rows_of, shape_of
from tasks.engine.base.units import seconds
from tasks.engine.step.compiled_step import compiled_step, first_line, untakeable
from tasks.engine.step.cpu_threads import ThreadedStep
from tasks.engine.step.cuda_graph import REPLAY_TRIED_ABOVE, WARM_UP, GraphedStep, GraphError
from tasks.engine.step.optimizer_step import Outcome, Step, Steps
from tasks.engine.step.phases import Watched
from tasks.engine.step.verdict import Known, Verdict

log = logging.getLogger(__name__)

TIMED = 10  # steps of each measurement; its median counts
FASTER = 0.95  # of the time on few threads is what makes more of them worth it
TURNS = 3  # in which few and many threads are timed: others come and go
# What a first compilation took here: 24 s on 2 CPU cores (an mlp of three layers, nothing cached).
ASSUMED_COST_S = 25.0
# A gain that nobody has measured is tried where trying costs at most this share of what is left.
TRIAL_SHARE = 0.05
# Above it a step is no matter of launches, of which one takes microseconds; and a graph keeps a
# second set of activations.
GRAPH_BELOW_S = 0.01


# Gives the step to take next and is sent the seconds it took, or None where it could not be taken.
Script = Generator[Steps, float | None, None]


class CompileError(RuntimeError):
    """The model cannot be compiled as asked; the text starts with `train.compile`."""


class TunedStep:
    """Takes steps by the fastest way that pays. `verdict` says which that is, and why."""

    def __init__(
        self,
        step: Step,
        *,
        mode: str,
        steps: int,
        wait: Callable[[], None],
        graphs: bool,
        threads: int,
        rows: int = 0,
        known: Known | None = None,
        recorded: Callable[[list[Tensor]], None] = lambda tensors: None,
    ) -> None:
        """mode: auto, off, default or max. steps: of the whole run. graphs: whether the device can
        replay and the model is one that may be. threads: to try beside those of now. rows: of a
        whole batch; 0: of the first. recorded: called once steps are replayed from a graph, with
        what that keeps beside the batch."""
        self._plain, self._mode, self._left = step, mode, steps
        self._wait, self._graphs, self._known = wait, graphs, known
        self._recorded = recorded
        self._threads = threads
        self._rows = rows  # of whole batches: only these are tried and compiled
        self._shape: Any = None  # of such a batch
        self._best: Steps = step
        self._graphed: list[GraphedStep] = []
        self._gave_up = False
        self.verdict = {
            "off": Verdict("no", "train.compile is off, or train.deterministic is true"),
            "auto": Verdict("no", "the run is too short to measure its steps"),
        }.get(mode, Verdict(mode, f"train.compile is {mode}"))
        self._script: Script | None = self._trials()
        self._next(None)

    def __call__(self, x: Any, y: Any, *, norm: bool, watched: Watched) -> Outcome:
        self._left -= 1
        shape = shape_of(x)
        if self._shape is None and rows_of(y) >= self._rows:
            self._shape = shape
        if shape != self._shape or watched is Watched.COUNTED:
            return self._plain(x, y, norm=norm, watched=watched)
        if self._script is None:
            return self._best(x, y, norm=norm, watched=watched)
        return self._try(x, y, norm=norm, watched=watched)

    def state(self) -> dict[str, Any]:
        """Which way was chosen, once it was; see checkpoint/."""
        if self._script is not None:
            return {}
        return {"threads": torch.get_num_threads(), "verdict": asdict(self.verdict)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take the way that `state` chose; whether to replay it, which gives the same numbers, is
        tried anew."""
        if not state:
            return
        torch.set_num_threads(state["threads"])
        self._threads, before = state["threads"], Verdict(**state["verdict"])
        mode = before.compiled.partition("+")[0]
        if mode == "no":
            self._best, self._script, self.verdict = self._plain, None, before
        elif mode != "graph":
            self.verdict, self._script = before, self._as_asked(mode)
            self._next(None)

    def forget_graphs(self) -> bool:
        """Take steps without a graph from here on, whose memory others need; whether there was
        one."""
        if not any(graphed.is_recorded for graphed in self._graphed):
            return False
        self._gave_up = True
        for graphed in self._graphed:
            graphed.forget()
        compiled = self.verdict.compiled.partition("+")[0]
        if isinstance(self._best, GraphedStep):
            self._best = self._best.step
        if compiled == "graph":
            compiled = "no"
        reason = f"{self.verdict.reason}; the graph was given up, since memory was short"
        self.verdict = replace(self.verdict, compiled=compiled, reason=reason)
        self._graphs, self._script = False, None
        self._recorded([])
        log.warning("short of memory: steps are no longer replayed from a graph")
        return True

    @property
    def has_recorded(self) -> bool:
        """Whether a step was recorded as a graph, also where it was no faster or was given up."""
        return self._gave_up or any(graphed.is_recorded for graphed in self._graphed)

    @property
    def replays(self) -> int:
        """Steps that were replayed from a graph."""
        return sum(graphed.replays for graphed in self._graphed)

    def _next(self, took_s: float | None) -> None:
        """Go on with the trials; where they are over, the best stays."""
        if self._script is None:  # given up in the step just taken
            return
        try:
            self._best = self._script.send(took_s)
        except StopIteration:
            self._script = None
            if self.verdict.compiled != "no":
                log.info("compiled: %s; %s", self.verdict.compiled, self.verdict.reason)

    def _try(self, x: Any, y: Any, *, norm: bool, watched: Watched) -> Outcome:
        """One step of the trial; only these make the host wait."""
        self._wait()
        began = perf_counter()
        took_s, failure, is_final = None, "", False
        try:
            outcome = self._best(x, y, norm=norm, watched=watched)
        except untakeable() as error:
            failure = first_line(error)
            is_final = self._mode != "auto" and not isinstance(error, GraphError)
        # Only here is the error gone: the compiler's keep frames, and these the model.
        if is_final:
            raise CompileError(
                f"train.compile: {self._mode} cannot compile this model ({failure}); "
                "use auto or off"
            )
        if failure:
            log.warning("train.compile: %s", failure)
            outcome = self._plain(x, y, norm=norm, watched=watched)
        else:
            self._wait()
            took_s = perf_counter() - began
        self._next(took_s)
        return outcome

    def _trials(self) -> Script:
        if self._threads != torch.get_num_threads():
            yield from self._choose_threads()
        if self._mode == "auto":
            yield from self._by_measure()
        elif self._mode != "off":
            yield from self._as_asked(self._mode)

    def _choose_threads(self) -> Script:
        """Few threads, unless more are clearly faster: they suffer less from others."""
        few, many = (
            ThreadedStep(self._plain, threads)
            for threads in sorted((torch.get_num_threads(), self._threads))
        )
        few_s, many_s = [(yield from _warmed(few))], [(yield from _warmed(many))]
        for _ in range(TURNS - 1):
            few_s.append((yield from _timed(few)))
            many_s.append((yield from _timed(many)))
        best = many if _median(many_s) < FASTER * _median(few_s) else few
        torch.set_num_threads(best.threads)
        self._best = self._plain

    def _by_measure(self) -> Script:
        """auto."""
        for _ in range(WARM_UP):
            yield self._plain
        plain_s = (yield from _timed(self._plain)) or 0.0
        best: Steps = self._plain
        best_s, name = plain_s, "no"
        if self._graphs and plain_s < GRAPH_BELOW_S and self._left > REPLAY_TRIED_ABOVE:
            graphed = self._graph(self._plain)
            graphed_s = yield from _warmed(graphed)
            if graphed_s is not None and graphed_s < best_s:
                best, best_s, name = graphed, graphed_s, "graph"
        said = f"a step takes {seconds(plain_s)}"
        if name == "graph":
            said += f" plainly and {seconds(best_s)} as a graph"
        left_s = self._left * best_s
        refusal = self._refusal(left_s)
        if refusal:
            self._settle(best, Verdict(name, f"{said}; {refusal}", plain_s))
            return
        fast_step = compiled_step(self._plain, "default")
        fast: Steps = fast_step
        if name == "graph":
            fast = self._graph(fast_step)
        first_s = yield fast_step
        compiled_s = yield from _warmed(fast)
        if first_s is None or compiled_s is None:
            self._settle(best, Verdict(name, f"{said}; the model cannot be compiled", plain_s))
            return
        cost_s = max(0.0, first_s - compiled_s)
        measured = Verdict(name, "", plain_s, compiled_s, cost_s)
        said += f" and {seconds(compiled_s)} compiled, which cost {seconds(cost_s)}"
        if compiled_s < best_s:
            measured = replace(measured, compiled="default" if name == "no" else "default+graph")
            best = fast
        self._settle(best, replace(measured, reason=said))

    def _as_asked(self, mode: str) -> Script:
        """default and max: compiled from the first step on; replayed where that is faster."""
        fast_step = compiled_step(self._plain, mode)
        first_s = yield fast_step
        best_s = yield from _warmed(fast_step)
        best: Steps = fast_step
        name = mode
        if self._graphs and best_s is not None and best_s < GRAPH_BELOW_S:
            graphed = self._graph(fast_step)
            graphed_s = yield from _warmed(graphed)
            if graphed_s is not None and graphed_s < best_s:
                best, best_s, name = graphed, graphed_s, f"{name}+graph"
        cost_s = None if first_s is None or best_s is None else max(0.0, first_s - best_s)
        verdict = replace(self.verdict, compiled=name, compiled_step_s=best_s, cost_s=cost_s)
        self._settle(best, verdict)

    def _refusal(self, left_s: float) -> str:
        """Why compiling can't pay for the steps that are left; empty where it may."""
        if self._known is not None:
            cost_s, share = (
                self._known.cost_s,
                self._known.compiled_step_s / self._known.plain_step_s,
            )
            gain_s = left_s * (1 - share)
            if gain_s > cost_s:
                return ""
            return (
                f"compiling would save {seconds(max(0.0, gain_s))} of the {seconds(left_s)} left "
                f"and cost {seconds(cost_s)}, as measured before"
            )
        if TRIAL_SHARE * left_s < ASSUMED_COST_S:
            return (
                f"the {seconds(left_s)} left are too short to try compiling, "
                f"which costs about {seconds(ASSUMED_COST_S)}"
            )
        if shutil.which("c++") is None and shutil.which("g++") is None:
            return "there is no C++ compiler here"
        return ""

    def _graph(self, step: Step) -> GraphedStep:
        self._graphed.append(GraphedStep(step))
        return self._graphed[-1]

    def _settle(self, best: Steps, verdict: Verdict) -> None:
        self._best, self.verdict = best, verdict
        if isinstance(best, GraphedStep):
            self._recorded(best.tensors())


def _timed(step: Steps) -> Generator[Steps, float | None, float | None]:
    """The median of some steps in seconds; None where one could not be taken."""
    taken = []
    for _ in range(TIMED):
        took_s = yield step
        if took_s is None:
            return None
        taken.append(took_s)
    return median(taken)


def _median(taken: list[float | None]) -> float:
    return median(s for s in taken if s is not None)  # a plain step can always be taken


def _warmed(step: Steps) -> Generator[Steps, float | None, float | None]:
    """The same, after the steps in which a graph is recorded and kernels are loaded."""
    for _ in range(WARM_UP + 1):
        if (yield step) is None:
            return None
    return (yield from _timed(step))
