"""What the loop keeps when, where it stops, and where it goes on from."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from headroom.base.scores import Evaluation
from headroom.data.dataloaders import LoaderBatches
from headroom.data.dataset_batches import place_rows
from headroom.training import loop
from headroom.training.best_weights import BestWeights
from headroom.training.checkpoints import TrainingPosition
from headroom.training.evaluation import evaluate
from headroom.training.loop import StopRequest, TrainingResult
from headroom.watch.step_metrics import Diverged
from tests.training.test_loop import (
    CPU,
    PLAN,
    _data,
    _model,
    _Narrow,
    _tools,
    fit_model,
)

START = TrainingPosition()


def at(step: int) -> TrainingPosition:
    """Where an undisturbed training is after that step: of 40 rows in batches of 16, three steps an
    epoch, the last of 8 rows."""
    epoch, batch = divmod(step, 3)
    return TrainingPosition(step, epoch, batch, 40 * epoch + 16 * batch)


class Kept:
    """Writes down when it is asked to keep something."""

    def __init__(self, begin: TrainingPosition) -> None:
        self.begin, self.calls = begin, []

    def resume(self, training) -> None:
        training.position = self.begin

    def end_step(self, training) -> None:
        self.calls.append(("step", training.position))

    def end_epoch(self, training, *, is_best: bool) -> None:
        self.calls.append(("best epoch" if is_best else "epoch", training.position))

    def save(self, training, *, last: bool) -> None:
        self.calls.append(("save", training.position, last))

    def finish(self, training) -> None:
        self.calls.append(("finish", training.position))

    def let_go_on(self) -> None:
        pass


def kept_by(plan=PLAN, *, begin=START, stops=(), best=None, train=None, lr: float = 0.0):
    """A training, what it kept, the inputs of its steps, and how often it was judged; with a rate
    of 0 the first epoch is the best."""
    model, kept, seen, val = _model(), Kept(begin), [], _Narrow(9, most=1024)
    tools = _tools(model, lambda metrics, step: None, lr=lr, best=best)
    asked = iter([*stops, *[None] * 100])

    def step(batch, *, norm, watched):
        seen.append(batch.x.clone())
        return tools.step(batch, norm=norm, watched=watched)

    made = replace(tools, step=step, checkpoints=kept)
    fitted: TrainingResult = fit_model(
        model,
        train or _data(40, seed=1),
        val,
        schedule=plan,
        tools=made,
        check_stop=lambda: next(asked),
    )
    return fitted, kept.calls, seen, len(val.given), tools


def test_each_step_and_epoch_is_told_to_the_checkpoints_with_its_place() -> None:
    """The last step of an epoch is judged first; the end is told once."""
    fitted, calls, _, judged, _ = kept_by()
    epochs = [("best epoch", at(3)), ("epoch", at(6))]
    assert calls == [
        *(("step", at(step)) for step in (1, 2)), epochs[0],
        *(("step", at(step)) for step in (4, 5)), epochs[1],
        *(("step", at(step)) for step in (7, 8)), ("finish", at(9)),
    ]  # fmt: skip
    assert (fitted, judged) == (replace(fitted, steps=9, epochs=3, rows=120, stopped=""), 3)
    _, calls, *_ = kept_by(replace(PLAN, max_steps=5))
    assert calls[-2:] == [("step", at(5)), ("finish", TrainingPosition(5, 2, 0, 72))]


@pytest.mark.parametrize(
    ("asked", "step", "judged"), [(1, 1, 1), (3, 3, 1), (4, 4, 1), (6, 6, 2), (8, 8, 2)]
)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_stop_keeps_the_step_that_was_done_and_ends_with_a_judgement(
    asked: int, step: int, judged: int, keeps: bool
) -> None:
    """It is asked after each step and each epoch; before an epoch has ended the model is judged."""
    acts = []
    stops = [None] * (asked - 1) + [
        StopRequest("somebody asked", act=lambda: acts.append(len(acts)))
    ]
    fitted, calls, seen, times, tools = kept_by(stops=stops, best=BestWeights(keeps=keeps))
    assert (fitted.steps, fitted.stopped, len(seen)) == (step, "somebody asked", step)
    assert (fitted.rows, fitted.epochs) == (at(step).rows, (step - 1) // 3 + 1)
    assert calls[-1] == ("save", at(step), True) and acts == [0] and times == judged
    assert "val/loss" in fitted.metrics and not fitted.stopped_early


def test_a_stop_that_does_not_end_the_training_is_acted_on_and_it_goes_on() -> None:
    acts: list[int] = []
    stops = [
        None,
        StopRequest("", ends=False, act=lambda: acts.append(1)),
        None,
        StopRequest("", ends=False),
    ]
    fitted, calls, *_ = kept_by(stops=stops)
    assert (fitted.steps, fitted.stopped, acts) == (9, "", [1])
    assert [call[1:] for call in calls if call[0] == "save"] == [(at(2), True), (at(4), True)]


def test_nobody_is_asked_after_the_last_step() -> None:
    for plan, times in ((PLAN, 8), (replace(PLAN, max_steps=5), 4), (replace(PLAN, patience=1), 5)):
        stops = [None] * times + [StopRequest("too late")]
        assert kept_by(plan, stops=stops)[0].stopped == ""


@pytest.mark.parametrize("step", [1, 3, 4, 5, 8])
def test_it_goes_on_with_the_batches_and_counts_that_are_left(step: int) -> None:
    _, whole, seen, *_ = kept_by()
    fitted, calls, rest, _, tools = kept_by(begin=at(step))
    assert len(rest) == 9 - step
    assert all(map(torch.equal, rest, seen[step:]))
    assert (fitted.steps, fitted.epochs, fitted.rows) == (9, 3, 120)
    names = [call[1] for call in calls]
    assert names == [call[1] for call in whole][step:]
    assert tools.accounts.watch.seconds["first_step"] > 0


def test_rows_that_cannot_be_left_out_begin_their_epoch_again() -> None:
    train = _Narrow(40, most=99)
    train.begins_again = True
    fitted, calls, seen, *_ = kept_by(begin=at(4), train=train)
    assert len(seen) == 5 and fitted.steps == 9
    assert calls[0] == ("step", at(5)._replace(batch=1))
    assert train.given == [16, 16, 8, 16, 16]


@pytest.mark.parametrize(
    ("begin", "waited", "patience", "trained", "early"),
    [
        (at(9), 0, 0, 0, False),  # it was done
        (at(9), 2, 1, 0, False),
        (at(3), 1, 1, 0, True),  # it had waited enough
        (at(3), 2, 1, 0, True),
        (at(3), 0, 1, 3, True),
        (at(3), 0, 2, 6, False),
        (at(3), 1, 2, 3, True),
        (at(3), 1, 0, 6, False),
        (at(4), 1, 1, 2, True),  # in an epoch that had begun
    ],
)
def test_what_was_done_is_not_trained_further(begin, waited, patience, trained, early) -> None:
    best = BestWeights()
    best.record(Evaluation({"val/loss": -1.0}), 1)
    best.waited = waited
    fitted, calls, seen, *_ = kept_by(replace(PLAN, patience=patience), begin=begin, best=best)
    assert (len(seen), fitted.stopped_early) == (trained, early)
    assert (fitted.steps, fitted.metrics["train/best_epoch"]) == (begin.step + trained, 1)
    assert fitted.epochs == -(-fitted.steps // 3) and bool(calls) == bool(trained)


def test_the_parts_that_are_kept_beside_the_model_have_names() -> None:
    state = _tools(_model(), lambda metrics, step: None)
    loop.fit_model(state, PLAN)
    assert set(state.state_dict()) == {"rows", "step_metrics"}


def test_a_row_of_a_users_own_loader_is_blamed_and_none_of_ours() -> None:
    """Those of files were looked at when they were read."""
    x = np.full((40, 6), np.nan, np.float32)
    y = np.zeros(40, np.int64)
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = torch.utils.data.DataLoader(dataset, batch_size=16)
    ours = place_rows(x, y, device=CPU, room_bytes=10**9)
    tools = _tools(_model(), lambda metrics, step: None)
    with pytest.raises(Diverged, match="^data.source: .*inputs holds a number there that is not"):
        fit_model(_model(), LoaderBatches(loader, CPU), ours, schedule=PLAN, tools=tools)
    tools = _tools(_model(), lambda metrics, step: None)
    with pytest.raises(Diverged, match="^train.loss: became nan at step 1"):
        fit_model(_model(), ours, ours, schedule=PLAN, tools=tools)


def test_within_an_epoch_the_weights_are_judged_first_and_then_kept() -> None:
    """Once at the end of an epoch, also where both are due; at the end once."""
    plan = replace(PLAN, eval_every_steps=2)
    fitted, calls, _, judged, _ = kept_by(plan)
    assert calls == [
        ("step", at(1)), ("best epoch", at(2)), ("epoch", at(3)),
        ("epoch", at(4)), ("step", at(5)), ("epoch", at(6)),
        ("step", at(7)), ("epoch", at(8)), ("finish", at(9)),
    ]  # fmt: skip
    assert (fitted.steps, fitted.epochs, judged) == (9, 3, 6)
    assert fitted.metrics["train/best_epoch"] == pytest.approx(2 / 3)
    _, calls, _, judged, _ = kept_by(replace(plan, max_steps=4))
    assert calls[-1] == ("finish", TrainingPosition(4, 2, 0, 56)) and judged == 3


def test_patience_ends_a_training_within_an_epoch_and_it_is_not_gone_on_with() -> None:
    plan = replace(PLAN, eval_every_steps=2, patience=2)
    fitted, calls, _, judged, tools = kept_by(plan)
    assert (fitted.steps, fitted.epochs, fitted.stopped_early, judged) == (4, 2, True, 3)
    assert calls[-1] == ("finish", at(4)) and fitted.rows == at(4).rows
    again, calls, seen, *_ = kept_by(plan, begin=at(4), best=tools.best)
    assert (again.steps, again.epochs, again.stopped_early, seen, calls) == (4, 2, True, [], [])
    more, _, seen, *_ = kept_by(replace(plan, patience=3), begin=at(4), best=tools.best)
    assert (more.steps, len(seen)) == (6, 2)


def test_a_stop_at_a_step_that_is_judged_comes_after_the_judgement() -> None:
    stops = [None, StopRequest("somebody asked")]
    fitted, calls, *_ = kept_by(replace(PLAN, eval_every_steps=2), stops=stops)
    assert calls[-2:] == [("best epoch", at(2)), ("save", at(2), True)]
    assert (fitted.steps, fitted.stopped) == (2, "somebody asked")


def test_a_training_that_is_stopped_within_an_epoch_has_the_weights_of_its_best() -> None:
    """They were those of the step it was stopped at, under the metrics of the epoch before, where
    that was the best."""
    asked = iter([None, None, None, None, StopRequest("somebody asked")])
    model, val = _model(), _data(9, seed=2)
    tools = _tools(model, lambda metrics, step: None)
    fitted = fit_model(
        model,
        _data(40, seed=1),
        val,
        schedule=PLAN,
        tools=tools,
        check_stop=lambda: next(asked),
    )
    assert (fitted.steps, fitted.metrics["train/best_epoch"]) == (5, 1)
    again = evaluate(model, val, tools.evaluator)
    assert again.metrics["val/loss"] == fitted.metrics["val/loss"]
