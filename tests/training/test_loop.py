import math
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from headroom.base.scores import Evaluation
from headroom.data.dataloaders import LoaderBatches
from headroom.data.dataset_batches import draw_row_order, place_rows
from headroom.settings.run_config import OptimConfig
from headroom.training import loop, optim
from headroom.training.best_weights import BestWeights
from headroom.training.evaluation import Evaluator, evaluate
from headroom.training.loop import TrainingResult
from headroom.training.micro_batches import MemoryExhausted, SingleAttempt
from headroom.training.optimizer_step import Step
from headroom.training.plan import Schedule
from headroom.training.train_state import TrainState
from headroom.watch.out_of_memory import MemoryFailure
from headroom.watch.step_metrics import Diverged
from tests.watch.loop_watch import make_accounts

CPU = torch.device("cpu")
PLAN = Schedule(
    epochs=3,
    batch_size=16,
    log_every=4,
    patience=0,
    seed=0,
)


def _data(rows: int, *, seed: int, task: str = "classification"):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(rows, 6)).astype(np.float32)
    if task == "regression":
        return place_rows(x, x[:, :1] * 2 + 1, device=CPU, room_bytes=10**9)
    return place_rows(x, (x[:, 0] > 0).astype(np.int64), device=CPU, room_bytes=10**9)


def _model(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def _tools(
    model: nn.Module,
    log,
    *,
    lr: float = 0.05,
    loss=nn.functional.cross_entropy,
    micro_rows: int = 1024,
    clip_norm: float | None = None,
    task: str = "classification",
    best: BestWeights | None = None,
) -> TrainState:
    accounts = make_accounts(lambda: {"parameters": model.parameters()}, log=log)
    optimizer = optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01, beta1=0.9, beta2=0.99)
    step = Step(
        compute=lambda x, y: loss(model(x), y),
        optimizer=optimizer,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        autocast=nullcontext,
        clip_norm=clip_norm,
        micro=SingleAttempt(micro_rows),
        mark=accounts.mark,
    )
    rows = _data(100, seed=1, task=task), _data(40, seed=2, task=task)
    return TrainState(
        model,
        *rows,
        step=step,
        micro=SingleAttempt(micro_rows),
        evaluator=Evaluator(
            task, loss, nullcontext, micro=SingleAttempt(1024), phases=accounts.phases
        ),
        optimizer=optimizer,
        rate=lambda step: lr,
        accounts=accounts,
        best=best or BestWeights(),
    )


def fit_model(
    model, train, val, *, schedule: Schedule, tools: TrainState, **more
) -> TrainingResult:
    return loop.fit_model(replace(tools, model=model, train=train, val=val), schedule, **more)


def _fit(
    model: nn.Module, plan: Schedule = PLAN, *, rows: int = 100, **tools
) -> tuple[TrainingResult, list]:
    logged: list[tuple[int, dict[str, float]]] = []
    made = _tools(model, lambda metrics, step: logged.append((step, metrics)), **tools)
    task = made.evaluator.task
    train, val = _data(rows, seed=1, task=task), _data(40, seed=2, task=task)
    return fit_model(model, train, val, schedule=plan, tools=made), logged


def test_the_loop_gives_the_weights_of_the_plain_loop() -> None:
    mine, plain = _model(), _model()
    _fit(mine)
    data = _data(100, seed=1)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.05, betas=(0.9, 0.99), weight_decay=0.01)
    for epoch in range(3):
        for rows in draw_row_order(100, seed=0, epoch=epoch).split(16):
            reference.zero_grad()
            nn.functional.cross_entropy(plain(data.x[rows]), data.y[rows]).backward()
            reference.step()
    for a, b in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("max_steps", "steps", "epochs"), [(9, 9, 2), (14, 14, 2), (99, 21, 3)])
def test_max_steps_ends_the_training_in_mid_epoch_with_an_evaluation(
    max_steps: int, steps: int, epochs: int
) -> None:
    fitted, logged = _fit(_model(), replace(PLAN, max_steps=max_steps))
    assert (fitted.steps, fitted.epochs, fitted.stopped_early) == (steps, epochs, False)
    assert fitted.rows == sum(4 if step % 7 == 0 else 16 for step in range(1, steps + 1))
    step, last = logged[-1]
    assert step == steps and last["val/loss"] == fitted.metrics["val/loss"]
    assert any(step == steps and "train/loss" in metrics for step, metrics in logged)


@pytest.mark.parametrize("micro_rows", [8, 6, 1])
def test_micro_batches_give_the_weights_of_the_whole_batch(micro_rows: int) -> None:
    whole, parts = _model(), _model()
    _, told = _fit(whole)
    _, told_of_parts = _fit(parts, micro_rows=micro_rows)
    for (_, metrics), (_, others) in zip(told, told_of_parts, strict=True):
        if "train/loss" in metrics:
            assert others["train/loss"] == pytest.approx(metrics["train/loss"], rel=1e-3)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_it_logs_each_window_and_each_epoch() -> None:
    fitted, logged = _fit(_model())
    assert fitted.steps == 21 and fitted.epochs == 3 and not fitted.stopped_early
    steps = [step for step, metrics in logged if "train/loss" in metrics]
    assert steps == [4, 8, 12, 16, 20, 21]
    assert [m["train/epoch"] for _, m in logged if "train/epoch" in m] == [1, 2, 3]
    speeds = [m["speed/samples_per_s"] for _, m in logged if "speed/samples_per_s" in m]
    assert len(speeds) >= 2 and min(speeds) > 0
    losses = [m["train/loss"] for _, m in logged if "train/loss" in m]
    assert losses[-1] < losses[0]


def test_logging_more_often_changes_no_weight() -> None:
    seldom, often = _model(), _model()
    _fit(seldom, replace(PLAN, log_every=1000))
    _fit(often, replace(PLAN, log_every=1))
    for a, b in zip(seldom.parameters(), often.parameters(), strict=True):
        assert torch.equal(a, b)


def test_each_log_point_holds_the_mean_loss_of_its_steps() -> None:
    _, every = _fit(_model(), replace(PLAN, log_every=1))
    _, windows = _fit(_model(), replace(PLAN, log_every=4))
    single = {step: m["train/loss"] for step, m in every if "train/loss" in m}
    begin = 0
    for step, metrics in windows:
        if "train/loss" in metrics:  # also the window from step 5 to 8, which an epoch's end cuts
            mean = sum(single[i] for i in range(begin + 1, step + 1)) / (step - begin)
            assert metrics["train/loss"] == pytest.approx(mean, rel=1e-6)
            begin = step
    assert begin == 21


@pytest.mark.parametrize("log_every", [1, 4, 1000])
def test_a_loss_that_is_no_number_stops_the_run_and_names_the_step(log_every: int) -> None:
    calls = 0

    def breaks_at_the_sixth(outputs, targets):
        nonlocal calls
        calls += 1
        loss = nn.functional.cross_entropy(outputs, targets)
        return loss * math.nan if calls == 6 else loss

    plan = replace(PLAN, log_every=log_every)
    message = r"train.loss: became nan at step 6 \(epoch 1, .*last good loss was 0.\d+ at step 5"
    with pytest.raises(Diverged, match=message):
        _fit(_model(), plan, loss=breaks_at_the_sixth)
    assert calls <= 7  # the end of the first epoch


def test_a_loss_that_was_never_good_is_said_so() -> None:
    with pytest.raises(Diverged, match="became inf at step 1 .*no step was good"):
        _fit(_model(), loss=lambda out, y: nn.functional.cross_entropy(out, y) * math.inf)


def test_patience_stops_and_keeps_the_best_weights() -> None:
    model = _model()
    plan = replace(PLAN, epochs=60, patience=2)
    fitted, logged = _fit(model, plan, lr=0.9)
    losses = [m["val/loss"] for _, m in logged if "val/loss" in m]
    assert fitted.stopped_early and fitted.epochs == len(losses) < 60
    assert losses.index(min(losses)) == len(losses) - 3
    assert fitted.metrics["val/loss"] == min(losses)
    assert _judged_again(model) == pytest.approx(min(losses))


def _judged_again(model: nn.Module) -> float:
    return evaluate(model, _data(40, seed=2), _tools(model, None).evaluator).metrics["val/loss"]


def test_the_weights_are_those_of_the_best_epoch_unless_the_last_are_asked_for() -> None:
    """Without patience the last epoch was logged, even where an earlier one was better."""
    for keeps in (True, False):
        model = _model()
        model.insert(1, nn.BatchNorm1d(8))  # whose running statistics belong to the weights
        fitted, logged = _fit(
            model, replace(PLAN, epochs=12), lr=0.9, best=BestWeights(keeps=keeps)
        )
        losses = [m["val/loss"] for _, m in logged if "val/loss" in m]
        best = losses.index(min(losses))
        assert 0 < best < 11 and not fitted.stopped_early and fitted.epochs == len(losses) == 12
        assert _judged_again(model) == pytest.approx(losses[best if keeps else -1])
        assert fitted.metrics["val/loss"] == losses[best if keeps else -1]
        assert fitted.metrics.get("train/best_epoch") == (best + 1 if keeps else None)


def test_weights_are_copied_only_where_training_goes_on_after_a_better_epoch() -> None:
    model, best = _model(), BestWeights()
    best.record(Evaluation({"val/loss": 2.0}), 1)
    best.keep(model)
    (kept, *_) = best.iterate_kept()
    first = kept.clone()
    with torch.no_grad():
        model[0].weight += 1
    best.record(Evaluation({"val/loss": 3.0}), 2)
    best.keep(model)  # worse: nothing is copied
    assert torch.equal(kept, first)
    best.record(Evaluation({"val/loss": 1.0}), 3)
    best.keep(model)
    assert torch.equal(kept, first + 1) and next(best.iterate_kept()) is kept
    one = BestWeights()
    _fit(_model(), replace(PLAN, epochs=1), best=one)
    assert list(one.iterate_kept()) == [] and one.epoch == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_validation_loss_that_is_no_number_is_never_the_best(bad: float) -> None:
    model, best = _model(), BestWeights()
    assert best.restore_best(model, Evaluation({"val/loss": bad})).metrics == {"val/loss": bad}
    for epoch, loss in enumerate((bad, 2.0, bad, bad), start=1):
        best.record(Evaluation({"val/loss": loss}), epoch)
        best.keep(model)
        with torch.no_grad():
            model[0].weight.fill_(epoch)
    assert best.waited == 2
    found = best.restore_best(model, Evaluation({"val/loss": bad}))
    assert found.metrics == {"val/loss": 2.0, "train/best_epoch": 2}
    assert (model[0].weight == 1).all()


def test_a_buffer_that_grows_is_kept_as_it_was() -> None:
    model, best = _model(), BestWeights()
    model.register_buffer("seen", torch.ones(2))
    best.record(Evaluation({"val/loss": 1.0}), 1)
    best.keep(model)
    model.seen = torch.zeros(5)
    best.record(Evaluation({"val/loss": 2.0}), 2)
    best.restore_best(model, Evaluation())
    assert model.seen.tolist() == [1, 1]


def test_clipping_bounds_the_gradients_of_every_step() -> None:
    model = _model()
    _, logged = _fit(model, replace(PLAN, log_every=1), clip_norm=1e-3)
    norms = [
        torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item(),
    ]
    assert norms[0] <= 1e-3 * 1.01
    assert all(m["train/grad_norm"] > 1e-3 for _, m in logged if "train/loss" in m)


def test_the_norm_that_is_logged_is_that_of_all_gradients_together() -> None:
    _, logged = _fit(_model(), replace(PLAN, log_every=1))
    plain, data = _model(), _data(100, seed=1)
    rows = draw_row_order(100, seed=0, epoch=0)[:16]
    nn.functional.cross_entropy(plain(data.x[rows]), data.y[rows]).backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm().item()
    found = next(metrics for _, metrics in logged if "train/loss" in metrics)
    assert found["train/grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_regression_is_judged_by_r2_and_mae() -> None:
    fitted, _ = _fit(
        _model(outputs=1),
        replace(PLAN, epochs=40),
        task="regression",
        loss=nn.functional.mse_loss,
    )
    assert fitted.metrics["val/r2"] > 0.9
    assert 0 < fitted.metrics["val/mae"] < 0.6


def test_evaluation_sees_the_model_without_dropout_and_leaves_no_gradient() -> None:
    model = nn.Sequential(_model(), nn.Dropout(0.9))
    model.train()
    tools = _tools(model, None)
    both = [evaluate(model, _data(40, seed=2), tools.evaluator) for _ in range(2)]
    assert both[0].metrics == both[1].metrics
    assert all(p.grad is None for p in model.parameters())


def test_a_users_own_loader_feeds_the_loop_and_its_waiting_is_timed() -> None:
    class Slow(torch.utils.data.Dataset):
        """Rows that take a while, as those of a network drive do."""

        def __len__(self) -> int:
            return 60

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            time.sleep(0.0005)
            return torch.full((6,), float(i % 3)), i % 2

    loaded = LoaderBatches(torch.utils.data.DataLoader(Slow(), batch_size=16), CPU)
    logged: list[dict[str, float]] = []
    tools = _tools(_model(), lambda metrics, step: logged.append(metrics))
    fitted = fit_model(_model(), loaded, _data(40, seed=2), schedule=PLAN, tools=tools)
    assert fitted.steps == 3 * 4 and "train/loss" in logged[0]
    phases = tools.accounts.phases.clock.compute_step_seconds()
    assert phases["data_wait"] > 0.004  # 16 rows of half a millisecond


class _Narrow:
    """Rows from the host, of which a device takes only so many at once, one batch at a time."""

    residency, copy_s, begins_again = "host", None, False

    def __init__(self, rows: int, *, most: int, from_step: int = 1) -> None:
        self._rows, self._most, self._from = _data(rows, seed=2), most, from_step
        self.last: tuple[weakref.ref, ...] = ()
        self.given: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def count_steps(self, batch_size: int) -> int:
        return self._rows.count_steps(batch_size)

    def draw_order(self, *, seed: int, epoch: int) -> torch.Tensor:
        return draw_row_order(len(self), seed=seed, epoch=epoch)

    def iterate_shuffled(self, batch_size, order, mark):
        yield from map(self._sent, self._rows.iterate_shuffled(batch_size, order, mark))

    def iterate_in_order(self, batch_size):
        yield from map(self._sent, self._rows.iterate_in_order(batch_size))

    def _sent(self, batch):
        assert not any(part() is not None for part in self.last), "the batch before is still there"
        if batch.rows > self._most and len(self.given) + 1 >= self._from:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
        batch = batch._replace(x=batch.x.clone(), y=batch.y.clone())
        self.last = weakref.ref(batch.x), weakref.ref(batch.y)
        self.given.append(batch.rows)
        return batch


def test_a_batch_is_gone_before_the_next_one_comes() -> None:
    """It was held until the next was there: a third batch on the device."""
    model = _model()
    train, val = _Narrow(100, most=16), _Narrow(40, most=1024)
    fitted = fit_model(
        model, train, val, schedule=PLAN, tools=_tools(model, lambda metrics, step: None)
    )
    assert sum(train.given) == 300 and sum(val.given) == 120 and fitted.steps == 21


@pytest.mark.parametrize("most", [39, 20, 3, 1])
def test_an_evaluation_whose_batch_finds_no_room_reads_fewer_rows(most: int) -> None:
    whole = _fit(_model())[0].metrics
    model, val = _model(), _Narrow(40, most=most)
    tools = _tools(model, lambda metrics, step: None)
    found = fit_model(model, _data(100, seed=1), val, schedule=PLAN, tools=tools).metrics
    assert found == pytest.approx(whole)
    assert max(val.given) <= most and sum(val.given) == 120
    assert most // 2 <= tools.evaluator.micro.rows <= most, "it is learnt once"


@pytest.mark.parametrize(
    ("train_most", "val_most", "phase", "step"), [(0, 99, "sending", 3), (99, 0, "eval", 7)]
)
def test_a_batch_without_room_is_told_with_its_phase_and_step(
    train_most: int, val_most: int, phase: str, step: int
) -> None:
    """All of it was told as the set-up of step 0."""
    model = _model()
    train = _Narrow(100, most=train_most, from_step=3)
    with pytest.raises(MemoryExhausted, match=f"in {phase}: CUDA out of memory") as ended:
        fit_model(
            model,
            train,
            _Narrow(40, most=val_most),
            schedule=PLAN,
            tools=_tools(model, lambda metrics, step: None),
        )
    assert (ended.value.failure.phase, ended.value.failure.step) == (phase, step)


def test_a_step_that_runs_out_of_memory_is_told_by_its_number() -> None:
    """Those who take the steps don't see the recorded ones, and counted without these."""
    model = _model()
    tools, calls = _tools(model, lambda metrics, step: None), []

    def step(batch, *, norm, watched):
        calls.append(1)
        if len(calls) == 5:
            raise MemoryExhausted(
                MemoryFailure("CUDA error: out of memory", "optimizer", tried=(4, 2))
            )
        return tools.step(batch, norm=norm, watched=watched)

    with pytest.raises(MemoryExhausted) as ended:
        fit_model(
            model,
            _data(100, seed=1),
            _data(40, seed=2),
            schedule=PLAN,
            tools=replace(tools, step=step),
        )
    failure = ended.value.failure
    assert (failure.phase, failure.step, failure.tried) == ("optimizer", 5, (4, 2))


def test_each_step_has_its_rate_and_is_told_if_it_is_a_log_point(monkeypatch) -> None:
    """The first step of an epoch is begun twice: after the last batch before it, which is of no
    use, and when its own epoch begins."""
    model, rates, norms, begun = _model(), [], [], []
    tools = _tools(model, lambda metrics, step: None)

    def step(batch, *, norm, watched):
        norms.append(norm)
        return tools.step(batch, norm=norm, watched=watched)

    def begin(step, *, is_log_point, is_sampled):
        begun.append((step, is_log_point))

    monkeypatch.setattr(tools.optimizer, "set_lr", rates.append)
    monkeypatch.setattr(tools.accounts.phases, "begin", begin)
    made = replace(tools, step=step, rate=lambda step: 0.5**step)
    fit_model(
        model, _data(40, seed=1), _data(9, seed=2), schedule=replace(PLAN, max_steps=7), tools=made
    )
    points = {4: True, 7: True, 8: True}
    assert rates == [0.5**step for step in range(7)]
    assert norms == [points.get(step, False) for step in range(1, 8)]
    assert begun == [(step, points.get(step, False)) for step in (1, 2, 3, 4, 4, 5, 6, 7, 7, 8)]


def test_an_allocator_that_had_to_free_its_cache_is_asked_for_less_at_log_points(
    monkeypatch,
) -> None:
    model, eased = _model(), []
    tools = _tools(model, lambda metrics, step: None)
    monkeypatch.setattr(tools.micro, "ease", eased.append)
    given = _data(40, seed=1), _data(9, seed=2)
    fit_model(model, *given, schedule=PLAN, tools=tools)
    assert eased == []
    monkeypatch.setattr(tools.accounts.phases.meter, "is_thrashing", lambda: True)
    fit_model(model, *given, schedule=PLAN, tools=tools)
    assert eased == ["the allocator had to free its cache twice running"] * 3  # steps 4, 8, 9


def test_the_same_answer_to_all_rows_is_kept_beside_the_metrics() -> None:
    model = nn.Sequential(nn.Linear(6, 2))
    nn.init.zeros_(model[0].weight)
    fitted, logged = _fit(model, replace(PLAN, epochs=1), lr=0.0)
    assert fitted.evaluation.is_constant
    assert all(name.startswith(("val/", "train/")) for name in fitted.metrics)


@pytest.mark.parametrize(
    ("patience", "epochs", "lasted", "early"),
    [(0, 5, 5, False), (1, 5, 2, True), (2, 5, 3, True), (1, 2, 2, False)],
)
def test_training_stops_after_as_many_epochs_without_a_better_one_as_patience_has(
    patience: int, epochs: int, lasted: int, early: bool
) -> None:
    """With a rate of 0 no epoch is better than the first. The last epoch ends it anyway."""
    fitted, _ = _fit(_model(), replace(PLAN, patience=patience, epochs=epochs), lr=0.0)
    assert (fitted.epochs, fitted.stopped_early) == (lasted, early)
    assert fitted.steps == 7 * lasted


def test_the_seconds_of_a_training_have_names() -> None:
    """Those of the first step, which compiles, are not in the speed of the others."""
    model, slept = _model(), []
    tools = _tools(model, lambda metrics, step: None)

    def step(batch, *, norm, watched):
        if not slept:
            slept.append(time.sleep(0.3))
        return tools.step(batch, norm=norm, watched=watched)

    made = replace(tools, step=step)
    fit_model(
        model, _data(40, seed=1), _data(9, seed=2), schedule=replace(PLAN, epochs=2), tools=made
    )
    assert tools.accounts.watch.seconds["first_step"] > 0.3
    assert {"setup", "first_step", "eval", "log", "checkpoint"} <= set(tools.accounts.watch.seconds)


def test_the_batch_of_an_error_is_the_one_that_was_trained_or_judged_on() -> None:
    """What a user calls x and y is none."""
    model = _model()
    tools = _tools(model, lambda metrics, step: None)

    def fails(batch, *, norm, watched):
        raise ValueError("theirs")

    def judges(outputs, y):
        x = y = 0  # noqa: F841
        raise ValueError("theirs")

    data = _data(40, seed=1)
    state = replace(tools, step=fails, train=data)
    with pytest.raises(ValueError):
        loop.fit_model(state, PLAN)
    first = draw_row_order(40, seed=0, epoch=0)[:16]
    x, y, *_ = state.take_batch()
    assert torch.equal(x, data.x[first]) and torch.equal(y, data.y[first])
    assert state.take_batch() is None, "nobody keeps it any longer"
    evaluator = replace(tools.evaluator, loss=judges)
    state = replace(tools, evaluator=evaluator)
    with pytest.raises(ValueError):
        evaluate(model, data, evaluator)
    assert torch.equal(state.take_batch()[0], data.x) and state.take_batch() is None


def test_no_batch_is_kept_once_its_step_or_its_evaluation_is_done() -> None:
    state = _tools(_model(), lambda metrics, step: None)
    loop.fit_model(state, PLAN)
    assert state.batch is None and state.evaluator.batch is None


@pytest.mark.parametrize("every", [1, 3, 5, 7])
def test_evaluations_within_an_epoch_change_no_weight_and_are_logged_at_their_steps(
    every: int,
) -> None:
    model, plain = _model(), _model()
    model.insert(1, nn.Dropout(0.3))
    plain.insert(1, nn.Dropout(0.3))
    torch.manual_seed(5)
    _fit(plain, best=BestWeights(keeps=False))
    torch.manual_seed(5)
    plan = replace(PLAN, eval_every_steps=every)
    fitted, logged = _fit(model, plan, best=BestWeights(keeps=False))
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
    found = {step: m["train/epoch"] for step, m in logged if "val/loss" in m}
    assert sorted(found) == sorted({*range(every, 21, every), 7, 14, 21})
    assert all(epoch == pytest.approx(step / 7) for step, epoch in found.items())
    losses = [step for step, m in logged if "train/loss" in m]
    assert losses == [4, 8, 12, 16, 20, 21]
    assert _judged_again(model) == pytest.approx(fitted.metrics["val/loss"])


def test_the_best_weights_may_be_those_within_an_epoch() -> None:
    model = _model()
    plan = replace(PLAN, epochs=2, eval_every_steps=2)
    fitted, logged = _fit(model, plan, lr=0.5)
    losses = {m["train/epoch"]: m["val/loss"] for _, m in logged if "val/loss" in m}
    best = min(losses, key=lambda epoch: losses[epoch])
    assert not float(best).is_integer(), "no test: choose another rate"
    assert fitted.metrics["train/best_epoch"] == best
    assert _judged_again(model) == pytest.approx(losses[best])


def test_the_time_of_evaluations_within_an_epoch_is_no_time_of_steps() -> None:
    class Slow(_Narrow):
        def iterate_in_order(self, batch_size):
            time.sleep(0.3)
            yield from super().iterate_in_order(batch_size)

    began = time.perf_counter()
    model = _model()
    tools = _tools(model, lambda metrics, step: None)
    plan = replace(PLAN, epochs=1, log_every=1, eval_every_steps=1)
    fit_model(model, _data(80, seed=1), Slow(40, most=1024), schedule=plan, tools=tools)
    total_s = time.perf_counter() - began
    spent = tools.accounts.watch.seconds
    assert spent["eval"] >= 5 * 0.3 and spent["steps"] + spent["first_step"] < 1.0
    found = tools.accounts.summarize(steps=5, rows=80)
    assert sum(spent.values()) <= total_s + 0.01
    phases_ms = sum(v for k, v in found.items() if k in ("time/data_wait_ms", "time/forward_ms"))
    assert phases_ms < 200  # an evaluation is 300
    assert found["speed/steps_per_s"] > 5


def test_averaged_weights_are_judged_and_logged_and_the_others_are_trained() -> None:
    """Held against a loop with PyTorch's AveragedModel."""
    model, plain = _model(), _model()
    tools = _tools(
        model, lambda metrics, step: logged.append(metrics), best=BestWeights(keeps=False)
    )
    tools.optimizer.keep_average(0.9)
    logged: list[dict[str, float]] = []
    data, val = _data(100, seed=1), _data(40, seed=2)
    fitted = fit_model(model, data, val, schedule=replace(PLAN, eval_every_steps=5), tools=tools)
    reference = optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.01, beta1=0.9, beta2=0.99)
    average = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses, step = [], 0
    for epoch in range(3):
        orders = draw_row_order(100, seed=0, epoch=epoch).split(16)
        for batch, rows in enumerate(orders, start=1):
            reference.zero_grad()
            nn.functional.cross_entropy(plain(data.x[rows]), data.y[rows]).backward()
            reference.step()
            average.update_parameters(plain)
            step += 1
            if step % 5 == 0 or batch == len(orders):
                losses.append(_judged_again(average.module))
    assert [m["val/loss"] for m in logged if "val/loss" in m] == losses
    for a, b, trained in zip(
        model.parameters(), average.module.parameters(), tools.optimizer.averages, strict=True
    ):
        assert torch.equal(a, b) and not torch.equal(a, trained)
    for trained, b in zip(tools.optimizer.averages, plain.parameters(), strict=True):
        assert torch.equal(trained, b)
    assert fitted.metrics["val/loss"] == losses[-1]


def _follow_torch(o: OptimConfig, *, every: int) -> tuple[nn.Module, list[float]]:
    """A loop as PyTorch's pages have it: its optimizer, its schedule, called after each step, or of
    a plateau after each evaluation."""
    model, data, losses, rates = _model(), _data(100, seed=1), [], []
    reference = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=(0.9, 0.99), weight_decay=0.01)
    cycle = plateau = None
    if o.schedule == "plateau":
        plateau = ReduceLROnPlateau(reference, factor=0.1, patience=1, threshold_mode="abs")
    else:
        cycle = OneCycleLR(reference, o.lr, total_steps=84, cycle_momentum=False)
    step = 0
    for epoch in range(12):
        orders = draw_row_order(100, seed=0, epoch=epoch).split(16)
        for batch, rows in enumerate(orders, start=1):
            rates.append(reference.param_groups[0]["lr"])
            reference.zero_grad()
            nn.functional.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
            reference.step()
            step += 1
            if cycle is not None:
                cycle.step()
            if plateau is not None and (step % every == 0 or batch == len(orders)):
                losses.append(_judged_again(model))
                model.train()
                plateau.step(losses[-1])
    return model, rates[:step]


@pytest.mark.parametrize("schedule", ["one_cycle", "plateau"])
def test_a_run_with_a_schedule_is_the_loop_that_pytorchs_pages_show(schedule: str) -> None:
    """The rates are the same to the bit; the weights are those of the fused kernel, which rounds
    otherwise."""
    o = OptimConfig(lr=0.1, schedule=schedule)
    if schedule == "plateau":
        o = o.model_copy(update={"warmup": 0, "schedule_args": {"patience": 1}})
    rate = optim.make_schedule(o, steps=84)
    logged: list[tuple[int, dict[str, float]]] = []
    model = _model()
    tools = _tools(model, lambda m, step: logged.append((step, m)), best=BestWeights(keeps=False))
    tools = replace(tools, rate=rate)
    plan = replace(PLAN, epochs=12, eval_every_steps=3, log_every=1)
    fit_model(model, _data(100, seed=1), _data(40, seed=2), schedule=plan, tools=tools)
    theirs, rates = _follow_torch(o, every=3)
    assert [m["train/lr"] for _, m in logged if "train/lr" in m] == rates
    assert len(set(rates)) >= 3
    for a, b in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
