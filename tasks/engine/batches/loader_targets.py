"""The targets of a loader's batches: what task they tell of, and each batch of them looked at on
the host and brought into the types that losses take, before it is sent to a device, where a label
out of range would poison the process. It refuses labels that no class has and numbers that are
none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tasks.engine.base import nested
from tasks.engine.files.source_data import DataError

IGNORED = -100  # the label that PyTorch's losses skip by default
REMEDY = "set data.task, and train.loss to a function of your own"


def task_of(asked: str, inputs: Any, targets: Any) -> str:
    """data.task, or what the targets of a first batch tell. Raises DataError."""
    if asked != "auto":
        return asked
    if not isinstance(targets, Tensor):
        raise DataError(
            f"data.task: targets that are a {type(targets).__name__} do not tell the task; {REMEDY}"
        )
    few = targets.dim() == 2 and targets.shape[1] > 1
    binary = few and bool(((targets == 0) | (targets == 1)).all())
    if targets.is_floating_point():
        return "multilabel" if binary else "regression"
    if targets.dim() <= 1 or (targets.dim() == 2 and targets.shape[1] == 1):
        return "classification"
    first = next(nested.tensors(inputs), None)
    if first is not None and targets.dtype != torch.bool and first.shape == targets.shape:
        return "tokens"
    if binary:
        return "multilabel"
    raise DataError(
        f"data.task: targets of shape {tuple(targets.shape)} and type {_named(targets)} do not "
        f"tell the task; {REMEDY}"
    )


@dataclass(frozen=True)
class Targets:
    """Makes of a batch's targets what a loss takes. outputs: classes; 0 where nobody tells.

    is_own: for a loss of the user's own, which takes them as they are.
    """

    task: str
    outputs: int
    part: str  # training or validation
    is_own: bool = False

    def __call__(self, targets: Any, batch: int) -> Any:
        """batch: from 1, for the message. Raises DataError."""
        if not isinstance(targets, Tensor):
            return targets
        if self.task in ("classification", "tokens") and not self.is_own:
            return self._classes(targets, batch)
        if _is_near(targets):
            self._refuse_unfinite(targets, batch)
        if self.is_own:
            return targets
        if targets.dim() <= 1:
            targets = targets.reshape(len(targets), -1)
        return targets.float()

    def _classes(self, targets: Tensor, batch: int) -> Tensor:
        if targets.is_floating_point():
            raise DataError(
                f"data.source: {self._place(batch)}: the labels of {self._what()} must be whole "
                f"numbers (got {_named(targets)}); return them as int64, or set data.task to "
                "regression"
            )
        if self.task == "classification" and targets.dim() == 2 and targets.shape[1] == 1:
            targets = targets[:, 0]
        wide = targets.long()
        if _is_near(wide):
            self._refuse_unknown(wide, batch)
        return wide

    def _refuse_unknown(self, wide: Tensor, batch: int) -> None:
        skipped = wide == IGNORED if self.task == "tokens" else torch.zeros_like(wide).bool()
        bad = (wide < 0) & ~skipped
        if self.outputs:
            bad |= wide >= self.outputs
        if bool(bad.any()):
            at = bad.nonzero()[0].tolist()
            raise DataError(self._wrong(int(wide[tuple(at)]), at, batch))

    def _wrong(self, label: int, at: list[int], batch: int) -> str:
        most = f"0 to {self.outputs - 1}" if self.outputs else "0 on"
        column = f", position {at[1] + 1}" if len(at) > 1 else ""
        why = ", the label that losses skip" if label == IGNORED else ""
        return (
            f"data.source: {self._place(batch)}, row {at[0] + 1}{column}: a label must be from "
            f"{most} (got {label}{why}); mend or drop such rows"
        )

    def _refuse_unfinite(self, targets: Tensor, batch: int) -> None:
        bad = ~targets.isfinite()
        if bool(bad.any()):
            at = bad.nonzero()[0].tolist()
            raise DataError(
                f"data.source: {self._place(batch)}, row {at[0] + 1}: a target must be a finite "
                f"number (got {targets[tuple(at)].item()}); mend or drop such rows"
            )

    def _place(self, batch: int) -> str:
        return f"batch {batch} of the {self.part} loader"

    def _what(self) -> str:
        return "tokens" if self.task == "tokens" else "a classification"


def _is_near(targets: Tensor) -> bool:
    """Whether a look at the values waits for no device."""
    return targets.device.type == "cpu"


def _named(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
