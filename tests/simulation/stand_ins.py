"""What the modules of the record call instead of the operating system, while a history is played:
each stand-in asks the simulated world. `installed` puts them into the modules and takes them out.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import os as real_os
import random as real_random
import stat as real_stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from pathlib import PurePosixPath
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil as real_psutil

from tests.simulation.world import RENAME, ROOM, Node, Opened, Pipe, PipeEnd, Process, World

HOST = "simulated"
LEASES = "/leases"
ENVIRONMENT = {"HEADROOM_LEASES": LEASES, "PREFECT_API_URL": ""}
_now: list[World] = []


def world() -> World:
    return _now[-1]


def _me() -> Process:
    task = world().now
    assert task is not None
    return task.process


def _error(number: int, path: object) -> OSError:
    return OSError(number, real_os.strerror(number), str(path))


def _get(path: object) -> Node:
    node = world().find(str(path))
    if node is None:
        raise _error(errno.ENOENT, path)
    return node


def _open_node(path: str, flags: int, mode: int = 0o600) -> Opened:
    here = world()
    here.touch("open")
    node = here.find(path)
    if node is None:
        if not flags & real_os.O_CREAT:
            raise _error(errno.ENOENT, path)
        node = here.make(path, is_dir=False, mode=mode)
        parent, name = here.split(path)
        here.set_name(parent, name, node)
        here.done()
    elif flags & real_os.O_TRUNC:
        _resize(node, 0)
    return Opened(here, _me(), node, flags)


def _resize(node: Node, size: int) -> None:
    here = world()
    if here.room < ROOM:
        here.room += max(0, len(node.data) - size)
    if size < len(node.data):
        del node.data[size:]
    else:
        node.data += bytes(size - len(node.data))
    node.is_dirty, node.mtime = True, here.time()


class Path(PurePosixPath):
    """The part of pathlib.Path that the record uses."""

    __slots__ = ()
    # The same few names, again and again: to join them costs a tenth of a history.
    __truediv__ = lru_cache(maxsize=4096)(PurePosixPath.__truediv__)  # type: ignore[assignment]

    def exists(self) -> bool:
        world().touch("stat")
        return world().find(str(self)) is not None

    def is_dir(self) -> bool:
        world().touch("stat")
        node = world().find(str(self)) if self.parts else None
        return node is not None and node.is_dir

    def is_file(self) -> bool:
        world().touch("stat")
        node = world().find(str(self))
        return node is not None and not node.is_dir

    def stat(self) -> Any:
        world().touch("stat")
        return _describe(_get(self))

    lstat = stat

    def is_symlink(self) -> bool:
        world().touch("stat")
        return False

    def read_bytes(self) -> bytes:
        world().touch("read")
        node = _get(self)
        if node.is_dir:
            raise _error(errno.EISDIR, self)
        return bytes(node.data)

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode()

    def write_text(self, text: str, encoding: str = "utf-8") -> int:
        file = _open_node(str(self), real_os.O_WRONLY | real_os.O_CREAT | real_os.O_TRUNC, 0o644)
        data = text.encode()
        while data:
            data = data[file.write(data) :]
        return len(text)

    def unlink(self, missing_ok: bool = False) -> None:
        here = world()
        here.touch("rename")
        if here.find(str(self)) is None:
            if missing_ok:
                return
            raise _error(errno.ENOENT, self)
        parent, name = here.split(str(self))
        here.set_name(parent, name, None)
        here.done()

    def rename(self, target: Any) -> Path:
        here = world()
        here.touch("rename")
        parent, name = here.split(str(self))
        node = parent.names.get(name)
        if node is None:
            raise _error(errno.ENOENT, self)
        to_parent, to_name = here.split(str(target))
        if to_parent.names.get(to_name) is not node:
            here.set_name(to_parent, to_name, node)
            here.set_name(parent, name, None, of=RENAME)
            here.done()
        return Path(str(target))

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        here = world()
        here.touch("rename")
        if here.find(str(self)) is not None:
            if exist_ok:
                return
            raise _error(errno.EEXIST, self)
        if parents and here.find(str(self.parent)) is None:
            self.parent.mkdir(parents=True, exist_ok=True)
        node = here.make(str(self), is_dir=True, mode=mode)
        parent, name = here.split(str(self))
        here.set_name(parent, name, node)
        here.done()

    def rmdir(self) -> None:
        here = world()
        here.touch("rename")
        parent, name = here.split(str(self))
        if name not in parent.names:
            raise _error(errno.ENOENT, self)
        if parent.names[name].names:
            raise _error(errno.ENOTEMPTY, self)
        here.set_name(parent, name, None)
        here.done()

    def iterdir(self) -> Iterator[Path]:
        world().touch("stat")
        yield from [self / name for name in sorted(_get(self).names)]

    def glob(self, pattern: str) -> Iterator[Path]:
        world().touch("stat")
        node = world().find(str(self))
        first, _, rest = pattern.partition("/")
        found = []
        for name, child in list(node.names.items()) if node is not None else ():
            if fnmatch.fnmatchcase(name, first) and (not rest or rest in child.names):
                found.append(self / name / rest if rest else self / name)
        yield from found

    def rglob(self, pattern: str) -> Iterator[Path]:
        world().touch("stat")
        assert pattern == "*"
        found: list[Path] = []
        _list_below(self, _get(self), found)
        yield from found

    def chmod(self, mode: int) -> None:
        world().touch("chmod")
        _get(self).mode = mode

    def open(self, mode: str = "r", **how: Any) -> Any:
        return open_file(self, mode, **how)

    def absolute(self) -> Path:
        return self

    def touch(self, mode: int = 0o666) -> None:
        _open_node(str(self), real_os.O_WRONLY | real_os.O_CREAT, mode)


def _list_below(path: Path, node: Node, found: list[Path]) -> None:
    for name, child in node.names.items():
        found.append(path / name)
        if child.is_dir:
            _list_below(path / name, child, found)


def _describe(node: Node) -> Any:
    kind = real_stat.S_IFDIR if node.is_dir else real_stat.S_IFREG
    return SimpleNamespace(
        st_mode=kind | node.mode,
        st_uid=0,
        st_nlink=1,
        st_size=len(node.data),
        st_mtime=node.mtime,
        st_mtime_ns=int(node.mtime * 1e9),
        st_atime_ns=int(node.mtime * 1e9),
        st_ino=node.number,
        st_dev=1,
    )


class File:
    """What `open` returns."""

    def __init__(self, opened: Opened, number: int, *, is_text: bool) -> None:
        self._opened, self._number, self._is_text = opened, number, is_text
        self.closed = False

    def read(self, size: int = -1) -> Any:
        world().touch("read")
        data = self._opened.read(size)
        return data.decode() if self._is_text else data

    def __iter__(self) -> Iterator[bytes]:
        world().touch("read")
        return self

    def __next__(self) -> bytes:
        data, at = self._opened.node.data, self._opened.at
        if at >= len(data):
            raise StopIteration
        end = data.find(b"\n", at)
        return self._opened.read(len(data) - at if end < 0 else end + 1 - at)

    def write(self, data: Any) -> int:
        return self._opened.write(data.encode() if self._is_text else data)

    def seek(self, to: int, how: int = 0) -> int:
        self._opened.at = to + (len(self._opened.node.data) if how == 2 else 0)
        return self._opened.at

    def tell(self) -> int:
        return self._opened.at

    def truncate(self, size: int | None = None) -> int:
        world().touch("write")
        size = self._opened.at if size is None else size
        _resize(self._opened.node, size)
        world().done()
        return size

    def fileno(self) -> int:
        return self._number

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._opened.release()
            self._opened.process.files.pop(self._number, None)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Text:
    """A text file on a pipe."""

    def __init__(self, end: PipeEnd) -> None:
        self._end, self.closed = end, False
        self._rest = b""

    def write(self, text: str) -> int:
        if text:
            _write_pipe(self._end, text.encode())
        return len(text)

    def flush(self) -> None:
        pass

    def __iter__(self) -> Iterator[str]:
        while True:
            line, end, rest = self._rest.partition(b"\n")
            if end:
                self._rest = rest
                yield line.decode() + "\n"
                continue
            data = _read_pipe(self._end)
            if not data:
                if self._rest:
                    yield self._rest.decode()
                return
            self._rest += data

    def read(self) -> str:
        return "".join(self)

    def close(self) -> None:
        self.closed = True
        self._end.release()

    def __enter__(self) -> Text:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write_pipe(end: PipeEnd, data: bytes) -> None:
    world().touch("pipe")
    if not end.is_open:
        raise ValueError("I/O operation on closed file.")
    if not end.pipe.readers:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
    end.pipe.data.append(data)


def _read_pipe(end: PipeEnd) -> bytes:
    world().touch("pipe")
    pipe = end.pipe
    world().wait(lambda: bool(pipe.data) or not pipe.writers or not end.is_open, None)
    return pipe.data.popleft() if pipe.data and end.is_open else b""


def open_file(path: object, mode: str = "r", buffering: int = -1, opener: Any = None) -> Any:
    kind = mode.replace("b", "").rstrip("+")
    flags = real_os.O_RDWR if "+" in mode else real_os.O_RDONLY if kind == "r" else real_os.O_WRONLY
    flags |= {
        "r": 0,
        "w": real_os.O_CREAT | real_os.O_TRUNC,
        "a": real_os.O_CREAT | real_os.O_APPEND,
    }[kind]
    number = (opener or os.open)(str(path), flags)
    opened = _me().files[number]
    if kind == "a":
        opened.at = len(opened.node.data)
    return File(opened, number, is_text="b" not in mode)


class _Os:
    """The part of os that the record uses."""

    environ = ENVIRONMENT
    path: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("O_", "SEEK_", "R_OK", "W_OK", "X_OK")) or name in (
            "strerror",
            "pathsep",
            "devnull",
            "waitstatus_to_exitcode",
        ):
            return getattr(real_os, name)
        raise AttributeError(f"no stand-in of os.{name}")

    def open(self, path: object, flags: int, mode: int = 0o777) -> int:
        opened, me = _open_node(str(path), flags, mode), _me()
        me.next_fd += 1
        me.files[me.next_fd] = opened
        return me.next_fd

    def _get(self, fd: int) -> Any:
        try:
            return _me().files[fd]
        except KeyError:
            raise _error(errno.EBADF, fd) from None

    def close(self, fd: int) -> None:
        if not _me().is_dead:
            self._get(fd).release()
            del _me().files[fd]

    def read(self, fd: int, size: int) -> bytes:
        file = self._get(fd)
        return _read_pipe(file) if isinstance(file, PipeEnd) else file.read(size)

    def pwrite(self, fd: int, data: bytes, at: int) -> int:
        return world().write(self._get(fd).node, at, data)

    def pread(self, fd: int, size: int, at: int) -> bytes:
        world().touch("read")
        return bytes(self._get(fd).node.data[at : at + size])

    def ftruncate(self, fd: int, size: int) -> None:
        world().touch("write")
        _resize(self._get(fd).node, size)
        world().done()

    def fsync(self, fd: int) -> None:
        world().fsync(self._get(fd).node)

    fdatasync = fsync

    def posix_fallocate(self, fd: int, at: int, size: int) -> None:
        here, node = world(), self._get(fd).node
        here.touch("write")
        if here.room < ROOM:
            if here.room < size:
                raise _error(errno.ENOSPC, fd)
            here.room -= size
        node.reserved = size

    def fstat(self, fd: int) -> Any:
        return _describe(self._get(fd).node)

    def lstat(self, path: object) -> Any:
        world().touch("stat")
        return _describe(_get(path))

    stat = lstat

    def fchmod(self, fd: int, mode: int) -> None:
        self._get(fd).node.mode = mode

    def utime(self, path: object, ns: tuple[int, int]) -> None:
        world().touch("write")
        _get(path).mtime = ns[1] / 1e9

    def rename(self, one: object, other: object) -> None:
        Path(str(one)).rename(other)

    def listdir(self, path: object) -> list[str]:
        world().touch("stat")
        return sorted(_get(path).names)

    def access(self, path: object, how: int) -> bool:
        return world().find(str(path)) is not None

    def getpid(self) -> int:
        return _me().pid

    def getuid(self) -> int:
        return 0

    def dup(self, fd: int) -> int:
        me = _me()
        me.next_fd += 1
        me.files[me.next_fd] = me.files.pop(fd)
        return me.next_fd

    def dup2(self, one: int, other: int, inheritable: bool = True) -> None:
        pass

    def fdopen(self, fd: int, mode: str = "r", buffering: int = -1) -> Text:
        return Text(self._get(fd))


class _OsPath:
    exists = lexists = staticmethod(lambda path: Path(str(path)).exists())
    isabs = staticmethod(real_os.path.isabs)
    samestat = staticmethod(real_os.path.samestat)


os = _Os()
os.path = _OsPath()


def flock(file: Any, how: int) -> None:
    """Lock as the kernel does, by open file description."""
    here = world()
    opened = os._get(file if isinstance(file, int) else file.fileno())
    node = opened.node
    here.touch("lock")
    if how & fcntl.LOCK_UN:
        return opened.release()

    def is_free() -> bool:
        others = node.alone not in (None, opened) or (
            how & fcntl.LOCK_EX and bool(node.sharing - {opened})
        )
        return not others

    if not is_free():
        if how & fcntl.LOCK_NB:
            raise BlockingIOError(errno.EWOULDBLOCK, "Resource temporarily unavailable")
        here.wait(is_free, None)
    if how & fcntl.LOCK_EX:
        node.sharing.discard(opened)
        node.alone = opened
    else:
        if node.alone is opened:
            node.alone = None
        node.sharing.add(opened)


# Time, chance and what the host is called.

time = SimpleNamespace(
    time=lambda: world().time(),
    time_ns=lambda: int(world().time() * 1e9),
    monotonic=lambda: world().mono,
    perf_counter=lambda: world().mono,
    process_time=lambda: world().mono,
    sleep=lambda seconds: world().sleep(seconds),
)
random = SimpleNamespace(random=lambda: world().drawn.random())
socket = SimpleNamespace(gethostname=lambda: HOST)


def uuid4() -> Any:
    return SimpleNamespace(hex=f"{world().drawn.getrandbits(128):032x}")


class Datetime(datetime):
    """A datetime whose now is that of the world."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.fromtimestamp(world().time(), tz)


class _PsutilProcess:
    def __init__(self, pid: int | None = None) -> None:
        process = _me() if pid is None else world().processes.get(pid)
        if process is None:
            raise real_psutil.NoSuchProcess(pid or 0)
        self._process, self.pid = process, process.pid

    def create_time(self) -> float:
        return self._process.started + world().offset

    def is_running(self) -> bool:
        return not self._process.is_dead

    def status(self) -> str:
        if self._process.is_dead:
            raise real_psutil.NoSuchProcess(self.pid)
        return "running"


psutil = SimpleNamespace(
    Process=_PsutilProcess,
    boot_time=lambda: world().boot + world().offset,
    NoSuchProcess=real_psutil.NoSuchProcess,
    Error=real_psutil.Error,
    STATUS_ZOMBIE="zombie",
    process_iter=lambda: iter(()),
)


# Threads and queues of a process.


class _Thread:
    def __init__(
        self, target: Callable[..., Any], args: Any = (), daemon: bool = True, name: str = ""
    ) -> None:
        self._call = lambda: target(*args)
        self._task: Any = None

    def start(self) -> None:
        self._task = world().begin_task(_me(), self._call)

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        world().wait(lambda: task.is_over, timeout)


class _Lock:
    """A lock that its owner may take again."""

    def __init__(self) -> None:
        self._owner: Any = None
        self._depth = 0

    def __enter__(self) -> _Lock:
        me = world().now
        if self._owner is not me:
            world().wait(lambda: self._owner is None, None)
            self._owner = me
        self._depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None


class _Event:
    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return world().wait(lambda: self._is_set, timeout)


class _Empty(Exception):
    pass


class _Queue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, timeout: float | None = None) -> Any:
        if not world().wait(lambda: bool(self._items), timeout):
            raise _Empty
        return self._items.popleft()


threading = SimpleNamespace(Thread=_Thread, RLock=_Lock, Lock=_Lock, Event=_Event)
queue = SimpleNamespace(SimpleQueue=_Queue, Empty=_Empty)


# Child processes.

PROGRAMS: dict[str, Callable[[], None]] = {}


class Popen:
    """A child process of this project: one of PROGRAMS, on two pipes."""

    def __init__(self, words: list[str], **_: Any) -> None:
        world().touch("spawn")
        orders, answers = Pipe(), Pipe()
        module = words[2]
        self.process = world().begin(
            "sender" if module.endswith("mlflow_sender") else "tidy",
            PROGRAMS[module],
            _0=PipeEnd(orders, writes=False),
            _1=PipeEnd(answers, writes=True),
        )
        me, mine = _me(), (PipeEnd(orders, writes=True), PipeEnd(answers, writes=False))
        self._parent = me
        for end in mine:
            me.next_fd += 1
            me.files[me.next_fd] = end
        self.stdin, self.stdout = Text(mine[0]), Text(mine[1])
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.code

    def poll(self) -> int | None:
        return self.process.code

    def wait(self, timeout: float | None = None) -> int | None:
        world().wait(lambda: self.process.is_dead, timeout)
        return self.process.code

    def communicate(self, text: str) -> tuple[str, str]:
        with suppress(OSError):
            self.stdin.write(text)
        self.stdin.close()
        said = self.stdout.read()
        self.wait()
        return said, ""

    def __enter__(self) -> Popen:
        return self

    def __exit__(self, *_: object) -> None:
        if self._parent.is_dead:  # what it has left is collected in anybody's turn
            return
        self.stdout.close()
        self.stdin.close()
        self.wait()


class TimeoutExpired(Exception):
    pass


def _refuse_git(*_: Any, **__: Any) -> Any:
    raise FileNotFoundError("git")


subprocess = SimpleNamespace(
    Popen=Popen, PIPE=-1, DEVNULL=-3, run=_refuse_git, TimeoutExpired=TimeoutExpired
)


def _select(read: list[int], _: Any, __: Any, timeout: float) -> tuple[list[int], list[int], list]:
    end = os._get(read[0])
    pipe = end.pipe
    world().touch("pipe")
    is_ready = world().wait(lambda: bool(pipe.data) or not pipe.writers, timeout)
    return (read if is_ready else []), [], []


select = SimpleNamespace(select=_select)


class _Sink:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


class _Stdin:
    def read(self) -> str:
        return Text(os._get(0)).read()


class _Stdout:
    def write(self, text: str) -> int:
        with suppress(OSError):  # nobody reads it
            Text(os._get(1)).write(text)
        return len(text)

    def flush(self) -> None:
        pass


sys = SimpleNamespace(
    stderr=_Sink(), stdin=_Stdin(), stdout=_Stdout(), argv=["one"], executable="python", path=[]
)


def print_line(*words: object, file: Any = None, flush: bool = False) -> None:
    (file or sys.stdout).write(" ".join(map(str, words)) + "\n")


def _copy_file(source: File, target: File) -> None:
    target.write(source.read())


def _remove_tree(path: Path) -> None:
    for entry in path.iterdir():
        _remove_tree(entry) if entry.is_dir() else entry.unlink()
    path.rmdir()


shutil = SimpleNamespace(copyfileobj=_copy_file, rmtree=_remove_tree)

# By the name that a module has for them.
STAND_INS: dict[str, Any] = {
    "os": os,
    "Path": Path,
    "flock": flock,
    "time": time,
    "sleep": time.sleep,
    "monotonic": time.monotonic,
    "perf_counter": time.perf_counter,
    "time_ns": time.time_ns,
    "random": random,
    "socket": socket,
    "uuid4": uuid4,
    "datetime": Datetime,
    "psutil": psutil,
    "threading": threading,
    "queue": queue,
    "subprocess": subprocess,
    "select": select,
    "sys": sys,
    "shutil": shutil,
    # No secrets are told of, and whose process it is does not matter: to look costs a tenth.
    "redact": lambda text: text,
    "redact_nested": lambda content: content,
    "getpass": SimpleNamespace(getuser=lambda: "root"),
}


@contextmanager
def installed(modules: list[ModuleType], more: dict[ModuleType, dict[str, Any]]) -> Iterator[None]:
    """Let these modules call the stand-ins. more: what some of them get beside, by name."""
    before: list[tuple[ModuleType, str, Any]] = []
    missing = object()

    def put(module: ModuleType, name: str, value: Any) -> None:
        before.append((module, name, vars(module).get(name, missing)))
        setattr(module, name, value)

    for module in modules:
        for name, value in STAND_INS.items():
            if name in vars(module):
                is_function = name == "time" and callable(vars(module)[name])
                put(module, name, time.time if is_function else value)
        put(module, "open", open_file)
        put(module, "print", print_line)
        for name, value in more.get(module, {}).items():
            put(module, name, value)
    try:
        yield
    finally:
        for module, name, value in reversed(before):
            if value is missing:
                delattr(module, name)
            else:
                setattr(module, name, value)


@contextmanager
def played_in(one: World) -> Iterator[None]:
    """Let the stand-ins ask this world."""
    _now.append(one)
    try:
        yield
    finally:
        _now.pop()


assert real_random  # the worlds' own chance
