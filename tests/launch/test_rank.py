"""Several ranks train what one process trains: held against it, number by number."""

import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headroom.base.facts import TrainFacts
from headroom.data.preparation import prepare_dataset
from headroom.device.detection import detect_best_device
from headroom.launch import placement
from headroom.launch.placement import find_rank_device
from headroom.launch.rank import Job, train_together
from headroom.ranks.ranks import Ranks, read_ranks_from_environment
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import RunConfig
from headroom.training.admission import PastRuns
from headroom.training.kept_steps import list_steps
from headroom.training.loop import StopRequest
from headroom.watch.leaks import take_baseline
from headroom.watch.step_metrics import Diverged
from tests.rank_processes import on_ranks

Sections = dict[str, Any]


class _Left(Exception):
    """The training has ended for now."""


LEFT = ("left", "TrainingLeft: ")  # on the rank that was asked to, and on the others


def _leave() -> None:
    raise _Left


Told = tuple[TrainFacts | None, dict[int, float], str]

# What one process and several must learn alike: a batch of 63 is no multiple of 2 or of 3 ranks,
# and the last one of an epoch has 1,438 % 63 = 52 rows.
TRAININGS: dict[str, Sections] = {
    "mlp": {"train": {"epochs": 2, "batch_size": 63}},
    "cnn, accumulated": {
        "model": {"name": "cnn", "args": {"width": 8}},
        "train": {"epochs": 1, "batch_size": 64, "accumulate": 4},
    },
    "shared out": {
        "model": {"args": {"hidden": [512, 256]}},
        "train": {"epochs": 2, "batch_size": 63, "accumulate": 2, "parallel": "fsdp"},
        "memory": {"recompute": True},
    },
    "clipped": {"optim": {"clip_norm": 0.05, "name": "sgd"}, "train": {"epochs": 1}},
    "within an epoch, averaged": {
        "train": {
            "epochs": 2,
            "batch_size": 63,
            "eval_every_steps": 9,
            "best_metric": "val/accuracy",
        },
        "optim": {"ema_decay": 0.9, "schedule": "plateau", "schedule_args": {"patience": 1}},
    },
    "parts of a shared one, averaged": {
        "model": {"args": {"hidden": [512, 256]}, "freeze": ["3"]},
        "train": {"epochs": 1, "batch_size": 63, "parallel": "fsdp", "eval_every_steps": 9},
        "optim": {"ema_decay": 0.9, "groups": {"5": {"lr": 1e-3, "weight_decay": 0.3}}},
    },
    "a last batch of one row": {"train": {"epochs": 2, "batch_size": 479}},
    "own batch norm": {"model": {"name": "ranks_own:Normed"}, "train": {"epochs": 1}},
    "unused parameters": {"model": {"name": "ranks_own:Unused"}, "train": {"epochs": 1}},
}
OWN = """
import torch
import torch.distributed as dist
from torch import nn

class Linear(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.Linear(64, outputs)

    def forward(self, x):
        return self.layer(x.flatten(1))

class Unused(Linear):
    def __init__(self, outputs):
        super().__init__(outputs)
        self.spare = nn.Linear(3, 3)

class Normed(Linear):
    def __init__(self, outputs):
        super().__init__(outputs)
        self.norm = nn.BatchNorm1d(64, momentum=0.5)

    def forward(self, x):
        self.norm(x.flatten(1))  # keeps statistics, and changes nothing
        return super().forward(x)

class Greedy(Linear):
    def forward(self, x):
        if self.training and dist.get_rank() == 1 and len(x) > 9:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return super().forward(x)

class Poisoned(Linear):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + self.training
        bad = self.training and dist.get_rank() == 1 and self.calls == 8
        return super().forward(x) * (float("nan") if bad else 1)
"""


def _config(sections: Sections, folder: Path) -> RunConfig:
    return RunConfig.model_validate({"data": {"cache": str(folder / "data")}, **sections})


def _train(sections: Sections, folder: Path, *, stop_at: int = 0, resumes: bool = False) -> Told:
    """Facts, losses by step, and the error of one rank; it is one of those that torchrun set."""
    torch.set_num_threads(1)
    sys.path.insert(0, os.environ["TESTS_PATH"])
    config, losses = _config(sections, folder), {}
    device, data = (
        find_rank_device(read_ranks_from_environment(), detect_best_device("cpu")),
        prepare_dataset(_config(sections, folder).data),
    )
    calls = itertools.count(1)

    def stop() -> StopRequest | None:
        return StopRequest("", act=_leave) if next(calls) == stop_at else None

    def log(metrics: dict[str, float], step: int) -> None:
        losses.update({step: metrics["train/loss"]} if "train/loss" in metrics else {})

    ranks = read_ranks_from_environment()
    job = Job(config, data, PastRuns(), folder, resumes)
    try:
        return train_together(job, device, ranks, log=log, check_stop=stop), losses, ""
    except _Left:
        return None, losses, "left"
    except Exception as error:
        return None, losses, f"{type(error).__name__}: {error}"


def _train_all(folder: Path) -> list[Told]:
    return [_train(s, folder / name) for name, s in TRAININGS.items()]


@pytest.fixture(scope="module")
def own_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "ranks_own.py").write_text(OWN)
    return folder


@pytest.fixture(autouse=True)
def found(own_modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TESTS_PATH", str(own_modules))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, own_modules: Path) -> tuple[Path, list[Told]]:
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TESTS_PATH", str(own_modules))
        patch.setattr(sys, "path", [*sys.path])
        return folder, _train_all(folder)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_learn_what_one_process_learns(
    alone: tuple[Path, list[Told]], tmp_path: Path, size: int
) -> None:
    found = on_ranks(size, _train_all, tmp_path, joined=False)
    for i, name in enumerate(TRAININGS):
        one, losses, _ = alone[1][i]
        lead, theirs, error = found[0][i]
        assert one is not None and lead is not None, (name, error)
        assert theirs == pytest.approx(losses, rel=2e-5), name
        compared = {k: v for k, v in one.metrics.items() if k.startswith("val/")}
        assert {k: lead.metrics[k] for k in compared} == pytest.approx(compared, rel=1e-4), name
        if name != "own batch norm":  # whose statistics are those of the lead's rows
            ours = torch.load(alone[0] / name / "model" / "weights.pt")
            weights = torch.load(tmp_path / name / "model" / "weights.pt")
            for key, value in ours.items():
                torch.testing.assert_close(weights[key], value, rtol=1e-4, atol=1e-5, msg=name)
        assert all(rank[i][0].metrics["val/loss"] == lead.metrics["val/loss"] for rank in found)
        assert lead.tags["ranks"] == str(size)
        least, most = (lead.metrics[f"ranks/run_peak_allocated_mib_{w}"] for w in ("least", "most"))
        assert 0 < least <= most and lead.metrics["ranks/leaked_mib_most"] == 0 == len(lead.leaks)
        assert lead.metrics["time/communication_ms"] > 0


def _compiled(folder: Path) -> list[Told]:
    mlp = TRAININGS["mlp"]["train"] | {"compile": "default"}
    return [_train({"train": mlp | {"parallel": p}}, folder / p) for p in ("ddp", "fsdp")]


def test_ranks_learn_the_same_by_a_compiled_step(
    alone: tuple[Path, list[Told]], tmp_path: Path
) -> None:
    _, losses, _ = alone[1][0]
    for facts, theirs, error in on_ranks(2, _compiled, tmp_path, joined=False)[0]:
        assert facts is not None and facts.tags["compiled"] == "default", error
        assert theirs == pytest.approx(losses, rel=1e-4)


def _stopped(folder: Path, parallel: str) -> Told:
    return _train(_three_epochs(parallel), folder, stop_at=6)


def _resumed(folder: Path, parallel: str) -> Told:
    return _train(_three_epochs(parallel), folder, resumes=True)


def _three_epochs(parallel: str = "auto") -> Sections:
    return {"train": {"epochs": 3, "log_every": 5, "parallel": parallel}}


class Unseen(type(Path())):
    def is_dir(self) -> bool:
        return False


def _apart(folder: Path) -> list[Told]:
    """As under torchrun: only the lead knows the folder of the run."""
    own, fsdp = folder / str(read_ranks_from_environment().rank), _three_epochs("fsdp")
    own.mkdir(exist_ok=True)
    told = [_train(fsdp, own, stop_at=6), _train(fsdp, own, resumes=True)]
    with pytest.MonkeyPatch.context() as patch:
        if read_ranks_from_environment().rank:
            patch.setattr("headroom.launch.rank.Path", Unseen)
        return [*told, _train(fsdp, own)]


def test_all_ranks_keep_their_parts_in_the_folder_of_the_lead(tmp_path: Path) -> None:
    for stopped, resumed, blind in on_ranks(2, _apart, tmp_path, joined=False):
        assert stopped[2] in LEFT and resumed[2] == ""
        assert resumed[0].tags["resumed_from_step"] == "30"
        assert blind[2].startswith("ConfigError: checkpoint: each rank writes its part, and rank 1")
    assert not (tmp_path / "1" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("before", "size", "after"),
    [("ddp", 3, "ddp"), ("fsdp", 3, "fsdp"), ("fsdp", 1, "auto"), ("ddp", 2, "fsdp")],
)
def test_a_checkpoint_of_two_ranks_is_gone_on_from_by_any_number(
    tmp_path: Path, before: str, size: int, after: str
) -> None:
    whole = _train(_three_epochs(), tmp_path / "whole")
    told = on_ranks(2, _stopped, tmp_path / "ranks", before, joined=False)
    assert {error for _, _, error in told} <= {*LEFT} and len(told) == 2
    assert list_steps(tmp_path / "ranks" / "checkpoints")[0] == 30
    again = (
        _resumed(tmp_path / "ranks", after)
        if size == 1
        else on_ranks(size, _resumed, tmp_path / "ranks", after, joined=False)[0]
    )
    assert again[0] is not None and whole[0] is not None, again[2]
    assert again[0].tags["resumed_from_step"] == "30"
    kept = {step: loss for step, loss in whole[1].items() if step > 30}
    assert again[1] == pytest.approx(kept, rel=2e-5)
    assert again[0].metrics["val/loss"] == pytest.approx(whole[0].metrics["val/loss"], rel=1e-4)


def _different(folder: Path) -> Told:
    rank = read_ranks_from_environment().rank
    return _train({"train": {"epochs": 1, "seed": 3 * rank}}, folder)


def _faults(folder: Path) -> list[Told]:
    def own(name: str) -> Sections:
        return {"model": {"name": f"ranks_own:{name}"}, "train": {"epochs": 1}}

    return [
        _train(own("Greedy"), folder / "greedy"),
        _train(own("Poisoned"), folder / "poisoned"),
        _different(folder / "different"),
    ]


def test_what_one_rank_meets_all_are_told(tmp_path: Path) -> None:
    greedy, poisoned, different = zip(*on_ranks(2, _faults, tmp_path, joined=False), strict=True)
    for facts, _, error in greedy:
        assert facts is not None, error
        assert facts.tags["micro_batch"] == "8"
    recovered = {w: greedy[0][0].metrics[f"ranks/ooms_recovered_{w}"] for w in ("least", "most")}
    assert recovered == {"least": 0, "most": 2}
    for _, _, error in poisoned:  # its eighth call: what the first attempt counted was put back
        assert error.startswith(f"{Diverged.__name__}: train.loss: became nan at step 8")
        assert error.endswith("(seen by rank 1 of 2)")
    for _, _, error in different:
        assert error.startswith(
            f"{ConfigError.__name__}: train.seed: is 0 on rank 0 and 3 on rank 1"
        )


def test_a_process_that_trains_alone_agrees_with_itself() -> None:
    ranks = Ranks()
    assert ranks.all_gather(3) == [3] and ranks.broadcast("x") == "x" and ranks.broadcast_flag(True)
    assert ranks.sum_over_ranks({"a": 2.0}) == {"a": 2.0} and ranks.count_most_rows(5) == 5
    assert read_ranks_from_environment({}) == ranks
    assert read_ranks_from_environment(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    ) == Ranks(3, 4, 1)


def test_a_rank_gets_what_was_leased_for_it_and_else_the_others_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = detect_best_device("cpu")
    monkeypatch.setattr(placement, "detect_best_device", lambda name: replace(cpu, name=name))
    monkeypatch.setattr(placement, "take_baseline", lambda name: take_baseline("cpu"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    leased = replace(cpu, name="cuda:1", kind="cuda", index=1, beside=("cuda:3",))
    for first, names in (
        (leased, ["cuda:1", "cuda:3", "cuda:0"]),
        (replace(leased, beside=()), ["cuda:1", "cuda:0", "cuda:2"]),
    ):
        ranks = [Ranks(rank=n, size=3, local=n) for n in range(3)]
        assert [placement.find_rank_device(one, first).name for one in ranks] == names
