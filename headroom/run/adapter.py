"""What adapters of frameworks share: the account of the training that a framework runs now, begun
with what the framework knows, and a guard around each method that it calls. A copy of an adapter,
pickled or not, has no run.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from headroom.run.account import Account, flatten_params
from headroom.watch.guard import Guarded
from headroom.watch.logged_values import FitNames
from headroom.watch.own_loop import check_watched

log = logging.getLogger(__name__)


class Adapter(Guarded):
    """Begins an account where the framework begins a training."""

    def __init__(self, **arguments: Any) -> None:
        """arguments: what `headroom.account` takes. Raises TypeError and ValueError."""
        inspect.signature(Account).bind(**arguments)
        check_watched(arguments.get("model"), arguments.get("optimizer"))
        params = arguments.get("params")
        self._params = {} if params is None else dict(flatten_params(params))
        self._arguments = arguments
        self.run: Account | None = None  # the newest

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "run": None}

    def take_error(self, error: BaseException) -> None:
        """Measure no more, and tell why, once; the training goes on."""
        if self.run is not None:
            self.run.take_error(error)
        else:
            log.warning("account: an error of its own; the training goes on", exc_info=error)

    def _begin(self, params: dict[Any, Any], *, owner: Any = None, **defaults: Any) -> Account:
        """Begin the account of a training; one that nobody has ended ends here.

        params: that the framework knows. owner: while it is there, more may be logged after the
        end. defaults: what an account takes, where the user has not asked for it."""
        if self.run is not None:
            self.run.abandon()
            self.run.send_added()
        renamed: list[str] = []
        names = FitNames("params", renamed.append)
        known_params = dict(flatten_params(params, names.fit))
        arguments = {**defaults, **self._arguments, "params": {**known_params, **self._params}}
        self.run = Account(**arguments).begin(is_owed=True, owner=owner)
        for text in renamed:
            self.run.warn(text)
        return self.run
