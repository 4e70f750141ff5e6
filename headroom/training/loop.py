"""The training loop: batch, step, log, and an evaluation after each epoch. It is handed the state
of a training, in which all is ready, and reports through one function, `log(metrics, step)`; it
waits for the device at readings only, and stops where the loss is no longer a number. How long it
may go on for now is limited by seconds, a time of the clock, or a request; no step is ever cut.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import count, islice

from headroom.base.scores import Evaluation
from headroom.data.batch import Batch
from headroom.ranks.ranks import Ranks
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import TrainConfig
from headroom.training.checkpoints import TrainingPosition
from headroom.training.evaluation import evaluate
from headroom.training.losses import NO_ORIGIN, NanOrigin, sum_rows
from headroom.training.micro_batches import name_oom_phase
from headroom.training.optim import Plateau
from headroom.training.plan import Schedule
from headroom.training.train_state import TrainState
from headroom.watch.accounts import LoopFacts
from headroom.watch.layers import Layers


@dataclass(frozen=True)
class StopRequest:
    """A request to write a checkpoint now, and where it says so to end the training."""

    reason: str  # of an end that is none of the training's own; see TrainingResult
    ends: bool = True  # the training, after the checkpoint
    act: Callable[[], None] = lambda: None  # called when it is written: a signal raises here


StopCheck = Callable[[], StopRequest | None]


@dataclass(frozen=True)
class TrainingResult:
    """What a loop has come to."""

    steps: int
    epochs: int
    rows: int  # trained on, each as often as it was
    stopped_early: bool
    stopped: str  # why it ended before it was done; empty: it is done
    evaluation: Evaluation  # of the weights that the model has: the best epoch's, or the last
    tested: Evaluation | None = None  # on the rows that were put aside

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics of both evaluations."""
        return {**self.evaluation.metrics, **(self.tested.metrics if self.tested else {})}


def fit_model(
    state: TrainState, schedule: Schedule, *, check_stop: StopCheck = lambda: None
) -> TrainingResult:
    """Train the model in place and return the validation metrics reached. check_stop: is called
    after each step.

    Raises Diverged for a loss that is not finite: on a CPU at the next reading, elsewhere at the
    one after it, and at the latest when the epoch ends.
    """
    model, train, accounts, best = state.model, state.train, state.accounts, state.best
    checkpoints, optimizer = state.checkpoints, state.optimizer
    evaluation = Evaluation()
    of_epoch = train.count_steps(schedule.batch_size)
    last_step = schedule.count_steps(of_epoch)
    find_layers = partial(Layers, [state.model], state.optimizer.iterate_state)
    accounts.begin_training(
        LoopFacts(
            *(last_step, schedule.log_every, state.rate, state.speeds), find_layers=find_layers
        )
    )
    checkpoints.resume(state)
    begin = state.position
    step, epoch, rows = begin.step, begin.epoch - (begin.batch == 0), begin.rows
    eval_every = schedule.eval_every_steps
    _keep_best(state)  # where the evaluation before was the best
    stop: StopRequest | None = None
    stopped_early = 0 < schedule.patience <= best.waited and step < last_step
    is_judged = begin.batch == 0 or (eval_every is not None and step % eval_every == 0)
    is_done = is_judged and (stopped_early or (begin.batch == 0 and step == last_step))
    stopped_early &= is_done  # else what is left is judged once more
    accounts.lap("setup")
    is_summed = train.residency == "loader"  # else its rows were looked at before

    with name_oom_phase("training", step=lambda: step):
        for epoch in range(begin.epoch, 0 if is_done else schedule.epochs):
            model.train()
            done = 0 if train.begins_again else state.position.batch
            order = train.draw_order(seed=schedule.seed, epoch=epoch)[done * schedule.batch_size :]
            take_step = state.choose_step()
            accounts.begin_epoch(epoch, step + 1)
            batches = train.iterate_shuffled(schedule.batch_size, order, accounts.mark)
            sent = _send_batches(batches, step=lambda: step + 1)  # noqa: B023 (asked while it is this)
            for batch in islice(sent, last_step - step):
                state.batch = batch
                optimizer.set_lr(state.rate(step))
                checkpoints.let_go_on()
                step, done = step + 1, done + 1
                is_read = accounts.is_log_point
                with accounts.count_step(batch):
                    outcome = take_step(batch, norm=is_read, watched=accounts.watched)
                state.end_step(state, step, outcome.loss)
                rows += batch.rows
                sums = sum_rows(batch.x, batch.y) if is_summed else ()
                is_blamed = sums or state.outputs
                nan_origin = NanOrigin(sums, tuple(state.outputs)) if is_blamed else NO_ORIGIN
                accounts.end_step(step, *outcome, rows=batch.rows, blame=nan_origin.find_blame)
                state.outputs.clear()
                if is_read:
                    take_step = state.choose_step()
                    if accounts.is_short_of_memory():
                        state.micro.ease("the allocator had to free its cache twice running")
                del batch
                state.batch = None  # gone before the next one comes
                state.position = TrainingPosition(step, epoch, done, rows)
                if done < of_epoch:  # else it is judged first
                    if eval_every is not None and step % eval_every == 0 and step < last_step:
                        accounts.end_epoch()
                        evaluation = _judge_weights(state, epoch + done / min(of_epoch, last_step))
                        stopped_early = 0 < schedule.patience <= best.waited
                        if stopped_early:
                            break
                        _keep_weights(state)
                        model.train()
                        accounts.begin_epoch(epoch, step + 1)
                    else:
                        checkpoints.end_step(state)
                    stop = _handle_stop(state, check_stop) if step < last_step else None
                if stop is not None:
                    break
            sent.close()  # where max_steps ends it, batches are left
            accounts.end_epoch()
            if stop is not None:
                break
            if not stopped_early:  # within the epoch
                evaluation = _judge_weights(state, epoch + 1.0)
                is_enough = 0 < schedule.patience <= best.waited
                stopped_early = is_enough and step < last_step
                state.position = TrainingPosition(step, epoch + 1, 0, rows)
            if stopped_early or step == last_step:
                checkpoints.finish(state)
                accounts.lap("checkpoint")
                break
            _keep_weights(state)
            stop = _handle_stop(state, check_stop)
            if stop is not None:
                break
        optimizer.swap_averages()  # what is logged
        if not evaluation.metrics and not best.has_weights:  # ended before an evaluation was
            evaluation = evaluate(model, state.val, state.evaluator)
    ended = stop.reason if stop is not None else ""
    evaluation = best.restore_best(model, evaluation)
    return TrainingResult(step, epoch + 1, rows, stopped_early, ended, evaluation)


def _judge_weights(state: TrainState, epoch: float) -> Evaluation:
    """Return an evaluation, whose metrics are logged; epoch: how many are done."""
    with state.optimizer.use_averages():
        evaluation = evaluate(state.model, state.val, state.evaluator)
    state.accounts.lap("eval")
    state.accounts.log({**evaluation.metrics, "train/epoch": epoch}, state.position.step)
    state.accounts.lap("log")
    state.best.record(evaluation, epoch)
    if isinstance(state.rate, Plateau):
        state.rate.record(evaluation.metrics)
    return evaluation


def _keep_weights(state: TrainState) -> None:
    """Keep what was evaluated, where it is time to or it is the best; training goes on."""
    state.checkpoints.end_epoch(state, is_best=state.best.is_now)
    state.checkpoints.let_go_on()
    _keep_best(state)
    state.accounts.lap("checkpoint")


def _keep_best(state: TrainState) -> None:
    """Copy the weights that are logged, where those of now are the best."""
    if state.best.is_now:
        with state.optimizer.use_averages():
            state.best.keep(state.model)


def _handle_stop(state: TrainState, check_stop: StopCheck) -> StopRequest | None:
    """Return whether the training ends here for now; there is a checkpoint then."""
    stop = check_stop()
    if stop is None:
        return None
    accounts, position = state.accounts, state.position
    accounts.end_epoch()  # a checkpoint is no wait for the batch of the step that has begun
    state.checkpoints.save(state, last=True)
    accounts.lap("checkpoint")
    stop.act()
    if stop.ends:
        return stop
    accounts.begin_epoch(position.epoch, position.step + 1)
    return None


def _send_batches(
    batches: Iterator[Batch], *, step: Callable[[], int]
) -> Generator[Batch, None, None]:
    """Yield the same batches; one that finds no room has run out of memory at that step."""
    with name_oom_phase("sending", step=step):
        yield from batches


class TimeBudget:
    """Checks after each step whether it is the last one for now."""

    def __init__(
        self,
        train: TrainConfig,
        asked: StopCheck,
        *,
        passed_s: Callable[[], float] = time.monotonic,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """asked: what else may want an end; it is heard first. passed_s: seconds, whatever somebody
        does to the clock of the host, which is now_s, Unix time."""
        self._asked = asked
        self._clock, self._end_s, self._why = passed_s, math.inf, ""
        if train.end_after_s is not None:
            self._end_s = passed_s() + train.end_after_s
            self._why = f"train.end: {train.end} are over"
        elif train.end_clock is not None:
            self._clock, self._end_s = now_s, compute_end_time(train.end_clock, now_s())
            self._why = f"train.end: it is {train.end}"

    def compute_left_s(self) -> float:
        """Return the seconds until the end; infinity where there is none."""
        return self._end_s - self._clock()

    def __call__(self) -> StopRequest | None:
        stop = self._asked()
        if stop is None and self._clock() >= self._end_s:
            return StopRequest(self._why)
        return stop


def agree_on_stop(stop: StopCheck, ranks: Ranks, *, every: int) -> StopCheck:
    """Return `stop` itself where one process trains; else a check of what the lead was asked,
    every so many steps, since all ranks have to end at the same one."""
    if ranks.is_alone:
        return stop
    calls = count(1)

    def agree() -> StopRequest | None:
        if next(calls) % every:
            return None
        request = stop() if ranks.is_lead else None
        if not ranks.broadcast_flag(request is not None):
            return None
        reason, ends = ranks.broadcast((request.reason, request.ends) if request else ("", True))
        return request or StopRequest(
            reason, ends=ends, act=leave_training if ends and not reason else lambda: None
        )

    return agree


class TrainingLeft(Exception):
    """The training ended for now, since its lead was asked to; there is a checkpoint."""


def leave_training() -> None:
    """Raise TrainingLeft."""
    raise TrainingLeft


def compute_end_time(end: str, now_s: float) -> float:
    """Return the Unix time of `end`: a time of day, the next there is, or a date and a time.

    Raises ConfigError for one that has passed.
    """
    now = datetime.fromtimestamp(now_s)
    if len(end) > len("HH:MM"):
        clocks = [datetime.strptime(end, "%Y-%m-%d %H:%M")]
    else:
        time_of_day = datetime.strptime(end, "%H:%M").time()
        clocks = [datetime.combine(now + timedelta(days=n), time_of_day) for n in range(3)]
    ends = (end_s for clock in clocks for end_s in _find_unix_times(clock))
    end_s = min((end_s for end_s in ends if end_s > now_s), default=None)
    if end_s is None:
        raise ConfigError(f"train.end: {end} has passed (it is {now:%Y-%m-%d %H:%M})")
    return end_s


def _find_unix_times(clock: datetime) -> list[float]:
    """Return when the clock of the host shows that: twice in the hour that comes twice. One that
    is left out in spring is there when the clock passes over it."""
    times = sorted(clock.replace(fold=fold).timestamp() for fold in (0, 1))
    shown = [time_s for time_s in times if datetime.fromtimestamp(time_s) == clock]
    between = range(int(times[0]), int(times[1]) + 1)
    passed = bisect_left(between, True, key=lambda at: datetime.fromtimestamp(at) >= clock)
    return shown or [float(between[passed])]
