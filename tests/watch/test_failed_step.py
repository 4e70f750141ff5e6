"""Mistakes with devices, dtypes and shapes, each provoked on a small model. The device `meta`
beside `cpu` raises PyTorch's real errors for two devices; what only a GPU says is recorded text."""

import gc
import importlib
import math
import re
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.overrides import wrap_torch_function

from headroom.models.builtin import build_model
from headroom.models.predictor import load, save
from headroom.watch.failed_step import describe_own_line, explain_failure
from headroom.watch.out_of_memory import clear_frames
from headroom.watch.tensor_names import find_reachable

META = torch.device("meta")
GLOBAL = torch.ones(3)
Forward = Callable[[Any, Any], Any]


class _Does(nn.Module):
    """A model whose forward is a function of itself and its inputs."""

    def __init__(self, does: Forward, **held: Any) -> None:
        super().__init__()
        self.does = does
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Any) -> Any:
        return self.does(self, x)


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.scale = torch.ones(3)
        self.tables = {"shift": torch.ones(3)}

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * self.scale


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential()
        self.encoder.norm = _Norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class _Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.blocks = [nn.Linear(3, 3), nn.Linear(3, 3)]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 10), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def _make_a_mask(self: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(3)
    return self.fc(x) + mask


def _make_inline(self: Any, x: Tensor) -> Tensor:
    return self.fc(x) + torch.zeros(3)


def _make_a_layer(self: Any, x: Tensor) -> Tensor:
    return nn.Linear(3, 2)(x)


def _use_a_global(self: Any, x: Tensor) -> Tensor:
    return self.fc(x) * GLOBAL


def _add_entries(self: Any, x: dict[str, Tensor]) -> Tensor:
    return x["ids"] + x["mask"]


def _double_first(self: Any, x: Tensor) -> Tensor:
    return self.fc(x * 2)


def _hide_upper(self: Any, x: Tensor) -> Tensor:
    scores = self.fc(x)
    return scores.masked_fill(self.mask[:2] == 0, -1.0)


class _Helper:
    def __init__(self) -> None:
        self.table = torch.ones(3)

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.table


def _on_several_lines(self: Any, x: Tensor) -> Tensor:
    return torch.cat(
        [x, self.extra],
        dim=1,
    )


def _in_place(self: Any, x: Tensor) -> Tensor:
    x += self.extra
    return x


X, Y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
XM, YM = X.to(META), Y.to(META)
IMAGES = torch.zeros(2, 1, 8, 8)


def _held(*size: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(*size, dtype=dtype))


class _Case(NamedTuple):
    model: Callable[[], nn.Module]
    batch: tuple[Any, Any]
    said: list[str]  # in this order
    loss: Callable[..., Any] | None = None
    not_said: str = "Traceback"


def _fc(does: Forward) -> Callable[[], nn.Module]:
    return lambda: _Does(does, fc=nn.Linear(3, 3)).to(META)


DEVICES = {
    "plain tensor": _Case(
        lambda: _Encoder().to(META),
        (XM, YM),
        [
            "model.name: tensors on different devices met in mul in layer encoder.norm (_Norm), ",
            "`return self.weight * x * self.scale`",
            "self.scale (plain tensor encoder.norm.scale) is on cpu",
            "a tensor made there is on meta",
            "; a plain tensor does not move with the model",
            "self.register_buffer(",
            "; nor does this move with the model: encoder.norm.tables['shift'] (PyTorch: ",
        ],
    ),
    "layers in a list": _Case(
        lambda: _Listed().to(META),
        (XM, YM),
        [
            "layer blocks[0] (Linear(in_features=3, out_features=3",
            "`x = block(x)`",
            "unregistered blocks[0].weight is on cpu, unregistered blocks[0].bias is on cpu, ",
            "nn.ModuleList",
            "nor does this move with the model: blocks[1].weight, blocks[1].bias",
        ],
    ),
    "made in forward": _Case(
        _fc(_make_a_mask),
        (XM, YM),
        ["model.name: ", "`return self.fc(x) + mask`", "mask is on cpu", "device=x.device"],
        not_said="plain tensor",
    ),
    "made in the line": _Case(
        _fc(_make_inline),
        (XM, YM),
        ["model.name: ", "`return self.fc(x) + torch.zeros(3)`", "device=x.device"],
    ),
    "layer made in forward": _Case(
        _fc(_make_a_layer),
        (XM, YM),
        [
            "a layer made in forward (Linear(in_features=3, out_features=2",
            "Linear.weight is on cpu",
            "in __init__",
        ],
    ),
    "global": _Case(_fc(_use_a_global), (XM, YM), ["* GLOBAL`", "GLOBAL is on cpu"]),
    "entry of the batch": _Case(
        _fc(_add_entries),
        ({"ids": XM, "mask": X}, YM),
        [
            "data.source: ",
            "x['mask'] (the batch's inputs['mask']) is on cpu",
            "x['ids'] (the batch's inputs['ids']) is on meta",
            "give every entry of the batch",
        ],
    ),
    "one layer elsewhere": _Case(
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2, device=META)),
        (X, Y),
        [
            "layer 2 (Linear(in_features=3, out_features=2",
            "parameter 2.weight is on meta, parameter 2.bias is on meta, the input is on cpu",
            "without device=",
        ],
    ),
    "targets": _Case(
        lambda: nn.Linear(3, 2),
        (X, (Y, YM)),
        ["data.source: ", "cross_entropy", "y[1] (the batch's targets[1]) is on meta"],
        loss=lambda out, y: functional.cross_entropy(out, y[1]),
    ),
    "lstm": _Case(
        lambda: nn.Sequential(nn.LSTM(3, 4)),
        (XM, Y),
        ["data.source: ", "layer 0 (LSTM(3, 4))", "x (the batch's inputs) is on meta"],
    ),
    "joined": _Case(
        lambda: _Does(_on_several_lines, extra=torch.ones(2, 4), fc=nn.Linear(1, 1)).to(META),
        (XM, YM),
        ["self.extra (plain tensor extra) is on cpu", "self.register_buffer("],
    ),
    "norm": _Case(
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(META).append(nn.LayerNorm(3)),
        (XM, YM),
        ["layer 2 (LayerNorm((3,)", "parameter 2.weight is on cpu"],
    ),
    "copied to numpy": _Case(
        lambda: _Does(lambda self, x: x.numpy()),
        (XM, YM),
        ["inputs) float32", "in numpy in", "numpy leaves"],
    ),
}

DEVICES |= {
    "a model that was moved by its maker": _Case(
        lambda: nn.Sequential(nn.Linear(3, 2)).to(META),
        (X, Y),
        [
            "model.name: ",
            "x (the batch's inputs) is on cpu, parameter 0.weight is on meta",
            "the model is on meta and the whole batch is not",
            "since the run moves the model",
        ],
    ),
    "part of an operand": _Case(
        lambda: _Does(
            _hide_upper, other=torch.ones(3), mask=torch.ones(3, 3), fc=nn.Linear(3, 3)
        ).to(META),
        (XM, YM),
        [
            "in masked_fill in ",
            "made of plain tensor mask is on cpu, scores is on meta; a plain tensor does not move",
            "nor does this move with the model: other",
        ],
    ),
    "an object's tensor": _Case(
        lambda: _Does(
            lambda self, x: self.helper(self.fc(x)), helper=_Helper(), fc=nn.Linear(3, 3)
        ).to(META),
        (XM, YM),
        [
            "`return x * self.table`",
            "self.table (plain tensor helper.table) is on cpu",
            "; a plain tensor does not move with the model",
        ],
    ),
}

DTYPES = {
    "float64 rows": _Case(
        lambda: nn.Sequential(nn.Linear(3, 2)),
        (X.double(), Y),
        [
            "data.source: PyTorch refused x (the batch's inputs) float64 (2, 3) in layer 0 (",
            "the model is float32: make x (the batch's inputs) so, or convert it with .to(",
        ],
    ),
    "float64 entry, computed with": _Case(
        lambda: _Does(_double_first, fc=nn.Linear(3, 2)),
        (X.double(), Y),
        [
            "model.name: ",
            "layer fc (Linear(in_features=3, out_features=2",
            "`return self.fc(x * 2)`",
            "make the input so, or convert it with .to(torch.float32); the batch: inputs float64",
        ],
    ),
    "whole numbers": _Case(
        lambda: nn.Sequential(nn.Linear(3, 2)),
        ([X.long()], Y),
        ["model.name: ", "(the batch's inputs[0]) int64 (2, 3)", ".float()", "nn.Embedding"],
        loss=None,
    ),
    "one half layer": _Case(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2).half()),
        (X, Y),
        ["model.name: ", "layer 2 (Linear", "the model is float32: make parameter 2.weight"],
    ),
    "convolution": _Case(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3)),
        (IMAGES.double(), Y),
        ["data.source: ", "float64 (2, 1, 8, 8) in layer 0 (Conv2d(1, 4"],
    ),
    "embedding": _Case(
        lambda: nn.Sequential(nn.Embedding(10, 4)),
        (X, Y),
        ["inputs) float32", "layer 0 (Embedding(10, 4))", "give int64"],
    ),
    "lstm": _Case(
        lambda: nn.Sequential(nn.LSTM(3, 4)),
        (X.double(), Y),
        ["inputs) float64", "layer 0 (LSTM(3, 4))"],
    ),
    "norm": _Case(
        lambda: nn.Sequential(nn.LayerNorm(3)), (X.double(), Y), ["float64", "layer 0 (LayerNorm"]
    ),
    "float labels": _Case(
        lambda: nn.Linear(3, 2),
        (X, Y.float()),
        [
            "data.source: ",
            "y (the batch's targets) float32 (2,) in cross_entropy",
            "are int64: give",
        ],
        loss=functional.cross_entropy,
    ),
    "labels as probabilities": _Case(
        lambda: nn.Linear(3, 2),
        (X, torch.zeros(2, 2, dtype=torch.int64)),
        ["out float32 (2, 2), y (the batch's targets) int64 (2, 2) in", "class probabilities"],
        loss=functional.cross_entropy,
    ),
    "labels for a binary loss": _Case(
        lambda: nn.Linear(3, 2),
        (X, {"a": torch.zeros(2, 2, dtype=torch.int64)}),
        ["data.source: ", "(the batch's targets['a']) int64 (2, 2)", "convert with .float()"],
        loss=lambda out, y: functional.binary_cross_entropy_with_logits(out, y["a"]),
    ),
    "softmax of labels": _Case(
        lambda: _Does(lambda self, x: x.softmax(1)),
        (X.long(), Y),
        ["x (the batch's inputs) int64 (2, 3) in softmax", ".float()"],
    ),
    "product": _Case(
        lambda: _Does(lambda self, x: x @ self.w, w=_held(3, 3)),
        (X.double(), Y),
        [
            "x (the batch's inputs) float64 (2, 3), self.w (parameter w) float32 (3, 3) in matmul",
            "make x (the batch's inputs) so, or convert it with .to(",
        ],
    ),
    "float index": _Case(
        lambda: _Does(lambda self, x: self.w[x], w=_held(3, 3)),
        (X, Y),
        ["self.w (parameter w) float32 (3, 3), x", "indices must be long"],
    ),
    "float mask": _Case(
        lambda: _Does(lambda self, x: x.masked_fill(self.m, 0.0), m=_held(3).detach()),
        (X, Y),
        ["self.m (plain tensor m) float32 (3,) in masked_fill", "only supports boolean masks"],
    ),
    "in place": _Case(
        lambda: _Does(_in_place, extra=torch.ones(3)),
        (X.long(), Y),
        ["x (the batch's inputs) int64 (2, 3), self.extra (plain tensor extra) float32"],
    ),
}

SHAPES = {
    "linear": _Case(
        lambda: _Does(lambda self, x: self.encoder(x), encoder=nn.Sequential(nn.Linear(4, 2))),
        (X, Y),
        [
            "model.name: PyTorch refused x (the batch's inputs) float32 (2, 3) in layer "
            "encoder.0 (Linear(in_features=4, out_features=2, bias=True)), ",
            "self.encoder(x)",
            "make it for the last size of what it is given",
            "the batch: inputs float32 (2, 3), targets int64 (2,) (PyTorch: mat1",
        ],
    ),
    "images into a linear layer": _Case(
        _Images,
        (IMAGES, Y),
        ["layer encoder.0 (Linear(in_features=64, out_features=10", "put nn.Flatten() before it"],
    ),
    "channels last": _Case(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3)),
        (torch.zeros(2, 8, 8, 3), Y),
        ["layer 0 (Conv2d(3, 4", "x.movedim(-1, 1)"],
    ),
    "wrong channels": _Case(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), (IMAGES, Y), ["or change its in_channels"]
    ),
    "no channel": _Case(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3)), (IMAGES[:, 0], Y), ["x.unsqueeze(1) before it"]
    ),
    "rows into a convolution": _Case(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3)),
        (X, Y),
        ["inputs) float32 (2, 3) in layer 0", "Expected 3D"],
    ),
    "small images": _Case(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 9)),
        (IMAGES, Y),
        ["in layer 0 (Conv2d(1, 4, kernel_size=(9, 9)", "Kernel size"],
    ),
    "one row": _Case(
        lambda: nn.Sequential(nn.BatchNorm1d(3)), (X[:1], Y[:1]), ["train.batch_size"]
    ),
    "batch norm": _Case(
        lambda: nn.Sequential(nn.BatchNorm1d(4)),
        (X, Y),
        ["inputs) float32 (2, 3)", "BatchNorm1d(4"],
    ),
    "layer norm": _Case(
        lambda: nn.Sequential(nn.LayerNorm(4)),
        (X, Y),
        ["inputs) float32 (2, 3) in layer 0 (LayerNorm((4,)"],
    ),
    "lstm": _Case(
        lambda: nn.Sequential(nn.LSTM(4, 4)),
        (X, Y),
        ["layer 0 (LSTM(4, 4))", "make it for the last size of"],
    ),
    "attention": _Case(
        lambda: nn.TransformerEncoderLayer(4, 2),
        (X[None], Y),
        ["x (the batch's inputs) float32 (1, 2, 3)", "layer self_attn (MultiheadAttention())"],
    ),
    "ids beyond an embedding": _Case(
        lambda: nn.Sequential(nn.Embedding(10, 4)),
        (torch.tensor([[3, 12]]), Y),
        ["layer 0 (Embedding(10, 4))", "it takes 0 to its rows - 1"],
    ),
    "labels beyond the outputs": _Case(
        lambda: nn.Linear(3, 2),
        (X, torch.tensor([1, 7])),
        [
            "data.source: ",
            "out float32 (2, 2), y (the batch's targets) int64 (2,)",
            "labels go from 0 to the model's outputs - 1: number them from 0",
        ],
        loss=functional.cross_entropy,
    ),
    "labels in a column": _Case(
        lambda: nn.Linear(3, 2),
        (X, Y[:, None]),
        ["out float32 (2, 2), y (the batch's targets) int64 (2, 1)", "targets.squeeze(1)"],
        loss=nn.CrossEntropyLoss(),
    ),
    "rows lost by the model": _Case(
        lambda: _Does(lambda self, x: x.reshape(-1, 2)),
        (X, Y),
        ["float32 (3, 2), y (the batch's targets) int64 (2,)", "batch_size (3) to match"],
        loss=functional.cross_entropy,
    ),
    "targets of a language model": _Case(
        lambda: _Does(lambda self, x: torch.zeros(2, 4, 3)),
        (X, Y),
        ["out float32 (2, 4, 3), y (the batch's targets) int64 (2,)", "target size [2, 3]"],
        loss=functional.cross_entropy,
    ),
    "one output too deep": _Case(
        lambda: nn.Linear(3, 1),
        (X, torch.zeros(2)),
        ["out float32 (2, 1), y (the batch's targets) float32 (2,)", "must be the same as"],
        loss=functional.binary_cross_entropy_with_logits,
    ),
    "regression": _Case(
        lambda: nn.Linear(3, 2),
        (X, torch.zeros(2, 4)),
        ["out float32 (2, 2), y (the batch's targets) float32 (2, 4) in MSELoss()", "equal"],
        loss=nn.MSELoss(),
    ),
    "sum": _Case(
        lambda: _Does(lambda self, x: x + self.w, w=_held(4)),
        (X, Y),
        ["inputs) float32 (2, 3), self.w (parameter w) float32 (4,) in add", "or 1 to be spread"],
    ),
    "view": _Case(
        lambda: _Does(lambda self, x: x.view(2, 9)),
        (X, Y),
        ["x (the batch's inputs) float32 (2, 3)"],
    ),
    "joined over several lines": _Case(
        lambda: _Does(_on_several_lines, extra=torch.ones(5, 4)),
        (X, Y),
        ["inputs) float32 (2, 3), self.extra (plain tensor extra) float32 (5, 4) in cat"],
    ),
    "pooled away": _Case(
        lambda: _Does(lambda self, x: self.pool(x), pool=nn.MaxPool2d(9)),
        (IMAGES, Y),
        ["x (the batch's inputs) float32 (2, 1, 8, 8) in layer pool (MaxPool2d(", "too small"],
    ),
    "no such dimension": _Case(
        lambda: _Does(lambda self, x: x.sum(dim=2)),
        (X, Y),
        ["x (the batch's inputs) float32 (2, 3)"],
    ),
}


CALLS = {
    "an argument is missing": _Case(
        lambda: _Does(lambda self, x: self.pair(x), pair=nn.Bilinear(3, 3, 2)),
        (X, Y),
        [
            "model.name: PyTorch refused x (the batch's inputs) float32 (2, 3) in layer pair ",
            "call it with what its forward takes",
            "missing 1 required positional argument: 'input2'",
        ],
    ),
    "an argument is unknown": _Case(
        lambda: _Does(lambda self, x: self.fc(**x), fc=nn.Linear(3, 2)),
        ({"input": X, "mask": X}, Y),
        ["(the batch's inputs['mask']) float32 (2, 3) in layer fc", "unexpected keyword"],
    ),
    "a dict for a tensor": _Case(
        lambda: _Does(lambda self, x: self.fc(x), fc=nn.Linear(3, 2)),
        ({"a": X, "b": X + 1}, Y),
        [
            "model.name: PyTorch refused x['a'] (the batch's inputs['a']) float32 (2, 3), ",
            "x['name']",
        ],
    ),
}


def _run(case: _Case, model: nn.Module) -> None:
    x, y = case.batch
    out = model(x[0] if isinstance(x, list) else x)
    if case.loss is not None:
        case.loss(out, y)


def _raised(case: _Case) -> tuple[Exception, nn.Module]:
    model = case.model()
    try:
        _run(case, model)
    except Exception as error:
        return error, model
    raise AssertionError("PyTorch raised nothing")


KINDS = {"device": DEVICES, "dtype": DTYPES, "shape": SHAPES, "call": CALLS}


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{kind}: {name}")
        for kind, cases in KINDS.items()
        for name, case in cases.items()
    ],
)
def test_a_mistake_is_told_by_the_names_of_its_tensors(case: _Case) -> None:
    error, model = _raised(case)
    told = explain_failure(error, model, case.batch, partial(_run, case, model))
    assert told is not None, f"{type(error).__name__}: {error}"
    at = 0
    for words in case.said:
        assert words in told[at:], told
        at = told.index(words, at) + len(words)
    assert case.not_said not in told
    assert re.match(r"(model\.name|data\.source|train\.loss): ", told)
    assert "\n" not in told
    assert " ".join(str(error).split())[:60] in told


SAME = "Expected all tensors to be on the same device, but "
RECORDED = {
    "two devices": SAME + "found at least two devices, cuda:0 and cpu! (when checking argument for "
    "argument mat2 in method wrapper_CUDA_addmm)",
    "newer": SAME + "got mat1 is on cpu, different from other tensors on cuda:0 (when checking "
    "argument in method wrapper_CUDA_addmm)",
    "convolution": "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) "
    "should be the same",
    "convolution, the other way": "Input type (torch.FloatTensor) and weight type "
    "(torch.cuda.FloatTensor) should be the same or input should be a MKLDNN tensor and weight is "
    "a dense tensor",
    "index": "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
    "norm": "Tensor for argument #2 'weight' is on CPU, but expected it to be on GPU (while "
    "checking arguments for cudnn_batch_norm)",
    "fake": "Unhandled FakeTensor Device Propagation for aten.add.Tensor, found two different "
    "devices cuda:0, cpu",
    "metal": "Placeholder storage has not been allocated on MPS device!",
    "metal, input": "Passed CPU tensor to MPS op",
    "random numbers": "Expected a 'cuda' device type for generator but found 'cpu'",
}


def _saying(text: str) -> Forward:
    """Calls a function of PyTorch's that raises it, given the scale and the rows."""

    @wrap_torch_function(lambda *tensors: tensors)
    def refuse(*tensors: Tensor) -> Tensor:
        return (_ for _ in ()).throw(RuntimeError(text))

    return lambda self, x: refuse(self.scale, x)


@pytest.mark.parametrize("text", RECORDED.values(), ids=RECORDED.keys())
def test_what_only_gpus_say_is_known_as_a_mistake_with_devices(text: str) -> None:
    model = _Does(_saying(text), scale=torch.ones(3), fc=nn.Linear(3, 3)).to(META)
    with pytest.raises(RuntimeError) as caught:
        model(XM)
    told = explain_failure(caught.value, model, (XM, YM), lambda: model(XM)) or ""
    assert told.startswith("model.name: tensors on different devices met in refuse in the model")
    assert ": self.scale (plain tensor scale) is on cpu, x (the batch's inputs) is on meta" in told
    assert text[:60] in told


def test_half_against_float_weights_on_a_gpu_is_a_mistake_with_dtypes() -> None:
    text = "Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be "
    model = _Does(_saying(text + "the same"), scale=torch.ones(3).half(), fc=nn.Linear(3, 3))
    with pytest.raises(RuntimeError) as caught:
        model(X)
    told = explain_failure(caught.value, model, (X, Y), lambda: model(X)) or ""
    assert told.startswith("model.name: PyTorch refused self.scale (plain tensor scale) float16")
    assert "the model is float32: make self.scale (plain tensor scale) so, or convert" in told


def test_a_device_that_failed_for_good_is_not_asked_and_names_the_way_to_the_line() -> None:
    text = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later"
    model = _Does(_saying(text), scale=torch.ones(3))
    with pytest.raises(RuntimeError) as caught:
        model(X)
    told = explain_failure(caught.value, model, (X, Y), lambda: model(X)) or ""
    assert "an index or a label is out of range on the GPU" in told
    assert "device.name: cpu" in told
    assert "\n" not in told


def _run_out(x: Tensor) -> Tensor:
    try:
        raise torch.OutOfMemoryError("CUDA out of memory")
    except torch.OutOfMemoryError:
        return x @ x  # which does not fit either


def _raise_own(self: Any, x: Tensor) -> Tensor:
    raise ValueError("mine: The size of tensor a must match the size of tensor b")


def _assert_own(self: Any, x: Tensor) -> Tensor:
    assert x.ndim == 7, "Expected all tensors to be on the same device"
    return x


OTHERS: dict[str, Forward] = {
    "memory": lambda self, x: _saying("CUDA out of memory. Tried to allocate 2.00 GiB")(self, x),
    "memory, in a mistake's words": lambda self, x: _run_out(x),
    "the user's own words": _raise_own,
    "the user's own check": _assert_own,
    "a list": lambda self, x: [x][3],
    "a key": lambda self, x: {"a": x}["shapes cannot be multiplied"],
    "a name": lambda self, x: self.fully_connected(x),
    "a function's signature": lambda self, x: _make_inline(self),  # type: ignore[call-arg]
    "unpacking something else": lambda self, x: [0 for _, _ in [(1, 2, 3)]],
    "loading weights": lambda self, x: self.inner.load_state_dict(nn.Linear(4, 2).state_dict()),
    "the user's arithmetic": lambda self, x: x / math.sqrt(-1),
}


@pytest.mark.parametrize("does", OTHERS.values(), ids=OTHERS.keys())
def test_an_error_of_another_kind_is_not_explained(does: Forward) -> None:
    model = _Does(does, inner=nn.Linear(3, 2), scale=torch.ones(3))
    with pytest.raises(Exception, match=".") as caught:
        model(X)
    assert explain_failure(caught.value, model, (X, Y), lambda: model(X)) is None
    assert "test_failed_step.py:" in (describe_own_line(caught.value) or "")


def test_the_own_line_is_the_users_line_and_not_that_of_pytorch_or_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages"
    package.mkdir()
    (package / "a_library.py").write_text("def multiply(x, w):\n    return x @ w\n")
    (tmp_path / "a_net.py").write_text(
        "import a_library\nfrom torch import nn\n\n\n"
        "class Net(nn.Module):\n    def forward(self, x):\n"
        "        return a_library.multiply(x, w=x[:])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(package)
    monkeypatch.chdir(tmp_path)
    model = importlib.import_module("a_net").Net()
    try:
        with pytest.raises(RuntimeError) as caught:
            model(X)
        told = explain_failure(caught.value, model, (X, Y), lambda: model(X)) or ""
    finally:
        del sys.modules["a_net"], sys.modules["a_library"]
    both = "a_net.py:7 `return a_library.multiply(x, w=x[:])` (in it site-packages/a_library.py:2 "
    assert both + "`return x @ w`)" in told
    assert "x (the batch's inputs) float32 (2, 3), w (the batch's inputs) float32 (2, 3)" in told


def test_the_own_line_is_silent_where_no_code_of_the_user_ran(tmp_path: Path) -> None:
    net = build_model("linear", input_shape=(4,), outputs=2, args={})
    spec = {"model": "linear", "args": {}, "task": "classification", "source": "csv"}
    spec |= {"input_shape": [4], "outputs": 2, "class_names": ["a", "b"], "feature_names": None}
    save(net, {**spec, "offset": [0.0], "scale": [1.0] * 4}, tmp_path)
    model = load(tmp_path).model[0]  # before the net itself
    with pytest.raises(RuntimeError) as caught:
        model(X)
    caught.value.__traceback__ = caught.tb.tb_next  # what called the project is not at fault
    assert describe_own_line(caught.value) is None
    told = explain_failure(caught.value, model, (X, Y), partial(model, X)) or ""
    assert "(buffer scale) float32 (4,) in div in the model (Standardize); sizes must be" in told


def test_the_place_is_told_of_an_error_that_stands_for_another() -> None:
    with pytest.raises(RuntimeError) as caught:
        try:
            _Does(lambda self, x: x @ x)(X)
        except RuntimeError as error:
            error.with_traceback(error.__traceback__.tb_next)  # type: ignore[union-attr]
            raise RuntimeError("in other words") from error
    caught.value.__traceback__ = None
    model = _Does(lambda self, x: x @ x)
    told = explain_failure(caught.value, model, (X, Y), lambda: model(X)) or ""
    assert "`model = _Does(lambda self, x: x @ x)`" in told


def test_a_part_of_a_batch_is_known_as_its_entry() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    rows = torch.zeros(8, 3)
    with pytest.raises(RuntimeError) as caught:
        model(rows.split(4)[1])
    assert "input (the batch's inputs) float32 (4, 3)" in (
        explain_failure(caught.value, model, (rows, Y), lambda: model(rows.split(4)[1])) or ""
    )


def test_nothing_is_kept_that_a_layer_held() -> None:
    model, x = _Encoder().to(META), torch.zeros(2, 3, device=META)
    kept = weakref.ref(x), weakref.ref(model), weakref.ref(model.encoder.norm.scale)
    error: BaseException | None = None
    try:
        model(x)
    except RuntimeError as raised:
        error = raised
    assert error is not None
    assert explain_failure(error, model, (x, YM), partial(model, x)) is not None
    clear_frames(error)
    del model, x
    gc.collect()
    assert [one() for one in kept] == [None, None, None]


def test_the_variables_of_a_function_that_still_runs_are_not_kept_by_looking_at_them() -> None:
    model, out, y = nn.Linear(3, 2), torch.zeros(2, 2), torch.zeros(2)
    kept = weakref.ref(out), weakref.ref(y)
    error: BaseException | None = None
    try:
        functional.cross_entropy(out, y)
    except RuntimeError as raised:
        error = raised
    assert error is not None
    assert "the batch's targets float32 (2,) in cross_entropy" in (
        explain_failure(error, model, (X, y), partial(functional.cross_entropy, out, y)) or ""
    )
    clear_frames(error)
    del out, y
    assert [one() for one in kept] == [None, None]


def test_explaining_runs_no_code_of_the_user() -> None:
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)
            self.circle: list[Any] = []
            self.circle.append(self.circle)
            self.deep = nn.LazyLinear(2)

        @property
        def trap(self) -> Tensor:
            raise AssertionError("a property was read")

        def __repr__(self) -> str:
            raise AssertionError("the model was printed")

        def extra_repr(self) -> str:
            raise AssertionError("the model was printed")

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x)

    model = Guarded()
    with pytest.raises(RuntimeError) as caught:
        model(X)
    assert "layer fc (Linear(in_features=4, out_features=2" in (
        explain_failure(caught.value, model, (X, Y), lambda: model(X)) or ""
    )


def test_many_tensors_that_stay_behind_are_counted() -> None:
    held = {f"table{n}": torch.ones(3) for n in range(9)}
    model = _Does(lambda self, x: self.fc(x) + self.table0, fc=nn.Linear(3, 3), **held).to(META)
    with pytest.raises(RuntimeError) as caught:
        model(XM)
    told = explain_failure(caught.value, model, (XM, YM), lambda: model(XM)) or ""
    assert "model: table1, table2, table3, table4, table5 and 3 more (PyTorch" in told


def test_a_scripted_model_and_a_batch_of_no_tensors_are_told_without_a_traceback() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(model)
    with pytest.raises(RuntimeError) as caught:
        scripted(X)
    told = explain_failure(caught.value, scripted, (None, None), lambda: scripted(X)) or ""
    assert told.startswith("model.name: PyTorch refused X float32 (2, 3) in the model ")
    assert " in the model (RecursiveScriptModule), " in told
    assert "the batch: no tensors" in told


@pytest.mark.filterwarnings("ignore:.*FakeTensor")
def test_a_batch_beside_fake_tensors_is_not_read() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(4, 2))
        ids = torch.zeros(2, 3, dtype=torch.int64)
        with pytest.raises(RuntimeError) as caught:
            model(ids)
        told = explain_failure(caught.value, model, (ids, Y), lambda: model(ids)) or ""
    assert "the input float32 (2, 3, 2) in layer 1 (Linear(in_features=4, out_features=2" in told


def test_an_object_that_calls_something_else_its_modules_is_looked_into() -> None:
    """FSDP keeps a tuple under that name: a mistake in such a model was told as one of ours."""

    class State:
        def __init__(self) -> None:
            self._modules = ()
            self.kept = torch.ones(2)

    assert dict(find_reachable([("state", State())], set()))["state.kept"].tolist() == [1.0, 1.0]
