"""Post to one receiver over a kept connection, within a limit for the whole request.

No error here holds an address, a header or what the receiver wrote: each may hold or repeat a secret.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

MAX_ANSWER_BYTES = 1 << 20
PERMANENT = frozenset({400, 409, 413, 415, 422})  # the same request would be refused again
HEADERS_MOST = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """Outcome of one request.

    Attributes:
        trouble: why it failed; "": it succeeded. permanent: the same request would be refused again.
        retry_after_s: how long the receiver asks to wait; None: it does not say.
        refused: samples or lines that it will never take, where it says how many; 0: all, if `permanent`.
        headers: of a success, with names in lower case. body: of a success.
    """

    trouble: str = ""
    permanent: bool = False
    retry_after_s: float | None = None
    refused: int = 0
    headers: Mapping[str, str] | None = None
    body: bytes = b""


class Poster:
    """Keeps its connection between requests. Used by one thread at a time; `close` from any.

    Raises (at construction):
        OSError: the CA file cannot be used.
    """

    def __init__(self, url: str, timeout_s: float, ca_file: str | None = None) -> None:
        parts = urlsplit(url)
        self._host, self._tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._timeout_s = timeout_s
        self._context = ssl.create_default_context(cafile=ca_file) if self._tls else None
        self._connection: http.client.HTTPConnection | None = None
        self._lock = threading.Lock()  # of `_connection`, which `close` takes away

    def post(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send once; once more at once where the receiver had closed the kept connection meanwhile."""
        kept = self._connection is not None
        answer = self._limited(body, headers)
        if kept and answer is None:
            answer = self._limited(body, headers)
        return answer or Answer("the connection broke off")

    def _limited(self, body: bytes, headers: Mapping[str, str]) -> Answer | None:
        """Return None if the connection broke before an answer began."""
        over = threading.Event()

        def cut() -> None:
            over.set()
            self.close()

        timer = threading.Timer(self._timeout_s, cut)  # a peer may read or write a byte now and then
        timer.daemon = True
        timer.start()
        try:
            answer = self._once(body, headers)
        finally:
            timer.cancel()
        if over.is_set():  # also where a status had come: http.client takes a cut within headers for their end
            return Answer(f"no complete answer within {self._timeout_s:g} s")
        return answer

    def _once(self, body: bytes, headers: Mapping[str, str]) -> Answer | None:
        try:
            connection = self._connected()
            connection.request("POST", self._path, body, {"user-agent": "drover", **headers})
            return self._answer(connection.getresponse())
        except ssl.SSLCertVerificationError:
            self.close()
            return Answer("TLS failed: its certificate is not trusted, has ended, or is for another name; see ca_file")
        except ssl.SSLError:
            self.close()
            return Answer("TLS failed; check that this port speaks TLS")
        except TimeoutError:
            self.close()
            return Answer(f"no answer within {self._timeout_s:g} s")
        except (ConnectionRefusedError, socket.gaierror):
            self.close()
            return Answer("cannot connect; check that it runs and that its name resolves")
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            # AttributeError: http.client's, where `close` has taken its socket away.
            self.close()
            broke = isinstance(error, (ConnectionError, http.client.RemoteDisconnected, http.client.CannotSendRequest))
            return None if broke else Answer(f"the connection broke or it does not speak HTTP ({type(error).__name__})")

    def _connected(self) -> http.client.HTTPConnection:
        with self._lock:
            if self._connection is None:
                if self._context is None:
                    made = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
                else:
                    made = http.client.HTTPSConnection(
                        self._host, self._port, timeout=self._timeout_s, context=self._context
                    )
                self._connection = made
            return self._connection

    def _answer(self, response: http.client.HTTPResponse) -> Answer:
        body = response.read(MAX_ANSWER_BYTES)
        if not response.isclosed():  # more than that: it may never end
            self.close()
        if response.will_close:
            self.close()
        headers = {name.lower(): value for name, value in response.getheaders()[:HEADERS_MOST]}
        status = response.status
        if 200 <= status < 300:
            return Answer(headers=headers, body=body)
        if 300 <= status < 400:
            return Answer(f"answered {status}, a redirect, which Drover does not follow; set the final address")
        return Answer(f"answered {status}", status in PERMANENT, _seconds(headers.get("retry-after")))

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is None:
            return
        if (own := connection.sock) is not None:
            with contextlib.suppress(OSError):  # it has closed by itself
                socket.socket.shutdown(own, socket.SHUT_RDWR)  # not TLS's own, which would wait
        connection.close()


def _seconds(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110, 10.2.3); None: missing or invalid."""
    if text is None:
        return None
    text = text.strip()
    if text.isascii() and text.isdigit():
        return float(text[:12])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
