"""Messages of a run to a person who is elsewhere: to a webhook, to ntfy, or to a command's stdin.
They leave from a thread of their own, in time that is limited. One that cannot be sent is told
once in the log and is no reason for anything; where it was to go is a secret, and never told.
"""

from __future__ import annotations

import json
import logging
import queue
import shlex
import subprocess
import threading
from base64 import b64encode
from collections.abc import Mapping
from contextvars import copy_context
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from headroom.process.redaction import redact
from headroom.report.report_sections import make_report
from headroom.run.failures import Failure
from headroom.run.gate import GATES
from headroom.settings.run_config import is_web_address

TIMEOUT_S = 5.0  # for an answer
MOST_LETTERS = 2000  # of a message

log = logging.getLogger(__name__)


class Messenger:
    """Sends messages of one run to one place; to none, where that is empty."""

    def __init__(self, place: str) -> None:
        """place: an http(s) address, or a command."""
        self._place = place.strip()
        self._texts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._has_failed = False

    def send(self, text: str) -> None:
        """Send this soon. It returns at once."""
        if not self._place:
            return
        self._texts.put(redact(text)[:MOST_LETTERS])
        with self._lock:
            if self._thread is not None:
                return
            here = copy_context()  # Prefect knows by it which run's log this is
            thread = self._thread = threading.Thread(
                target=here.run, args=(self._run,), name="headroom-messages", daemon=True
            )
        try:
            thread.start()
        except RuntimeError:  # the interpreter is about to end
            self._run()

    def close(self) -> None:
        """Wait for what is being sent, in time that is limited."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(timeout=TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._texts.empty():
                    self._thread = None
                    return
            text = self._texts.get()
            try:
                deliver(self._place, text)
            except Exception as error:  # of any kind: what an address or a command may do is much
                self._tell_failure(error)

    def _tell_failure(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.warning("run.notify: a message could not be sent (%s)", describe_failure(error))


def describe_end(run: Mapping[str, Any], failure: Failure | None, stopped: str) -> str:
    """Return how a run ended. run: what its report is made from, if it came to that. stopped: why
    it ended before it was done."""
    if failure is not None:
        how = f"has failed ({failure.kind})" if failure.status == "FAILED" else "was ended"
        return f"{how}: {failure.said}"
    if stopped:
        return f"has ended: {stopped}"
    said = ", ".join(make_report(run).headline) if run else ""
    tags = run.get("tags", {})
    gate = f"; {tags.get('gate.why', '')}" if tags.get("gate") in GATES else ""
    return f"has finished: {said}{gate}" if said else "has finished"


def deliver(place: str, text: str) -> None:
    """Send the text to an address, or to a command. Raises whatever that does."""
    if is_web_address(place):
        _post(place, text)
        return
    subprocess.run(
        shlex.split(place),
        input=text.encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=True,
        start_new_session=True,  # Ctrl-C is not for it
    )


def _post(address: str, text: str) -> None:
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen  # 20 ms that a run without messages does without

    request = Request(*make_post(address, text))
    try:
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read(1)
    except HTTPError as error:
        error.close()  # it is the answer, and holds its socket
        raise


def make_post(address: str, text: str) -> tuple[str, bytes, dict[str, str]]:
    """Return address, body and headers of a message: as ntfy takes it, plain, where the address
    says so; else as Slack's webhooks do, and those that are like them."""
    parts = urlsplit(address)
    headers = {"User-Agent": "headroom"}
    login, at, host = parts.netloc.rpartition("@")
    if at:
        headers["Authorization"] = f"Basic {b64encode(unquote(login).encode()).decode()}"
    address = urlunsplit(parts._replace(netloc=host))
    if "ntfy" in f"{host}{parts.path}".lower():
        return address, text.encode(), {**headers, "Content-Type": "text/plain; charset=utf-8"}
    body = json.dumps({"text": text}).encode()
    return address, body, {**headers, "Content-Type": "application/json"}


def describe_failure(error: Exception) -> str:
    """Return what failed, without where: neither an address nor a command is in it."""
    code = getattr(error, "code", None)
    if isinstance(code, int):
        return f"its answer was HTTP {code}"
    if isinstance(error, subprocess.CalledProcessError):
        return f"the command ended with exit code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"the command did not end within {TIMEOUT_S:.0f} s"
    reason = getattr(error, "reason", None)
    cause = reason if isinstance(reason, Exception) else error
    message = cause.strerror if isinstance(cause, OSError) else None
    return message or type(cause).__name__
