from contextlib import nullcontext

import pytest
import torch
from torch import nn

from headroom.data.batch import Batch
from headroom.training import choose_step, optim
from headroom.training.choose_step import CompileError, EarlierTimings, TunedStep
from headroom.training.cuda_graph import GraphError
from headroom.training.micro_batches import SingleAttempt
from headroom.training.optimizer_step import Step
from headroom.watch.phases import Watched


def _step(compute=None) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return Step(
        compute=compute or (lambda x, y: nn.functional.cross_entropy(model(x), y)),
        optimizer=optim.AdamW(
            model.parameters(), lr=0.05, weight_decay=0.01, beta1=0.9, beta2=0.99
        ),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        autocast=nullcontext,
        clip_norm=None,
        micro=SingleAttempt(16),
        mark=lambda phase: None,
    )


def _tuned(step: Step, mode: str, *, steps: int = 40, graphs: bool = False, known=None):
    return TunedStep(
        step,
        mode=mode,
        steps=steps,
        wait=lambda: None,
        graphs=graphs,
        timings=known,
    )


def _take(step, count: int) -> list[float]:
    draw = torch.Generator().manual_seed(1)
    losses = []
    for i in range(count):
        rows = 5 if i % 9 == 8 else 16
        x, y = torch.randn(rows, 6, generator=draw), torch.randint(3, (rows,), generator=draw)
        losses.append(step(Batch(x, y, len(y)), norm=False, watched=Watched.NOT).loss.item())
    return losses


def test_where_nothing_is_left_to_try_the_plain_step_is_taken_itself() -> None:
    """What stood before it counted steps and looked at shapes, to the end of the training."""
    plain = _step()
    assert _tuned(plain, "off").settled is plain
    trying = _tuned(plain, "auto")
    assert trying.settled is trying
    _take(trying, 40)
    assert trying.verdict.compiled == "no" and trying.settled is plain


class _Clock:
    """Time that passes as a script says: seconds of each step by what takes it."""

    def __init__(self, monkeypatch, seconds) -> None:
        self.now = 0.0
        self.seconds = seconds
        monkeypatch.setattr(choose_step, "perf_counter", lambda: self.now)

    def slowed(self, step: Step, name: str) -> Step:
        inner = step.compute

        def compute(x, y):
            first, each = self.seconds[name]
            self.now += first if name not in self.seen else each
            self.seen.add(name)
            return inner(x, y)

        self.seen: set[str] = set()
        return choose_step.replace(step, compute=compute)


def _pretend(monkeypatch, *, plain_s: float, compiled_s: float, cost_s: float) -> tuple:
    """A step of known pace, and a compiler that makes it another."""
    clock = _Clock(
        monkeypatch, {"plain": (plain_s, plain_s), "compiled": (cost_s + compiled_s, compiled_s)}
    )
    base = _step()
    monkeypatch.setattr(
        choose_step, "compile_step", lambda step, mode: clock.slowed(base, "compiled")
    )
    monkeypatch.setattr(choose_step.shutil, "which", lambda name: f"/usr/bin/{name}")
    return clock.slowed(base, "plain"), clock


def test_off_is_the_plain_step() -> None:
    tuned = _tuned(_step(), "off")
    assert _take(tuned, 12) == _take(_step(), 12)
    assert tuned.verdict.compiled == "no" and tuned.verdict.make_metrics() == {}


def test_a_short_run_is_not_compiled_and_says_why(monkeypatch) -> None:
    monkeypatch.setattr(choose_step, "compile_step", lambda step, mode: pytest.fail("it compiled"))
    tuned = _tuned(_step(), "auto", steps=60)
    assert _take(tuned, 40) == _take(_step(), 40)
    assert tuned.verdict.compiled == "no"
    assert "too short to try compiling, which costs about 25.0 s" in tuned.verdict.reason
    assert set(tuned.verdict.make_metrics()) == {"time/plain_step_ms"}


def test_a_run_that_ends_by_the_clock_is_not_compiled_for_steps_it_never_takes(
    monkeypatch,
) -> None:
    """A thousand epochs that end after six seconds were compiled for four of them."""
    monkeypatch.setattr(choose_step, "compile_step", lambda *_: pytest.fail("compiled"))
    step = _tuned(_step(), "auto", steps=10_000_000)
    step.end_by(lambda: 6.0)
    _take(step, 40)
    assert step.verdict.compiled == "no"
    assert "the 6.00 s left are too short to try compiling" in step.verdict.reason


def test_a_run_that_ends_before_it_could_measure_says_so() -> None:
    tuned = _tuned(_step(), "auto", steps=4)
    _take(tuned, 4)
    assert tuned.verdict.reason == "the run is too short to measure its steps"


@pytest.mark.parametrize(("compiled_s", "verdict"), [(0.5, "default"), (1.5, "no")])
def test_a_long_run_keeps_the_faster_of_the_two(monkeypatch, compiled_s, verdict) -> None:
    plain, clock = _pretend(monkeypatch, plain_s=1.0, compiled_s=compiled_s, cost_s=20.0)
    tuned = _tuned(plain, "auto", steps=1000)
    assert _take(tuned, 80) == pytest.approx(_take(_step(), 80), rel=1e-5)
    assert tuned.verdict.compiled == verdict
    assert tuned.verdict.make_metrics() == {
        "time/plain_step_ms": pytest.approx(1000),
        "time/compiled_step_ms": pytest.approx(1000 * compiled_s),
        "time/compile_s": pytest.approx(20),
    }
    before = clock.now
    _take(tuned, 8)
    assert clock.now - before == pytest.approx(8 * min(1.0, compiled_s))


@pytest.mark.parametrize(
    ("known", "verdict"),
    [
        (EarlierTimings(plain_step_s=1.0, compiled_step_s=0.5, cost_s=20.0), "default"),
        (EarlierTimings(plain_step_s=1.0, compiled_step_s=0.9, cost_s=20.0), "no"),
        (EarlierTimings(plain_step_s=1.0, compiled_step_s=1.1, cost_s=1.0), "no"),
    ],
)
def test_what_an_earlier_run_measured_decides(monkeypatch, known, verdict) -> None:
    plain, _ = _pretend(monkeypatch, plain_s=1.0, compiled_s=known.compiled_step_s, cost_s=20.0)
    tuned = _tuned(plain, "auto", steps=100, known=known)
    _take(tuned, 60)
    assert tuned.verdict.compiled == verdict
    if verdict == "no":
        assert "as measured before" in tuned.verdict.reason


def test_without_a_compiler_nothing_is_tried(monkeypatch) -> None:
    plain, _ = _pretend(monkeypatch, plain_s=1.0, compiled_s=0.5, cost_s=20.0)
    monkeypatch.setattr(choose_step.shutil, "which", lambda name: None)
    tuned = _tuned(plain, "auto", steps=1000)
    _take(tuned, 40)
    assert "there is no C++ compiler here" in tuned.verdict.reason


def test_a_step_that_cannot_be_recorded_is_taken_plainly(monkeypatch) -> None:
    class Refuses:
        def __init__(self, step) -> None: ...

        def __call__(self, *args, **kwargs):
            raise GraphError("the step cannot be recorded as a graph: it reads from the device")

    monkeypatch.setattr(choose_step, "GraphedStep", Refuses)
    tuned = _tuned(_step(), "auto", steps=500, graphs=True)
    assert _take(tuned, 40) == _take(_step(), 40)
    assert tuned.verdict.compiled == "no"


def test_a_model_that_cannot_be_compiled_is_an_error_only_where_it_was_asked_for(
    monkeypatch,
) -> None:
    class Breaks(RuntimeError):
        pass

    def breaks(x, y):
        raise Breaks("no lowering for aten::odd\nand more")

    monkeypatch.setattr(choose_step, "compile_step", lambda step, mode: _step(breaks))
    monkeypatch.setattr(choose_step, "list_step_errors", lambda: (GraphError, Breaks))
    with pytest.raises(CompileError, match="train.compile: default cannot compile .*aten::odd"):
        _take(_tuned(_step(), "default"), 3)
    known = EarlierTimings(plain_step_s=1.0, compiled_step_s=1e-9, cost_s=0.0)
    tuned = _tuned(_step(), "auto", steps=1000, known=known)
    assert _take(tuned, 30) == _take(_step(), 30)
    assert "the model cannot be compiled" in tuned.verdict.reason
