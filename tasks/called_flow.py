"""A flow that does more where Python calls it than where a worker plays it, which calls nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefect import Flow


class CalledFlow(Flow[..., Any]):
    """A Prefect flow; `call` is given the plain call and its arguments."""

    def __init__(self, fn: Any, *, call: Callable[..., Any] | None = None, **settings: Any) -> None:
        super().__init__(fn, **settings)
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.call is None:
            return super().__call__(*args, **kwargs)
        return self.call(super().__call__, *args, **kwargs)
