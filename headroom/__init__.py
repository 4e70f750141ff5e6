"""Trains PyTorch models, or accounts for loops that others train, and tells where each run ran,
where its time and memory went, and that the device was given back.

    from headroom import account

    with account(model=net, optimizer=optimizer) as run:
        for x, y in run.batches(loader):
            with run.step():
                ...

A door is imported when it is asked for: `import headroom` costs nothing. `account`, `forecast`,
`peak` and `fits` import neither Prefect nor MLflow; `train`, `predict`, `compare` and `judge` are
the commands of these names. headroom.lightning, .transformers, .accelerate and .ultralytics account
for the loops of these frameworks, and headroom.pytest_plugin makes memory a test.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headroom.run.account import Account as account
    from headroom.training.loop_forecast import fits, peak
    from headroom.training.loop_forecast import forecast_model as forecast

_DOORS = {
    "account": ("headroom.run.account", "Account"),
    "forecast": ("headroom.training.loop_forecast", "forecast_model"),
    "fits": ("headroom.training.loop_forecast", "fits"),
    "peak": ("headroom.training.loop_forecast", "peak"),
}
_FLOWS = ("train", "predict", "compare", "judge")

__all__ = ["account", "compare", "fits", "forecast", "judge", "peak", "predict", "train"]


def __getattr__(name: str) -> Any:
    if name in _FLOWS:
        from headroom.__main__ import own_the_flows

        own_the_flows()
        return getattr(import_module(f"flows.{name}"), name)
    if name not in _DOORS:
        raise AttributeError(f"module 'headroom' has no attribute {name!r}")
    module, attribute = _DOORS[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted(__all__)
