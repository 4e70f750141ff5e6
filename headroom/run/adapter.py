"""What adapters of frameworks share: the account of the training that a framework runs now, begun
with what the framework knows, and a guard around each method that it calls. A copy of an adapter,
pickled or not, has no run.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from headroom.run.account import Account, flatten_params
from headroom.run.run_keys import KeyHeld
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
        # What the checkpoint that the next training goes on from says of its run; {}: it has none.
        self._loaded: Mapping[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "run": None, "_loaded": None}

    def _make_state(self) -> dict[str, Any]:
        """Return what the framework's checkpoint keeps of the run; empty where there is none."""
        return {} if self.run is None else self.run.state_dict()

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
        loaded, self._loaded = self._loaded, None
        try:
            self.run = self._make_run(arguments, loaded).begin(is_owed=True, owner=owner)
        except KeyHeld as held:  # the training goes on, and so it is told, without the key
            self.run = self._make_run({**arguments, "key": ""}, loaded)
            self.run.begin(is_owed=True, owner=owner)
            self.run.warn(f"{held}; this is a run without it")
        for text in renamed:
            self.run.warn(text)
        return self.run

    def _make_run(self, arguments: dict[str, Any], loaded: Mapping[str, Any] | None) -> Account:
        run = Account(**arguments)
        if loaded is not None:
            run.load_state_dict(loaded)
        return run
