"""Says whether a window of a run, trained anew, came out as it did then: by the digests that the
run kept of its steps, by all that it logged, and by the whole state in its next checkpoint. Where
something differs, it is trained once more, so that what this machine cannot repeat is not taken for
a fault of the run; and operations that need not come out the same each time are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite, isnan
from pathlib import Path

from torch import Tensor

from headroom.comparison.bit_differences import describe_difference, explain_by_one_bit, flip_bit
from headroom.comparison.retraining import (
    LOGGED,
    Recorded,
    Retraining,
    WindowDone,
    choose_window,
    list_changes,
    open_retraining,
    read_recorded,
)
from headroom.comparison.unrepeatable_operations import ask_pytorch, collect_unrepeatable
from headroom.settings.read_settings import ConfigError
from headroom.training.checkpoint_files import DamagedCheckpoint, flatten_state, read_checkpoint
from headroom.training.kept_steps import CHECKPOINTS
from headroom.training.step_digests import compute_digest, name_tensors
from headroom.training.train_state import TrainState
from headroom.watch.step_metrics import Diverged

STEPS = 1000  # of a window, where nobody says how many
STATE = ("model", "optimizer", "scaler")  # of a checkpoint
# The same where both were written on the same side of the evaluation at the end of an epoch, which
# is a matter of when the one before was on disk. Where the best weights lie depends on that too.
BESIDE = ("random", "schedule", "rows")
NAMING_STEPS = 3  # in which operations are named at least
AS_RECORDED = "trained a second time here, it came out as in the run: the first time differs"
ALIKE = "trained twice here, it came out the same both times: the run itself differs"
OTHERWISE = "trained twice here, it came out otherwise each time"


@dataclass(frozen=True)
class Flip:
    """A bit that is flipped in the training anew, to see that it is found. Empty name: of the first
    weight."""

    step: int = 0  # 0: in the middle of the window
    tensor: str = ""
    element: int = 0
    bit: int = 0


@dataclass(frozen=True)
class Difference:
    """The first thing that differs."""

    step: int
    tensor: str
    what: str  # by how much
    why: str = ""  # whose it is
    more: str = ""  # what else differs at that step


@dataclass(frozen=True)
class Verification:
    """What was compared, and what came out."""

    begin: int  # the step of the checkpoint that it was trained from; 0: from its start
    end: int
    digest_steps: int = 0  # whose digests were compared
    tensors: int = 0  # of the last of these
    logged: int = 0  # values
    state_step: int | None = None  # of the checkpoint whose state was compared
    state_tensors: int = 0
    difference: Difference | None = None
    operations: tuple[str, ...] = ()  # by which a difference is no fault
    other_digests: bool = False  # of another version, which were not compared
    environment: tuple[str, ...] = ()  # what differs in it


def verify_run(
    folder: Path, *, begin: int | None = None, steps: int = STEPS, flip: Flip | None = None
) -> Verification:
    """Train a window of this run anew and compare it. Raises ConfigError where that can't be done,
    and whatever a training is refused by."""
    recorded = read_recorded(folder)
    begin, end = choose_window(recorded, begin, steps)
    flip = _complete(flip, begin, end)
    with open_retraining(recorded, begin) as again:
        comparer = Comparer(recorded, begin, flip)
        found = _compare(again, end, comparer)
        if found.difference is not None:
            found = _judge(again, end, found, comparer)
        return replace(found, environment=tuple(list_changes(again)))


def _complete(flip: Flip | None, begin: int, end: int) -> Flip | None:
    """Return the flip with a step of the window. Raises ConfigError for one of another."""
    if flip is None:
        return None
    flip = replace(flip, step=flip.step or (begin + end + 1) // 2)
    if not begin < flip.step <= end:
        raise ConfigError(
            f"--flip: step {flip.step:,} is not in the window, {begin + 1:,} to {end:,}"
        )
    return flip


@dataclass
class Comparer:
    """Compares each step of a training anew, and what is logged, with what the run has kept; the
    first difference ends it."""

    recorded: Recorded
    equal_step: int  # the last one known to be equal
    flip: Flip | None = None
    step: int = 0
    digest_steps: int = 0
    tensors: int = 0
    logged: int = 0
    difference: Difference | None = None
    taken: Mapping[str, Tensor] = field(default_factory=dict)  # of the step whose digests differ

    def end_step(self, state: TrainState, step: int, loss: Tensor) -> None:
        """Compare the digests of this step, where the run has kept some."""
        self.step = step
        if self.flip is not None and self.flip.step == step:
            loss = _flip(state, loss, self.flip)
        then = self.recorded.digests.steps.get(step)
        if then is None:
            return
        named = name_tensors(state, loss)
        now = {name: int(compute_digest(tensor)) for name, tensor in named.items()}
        self.digest_steps, self.tensors = self.digest_steps + 1, len(now)
        differ = [n for n in {**now, **then} if now.get(n) != then.get(n)]
        if differ:
            self.taken = _copy_tensors(named)
            is_here, was_there = differ[0] in now, differ[0] in then
            what = "its digest is another" if was_there else "it is only here"
            what = what if is_here else "it is only in the run"
            more = self._describe_others(step, len(differ) - 1)
            self.difference = Difference(step, differ[0], what, more=more)
            raise WindowDone
        self.equal_step = step

    def _describe_others(self, step: int, others: int) -> str:
        texts = [f"{others} more of its {self.tensors} tensors differ"] if others else []
        if self.equal_step < step - 1:
            texts.append(f"the steps since {self.equal_step:,}, which was equal, have no digests")
        return "; ".join(texts)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Compare what was logged at this step."""
        for name, value in metrics.items():
            then = self.recorded.logged.get((name, step))
            if then is None or not name.startswith(LOGGED):
                continue
            self.logged += 1
            if then != value and not (isnan(then) and isnan(value)):
                what = f"{then!r} was logged, and is {value!r} now"
                self.difference = Difference(step, name, what)
                raise WindowDone

    def diverge(self, message: str) -> None:
        """Compare that the loss is no number any more with what the run has logged from there on:
        one that did the same has no loss there, though it may have noticed some steps later."""
        logged = self.recorded.logged.items()
        known = [at for (name, at), loss in logged if name == "train/loss" and isfinite(loss)]
        if self.difference is None and max(known, default=0) >= self.step:
            self.difference = Difference(self.step, "train/loss", f"only here: {message}")


def _flip(state: TrainState, loss: Tensor, flip: Flip) -> Tensor:
    """Flip a bit of the training's own tensors; return its loss, which is a copy."""
    named = name_tensors(state, loss)
    flip_bit(named, flip.tensor, flip.element, flip.bit)
    return named["loss"]


def _copy_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def _compare(again: Retraining, end: int, comparer: Comparer) -> Verification:
    """Return what comes out of training anew."""
    recorded = again.recorded
    has_state = end in recorded.kept
    folder = None
    try:
        folder = again.train(end, end_step=comparer.end_step, log=comparer.log, keeps=has_state)
    except Diverged as error:
        comparer.diverge(str(error))
    found = Verification(
        begin=again.begin,
        end=comparer.step,
        digest_steps=comparer.digest_steps,
        tensors=comparer.tensors,
        logged=comparer.logged,
        difference=comparer.difference,
        other_digests=recorded.digests.others,
    )
    if folder is None or not has_state or found.difference is not None or found.end != end:
        return found
    count, difference = _compare_states(recorded.folder, folder, end)
    return replace(found, state_step=end, state_tensors=count, difference=difference)


def _judge(again: Retraining, end: int, found: Verification, comparer: Comparer) -> Verification:
    """Return what was found with whose difference it is."""
    first = found.difference
    assert first is not None
    if not again.config.train.deterministic and (names := _name_operations(again, first.step)):
        return replace(found, operations=names)
    if comparer.taken:
        return replace(found, difference=_explain_tensor(again, first, comparer.taken))
    second = _compare(again, end, Comparer(again.recorded, again.begin)).difference
    why = AS_RECORDED if second is None else ALIKE if second == first else OTHERWISE
    return replace(found, difference=replace(first, why=why))


def _name_operations(again: Retraining, last: int) -> tuple[str, ...]:
    """Return the operations up to this step that need not come out the same each time."""

    def end_step(state: TrainState, step: int, loss: Tensor) -> None:
        # Behind each second step: the others take the operations that the run took.
        ask_pytorch((step - again.begin) % 2 == 1)

    with collect_unrepeatable() as names, suppress(Diverged):
        again.train(max(last, again.begin + NAMING_STEPS), end_step=end_step)
    return tuple(sorted(names))


def _explain_tensor(
    again: Retraining, first: Difference, taken: Mapping[str, Tensor]
) -> Difference:
    """Return how the tensor whose digest differs does so, after a second training anew up to its
    step."""
    digest = again.recorded.digests.steps[first.step].get(first.tensor)
    mine, other = taken.get(first.tensor), _train_to(again, first.step).get(first.tensor)
    if mine is None or other is None or digest is None:
        return first
    if gap := describe_difference(other, mine):
        is_as_then = int(compute_digest(other)) == digest
        return replace(first, what=gap, why=AS_RECORDED if is_as_then else OTHERWISE)
    what = explain_by_one_bit(mine, digest) or (
        "more than one bit differs, and of the run only a digest was kept"
    )
    return replace(first, what=what, why=ALIKE)


def _train_to(again: Retraining, last: int) -> dict[str, Tensor]:
    """Return copies of the tensors of this step, trained anew."""
    taken: dict[str, Tensor] = {}

    def end_step(state: TrainState, step: int, loss: Tensor) -> None:
        if step == last:
            taken.update(_copy_tensors(name_tensors(state, loss)))
            raise WindowDone

    again.train(last, end_step=end_step)
    return taken


def _compare_states(then: Path, now: Path, step: int) -> tuple[int, Difference | None]:
    """Return how many tensors two checkpoints of this step have, and the first difference."""
    try:
        before = read_checkpoint(then / CHECKPOINTS, step)
    except DamagedCheckpoint as error:
        return 0, Difference(step, "checkpoint", str(error))
    after = read_checkpoint(now / CHECKPOINTS, step)
    is_alike = before.about["position"] == after.about["position"]
    count = 0
    for part in (*STATE, *(BESIDE if is_alike else ())):
        sides: list[dict[str, Tensor]] = [{}, {}]
        plain = [
            flatten_state(one.state.get(part), side, part)
            for one, side in zip((before, after), sides, strict=True)
        ]
        count += len(sides[0])
        for name, tensor in sides[0].items():
            if name not in sides[1]:
                return count, Difference(step, f"checkpoint {name}", "it is only in the run")
            if what := describe_difference(tensor, sides[1][name]):
                return count, Difference(step, f"checkpoint {name}", what)
        if repr(plain[0]) != repr(plain[1]):
            return count, Difference(step, f"checkpoint {part}", "its numbers differ")
    return count, None
