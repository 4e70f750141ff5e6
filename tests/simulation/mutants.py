"""Defects of the record's code, planted one at a time: each would lose, double or mistell what a
training has measured, or keep a key or a device from the next one. The simulation has to find them.
"""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A text of a function that is another one, and what that costs."""

    name: str
    where: str  # module:function or module:Class.method
    old: str
    new: str
    costs: str


MUTANTS = (
    Mutant(
        "half a line is left in the log",
        "headroom.base.event_log:summarize_log",
        "                lines.truncate(whole_bytes)\n",
        "                pass\n",
        "the first point after a resume is a part of a damaged line",
    ),
    Mutant(
        "a short write is left there",
        "headroom.base.event_log:append_line",
        "        file.truncate(file.tell() - (written or 0))\n",
        "",
        "on a full disk the next line is damaged",
    ),
    Mutant(
        "an end is appended to half a line",
        "headroom.base.event_log:append_event",
        '            if log.read(1) != b"\\n":\n',
        "            if False:\n",
        "the end of a run that was killed in mid-write can't be read",
    ),
    Mutant(
        "the offset is kept before the batch is sent",
        "headroom.tracking.run_sender:Sender.flush",
        "                if batch:\n",
        "                self.state.offset = offset\n                if batch:\n",
        "points are lost where MLflow is away",
    ),
    Mutant(
        "the offset is never moved back to what MLflow has",
        "headroom.tracking.orphaned_runs:find_sending_state",
        """    try:
        before = read_metrics_before(folder / LOG, said.offset) if said.offset else {}
    except (OSError, ValueError, TypeError) as error:
        print(f"{folder}: sent again from the start: {error}", file=sys.stderr)
        return _begin_again(whole, run, folder)
    if not before or any(run.data.metrics.get(name) != value for name, value in before.items()):
        # It is not the newest that MLflow holds: less was sent, or more.
        return _begin_again(whole, run, folder)
""",
        "",
        "after a power cut, points of a log that has grown anew are not sent",
    ),
    Mutant(
        "points get the time at which they are sent",
        "headroom.tracking.run_sender:Sender._send",
        "run_id, samples)",
        "run_id, [(k, v, int(time.time() * 1000), s) for k, v, _, s in samples])",
        "what is sent again is there twice",
    ),
    Mutant(
        "a resume tells again what was told",
        "headroom.tracking.journal:Journal._select_untold",
        "        return {k: v for k, v in metrics.items() if steps.get(k, -1) < first}\n",
        "        return metrics\n",
        "steps after the checkpoint are there twice",
    ),
    Mutant(
        "who died is told as finished",
        "headroom.tracking.orphaned_runs:_send_rest",
        'run = {"status": "KILLED", "error"',
        'run = {"status": "FINISHED", "error"',
        "a killed training looks whole",
    ),
    Mutant(
        "an end that was told is not read",
        "headroom.tracking.orphaned_runs:_send_rest",
        "    run = read_end(sender.folder)\n",
        "    run: Any = {}\n",
        "a run that has ended well says KILLED",
    ),
    Mutant(
        "a process is known by its number alone",
        "headroom.prefect.prefect_http:is_alive",
        "return is_same and process",
        "return process",
        "a run of a dead process says RUNNING while another has its number",
    ),
    Mutant(
        "a set clock makes a process another one",
        "headroom.prefect.prefect_http:is_alive",
        "            or compute_uptime(process) == uptime_s\n",
        "",
        "a run that trains is ended by the next sweep",
    ),
    Mutant(
        "the key's file is not looked at again",
        "headroom.run.run_keys:KeyLock.take",
        "            if lock.is_in_place():\n",
        "            if True:\n",
        "two trainings hold one key",
    ),
    Mutant(
        "the lock of what trains is not asked",
        "headroom.run.resume:lock_for_training",
        "    if not is_mine:\n",
        "    if False:\n",
        "two processes train one run",
    ),
    Mutant(
        "the lease is shared",
        "headroom.device.leases:Leases._try_take",
        "        if lease.take(self._holder):\n",
        "        lease.take(self._holder)\n        if True:\n",
        "two trainings have one device",
    ),
    Mutant(
        "a dead one's ticket is kept",
        "headroom.device.leases:_Ticket.is_behind",
        '                if other.take("\\n".join(wanted)):\n                    path.unlink()'
        "  # of a process that is gone\n                elif device in wanted:\n",
        "                if device in wanted:\n",
        "all wait behind a training that was killed",
    ),
    Mutant(
        "a run is begun without a look at MLflow",
        "headroom.tracking.orphaned_runs:begin_run",
        "        run = None if _is_new(folder) else _find_run(client, folder)"
        "  # its maker may have died then\n",
        "        run = None\n",
        "one training is two runs, where an answer was lost",
    ),
    Mutant(
        "a log that has lost its end is sent as if it had not",
        "headroom.tracking.orphaned_runs:_begin_again",
        "    steps = {name: step for name, (step, _) in points.items()}\n",
        "    steps = {}\n",
        "after a power cut, steps are there twice",
    ),
    Mutant(
        "a run is closed though not all was sent",
        "headroom.tracking.run_sender:Sender.close",
        "            self._tell_unsent(run, error)\n            raise\n",
        "            self._tell_unsent(run, error)\n            times = {}\n",
        "the rest is never sent",
    ),
    Mutant(
        "another sender is not waited for",
        "headroom.tracking.run_sender:try_sending_lock",
        "    if mine.take():\n",
        "    if mine.take() or True:\n",
        "two processes send and end one run at once",
    ),
    Mutant(
        "a run that was taken back stays",
        "headroom.tracking.mlflow_sender:Session.take_back",
        "            self._delete_run(sender.state.run_id)\n",
        "",
        "an empty run says RUNNING for ever",
    ),
    Mutant(
        "the end is not on the disk when MLflow is told",
        "headroom.tracking.journal:Journal.close",
        "            write_to_disk(self.folder / LOG, self.folder, self.folder.parent)\n",
        "            pass\n",
        "a power cut makes a finished run a killed one",
    ),
    Mutant(
        "start.json gets its name before it is on the disk",
        "headroom.run.known_runs:RunStart.write",
        "        write_to_disk(half)"
        "  # else a power cut may leave an empty file, without its marks\n",
        "",
        "after a power cut a folder takes itself for a copy, and its points are never sent",
    ),
    Mutant(
        "a run that could not be gone on with is not let go of",
        "headroom.tracking.journal:Journal._begin",
        "            if self._log is not None:\n                self._forget()\n"
        "            self._earlier_ids = {}  # another run may begin, in another folder\n",
        "",
        "on a full disk a new run is told as the old one",
    ),
    Mutant(
        "a batch ends in mid-line",
        "headroom.base.event_log:read_metric_batches",
        '        if offset >= until or not line.endswith(b"\\n"):\n',
        "        if offset >= until:\n",
        "a line that is being written is skipped as a damaged one",
    ),
    Mutant(
        "a sending process that died is not replaced",
        "headroom.tracking.journal:Journal._replace_sender",
        "            elif self._begin_at is not None:\n                self._wake()\n",
        "",
        "a run whose sending process was killed is not told of until somebody cleans up",
    ),
)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Let the function be the mutant, for all who call it."""
    function, changed = find_function(mutant.where), make_source(mutant)
    made: dict[str, Any] = {}
    code = compile(f"from __future__ import annotations\n{changed}", mutant.where, "exec")
    exec(code, function.__globals__, made)
    before = function.__code__
    one = made[function.__name__]
    function.__code__ = getattr(one, "__func__", one).__code__
    try:
        yield
    finally:
        function.__code__ = before


def find_function(where: str) -> Any:
    """Return the function of that name, without what wraps it."""
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = vars(found)[part]
    return inspect.unwrap(getattr(found, "__func__", found))


def make_source(mutant: Mutant) -> str:
    """Return the function's source with the other text. Raises ValueError where the text is not
    there once: what it was planted in has changed."""
    source = inspect.getsource(find_function(mutant.where))
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.where} has its text {source.count(mutant.old)}x")
    return textwrap.dedent(source.replace(mutant.old, mutant.new))
