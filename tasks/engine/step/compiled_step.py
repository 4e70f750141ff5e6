"""A step whose compute torch.compile has made faster, and what is raised where that fails."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tasks.engine.step.cuda_graph import GraphError
from tasks.engine.step.optimizer_step import Loss, Step

MODES = {"default": "default", "max": "max-autotune-no-cudagraphs"}


class _Refused(RuntimeError):
    """torch.compile itself said no: on a Python or a system that it is not made for."""


class _Compiled:
    """A step's compute, compiled when it is first called, so that a refusal is a step's."""

    def __init__(self, compute: Loss, mode: str) -> None:
        self._compute, self._mode = compute, mode
        self._fast: Loss | None = None

    def __call__(self, x: Any, y: Any) -> Tensor:
        if self._fast is None:
            try:
                # Not dynamic: the last, shorter batch is taken plainly and leaves these kernels.
                self._fast = torch.compile(
                    self._compute.__call__,  # type: ignore[operator]
                    mode=self._mode,
                    dynamic=False,
                )
            except RuntimeError as error:
                raise _Refused(first_line(error)) from None
        return self._fast(x, y)


def compiled_step(step: Step, mode: str) -> Step:
    return replace(step, compute=_Compiled(step.compute, MODES[mode]))


def untakeable() -> tuple[type[Exception], ...]:
    """What is raised for a model or a machine that can't be compiled, or a step not recorded."""
    if "torch._inductor" not in sys.modules:  # nothing was compiled: do not import it to ask
        return GraphError, _Refused
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    return GraphError, _Refused, TorchDynamoException, CppCompileError, InvalidCxxCompiler


def first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
