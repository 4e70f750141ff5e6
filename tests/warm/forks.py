"""A process that has imported the large libraries and forks for each command that is asked of it:
`python forks.py KIND ADDRESS PID ROOT`. Of the project in ROOT, where that is not empty, it imports
what reads no environment: the engine, and what sends to MLflow. Everything else each command reads
itself, with the environment and the settings that it was started with. It ends with the tests,
whose process is PID.
"""

from __future__ import annotations

import ast
import fcntl
import gc
import importlib
import importlib.abc
import importlib.machinery
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

# What the commands of a kind import beside this project. None of `torch` brings mlflow along.
LIBRARIES = {
    "torch": "torch torch._dynamo prefect prefect.main prefect.runtime prefect.artifacts fastapi"
    " prefect.client.orchestration prefect.flow_engine prefect.task_engine graphviz pydantic psutil"
    " rich.console rich.progress ruamel.yaml orjson pyarrow.csv pyarrow.parquet numpy.random"
    " sklearn.metrics"
    " safetensors.torch torch.utils.serialization.config torch._subclasses.schema_check_mode",
    "mlflow": "mlflow mlflow.pyfunc mlflow.store.tracking.sqlalchemy_store pandas matplotlib.pyplot"
    " mlflow.system_metrics.system_metrics_monitor orjson psutil",
    "models": "mlflow.pyfunc torch pandas",
    "prefect": "prefect prefect.main prefect.server.api.server uvicorn aiosqlite",
}
# What of this project: packages, whole.
OURS = {
    "torch": "headroom.base headroom.settings headroom.ranks headroom.watch headroom.device"
    " headroom.report headroom.models headroom.data headroom.training headroom.launch"
    " headroom.prediction",
    "mlflow": "headroom.report headroom.tracking",
    "prefect": "headroom.base",
}
NOTHING = str(Path(__file__).parent / "nothing")  # replaced by each command's own path
NOT_OURS = (
    "headroom.tracking.mlflow_sender",
    "headroom.tracking.model_finder",
)  # commands themselves


def serve(kind: str, address: str, tests: int, root: str) -> None:
    """Fork for whoever connects, until the tests are over."""
    os.environ |= {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)  # whoever asks while it imports waits in the queue
    listening.listen(100)
    for name in LIBRARIES[kind].split():
        importlib.import_module(name)
    if root:
        import_ours(kind, root)
    gc.collect()
    gc.freeze()
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    while is_alive(tests):
        lines = {line: pid for pid, line in children.items()}
        ready, _, _ = select.select([listening, woken, *lines], [], [], 5)
        for found in ready:
            if found is listening:
                line, _ = listening.accept()
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for other in (listening, *lines):
                        other.close()
                    os.close(woken), os.close(waker)
                    play(line)
                children[pid] = line
                with suppress(OSError):  # who asked was killed: found closed in the next round
                    line.sendall(b"%d\n" % pid)
            elif found is woken:
                os.read(woken, 1000)
            elif found in lines and lines[found] in children and is_closed(found):
                kill(lines[found])  # who asked was killed
        reap(children)


def import_ours(kind: str, root: str) -> None:
    sys.path.insert(0, root)
    for package in OURS[kind].split():
        found = importlib.import_module(package)
        for module in pkgutil.walk_packages(found.__path__, f"{package}."):
            if module.name not in NOT_OURS:
                importlib.import_module(module.name)
    if kind == "mlflow":
        for name in ("backends.backend_agg", "figure", "font_manager"):
            importlib.import_module(f"matplotlib.{name}")
    sys.path[0] = NOTHING


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kill(pid: int) -> None:
    """With its group, where it leads one, as whoever kills a group does."""
    if os.getpgid(pid) == pid:
        os.killpg(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL)


def is_closed(line: socket.socket) -> bool:
    try:
        return not line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False  # the child has read the order by now
    except OSError:
        return True


def reap(children: dict[int, socket.socket]) -> None:
    for pid in list(children):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            # Who asked may have been killed.
            with children.pop(pid) as line, suppress(OSError):
                line.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def play(line: socket.socket) -> None:
    """Become the command."""
    head, fds, _, _ = socket.recv_fds(line, 8, 100)
    size, told = int.from_bytes(head, "big"), b""
    while len(told) < size:
        told += line.recv(1 << 20)
    line.close()
    order = ast.literal_eval(told.decode())
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, 500) for fd in fds]  # of any that is asked for
    for fd in fds:
        os.close(fd)
    for to, given in zip(order["fds"], above, strict=True):
        os.dup2(given, to)
        os.close(given)
    if "session" in order["leads"]:
        os.setsid()
    elif "group" in order["leads"]:
        os.setpgid(0, 0)
    os.umask(order["umask"])
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for name in ("stdin", "stdout", "stderr"):
        mode = "r" if name == "stdin" else "w"
        stream = open(("stdin", "stdout", "stderr").index(name), mode, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stderr.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    is_safe = order["words"][0] == "-P"
    option, what, *rest = order["words"][is_safe:]
    sys.path[:1] = [*([] if is_safe else [order["cwd"] if option == "-m" else ""]), *paths]
    sys.executable, sys.argv = order["python"], [option, *rest]
    if "prefect" in sys.modules:
        sys.meta_path.insert(0, Imported())
    sys.modules["forks"], sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    if option == "-m":
        runpy._run_module_as_main(what)  # type: ignore[attr-defined]
    else:
        exec(compile(what, "<string>", "exec"), sys.modules["__main__"].__dict__)
    sys.exit(0)


class Imported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Prefect, which was imported, as a module that still has to be: it then reads its settings."""

    def __init__(self) -> None:
        names = [n for n in sys.modules if n.partition(".")[0] == "prefect"]
        self.modules = {name: sys.modules.pop(name) for name in names}
        self.spec = self.modules["prefect"].__spec__

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name != "prefect":
            return None
        sys.meta_path.remove(self)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: object) -> ModuleType:
        return self.modules["prefect"]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
        sys.modules.update(self.modules)
        from prefect.context import refresh_global_settings_context
        from prefect.logging import configuration

        refresh_global_settings_context()
        configuration.PROCESS_LOGGING_CONFIG.clear()
        configuration.setup_logging(incremental=False)


if __name__ == "__main__":
    sys.path[0] = NOTHING
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
