"""Checks a plan before a device is touched: it refuses settings that contradict the data, and a
model that cannot be trained on it. What the check has learnt of the model stays in the plan, so
that nothing after it builds the model only to look at it.
"""

from __future__ import annotations

import time
from dataclasses import replace

from headroom.base.import_paths import forbid_exit
from headroom.base.names import list_best_metrics
from headroom.ranks.sharding import recompute_activations
from headroom.settings.arguments import PlateauArgs
from headroom.settings.read_settings import ConfigError
from headroom.training import optim, own_model
from headroom.training.loop import compute_end_time
from headroom.training.plan import Plan

# They work on whole parameters, and PyTorch has no way to share that out.
NOT_SHARED = ("Adafactor", "Muon", "Rprop")


@forbid_exit
def check_plan(plan: Plan) -> Plan:
    """Return the plan with what two rows have shown of its model; one that was checked is returned
    as it is.

    Raises ModelError for the model and ConfigError for a setting that contradicts the data.
    """
    if plan.model_check is not None:
        return plan
    config, data = plan.settings, plan.data
    if data.endless and config.train.max_steps is None:
        raise ConfigError(
            f"train.max_steps: is needed, since the training loader of {data.source} has no "
            "length; set it to the optimizer steps of the whole run, or give its data set a __len__"
        )
    if config.train.end_clock is not None:
        compute_end_time(config.train.end_clock, time.time())
    optim.check_optimizer(
        config.optim, steps=plan.steps, epochs=plan.epochs, precision=plan.precision
    )
    _refuse_evaluations(plan)
    checked = own_model.check_model(config.model, config.train, data)
    if config.train.batch_size > data.train_rows:
        raise ConfigError(
            f"train.batch_size: must be at most the {data.train_rows} training rows "
            f"(got {config.train.batch_size})"
        )
    if (config.launch.count or 1) > config.train.batch_size:
        raise ConfigError(
            f"train.batch_size: must be at least launch.processes, {config.launch.count} "
            f"(got {config.train.batch_size})"
        )
    if config.train.parallel == "fsdp" and config.optim.name in NOT_SHARED:
        raise ConfigError(
            f"optim.name: {config.optim.name} cannot train a model that is shared out "
            "(train.parallel is fsdp); choose another, or ddp"
        )
    is_choosy = config.optim.name in optim.MATRICES_ONLY
    if config.optim.groups or config.memory.recompute or is_choosy:
        model = own_model.build_model_on_host(config.model, data)
        optim.find_groups(config.optim, model)
        optim.refuse_parameters(config.optim, model)
        if config.memory.recompute:
            recompute_activations(model)
    return replace(plan, model_check=checked)


def _refuse_evaluations(plan: Plan) -> None:
    """Raises ConfigError where evaluations do not give what the settings ask of them."""
    t, o, task = plan.settings.train, plan.settings.optim, plan.data.task
    measured = list_best_metrics(task, classes=plan.data.outputs)
    choices = [*measured, *(f"val/{name}" for name in t.metrics)]
    if t.best.name not in choices:
        raise ConfigError(
            f"train.best_metric: {t.best.name} is not measured of this {task}; choose one of "
            f"{', '.join(choices)}"
        )
    if t.eval_every_steps is not None and t.eval_every_steps >= plan.steps:
        raise ConfigError(
            f"train.eval_every_steps: must be below the {plan.steps:,} steps of the run "
            f"(got {t.eval_every_steps:,}); lower it, or drop it"
        )
    times = plan.epochs + (plan.steps // t.eval_every_steps if t.eval_every_steps else 0)
    if o.schedule != "plateau":
        return
    waits = PlateauArgs(**o.schedule_args).patience
    if waits + 2 > times:
        raise ConfigError(
            f"optim.schedule_args.patience: {waits} never lowers the rate within the "
            f"{times:,} evaluations of the run; lower it, or raise train.epochs"
        )
    if 0 < t.patience <= waits + 1:
        raise ConfigError(
            f"optim.schedule_args.patience: {waits} never lowers the rate before "
            f"train.patience {t.patience} ends the training; lower it, or raise the other"
        )
