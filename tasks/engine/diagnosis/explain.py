"""A user's mistake with devices, dtypes, shapes and arguments, explained: which parameter, buffer
or entry of the batch is at fault, by name, in which layer and line, and what to do about it. The
step is run once more to see it, never where memory ran out or a device failed for good; it refuses
to guess: an error of another kind is not explained.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from tasks.engine.diagnosis.devices import device_mistakes
from tasks.engine.diagnosis.failure import Failure, failure_of
from tasks.engine.diagnosis.fitting import call_mistakes, dtype_mistakes, shape_mistakes
from tasks.engine.diagnosis.traceback_frames import is_raised_by_user
from tasks.engine.memory.memory_meter import chain, is_oom

RAISED = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
# The line that Python stopped at is a later one: the device tells of its mistakes late.
_ASSERTED = (
    "model.name: an index or a label is out of range on the GPU, which cannot tell which one "
    "(device-side assert); labels go from 0 to the model's outputs - 1, and what is looked up "
    "in an embedding below its rows; train once with device.name: cpu, which names it"
)
_DEVICES = re.compile(
    r"on the same device|at the same device|same device type"
    r"|on the expected device|on the current device|not on the expected device"
    r"|is on (CPU|GPU)\b|expected (it|them) to be on (CPU|GPU)"
    r"|found two different devices|found at least two devices"
    r"|object of (device|backend) type|device type for generator but found"
    r"|must be on the same|CPU tensor to MPS op|Placeholder (tensor|storage)"
    r"|Input type \((MPS|torch\.cuda)\S+\) and weight type \(torch\.(?!cuda)"
    r"|Input type \(torch\.(?!cuda)\S+\) and weight type \((MPS|torch\.cuda)"
    r"|Cannot copy out of meta tensor|device type tensor to numpy|cannot be called on meta tensors"
)
_DTYPES = re.compile(
    r"(have|has|share) (the )?same (d?type|datatype|scalar type)|same data ?type"
    r"|expected scalar type|of scalar type|following scalar types|scalar type \w+ but"
    r"|Found dtype|target dtype|(Expected|mixed) dtype|with dtype|dtype must|could not infer output"
    r"|can't be cast to the desired output type|not implemented for '"
    r"|Input type \(.*\) and (weight|bias) type \(.*\) should be the same"
    r"|floating point (type|or complex|dtype)|does not match weight dtype|attn_mask dtype"
    r"|tensors used as indices must be|index tensor of type|only supports boolean masks"
    r"|operator, (with|on) (a|two) bool tensor|both vectors to have same dtype"
    r"|must have the type torch\."
)
_SHAPES = re.compile(
    r"shapes cannot be multiplied|size mismatch, got|inconsistent tensor size"
    r"|The size of tensor a|must match the existing size|expanded size of the tensor"
    r"|to have \d+ channels|input to conv|greater than actual input size"
    r"|Output size is too small|attn_mask is torch"
    r"|should contain \d+ elements not|expected \d+D( or \d+D)? input|more than 1 value per channel"
    r"|normalized_shape=|must be equal to input_size|[Ee]xpected input to be \d"
    r"|embedding dimension of \d|index out of range in self|Target \S+ is out of bounds"
    r"|[Ee]xpected target size|batch_size \(\d+\) to match target batch_size|multi-target not"
    r"|Target size \(|[Uu]sing a target size|is invalid for input of size|view size is not"
    r"|Sizes of tensors must match|each tensor to be equal size|batch2 tensor to be"
    r"|must be a \dD tensor|einsum\(\)|Dimension out of range|number of dimensions"
    r"|split_sizes to sum|out of bounds for dimension|too many indices for tensor"
    r"|shape of the mask|index k out of range|don't multiply up|divisible by"
    r"|number of channels in input|input channel size|out of DATA bounds|exceeds dimension size"
    r"|out of range for tensor of size|smaller than num_classes|doesn't match the broadcast shape"
    r"|does not match weight size|values to unpack|same number of dimensions|[Ss]hape mismatch"
    r"|Number of dimensions of|Attempting to broadcast|same reduction dim"
)
_CALLS = re.compile(
    r"forward\(\) (missing|got an unexpected|takes|got multiple)|must be Tensor, not \w+"
)
_CURES = {  # what PyTorch's words alone tell to do
    _DEVICES: ((r"to numpy", "compute with PyTorch: numpy leaves the device and the gradients"),),
    _DTYPES: (
        (r"indices|index tensor|dtype int32/int64 for index", "an index is int64: x.long()"),
        (r"boolean mask|condition to be a boolean", "a mask is bool: mask.bool(), or mask > 0"),
        (r"two bool tensor", "turn a mask round with ~mask, and count with mask.long()"),
        (r"on a bool tensor|with a bool tensor", "turn a mask round with ~mask, not with a minus"),
        (
            r"not implemented for '(Long|Int|Short|Char|Byte|Bool)'|could not infer|cast to the "
            r"desired|Expected a floating point|can require gradients",
            "this works on floating point only: convert with x.float()",
        ),
    ),
    _SHAPES: (
        (r"tensor a|expand|broadcast|existing size", "sizes must be equal, or 1 to be spread"),
        (r"multiplied|size mismatch|inconsistent|batch2|reduction", "inner sizes must be equal"),
        (r"Sizes of tensors must match|equal size", "joined tensors differ in one dimension only"),
        (r"is invalid for input of size", "the new shape must hold as many numbers as the old one"),
        (r"view size is not", "use .reshape in place of .view"),
        (r"Dimension out|number of dimensions|many indices|unpack", "it has fewer dimensions"),
        (r"out of bounds|out of range|exceeds|smaller than num", "an index lies outside"),
        (r"split_sizes|multiply up|divisible", "the parts must add up to the whole"),
    ),
    _CALLS: (),
}
_TOLD: dict[re.Pattern[str], Callable[[Failure, str], list[str]]] = {
    _DEVICES: device_mistakes,
    _DTYPES: dtype_mistakes,
    _SHAPES: shape_mistakes,
    _CALLS: call_mistakes,
}


def explained(
    error: BaseException,
    model: nn.Module,
    batch: tuple[Any, Any],
    again: Callable[[], object],
) -> str | None:
    """One line for each problem, starting with the setting at fault; None for another error.

    batch: the inputs and targets of the step, each a tensor or tuples, lists and mappings of them.
    again: goes forward once more, and through the loss where that was reached. Call it while the
    error is at hand, since it reads the variables that the traceback keeps, and lets go of them; it
    keeps none (whoever keeps the error clears the frames of its chain: see clear_frames).
    """
    if is_oom(error):
        return None
    for one in chain(error):
        if not isinstance(one, RAISED) or is_raised_by_user(one):
            continue
        text = str(one)
        if "device-side assert triggered" in text:
            return _ASSERTED
        kind = next((kind for kind in _TOLD if kind.search(text)), None)
        if kind is None:
            continue
        cure = next((words for pattern, words in _CURES[kind] if re.search(pattern, text)), "")
        if lines := _TOLD[kind](failure_of(one, model, batch, again, kind), cure):
            return "\n".join(lines)
    return None
