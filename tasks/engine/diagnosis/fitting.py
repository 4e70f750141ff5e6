"""What to say where dtypes, shapes or arguments do not fit: what a layer or a loss takes and what
it was given, by name, which label or index lies outside, and what would make them fit.
"""

from __future__ import annotations

import math
import re

from tasks.engine.diagnosis.failure import Failure, Layer, listed
from tasks.engine.diagnosis.tensor_names import ENTRY, Seen

AXES = {"1d": ("length",), "2d": ("height", "width"), "3d": ("depth", "height", "width")}
ROWS = "(..., {})"
TAKES = {
    "in_features": ROWS,
    "input_size": ROWS,
    "embed_dim": ROWS,
    "num_features": "{} features in dimension 1",
    "num_channels": "{} features in dimension 1",
    "normalized_shape": "rows that end in {}",
}
_LABEL = re.compile(r"Target (-?\d+) is out of bounds")
_THING = re.compile(r"must be Tensor, not (\w+)")


def dtype_mistakes(failure: Failure, cure: str) -> list[str]:
    """One line: the tensors that met with their dtypes, and the one to convert.

    cure: what PyTorch's words alone tell to do.
    """
    setting, layer, usual = failure.setting, failure.layer, failure.names.usual("dtype")
    if (target := _named(failure, "target")) is not None:
        return [_target_dtype(failure, target)]
    met = failure.met
    odd = next((one for one in met if one.dtype != usual), None)
    if not cure and odd is not None and usual:
        cure = f"convert {odd.name or odd} with .to(torch.{usual})"
        sources = [one.name for one in failure.names.entries if one.dtype == odd.dtype]
        if odd.kind != ENTRY and sources:
            verb = "is" if len(sources) == 1 else "are"
            cure += f"; of the batch {listed(sources)} {verb} {odd.dtype}"
    what = listed([f"{one} is {one.dtype} {one.shape}" for one in met])
    if layer is not None and layer.is_torchs and layer.inputs:
        held = next((one.dtype for one in layer.weights if "float" in one.dtype), "")
        odd = next((one for one in layer.inputs if one.dtype != held), layer.inputs[0])
        if "num_embeddings" in layer.sizes:
            held, cure = "", "it looks up whole numbers: give int64, or convert with x.long()"
        elif held != usual == odd.dtype:
            cure = f"the other parameters are {usual}: make this layer without a dtype of its own"
        elif odd.kind == ENTRY and "float" in odd.dtype:
            setting = "data.source"
            cure = f"give {odd.known} as {held}, or convert in forward with x.to(torch.{held})"
        elif held and "float" not in odd.dtype:
            cure = (
                "convert with x.float() in forward or give float32, or look whole numbers up in "
                "nn.Embedding"
            )
        what = f"{odd} is {odd.dtype} {odd.shape}" + (f", its weights are {held}" if held else "")
    what = what or f"the batch has {failure.batch('dtype')}"
    cure = cure or "convert one of them with .to(other.dtype)"
    return [f"{setting}: dtypes do not fit in {failure.place}: {what}; {cure}{failure.quoted}"]


def shape_mistakes(failure: Failure, cure: str) -> list[str]:
    """One line: the layer, loss or line with the shapes that met, and what would make them fit.

    cure: what PyTorch's words alone tell to do.
    """
    layer = failure.layer
    end = f"; the batch: {failure.batch('shape')}{failure.quoted}"
    target, outputs = _named(failure, "target"), _named(failure, "input")
    if target is not None and outputs is not None:
        return [_target_shape(failure, target, outputs) + end]
    if layer is not None and layer.is_torchs and layer.inputs:
        given = layer.inputs[0]
        takes, remedy = _fit(layer, given, failure.text, cure)
        takes = f" takes {takes} and" if takes else ""
        line = f", in {failure.line}" if failure.line else ""
        words = f"{layer.words}{takes} was given {given} {given.shape}{line}"
        return [f"{failure.setting}: {words}; {remedy}{end}"]
    if "to unpack" in failure.text and not re.search(r"\.(shape|size\()", failure.line or ""):
        return []  # of something else than a shape
    met = listed([f"{one} {one.shape}" for one in failure.met])
    which = f"{failure.place}: {met}" if met else failure.place
    remedy = cure or "make the shapes fit"
    return [f"{failure.setting}: shapes do not fit in {which}; {remedy}{end}"]


def call_mistakes(failure: Failure, cure: str) -> list[str]:
    """One line: what forward takes and what it was given."""
    layer = failure.layer
    if layer is None:
        return []
    given = listed([f"{one} {one.shape}" for one in layer.inputs], "no tensor")
    end = f"; the batch: {failure.batch('shape')}{failure.quoted}"
    if (thing := _THING.search(failure.text)) is not None:
        return [
            f"{failure.setting}: a tensor is needed in {failure.place}, and it was given a "
            f"{thing[1]} ({given}); take the tensor out of it in forward, as x['name'] or x[0]{end}"
        ]
    return [
        f"{failure.setting}: forward of {layer.words} takes ({', '.join(layer.takes)}) and was "
        f"given {given}, in {failure.line or 'the step'}; give forward one parameter for each "
        f"entry of the inputs, of the same name where they are a dict{end}"
    ]


def _named(failure: Failure, name: str) -> Seen | None:
    """What the loss was given under this name."""
    return next((one for one in failure.given if one.name == name), None)


def _target_dtype(failure: Failure, target: Seen) -> str:
    setting = "data.source" if target.kind == ENTRY else failure.setting
    outputs, has_outputs = _named(failure, "input"), "the outputs"
    if failure.function not in ("cross_entropy", "nll_loss"):
        takes = "floats; give targets as float32"
    elif "class probabilities" in failure.text:
        has_outputs += f" {outputs.shape}" if outputs is not None else ""
        takes = (
            f"int64 labels of one dimension less than {has_outputs}, or probabilities as float32 "
            "of their shape; give one of these"
        )
    else:
        takes = (
            "class labels as int64; give the labels as int64, or set data.task and train.loss to "
            "what these targets are (regression, multilabel)"
        )
    has = f"{target.known or target.name} is {target.dtype} {target.shape}"
    return f"{setting}: {has}, and {failure.function} takes {takes}{failure.quoted}"


def _target_shape(failure: Failure, target: Seen, outputs: Seen) -> str:
    setting, text, shape = failure.setting, failure.text, outputs.shape
    name = target.known if target.kind == ENTRY else "the target"
    if (label := _LABEL.search(text)) is not None:
        classes = shape[1] if len(shape) > 1 else shape[0]
        span = f"labels from {target.span[0]} to {target.span[1]}" if target.span else "labels"
        return (
            f"data.source: {name} holds {span}, among them {label[1]}, and the model gives "
            f"{classes} outputs, for the labels 0 to {classes - 1}; number the labels from 0, or "
            "give the model's last layer more outputs"
        )
    remedy = "give outputs and targets the same shape"
    if "multi-target" in text:
        setting = "data.source" if target.kind == ENTRY else setting
        wanted = f"({target.shape[0]},)" if target.shape else "(rows,)"
        remedy = f"class labels are one number a row: give targets of shape {wanted}"
    elif "batch_size" in text:
        remedy = "the model must keep one row of outputs for each row that it is given"
    elif "arget size" in text and failure.function == "cross_entropy":
        fitting = (shape[0], *shape[2:])
        remedy = f"outputs are (rows, classes, ...): for these the targets are of shape {fitting}"
    elif [n for n in shape if n != 1] == [n for n in target.shape if n != 1]:
        remedy = "they differ by a dimension of 1: let the model end with .squeeze(-1), or reshape"
    both = f"the model gives {shape} and {name} is {target.shape}"
    return f"{setting}: shapes do not fit in {failure.function}: {both}; {remedy}"


def _fit(layer: Layer, given: Seen, text: str, cure: str) -> tuple[str, str]:
    """What a layer takes, in words, and what would make the input fit."""
    sizes, shape = layer.sizes, given.shape
    if "num_embeddings" in sizes:
        held = f" (from {given.span[0]} to {given.span[1]})" if given.span else ""
        outside = f"some of them lie outside{held}: give the embedding more rows, or number from 0"
        return f"whole numbers from 0 to {sizes['num_embeddings'] - 1}", outside
    if "more than 1 value" in text:
        return (
            "more than one row while training",
            "choose a train.batch_size that does not leave a single row over, or leave the norm "
            "out",
        )
    if "in_channels" in sizes:
        axes = AXES.get(layer.name[-2:], ("...",))
        takes = f"(rows, {sizes['in_channels']}, {', '.join(axes)})"
        return takes, _convolution_cure(shape, sizes["in_channels"], axes, text)
    if (size := next((n for n in TAKES if n in sizes), None)) is None:
        return "", cure or "make the shapes fit"
    wanted = sizes[size]
    remedy = f"give it that many, or make this {layer.name} for what it is given"
    if size == "normalized_shape":
        remedy = f"make it nn.LayerNorm({shape[-1]}), or give it rows that end so"
    elif TAKES[size] == ROWS:
        if len(shape) > 2 and math.prod(shape[1:]) == wanted:
            remedy = "put nn.Flatten() before it"
        elif shape:
            remedy = f"make it for {shape[-1]} instead of {wanted}, or give it rows of {wanted}"
    return TAKES[size].format(wanted), remedy


def _convolution_cure(shape: tuple[int, ...], wanted: int, axes: tuple[str, ...], text: str) -> str:
    if len(shape) == len(axes) + 2:
        if "greater than actual" in text or "too small" in text:
            return "the input is smaller than the kernel: pad, or pool less before it"
        if shape[-1] == wanted and shape[1] != wanted:
            order = (0, len(shape) - 1, *range(1, len(shape) - 1))
            return f"channels stand last: x.permute{order} before it"
        return f"make its in_channels {shape[1]}, or give it {wanted} channels"
    if len(shape) == len(axes) + 1 and wanted == 1 and re.search("channels, but|to conv", text):
        return "the channel is missing: x.unsqueeze(1) before it"
    return f"give it that shape: x.reshape(-1, {wanted}, {', '.join(axes)}) before it"
