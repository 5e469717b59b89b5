"""Answer an act that is sent twice with one key only once, so that a client may repeat what it got no answer to.

As draft-ietf-httpapi-idempotency-key-header-07 has it: a key with another request is refused with 422.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from drover_collector.api.snapshot import RefusalError
from drover_collector.rest.problems import ProblemError

KEPT_S = 86_400.0
MOST = 10_000  # of one caller: otherwise one could push out the keys of another
CALLERS = 1_000
KEY_CHARS = 200


@dataclass(frozen=True, slots=True)
class _Act:
    asked: bytes  # what was sent with the key
    future: Future[Any]
    made_s: float


class Acts:
    """Acts of the last day by caller and key, in memory: a restart of the collector forgets them."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._acts: dict[str, dict[str, _Act]] = {}

    def once(self, caller: str, key: str, asked: bytes, start: Callable[[], Future[Any]]) -> tuple[Future[Any], bool]:
        """Return the act's future, and whether it was begun before.

        Raises:
            Problem: the key is missing, too long, or was used for another request; or the caller has too many.
        """
        if not key or len(key) > KEY_CHARS or not key.isprintable():
            raise ProblemError(
                400, "idempotency-key-missing",
                f"send a header Idempotency-Key of at most {KEY_CHARS} letters, a new one for each act, such as a UUID;"
                " repeat it when you repeat the request",
            )  # fmt: skip
        with self._lock:
            mine = self._mine(caller)
            known = mine.get(key)
            if known is not None and known.asked != asked:
                raise ProblemError(
                    422, "idempotency-key-reused", "this Idempotency-Key came with another request; take a new one"
                )
            if known is not None and not _was_refused(known.future):
                return known.future, True
            if len(mine) >= MOST:
                raise ProblemError(
                    429, "too-many-acts", f"{MOST} acts of the last day are kept for this caller; act later, or by"
                    " `drover`", {"retry-after": "3600"},
                )  # fmt: skip
            mine[key] = _Act(asked, start(), self._now_s())
            return mine[key].future, False

    def _mine(self, caller: str) -> dict[str, _Act]:
        """Return the acts of a caller, without those that are too old or were refused."""
        mine = self._acts.pop(caller, {})
        for key, act in list(mine.items()):
            if self._now_s() - act.made_s > KEPT_S or (_was_refused(act.future) and len(mine) >= MOST):
                del mine[key]
        while len(self._acts) >= CALLERS:
            del self._acts[next(iter(self._acts))]
        self._acts[caller] = mine
        return mine


def _was_refused(future: Future[Any]) -> bool:
    """Whether nothing was done, so that the same key may try again."""
    return future.done() and (future.cancelled() or isinstance(future.exception(), RefusalError))
