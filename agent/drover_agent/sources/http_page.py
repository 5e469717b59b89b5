"""One HTTP page that is read again and again: a metrics page on this node or at an address that the settings name.

The standard library's `http.client`, which knows no proxy and follows no redirect: a page elsewhere than at the address
that was configured is not what was asked for. It is imported when something listens there, for it takes 2 MB.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from typing import TYPE_CHECKING, Any

from drover_agent.urls import URL, url_error
from drover_core.metrics.catalog import Absent

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

MAX_BYTES = 8 * 2**20  # vLLM's and dcgm-exporter's pages have up to about 1 MB
LIMIT_S = 1.0  # for one page, from connecting to its last byte; a server on the same node takes some milliseconds
_CHUNK = 65_536


class PageError(Exception):
    """The page could not be had. `absent` is the reason for the values that it would have given."""

    def __init__(self, absent: Absent, text: str) -> None:
        super().__init__(text)
        self.absent = absent


class _Socket(socket.socket):
    """Ends every wait at `deadline`: a server may send its answer, or its headers, a byte at a time."""

    deadline = math.inf

    def recv_into(self, *args: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.settimeout(left)
        return super().recv_into(*args)


class Page:
    """Keeps its connection between reads. Used by one thread at a time.

    Raises (at construction):
        ValueError: the url is none of this kind; see `drover_agent.urls.url_error`.
    """

    def __init__(self, url: str, limit_s: float = LIMIT_S, max_bytes: int = MAX_BYTES) -> None:
        match = URL.fullmatch(url)
        wrong = url_error(url)
        if match is None or wrong:
            raise ValueError(wrong)
        self.url = url
        self._host, self._port = match["host"].strip("[]"), int(match["port"] or 80)
        self._path = match["path"] or "/"
        self.limit_s, self._max_bytes = limit_s, max_bytes
        self._connection: HTTPConnection | None = None
        self._socket: _Socket | None = None

    def read(self) -> str:
        """The page now; bytes that are no UTF-8 are replaced.

        Raises:
            PageError: nobody listens (`lost`), no answer in time (`timeout`), or another answer than a page (`error`).
        """
        deadline = time.monotonic() + self.limit_s
        try:
            if self._connection is not None:
                with contextlib.suppress(ConnectionError):  # the server has closed it since, as it may: once more
                    return self._get(self._connection, deadline)
                self.close()
            self._connection = self._connect(deadline)
            return self._get(self._connection, deadline)
        except TimeoutError:
            self.close()
            raise PageError(Absent.TIMEOUT, f"{self.url} did not answer within {self.limit_s:g} s") from None
        except OSError as error:
            self.close()
            raise PageError(Absent.LOST, f"{self.url}: {error.strerror or error}") from None
        except PageError:
            self.close()
            raise
        except Exception as error:  # noqa: BLE001  # whatever a server sends, http.client has an exception for it
            self.close()
            raise PageError(
                Absent.ERROR, f"{self.url} does not speak HTTP: {type(error).__name__} {str(error)[:120]!r}"
            ) from None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self, deadline: float) -> HTTPConnection:
        connected = socket.create_connection((self._host, self._port), max(deadline - time.monotonic(), 0.01))
        from http.client import HTTPConnection

        connection = HTTPConnection(self._host, self._port)
        self._socket = connection.sock = _Socket(fileno=connected.detach())
        connection.auto_open = 0  # what is lost is opened again here, within the deadline
        return connection

    def _get(self, connection: HTTPConnection, deadline: float) -> str:
        if connection.sock is None or self._socket is None:  # its last answer asked for the end
            raise ConnectionResetError
        self._socket.deadline = deadline
        self._socket.settimeout(self.limit_s)  # for sending
        connection.request(
            "GET", self._path, headers={"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"}
        )
        response = connection.getresponse()
        try:
            return self._body(response)
        finally:
            response.close()

    def _body(self, response: HTTPResponse) -> str:
        if 300 <= response.status < 400:
            there = response.getheader("Location", "nowhere")[:200]
            raise PageError(Absent.ERROR, f"{self.url} redirects to {there}; set that address instead")
        if response.status != 200:
            reason = f"{response.status} {response.reason[:80]}"
            raise PageError(Absent.ERROR, f"{self.url} answers {reason}; check the path")
        parts: list[bytes] = []
        size = 0
        while part := response.read1(_CHUNK):
            size += len(part)
            if size > self._max_bytes:
                raise PageError(Absent.ERROR, f"{self.url} has more than {self._max_bytes} bytes")
            parts.append(part)
        if response.length:  # as announced, less what came
            raise ConnectionResetError(0, "the page broke off")
        return b"".join(parts).decode("utf-8", "replace")
