"""What to say where tensors on different devices met: who is where, by name, and which of them did
not move with the model: a tensor that was never registered, a layer in a plain list, something made
in forward, an entry of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.engine.diagnosis.failure import Scene, listed, named
from tasks.engine.diagnosis.tensor_names import (
    BUFFER,
    ENTRY,
    LOOSE,
    PARAMETER,
    PLAIN,
    Inventory,
    Seen,
)

MOST = 4  # further problems, a line each


def device_mistakes(scene: Scene) -> list[str]:
    """One line for the tensors that met, and one for each other tensor that stayed behind."""
    usual = scene.around.usual("device")
    met = [one for one in scene.met if one.device]
    odd = [one for one in met if one.device != usual]
    hidden = [one for one in scene.mentioned if one.device != usual]
    suspects = odd or hidden or _behind(scene, usual)[:1]
    setting = scene.setting
    is_batchs = bool(suspects) and all(one.kind == ENTRY for one in suspects)
    if is_batchs and not _is_apart(scene, usual):
        setting = "data.source"
    who = (
        _placed(scene, met if odd else [*met, *hidden])
        or _placed(scene, suspects)
        or "what met is not known by name"
    )
    first = (
        f"{setting}: tensors on different devices met in {scene.place}: {who}; "
        f"{_remedy(scene, suspects, usual)} ({_everything(scene)}){scene.quoted}"
    )
    told = {_owner(one) for one in suspects}
    return [first, *_others(scene, usual, told)]


def _behind(scene: Scene, usual: str) -> list[Seen]:
    """What of the model is not where its parameters are."""
    return [one for one in scene.around.held if one.device != usual]


def _is_apart(scene: Scene, usual: str) -> bool:
    """Whether the whole batch is together, where the model is not."""
    devices = {one.device for one in scene.around.entries}
    return len(devices) == 1 and usual not in devices


def _placed(scene: Scene, tensors: Sequence[Seen]) -> str:
    layer = scene.layer
    own = layer.weights if layer is not None and layer.is_torchs else ()
    words = [f"{named(one)} is on {one.device}" for one in tensors if one not in own]
    for device in dict.fromkeys(one.device for one in own if one in tensors):
        names = [one.name for one in own if one.device == device]
        words.append(f"its {' and '.join(names)} on {device}")
    return listed(list(dict.fromkeys(words)))


def _owner(one: Seen) -> str:
    """What has to change: the container of layers, or the tensor itself."""
    path = one.known or one.name
    if one.kind != LOOSE:
        return path
    return path.rsplit("[", 1)[0] if "[" in path else path.rsplit(".", 2)[0]


def _remedy(scene: Scene, suspects: Sequence[Seen], usual: str) -> str:
    layer = scene.layer
    if layer is not None and not layer.is_known and layer.is_torchs:
        return "make the layer in __init__: in forward it is neither moved nor trained"
    if "to numpy" in scene.text:
        return "compute with PyTorch: numpy leaves the device and the gradients"
    if _is_apart(scene, usual) and all(one.kind == ENTRY for one in suspects):
        return (
            f"the model is on {usual} and the whole batch is not: make the model without device=, "
            ".to() or .cuda(), since the run moves it"
        )
    if not suspects:
        return (
            "a tensor that is made or moved in forward belongs where the others are: give it "
            "device=x.device of one of them"
        )
    if scene.setting == "train.loss" and not any(one.known for one in suspects):
        names = " and ".join(dict.fromkeys(one.name for one in suspects))
        return f"bring {names} to where the outputs are, with .to(outputs.device), in the loss"
    # The weight and the bias of a layer have one cure.
    firsts = {(one.kind, one.device, _parent(one)): one for one in reversed(suspects)}
    cures = dict.fromkeys(_cure(one, usual, scene.around) for one in reversed(firsts.values()))
    return listed(list(cures), most=2)


def _parent(one: Seen) -> str:
    return one.known.rpartition(".")[0] if one.kind in (PARAMETER, BUFFER) else one.name


def _cure(one: Seen, usual: str, around: Inventory) -> str:
    path = one.known
    if one.kind == PLAIN:
        layer, name = _home(path, around)
        whose = f"of layer {layer} " if layer else ""
        return (
            f"self.{name} {whose}is a plain tensor on {one.device}, which does not move with the "
            f"model: register it with {_registered(name)}"
        )
    if one.kind == LOOSE:
        return (
            f"the layers in self.{_owner(one)} are in a plain list, dict or object and neither "
            "move with the model nor are trained: hold them in nn.ModuleList or nn.ModuleDict"
        )
    if one.kind in (PARAMETER, BUFFER):
        return (
            f"the {one.kind} {path} was put on {one.device} and the others are on {usual}: make it "
            "without device=, and move nothing in forward"
        )
    if one.kind == ENTRY:
        return (
            f"{path} of the batch is on {one.device}: give every entry of it as a tensor on the "
            "host, alone or in tuples, lists and dicts, so that all are moved alike"
        )
    return (
        f"make {one.name} in forward with device=x.device of a tensor that the model was given, or "
        "hold it in the model with self.register_buffer"
    )


def _home(path: str, around: Inventory) -> tuple[str, str]:
    """The layer that holds it, and the name it has there."""
    layers = [at for at in around.layers.values() if at and path.startswith(f"{at}.")]
    layer = max(layers, key=len, default="")
    return layer, path[len(layer) + 1 :] if layer else path


def _registered(name: str) -> str:
    if "[" in name or "." in name:  # one of several in a list or a dict, or of another object
        return "self.register_buffer of a layer, under a name of its own"
    return f"self.register_buffer({name!r}, ...), or as nn.Parameter if it is learnt"


def _others(scene: Scene, usual: str, told: set[str]) -> list[str]:
    """What would be met next."""
    found: dict[str, str] = {}
    for one in _behind(scene, usual):
        if one.kind in (PLAIN, LOOSE) and _owner(one) not in told:
            found.setdefault(_owner(one), f"model.name: {_cure(one, usual, scene.around)}")
    lines = list(found.values())
    if len(lines) > MOST:
        more = len(lines) - MOST
        lines = [*lines[:MOST], f"model.name: and {more} more that stay on another device"]
    return lines


def _everything(scene: Scene) -> str:
    """Who is where: a number where all of a kind are together, names where they are not."""
    held, entries = scene.around.held, scene.around.entries
    told = []
    for device in dict.fromkeys(one.device for one in (*held, *entries)):
        words = []
        for kind in (PARAMETER, BUFFER):
            group = [one for one in held if one.kind == kind]
            there = [one.known for one in group if one.device == device]
            if len(there) > 2 and len(there) == len(group):
                words.append(f"all {len(there)} {kind}s")
            elif there:
                words.append(f"{kind} {listed(there, most=3)}")
        words += [one.name for one in entries if one.device == device]
        if words:
            told.append(f"on {device}: {listed(words, most=8)}")
    return "; ".join(told)
