"""Calls into the store from the event loop, repeated until they succeed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from drover_collector.ingest.context import IngestContext
from drover_collector.ingest.schema_registry import Refusal
from drover_collector.ingest.session import PendingMessage
from drover_collector.store import StoreError

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

STUCK_S = 10.0  # a write that takes longer hangs


class GivenUpError(Exception):
    """The store fails while the collector shuts down."""


class StoreRetrier:
    """Repeats writes. Event loop only; the calls run in threads."""

    def __init__(self, context: IngestContext) -> None:
        self._context = context
        self.closing = False

    @property
    def failing(self) -> bool:
        """Whether the store accepts nothing now, so that waiting for it is in vain."""
        stats = self._context.stats
        if stats.troubles:
            return True
        now = time.monotonic()
        return any(now - since > STUCK_S for since in stats.writing.values())

    async def run(self, name: str, turn: Callable[[], Awaitable[bool]]) -> None:
        """Run turns until one returns True: it was the last. A defect costs one turn, and is counted."""
        while True:
            try:
                if await turn():
                    return
            except GivenUpError:
                return
            except Exception as error:  # noqa: BLE001  # this task must not die; _note_defect logs the traceback
                self._note_defect(name, error)
                await asyncio.sleep(self._context.limits.retry_s)

    async def store_each(
        self,
        name: str,
        call: Callable[[Sequence[PendingMessage]], R],
        work: list[PendingMessage],
        failed: Callable[[Sequence[PendingMessage]], None] = lambda _: None,
    ) -> list[tuple[list[PendingMessage], R]]:
        """Store messages together. A message that makes `call` fail is found and refused alone.

        Args:
            failed: called when the store does not accept them, before the next try.
        Returns:
            (part of the work, what `call` returned for it).
        Raises:
            GivenUpError: the store fails while the collector shuts down.
        """
        if not work:
            return []
        try:
            return [(work, await self.until_stored(name, call, work, failed))]
        except GivenUpError:
            raise
        except Exception as error:  # noqa: BLE001  # _note_defect logs the traceback
            self._note_defect(name, error)
            if len(work) == 1:
                (one,) = work
                text = f"this collector failed on it ({type(error).__name__}); see its log"
                self._context.refuse(one.session, one.lane, one.seq, Refusal("collector error", text))
                return []
            return [result for one in work for result in await self.store_each(name, call, [one], failed)]

    async def until_stored(
        self, name: str, call: Callable[[Sequence[T]], R], work: list[T], failed: Callable[[list[T]], None]
    ) -> R:
        stats = self._context.stats
        while True:
            started = stats.writing[name] = time.monotonic()
            try:
                result = await asyncio.to_thread(call, work)
            except StoreError as error:
                self.note_failure(name, error)
                failed(work)
                if self.closing:
                    raise GivenUpError from error
                await asyncio.sleep(self._context.limits.retry_s)
            else:
                stats.count_write(name, time.monotonic() - started)
                self.note_success(name)
                return result
            finally:
                stats.writing.pop(name, None)

    def note_failure(self, name: str, error: StoreError) -> None:
        """Count a failure of the store, and log it unless it is the same as before."""
        stats = self._context.stats
        stats.store_failures += 1
        if stats.troubles.get(name) != str(error):
            log.error("%s cannot be stored, and is tried again until it is: %s", name, error)
        stats.troubles[name] = str(error)

    def note_success(self, name: str) -> None:
        self._context.stats.troubles.pop(name, None)

    def _note_defect(self, name: str, error: Exception) -> None:
        self._context.stats.count_defect(f"{name}: {type(error).__name__}")
        log.error("%s could not be processed: a defect of this collector", name, exc_info=error)
