"""Calls into the store from the event loop: tried until they work, told when they do not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from drover_collector.ingest.limits import Limits
from drover_collector.ingest.schema_registry import Refusal
from drover_collector.ingest.session import Session, Waiting
from drover_collector.ingest.stats import IngestStats
from drover_collector.store import StoreError
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

Refuse = Callable[[Session, pb.Lane.ValueType, int, Refusal], None]
STUCK_S = 10.0  # a write that takes longer hangs


class GivenUpError(Exception):
    """The store takes nothing, and we are closing."""


class StoreRetrier:
    """What the writers share.

    Args:
        refuse: is told of what the store's side refuses, before it is acknowledged.
    """

    def __init__(self, stats: IngestStats, limits: Limits, refuse: Refuse) -> None:
        self._stats, self._limits, self.refuse = stats, limits, refuse
        self.closing = False

    @property
    def failing(self) -> bool:
        """Whether the store takes nothing at the moment, so that waiting for it is in vain."""
        if self._stats.troubles:
            return True
        now = time.monotonic()
        return any(now - since > STUCK_S for since in self._stats.writing.values())

    async def keep_on(self, name: str, turn: Callable[[], Awaitable[bool]]) -> None:
        """Turn after turn until one says that it was the last. A defect of ours costs a turn, and is told."""
        while True:
            try:
                if await turn():
                    return
            except GivenUpError:
                return
            except Exception as error:  # noqa: BLE001  # this task must not die; defect() logs it with its traceback
                self.defect(name, error)
                await asyncio.sleep(self._limits.retry_s)

    async def each(
        self,
        name: str,
        call: Callable[[Sequence[Waiting]], R],
        work: list[Waiting],
        failed: Callable[[Sequence[Waiting]], None] = lambda _: None,
    ) -> list[tuple[list[Waiting], R]]:
        """(part of the work, what storing it gave). What makes `call` fail is found, and refused alone.

        Args:
            failed: is told when the store does not take it, before the next try.
        Raises:
            GivenUpError: the store takes nothing, and we are closing.
        """
        if not work:
            return []
        try:
            return [(work, await self.until_stored(name, call, work, failed))]
        except GivenUpError:
            raise
        except Exception as error:  # noqa: BLE001  # defect() logs it with its traceback
            self.defect(name, error)
            if len(work) == 1:
                one = work[0]
                text = f"this collector failed on it ({type(error).__name__}); its log says how"
                self.refuse(one.session, one.lane, one.seq, Refusal("collector error", text))
                return []
            return [result for one in work for result in await self.each(name, call, [one], failed)]

    async def until_stored(
        self, name: str, call: Callable[[Sequence[T]], R], work: list[T], failed: Callable[[list[T]], None]
    ) -> R:
        while True:
            started = self._stats.writing[name] = time.monotonic()
            try:
                result = await asyncio.to_thread(call, work)
            except StoreError as error:
                self.trouble(name, error)
                failed(work)
                if self.closing:
                    raise GivenUpError from error
                await asyncio.sleep(self._limits.retry_s)
            else:
                self._stats.wrote(name, time.monotonic() - started)
                self.well(name)
                return result
            finally:
                self._stats.writing.pop(name, None)

    def trouble(self, name: str, error: StoreError) -> None:
        """Count a failure of the store, and log it once until it changes."""
        self._stats.store_failures += 1
        if self._stats.troubles.get(name) != str(error):
            log.error("%s not stored, tried again until it is: %s", name, error)
        self._stats.troubles[name] = str(error)

    def well(self, name: str) -> None:
        self._stats.troubles.pop(name, None)

    def defect(self, name: str, error: Exception) -> None:
        self._stats.defects += 1
        self._stats.defect = f"{name}: {type(error).__name__}"
        log.error("%s could not be taken in", name, exc_info=error)
