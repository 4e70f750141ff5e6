from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from headroom.data.batch import Batch
from headroom.training import optim
from headroom.training.cuda_graph import WARM_UP, GraphedStep
from headroom.training.micro_batches import SingleAttempt
from headroom.training.optimizer_step import Step, StepOutcome
from headroom.watch.phases import Watched

CPU = torch.device("cpu")


class _Recorder:
    """CUDA's recording as this project uses it: what is recorded is not run, a replay runs it on
    the same memory, and its outcome is written where the recording said."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, run: Callable[[], StepOutcome]) -> tuple[Callable[[], None], StepOutcome]:
        static = StepOutcome(torch.empty(()), torch.empty(()) if self.clips else None)

        def replay() -> None:
            self.replays += 1
            outcome = run()
            static.loss.copy_(outcome.loss)
            if static.grad_norm is not None and outcome.grad_norm is not None:
                static.grad_norm.copy_(outcome.grad_norm)

        return replay, static

    clips = False


def _step(*, clip_norm: float | None = None, micro_rows: int = 16) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return Step(
        compute=lambda x, y: nn.functional.cross_entropy(model(x), y),
        optimizer=optim.AdamW(
            model.parameters(), lr=0.05, weight_decay=0.01, beta1=0.9, beta2=0.99
        ),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        autocast=nullcontext,
        clip_norm=clip_norm,
        micro=SingleAttempt(micro_rows),
        mark=lambda phase: None,
    )


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    sizes = [16] * 7 + [5] + [16] * 5  # a short batch in between, as at an epoch's end
    return [
        (torch.randn(n, 6, generator=draw), torch.randint(3, (n,), generator=draw)) for n in sizes
    ]


def _losses(step, optimizer, *, watched: tuple[int, ...] = ()) -> list[float]:
    losses = []
    for i, (x, y) in enumerate(_batches()):
        optimizer.set_lr(0.05 / (i + 1))  # a replay must see each new rate
        losses.append(
            step(
                Batch(x, y, len(y)),
                norm=False,
                watched=Watched.TIMED if i in watched else Watched.NOT,
            ).loss
        )
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("watched", [(), (0, 6, 9)])
@pytest.mark.parametrize(("clip_norm", "micro_rows"), [(None, 16), (0.5, 16), (None, 6)])
def test_replayed_steps_train_as_plain_ones(clip_norm, micro_rows, watched) -> None:
    plain = _step(clip_norm=clip_norm, micro_rows=micro_rows)
    expected = _losses(plain, plain.optimizer)
    inner = _step(clip_norm=clip_norm, micro_rows=micro_rows)
    recorder = _Recorder()
    recorder.clips = clip_norm is not None
    graphed = GraphedStep(inner, record=recorder)
    assert _losses(graphed, inner.optimizer, watched=watched) == pytest.approx(expected, rel=1e-6)
    whole_batches = 12 - WARM_UP - sum(i >= WARM_UP for i in watched)
    assert recorder.replays == whole_batches
    for a, b in zip(plain.optimizer.params, inner.optimizer.params, strict=True):
        torch.testing.assert_close(a, b)


def test_what_a_replay_returns_is_kept_from_the_next_replay() -> None:
    inner = _step()
    graphed = GraphedStep(inner, record=_Recorder())
    kept = [
        graphed(Batch(x, y, len(y)), norm=False, watched=Watched.NOT).loss for x, y in _batches()
    ]
    assert len({loss.item() for loss in kept}) == len(kept)


def test_clipped_replays_tell_the_norm_before_clipping() -> None:
    plain, inner = _step(clip_norm=0.01), _step(clip_norm=0.01)
    recorder = _Recorder()
    recorder.clips = True
    graphed = GraphedStep(inner, record=recorder)
    for x, y in _batches():
        expected = plain(Batch(x, y, len(y)), norm=True, watched=Watched.NOT).grad_norm
        torch.testing.assert_close(
            graphed(Batch(x, y, len(y)), norm=True, watched=Watched.NOT).grad_norm, expected
        )
