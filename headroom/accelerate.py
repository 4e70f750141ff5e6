"""The account of a loop with Hugging Face's accelerate:

from headroom.accelerate import HeadroomTracker

accelerator = Accelerator(log_with=HeadroomTracker(model=net, optimizer=opt))
accelerator.init_trackers("mine", config={"lr": 1e-3})
"""

from __future__ import annotations

from typing import Any

from accelerate import PartialState
from accelerate.tracking import GeneralTracker

from headroom.run.account import Account
from headroom.run.adapter import Adapter


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
