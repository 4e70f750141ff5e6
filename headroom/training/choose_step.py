"""Chooses how a step is taken: on a CPU by one thread or by all, as the work says; by measuring,
a recorded graph on CUDA, and whether compiling pays, which a long run tries and a short run never
begins. What earlier runs have measured of compiling is used; what was not measured is absent. It
refuses to guess a gain.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from headroom.base.nested import count_rows, find_shapes
from headroom.base.units import format_seconds
from headroom.data.batch import Batch
from headroom.training.cuda_graph import REPLAY_TRIED_ABOVE, WARM_UP, GraphedStep, GraphError
from headroom.training.optimizer_step import Loss, Step, StepOutcome, StepTaker
from headroom.watch.phases import Watched

# Multiply-adds of a batch's forward pass, on 2 shared cores: at 1 million (mlp 64-128-64-10, batch
# 64) one thread and two take 0.75 ms; at 30 million (784-256-128-10, batch 128) 2.3 and 1.7 ms, but
# 2.8 and up to 26 ms while others work; at 240 million (batch 1024) 13 and 8 ms.
ONE_THREAD_BELOW = 50_000_000


@contextmanager
def set_cpu_threads(work: int, device: torch.device) -> Iterator[None]:
    """Set the number of CPU threads, and restore PyTorch's own at the end.

    One for small work on a CPU, whose operations would each wait for all threads; else as many
    as PyTorch was given. work: multiply-adds of the forward pass of one batch.
    """
    most = torch.get_num_threads()
    is_small = device.type == "cpu" and work < ONE_THREAD_BELOW
    torch.set_num_threads(1 if is_small else most)
    try:
        yield
    finally:
        torch.set_num_threads(most)


MODES = {"default": "default", "max": "max-autotune-no-cudagraphs"}


class _CompilerRefusal(RuntimeError):
    """torch.compile itself said no: on a Python or a system that it is not made for."""


class _CompiledCompute:
    """A step's compute, compiled when it is first called, so that a refusal is a step's."""

    def __init__(self, compute: Loss, mode: str) -> None:
        self._compute, self._mode = compute, mode
        self._fast: Loss | None = None

    def __call__(self, x: Any, y: Any) -> Tensor:
        if self._fast is None:
            try:
                # Not dynamic: the last, shorter batch is taken plainly and leaves these kernels.
                self._fast = torch.compile(
                    self._compute.__call__,  # type: ignore[operator]
                    mode=self._mode,
                    dynamic=False,
                )
            except RuntimeError as error:
                raise _CompilerRefusal(extract_first_line(error)) from None
        return self._fast(x, y)


def compile_step(step: Step, mode: str) -> Step:
    return replace(step, compute=_CompiledCompute(step.compute, MODES[mode]))


def list_step_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions raised for a model or a machine that can't be compiled, or a step
    that can't be recorded."""
    if "torch._inductor" not in sys.modules:  # nothing was compiled: do not import it to ask
        return GraphError, _CompilerRefusal
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    return GraphError, _CompilerRefusal, TorchDynamoException, CppCompileError, InvalidCxxCompiler


def extract_first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@dataclass(frozen=True)
class StepChoice:
    """The way of taking a step that was chosen, and why. Seconds are None where not
    measured."""

    compiled: str  # no, graph, default, max, default+graph, max+graph
    reason: str
    plain_step_s: float | None = None
    compiled_step_s: float | None = None
    cost_s: float | None = None

    def make_metrics(self) -> dict[str, float]:
        """Return the metrics, under the names of the run record."""
        metrics = {
            "time/plain_step_ms": _convert_to_ms(self.plain_step_s),
            "time/compiled_step_ms": _convert_to_ms(self.compiled_step_s),
            "time/compile_s": self.cost_s,
        }
        return {name: value for name, value in metrics.items() if value is not None}


@dataclass(frozen=True)
class EarlierTimings:
    """The step times that an earlier run of the same model, batch and device measured."""

    plain_step_s: float
    compiled_step_s: float
    cost_s: float


def _convert_to_ms(value_s: float | None) -> float | None:
    return None if value_s is None else 1000 * value_s


log = logging.getLogger(__name__)

TIMED = 10  # steps of each measurement; its median counts
# What a first compilation took here: 24 s on 2 CPU cores (an mlp of three layers, nothing cached).
ASSUMED_COST_S = 25.0
# A gain that nobody has measured is tried where trying costs at most this share of what is left.
TRIAL_SHARE = 0.05
# Above it a step is no matter of launches, of which one takes microseconds; and a graph keeps a
# second set of activations.
GRAPH_BELOW_S = 0.01


# Gives the step to take next and is sent the seconds it took, or None where it could not be taken.
TrialSteps = Generator[StepTaker, float | None, None]


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
        rows: int = 0,
        timings: EarlierTimings | None = None,
        recorded: Callable[[list[Tensor]], None] = lambda tensors: None,
    ) -> None:
        """mode: auto, off, default or max. steps: of the whole run. graphs: whether the device can
        replay and the model is one that may be. rows: of a whole batch; 0: of the first. recorded:
        called once steps are replayed from a graph, with what that keeps beside the batch."""
        self.plain, self._mode, self._left = step, mode, steps
        self._wait, self._graphs, self._timings = wait, graphs, timings
        self._recorded = recorded
        self._left_s: Callable[[], float] = lambda: inf
        self._rows = rows  # of whole batches: only these are tried and compiled
        self._shape: Any = None  # of such a batch
        self._best: StepTaker = step
        self._graphed: list[GraphedStep] = []
        self._gave_up = False
        self.verdict = {
            "off": StepChoice("no", "train.compile is off, or train.deterministic is true"),
            "auto": StepChoice("no", "the run is too short to measure its steps"),
        }.get(mode, StepChoice(mode, f"train.compile is {mode}"))
        self._script: TrialSteps | None = self._run_trials()
        self._advance(None)

    def __call__(self, batch: Batch, *, norm: bool, watched: Watched) -> StepOutcome:
        self._left -= 1
        shape = find_shapes(batch.x)
        if self._shape is None and count_rows(batch.y) >= self._rows:
            self._shape = shape
        if shape != self._shape or watched is Watched.COUNTED:
            return self.plain(batch, norm=norm, watched=watched)
        if self._script is None:
            return self._best(batch, norm=norm, watched=watched)
        return self._try(batch, norm=norm, watched=watched)

    def end_by(self, left_s: Callable[[], float]) -> None:
        """The run ends when its time is over: left_s tells how many seconds are left."""
        self._left_s = left_s

    def state(self) -> dict[str, Any]:
        """Return which way was chosen, once it was; see checkpoint/."""
        if self._script is not None:
            return {}
        return {"verdict": asdict(self.verdict)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take the way that `state` chose; whether to replay it, which gives the same numbers, is
        tried anew."""
        if not state:
            return
        before = StepChoice(**state["verdict"])
        mode = before.compiled.partition("+")[0]
        if mode == "no":
            self._best, self._script, self.verdict = self.plain, None, before
        elif mode != "graph":
            self.verdict, self._script = before, self._compile_as_asked(mode)
            self._advance(None)

    def forget_graphs(self) -> bool:
        """Take steps without a graph from here on, since others need its memory; return
        whether there was one."""
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
    def settled(self) -> StepTaker:
        """Return what takes the steps from now on: the plain step itself, where all trials are over
        and none was better."""
        return self.plain if self._script is None and self._best is self.plain else self

    @property
    def has_recorded(self) -> bool:
        """Return whether a step was recorded as a graph, also where it was no faster or was
        given up."""
        return self._gave_up or any(graphed.is_recorded for graphed in self._graphed)

    @property
    def replays(self) -> int:
        """Return how many steps were replayed from a graph."""
        return sum(graphed.replays for graphed in self._graphed)

    def _advance(self, took_s: float | None) -> None:
        """Go on with the trials; where they are over, the best stays."""
        if self._script is None:  # given up in the step just taken
            return
        try:
            self._best = self._script.send(took_s)
        except StopIteration:
            self._script = None
            if self.verdict.compiled != "no":
                log.info("compiled: %s; %s", self.verdict.compiled, self.verdict.reason)

    def _try(self, batch: Batch, *, norm: bool, watched: Watched) -> StepOutcome:
        """One step of the trial; only these make the host wait."""
        self._wait()
        began = perf_counter()
        took_s, failure, is_final = None, "", False
        try:
            outcome = self._best(batch, norm=norm, watched=watched)
        except list_step_errors() as error:
            failure = extract_first_line(error)
            is_final = self._mode != "auto" and not isinstance(error, GraphError)
        # Only here is the error gone: the compiler's keep frames, and these the model.
        if is_final:
            raise CompileError(
                f"train.compile: {self._mode} cannot compile this model ({failure}); "
                "use auto or off"
            )
        if failure:
            log.warning("train.compile: %s", failure)
            outcome = self.plain(batch, norm=norm, watched=watched)
        else:
            self._wait()
            took_s = perf_counter() - began
        self._advance(took_s)
        return outcome

    def _run_trials(self) -> TrialSteps:
        if self._mode == "auto":
            yield from self._choose_by_measure()
        elif self._mode != "off":
            yield from self._compile_as_asked(self._mode)

    def _choose_by_measure(self) -> TrialSteps:
        """auto."""
        for _ in range(WARM_UP):
            yield self.plain
        plain_s = (yield from _time_step(self.plain)) or 0.0
        best: StepTaker = self.plain
        best_s, name = plain_s, "no"
        if self._graphs and plain_s < GRAPH_BELOW_S and self._left > REPLAY_TRIED_ABOVE:
            graphed = self._make_graphed(self.plain)
            graphed_s = yield from _time_warm_step(graphed)
            if graphed_s is not None and graphed_s < best_s:
                best, best_s, name = graphed, graphed_s, "graph"
        said = f"a step takes {format_seconds(plain_s)}"
        if name == "graph":
            said += f" plainly and {format_seconds(best_s)} as a graph"
        left_s = min(self._left * best_s, self._left_s())
        refusal = self._find_obstacle(left_s)
        if refusal:
            self._settle(best, StepChoice(name, f"{said}; {refusal}", plain_s))
            return
        fast_step = compile_step(self.plain, "default")
        fast: StepTaker = fast_step
        if name == "graph":
            fast = self._make_graphed(fast_step)
        first_s = yield fast_step
        compiled_s = yield from _time_warm_step(fast)
        if first_s is None or compiled_s is None:
            self._settle(best, StepChoice(name, f"{said}; the model cannot be compiled", plain_s))
            return
        cost_s = max(0.0, first_s - compiled_s)
        measured = StepChoice(name, "", plain_s, compiled_s, cost_s)
        said += f" and {format_seconds(compiled_s)} compiled, which cost {format_seconds(cost_s)}"
        if compiled_s < best_s:
            measured = replace(measured, compiled="default" if name == "no" else "default+graph")
            best = fast
        self._settle(best, replace(measured, reason=said))

    def _compile_as_asked(self, mode: str) -> TrialSteps:
        """default and max: compiled from the first step on; replayed where that is faster."""
        fast_step = compile_step(self.plain, mode)
        first_s = yield fast_step
        best_s = yield from _time_warm_step(fast_step)
        best: StepTaker = fast_step
        name = mode
        if self._graphs and best_s is not None and best_s < GRAPH_BELOW_S:
            graphed = self._make_graphed(fast_step)
            graphed_s = yield from _time_warm_step(graphed)
            if graphed_s is not None and graphed_s < best_s:
                best, best_s, name = graphed, graphed_s, f"{name}+graph"
        cost_s = None if first_s is None or best_s is None else max(0.0, first_s - best_s)
        verdict = replace(self.verdict, compiled=name, compiled_step_s=best_s, cost_s=cost_s)
        self._settle(best, verdict)

    def _find_obstacle(self, left_s: float) -> str:
        """Return why compiling can't pay for the steps that are left; empty where it may."""
        if self._timings is not None:
            cost_s, share = (
                self._timings.cost_s,
                self._timings.compiled_step_s / self._timings.plain_step_s,
            )
            gain_s = left_s * (1 - share)
            if gain_s > cost_s:
                return ""
            return (
                f"compiling would save {format_seconds(max(0.0, gain_s))} of the "
                f"{format_seconds(left_s)} left "
                f"and cost {format_seconds(cost_s)}, as measured before"
            )
        if TRIAL_SHARE * left_s < ASSUMED_COST_S:
            return (
                f"the {format_seconds(left_s)} left are too short to try compiling, "
                f"which costs about {format_seconds(ASSUMED_COST_S)}"
            )
        if shutil.which("c++") is None and shutil.which("g++") is None:
            return "there is no C++ compiler here"
        return ""

    def _make_graphed(self, step: Step) -> GraphedStep:
        self._graphed.append(GraphedStep(step))
        return self._graphed[-1]

    def _settle(self, best: StepTaker, verdict: StepChoice) -> None:
        self._best, self.verdict = best, verdict
        if isinstance(best, GraphedStep):
            self._recorded(best.list_tensors())


def _time_step(step: StepTaker) -> Generator[StepTaker, float | None, float | None]:
    """Return the median of some steps in seconds; None where one could not be taken."""
    taken = []
    for _ in range(TIMED):
        took_s = yield step
        if took_s is None:
            return None
        taken.append(took_s)
    return median(taken)


def _time_warm_step(step: StepTaker) -> Generator[StepTaker, float | None, float | None]:
    """Return the same, after the steps in which a graph is recorded and kernels are loaded."""
    for _ in range(WARM_UP + 1):
        if (yield step) is None:
            return None
    return (yield from _time_step(step))
