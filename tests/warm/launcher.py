"""A `python` for the tests: a command of this project is forked from a process that has imported
the large libraries already (forks.py); anything else is given to Python itself. It stands for the
process it asked for: signals go there, its exit code comes back, and if it is killed so is that.

It is run by `python -IS`; tests/conftest.py fills in what stands between two @.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from contextlib import suppress
from fcntl import LOCK_EX, flock

PYTHON, FOLDER, SERVER, SESSION = "@PYTHON@", "@FOLDER@", "@SERVER@", "@SESSION@"


def main(words):
    kind = kind_of(words)
    cold = os.environ.get("TESTS_COLD")  # 1, or the module that imports everything itself
    is_asked = cold not in ("1", module_of(words)) and all(is_open(fd) for fd in range(3))
    if kind is None or not is_asked or sys.platform != "linux":  # elsewhere PyTorch must not fork
        os.execv(PYTHON, [PYTHON, *words])
    line = asked(kind, "" if kind == "models" else root_of())
    leads = {"session": os.getsid(0) == os.getpid(), "group": os.getpgrp() == os.getpid()}
    inherited = inherited_fds()
    order = {
        "words": words,
        "fds": [0, 1, 2, *inherited],
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "leads": [what for what, it_does in leads.items() if it_does],
        "umask": umask(),
        "python": sys.argv[0],
    }
    told = repr(order).encode()
    socket.send_fds(line, [len(told).to_bytes(8, "big")], order["fds"])
    line.sendall(told)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):  # whoever waits for the end of a pipe waits for the other process alone
        os.dup2(nothing, fd)
    for fd in inherited:
        os.close(fd)
    answer = line.makefile("r")
    pid = int(answer.readline() or 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _: end(pid, number))
    code = int(answer.readline() or 70)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def end(pid, number):
    with suppress(ProcessLookupError):  # its code is on the way
        os.kill(pid, number)


def kind_of(words):
    """Which of the processes that wait has imported what these words need; for `-c` a test says
    so, in TESTS_WARM_KIND."""
    if len(words) < 2 or words[0] != "-m":
        is_code = words[:1] == ["-c"] or words[:2] == ["-P", "-c"]
        return os.environ.get("TESTS_WARM_KIND") if is_code else None
    if words[1] in ("mlflow", "uvicorn") or words[1].startswith("headroom.tracking."):
        return "mlflow"
    if words[1] == "headroom.prefect.local_prefect":
        return "prefect"
    known = ("flows.train", "flows.predict", "prefect.engine")
    return "torch" if module_of(words) in known else None


def module_of(words):
    """The module that is run; that of a training, whatever it is called by."""
    return "flows.train" if words[1:3] == ["headroom", "train"] else "".join(words[1:2])


def root_of():
    """The folder that this project will be imported from; empty where it is none that is known."""
    folders = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    found = [f for f in folders if f and os.path.isdir(f"{f}/headroom/base")]
    return os.path.realpath(found[0]) if found else ""


def inherited_fds():
    """What was given to this process beside the standard streams."""
    found = sorted(int(name) for name in os.listdir("/dev/fd"))
    return [fd for fd in found if fd > 2 and is_open(fd) and os.get_inheritable(fd)]


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def umask():
    found = os.umask(0)
    os.umask(found)
    return found


def asked(kind, root):
    """A line to the process that waits. The first who asks starts it."""
    address = f"{FOLDER}/warm-{kind}-{zlib.crc32(root.encode()):08x}"
    with open(f"{address}.lock", "w") as lock:
        flock(lock, LOCK_EX)
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(address)
            return line
        except OSError:
            pass
        with suppress(FileNotFoundError):
            os.unlink(address)  # of one that was killed
        theirs = ("PREFECT", "MLFLOW", "HEADROOM")  # a mark of theirs would have it ended with them
        clean = {k: v for k, v in os.environ.items() if not k.startswith(theirs)}
        clean |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with open(f"{address}.log", "w") as log:
            started = subprocess.Popen(
                [PYTHON, SERVER, kind, address, SESSION, root],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean,
                cwd="/",
                start_new_session=True,
            )
        while True:
            try:
                line.connect(address)
                return line
            except OSError:
                if started.poll() is not None:
                    sys.exit(f"{address}.log says why nothing is warm")
                time.sleep(0.02)


main(sys.argv[1:])
