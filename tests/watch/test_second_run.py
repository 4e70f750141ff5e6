"""A mistake is seen by a second run of the step: what it sees, when there is none, and that it
keeps nothing."""

import gc
import signal
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from headroom.base.raw_inputs import make_inputs
from headroom.watch.failed_step import explain_failure

META = torch.device("meta")
X, Y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
XM, YM = X.to(META), Y.to(META)


class _Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3, 4))
        self.b = torch.ones(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a) @ self.b


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.tables = {"shift": torch.ones(4, 3)}

    def forward(self, x: Tensor) -> Tensor:
        return self._shifted(self.fc(x))

    def _shifted(self, x: Tensor) -> Tensor:
        rows = self.tables["shift"][:2]
        shift = rows * 2
        return x + shift


class _Times(nn.Module):
    """Multiplies what does not fit the first time, and what a test says from then on."""

    def __init__(self, then: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.then = then
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return x @ self.weight if self.calls == 1 else self.then(x)


def _told(model: nn.Module, x: Tensor = X, y: Tensor = Y) -> str:
    with pytest.raises(RuntimeError) as caught:
        model(x)
    return explain_failure(caught.value, model, (x, y), lambda: model(x)) or ""


def test_of_several_products_in_a_line_the_tensors_of_the_one_that_failed_are_told() -> None:
    told = _told(_Products())
    assert "a tensor made there float32 (2, 4), self.b (plain tensor b) float32 (5, 5) in" in told
    assert "self.a " not in told


def test_what_was_made_of_an_unregistered_tensor_lines_before_leads_back_to_it() -> None:
    told = _told(_Table().to(META), XM, YM)
    assert "shift (made of plain tensor tables['shift']) is on cpu, x is on meta; a plain" in told
    assert "nor does this" not in told


def test_a_tensor_that_nobody_holds_is_told_to_be_made_there() -> None:
    model = _Times(lambda x: x @ torch.zeros(4, 4))
    told = _told(model)
    assert "x (the batch's inputs) float32 (2, 3), a tensor made there float32 (4, 4) in" in told


def test_what_the_second_run_raises_while_the_first_error_is_handled_is_its_own() -> None:
    """Python makes the first error, which is let go of by then, the context of the second."""
    model = _Products()
    try:
        model(X)
    except RuntimeError as error:
        told = explain_failure(error, model, (X, Y), lambda: model(X)) or ""
    assert "a tensor made there float32 (2, 4), self.b (plain tensor b) float32 (5, 5) in" in told


def _raise(error: BaseException) -> Callable[[Tensor], Any]:
    def then(x: Tensor) -> Any:
        raise error

    return then


OTHERWISE: dict[str, Callable[[Tensor], Any]] = {
    "not at all": lambda x: x,
    "with an error of another kind": lambda x: x.backward(),
    "for memory": _raise(torch.OutOfMemoryError("CUDA out of memory")),
    "by an exit": _raise(SystemExit(3)),
}


@pytest.mark.parametrize("then", OTHERWISE.values(), ids=OTHERWISE.keys())
def test_where_the_second_run_does_not_fail_alike_the_first_error_is_told(
    then: Callable[[Tensor], Any],
) -> None:
    model = _Times(then)
    told = _told(model)
    assert model.calls == 2
    assert told.startswith("model.name: PyTorch refused what it was given in the model (_Times), ")
    assert "`return x @ self.weight if" in told
    assert "; the batch: inputs float32 (2, 3), targets int64 (2,) (PyTorch: " in told
    assert "cannot be multiplied (2x3 and 4x4)" in told


class _Rows(Dataset[Tensor]):
    def __getitem__(self, at: int) -> Tensor:
        return X @ X  # which does not fit

    def __len__(self) -> int:
        return 2


def _refused() -> None:
    make_inputs(X, [], missing="mean")  # a ValueError of ours


def test_nothing_runs_again_for_what_a_data_loader_or_this_project_raises() -> None:
    """Whose batch is the one before, which has nothing to do with it."""
    calls: list[int] = []
    for fails in (lambda: next(iter(DataLoader(_Rows()))), _refused):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            fails()
        assert (
            explain_failure(caught.value, nn.Linear(3, 2), (X, Y), lambda: calls.append(1)) is None
        )
    assert calls == []


def test_a_signal_ends_the_second_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a shell's foreground: what a shell starts behind it has another answer to Ctrl-C.
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        _told(_Times(_raise(KeyboardInterrupt())))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        KeyError("mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_nothing_runs_again_for_memory_a_lost_device_or_what_is_no_mistake(
    error: Exception,
) -> None:
    calls: list[int] = []
    explain_failure(error, nn.Linear(3, 2), (X, Y), lambda: calls.append(1))
    assert calls == []


def test_the_second_run_holds_nothing_of_the_first_and_no_gradients_and_is_silent() -> None:
    made: list[weakref.ref[Tensor]] = []
    states: list[tuple[bool, bool]] = []

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            states.append((bool(made) and made[0]() is not None, torch.is_grad_enabled()))
            inner = self.fc(x)
            made.append(weakref.ref(inner))
            if len(made) > 1:
                warnings.warn("said again", UserWarning, stacklevel=2)
            return inner @ self.fc.weight[:2]

    told = _told(Deep())
    assert states == [(False, True), (False, False)]
    assert "inner float32 (2, 3)" in told
    gc.collect()
    assert made[1]() is None


def test_a_compiled_model_runs_again_as_it_is_written() -> None:
    model = _Products()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError) as caught:
        compiled(X)
    told = explain_failure(caught.value, model, (X, Y), lambda: compiled(X)) or ""
    assert "`return (x @ self.a) @ self.b`" in told
    assert "self.b (plain tensor b) float32 (5, 5) in matmul in the model (_Products)" in told
