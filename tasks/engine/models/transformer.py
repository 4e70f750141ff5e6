"""A decoder-only transformer, GPT-style: tokens in, at every position the logits of the next token
out. It is a plain nn.Module and knows nothing of settings: what its arguments may be is told in
`builtin.py`. It refuses nothing and takes rows of any length up to its context.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

INIT_STD = 0.02  # of GPT-2 (Radford et al. 2019), for every weight but those into the residual sum
ROPE_BASE = 10_000.0  # the slowest pair turns once in 2 pi * 10,000 positions


class Rotary(nn.Module):
    """Turns each pair of a head's channels by an angle that grows with the position, so that a
    product of query and key depends on how far apart they are, not on where (RoFormer, Su et al.
    2021, arXiv:2104.09864). Channel i is paired with channel i + size / 2.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_size: int, *, context: int) -> None:
        super().__init__()
        rates = ROPE_BASE ** (-torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)
        angles = torch.outer(torch.arange(context, dtype=torch.float32), rates)
        # Not persistent: they follow from the arguments, and weights are what was learnt.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, heads, tokens, head size), turned; in the type that it came in."""
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        # In float32, also under autocast: so it is rounded to bf16 once, and not at each product.
        first, second = x.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.type_as(x)


class Attention(nn.Module):
    """Causal self-attention of several heads (Vaswani et al. 2017, arXiv:1706.03762)."""

    def __init__(self, width: int, *, heads: int, dropout: float, rotary: Rotary | None) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.inputs = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.inputs(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        if self.rotary is not None:
            query, key = self.rotary(query), self.rotary(key)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """Attention, then an MLP of four times the width; each reads a normalized copy of the residual
    sum and adds to it (pre-norm, Xiong et al. 2020, arXiv:2002.04745)."""

    def __init__(self, width: int, *, heads: int, dropout: float, rotary: Rotary | None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads=heads, dropout=dropout, rotary=rotary)
        self.mlp_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        hidden = functional.gelu(self.widen(self.mlp_norm(x)))
        return x + self.dropout(self.narrow(hidden))


class Transformer(nn.Module):
    """tokens (batch, up to context) int64 -> logits (batch, tokens, vocabulary).

    Position t sees tokens 0..t only. The matrix that embeds the tokens also reads the logits out
    (Press & Wolf 2017, arXiv:1608.05859). Unlike GPT-2 its linear layers have no biases.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        context: int,
        layers: int,
        heads: int,
        width: int,
        dropout: float,
        rope: bool,
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = None if rope else nn.Embedding(context, width)
        rotary = Rotary(width // heads, context=context) if rope else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, heads=heads, dropout=dropout, rotary=rotary) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self._draw_weights()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.features(tokens))

    def features(self, tokens: Tensor) -> Tensor:
        """What the logits are read from: (batch, tokens, width), normalized."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, features: Tensor) -> Tensor:
        """(..., width) -> (..., vocabulary), by the transposed embedding."""
        return functional.linear(features, self.embedding.weight)

    def products(self, tokens: int) -> int:
        """Multiply-adds of a row of `tokens` that are not those of a linear layer: the logits by
        the tied matrix, and for each token and layer width * tokens for the scores and as many for
        the values. What a causal kernel leaves out is counted too, as in PaLM's account of a
        model's work (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), so that shares of a
        device's peak compare.
        """
        width = self.embedding.embedding_dim
        head = width * self.embedding.num_embeddings
        return tokens * (head + len(self.blocks) * 2 * tokens * width)

    def _draw_weights(self) -> None:
        # A block adds to the residual sum twice; without the smaller start its spread would grow
        # with the root of the number of layers (GPT-2, Radford et al. 2019, section 2.3).
        into_sum = INIT_STD / math.sqrt(2 * len(self.blocks))
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends = name.endswith((".output", ".narrow"))
                nn.init.normal_(module.weight, std=into_sum if ends else INIT_STD)
