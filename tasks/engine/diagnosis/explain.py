"""A user's mistake with devices, dtypes, shapes and arguments, explained: which parameter, buffer
or entry of the batch met what, by name, in which layer and line, PyTorch's own words, and what to
do about it where that is known. The step is run once more to see it, never where memory ran out or
a device failed for good; it refuses to guess: what PyTorch did not raise is not explained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from tasks.engine.base.import_paths import said
from tasks.engine.diagnosis.failure import Failure, failure_of
from tasks.engine.diagnosis.tensor_names import BUFFER, ENTRY, LOOSE, PARAMETER, PLAIN, Seen
from tasks.engine.memory.memory_meter import chain, is_oom

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
    r"target dtype to be Long|scalar type Long but": "class labels are int64: give them so, or set "
    "data.task and train.loss to what these targets are (regression, multilabel)",
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
_TARGETS = re.compile(r"out of bounds|dtype to be|scalar type|desired output")


def explained(
    error: BaseException,
    model: nn.Module,
    batch: tuple[Any, Any],
    again: Callable[[], object],
) -> str | None:
    """One sentence, starting with the setting at fault; None for another error.

    batch: the inputs and targets of the step, each a tensor or tuples, lists and mappings of them.
    again: goes forward once more, and through the loss where that was reached. Call it while the
    error is at hand, since it reads the variables that the traceback keeps, and lets go of them; it
    keeps none (whoever keeps the error clears the frames of its chain: see clear_frames).
    """
    words = [said(one) for one in chain(error)]
    if any("device-side assert triggered" in text for text in words):
        return _ASSERTED
    if is_oom(error) or any(map(_BROKEN.search, words)):
        return None
    failure = failure_of(error, model, batch, again)
    if failure is None:
        return None
    devices = {one.device for one in (*failure.given, *failure.weights)}
    is_apart = len(devices) > 1 and _DEVICES.search(failure.text)
    told = _across_devices(failure) if is_apart else _unfit(failure)
    return f"{told} (PyTorch: {failure.text})"


def _across_devices(failure: Failure) -> str:
    """Who is where, and what else does not move with the model."""
    names, usual = failure.names, failure.names.usual("device")
    met = [*failure.given, *failure.weights]
    odd = [one for one in met if one.device != usual]
    setting, cures = failure.setting, list(dict.fromkeys(_MOVES[one.kind] for one in odd))
    if all(one.kind == ENTRY for one in odd):
        setting = "data.source"
        if all(one.device != usual for one in names.entries):
            setting = failure.setting
            cures = [f"the model is on {usual} and the whole batch is not: {_MADE}"]
    who = [*odd, *(one for one in met if one.device == usual)]
    told = _listed([f"{one} is on {one.device}" for one in who])
    known = {one.known for one in odd}
    stay = [one for one in names.held if one.device != usual and one.kind in (PLAIN, LOOSE)]
    if others := [one.known for one in stay if one.known not in known]:
        cures.append(f"nor does this move with the model: {_listed(others)}")
    place = failure.place
    return f"{setting}: tensors on different devices met in {place}: {told}; {'; '.join(cures)}"


def _unfit(failure: Failure) -> str:
    """What PyTorch was given, and what would fit."""
    setting, cure = _cure(failure)
    given = _shapes(failure.given) or "what it was given"
    batch = _shapes(failure.names.entries) or "no tensors"
    told = f"{setting}: PyTorch refused {given} in {failure.place}"
    return "; ".join(filter(None, (told, cure, f"the batch: {batch}")))


def _cure(failure: Failure) -> tuple[str, str]:
    """The setting at fault, and what to do; "" where PyTorch's words have to do."""
    setting, text = failure.setting, failure.text
    is_targets = any(one.kind == ENTRY for one in failure.given[-1:]) and _TARGETS.search(text)
    if is_targets and setting == "train.loss":
        setting = "data.source"
    for words, cure in _CURES.items():
        if re.search(words, text):
            return setting, cure
    usual = failure.names.usual("dtype")
    floats = [one for one in (*failure.given, *failure.weights) if "float" in one.dtype]
    odd = next((one for one in floats if one.dtype != usual), None)
    if odd is None or not usual or not _DTYPES.search(text):
        return setting, ""
    cure = f"the model is {usual}: make {odd} so, or convert it with .to(torch.{usual})"
    return "data.source" if odd.kind == ENTRY else setting, cure


def _shapes(tensors: Iterable[Seen]) -> str:
    return _listed([f"{one} {one.dtype} {one.shape}" for one in tensors])


def _listed(words: Sequence[str], most: int = 5) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
