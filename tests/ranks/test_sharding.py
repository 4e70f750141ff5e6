"""A model is shared out in blocks; what of it is computed again, and what cannot be."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from headroom.models.builtin import build_model
from headroom.ranks.ranks import Ranks
from headroom.ranks.sharding import (
    ParallelModel,
    find_shard_units,
    recompute_activations,
    shard_model,
)
from headroom.settings.read_settings import ConfigError
from tests.rank_processes import on_ranks


class _Tied(nn.Sequential):
    """Two of its layers have the same weights."""

    def __init__(self) -> None:
        layers = [nn.Linear(256, 256) for _ in range(4)]
        layers[3].weight = layers[1].weight
        super().__init__(*layers, nn.Linear(256, 5))


def _transformer() -> nn.Module:
    args = {"width": 64, "layers": 3}
    return build_model("transformer", input_shape=(16,), outputs=50, args=args)


def _units(model: nn.Module) -> list[str]:
    found = set(map(id, find_shard_units(model)))
    return [name for name, module in model.named_modules() if id(module) in found]


def test_blocks_are_what_lists_hold_but_for_small_and_tied_ones() -> None:
    assert _units(_transformer()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert _units(_Tied()) == ["0", "2"]
    mlp = build_model("mlp", input_shape=(20,), outputs=5, args={"hidden": [256, 128]})
    assert _units(mlp) == ["3"], "the first layer is small"
    assert _units(build_model("linear", input_shape=(20,), outputs=1, args={})) == []


def test_a_block_that_is_most_of_a_model_is_looked_into() -> None:
    nested = nn.Sequential(_transformer(), nn.Linear(50, 2))
    assert _units(nested) == ["0.blocks.0", "0.blocks.1", "0.blocks.2"]
    in_lists = nn.ModuleList([nn.ModuleList([nn.Linear(256, 256)]) for _ in range(3)])
    assert _units(in_lists) == ["0.0", "1.0", "2.0"], "lists themselves are never called"


def test_a_parameter_without_rows_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="^train.parallel: fsdp shares out rows, and scale of"):
        shard_model(model, device=torch.device("cpu"), recompute=False)


class _Stacked(nn.Module):
    """Blocks in a list, of which each is a quarter of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).relu().square().tanh()
        return x


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(
            n_layer=2, n_head=2, n_embd=64, n_positions=16, vocab_size=50,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    return model


@pytest.mark.parametrize("make", [_Stacked, _gpt2])
def test_what_is_computed_again_gives_the_same_gradients_and_keeps_less(
    make: Callable[[], nn.Module],
) -> None:
    """A transformers model by its own method: its blocks fill a cache, which would be filled twice
    where they were called again."""
    (kept, grads), (kept_less, again) = (_keep_for_backward(make, on) for on in (False, True))
    assert kept_less < 0.6 * kept
    for one, other in zip(grads, again, strict=True):
        torch.testing.assert_close(one, other)


def _keep_for_backward(
    make: Callable[[], nn.Module], recompute: bool
) -> tuple[int, list[Tensor | None]]:
    """The bytes that a forward pass keeps, and the gradients."""
    torch.manual_seed(0)
    model, saved = make().train(), []
    if recompute:
        recompute_activations(model)
    x = torch.randint(50, (4, 16)) if make is _gpt2 else torch.randn(64, 256)

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    getattr(out, "logits", out).square().mean().backward()
    return sum(saved), [p.grad for p in model.parameters()]


def test_a_transformers_model_that_cannot_be_computed_again_says_so() -> None:
    class Unable(nn.Linear):
        def gradient_checkpointing_enable(self, how: Any) -> None:
            raise ValueError("Unable does not support activation checkpointing.")

    told = r"memory\.recompute: Unable does not support activation checkpointing; set it to false"
    with pytest.raises(ConfigError, match=told):
        recompute_activations(Unable(2, 2))


def test_a_model_without_blocks_is_refused_to_be_computed_again() -> None:
    """It trained as if nothing had been asked for."""
    with pytest.raises(
        ConfigError, match=r"memory\.recompute: the model has no gradient_checkpoin"
    ):
        recompute_activations(nn.Linear(512, 512))


def _take_steps(file: str, first: int) -> bytes:
    """Return the gradients of the last of three steps. first: of the steps that are taken; those
    before it are in the file that who takes all of them has written."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 700), nn.Tanh(), nn.Linear(700, 300), nn.Linear(300, 9))
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = torch.randn(3, 12, 64)
    if first:
        model.load_state_dict(torch.load(file))
    model(batches[0]).sum().backward()
    parallel = ParallelModel(model, ranks, device=torch.device("cpu"), mark=lambda phase: None)
    parallel.together()
    for step in range(first, 3):
        if step == 2 and not first and ranks.is_lead:
            torch.save(model.state_dict(), file)
        optimizer.zero_grad()
        parallel(batches[step, ranks.rank :: ranks.size]).square().mean().backward()
        last = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return bytes(torch.cat(last).view(torch.uint8))


def test_three_ranks_add_up_a_step_in_the_same_order_after_a_checkpoint(tmp_path: Path) -> None:
    """PyTorch lays its buckets out anew after a first step, which changed sums of three in a bit,
    and with that all that came after a restart."""
    file = str(tmp_path / "weights.pt")
    assert on_ranks(3, _take_steps, file, 0) == on_ranks(3, _take_steps, file, 2)
