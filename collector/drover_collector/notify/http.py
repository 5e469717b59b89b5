"""One request to a receiver, within a time, and what went wrong with it in words that name no address.

Addresses of receivers are often secrets of their own, so nothing here puts one into an error or a log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NewConnectionError,
    ProxyError,
    ReadTimeoutError,
    SSLError,
)

MAX_ANSWER_BYTES = 1 << 20
MAX_RETRY_AFTER_S = 3600.0  # what asks for more is tried in an hour all the same

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """
    Attributes:
        status: 0: there is none, `trouble` says why.
        body: its beginning, up to MAX_ANSWER_BYTES.
    """

    status: int
    trouble: str = ""
    body: bytes = b""
    retry_after_s: float | None = None

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300

    def told(self) -> str:
        """What is wrong with it."""
        if self.trouble:
            return self.trouble
        if 300 <= self.status < 400:
            return f"answered {self.status}, a redirect, not followed; set its final address"
        return f"answered {self.status}"


class Http:
    """A client of one receiver. A redirect is not followed: it would carry keys and signatures elsewhere."""

    def __init__(self, timeout_s: float, ca_file: str | None = None, proxy: str | None = None) -> None:
        """
        Args:
            timeout_s: for the connection, then for each part of the answer; `Bounded` bounds the whole.
        """
        self.timeout_s = timeout_s
        options: dict[str, Any] = {"num_pools": 4, "maxsize": 1, "ca_certs": ca_file}
        self._pool = urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)

    def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, *, read: bool = True
    ) -> HttpAnswer:
        """
        Args:
            read: whether the answer's body is wanted; else nobody reads it, however long it is.
        """
        timeout_s = self.timeout_s
        try:
            answer = self._pool.request(
                method,
                url,
                body=body,
                headers={"user-agent": "drover", "connection": "close", **headers},
                timeout=urllib3.Timeout(connect=timeout_s, read=timeout_s),
                redirect=False,
                retries=False,
                preload_content=False,
            )
        except ProxyError:
            return HttpAnswer(0, "the proxy does not answer, or lets us not through; is its address right?")
        except NewConnectionError:  # before its parent class, a timeout
            return HttpAnswer(0, "cannot connect; is the receiver running, and its name known here?")
        except ConnectTimeoutError:
            return HttpAnswer(0, f"no connection within {timeout_s:g} s")
        except ReadTimeoutError:
            return HttpAnswer(0, f"no answer within {timeout_s:g} s")
        except SSLError:
            return HttpAnswer(0, "TLS failed; is the receiver's certificate valid and trusted here?")
        except (HTTPError, OSError) as error:
            return HttpAnswer(0, f"the connection broke ({type(error).__name__})")
        try:
            text = answer.read(MAX_ANSWER_BYTES) if read else b""
        except (HTTPError, OSError):
            text = b""  # the status stands
        finally:
            answer.close()
            self._pool.clear()  # messages are rare: a connection kept would be found closed by the other side
        return HttpAnswer(answer.status, "", text, _seconds(answer.headers.get("retry-after")))

    def close(self) -> None:
        self._pool.clear()


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After header (RFC 9110, 10.2.3): seconds, or a date; None: there is none that can be read."""
    if retry_after is None:
        return None
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        return min(max(0.0, parsedate_to_datetime(text).timestamp() - time.time()), MAX_RETRY_AFTER_S)
    except (ValueError, OverflowError):
        return None


class Bounded(Generic[T]):
    """Calls that end in time, whatever is at the other end: one that sends a byte now and then trips no timeout.

    A call that takes longer is left behind in its own daemon thread, and nothing new is begun until it has ended.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self._name = name
        self._limit_s = limit_s
        self._thread: threading.Thread | None = None
        self._until_s = 0.0
        self._done: list[T] = []
        self._failed: list[Exception] = []

    def call(self, work: Callable[[], T]) -> T | None:
        """What `work` returns; None: it did not end in time, or that of before has not.

        Raises:
            Exception: what `work` raises.
        """
        self.start(work)
        return self.result()

    def start(self, work: Callable[[], T]) -> None:
        self._until_s = time.monotonic() + self._limit_s
        if self._thread is not None and self._thread.is_alive():
            self._until_s = 0.0  # that of before is waited for no longer
            return
        done, failed = self._done, self._failed = [], []

        def run() -> None:
            try:
                done.append(work())
            except Exception as error:  # noqa: BLE001  # raised again in the caller's thread
                failed.append(error)

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def result(self) -> T | None:
        """Of what was started; as `call`."""
        if self._thread is None or not self._until_s:
            return None
        self._thread.join(max(0.0, self._until_s - time.monotonic()))
        if self._failed:
            raise self._failed[0]
        return self._done[0] if self._done else None
