"""Builds a model, built-in or of the user's own, and checks it against the data with two rows
on the host before a device is touched. It refuses what could not be trained or logged, in one
sentence that names the line of the user's code where one is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from headroom.base import nested
from headroom.base.facts import DataFacts
from headroom.base.import_paths import describe_error, import_callable, is_import_path
from headroom.base.names import list_best_metrics
from headroom.base.python_state import keep_python_state
from headroom.data.dataloaders import TargetConverter
from headroom.data.preparation import load_arrays
from headroom.models import builtin
from headroom.models.parameter_patterns import freeze_parameters
from headroom.models.user_model import (
    NoOutputsError,
    TakesLoss,
    construct_model,
    find_numbers,
    make_own_forward,
)
from headroom.settings.model_args import ModelError
from headroom.settings.read_settings import ConfigError
from headroom.settings.run_config import ModelConfig, TrainConfig
from headroom.training import averaging
from headroom.training.averaging import Averaging
from headroom.training.losses import (
    check_loss,
    find_own_functions,
    find_own_loss,
    load_own_loss,
    make_loss,
)
from headroom.training.optimizer_step import Loss
from headroom.training.state_changes import ChangeFinder, StateChanges
from headroom.watch import failed_step
from headroom.watch.out_of_memory import is_oom
from headroom.watch.tensor_names import find_unsaved_tensors

CPU = torch.device("cpu")
EVAL_ROWS = 3
# Under which the configuration of a transformers model tells labels that its loss skips.
SKIPPED_LABELS = ("pad_token_id", "semantic_loss_ignore_index")
LAZY = (UninitializedParameter, UninitializedBuffer)


@dataclass(frozen=True)
class ModelCheck:
    """What a check of the model with two rows has found. work: multiply-adds of a row."""

    work: int
    weights_bytes: int
    outputs: int  # classes, values or different tokens that the model tells apart
    changes: StateChanges = StateChanges()  # of a training step
    judged: StateChanges = StateChanges()  # of an evaluation
    averaging: Averaging = Averaging()  # of a loss of the user's own, or of the model itself
    task: str = ""  # own, where the outputs have no shape for the figures of the data's task
    warnings: tuple[str, ...] = ()


def make_sample(data: DataFacts, rows: int, *, is_own: bool = False) -> tuple[Any, Any]:
    """Return inputs and targets of rows to train on, on the host, as batches of this data hold
    them: the first of a loader, and some of all that are prepared.

    is_own: for a loss of the user's own, which takes targets as a loader gives them. Where there
    are fewer rows, the last is repeated; where none are at hand, they are drawn.
    """
    if data.first_rows is not None:
        x, y = nested.unpack_rows(data.first_rows, rows)
        return x, TargetConverter(data.task, data.outputs, "training", is_own)(y, 1)
    if data.batch is not None:
        return nested.make_zeros(data.batch, rows, device=CPU)
    if Path(data.folder).is_dir():
        arrays = load_arrays(data)
        chosen = np.linspace(0, len(arrays.train_x) - 1, rows).round().astype(np.int64)
        x, y = (_take_rows(part, chosen) for part in (arrays.train_x, arrays.train_y))
        return x, y
    return _draw_rows(data, rows)


def _take_rows(array: np.ndarray, chosen: np.ndarray) -> Tensor:
    rows = np.ascontiguousarray(array[chosen])
    return torch.from_numpy(rows.astype(np.int64 if rows.dtype.kind in "iu" else np.float32))


def _draw_rows(data: DataFacts, rows: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    if data.task == "tokens":
        shape = rows, data.input_shape[0] + 1
        tokens = torch.randint(min(1, data.outputs - 1), data.outputs, shape, generator=draw)
        return tokens[:, :-1], tokens[:, 1:]
    x = torch.randn(rows, *data.input_shape, generator=draw)
    if data.task == "classification":
        return x, torch.arange(rows) % data.outputs
    return x, torch.rand(rows, data.outputs, generator=draw).round()


def build_model_on_host(settings: ModelConfig, data: DataFacts) -> nn.Module:
    """Build the model on the host, built-in or the user's own, with freshly drawn weights.

    Raises ModelError.
    """
    name, args = settings.name, settings.args
    if not is_import_path(name):
        model = builtin.build_model(
            name,
            input_shape=data.input_shape,
            outputs=data.outputs,
            args=args,
            times=None if data.times is None else asdict(data.times),
        )
        freeze_parameters(model, settings.freeze)
        return model
    factory = import_callable(name, setting="model.name", refusal=ModelError)
    model = construct_model(factory, name, args, input_shape=data.input_shape, outputs=data.outputs)
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            module.sparse = False  # all optimizers take dense gradients, which are as large
    if any(isinstance(p, LAZY) for p in (*model.parameters(), *model.buffers())):
        _run_forward(model, *make_sample(data, 2), name)
    freeze_parameters(model, settings.freeze)
    return model


def check_model(settings: ModelConfig, train: TrainConfig, data: DataFacts) -> ModelCheck:
    """Build the model, send two rows through it and try the loss; return what that has shown, in
    plain values. Raises ModelError, ConfigError."""
    with keep_python_state(find_own_functions(train).values()):
        return _check_model(settings, train, data)


def _check_model(settings: ModelConfig, train: TrainConfig, data: DataFacts) -> ModelCheck:
    name = settings.name
    if not is_import_path(name):
        return _check_builtin_model(settings, train, data)
    try:
        return _check_own_model(settings, train, data)
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            raise
        problem = f"model.name: {name} with {dict(settings.args)} needs more memory than this host"
    raise ModelError(f"{problem} has; make it smaller")


def _check_builtin_model(settings: ModelConfig, train: TrainConfig, data: DataFacts) -> ModelCheck:
    name = settings.name
    if data.batch is not None:
        _refuse_batches(data, name)
    if settings.freeze:
        build_model_on_host(settings, data)
    work, weights_bytes = builtin.check_model(
        name,
        input_shape=data.input_shape,
        outputs=data.outputs,
        args=settings.args,
        task=data.task,
    )
    loss = make_loss(train, data, CPU)
    if is_import_path(train.loss) or train.metrics:
        x, y = make_sample(data, 2, is_own=is_import_path(train.loss))
        with torch.no_grad():
            model = build_model_on_host(settings, data)
            outputs = model(x)
        finder = ChangeFinder(model, y, find_own_functions(train))
        with finder.watch():
            writes = check_loss(train, loss, outputs, y)
        changes = finder.find_changes(writes)
        averaging_rule = _ask_own_loss(train, loss, outputs, data)
        return ModelCheck(work, weights_bytes, data.outputs, changes, changes, averaging_rule)
    return ModelCheck(work, weights_bytes, data.outputs)


def _refuse_batches(data: DataFacts, name: str) -> None:
    """Raises ModelError where a built-in model can't take what a loader gives."""
    inputs = data.batch["of"][0] if data.batch else {}
    wanted = "int" if data.task == "tokens" else "float32"
    if inputs["kind"] != "rows" or not inputs["dtype"].startswith(wanted):
        what = inputs.get("dtype", f"a {inputs['kind']}")
        raise ModelError(
            f"model.name: {name} takes one {'int64' if wanted == 'int' else wanted} tensor, and "
            f"the batches of {data.source} hold {what}; convert it there, or name a model of your "
            "own"
        )
    if data.task == "own":
        raise ModelError(
            f"model.name: {name} gives one answer a row, and nothing says that the targets of "
            f"{data.source} are one (data.task is own); name a model of your own"
        )
    if not data.outputs:
        raise ModelError(
            f"model.name: {name} has to know how many classes there are, and {data.source} does "
            "not tell; give its data set an attribute `classes`, the list of their names, or name "
            "a model of your own"
        )


def _check_own_model(settings: ModelConfig, train: TrainConfig, data: DataFacts) -> ModelCheck:
    name = settings.name
    model = build_model_on_host(settings, data)
    _refuse_untrainable(model, name)
    x, y = make_sample(data, 2, is_own=is_import_path(train.loss))
    own_loss = find_own_loss(train, data)
    finder = ChangeFinder(model, (x, y), find_own_functions(train))
    before = set(model.state_dict())
    numbers: list[bool] = []  # whether a single number that it returned may be trained on
    hook = model.register_forward_hook(
        lambda module, inputs, result: numbers.append(
            any(number.requires_grad for number in find_numbers(result))
        )
    )
    with finder.watch(), builtin.count_multiply_adds(model) as work:
        outputs = _run_forward(model, x, y, name, takes_loss=own_loss)
    hook.remove()
    if made := sorted(set(model.state_dict()) ^ before):
        raise ModelError(
            f"model.name: {name} makes or drops {', '.join(made[:3])} in its first forward pass, "
            "so that a model built anew could not load its weights; make it in __init__, by "
            "register_buffer or as an nn.Parameter, of the shape that it will have"
        )
    task, wide = _find_figures(
        outputs, y, data, train, lambda: make_own_forward(model, takes_loss=own_loss)(x)[1], name
    )
    loss = make_loss(train, data, CPU)
    with finder.watch():
        writes = check_loss(train, loss, outputs, y)
    changes = finder.find_changes(writes)
    averaging_rule = _ask_own_loss(train, loss, outputs, data)
    shown, _ = make_sample(data, EVAL_ROWS)
    finder = ChangeFinder(model, shown)
    row = None if task == "own" else tuple(outputs.shape[1:])
    with finder.watch():
        _refuse_otherwise_in_eval(model, shown, name, row, takes_loss=own_loss)
    judged = changes.replace_model(finder.find_changes())
    if _has_single_row(train.batch_size, train.accumulate, data.train_rows):
        # A norm of the batch can't.
        _run_forward(model.train(), *make_sample(data, 1), name)
    if own_loss and train.cross_entropy.label_smoothing:
        _, labels_given = make_own_forward(model, takes_loss=True)(x)
        if labels_given is not None:
            raise ConfigError(
                f"train.loss_args.label_smoothing: has no meaning with the loss that {name} "
                "computes itself; drop it, or set train.loss to cross_entropy"
            )
    if own_loss is TakesLoss.ALWAYS or (own_loss and isinstance(x, Mapping) and "labels" in x):
        averaging_rule = _ask_model(model.eval(), own_loss, data)
    warnings: tuple[str, ...] = ()
    if any(numbers) and own_loss and make_own_forward(model, takes_loss=own_loss)(x)[1] is None:
        warnings = (
            f"model.name: {name} returns a number beside its outputs that is not trained on; where "
            "it belongs to the loss, let its forward take `labels` and return the whole as `loss`, "
            "or set data.task to own",
        )
    size = builtin.count_bytes(model)
    return ModelCheck(sum(work) // 2, size, wide, changes, judged, averaging_rule, task, warnings)


def _ask_own_loss(train: TrainConfig, loss: Loss, outputs: Tensor, data: DataFacts) -> Averaging:
    """Return over what a train.loss of the user's own is the mean. outputs: of some rows; others
    are drawn in their shape, since those of new weights are next to equal. Raises ConfigError."""
    if not is_import_path(train.loss):
        return Averaging()
    _, y = make_sample(data, averaging.ROWS, is_own=True)
    draw = torch.Generator().manual_seed(0)
    drawn = torch.rand((averaging.ROWS, *outputs.shape[1:]), generator=draw).to(outputs.dtype)
    own_count = averaging.find_told_count(load_own_loss(train))
    if own_count is not None:
        with torch.no_grad():
            value = float(loss(drawn.clone(), nested.map_tensors(y, Tensor.clone)))
        averaging.check_told_count(own_count, y, value, path=train.loss)
    # Labels of -100 come from loaders alone.
    may_skip = data.batch is not None
    average = averaging.find_averaging(loss, drawn, y, own_count=own_count, may_skip=may_skip)
    count, leaf = own_count or average.count, drawn.requires_grad_()
    breaks = may_skip and averaging.breaks_on_nothing(loss, leaf, y, count, [leaf])
    return replace(average, breaks_on_nothing=breaks)


def _ask_model(model: nn.Module, own_loss: TakesLoss, data: DataFacts) -> Averaging:
    """Return over what the loss is the mean that the model itself gives."""
    forward = make_own_forward(model, takes_loss=own_loss)
    config = getattr(model, "config", None)
    named = [getattr(config, name, None) for name in SKIPPED_LABELS]

    def measure(x: Any, y: Any) -> Tensor | None:
        return forward(x)[1]

    rows = make_sample(data, averaging.ROWS)
    average = averaging.find_averaging(
        measure,
        *rows,
        paddings=tuple(label for label in named if isinstance(label, int)),
        may_skip=data.task != "classification",  # whose labels of -100 are refused
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    breaks = averaging.breaks_on_nothing(measure, *rows, average.count, trained)
    return replace(average, breaks_on_nothing=breaks)


def _has_single_row(batch_size: int, accumulate: int, rows: int) -> bool:
    """Return whether one row alone goes through the model in an epoch, as the last one may."""
    micro = -(-batch_size // accumulate)
    return any(
        size == 1
        for batch in (batch_size, rows % batch_size)
        for size in (min(micro, batch), batch % micro)
    )


def _run_forward(
    model: nn.Module, x: Any, y: Any, name: str, *, takes_loss: TakesLoss | bool = False
) -> Tensor:
    """Return the outputs for these rows. Raises ModelError with the line that failed."""
    try:
        outputs, loss = make_own_forward(model, takes_loss=takes_loss)(x)
        outputs.float()
        result = outputs if loss is None else loss
        lost, is_trained = _find_unsaved(model, result)
        if not result.requires_grad or not (is_trained or _has_hidden_gradients(model, result)):
            problem = (
                f"model.name: {name} gives outputs that no parameter has a share in; compute them "
                "with gradients, without detach() or no_grad"
            )
        elif lost:
            problem = (
                f"model.name: {name} computes with {lost}, which PyTorch does not know: it would "
                "be neither trained nor saved; keep a list of layers in an nn.ModuleList, a dict "
                "in an nn.ModuleDict, a tensor in an nn.Parameter, as attributes of the module"
            )
        else:
            return outputs.detach()
    except NoOutputsError as error:
        problem = f"model.name: forward of {name} {error}; return its outputs"
    except MemoryError:
        raise
    except Exception as error:
        if is_oom(error):
            raise
        again = partial(make_own_forward(model, takes_loss=takes_loss), x)
        problem = failed_step.explain_failure(error, model, (x, y), again) or (
            f"model.name: forward of {name}, given two rows of {_describe_inputs(x)}, raised: "
            f"{describe_error(error)}"
        )
    raise ModelError(problem)


def _has_hidden_gradients(model: nn.Module, result: Tensor) -> bool:
    """Return whether gradients come to a parameter on a way that the graph does not show, as those
    of a checkpoint do that goes forward again (use_reentrant=True)."""
    result.float().sum().backward(retain_graph=True)
    has_gradients = any(p.grad is not None for p in model.parameters())
    model.zero_grad(set_to_none=True)
    return has_gradients


def _find_unsaved(model: nn.Module, result: Tensor) -> tuple[str, bool]:
    """Return what has a share in the result and wants gradients, and is no parameter of the model;
    empty where all is. What the forward pass has made itself is none of it. And whether the graph
    shows a parameter."""
    parameters = {id(parameter) for parameter in model.parameters()}
    registered = {id(buffer) for buffer in model.buffers()}  # kept out of the state_dict on purpose
    unsaved = find_unsaved_tensors(model).items()
    held = {id(tensor): path for path, tensor in unsaved if id(tensor) not in registered}
    waiting: list[Any] = [result.grad_fn]
    seen, shares, is_trained = set(), {}, False
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [inner for inner, _ in node.next_functions]
        leaf = getattr(node, "variable", None)  # of what gathers a leaf's gradient
        is_trained |= id(leaf) in parameters
        if leaf is None or id(leaf) in parameters:
            continue
        if id(leaf) in held or isinstance(leaf, nn.Parameter):
            shares[id(leaf)] = held.get(id(leaf), f"a parameter of shape {tuple(leaf.shape)}")
    names = sorted(shares.values())
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more, is_trained


def _refuse_untrainable(model: nn.Module, name: str) -> None:
    parameters = dict(model.named_parameters())
    if not parameters:
        raise ModelError(
            f"model.name: {name} has no parameters, so there is nothing to train; assign its "
            "layers to attributes of the module, lists of them as an nn.ModuleList"
        )
    if not any(p.requires_grad for p in parameters.values()):
        raise ModelError(
            f"model.name: all {len(parameters)} parameters of {name} are frozen; set requires_grad "
            "of those to be trained"
        )
    if unmade := [where for where, t in (*parameters.items(), *model.named_buffers()) if t.is_meta]:
        raise ModelError(
            f"model.name: {', '.join(unmade[:3])} of {name} lies on the meta device and holds no "
            "numbers; build the model without torch.device('meta'), or give it memory by "
            "to_empty(device='cpu') and initialize it"
        )
    for where, parameter in parameters.items():
        numbers = parameter.is_floating_point() or parameter.is_complex()
        if numbers and not bool(parameter.isfinite().all()):
            raise ModelError(
                f"model.name: parameter {where} of {name} is not finite at the start; mend how it "
                "is initialized"
            )
    for where, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"model.name: {name} keeps {where!r} in its state_dict, a {type(value).__name__}; "
                "only tensors can be saved and loaded without running code"
            )


def _find_figures(
    outputs: Tensor,
    y: Any,
    data: DataFacts,
    train: TrainConfig,
    compute_loss: Callable[[], Tensor | None],
    name: str,
) -> tuple[str, int]:
    """Return the data's task, or own where the outputs do not go with the targets, as those of a
    model that gives its loss itself need not; and their width. compute_loss: the model's own.

    Raises ModelError where there is no loss for them, and ConfigError for a figure that there is
    not."""
    problem = (
        f"model.name: {name} gives no loss, and the batches of {data.source} tell no task; let it "
        "return one as `loss`, or set train.loss to a function of yours"
    )
    if data.task != "own":
        try:
            return data.task, _refuse_misshapen(outputs, y, data, name)
        except ModelError as error:
            problem = str(error)
    if (data.task != "own" or not is_import_path(train.loss)) and compute_loss() is None:
        raise ModelError(problem)
    if train.best.name in list_best_metrics(data.task) and train.best.name != "val/loss":
        raise ConfigError(
            f"train.best_metric: {train.best.name} needs outputs of the shape of the labels, and "
            f"{name} gives {tuple(outputs.shape)} for two rows; choose val/loss"
        )
    return "own", outputs.shape[-1] if outputs.dim() > 1 else 1


def _refuse_misshapen(outputs: Tensor, y: Any, data: DataFacts, name: str) -> int:
    """Return the width of the outputs. Raises ModelError where it is not what is learnt."""
    got = tuple(outputs.shape)
    rule = f"model.name: {name} must return"
    if not outputs.is_floating_point():
        raise ModelError(f"{rule} floating-point numbers (got {outputs.dtype})")
    if not got or got[0] != 2:
        raise ModelError(f"{rule} a row for each of two rows (got shape {got})")
    if data.task == "regression":
        expected = tuple(y.shape) if isinstance(y, Tensor) else got
        return _check_shape(got, expected, rule) or data.outputs
    leading = tuple(y.shape) if data.task == "tokens" else (2,)
    if not data.outputs:
        if len(got) != len(leading) + 1 or got[:-1] != leading:
            shape_words = ", ".join(map(str, (*leading, "classes")))
            raise ModelError(f"{rule} ({shape_words}) for two rows (got {got})")
        return got[-1]
    is_padded = got[:-1] == leading and data.task == "tokens" and got[-1] > data.outputs
    if not is_padded:  # vocabularies are often rounded up
        _check_shape(got, (*leading, data.outputs), rule)
    return got[-1]


def _refuse_otherwise_in_eval(
    model: nn.Module,
    x: Any,
    name: str,
    shape: tuple[int, ...] | None,
    *,
    takes_loss: TakesLoss | bool,
) -> None:
    """Raises ModelError where the outputs have another shape when it is evaluated, or it fails
    then. x: EVAL_ROWS rows, since two may be as many as there are outputs; shape: of a row in
    training; None where it may be any."""
    expected, difference = (EVAL_ROWS, *(shape or ())), ""
    forward = make_own_forward(model.eval(), takes_loss=takes_loss)
    try:
        with torch.inference_mode():
            got = tuple(forward(x)[0].shape)
            if shape is not None and got != expected:  # as where it goes by the longest of the rows
                model.train()
                expected = tuple(forward(x)[0].shape)
        if shape is not None and got != expected:
            difference = f"returns {got} for {EVAL_ROWS} rows, and {expected} in training"
    except Exception as error:
        if is_oom(error):
            raise
        difference = f"raised: {describe_error(error)}"
    model.train()
    if difference:
        raise ModelError(f"model.name: in eval mode {name} {difference}; mend what it does then")


def _check_shape(got: tuple[int, ...], expected: tuple[int, ...], rule: str) -> int:
    if got != expected:
        raise ModelError(
            f"{rule} {expected} for two rows (got {got}); take the parameters input_shape and "
            "outputs, which tell what the data needs"
        )
    return 0


def _describe_inputs(x: Any) -> str:
    parts = [
        f"{name} {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
        for name, t in nested.find_named_tensors(x, "inputs")
    ]
    return ", ".join(parts)
