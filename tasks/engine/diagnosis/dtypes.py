"""What to say where dtypes do not fit: whose they are, by name, which entry of the batch brought
them, and where to convert.
"""

from __future__ import annotations

import re

from tasks.engine.diagnosis.failure import Layer, Scene, listed, named
from tasks.engine.diagnosis.tensor_names import ENTRY, Seen

LABELS = ("cross_entropy", "nll_loss")
_CURES = (
    (r"indices|index tensor|dtype int32/int64 for index", "an index is int64: x.long()"),
    (r"boolean mask|condition to be a boolean", "a mask is bool: mask.bool(), or mask > 0"),
    (r"two bool tensor", "turn a mask round with ~mask, and count with mask.long()"),
    (r"on a bool tensor|with a bool tensor", "turn a mask round with ~mask, not with a minus"),
    (
        r"not implemented for '(Long|Int|Short|Char|Byte|Bool)'|could not infer|cast to the desired"
        r"|Expected a floating point|can require gradients",
        "this works on floating point only: convert with x.float()",
    ),
)


def dtype_mistakes(scene: Scene) -> list[str]:
    """One line: the tensors that met with their dtypes, and the one to convert."""
    targets = [one for one in scene.given if one.name in ("target", "targets")]
    if targets and (scene.layer is None or "Loss" in scene.layer.name or not scene.operands):
        return [_of_targets(scene, targets[0])]
    layer = scene.layer
    if layer is not None and layer.is_torchs and layer.inputs:
        return [_of_layer(scene, layer)]
    met = listed([_typed(one) for one in scene.met]) or f"the batch has {scene.batch('dtype')}"
    setting = scene.setting
    return [f"{setting}: dtypes do not fit in {scene.place}: {met}; {_cure(scene)}{scene.quoted}"]


def _of_targets(scene: Scene, target: Seen) -> str:
    setting = "data.source" if target.kind == ENTRY else scene.setting
    name = target.known if target.kind == ENTRY else target.name
    has = f"{setting}: {name} is {target.dtype} {target.size}, and {scene.function}"
    if scene.function not in LABELS:
        return f"{has} takes floats; give targets as float32{scene.quoted}"
    outputs = next((one.size for one in scene.given if one.name == "input"), "the outputs")
    if "class probabilities" in scene.text:
        return (
            f"{has} takes int64 labels of one dimension less than the outputs {outputs}, or "
            f"probabilities as float32 of their shape; give one of these{scene.quoted}"
        )
    return (
        f"{has} takes class labels as int64; give the labels as int64, or set data.task and "
        f"train.loss to what these targets are (regression, multilabel){scene.quoted}"
    )


def _of_layer(scene: Scene, layer: Layer) -> str:
    usual = scene.around.usual("dtype")
    held = next((one.dtype for one in layer.weights if "float" in one.dtype), "")
    odd = next((one for one in layer.inputs if one.dtype != held), layer.inputs[0])
    setting = scene.setting
    if "num_embeddings" in layer.sizes:
        held, cure = "", "it looks up whole numbers: give int64, or convert with x.long()"
    elif held != usual == odd.dtype:
        cure = f"the other parameters are {usual}: make this layer without a dtype of its own"
    elif odd.kind == ENTRY and "float" in odd.dtype:
        setting = "data.source"
        cure = f"give {odd.known} as {held}, or convert in forward with x.to(torch.{held})"
    elif "float" in odd.dtype or not held:
        cure = _cure(scene)
    else:
        cure = (
            "convert with x.float() in forward or give float32, or look whole numbers up in "
            "nn.Embedding"
        )
    weights = f", its weights are {held}" if held else ""
    return (
        f"{setting}: dtypes do not fit in {scene.place}: {_typed(odd)}{weights}; {cure}"
        f"{scene.quoted}"
    )


def _typed(one: Seen) -> str:
    return f"{named(one)} is {one.dtype} {one.size}"


def _source(scene: Scene, odd: Seen) -> str:
    """The entries of the batch with the dtype at fault, where it is none of them itself."""
    names = [one.name for one in scene.around.entries if one.dtype == odd.dtype]
    if odd.kind == ENTRY or not names:
        return ""
    return f"; of the batch {listed(names)} {'is' if len(names) == 1 else 'are'} {odd.dtype}"


def _cure(scene: Scene) -> str:
    for pattern, words in _CURES:
        if re.search(pattern, scene.text):
            return words
    usual = scene.around.usual("dtype")
    odd = next((one for one in scene.met if one.dtype != usual), None)
    if odd is None or not usual:
        return "convert one of them with .to(other.dtype)"
    return f"convert {odd.name} with .to(torch.{usual}){_source(scene, odd)}"
