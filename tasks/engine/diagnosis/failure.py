"""What met when a step failed, in words: PyTorch's message, the line of the user's code, the layer
and the loss that raised, and the tensors by name. The step is run once more for it, watched: the
call of PyTorch that fails is given the very tensors that do not fit. No tensor outlives it.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import monotonic
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from tasks.engine.base import nested
from tasks.engine.base.import_paths import ends_told
from tasks.engine.diagnosis import traceback_frames
from tasks.engine.diagnosis.tensor_names import Names, Seen, reached, weights
from tasks.engine.memory.memory_meter import clear_frames

LONGEST = 240  # characters of PyTorch's message
LONGEST_S = 10.0  # that the second run may take: it stops at the next call of PyTorch
CONTAINERS = nn.Sequential | nn.ModuleList | nn.ModuleDict
SIZES = ("num_features", "normalized_shape", "num_channels", "embed_dim")
PAIRS = (
    ("in_features", "out_features"),
    ("in_channels", "out_channels"),
    ("input_size", "hidden_size"),
)


@dataclass(frozen=True)
class Layer:
    """The layer whose forward raised."""

    words: str  # as a sentence speaks of it
    name: str  # its class
    is_torchs: bool  # one of PyTorch's own, and no container
    is_known: bool  # it was made before the step, so that the model can find it
    sizes: dict[str, Any]  # in_features and the like; only of PyTorch's own
    takes: tuple[str, ...]  # the parameters of its forward
    inputs: list[Seen]
    weights: list[Seen]


@dataclass(frozen=True)
class Failure:
    """What was there when a step failed."""

    text: str  # PyTorch's, on one line
    line: str | None
    is_models: bool  # whether the model's code failed, and not the loss
    layer: Layer | None
    function: str  # of torch.nn.functional, "" where none was running
    given: list[Seen]  # to that function
    met: list[Seen]  # the tensors that do not fit, as far as they are known
    names: Names

    @property
    def place(self) -> str:
        """Where it failed: layer or function, and line, as far as they are known."""
        what = self.layer.words if self.layer is not None else self.function
        return ", ".join(part for part in (what, self.line) if part) or "the step"

    @property
    def setting(self) -> str:
        """The setting that named the code that failed."""
        return "model.name" if self.is_models else "train.loss"

    @property
    def quoted(self) -> str:
        """The end of a sentence: PyTorch's own words."""
        return f" (PyTorch: {self.text})"

    def batch(self, of: str) -> str:
        """The batch, each entry with its shape or dtype."""
        return listed(
            [f"{one.name} {getattr(one, of)}" for one in self.names.entries], "no tensors"
        )


def failure_of(
    error: BaseException,
    model: nn.Module,
    batch: tuple[Any, Any],
    again: Callable[[], object],
    kind: re.Pattern[str],
) -> Failure:
    """What the error tells; where that leaves open which tensors met, what a second run sees that
    fails in the same way.

    The run has failed for good, so that random numbers and running statistics do not matter any
    more; its tensors are let go of first, so that memory holds for the second what it did for the
    first. kind: finds the words of this kind of mistake.
    """
    names = Names(model, batch)
    found = _told(error, names, [])
    is_given = bool(found.given) or (found.layer is not None and found.layer.is_torchs)
    if is_given and all(one.known or one.device == names.usual("device") for one in found.met):
        return found  # a layer or function of PyTorch names what it was given
    clear_frames(error)
    witness = _Witness(names)
    is_compiling = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if is_compiling else nullcontext()
    try:
        with torch.no_grad(), warnings.catch_warnings(), eager, witness:
            warnings.simplefilter("ignore")
            ends_told(again)()
    except Exception as second:
        if kind.search(str(second)):
            met = witness.met if witness.said == str(second) else []
            seen = _told(second, names, met)
            found = replace(seen, text=found.text, line=found.line or seen.line)
        clear_frames(second)
    return found


class _Witness(TorchFunctionMode):
    """Sees the call of PyTorch that fails, and tells its tensors by their names. It keeps none."""

    def __init__(self, names: Names) -> None:
        super().__init__()
        self.met: list[Seen] = []
        self.said = ""
        self._names, self._usual = names, names.usual("device")
        self._sources = WeakTensorKeyDictionary()  # of what was made on another device
        self._until = monotonic() + LONGEST_S

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if monotonic() > self._until:
            raise TimeoutError
        given = [*args, *(kwargs or {}).values()]
        try:
            made = func(*args, **(kwargs or {}))
        except Exception as error:
            self.met, self.said = self._named(given), str(error)
            raise
        for one in nested.tensors(made):
            if str(one.device) != self._usual:
                alike = (part for part in nested.tensors(given) if part.device == one.device)
                self._sources[one] = next(filter(None, map(self._source, alike)), None)
        return made

    def _source(self, tensor: Tensor) -> tuple[int, Seen] | None:
        """Which tensor of the model or the batch it is, or was made of."""
        seen = self._names.seen("", tensor)
        return (id(tensor), seen) if seen.known else self._sources.get(tensor)

    def _named(self, given: list[Any]) -> list[Seen]:
        """Each by the name that it has in the innermost function that is not PyTorch's."""
        frame: FrameType | None = sys._getframe()
        named: dict[int, str] = {}
        while frame is not None and frame.f_code is not failure_of.__code__:
            if traceback_frames.is_foreign(frame.f_code.co_filename):
                shared = ((n, v) for n, v in frame.f_globals.items() if isinstance(v, Tensor))
                for variables in (shared, frame.f_locals.items()):
                    named |= {id(one): path for path, one in reached(variables, set())}
                break
            frame = frame.f_back
        return [self._seen(one, named) for one in nested.tensors(given)]

    def _seen(self, tensor: Tensor, named: dict[int, str]) -> Seen:
        name = named.get(id(tensor), "")
        source = self._source(tensor)
        if source is None or source[0] == id(tensor):
            return self._names.seen(name, tensor)
        of = f"made of {named.get(source[0], source[1].known)}"
        return replace(source[1], name=f"{name}, {of}" if name else f"what is {of}")


def _told(error: BaseException, names: Names, met: list[Seen]) -> Failure:
    """What one traceback tells. met: what was seen to meet."""
    frames = traceback_frames.ended(error)
    calls = traceback_frames.layer_calls(frames)
    function = traceback_frames.function_call(frames)
    line = traceback_frames.own_line(error, deeper=True)
    layer = _layer(calls[-1], names) if calls else None
    given = _seen(function.given, names) if function is not None else []
    if layer is not None and layer.is_torchs:
        sources = [one for one in met if " made of " in f" {one.name}"]
        met = [*layer.inputs, *layer.weights, *sources]
    elif given:
        met = given
    elif not met:
        foreign = [one for one in frames if traceback_frames.is_foreign(one.f_code.co_filename)]
        held = foreign[-1].f_locals if foreign else {}
        met = _seen({n: value for n, value in held.items() if isinstance(value, Tensor)}, names)
        met = met or (layer.inputs if layer is not None else [])
    in_model = any(id(call.of) in names.layers for call in calls)
    return Failure(
        text=quoted(error),
        line=line,
        is_models=in_model or line is None or traceback_frames.is_backward(error),
        layer=layer,
        function=function.of if function is not None else "",
        given=given,
        met=met,
        names=names,
    )


def quoted(error: BaseException) -> str:
    """PyTorch's message on one line, its end left out where it is long."""
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def listed(words: Sequence[object], nothing: str = "", most: int = 5) -> str:
    """The words, the first few of them where they are many."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(map(str, words[:most])) + more or nothing


def _seen(given: dict[str, Any], names: Names) -> list[Seen]:
    return [
        names.seen(path, tensor)
        for name, value in given.items()
        for path, tensor in nested.named(value, name)
    ]


def _layer(call: traceback_frames.Call, names: Names) -> Layer:
    layer, name, held = call.of, type(call.of).__name__, vars(call.of)
    is_torchs = type(layer).__module__.startswith("torch.nn.") and not isinstance(layer, CONTAINERS)
    sizes = {n: v for n, v in held.items() if is_torchs and isinstance(v, int | tuple)}
    what = name
    if pair := next((two for two in PAIRS if two[0] in sizes and two[1] in sizes), None):
        what = f"{name} {sizes[pair[0]]} -> {sizes[pair[1]]}"
    elif "num_embeddings" in sizes:
        what = f"{name} of {sizes['num_embeddings']} rows"
    elif size := next((one for one in SIZES if one in sizes), None):
        what = f"{name} of {sizes[size]}"
    path = names.layers.get(id(layer))
    words = f"layer {path} ({what})" if path else f"the model ({what})"
    return Layer(
        words=words if path is not None else f"a layer made in forward ({what})",
        name=name,
        is_torchs=is_torchs,
        is_known=path is not None,
        sizes=sizes,
        takes=call.takes,
        inputs=_seen(call.given, names),
        weights=[names.seen(name, tensor) for _, name, tensor in weights(layer)],
    )
