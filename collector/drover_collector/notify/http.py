"""Send one HTTP request to a receiver within a time limit.

A receiver's address is often a secret, so no error or log here contains one.
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
MAX_RETRY_AFTER_S = 3600.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What came back from a request.

    Attributes:
        status: HTTP status; 0: no answer, and `trouble` says why.
        body: at most MAX_ANSWER_BYTES.
    """

    status: int
    trouble: str = ""
    body: bytes = b""
    retry_after_s: float | None = None

    @property
    def good(self) -> bool:
        return 200 <= self.status < 300

    def problem(self) -> str:
        """Return why the answer is not a success."""
        if self.trouble:
            return self.trouble
        if 300 <= self.status < 400:
            return f"answered {self.status}, a redirect, which Drover does not follow; set the final address"
        return f"answered {self.status}"


class Http:
    """The HTTP client of one receiver. It follows no redirect, which could send keys and signatures elsewhere."""

    def __init__(self, timeout_s: float, ca_file: str | None = None, proxy: str | None = None) -> None:
        """
        Args:
            timeout_s: for the connection, then for each part of the answer; `TimeLimited` limits the whole.
        """
        self.timeout_s = timeout_s
        options: dict[str, Any] = {"num_pools": 4, "maxsize": 1, "ca_certs": ca_file}
        self._pool = urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)

    def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, *, read: bool = True
    ) -> HttpAnswer:
        """Send a request and return the answer, or why there is none.

        Args:
            read: False: do not read the answer's body.
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
            return HttpAnswer(0, "the proxy did not answer or refused the request; check its address")
        except NewConnectionError:  # before its parent class, a timeout
            return HttpAnswer(0, "cannot connect; check that the receiver runs and that its name resolves")
        except ConnectTimeoutError:
            return HttpAnswer(0, f"no connection within {timeout_s:g} s")
        except ReadTimeoutError:
            return HttpAnswer(0, f"no answer within {timeout_s:g} s")
        except SSLError:
            return HttpAnswer(
                0, "TLS failed; check that the receiver's certificate is valid and trusted on this machine"
            )
        except (HTTPError, OSError) as error:
            return HttpAnswer(0, f"the connection broke ({type(error).__name__})")
        try:
            text = answer.read(MAX_ANSWER_BYTES) if read else b""
        except (HTTPError, OSError):
            text = b""  # the status is enough
        finally:
            answer.close()
            self._pool.clear()  # messages are rare: the other side would close a kept connection
        return HttpAnswer(answer.status, "", text, _seconds(answer.headers.get("retry-after")))

    def close(self) -> None:
        self._pool.clear()


def _seconds(retry_after: str | None) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110, 10.2.3: seconds or a date); None: missing or invalid."""
    if retry_after is None:
        return None
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_AFTER_S)
    try:
        return min(max(0.0, parsedate_to_datetime(text).timestamp() - time.time()), MAX_RETRY_AFTER_S)
    except (ValueError, OverflowError):
        return None


class TimeLimited(Generic[T]):
    """Runs one call at a time in a daemon thread and waits for it at most `limit_s`.

    A peer that sends a byte now and then triggers no socket timeout, so the whole call is limited here. A call that
    takes longer is abandoned; the next one starts only after it has ended.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self._name = name
        self._limit_s = limit_s
        self._thread: threading.Thread | None = None
        self._until_s = 0.0
        self._done: list[T] = []
        self._failed: list[Exception] = []

    def call(self, work: Callable[[], T]) -> T | None:
        """Return what `work` returns; None: it did not end in time, or an earlier call still runs.

        Raises:
            Exception: what `work` raises.
        """
        self.start(work)
        return self.result()

    def start(self, work: Callable[[], T]) -> None:
        """Start `work` unless an earlier call still runs."""
        self._until_s = time.monotonic() + self._limit_s
        if self._thread is not None and self._thread.is_alive():
            self._until_s = 0.0
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
        """Wait for what was started. Return and raise as `call` does."""
        if self._thread is None or not self._until_s:
            return None
        self._thread.join(max(0.0, self._until_s - time.monotonic()))
        if self._failed:
            raise self._failed[0]
        return self._done[0] if self._done else None
