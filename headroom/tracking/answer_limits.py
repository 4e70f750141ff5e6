"""Makes the clients that ask MLflow. What a tracking server answers is read up to a limit of time
and size, so that a damaged or hostile one ends a command with a sentence, and neither holds it up
for ever nor fills the machine's memory. A file that is downloaded may be of any size, while it
comes. Part of the processes that import mlflow.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

from mlflow import MlflowClient
from mlflow.utils import request_utils
from mlflow.utils.request_utils import TCPKeepAliveHTTPAdapter
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.response import BaseHTTPResponse

ANSWER_S = 120.0  # for one answer, its last byte too; a busy server's page takes seconds
MOST_BYTES = 2**28  # of one answer, unpacked: 1,000 runs of 1,000 metrics each are half of it
FILE_S = 600.0  # for each piece of a file that is downloaded: MLflow reads 1 MiB at once
# Of pages in a row.
PAGES_S = 3600.0
PAGES_BYTES = 2**30
PIECE_BYTES = 2**16
TOKEN = b"page_token"  # what asks for the next page


class AnswerLimit(RuntimeError):
    """A server's answer takes too long, is too large or has no end; no OSError, which would be
    tried again."""


def make_client(uri: str) -> MlflowClient:
    """Return a client of that store, whose server's answers are limited."""
    if request_utils.TCPKeepAliveHTTPAdapter is not _LimitedAdapter:
        setattr(request_utils, TCPKeepAliveHTTPAdapter.__name__, _LimitedAdapter)
        request_utils._cached_get_request_session.cache_clear()  # those of before have no limit
    return MlflowClient(uri)


class _Cut:
    """Ends the connection of a request that is late, whatever of the answer it waits for."""

    def __init__(self) -> None:
        self.is_late = False
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(0, lambda: None)
        self._file: weakref.ref[BaseHTTPResponse] | None = None
        self._came_bytes = 0

    def arm(self, connection: socket.socket | None) -> None:
        """Cut in ANSWER_S."""
        self._socket = connection
        self._start(ANSWER_S)

    def watch(self, file: BaseHTTPResponse) -> None:
        """Cut only when no more of a download comes."""
        self._file = weakref.ref(file)
        weakref.finalize(file, self.stop)
        self._start(FILE_S)

    def stop(self) -> None:
        """Cut no more."""
        self._timer.cancel()

    def _start(self, wait_s: float) -> None:
        self._timer.cancel()
        self._timer = threading.Timer(wait_s, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def _cut(self) -> None:
        if self._file is not None:
            file, before = self._file(), self._came_bytes
            if file is None or file.closed:
                return
            self._came_bytes = file.tell()
            if self._came_bytes > before:
                return self._start(FILE_S)
        self.is_late = True
        if self._socket is not None:
            with suppress(OSError):  # it has ended meanwhile
                self._socket.shutdown(socket.SHUT_RDWR)


_mine = threading.local()  # cut: of the request that this thread waits for


class _CuttableConnection(HTTPConnection):
    def getresponse(self) -> Any:
        # Only now: all of the request is sent, and that may have been a large file.
        cut: _Cut = _mine.cut
        cut.arm(self.sock)
        try:
            return super().getresponse()
        except (OSError, http.client.HTTPException) as error:
            if cut.is_late:
                raise AnswerLimit(_describe_late()) from error
            raise


class _CuttableSecureConnection(HTTPSConnection):
    getresponse = _CuttableConnection.getresponse


class _Pool(HTTPConnectionPool):
    ConnectionCls = _CuttableConnection


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _CuttableSecureConnection


POOLS = {"http": _Pool, "https": _SecurePool}


def _describe_late() -> str:
    return f"its answer was not whole after {ANSWER_S:.0f} s"


class _Pages(threading.local):
    """What came of pages that this thread has asked for one after another."""

    def __init__(self) -> None:
        self._last, self._began_s, self._bytes = b"", 0.0, 0

    def check(self, request: PreparedRequest, size_bytes: int) -> None:
        """Raise AnswerLimit where the same page comes again, or there is no end of them."""
        body = request.body if isinstance(request.body, bytes) else str(request.body).encode()
        asked = b" ".join(((request.url or "").encode(), body))
        if TOKEN not in asked:
            self._last, self._began_s, self._bytes = b"", time.monotonic(), size_bytes
            return
        if asked == self._last:
            raise AnswerLimit("it names the same page as the next one again and again")
        self._last = asked
        self._bytes += size_bytes
        if self._bytes > PAGES_BYTES or time.monotonic() - self._began_s > PAGES_S:
            raise AnswerLimit(
                f"its pages have no end within {PAGES_S / 60:.0f} min and {PAGES_BYTES >> 20} MiB"
            )


class _LimitedAdapter(TCPKeepAliveHTTPAdapter):
    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._pages = _Pages()

    def init_poolmanager(self, *words: Any, **how: Any) -> None:
        super().init_poolmanager(*words, **how)
        self.poolmanager.pool_classes_by_scheme = POOLS

    def proxy_manager_for(self, proxy: str, **how: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **how)
        manager.pool_classes_by_scheme = POOLS
        return manager

    def send(  # type: ignore[override]
        self, request: PreparedRequest, stream: bool = False, **how: Any
    ) -> Response:
        """Send the request; of what is no download the answer has been read."""
        cut = _mine.cut = _Cut()
        try:
            response: Response = HTTPAdapter.send(self, request, stream=stream, **how)
            if stream:
                cut.watch(response.raw)
                return response
            response._content = self._read(response, cut)
            response._content_consumed = True
            self._pages.check(request, len(response._content))
            return response
        finally:
            if not stream:
                cut.stop()

    def _read(self, response: Response, cut: _Cut) -> bytes:
        """Return the body, unpacked. Raises AnswerLimit, and what requests raises."""
        body = bytearray()
        try:
            for piece in response.iter_content(PIECE_BYTES):
                body += piece
                if len(body) > MOST_BYTES:
                    raise AnswerLimit(f"its answer is larger than {MOST_BYTES >> 20} MiB")
        except Exception as error:
            response.raw.close()
            if cut.is_late:
                raise AnswerLimit(_describe_late()) from error
            raise
        if cut.is_late:  # where the length is not said its end looks like any other
            raise AnswerLimit(_describe_late())
        return bytes(body)
