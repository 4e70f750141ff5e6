"""A simulated host: a clock, a disk with a page cache, and processes of which one runs at a time.
Every call that touches it may be the last of its process, find the disk full, or come after another
process's: by the faults of a history, and by numbers drawn from its seed, so that the same history
is played the same each time. The threads are real ones, which hand on a baton.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mlflow.exceptions import MlflowException

WRITEBACK_S = 30.0  # after which the kernel has written what it was given
MOST_CALLS = 60_000  # of a history: one that needs more does not end
BLOCK = 64  # bytes of the disk that are written at once
ROOM = 1 << 40
CRASHES = (OSError, MlflowException)
EPOCH_S = 1_700_000_000.0
AGAIN_S = 2.0  # until a process may have the number of one that is gone
RENAME = "rename"  # the second of the two names that it sets
BOOT_S = 20.0  # that a host takes after the power is back


class Killed(BaseException):
    """The process of this thread is gone: whatever it still does has no effect."""


class Stuck(Exception):
    """No process can go on, or one goes on for ever."""


@dataclass(frozen=True)
class Fault:
    """What befalls the world at the nth call of a kind, counted over the whole history."""

    at: str  # the kind of call: any, write, rename, server, training, sender
    nth: int
    what: str  # see World._befall
    amount: float = 0.0


class Task:
    """One thread of a simulated process."""

    def __init__(self, process: Process, call: Callable[[], None]) -> None:
        self.process, self.call = process, call
        self.turn = threading.Lock()
        self.turn.acquire()
        self.until: float | None = 0.0  # when it wakes; None: only by its condition
        self.ready: Callable[[], bool] | None = None
        self.is_over = False


@dataclass(eq=False)
class Process:
    """A simulated process: its number, its start, its files."""

    pid: int
    kind: str
    started: float  # by the clock that nobody sets
    is_dead: bool = False
    code: int | None = None
    files: dict[int, Any] = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    next_fd: int = 10
    on_death: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class Node:
    """A file or folder of the disk."""

    is_dir: bool = False
    mode: int = 0o600
    data: bytearray = field(default_factory=bytearray)
    safe: bytes = b""  # what is left of it without power
    is_dirty: bool = False
    mtime: float = 0.0
    names: dict[str, Node] = field(default_factory=dict)
    alone: Any = None  # the open file that has its lock alone
    sharing: set[Any] = field(default_factory=set)
    number: int = 0
    reserved: int = 0


_idle: list[_Worker] = []


class _Worker:
    """A thread that is used again by the next task: to begin one costs more than to wake it."""

    def __init__(self) -> None:
        self.work = threading.Lock()
        self.work.acquire()
        self.task: Callable[[], None] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self.work.acquire()
            assert self.task is not None
            self.task()


class World:
    """The host of one history."""

    def __init__(self, seed: int, faults: Iterable[Fault], *, switch: float, lies: bool) -> None:
        self.drawn = random.Random(seed)
        self.switch, self.lies = switch, lies
        self.mono, self.boot, self.offset = 1000.0, 990.0, EPOCH_S
        self.calls = 0
        self.counts: dict[str, int] = {}
        self.faults: dict[tuple[str, int], list[Fault]] = {}
        for fault in faults:
            self.faults.setdefault((fault.at, fault.nth), []).append(fault)
        self.counted = {at for at, _ in self.faults}  # the other kinds of calls need no number
        self.met: list[Fault] = []
        self.is_healthy = False  # no more faults
        self.processes: dict[int, Process] = {}
        self.ended: dict[int, float] = {}  # by number, when it was free again
        self.starts: dict[int, list[float]] = {}  # by number, what the clock showed then
        self.tasks: list[Task] = []
        self.now: Task | None = None
        self.failure: BaseException | None = None
        self.root = Node(is_dir=True, mode=0o755)
        self.nodes = 0
        # What a power cut may take back: of which call it is a part, parent, name, what was there.
        self.undo: list[tuple[str, Node, str, Node | None]] = []
        self.synced = self.mono
        self.room = ROOM
        self.away_until = self.starved_until = 0.0
        self.troubled_until = 0.0  # by the newest fault, and for as long as it lasts
        self.answer_fault = ""
        self.half: float | None = None  # share of the next write that is done before the kill
        self.after: list[Fault] = []
        self.on_power: list[Callable[[], None]] = []
        self.over = threading.Lock()
        self.over.acquire()

    # Processes

    def begin(self, kind: str, call: Callable[[], None], **files: Any) -> Process:
        """Begin a process. Its number may be that of one that is gone, but not its start, too, by a
        clock that was set back: of some million numbers one comes again so rarely that it is not
        told from a process that lives."""
        pid = next(
            p
            for p in iter(lambda: self.drawn.randint(100, 139), None)
            if p not in self.processes and self.mono - self.ended.get(p, 0.0) > AGAIN_S
            if all(abs(self.time() - start) > AGAIN_S for start in self.starts.get(p, ()))
        )
        self.starts.setdefault(pid, []).append(self.time())
        process = Process(pid, kind, self.mono)
        self.processes[pid] = process
        process.files |= {int(k[1:]): v for k, v in files.items()}
        self.begin_task(process, lambda: self._run_process(process, call))
        return process

    def _run_process(self, process: Process, call: Callable[[], None]) -> None:
        code = 1
        try:
            call()
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        except CRASHES:  # as a program ends that does not catch it
            pass
        finally:
            if not process.is_dead:
                self.end_process(process, code)

    def end_process(self, process: Process, code: int) -> None:
        """Let a process be gone: its locks and pipes are given back by the kernel."""
        if process.is_dead:
            return
        process.is_dead, process.code = True, code
        self.processes.pop(process.pid, None)
        self.ended[process.pid] = self.mono
        for file in list(process.files.values()):
            file.release()
        process.files.clear()
        for call in process.on_death:
            call()

    def begin_task(self, process: Process, call: Callable[[], None]) -> Task:
        task = Task(process, call)
        process.tasks.append(task)
        self.tasks.append(task)
        worker = _idle.pop() if _idle else _Worker()

        def run() -> None:
            task.turn.acquire()
            try:
                if not process.is_dead:
                    call()
            except Killed:
                pass
            except BaseException as error:
                if self.failure is None and not isinstance(error, SystemExit):
                    self.failure = error
                    error.add_note(f"in {process.kind}")
            task.is_over = True
            self.tasks.remove(task)
            worker.task = None
            _idle.append(worker)
            self._pass_on()

        worker.task = run
        worker.work.release()
        return task

    def run(self, call: Callable[[], None]) -> None:
        """Play a history, of which `call` is what a person does, and end all that it began."""
        me = self.begin("person", call)
        me.tasks[0].process.on_death.append(self._end_all)
        self._pass_on()
        self.over.acquire()
        if self.failure is not None:
            raise self.failure

    def _end_all(self) -> None:
        self.is_healthy = True
        for process in list(self.processes.values()):
            self.end_process(process, -9)

    def _pass_on(self) -> None:
        """Give the baton to whoever may run; the last one ends the history."""
        if self.failure is not None:
            self._end_all()
        if not self.tasks:
            self.over.release()
            return
        task = self._choose()
        self.now = task
        task.turn.release()

    def _choose(self) -> Task:
        for _ in range(2):
            ready = [t for t in self.tasks if self._is_ready(t)]
            if ready:
                return ready[0] if len(ready) == 1 else self.drawn.choice(ready)
            times = [t.until for t in self.tasks if t.until is not None]
            if not times:
                break
            self.mono = max(self.mono, min(times))
        self.failure = self.failure or Stuck("nobody can go on")
        self._end_all()
        return self.tasks[0]

    def _is_ready(self, task: Task) -> bool:
        if task.process.is_dead:
            return True
        if task.until is not None and task.until <= self.mono:
            return True
        return task.ready is not None and task.ready()

    def _yield(self) -> None:
        me = self.now
        assert me is not None
        task = self._choose()
        if task is not me:
            self.now = task
            task.turn.release()
            me.turn.acquire()
        me.until, me.ready = 0.0, None
        if me.process.is_dead:
            raise Killed

    def wait(self, ready: Callable[[], bool] | None, timeout_s: float | None) -> bool:
        """Wait until `ready`, at most so long; return whether it is."""
        me = self.now
        assert me is not None
        if me.process.is_dead:
            raise Killed
        if ready is not None and ready():
            return True
        me.ready = ready
        me.until = None if timeout_s is None else self.mono + max(0.0, timeout_s)
        self._yield()
        return ready is None or ready()

    def sleep(self, seconds: float) -> None:
        self.touch("sleep")
        self.wait(None, seconds)

    # Faults

    def touch(self, kind: str) -> None:
        """Be called before each call that touches the world."""
        me = self.now
        assert me is not None
        if me.process.is_dead:
            raise Killed
        if me.process.kind == "person":
            return
        self.calls += 1
        if self.calls > MOST_CALLS:
            self.failure = Stuck("it does not end")
            self._end_all()
            raise Killed
        self.mono += 0.0001
        if self.mono - self.synced > WRITEBACK_S:
            self.sync()
        if self.mono < self.starved_until and me.process.kind == "sender":
            self.kill(me.process)
        if self.counted and not self.is_healthy:
            for each in ("any", kind, me.process.kind):
                if each not in self.counted:
                    continue
                count = self.counts[each] = self.counts.get(each, 0) + 1
                for fault in self.faults.get((each, count), ()):
                    self._befall(fault, me)
        if self.drawn.random() < self.switch:
            self._yield()

    def done(self) -> None:
        """Be called after a call that has changed the world: it may be the last one."""
        if self.after and self.now is not None:
            self.after.clear()
            self.kill(self.now.process)

    def kill(self, process: Process) -> None:
        """Kill a process, which may be that of the caller."""
        self.end_process(process, -9)
        if self.now is not None and self.now.process is process:
            raise Killed

    def _befall(self, fault: Fault, me: Task) -> None:
        self.met.append(fault)
        lasts_s = 0.0 if fault.what == "clock" else fault.amount
        self.troubled_until = max(self.troubled_until, self.mono + lasts_s)
        if fault.what == "kill":
            self.kill(me.process)
        elif fault.what == "kill after":
            self.after.append(fault)
        elif fault.what == "kill in it":
            self.half = fault.amount
        elif fault.what == "kill all":
            for process in [*self.processes.values()]:
                if process.kind != "person":
                    self.end_process(process, -9)
            raise Killed
        elif fault.what == "power":
            self.cut_power()
            raise Killed
        elif fault.what == "full":
            self.room = int(fault.amount)
        elif fault.what == "room":
            self.room = ROOM
        elif fault.what == "away":
            self.away_until = self.mono + fault.amount
        elif fault.what == "no memory":  # the kernel kills what sends, again and again
            self.starved_until = self.mono + fault.amount
        elif fault.what in ("dropped", "lost", "twice"):
            self.answer_fault = fault.what
        elif fault.what == "clock":
            self.offset += fault.amount
        elif fault.what == "pause":
            self.wait(None, fault.amount)
        else:
            raise AssertionError(fault.what)

    def time(self) -> float:
        return self.mono + self.offset

    # The disk

    def find(self, path: str) -> Node | None:
        node = self.root
        for name in path.split("/"):
            if name:
                found = node.names.get(name)
                if found is None:
                    return None
                node = found
        return node

    def split(self, path: str) -> tuple[Node, str]:
        parent, _, name = path.rpartition("/")
        node = self.find(parent)
        if node is None or not node.is_dir:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return node, name

    def make(self, path: str, *, is_dir: bool, mode: int) -> Node:
        parent, name = self.split(path)
        if self.room < ROOM and self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        self.nodes += 1
        node = Node(is_dir=is_dir, mode=mode, mtime=self.time(), number=self.nodes)
        self.set_name(parent, name, node)
        return node

    def set_name(self, parent: Node, name: str, node: Node | None, *, of: str = "") -> None:
        """Let a name of a folder be that node, or nothing; not durable yet."""
        self.undo.append((of, parent, name, parent.names.get(name)))
        old = parent.names.pop(name, None)
        if old is not None and node is None and self.room < ROOM:
            self.room += len(old.data) + old.reserved
        if node is not None:
            parent.names[name] = node
        parent.mtime = self.time()

    def write(self, node: Node, at: int, data: bytes) -> int:
        """Write into the page cache; return how much there was room for."""
        self.touch("write")
        more = max(0, at + len(data) - len(node.data))
        if more and self.room < ROOM:
            fits = min(more, max(0, self.room))
            if fits < more:
                data = data[: len(data) - more + fits]
                if not data:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= fits
        if self.half is not None:
            share, self.half = self.half, None
            data = data[: int(len(data) * share)]
            self._put(node, at, data)
            assert self.now is not None
            self.kill(self.now.process)
        self._put(node, at, data)
        self.done()
        return len(data)

    def _put(self, node: Node, at: int, data: bytes) -> None:
        if len(node.data) < at:
            node.data += bytes(at - len(node.data))
        node.data[at : at + len(data)] = data
        node.is_dirty, node.mtime = True, self.time()

    def sync(self) -> None:
        """Let all that the kernel has be on the disk."""
        self.synced = self.mono
        self.undo.clear()
        self._sync_below(self.root)

    def _sync_below(self, node: Node) -> None:
        if node.is_dir:
            for child in node.names.values():
                self._sync_below(child)
        elif node.is_dirty:
            node.safe, node.is_dirty = bytes(node.data), False

    def fsync(self, node: Node) -> None:
        self.touch("fsync")
        if self.lies:
            return
        if node.is_dir:
            self.undo = [entry for entry in self.undo if entry[1] is not node]
        else:
            node.safe, node.is_dirty = bytes(node.data), False

    def cut_power(self) -> None:
        """End every process, and leave on the disk what was written, and perhaps some of the
        rest: names in the order in which they were given, contents in blocks."""
        for process in [*self.processes.values()]:
            if process.kind != "person":
                self.end_process(process, -9)
        kept = self.drawn.randint(0, len(self.undo))
        if kept < len(self.undo) and self.undo[kept][0] == RENAME:
            kept += 1  # a journal has both names or neither: never one file by two names
        for _, parent, name, old in reversed(self.undo[kept:]):
            parent.names.pop(name, None)
            if old is not None:
                parent.names[name] = old
        self._tear(self.root)
        self.sync()
        self.mono += BOOT_S
        self.boot = self.mono - self.drawn.uniform(5, 15)
        for call in self.on_power:
            call()

    def _tear(self, node: Node) -> None:
        if node.is_dir:
            for child in node.names.values():
                self._tear(child)
        elif node.is_dirty:
            how = self.drawn.random()
            if how < 0.4:
                node.data = bytearray(node.safe)
            elif how < 0.7 and node.data.startswith(node.safe):
                new = bytes(node.data[len(node.safe) :])
                kept = new[: self.drawn.randint(0, len(new))]
                lost = bytes(self.drawn.choice((0, 0, len(new) - len(kept))))
                node.data = bytearray(node.safe + kept + lost)
            elif how < 0.8 and node.data.startswith(node.safe):
                new = bytearray(node.data)
                at = self.drawn.randint(len(node.safe), max(len(node.safe), len(new) - 1))
                new[at : at + BLOCK] = bytes(len(new[at : at + BLOCK]))
                node.data = new
            node.reserved = 0


# What is read and written through.


class Opened:
    """An open file description."""

    def __init__(self, world: World, process: Process, node: Node, flags: int) -> None:
        self.world, self.process, self.node, self.flags = world, process, node, flags
        self.at = 0

    def release(self) -> None:
        if self.node.alone is self:
            self.node.alone = None
        self.node.sharing.discard(self)

    def read(self, size: int = -1) -> bytes:
        end = len(self.node.data) if size < 0 else self.at + size
        data = bytes(self.node.data[self.at : end])
        self.at += len(data)
        return data

    def write(self, data: bytes) -> int:
        if self.flags & os.O_APPEND:
            self.at = len(self.node.data)
        written = self.world.write(self.node, self.at, data)
        self.at += written
        return written


class Pipe:
    """What goes from one process to another."""

    def __init__(self) -> None:
        self.data: deque[bytes] = deque()
        self.writers, self.readers = 1, 1


class PipeEnd:
    """One end of it."""

    def __init__(self, pipe: Pipe, *, writes: bool) -> None:
        self.pipe, self.writes, self.is_open = pipe, writes, True

    def release(self) -> None:
        if self.is_open:
            self.is_open = False
            if self.writes:
                self.pipe.writers -= 1
            else:
                self.pipe.readers -= 1
