"""What to say where shapes do not fit: what a layer takes and what it was given, which label or
index lies outside, the shapes of the batch, and what would make them fit.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tasks.engine.diagnosis.failure import Layer, Scene, listed, named
from tasks.engine.diagnosis.tensor_names import ENTRY, Seen

_TARGET = re.compile(r"Target (-?\d+) is out of bounds")
_CHANNELS = re.compile(r"to have (\d+) channels, but got (\d+) channels")


@dataclass(frozen=True)
class _Fit:
    """What a layer takes, in words, and what would make the input fit."""

    takes: str
    remedy: str


def shape_mistakes(scene: Scene) -> list[str]:
    """One line: the layer, loss or line with the shapes that met, and what would make them fit."""
    targets = [one for one in scene.given if one.name == "target"]
    outputs = [one for one in scene.given if one.name == "input"]
    if targets and outputs:
        return [_of_targets(scene, targets[0], outputs[0])]
    layer = scene.layer
    if layer is not None and layer.is_torchs and layer.inputs:
        return [_of_layer(scene, layer, layer.inputs[0])]
    if "to unpack" in scene.text and not re.search(r"\.(shape|size\()", scene.line or ""):
        return []  # of something else than a shape
    met = listed([_shaped(one) for one in scene.met])
    which = f": {met}" if met else ""
    return [
        f"{scene.setting}: shapes do not fit in {scene.place}{which}; {_remedy(scene.text)}"
        f"{_end(scene)}"
    ]


def _of_targets(scene: Scene, target: Seen, output: Seen) -> str:
    name = target.known if target.kind == ENTRY else "the target"
    label = _TARGET.search(scene.text)
    if label is not None:
        classes = output.shape[1] if len(output.shape) > 1 else output.shape[0]
        span = f"labels from {target.span[0]} to {target.span[1]}" if target.span else "labels"
        return (
            f"data.source: {name} holds {span}, among them {label[1]}, and the model gives "
            f"{classes} outputs, for the labels 0 to {classes - 1}; number the labels from 0, or "
            f"give the model's last layer more outputs{_end(scene)}"
        )
    both = f"the model gives {output.size} and {name} is {target.size}"
    setting, remedy = scene.setting, "give outputs and targets the same shape"
    if "multi-target" in scene.text:
        setting = "data.source" if target.kind == ENTRY else setting
        wanted = f"({target.shape[0]},)" if target.shape else "(rows,)"
        remedy = f"class labels are one number a row: give targets of shape {wanted}"
    elif "batch_size" in scene.text:
        remedy = "the model must keep one row of outputs for each row that it is given"
    elif "arget size" in scene.text and scene.function == "cross_entropy":
        fitting = (output.shape[0], *output.shape[2:])
        remedy = f"outputs are (rows, classes, ...): for these the targets are of shape {fitting}"
    elif _squeezed(output.shape) == _squeezed(target.shape):
        remedy = "they differ by a dimension of 1: let the model end with .squeeze(-1), or reshape"
    return f"{setting}: shapes do not fit in {scene.function}: {both}; {remedy}{_end(scene)}"


def _of_layer(scene: Scene, layer: Layer, given: Seen) -> str:
    fit = _fit(scene, layer, given)
    takes = f" takes {fit.takes} and" if fit.takes else ""
    return (
        f"{scene.setting}: {layer.words}{takes} was given {_shaped(given)}"
        f"{f', in {scene.line}' if scene.line else ''}; {fit.remedy}{_end(scene)}"
    )


def _fit(scene: Scene, layer: Layer, given: Seen) -> _Fit:
    sizes, shape = layer.sizes, given.shape
    if "num_embeddings" in sizes:
        rows = sizes["num_embeddings"]
        held = f" (from {given.span[0]} to {given.span[1]})" if given.span else ""
        return _Fit(
            f"whole numbers from 0 to {rows - 1}",
            f"some of them lie outside{held}: give the embedding more rows, or number from 0",
        )
    if "more than 1 value" in scene.text:
        return _Fit(
            "more than one row while training",
            "choose a train.batch_size that does not leave a single row over, or leave the norm "
            "out",
        )
    if "in_channels" in sizes:
        return _of_convolution(scene, layer, shape)
    for name in ("in_features", "input_size"):
        if name in sizes:
            return _of_features(layer, shape, wanted=sizes[name])
    for name in ("num_features", "num_channels"):
        if name in sizes:
            return _Fit(
                f"{sizes[name]} features in dimension 1", f"give it that many, or {_made(layer)}"
            )
    if "embed_dim" in sizes:
        return _of_features(layer, shape, wanted=sizes["embed_dim"])
    if "normalized_shape" in sizes:
        return _Fit(
            f"rows that end in {sizes['normalized_shape']}",
            f"make it nn.LayerNorm({shape[-1]}), or give it rows that end so",
        )
    return _Fit("", _remedy(scene.text))


def _of_features(layer: Layer, shape: tuple[int, ...], *, wanted: int) -> _Fit:
    takes = f"(..., {wanted})"
    if len(shape) > 2 and math.prod(shape[1:]) == wanted:
        return _Fit(takes, "put nn.Flatten() before it")
    if not shape:
        return _Fit(takes, "give it rows of that many numbers")
    return _Fit(takes, f"make it for {shape[-1]} instead of {wanted}, or give it rows of {wanted}")


def _of_convolution(scene: Scene, layer: Layer, shape: tuple[int, ...]) -> _Fit:
    space = {"1d": ("length",), "2d": ("height", "width"), "3d": ("depth", "height", "width")}
    axes = space.get(layer.name[-2:], ("...",))
    wanted = layer.sizes["in_channels"]
    takes = f"(rows, {wanted}, {', '.join(axes)})"
    if len(shape) == len(axes) + 2:
        if "greater than actual" in scene.text or "too small" in scene.text:
            return _Fit(takes, "the input is smaller than the kernel: pad, or pool less before it")
        if shape[-1] == wanted and shape[1] != wanted:
            order = (0, len(shape) - 1, *range(1, len(shape) - 1))
            return _Fit(takes, f"channels stand last: x.permute{order} before it")
        return _Fit(takes, f"make its in_channels {shape[1]}, or give it {wanted} channels")
    channels = _CHANNELS.search(scene.text)
    if len(shape) == len(axes) + 1 and wanted == 1 and (channels or "input to conv" in scene.text):
        return _Fit(takes, "the channel is missing: x.unsqueeze(1) before it")
    size = ", ".join(axes)
    return _Fit(takes, f"give it that shape: x.reshape(-1, {wanted}, {size}) before it")


def _made(layer: Layer) -> str:
    return f"make this {layer.name} for what it is given"


def _remedy(text: str) -> str:
    for pattern, words in (
        (r"tensor a|expand|broadcast|existing size", "sizes must be equal, or 1 to be spread"),
        (r"multiplied|size mismatch|inconsistent|batch2|reduction", "inner sizes must be equal"),
        (r"Sizes of tensors must match|equal size", "joined tensors differ in one dimension only"),
        (r"is invalid for input of size", "the new shape must hold as many numbers as the old one"),
        (r"view size is not", "use .reshape in place of .view"),
        (r"Dimension out|number of dimensions|many indices|unpack", "it has fewer dimensions"),
        (r"out of bounds|out of range|exceeds|smaller than num", "an index lies outside"),
        (r"split_sizes|multiply up|divisible", "the parts must add up to the whole"),
    ):
        if re.search(pattern, text):
            return words
    return "make the shapes fit"


def _shaped(one: Seen) -> str:
    return f"{named(one)} {one.size}"


def _squeezed(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _end(scene: Scene) -> str:
    return f"; the batch: {scene.batch('size')}{scene.quoted}"
