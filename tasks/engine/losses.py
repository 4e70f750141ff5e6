"""What a model is trained to make small, by task: the mean over the rows of a batch. It refuses a
loss that does not fit what is learnt.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from tasks.engine.settings import ConfigError
from tasks.engine.step import Loss

FITTING = {"classification": "cross_entropy", "regression": "mse", "tokens": "cross_entropy"}


def loss_of(name: str, task: str) -> Loss:
    """The loss called `name` for a task. Raises ConfigError where it does not fit."""
    fits = FITTING[task]
    if name not in ("auto", fits):
        raise ConfigError(f"train.loss: {name} does not fit {task}; use auto or {fits}")
    if task == "tokens":
        return next_token
    return cross_entropy if fits == "cross_entropy" else mse_loss


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy over all tokens.

    logits: (rows, context, vocabulary); tokens: (rows, context) int64.
    """
    return cross_entropy(logits.flatten(0, 1), tokens.flatten())
