"""Explain a user's mistake with devices, dtypes, shapes and arguments: which parameter, buffer
or entry of the batch met what, by name, in which layer and line, PyTorch's own words, and what
to do about it where that is known. The step is run once more to see it, never where memory ran
out or a device failed for good; no tensor of it is kept. An error that PyTorch did not raise is
not explained.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headroom.base import nested
from headroom.base.import_paths import PACKAGES, forbid_exit, get_error_message, is_installed
from headroom.watch.out_of_memory import clear_frames, is_oom, list_error_chain
from headroom.watch.tensor_names import (
    BUFFER,
    ENTRY,
    LOOSE,
    PARAMETER,
    PLAIN,
    NamedTensor,
    TensorNames,
    find_reachable,
)

TORCH = Path(torch.__file__).parent
OURS = tuple(Path(__file__).parents[2] / name for name in ("headroom", "tasks", "flows"))
STANDARD = Path(sysconfig.get_paths()["stdlib"])
LONGEST_LINE = 100  # characters of a source line that are shown


def describe_own_line(error: BaseException) -> str | None:
    """Describe the file, line and source of the user's own code that raised, and the package
    that it led to; None where none of it ran."""
    foreign = [one for one in traceback.extract_tb(error.__traceback__) if is_foreign(one.filename)]
    own = [place for place in foreign if not is_installed(place.filename)] or foreign
    if not own:
        return None
    beyond = f" (in it {_describe_source_line(foreign[-1])})" if own[-1] is not foreign[-1] else ""
    return _describe_source_line(own[-1]) + beyond


def is_plain(error: BaseException) -> bool:
    """Return whether the error needs no explanation: the user's own code or this project's
    raised it in so many words, or a data loader did, and no step."""
    places = traceback.extract_tb(error.__traceback__)
    if any(TORCH / "utils" / "data" in Path(one.filename).parents for one in places):
        return True
    if not places or is_installed(places[-1].filename):
        return False
    return (places[-1].line or "").startswith(("raise ", "assert "))


def is_foreign(file: str) -> bool:
    """Return whether the file is code of neither PyTorch nor this project nor Python."""
    path = Path(file)
    if file.startswith("<") or any(path.is_relative_to(one) for one in (TORCH, *OURS)):
        return False
    return any(part in PACKAGES for part in path.parts) or not path.is_relative_to(STANDARD)


def find_ended_frames(error: BaseException) -> list[FrameType]:
    """Return the frames of the error whose functions have ended, the outermost first."""
    running, frame = set(), sys._getframe()
    while frame is not None:
        running.add(id(frame))  # no frame may hold itself
        frame = frame.f_back  # type: ignore[assignment]
    return [one for one, _ in traceback.walk_tb(error.__traceback__) if id(one) not in running]


def _describe_source_line(place: FrameSummary) -> str:
    file = Path(place.filename)
    here = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    source = " ".join((place.line or "").split())
    if len(source) > LONGEST_LINE:
        source = source[: LONGEST_LINE - 3] + "..."
    return f"{here}:{place.lineno}" + (f" `{source}`" if source else "")


LONGEST_TEXT = 240  # characters of PyTorch's message
RAISED = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
CONTAINERS = nn.Sequential | nn.ModuleList | nn.ModuleDict


@dataclass(frozen=True)
class Failure:
    """The circumstances in which PyTorch raised an error."""

    text: str  # PyTorch's, on one line
    place: str  # layer, function and line, as far as they are known
    setting: str  # that names the code which failed
    arguments: list[NamedTensor]
    weights: list[NamedTensor]  # of that layer
    names: TensorNames


def find_failure(
    error: BaseException,
    model: nn.Module,
    batch: tuple[Any, Any],
    again: Callable[[], object],
) -> Failure | None:
    """Return the first error of the chain that PyTorch raised for its arguments, as seen in a
    second run that fails in the same words, or else by its own traceback.

    The run has failed for good, so that random numbers and running statistics do not matter any
    more; its tensors are released first, so that memory suffices for the second as it did for
    the first.
    """
    names, errors = TensorNames(model, batch), list_error_chain(error)
    mistakes = [one for one in errors if isinstance(one, RAISED) and not is_plain(one)]
    failures = {str(one): _read_failure(one, names, is_second=False) for one in mistakes}
    if not failures:
        return None
    # A compiler has words of its own: it computes with shapes alone.
    is_compilers = any(type(one).__module__.startswith("torch._dynamo") for one in mistakes)
    clear_frames(error)
    is_compiling = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_compiling else nullcontext()
    try:
        with torch.no_grad(), warnings.catch_warnings(), eager, _CallRecorder(names):
            warnings.simplefilter("ignore")
            forbid_exit(again)()
    except Exception as second:
        failures |= {
            str(one): _read_failure(one, names, is_second=True)
            for one in list_error_chain(second)
            if one not in errors and (is_compilers or str(one) in failures)
        }
        clear_frames(second)
    return next(filter(None, failures.values()), None)


class _CallRecorder(TorchFunctionMode):
    """Records the arguments of the call of PyTorch that fails, and names the tensors that are
    made on another device than the model's."""

    def __init__(self, names: TensorNames) -> None:
        super().__init__()
        self._names, self._usual = names, names.find_usual("device")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in nested.find_tensors(made):
            if str(one.device) != self._usual:
                self._names.record_tensor(
                    one, nested.find_tensors([*args, *(kwargs or {}).values()])
                )
        return made


def _read_failure(error: BaseException, names: TensorNames, *, is_second: bool) -> Failure | None:
    """Read one traceback; None where it was not PyTorch that raised, as far as is known."""
    frames = find_ended_frames(error)
    called = [one for one in frames if one.f_code is nn.Module._call_impl.__code__]
    watched = [one for one in frames if one.f_code is _CallRecorder.__torch_function__.__code__]
    layer = called[-1].f_locals["self"] if called else None
    is_torchs = type(layer).__module__.startswith("torch.nn.") and not isinstance(layer, CONTAINERS)
    met, function = [], ""
    if watched or is_torchs or (called and frames[-1] is called[-1]):
        # Beside its functions, it checks what its own layers are given, and how any is called.
        if not watched and is_foreign(frames[-1].f_code.co_filename):
            return None
        call = watched[0] if watched and not is_torchs else called[-1]
        function = getattr(watched[0].f_locals["func"], "__name__", "") if watched else ""
        variables = _name_variables(frames[: frames.index(call)])
        args, kwargs = call.f_locals["args"], call.f_locals["kwargs"] or {}
        tensors = nested.find_tensors([*args, *kwargs.values()])
        unnamed = "the input" if is_torchs else ""
        met = [names.name_tensor(variables.get(id(one), unnamed), one) for one in tensors]
    elif is_second or not called or type(error) is not RuntimeError:
        return None  # else PyTorch raised too, but only a second run would tell for what
    line, path = describe_own_line(error), names.layers.get(id(layer))
    is_models = not line or any(id(one.f_locals["self"]) in names.layers for one in called)
    held = find_reachable([(type(layer).__name__, layer)] if is_torchs else [], set())
    text = " ".join(get_error_message(error).split())
    where = _describe_layer(layer, path, is_torchs, is_models) if called else ""
    where = " in ".join(filter(None, ("" if is_torchs else function, where)))
    return Failure(
        text=text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "...",
        place=", ".join(filter(None, (where, line))) or "the step",
        setting="model.name" if is_models else "train.loss",
        arguments=met,
        weights=[
            names.name_tensor("" if path is not None else at, one)
            for at, one in held
            if isinstance(one, Tensor)
        ],
        names=names,
    )


def _describe_layer(layer: Any, path: str | None, is_torchs: bool, is_models: bool) -> str:
    what = type(layer).__name__ + (f"({layer.extra_repr()})" if is_torchs else "")
    if path is None:
        return f"a layer made in forward ({what})" if is_models else what
    return f"layer {path} ({what})" if path else f"the model ({what})"


def _name_variables(frames: list[FrameType]) -> dict[int, str]:
    """Return the names of tensors, by their ids, in the innermost function that is not
    PyTorch's."""
    for frame in reversed(frames):
        if TORCH not in Path(frame.f_code.co_filename).parents:
            shared = {id(v): n for n, v in frame.f_globals.items() if isinstance(v, Tensor)}
            return shared | {
                id(v): path for path, v in find_reachable(frame.f_locals.items(), set())
            }
    return {}


# The line that Python stopped at is a later one: the device tells of its mistakes late.
_ASSERTED = (
    "model.name: an index or a label is out of range on the GPU, which cannot tell which one "
    "(device-side assert); labels go from 0 to the model's outputs - 1, and what is looked up "
    "in an embedding below its rows; train once with device.name: cpu, which names it"
)
_BROKEN = re.compile(r"(?i)(cuda|hip|cudnn|miopen|nccl|triton)( \w+)? error|_(status|error)_")
# Tensors may differ in these and fit: a mask is bool, an index may stay on the host.
_DEVICES = re.compile(r"device|cuda|\b(CPU|GPU|MPS)\b")
_DTYPES = re.compile(r"d?type|scalar|\b(Half|BFloat16|Float|Double|Long|Int|Bool)\b")
_MADE = "make it without device=, and move nothing in forward, since the run moves the model"
_MOVES = {  # the kind of what stays on another device than the model -> what to do
    PARAMETER: _MADE,
    BUFFER: _MADE,
    PLAIN: "a plain tensor does not move with the model: register it with self.register_buffer("
    "'name', tensor), or as nn.Parameter if it is learnt",
    LOOSE: "layers in a plain list, dict or object neither move with the model nor are trained: "
    "hold them in nn.ModuleList or nn.ModuleDict",
    ENTRY: "give every entry of the batch as a tensor on the host, alone or in tuples, lists and "
    "dicts, so that all are moved alike",
    "": "make it where the others are, with device=x.device or .to(x.device), and layers in "
    "__init__",
}
_CURES = {  # what PyTorch's words leave open
    r"to numpy": "compute with PyTorch: numpy leaves the device and the gradients",
    r"Target -?\d+ is out of bounds": "labels go from 0 to the model's outputs - 1: number them "
    "from 0, or give its last layer more outputs",
    r"target dtype to be Long|scalar type Long but|nll_loss.* not implemented": "class "
    "labels are int64: give them so, or set data.task and train.loss to what these targets are "
    "(regression, multilabel)",
    r"multi-target not": "class labels are one number a row: targets.squeeze(1)",
    r"'indices'.* Long": "it looks up whole numbers: give int64, or convert with x.long()",
    r"index out of range": "it takes 0 to its rows - 1: number from 0, or give it more rows",
    r"not implemented for '(Long|Int|Bool)'|desired output|got (Long|Int|Bool) and": "convert with "
    ".float(), or look whole numbers up in nn.Embedding",
    r"cannot be multiplied|equal to input_size": "make it for the last size of what it is given, "
    "or put nn.Flatten() before it where that is images",
    r"to have \d+ channels": "channels come second: x.unsqueeze(1) before it where there is one, "
    "x.movedim(-1, 1) where they stand last; or change its in_channels",
    r"must be Tensor, not": "take the tensor out of it in forward, as x['name'] or x[0]",
    r"forward\(\) (missing|got|takes)": "call it with what its forward takes; the model's takes "
    "the entries of the inputs, by the same names where they are a dict",
    r"more than 1 value per channel": "choose a train.batch_size that does not leave a single row "
    "over, or leave the norm out",
    r"size of tensor a": "sizes must be equal, or 1 to be spread",
}
_TARGETS = re.compile(r"out of bounds|dtype to be|scalar type|desired output|nll_loss.* not impl")


def explain_failure(
    error: BaseException,
    model: nn.Module,
    batch: tuple[Any, Any],
    again: Callable[[], object],
) -> str | None:
    """Explain the error in one sentence, starting with the setting at fault; None for another kind
    of error.

    batch: the inputs and targets of the step, each a tensor or tuples, lists and mappings of them.
    again: runs the forward pass once more, and the loss where that was reached. Call it while the
    error is at hand, since it reads the variables that the traceback keeps, and releases them; it
    keeps none (code that keeps the error clears the frames of its chain: see clear_frames).
    """
    words = [get_error_message(one) for one in list_error_chain(error)]
    if any("device-side assert triggered" in text for text in words):
        return _ASSERTED
    if is_oom(error) or any(map(_BROKEN.search, words)):
        return None
    failure = find_failure(error, model, batch, again)
    if failure is None:
        return None
    devices = {one.device for one in (*failure.arguments, *failure.weights)}
    is_apart = len(devices) > 1 and _DEVICES.search(failure.text)
    explanation = _describe_devices(failure) if is_apart else _describe_mismatch(failure)
    return f"{explanation} (PyTorch: {failure.text})"


def _describe_devices(failure: Failure) -> str:
    """Describe which tensor is on which device, and what else does not move with the model."""
    names, usual = failure.names, failure.names.find_usual("device")
    met = [*failure.arguments, *failure.weights]
    odd = [one for one in met if one.device != usual]
    setting, cures = failure.setting, list(dict.fromkeys(_MOVES[one.kind] for one in odd))
    if all(one.kind == ENTRY for one in odd):
        setting = "data.source"
        if all(one.device != usual for one in names.entries):
            setting = failure.setting
            cures = [f"the model is on {usual} and the whole batch is not: {_MADE}"]
    who = [*odd, *(one for one in met if one.device == usual)]
    places = _join_words([f"{one} is on {one.device}" for one in who])
    paths = {one.path for one in odd}
    stay = [one for one in names.held if one.device != usual and one.kind in (PLAIN, LOOSE)]
    if others := [one.path for one in stay if one.path not in paths]:
        cures.append(f"nor does this move with the model: {_join_words(others)}")
    place = failure.place
    return f"{setting}: tensors on different devices met in {place}: {places}; {'; '.join(cures)}"


def _describe_mismatch(failure: Failure) -> str:
    """Describe what PyTorch was given, and what would fit."""
    setting, cure = _find_cure(failure)
    shapes = _list_shapes(failure.arguments) or "what it was given"
    batch = _list_shapes(failure.names.entries) or "no tensors"
    sentence = f"{setting}: PyTorch refused {shapes} in {failure.place}"
    return "; ".join(filter(None, (sentence, cure, f"the batch: {batch}")))


def _find_cure(failure: Failure) -> tuple[str, str]:
    """Return the setting at fault, and what to do; "" where PyTorch's words have to do."""
    setting, text = failure.setting, failure.text
    is_targets = any(one.kind == ENTRY for one in failure.arguments[-1:]) and _TARGETS.search(text)
    if is_targets and setting == "train.loss":
        setting = "data.source"
    for words, cure in _CURES.items():
        if re.search(words, text):
            return setting, cure
    usual = failure.names.find_usual("dtype")
    floats = [one for one in (*failure.arguments, *failure.weights) if "float" in one.dtype]
    odd = next((one for one in floats if one.dtype != usual), None)
    if odd is None or not usual or not _DTYPES.search(text):
        return setting, ""
    cure = f"the model is {usual}: make {odd} so, or convert it with .to(torch.{usual})"
    return "data.source" if odd.kind == ENTRY else setting, cure


def _list_shapes(tensors: Iterable[NamedTensor]) -> str:
    return _join_words([f"{one} {one.dtype} {one.shape}" for one in tensors])


def _join_words(words: Sequence[str], most: int = 5) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
