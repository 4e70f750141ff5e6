"""A model that is shared out among ranks trains as it does on one, holds its share, and goes on
from a checkpoint of any number of ranks."""

import errno
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

from headroom.data.batch import Batch
from headroom.models.builtin import build_model
from headroom.ranks.ranks import Ranks
from headroom.settings.run_config import OptimConfig, RunConfig
from headroom.training import checkpoint_files, sharded_files, sharded_reader, shared_model
from headroom.training.build import make_optimizer
from headroom.training.checkpoint_files import Checkpoint, DamagedCheckpoint, flatten_state
from headroom.training.checkpoints import Checkpoints, TrainingPosition
from headroom.training.micro_batches import SingleAttempt
from headroom.training.optimizer_step import Step
from headroom.training.stateful import HostCopies, StateMismatch, Weights
from headroom.watch.phases import Watched
from tests.rank_processes import on_ranks
from tests.watch.loop_watch import make_owners

CPU = torch.device("cpu")
KEPT = ["mlp by sgd", "cnn", "transformer", "linear", "tied by Adam"]
STEPS, SAVED, ROWS = 5, 2, 12
MODELS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "mlp": ((20,), 5, {"hidden": [256, 128]}),
    "cnn": ((3, 8, 8), 5, {"width": 48}),
    "transformer": ((16,), 50, {"width": 64, "layers": 3}),
    "linear": ((20,), 1, {}),  # one row of weights: the second rank has none
    "tied": ((256,), 5, {}),
}


class _Tied(nn.Sequential):
    """Two of its layers have the same weights."""

    def __init__(self) -> None:
        layers = [nn.Linear(256, 256) for _ in range(4)]
        layers[3].weight = layers[1].weight
        super().__init__(*layers, nn.Linear(256, 5))


def _model(name: str) -> nn.Module:
    shape, outputs, args = MODELS[name]
    torch.manual_seed(1)
    if name == "tied":
        return _Tied()
    model = build_model(name, input_shape=shape, outputs=outputs, args=args)
    return model.to(memory_format=torch.channels_last) if name == "cnn" else model  # type: ignore[call-overload,no-any-return]


def _rows(name: str) -> tuple[Tensor, Tensor]:
    shape, outputs, _ = MODELS[name]
    torch.manual_seed(2)
    if name == "transformer":
        return torch.randint(outputs, (ROWS, *shape)), torch.randint(outputs, (ROWS, *shape))
    return torch.randn(ROWS, *shape), torch.randint(outputs, (ROWS,))


def _loss(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    outputs = model(x)
    if outputs.shape[-1] == 1:
        return (outputs - 1).square().mean()
    return functional.cross_entropy(outputs.flatten(0, -2), y.flatten())


class _Run:
    """A training, shared out where there are ranks, through the step of every training."""

    def __init__(
        self,
        name: str,
        *,
        precision: str = "fp32",
        micro: int = ROWS,
        optimizer: str = "adamw",
        recompute: bool = False,
    ) -> None:
        self.rank, size, (x, y) = 0, 1, _rows(name)
        if dist.is_initialized():
            self.rank, size = dist.get_rank(), dist.get_world_size()
        self.ranks, self.name = Ranks(self.rank, size), name
        sections = {"train": {"parallel": "fsdp"}, "memory": {"recompute": recompute and size > 1}}
        config = RunConfig.model_validate(sections)
        self.plan: Any = SimpleNamespace(settings=config, data=None, torch_device=CPU)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_model, "make_model", self._make_model)
            self.model = shared_model.build_model_on_device(self.plan, self.ranks)
        self.batch = x.chunk(size)[self.rank], y.chunk(size)[self.rank]
        optim = OptimConfig(name=optimizer, lr=1e-2, weight_decay=0.1)
        self.optimizer = make_optimizer(optim, self.model)
        parallel = None
        if size > 1:
            parallel = shared_model.share_steps(
                self.model, self.ranks, device=CPU, mark=lambda phase: None
            )
        self.step = Step(
            compute=partial(_loss, parallel or self.model),
            optimizer=self.optimizer,
            scaler=torch.amp.GradScaler("cpu", enabled=precision == "fp16", init_scale=2.0**10),
            autocast=lambda: torch.autocast(
                "cpu",
                dtype=torch.float16 if precision == "fp16" else torch.bfloat16,
                enabled=precision != "fp32",
            ),
            clip_norm=1.0,
            micro=SingleAttempt(micro),
            mark=lambda phase: None,
            parallel=parallel,
        )

    def _make_model(self, *_: Any) -> nn.Module:
        model = _model(self.name)
        if self.rank:
            with torch.no_grad():  # whatever they were: all begin with those of the first
                next(model.parameters()).zero_()
        return model

    def gather(self) -> dict[str, Tensor]:
        """The weights of the whole model, on the first rank."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_model, "make_model", self._make_model)
            whole = shared_model.gather_whole(self.model, self.plan, self.ranks)
        return {} if whole is self.model else whole.state_dict()

    def steps(self, count: int, **between: Callable[[], Any]) -> list[float]:
        """Losses and norms of the gradients of so many steps."""
        told: list[float] = []
        for _ in range(count):
            between.get("before", lambda: None)()
            loss, norm = self.step(Batch(*self.batch, ROWS), norm=True, watched=Watched.NOT)
            assert norm is not None
            told += [self.ranks.mean(loss.clone()).item(), norm.item()]
        return told

    @torch.inference_mode()
    def judge(self) -> float:
        """As an evaluation does, in whose mode nothing may be made that training uses."""
        return self.ranks.mean(_loss(self.model, *self.batch)).item()

    def state(self, tensors: dict[str, Tensor]) -> Any:
        parts = {"model": Weights(self.model), "optimizer": self.optimizer}
        return flatten_state({name: part.state() for name, part in parts.items()}, tensors)

    def save(self, folder: Path) -> None:
        tensors: dict[str, Tensor] = {}
        plain, how = self.state(tensors), {"step": SAVED, "about": {"by": self.ranks.size}}
        if self.ranks.is_alone:
            checkpoint_files.write_checkpoint(folder, plain=plain, tensors=tensors, **how)  # type: ignore[arg-type]
        else:
            part = sharded_files.select_rank_part(tensors, is_lead=self.ranks.is_lead)
            sharded_files.write_sharded_checkpoint(
                folder, self.ranks, plain=plain, part=part, **how
            )  # type: ignore[arg-type]

    def mesh(self) -> DeviceMesh | None:
        return None if self.ranks.is_alone else init_device_mesh("cpu", (self.ranks.size,))

    def load(self, folder: Path) -> Checkpoint:
        found = sharded_reader.read_sharded_checkpoint(folder, SAVED, self.ranks, mesh=self.mesh())
        Weights(self.model).restore(found.state["model"])
        self.optimizer.restore(found.state["optimizer"])
        return found


def _held() -> dict[str, float]:
    """MiB by owner in the largest moment of a step, by the accounting of a training."""
    run = _Run("transformer")

    def owned() -> dict[str, list[Tensor]]:
        params = list(run.optimizer.params)
        grads = [p.grad for p in params if p.grad is not None]
        state = run.optimizer.list_state_tensors()
        return {"parameters": params, "gradients": grads, "optimizer_state": state}

    run.steps(1)
    accounts = make_owners(owned)
    with accounts.count_memory(run.batch):
        run.steps(1)
    ledger = accounts.ledger
    ledger.begin_step()  # what is left of it
    ledger.own("rest", [torch.ones(1)])
    return {owner: size / 2**20 for owner, size in ledger.sum_owners_at_peak().items()}


def _refused(run: _Run, folder: Path, spoil: Callable[[Path], Any]) -> list[str]:
    """What each rank is told where the first has spoilt a copy of a checkpoint."""
    copy = folder.with_name("spoilt")
    if run.ranks.is_lead:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        spoil(copy)
    try:
        run.ranks.broadcast(None)
        run.load(copy)
    except (DamagedCheckpoint, StateMismatch) as error:
        return run.ranks.all_gather(f"{type(error).__name__}: {error}")
    return []


def _flip(file: Path) -> None:
    body = bytearray(file.read_bytes())
    body[-1] ^= 1
    file.write_bytes(body)


def _second(folder: Path) -> Path:
    (file,) = folder.glob("*-1of2-*.safetensors")
    return file


def _mistakes(folder: Path) -> dict[str, Any]:
    """What goes wrong with checkpoints of two ranks."""
    run, made = _run("mlp by sgd"), folder / "mlp by sgd-2"
    told = {
        "damaged": _refused(run, made, lambda copy: _flip(_second(copy))),
        "missing": _refused(run, made, lambda copy: _second(copy).unlink()),
        "no record": _refused(run, made, lambda copy: next(copy.glob("*.json")).unlink()),
        "other": _refused(_Run("linear"), made, lambda copy: None),
    }
    full = pytest.MonkeyPatch()
    if not run.ranks.is_lead:
        full.setattr(sharded_files, "write_tensors", _disk_full)
    with full.context(), pytest.raises(OSError, match="^No space left on device$"):
        run.save(folder / "full")
    return told | {"full": sorted(p.suffix for p in (folder / "full").iterdir())}


def _checkpoints(run: _Run, folder: Path, *, resumes: bool = False) -> Checkpoints:
    """As a training has them, after every step if nothing is being written."""
    return Checkpoints(
        folder / "kept",
        RunConfig.model_validate({"checkpoint": {"every": "0.001s"}}).checkpoint,
        HostCopies(CPU),
        about={"settings": {}, "data": "", "device": "cpu", "torch": ""},
        resumes=resumes,
        ranks=run.ranks,
        mesh=run.mesh(),
    )


class _Kept:
    """The training of a run, as checkpoints keep it."""

    def __init__(self, run: _Run) -> None:
        self.position = TrainingPosition()
        self._parts: dict[str, Any] = {"model": Weights(run.model), "optimizer": run.optimizer}

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            part.restore(state[name])


def _left(folder: Path) -> int:
    """How many checkpoints were written while a training went on, which ends before its time."""
    run = _Run("transformer")
    kept = _Kept(run)
    with closing(_checkpoints(run, folder)) as checkpoints:
        for step in range(1, SAVED + 1):
            checkpoints.let_go_on()
            run.steps(1)
            kept.position = TrainingPosition(step=step)
            checkpoints.end_step(kept)
        checkpoints.finish(kept)
    return checkpoints.written


def _resumed(folder: Path) -> list[float]:
    run = _Run("transformer")
    kept = _Kept(run)
    with closing(_checkpoints(run, folder, resumes=True)) as checkpoints:
        checkpoints.resume(kept)
    assert kept.position == TrainingPosition(step=SAVED)
    return run.steps(STEPS - SAVED)


def _disk_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _played(folder: Path) -> dict[str, Any]:
    """What the ranks of one start have seen, by name; of one process too."""
    told: dict[str, Any] = {"held": _held()}
    for name in KEPT:
        run = _run(name)
        told[name] = run.steps(SAVED)
        run.save(folder / f"{name}-{run.ranks.size}")
        told[name] += run.steps(STEPS - SAVED)
        for size in (1, 2):
            before = folder / f"{name}-{size}"
            if before.is_dir() and size != run.ranks.size:
                told[f"{name} after {size}"] = _after(name, before)
    if run.ranks.size == 2:
        told["left"] = _left(folder)
    if not run.ranks.is_alone:
        told["resumed"] = _resumed(folder)
    if run.ranks.size > 2:
        return told
    told["recomputed"] = _Run("transformer", recompute=True).steps(STEPS)
    told["in parts"] = _Run("transformer", micro=3).steps(STEPS)
    told["bf16"] = _Run("transformer", precision="bf16").steps(STEPS)
    told["fp16"] = _Run("mlp", precision="fp16").steps(STEPS)
    told["infinite"] = _infinite()
    run = _Run("transformer")
    told["judged"] = run.judge()
    told["after judging"] = run.steps(STEPS, before=run.judge)
    run.judge()
    told["is shared out"] = all(hasattr(p, "device_mesh") for p in run.model.parameters())
    if not run.ranks.is_alone:
        told["whole"], told["of whole"] = run.gather(), run.judge()
        told |= _mistakes(folder)
    return told


def _local(tensor: Any) -> Tensor:
    """What of a tensor is on this rank."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _infinite() -> float:
    """How far a step of fp16 moves the weights where the last rank's gradients are infinite."""
    run = _Run("mlp", precision="fp16")
    run.steps(1)
    before = [_local(p).detach().clone() for p in run.optimizer.params]
    run.step.compute_gradients(Batch(*run.batch, ROWS), rows=ROWS)
    if run.rank == run.ranks.size - 1:
        _local(run.optimizer.params[-2].grad)[-1] = math.inf  # type: ignore[arg-type]
    run.step._update()
    pairs = zip(before, map(_local, run.optimizer.params), strict=True)
    return sum((one - other).abs().sum().item() for one, other in pairs)


def _run(name: str) -> _Run:
    model, _, optimizer = name.partition(" by ")
    return _Run(model, optimizer=optimizer or "adamw")


def _after(name: str, folder: Path) -> list[float]:
    run = _run(name)
    size = int(folder.name[-1])
    assert run.load(folder).about == {"by": size}
    return run.steps(STEPS - SAVED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    return _played(folder)


@pytest.fixture(scope="module")
def two(folder: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    """By two ranks, which find the checkpoints of one."""
    return on_ranks(2, _played, folder)


@pytest.fixture(scope="module")
def three(folder: Path, two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By three, which find those of one and of two."""
    return on_ranks(3, _played, folder)


Seen = list[dict[str, Any]]


@pytest.mark.parametrize("kind", [*KEPT, "recomputed", "in parts", "after judging"])
def test_losses_and_norms_are_those_of_one_process(
    kind: str, one: dict[str, Any], two: Seen, three: Seen
) -> None:
    for seen in (*two, *three):
        assert seen.get(kind, one[kind]) == pytest.approx(one[kind], rel=2e-4, abs=1e-6)
    assert one[kind][0] != pytest.approx(one[kind][-2], rel=0.01), "nothing was learnt"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_that_of_one_process(
    precision: str, one: dict[str, Any], two: Seen
) -> None:
    for seen in two:
        assert seen[precision][::2] == pytest.approx(one[precision][::2], rel=0.01)  # losses


@pytest.mark.parametrize("name", KEPT)
def test_a_checkpoint_goes_on_on_another_number_of_ranks(
    name: str, folder: Path, one: dict[str, Any], two: Seen, three: Seen
) -> None:
    rest = pytest.approx(one[name][2 * SAVED :], rel=2e-4, abs=1e-6)
    assert all(seen[f"{name} after 1"] == rest for seen in (*two, *three))
    assert all(seen[f"{name} after 2"] == rest for seen in three)
    for size in (2, 3):
        assert _after(name, folder / f"{name}-{size}") == rest


def test_a_training_keeps_its_shares_while_it_goes_on(
    folder: Path, one: dict[str, Any], two: Seen, three: Seen
) -> None:
    rest = pytest.approx(one["transformer"][2 * SAVED :], rel=2e-4)
    assert all(seen["left"] >= 1 for seen in two)
    assert all(seen["resumed"] == rest for seen in (*two, *three))
    assert _resumed(folder) == rest, "on one process"
    assert len(list((folder / "kept").iterdir())) == 3, "one record, and two files of tensors"


def test_nothing_of_a_checkpoint_is_pickled(folder: Path, three: Seen) -> None:
    kinds = {file.suffix for file in (folder / "transformer-3").iterdir()}
    assert kinds == {".json", ".safetensors"}
    checkpoint_files.remove_other_steps(folder / "linear-3", set())
    assert not list((folder / "linear-3").iterdir()), "files of ranks were left"


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("damaged", r"DamagedCheckpoint: .*-1of2-\w+.safetensors was changed since it was written"),
        ("missing", r"DamagedCheckpoint: .*No such file or directory: .*-1of2-\w+.safetensors'"),
        ("no record", r"DamagedCheckpoint: .*/step-000000000002.json: No such file or directory"),
        ("other", r"StateMismatch: model.name: only the checkpoint has 3.bias"),
    ],
)
def test_what_is_no_checkpoint_of_this_model_is_told_alike_on_all_ranks(
    mistake: str, told: str, two: Seen
) -> None:
    for seen in two:
        first, second = seen[mistake]
        assert first == second and re.fullmatch(told, first)


def test_where_one_rank_cannot_write_there_is_no_checkpoint(two: Seen) -> None:
    assert two[0]["full"] == [".safetensors"]


def test_a_rank_of_two_holds_half_of_weights_gradients_and_moments(
    one: dict[str, Any], two: Seen, three: Seen
) -> None:
    owners = ("parameters", "gradients", "optimizer_state")
    whole = sum(one["held"][owner] for owner in owners)
    for ranks in (two, three):
        for seen in ranks:
            share = sum(seen["held"][owner] for owner in owners) / whole
            assert 0.9 / len(ranks) < share < 1.05 / len(ranks) < 0.6


def test_a_step_that_is_infinite_on_one_rank_is_skipped_by_all(two: Seen) -> None:
    assert [seen["infinite"] for seen in two] == [0.0, 0.0]


def test_an_evaluation_leaves_the_model_shared_out(one: dict[str, Any], two: Seen) -> None:
    assert [seen["is shared out"] for seen in two] == [True, True]
    assert two[0]["judged"] == pytest.approx(one["judged"])


def test_the_whole_model_is_the_first_ranks_and_judges_as_its_parts_do(two: Seen) -> None:
    model, rows = _model("transformer"), _rows("transformer")
    model.load_state_dict(two[0]["whole"])
    assert _loss(model, *rows).item() == pytest.approx(two[0]["of whole"])
    assert not two[1]["whole"]
