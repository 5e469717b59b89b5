"""Find out why a call ended, in the collector's words.

A write to a call that has ended makes grpc.aio replace the collector's status by one of its own, "Internal error from
Core", which explains nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

GRPC_OWN = "Internal error from Core"
LATE_S = 1.0  # how long the status may follow the error of a write


class CloseReason:
    """The first status of a call of grpc.aio. Construct it before anything is written."""

    def __init__(self, call: Any) -> None:
        self._text = ""
        self._known = asyncio.Event()
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        """Read the status at once: grpc.aio may replace it soon."""
        code, details = _result(call.code()), _result(call.details())
        if not self._text and details != GRPC_OWN:
            self._text = f"{code.name.lower().replace('_', ' ')}: {details or 'the collector ended the stream'}"
            self._known.set()

    async def text(self) -> str:
        """Return why the call ended; wait LATE_S for that at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LATE_S):
                await self._known.wait()
        return self._text or "the stream broke during a write"


def _result(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that does not need to wait."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise RuntimeError("a call that has ended has no status")
