"""How a call ended, in the collector's words.

A write that meets the end of its stream makes grpc.aio put a status of its own in the place of the one that came:
"Internal error from Core", which tells nobody anything.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

OWN = "Internal error from Core"
LATE_S = 1.0  # how long the status may come behind the error of a write


class CloseReason:
    """Notes the status of a call of grpc.aio. Made before anything is written."""

    def __init__(self, call: Any) -> None:
        self._text = ""
        self._came = asyncio.Event()
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        """At once: in a moment another status may stand there."""
        code, details = _known(call.code()), _known(call.details())
        if not self._text and details != OWN:
            self._text = f"{code.name.lower().replace('_', ' ')}: {details or 'the collector ended the stream'}"
            self._came.set()

    async def why(self) -> str:
        """Of a call that has ended, or is about to."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LATE_S):
                await self._came.wait()
        return self._text or "the stream broke while it was written to"


def _known(asked: Coroutine[Any, Any, T]) -> T:
    """The answer of a coroutine that need not wait for it."""
    try:
        asked.send(None)
    except StopIteration as answer:
        found: T = answer.value
        return found
    asked.close()
    raise RuntimeError("a call that has ended has no status")
