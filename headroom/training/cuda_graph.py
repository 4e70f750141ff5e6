"""A whole optimizer step recorded once as a CUDA graph and replayed: for small models, whose time
is the launching of their kernels. The plain step is what is recorded, so that both give the same
numbers. For CUDA and ROCm; other devices keep the plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from headroom.base.facts import DeviceFacts
from headroom.base.import_paths import is_import_path
from headroom.base.names import REPLAY
from headroom.data.batch import Batch
from headroom.settings.run_config import FUSED, RunConfig
from headroom.training.optimizer_step import Step, StepOutcome, compute_total_norm
from headroom.watch.out_of_memory import clear_frames
from headroom.watch.phases import Watched

WARM_UP = 3  # steps before recording, in which libraries and the optimizer make their state
# Steps that a run has to have left for a trial of replaying, and those that are taken before.
REPLAY_TRIED_ABOVE, MEASURED_BEFORE = 100, 13
NO_BATCH = Batch(torch.empty(0), torch.empty(0), 0)
RecordStep = Callable[[Callable[[], StepOutcome]], tuple[Callable[[], None], StepOutcome]]


class GraphError(RuntimeError):
    """The step cannot be recorded: it reads from the device, or does what a graph can't hold."""


class GraphedStep:
    """Replays `step`. The first steps are taken plainly, the next is recorded.

    Batches of another shape, and steps timed phase by phase or counted, are taken plainly.
    """

    def __init__(self, step: Step, record: RecordStep | None = None) -> None:
        self.step, self._optimizer = step, step.optimizer
        self._record = record or record_on_cuda
        self._warm = 0
        self.replays = 0
        self._replay: Callable[[], None] | None = None
        self._batch = NO_BATCH  # in whose memory a replay reads
        self._outcome = StepOutcome(torch.empty(0), None)
        self._grads: list[Tensor | None] = []

    @property
    def is_recorded(self) -> bool:
        return self._replay is not None

    def __call__(self, batch: Batch, *, norm: bool, watched: Watched) -> StepOutcome:
        if self._replay is None:
            if self._warm < WARM_UP:
                self._warm += 1
                return self.step(batch, norm=norm, watched=watched)
            self._replay = self._record_step(batch)
        kept = self._batch
        if watched in (Watched.TIMED, Watched.COUNTED) or batch.x.shape != kept.x.shape:
            return self.step(batch, norm=norm, watched=watched)
        for there, part in ((kept.x, batch.x), (kept.y, batch.y)):
            if part.data_ptr() != there.data_ptr():  # most batches come in the same buffer
                there.copy_(part)
        self._replay()
        self.replays += 1
        outcome = StepOutcome(self._outcome.loss.clone(), self._compute_grad_norm(norm))
        self.step.mark(REPLAY)
        return outcome

    def list_tensors(self) -> list[Tensor]:
        """Return the tensors that the recording keeps for its replays, beside the batch."""
        kept = [*self._grads, *self._outcome]
        return [tensor for tensor in kept if tensor is not None]

    def forget(self) -> None:
        """Drop the recording and all the memory that it keeps."""
        for parameter, grad in zip(self._optimizer.params, self._grads, strict=False):
            if parameter.grad is grad:
                parameter.grad = None
        self._replay, self._grads = None, []
        self._batch = NO_BATCH
        self._outcome = StepOutcome(torch.empty(0), None)

    def _record_step(self, batch: Batch) -> Callable[[], None]:
        """Record the step on a batch, to whose memory later ones are brought."""
        if not isinstance(self._optimizer.lr, Tensor):
            # A number would be recorded as it is now; a tensor is read at each replay.
            self._optimizer.lr = torch.tensor(self._optimizer.lr, device=batch.x.device)
        self._batch = batch
        # The gradients must be made inside the recording, to live in the graph's own memory.
        self._optimizer.zero_grad()
        step = self.step.make_recordable()
        replay, self._outcome = self._record(
            lambda: step(self._batch, norm=False, watched=Watched.NOT)
        )
        self._grads = [p.grad for p in self._optimizer.params]
        return replay

    def _compute_grad_norm(self, is_requested: bool) -> Tensor | None:
        if self._outcome.grad_norm is not None:  # clipping: recorded with the step
            return self._outcome.grad_norm.clone()
        if not is_requested:
            return None
        for parameter, grad in zip(self._optimizer.params, self._grads, strict=True):
            parameter.grad = grad  # a plain step in between has put its own there
        return compute_total_norm(self._optimizer)


def record_on_cuda(run: Callable[[], StepOutcome]) -> tuple[Callable[[], None], StepOutcome]:
    """Record what `run` launches, without running it; replay() runs it and rewrites the
    outcome.

    On the current stream, which must not be the default one: see use_own_stream().
    """
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    stream = torch.cuda.current_stream()
    failure = None
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            outcome = run()
    except RuntimeError as error:  # also where memory runs out: the plain step has its ways
        clear_frames(error)
        failure = str(error)
    if failure is not None:
        _end_failed_capture(graph, pool, stream.device_index)
        raise GraphError(f"the step cannot be recorded as a graph: {failure}")
    return graph.replay, outcome


def _end_failed_capture(
    graph: torch.cuda.CUDAGraph, pool: tuple[int, int], device_index: int
) -> None:
    """End a capture that failed: what CUDA ended keeps its pool for ever. Private
    names; see torch/cuda/graphs.py."""
    try:
        graph.pool()
    except RuntimeError:
        pass
    else:
        return  # it came to its end, as one that ran out of memory does: the graph has the pool
    try:
        torch._C._cuda_endAllocateToPool(device_index, pool)
    except RuntimeError:
        pass  # newer than 2.11: not recording any more
    else:
        # Nor would it draw random numbers again, nor give back what it caches.
        generator = torch.cuda.default_generators[device_index]
        generator.graphsafe_set_state(generator.clone_state())
    torch._C._cuda_releasePool(device_index, pool)


@contextmanager
def use_own_stream(device: torch.device) -> Iterator[None]:
    """Use one stream for all of a training, which recording needs; CUDA and ROCm only.

    One for all: libraries keep a workspace for each stream and thread, 32 MiB on Hopper.
    """
    if device.type != "cuda":
        yield
        return
    inside = torch.cuda.Stream(device)
    inside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(inside):
        yield


def may_replay(config: RunConfig, device: DeviceFacts, precision: str, *, steps: int) -> bool:
    """Return whether this training may replay its steps from a graph; if they are short
    enough, it does.

    precision: as resolved for the device; steps: of the whole run.
    """
    # A scaler decides on the host whether to step, and a forward or a loss of the user's own may
    # decide anything there; what was decided must not be replayed.
    if (
        device.kind not in ("cuda", "rocm")
        or precision == "fp16"
        or is_import_path(config.model.name)
        or is_import_path(config.train.loss)
        or config.optim.name not in FUSED  # what others decide on the host is not known
        or config.train.compile == "off"
        or config.train.deterministic  # whether it is faster is found out by timing
    ):
        return False
    return config.train.compile != "auto" or steps > MEASURED_BEFORE + REPLAY_TRIED_ABOVE
