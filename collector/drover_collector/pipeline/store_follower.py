"""Read what other collectors write to the same store: events to judge, and which nodes report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence

from drover_collector.fleet.index import FleetIndex
from drover_collector.store import Store, StoreError
from drover_core.model.events import Event

POLL_S = 0.5  # between two reads of events
REPORTING_EVERY_MS = 5_000  # between two reads of the list of nodes that report
REPORTING_MS = 30_000  # a node that was silent for this long does not report
MAX_EVENTS = 100_000  # of one read
MAX_KNOWN = 200_000  # ids of events that are known, in memory


class StoreFollower:
    """`run` in the event loop; `know` and `forget` from any thread. Set `wake` for a read at once."""

    def __init__(self, store: Store, index: FleetIndex, now_ms: Callable[[], int]) -> None:
        self.wake = asyncio.Event()
        self._store, self._index, self._now_ms = store, index, now_ms
        self._known: dict[str, None] = {}

    def know(self, events: Iterable[Event]) -> None:
        """Leave out events that are being judged: until that is stored, the store returns them again."""
        self._known.update(dict.fromkeys(event.id for event in events))
        while len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def forget(self) -> None:
        self._known.clear()

    async def run(self, take: Callable[[Sequence[Event]], None], failed: Callable[[StoreError], None]) -> None:
        seen, read_ms = -1, 0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), POLL_S)
            self.wake.clear()
            try:
                mark = await asyncio.to_thread(self._store.table_fingerprint, "events")
                if mark != seen:
                    take(await asyncio.to_thread(self._unjudged))
                    seen = mark
                await asyncio.to_thread(self._store.entities.refresh)
                if self._now_ms() - read_ms >= REPORTING_EVERY_MS:
                    read_ms = self._now_ms()
                    await asyncio.to_thread(
                        self._store.buckets.row_counts, self._index, read_ms - REPORTING_MS, REPORTING_MS
                    )
            except StoreError as error:
                failed(error)

    def _unjudged(self) -> list[Event]:
        found = [e for e in self._store.events.unjudged(self._now_ms(), MAX_EVENTS) if e.id not in self._known]
        self.know(found)
        return found
