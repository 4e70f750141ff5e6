"""Of what the graph of a step is made, held against counts by hand and by PyTorch's own counter."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headroom.watch.graph_size import GraphSize, measure_graph


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(8, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.layer(x)[0]
        return states[:, -1]


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4, bias=False)), (5, 8)),
        (nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.ReLU(), nn.Conv2d(6, 2, 1)), (2, 4, 9, 9)),
        (nn.Conv1d(3, 5, 4, stride=2), (2, 3, 20)),
        (nn.Linear(8, 4), (2, 7, 8)),
        (_Recurrent(), (3, 6, 8)),
    ],
)
def test_products_and_convolutions_are_those_that_pytorch_counts(
    net: nn.Module, x: tuple[int, ...]
) -> None:
    with FlopCounterMode(display=False) as counter:
        output = net(torch.randn(x))
    assert 2 * measure_graph([output]).multiply_adds == counter.get_total_flops() > 0


def test_nodes_are_counted_once_and_leaves_are_none() -> None:
    weight = torch.ones(3, requires_grad=True)
    double = weight * 2
    assert measure_graph([double + double, double.sum()]) == GraphSize(3, 0)
    assert measure_graph([torch.ones(3), weight]) == GraphSize(0, 0)
