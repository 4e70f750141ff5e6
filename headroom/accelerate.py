"""The account of a loop with Hugging Face's accelerate:

from headroom.accelerate import HeadroomTracker

accelerator = Accelerator(log_with=HeadroomTracker(model=net, optimizer=opt))
accelerator.init_trackers("mine", config={"lr": 1e-3})
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.tracking import GeneralTracker

from headroom.base.event_log import read_json
from headroom.run.account import Account
from headroom.run.adapter import Adapter
from headroom.watch.guard import guard

STATE = "headroom.json"  # in the folder of a checkpoint: what it has of the run


class HeadroomTracker(Adapter, GeneralTracker):
    """Tells of the loop in a run of its own. Of several processes, that of rank 0 tells.

    The run ends with `end_training`, and what is logged later belongs to it; after that
    `init_trackers` begins another one. An error that ends the program ends it as well. In a
    notebook, `with tracker.run:` around the loop ends it by the error that leaves it.
    """

    name = "headroom"
    requires_logging_directory = False

    def __init__(self, **arguments: Any) -> None:
        """arguments: what `headroom.account` takes. model and optimizer may be those that
        `prepare` is given, or what it returns; params come from `init_trackers`."""
        super().__init__(**arguments)

    def add_to(self, accelerator: Accelerator) -> None:
        """Let `save_state` keep which run it is, and `load_state` go on with that one. Among the
        objects that are registered for checkpointing, `load_state` would refuse what was saved
        without it."""
        accelerator.register_save_state_pre_hook(self._save_state)
        accelerator.register_load_state_pre_hook(self._load_state)

    @guard
    def _save_state(self, models: Any, weights: Any, folder: str) -> None:
        if self.run is not None:
            (Path(folder) / STATE).write_text(json.dumps(self._make_state()))

    @guard
    def _load_state(self, models: Any, folder: str) -> None:
        if PartialState().is_main_process:
            state = read_json(Path(folder) / STATE)
            if self.run is not None and not self.run.run:
                self.run.load_state_dict(state)
            else:
                self._loaded = state

    @property
    def tracker(self) -> Account | None:
        """The run: its `batches` time the wait for data and count rows."""
        return self.run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Begin the run, with these params."""
        if self.run is None or self.run.run:
            state = PartialState()
            if state.is_main_process:
                params = {"world_size": state.num_processes, **values}
                self._begin(params, device=state.device)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log metrics. A run without `config` begins here."""
        if self.run is None:
            self.store_init_configuration({})
        if self.run is not None:
            self.run.log(values, step)

    def finish(self) -> None:
        """End the run."""
        if self.run is not None:
            self.run.end()
