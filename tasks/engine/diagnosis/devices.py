"""What to say where tensors on different devices met: who is where, by name, and which of them did
not move with the model: a tensor that was never registered, a layer in a plain list, something made
in forward, an entry of the batch.
"""

from __future__ import annotations

from tasks.engine.diagnosis.failure import Failure, listed
from tasks.engine.diagnosis.tensor_names import BUFFER, ENTRY, LOOSE, PARAMETER, PLAIN, Names, Seen

MOST = 4  # further problems, a line each


def device_mistakes(failure: Failure, cure: str) -> list[str]:
    """One line for the tensors that met, and one for each other tensor that stayed behind.

    cure: what PyTorch's words alone tell to do.
    """
    names, usual = failure.names, failure.names.usual("device")
    behind = [one for one in names.held if one.device != usual]
    odd = [one for one in failure.met if one.device != usual]
    suspects = odd or behind[:1]
    is_batchs = bool(suspects) and all(one.kind == ENTRY for one in suspects)
    # The whole batch is together, where the model is not.
    is_apart = is_batchs and usual not in (places := {one.device for one in names.entries})
    is_apart = is_apart and len(places) == 1
    setting = "data.source" if is_batchs and not is_apart else failure.setting
    who = _placed(failure, failure.met if odd else [*failure.met, *suspects])
    if is_apart:
        cure = cure or (
            f"the model is on {usual} and the whole batch is not: make the model without device=, "
            ".to() or .cuda(), since the run moves it"
        )
    remedy = cure or _remedy(failure, suspects, usual)
    told = {_owner(one) for one in suspects}
    others: dict[str, str] = {}
    for one in behind:
        if one.kind in (PLAIN, LOOSE) and _owner(one) not in told:
            others.setdefault(_owner(one), f"model.name: {_cure(one, usual, names)}")
    more = len(others) - MOST
    rest = [f"model.name: and {more} more that stay on another device"] if more > 0 else []
    first = (
        f"{setting}: tensors on different devices met in {failure.place}: "
        f"{who or 'what met is not known by name'}; {remedy} ({_everything(names)})"
    )
    return [first + failure.quoted, *list(others.values())[:MOST], *rest]


def _placed(failure: Failure, tensors: list[Seen]) -> str:
    own = failure.layer.weights if failure.layer is not None and failure.layer.is_torchs else []
    words = [f"{one} is on {one.device}" for one in tensors if one not in own]
    for device in dict.fromkeys(one.device for one in own if one in tensors):
        mine = " and ".join(one.name for one in own if one.device == device)
        words.append(f"its {mine} on {device}")
    return listed(list(dict.fromkeys(words)))


def _owner(one: Seen) -> str:
    """What has to change: the container of layers, or the tensor itself."""
    path = one.known or one.name
    if one.kind != LOOSE:
        return path
    return path.rsplit("[", 1)[0] if "[" in path else path.rsplit(".", 2)[0]


def _remedy(failure: Failure, suspects: list[Seen], usual: str) -> str:
    layer = failure.layer
    if layer is not None and layer.is_torchs and not layer.is_known:
        return "make the layer in __init__: in forward it is neither moved nor trained"
    if not any(one.known or one.name for one in suspects):
        return (
            "a tensor that is made or moved in forward belongs where the others are: give it "
            "device=x.device of one of them"
        )
    if failure.setting == "train.loss" and not any(one.known for one in suspects):
        who = " and ".join(dict.fromkeys(map(str, suspects)))
        return f"bring {who} to where the outputs are, with .to(outputs.device), in the loss"
    # The weight and the bias of a layer have one cure.
    first: dict[object, Seen] = {}
    for one in suspects:
        whose = one.known.rpartition(".")[0] if one.kind in (PARAMETER, BUFFER) else one.name
        first.setdefault((one.kind, one.device, whose), one)
    cures = dict.fromkeys(_cure(one, usual, failure.names) for one in first.values())
    return listed(list(cures), most=2)


def _cure(one: Seen, usual: str, names: Names) -> str:
    path = one.known
    if one.kind == PLAIN:
        layers = [at for at in names.layers.values() if at and path.startswith(f"{at}.")]
        layer = max(layers, key=len, default="")
        name, whose = path[len(layer) + 1 :] if layer else path, f"of layer {layer} " * bool(layer)
        # One of several in a list or a dict, or of another object, has no name to register.
        place = f"({name!r}, ...), or as nn.Parameter if it is learnt"
        if not name.isidentifier():
            place = " of a layer, under a name of its own"
        return (
            f"self.{name} {whose}is a plain tensor on {one.device}, which does not move with the "
            f"model: register it with self.register_buffer{place}"
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
        f"make {one} in forward with device=x.device of a tensor that the model was given, or "
        "hold it in the model with self.register_buffer"
    )


def _everything(names: Names) -> str:
    """Who is where: a number where all of a kind are together, names where they are not."""
    told = []
    for device in dict.fromkeys(one.device for one in (*names.held, *names.entries)):
        words = []
        for kind in (PARAMETER, BUFFER):
            group = [one for one in names.held if one.kind == kind]
            there = [one.known for one in group if one.device == device]
            if len(there) > 2 and len(there) == len(group):
                words.append(f"all {len(there)} {kind}s")
            elif there:
                words.append(f"{kind} {listed(there, most=3)}")
        words += [one.name for one in names.entries if one.device == device]
        if words:
            told.append(f"on {device}: {listed(words, most=8)}")
    return "; ".join(told)
