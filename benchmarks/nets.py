"""Models that are not built in, as users write them, for rows of numbers: what a forecast is held
against beside the built-in ones.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

Shape = tuple[int, ...]


class Net(nn.Module):
    """Takes rows, flat."""

    def __init__(self, input_shape: Shape, outputs: int) -> None:
        super().__init__()
        self.build(math.prod(input_shape), outputs)

    def build(self, inputs: int, outputs: int) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.of_rows(x.flatten(1))

    def of_rows(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Deep(Net):
    def build(self, inputs: int, outputs: int) -> None:
        layers = [nn.Linear(inputs, 512), nn.GELU()]
        for _ in range(12):
            layers += [nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU()]
        self.layers = nn.Sequential(*layers, nn.Linear(512, outputs))

    def of_rows(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Residual(Net):
    def build(self, inputs: int, outputs: int) -> None:
        self.first, self.last = nn.Linear(inputs, 512), nn.Linear(512, outputs)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
            for _ in range(6)
        )

    def of_rows(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Gated(Net):
    def build(self, inputs: int, outputs: int) -> None:
        self.value, self.gate = nn.Linear(inputs, 768), nn.Linear(inputs, 768)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(768, outputs)

    def of_rows(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.value(x) * torch.sigmoid(self.gate(x))))


class Normed(Net):
    def build(self, inputs: int, outputs: int) -> None:
        layers = []
        for width in (inputs, 1024):
            layers += [nn.Linear(width, 1024), nn.BatchNorm1d(1024), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(1024, outputs))

    def of_rows(self, x: Tensor) -> Tensor:
        return self.layers(x)


class LowRank(Net):
    def build(self, inputs: int, outputs: int) -> None:
        self.down = nn.Parameter(torch.randn(inputs, 16) / inputs**0.5)
        self.up = nn.Parameter(torch.randn(16, 1024) / 4)
        self.last = nn.Linear(1024, outputs)

    def of_rows(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(x @ self.down @ self.up))


class Experts(Net):
    def build(self, inputs: int, outputs: int) -> None:
        self.gate = nn.Linear(inputs, 6)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(inputs, 256), nn.SiLU(), nn.Linear(256, outputs))
            for _ in range(6)
        )

    def of_rows(self, x: Tensor) -> Tensor:
        answers = torch.stack([expert(x) for expert in self.experts], 2)
        return (answers * self.gate(x).softmax(1)[:, None]).sum(2)


class Pairs(Net):
    def build(self, inputs: int, outputs: int) -> None:
        self.first, self.last = nn.Linear(inputs * inputs, 64), nn.Linear(64, outputs)

    def of_rows(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first((x[:, :, None] * x[:, None]).flatten(1))))


class Binned(Net):
    def build(self, inputs: int, outputs: int) -> None:
        self.words = nn.Embedding(64 * inputs, 32)
        self.first: Tensor
        self.register_buffer("first", torch.arange(inputs) * 64)
        self.last = nn.Sequential(nn.Linear(32 * inputs, 256), nn.ReLU(), nn.Linear(256, outputs))

    def of_rows(self, x: Tensor) -> Tensor:
        places = ((x + 3) / 6 * 64).long().clamp(0, 63) + self.first
        return self.last(self.words(places).flatten(1))


class Attending(Net):
    def build(self, inputs: int, outputs: int) -> None:
        self.first, self.last = nn.Linear(1, 64), nn.Linear(64, outputs)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def of_rows(self, x: Tensor) -> Tensor:
        x = self.first(x[..., None])
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last((x + self.wide(x)).mean(1))


class Along(Net):
    def build(self, inputs: int, outputs: int) -> None:
        self.layers = nn.Sequential(
            nn.Conv1d(1, 64, 5, padding=2), nn.ReLU(), nn.Conv1d(64, 64, 5, padding=2), nn.ReLU()
        )
        self.last = nn.Linear(64, outputs)

    def of_rows(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x[:, None]).mean(2))


NETS = tuple(net.__name__ for net in Net.__subclasses__())
