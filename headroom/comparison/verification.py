"""Trains a window of a run anew, from one of its checkpoints or from its start, and says whether
each step came out as it did then: by the digests that the run kept of its steps, by all that it
logged, and by the whole state in its next checkpoint. The run is only read: what is trained anew
lies in a folder of its own, which is removed. Where something differs, it is trained once more, so
that what this machine cannot repeat is not taken for a fault of the run.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headroom.base.event_log import LOG, read_begins, read_end, read_metric_batches
from headroom.base.facts import DataFacts, DeviceFacts
from headroom.base.units import make_printable
from headroom.comparison.bit_differences import describe_difference, explain_by_one_bit, flip_bit
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.device.leases import Leases, find_lease_folder
from headroom.launch.placement import count_processes
from headroom.settings.read_settings import (
    ConfigError,
    check_imports,
    collect_params,
    override_config,
    resolve_config,
    restore_config_secrets,
    select_params,
)
from headroom.settings.run_config import RunConfig
from headroom.training import trainer
from headroom.training.checkpoint_files import (
    DamagedCheckpoint,
    NewerCheckpoint,
    flatten_state,
    read_checkpoint,
    read_record,
    verify_checkpoint,
)
from headroom.training.compatibility import describe_code
from headroom.training.kept_steps import CHECKPOINTS, list_steps
from headroom.training.loop import StopRequest
from headroom.training.plan import make_plan
from headroom.training.step_digests import (
    compute_digest,
    describe_environment,
    name_tensors,
    read_digests,
)
from headroom.training.train_state import TrainState

STEPS = 1000  # of a window, where nobody says how many
LOGGED = ("train/", "val/")  # of the model; the others are of the machine
STATE = ("model", "optimizer", "scaler")  # of a checkpoint
# The same where both were written on the same side of the evaluation at the end of an epoch, which
# is a matter of when the one before was on disk. Where the best weights lie depends on that too.
BESIDE = ("random", "schedule", "rows")
OF_STEPS = ("data.", "model.", "optim.", "train.")  # settings that a step depends on, but for:
ELSEWHERE = ("data.path", "data.cache", "data.memory_mib", "data.target_transform", "train.end")
AS_RECORDED = "trained a second time here, it came out as in the run: the first time differs"
ALIKE = "trained twice here, it came out the same both times: the run itself differs"
OTHERWISE = "trained twice here, it came out otherwise each time"
_NOT_REPEATABLE = re.compile(r"^(\S+) does not have a deterministic implementation")


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
    environment: tuple[str, ...] = ()  # what differs in it


@dataclass(frozen=True)
class Recorded:
    """What a run has left behind that a training anew can be compared with."""

    folder: Path
    kept: tuple[int, ...]  # steps of its checkpoints, the oldest first
    digests: Mapping[int, Mapping[str, int]]
    environment: Mapping[str, str]
    logged: Mapping[tuple[str, int], float]
    end: Mapping[str, Any]

    def find_last_step(self) -> int:
        """Return the last step that something is known of."""
        steps = [*self.kept, *self.digests, *(step for _, step in self.logged)]
        return max(steps, default=0)


def read_recorded(folder: Path) -> Recorded:
    """Return what the run of this folder has left. Raises ConfigError where it is no training of
    ours, or where there is nothing to compare with."""
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"RUN: {folder.name} is no training of `flows.train`, or has not begun: the loop of an "
            "account or of a framework is not known here, so it can't be trained anew"
        )
    digests, environment = read_digests(folder)
    kept = tuple(sorted(list_steps(folder / CHECKPOINTS)))
    recorded = Recorded(
        folder, kept, digests, environment, _read_logged(folder / LOG), read_end(folder)
    )
    if not recorded.find_last_step():
        raise ConfigError(
            f"RUN: {folder.name} has no checkpoint, and logged no step: nothing to compare with"
        )
    return recorded


def _read_logged(log: Path) -> dict[tuple[str, int], float]:
    logged: dict[tuple[str, int], float] = {}
    if log.is_file():
        with open(log, "rb") as lines:
            for batch, _ in read_metric_batches(lines, 0):
                for name, value, _, step in batch:
                    if step and name.startswith(LOGGED):
                        # The end tells of its step once more, of the best weights.
                        logged.setdefault((name, step), value)
    return logged


def choose_window(recorded: Recorded, begin: int | None, steps: int) -> tuple[int, int]:
    """Return the step to begin at, and that to end with: by default from the newest checkpoint that
    something is known behind, else from the start. Raises ConfigError."""
    last = recorded.find_last_step()
    if begin is None:
        begin = max((step for step in recorded.kept if step < last), default=0)
    if begin and begin not in recorded.kept:
        kept = ", ".join(f"{step:,}" for step in recorded.kept) or "none"
        raise ConfigError(
            f"--from: there is no checkpoint of step {begin:,}; 0 is the start, and checkpoints "
            f"are kept of: {kept}"
        )
    if begin >= last:
        raise ConfigError(f"--from: nothing is recorded behind step {begin:,}; choose 0")
    end = min(last, begin + steps)
    known = {*recorded.digests, *(step for _, step in recorded.logged)}
    if end not in recorded.kept and not any(begin < step <= end for step in known):
        first = min(step for step in (*known, *recorded.kept) if step > end)
        raise ConfigError(
            f"--steps: nothing was recorded of the steps {begin + 1:,} to {end:,}: nothing to "
            f"compare with; choose {first - begin:,} or more"
        )
    return begin, end


@dataclass
class Watch:
    """Looks at each step of a training anew, and ends it where the window ends or something
    differs."""

    recorded: Recorded
    end: int
    flip: Flip | None = None
    until: int | None = None  # take the tensors of this step, and compare nothing before
    names_operations: bool = False
    step: int = 0
    digest_steps: int = 0
    tensors: int = 0
    logged: int = 0
    found: tuple[int, list[str]] | None = None  # step, and the names of what differs
    differs: Difference | None = None  # of what was logged
    taken: dict[str, Tensor] = field(default_factory=dict)  # copies, at the step that differs

    def end_step(self, state: TrainState, step: int, loss: Tensor) -> None:
        """Compare the digests of this step, where the run has kept some."""
        self.step = step
        if self.names_operations:
            torch.use_deterministic_algorithms(True, warn_only=True)
            return
        named = None
        if self.flip is not None and self.flip.step == step:
            named = name_tensors(state, loss)
            flip_bit(named, self.flip.tensor, self.flip.element, self.flip.bit)
        then = self.recorded.digests.get(step)
        if self.until is not None and step < self.until:
            return
        if then is None and self.until is None:
            return
        # Read anew: what was flipped may be a copy of the training's own.
        flips_copy = self.flip is not None and self.flip.tensor == "loss"
        named = named if named is not None and flips_copy else name_tensors(state, loss)
        digests = {name: int(compute_digest(tensor)) for name, tensor in named.items()}
        self.digest_steps, self.tensors = self.digest_steps + 1, len(digests)
        if self.until is not None:
            self.taken = {name: tensor.detach().clone() for name, tensor in named.items()}
            raise WindowDone
        assert then is not None
        other = [n for n in {**digests, **then} if digests.get(n) != then.get(n)]
        if other:
            self.found = step, other
            self.taken = {name: tensor.detach().clone() for name, tensor in named.items()}
            raise WindowDone

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Compare what was logged at this step."""
        if self.until is not None or self.names_operations:
            return
        for name, value in metrics.items():
            then = self.recorded.logged.get((name, step))
            if then is None or not name.startswith(LOGGED):
                continue
            self.logged += 1
            if then != value and not (isnan(then) and isnan(value)):
                what = f"{then!r} was logged, and is {value!r} now"
                self.differs = Difference(step, name, what)
                raise WindowDone

    def check_stop(self) -> StopRequest | None:
        if self.step < self.end:
            return None
        return StopRequest("the window is done", act=_end_window)


class WindowDone(Exception):
    """What was to be compared has been."""


def _end_window() -> None:
    raise WindowDone


@dataclass(frozen=True)
class _Retraining:
    """A training that can be begun again and again, each in a folder of its own."""

    config: RunConfig
    device: DeviceFacts
    data: DataFacts
    recorded: Recorded
    begin: int
    scratch: Path

    def train(self, watch: Watch) -> Path:
        """Train until the watch ends it; return the folder."""
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        if self.begin:
            _copy_checkpoint(self.recorded.folder / CHECKPOINTS, self.begin, folder / CHECKPOINTS)
        keeps = watch.end in self.recorded.kept and watch.until is None
        every = f"{watch.end}steps" if keeps else None
        config = override_config(self.config, {"checkpoint.every": every})
        with suppress(WindowDone):
            trainer.train(
                make_plan(config, self.device, self.data),
                folder=folder,
                log=watch.log,
                resumes=bool(self.begin),
                check_stop=watch.check_stop,
                end_step=watch.end_step,
            )
        return folder


def _copy_checkpoint(source: Path, step: int, target: Path) -> None:
    """Copy a checkpoint, which a run that trains may remove at any moment."""
    target.mkdir()
    try:
        verify_checkpoint(source, step)
        name = str(read_record(source, step)["tensors"])
        shutil.copy(source / name, target)
        shutil.copy(source / f"step-{step:012d}.json", target)
    except (DamagedCheckpoint, NewerCheckpoint, KeyError, OSError) as error:
        raise ConfigError(f"--from {step}: {error}") from None


def verify_run(
    folder: Path, *, begin: int | None = None, steps: int = STEPS, flip: Flip | None = None
) -> Verification:
    """Train a window of this run anew and compare it. Raises ConfigError where that can't be done,
    and whatever a training is refused by."""
    recorded = read_recorded(folder)
    begin, end = choose_window(recorded, begin, steps)
    config = restore_config_secrets(resolve_config(str(folder / "config.yaml"), {}))
    config = override_config(config, {"train.end": None, "memory.snapshot": False})
    _refuse_other_settings(recorded, begin, config)
    check_imports(config)
    leases = Leases(
        find_lease_folder(),
        wait_s=config.device.wait_s,
        holder=f"process {os.getpid()}, verifying {folder.name}",
        show_waiting=_show_waiting,
    )
    threads = torch.get_num_threads()
    scratch = Path(tempfile.mkdtemp(prefix="headroom-verify-"))
    try:
        if not Path(config.data.cache).is_dir():
            config = override_config(config, {"data.cache": str(scratch / "data")})
        device = detect_best_device(
            config.device.name, leases=None if config.device.share else leases
        )
        if count_processes(config.launch, device) > 1:
            raise ConfigError("RUN: several processes trained it, and one can't train it anew")
        train = config.train
        data = prepare_dataset(config.data, batch_size=train.batch_size, seed=train.seed)
        _refuse_other_data(recorded, data)
        then = recorded.environment.get("threads") or _read_tag(recorded, "threads")
        if then.isdecimal() and int(then) > 1:
            torch.set_num_threads(int(then))
        again = _Retraining(config, device, data, recorded, begin, scratch)
        found = _compare(again, end, _complete(flip, begin, end))
        return replace(found, environment=tuple(_list_changes(again)))
    finally:
        torch.set_num_threads(threads)
        leases.close()
        shutil.rmtree(scratch, ignore_errors=True)


def _show_waiting(reason: str) -> None:
    if reason:
        print(f"waiting for a device: {reason}", file=sys.stderr, flush=True)


def _refuse_other_settings(recorded: Recorded, begin: int, config: RunConfig) -> None:
    """Raise ConfigError for a window of before the run was gone on with, where settings were
    changed then: those of each time between are not kept."""
    log = recorded.folder / LOG
    begins = read_begins(log, 0)
    if len(begins) < 2:
        return
    with open(log, "rb") as lines:
        batches = read_metric_batches(lines, 0, begun=begins[-2][1])
        gone_on = max((step for batch, _ in batches for *_, step in batch), default=0)
    then = begins[0][0].get("params") or {}
    now = select_params(collect_params(config))
    changed = [
        f"{name} was {then.get(name, 'not set')} and is {now.get(name, 'not set')}"
        for name in sorted(then.keys() | now.keys())
        if name.startswith(OF_STEPS) and name not in ELSEWHERE and then.get(name) != now.get(name)
    ]
    if then and changed and begin < gone_on:
        later = [step for step in recorded.kept if gone_on <= step < recorded.find_last_step()]
        remedy = f"choose --from {later[0]}" if later else "no checkpoint is kept from there on"
        raise ConfigError(
            f"--from: the run was gone on with at step {gone_on:,} with other settings "
            f"({', '.join(changed)}), so what lies before can't be trained anew; {remedy}"
        )


def _refuse_other_data(recorded: Recorded, data: DataFacts) -> None:
    then = _read_tag(recorded, "data.fingerprint")
    if not then and recorded.kept:
        then = read_record(recorded.folder / CHECKPOINTS, recorded.kept[-1])["about"]["data"]
    if then and data.fingerprint and then != data.fingerprint:
        raise ConfigError(
            f"data.source: the rows are others than those that the run was trained on (their "
            f"fingerprint was {then} and is {data.fingerprint}): it can't be verified with these"
        )


def _read_tag(recorded: Recorded, name: str) -> str:
    return str((recorded.end.get("tags") or {}).get(name, ""))


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


def _compare(again: _Retraining, end: int, flip: Flip | None) -> Verification:
    """Return what comes out of training anew; where something differs it is trained again."""
    watch = Watch(again.recorded, end, flip)
    found = _train_and_compare(again, watch)
    if watch.found is not None:
        return replace(found, difference=_explain(again, watch))
    first = found.difference
    if first is None:
        return found
    second = _train_and_compare(again, Watch(again.recorded, end)).difference
    if second is None:
        why = AS_RECORDED
    else:
        why = ALIKE if second == first else f"{OTHERWISE}: {_name_operations(again)}"
    return replace(found, difference=replace(first, why=why))


def _train_and_compare(again: _Retraining, watch: Watch) -> Verification:
    recorded, end = again.recorded, watch.end
    folder = again.train(watch)
    reached = Verification(
        begin=again.begin,
        end=watch.step,
        digest_steps=watch.digest_steps,
        tensors=watch.tensors,
        logged=watch.logged,
        difference=watch.differs,
    )
    is_whole = watch.found is None and watch.differs is None and watch.step == end
    if is_whole and end in recorded.kept:
        count, difference = _compare_states(recorded.folder, folder, end)
        return replace(reached, state_step=end, state_tensors=count, difference=difference)
    return reached


def _explain(again: _Retraining, watch: Watch) -> Difference:
    """Return the difference that the digests show, after a second training anew up to there."""
    assert watch.found is not None
    step, names = watch.found
    name, recorded = names[0], watch.recorded.digests[step]
    more = f"; {len(names) - 1} more of its {watch.tensors} tensors differ" if names[1:] else ""
    before = max((s for s in watch.recorded.digests if s < step), default=0)
    if max(before, again.begin) < step - 1:
        more += f"; the steps since {max(before, again.begin):,}, which was equal, have no digests"
    second = Watch(watch.recorded, watch.end, until=step)
    again.train(second)
    mine, other = watch.taken.get(name), second.taken.get(name)
    if mine is None or other is None or name not in recorded:
        what = "it is only here" if name not in recorded else "it is only in the run"
        return Difference(step, name, what + more)
    gap = describe_difference(other, mine)
    if not gap:
        what = explain_by_one_bit(mine, recorded[name]) or (
            "more than one bit differs, and of the run only a digest was kept"
        )
        return Difference(step, name, what + more, ALIKE)
    if int(compute_digest(other)) == recorded[name]:
        why = AS_RECORDED
    else:
        why = f"{OTHERWISE}: {_name_operations(again)}"
    return Difference(step, name, gap + more, why)


def _name_operations(again: _Retraining) -> str:
    """Return in words what can't be repeated: the operations that PyTorch names by its warnings."""
    if again.config.train.deterministic:
        return "something in it is not repeated, though train.deterministic was true"
    watch = Watch(again.recorded, again.begin + 3, names_operations=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again.train(watch)
    found = (_NOT_REPEATABLE.match(str(one.message)) for one in caught)
    names = sorted({match[1] for match in found if match})
    if not names:
        return (
            "train.deterministic was false, so it need not be the same; PyTorch names no operation"
        )
    return (
        f"not deterministic: {', '.join(names)} can't be repeated to the bit on this device; set "
        "train.deterministic"
    )


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


def _list_changes(again: _Retraining) -> Iterator[str]:
    """Yield what differs between when the run was trained and now."""
    recorded, device = again.recorded, again.device
    now = describe_environment()
    threads = recorded.environment.get("threads") or _read_tag(recorded, "threads")
    for name, value in sorted(recorded.environment.items()):
        if name != "threads" and now.get(name) != value:
            yield f"{name} was {value} and is {now.get(name, 'not set')}"
    for name in sorted(now.keys() - recorded.environment.keys()):
        if recorded.environment:
            yield f"{name} was not set and is {now[name]}"
    most = os.cpu_count() or 1
    if threads.isdecimal() and int(threads) > most:
        yield f"threads: {threads} as then, though there are {most} cores here"
    is_now: dict[str, str | None] = {
        "device.kind": device.kind,
        "device.model": device.model,
        "torch.version": device.torch_version,
    }
    for name, here in is_now.items():
        then = _read_tag(recorded, name)
        is_told = name == "torch.version" and recorded.environment
        if then and here and then != here and not is_told:
            yield f"{name} was {make_printable(then, limit=60)} and is {here}"
    yield from _list_changed_code(again)


def _list_changed_code(again: _Retraining) -> Iterator[str]:
    recorded = again.recorded
    about: dict[str, Any] = {}
    if recorded.kept:
        with suppress(DamagedCheckpoint, NewerCheckpoint):
            step = again.begin or recorded.kept[-1]
            about = read_record(recorded.folder / CHECKPOINTS, step)["about"]
    code = describe_code(again.config)
    commit = code["commit"]
    was = about.get("commit") or _read_tag(recorded, "git.commit")
    if was and commit and was != commit:
        yield f"git.commit was {was[:12]} and is {commit[:12]}"
    files = about.get("code", {})
    for file in sorted(n for n, v in code["code"].items() if files.get(n, v) != v):
        yield f"{file} has changed"
