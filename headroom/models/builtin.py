"""Build the built-in models, each a plain nn.Module made from the data's shape and the
arguments under `model.args`; a wrong argument or a shape that does not fit is refused here,
before a device is touched. Models take raw inputs of shape (batch, *input_shape) and return
(batch, outputs); the decoder-only transformer takes tokens and returns at every position the
logits of the next token, (batch, tokens, outputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headroom.settings.model_args import ModelError, find_argument_problems

INIT_STD = 0.02  # of GPT-2 (Radford et al. 2019), for every weight but those into the residual sum
ROPE_BASE = 10_000.0  # the slowest pair turns once in 2 pi * 10,000 positions


class Rotary(nn.Module):
    """Turns each pair of a head's channels by an angle that grows with the position, so that a
    product of query and key depends on how far apart they are, not on where (RoFormer, Su et al.
    2021, arXiv:2104.09864). Channel i is paired with channel i + size / 2."""

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
        """Return what the logits are computed from: (batch, tokens, width), normalized."""
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, features: Tensor) -> Tensor:
        """Compute (..., width) -> (..., vocabulary), by the transposed embedding."""
        return functional.linear(features, self.embedding.weight)

    def products(self, tokens: int) -> int:
        """Return the multiply-adds of a row of `tokens` that are not those of a linear layer:
        the logits by the tied matrix, and for each token and layer width * tokens for the
        scores and as many for the values. What a causal kernel leaves out is counted too, as in
        PaLM's account of a model's work (Chowdhery et al. 2022, arXiv:2204.02311, appendix B),
        so that shares of a device's peak compare."""
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


CHECKED_TOKENS = 8  # of a row: a context of 1,024 would cost GPT-2's size 3 s on two cores


class Standardize(nn.Module):
    """Computes (x - offset) / scale, so that a saved model takes the rows that its user has.

    offset and scale hold one value, or one for each feature of the last axis.
    """

    offset: Tensor
    scale: Tensor

    def __init__(self, offset: Sequence[float], scale: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor(offset, dtype=torch.float32))
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.offset) / self.scale


class TimedNet(nn.Sequential):
    """A net that sees times between those of the training rows alone, since beyond them it would
    answer anything at all, and a line in the times beside it, which goes on.

    Its layers have the names that they have without; what is kept of times is of the data, and no
    weight.
    """

    low: Tensor
    high: Tensor
    slope: Tensor

    def __init__(self, net: nn.Sequential, times: Mapping[str, Any], *, inputs: int) -> None:
        """times: see TimeInputs of the data. inputs: of a row."""
        super().__init__(*net)
        places = list(times["places"])
        bounds = {"low": -math.inf, "high": math.inf, "slope": 0.0}
        for name, otherwise in bounds.items():
            whole = torch.full((inputs,), otherwise)
            if times[name]:
                whole[places] = torch.tensor(times[name], dtype=whole.dtype, device=whole.device)
            self.register_buffer(name, whole, persistent=False)
        self.intercept = float(times["intercept"])

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.minimum(torch.maximum(x, self.low), self.high)
        # No matrix product, which autocast would round to three digits.
        line = (x * self.slope).sum(1, keepdim=True) + self.intercept
        outputs: Tensor = super().forward(seen) + line
        return outputs


def make_linear(input_shape: Sequence[int], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), outputs))


def make_mlp(
    input_shape: Sequence[int],
    outputs: int,
    *,
    hidden: Sequence[int] = (128, 64),
    dropout: float = 0.0,
) -> nn.Module:
    widths = list(hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in zip([math.prod(input_shape), *widths], widths, strict=False):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU(), *_make_dropout(dropout)]
    last = widths[-1] if widths else math.prod(input_shape)
    return nn.Sequential(*layers, nn.Linear(last, outputs))


def make_cnn(
    input_shape: Sequence[int], outputs: int, *, width: int = 32, dropout: float = 0.0
) -> nn.Module:
    """Make two stages of 3x3 convolutions, each halving the image, and one linear layer."""
    if len(input_shape) != 3 or min(input_shape[1:]) < 4:
        raise ModelError(
            "model.name: cnn needs images of shape (channels, height, width) of at least 4 x 4 "
            f"pixels (got {tuple(input_shape)}); use mlp or linear for rows of features"
        )
    channels, height, width_px = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *_make_dropout(dropout),
        nn.Linear(2 * width * (height // 4) * (width_px // 4), outputs),
    )


def make_transformer(
    input_shape: Sequence[int],
    outputs: int,
    *,
    layers: int = 4,
    heads: int = 4,
    width: int = 128,
    dropout: float = 0.0,
    positions: str = "rope",
) -> nn.Module:
    """Make a GPT. The smallest GPT-2 has layers 12, heads 12, width 768, positions learned."""
    (context,) = input_shape
    return Transformer(
        outputs,
        context=context,
        layers=layers,
        heads=heads,
        width=width,
        dropout=dropout,
        rope=positions == "rope",
    )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "linear": make_linear,
    "mlp": make_mlp,
    "cnn": make_cnn,
    "transformer": make_transformer,
}


def build_model(
    name: str,
    *,
    input_shape: Sequence[int],
    outputs: int,
    args: Mapping[str, Any],
    times: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build the model on the current default device, with freshly drawn weights. times: which
    inputs of an mlp are times, see TimeInputs of the data.

    Raises ModelError for an unknown argument or one out of range.
    """
    if wrong := find_argument_problems(name, args):
        raise ModelError(f"model.args: {wrong[0]}")
    model = MODELS[name](tuple(input_shape), outputs, **args)
    if times is None or name != "mlp":
        return model
    assert isinstance(model, nn.Sequential)
    return TimedNet(model, times, inputs=math.prod(input_shape))


def check_model(
    name: str,
    *,
    input_shape: Sequence[int],
    outputs: int,
    args: Mapping[str, Any],
    task: str,
) -> tuple[int, int]:
    """Build the model on the host, send two rows through it, and return the multiply-adds of a row
    and the bytes of the weights.

    On the host and not on the meta device, whose first use costs more seconds than the model. Of
    rows of tokens only the first few are sent: at each the layers do the same work.
    Raises ModelError where it can't be built, does not fit the task, or gives another shape than
    (2, outputs), for tokens (2, tokens, outputs).
    """
    # Here, since builtin.py travels with every logged model and memory_meter.py does not.
    from headroom.watch.out_of_memory import is_oom

    _refuse_other_task(name, task)
    sent = (min(*input_shape, CHECKED_TOKENS),) if task == "tokens" else tuple(input_shape)
    rows = torch.zeros(2, *sent, dtype=torch.int64 if task == "tokens" else torch.float32)
    try:
        model = build_model(name, input_shape=input_shape, outputs=outputs, args=args)
        with torch.inference_mode(), count_multiply_adds(model) as work:
            got = tuple(model(rows).shape)
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        raise ModelError(
            f"model.args: {name} with {dict(args)} and inputs of shape {tuple(input_shape)} needs "
            "more memory than this host has; make it smaller"
        ) from None
    expected = (2, *sent, outputs) if task == "tokens" else (2, outputs)
    if got != expected:
        raise ModelError(f"model.name: {name} must return {expected} for two rows (got {got})")
    weights_bytes = count_bytes(model)
    if isinstance(model, Transformer):
        products = model.products(input_shape[0])
        return sum(work) * input_shape[0] // rows.numel() + products, weights_bytes
    return sum(work) // 2, weights_bytes


def count_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights and buffers."""
    return sum(value.nbytes for value in model.state_dict().values())


def _refuse_other_task(name: str, task: str) -> None:
    if task == "tokens" and name != "transformer":
        raise ModelError(
            f"model.name: {name} learns from rows of features, and this data is tokens; "
            "set model.name to transformer"
        )
    if task != "tokens" and name == "transformer":
        raise ModelError(
            f"model.name: transformer learns from tokens, and this data is for {task}; choose "
            "another model, or set data.source to text or tokens"
        )


@contextmanager
def count_multiply_adds(model: nn.Module) -> Iterator[list[int]]:
    """Count the multiply-adds of the linear and convolution layers that are called inside the
    block."""
    work: list[int] = []

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        # One row of the weights for each output channel; of Hugging Face's Conv1D one column.
        channels = weight.shape[1 if type(module).__name__ == "Conv1D" else 0]
        work.append(output.numel() // channels * weight.numel())

    layers = [m for m in model.modules() if _is_counted(m)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    yield work
    for hook in hooks:
        hook.remove()


def _is_counted(module: nn.Module) -> bool:
    kinds = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    theirs = (type(module).__module__, type(module).__name__)
    return isinstance(module, kinds) or theirs == ("transformers.pytorch_utils", "Conv1D")


def _make_dropout(share: float) -> list[nn.Module]:
    return [nn.Dropout(share)] if share else []
