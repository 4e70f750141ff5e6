"""Micro-batches that several processes agree on before their first step."""

from typing import Any

import torch
from torch import nn

from headroom.training.shared_model import AgreedMicroBatches
from headroom.training.state_changes import StateChanges

SEEN = ("", "", "seen")


class Noting(nn.Module):
    """Keeps what it was given in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        return x


class Pair:
    """Two processes that have room for as many rows."""

    def all_gather(self, value: Any) -> list[Any]:
        return [value, value]


def test_the_attempt_that_finds_the_rows_leaves_a_list_as_it_was() -> None:
    """A list in a model had one entry too many, where several processes trained it."""
    model, nothing = Noting(), Any
    micro = AgreedMicroBatches(
        4,
        ranks=Pair(),  # type: ignore[arg-type]
        together=lambda: None,
        whole=4,
        what="training",
        device=torch.device("cpu"),
        model=model,
        accounts=nothing,  # type: ignore[arg-type]
        witness=nothing,  # type: ignore[arg-type]
        changes=StateChanges(own=True, slots=frozenset({SEEN}), mutated=frozenset({SEEN})),
    )
    rows = torch.ones(4, 2)
    for step in range(3):
        micro.fit(lambda x, rows: model(x), rows)
        assert model.seen == [4] * (step + 1)
