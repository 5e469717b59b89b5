"""Store events, absences and holdings, and pass events on to the detectors.

An event is stored, judged and acknowledged, in this order. While the store fails or hangs it is judged from memory,
once, and stored and acknowledged when the store works again (docs/decisions/0008).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from drover_collector.ingest.context import IngestContext
from drover_collector.ingest.limits import MemoryBudget, RecentlyUsed
from drover_collector.ingest.offsets import LaneOffsets
from drover_collector.ingest.parse_records import ParsedRecord
from drover_collector.ingest.session import PendingMessage
from drover_collector.ingest.store_retry import StoreRetrier
from drover_collector.probes.judging.rows import row_of
from drover_core.model.events import Event
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")

RECORDS = "records"  # what is written, in logs and troubles
JUDGED_EARLY = 100_000  # ids of events that were judged before they were stored
PAUSE_S = 0.25  # between writes of events, however many arrive: each costs the store some 50 ms
INVENTORIES = 20_000  # that wait

Finish = Callable[[Sequence[PendingMessage], bool, MemoryBudget], None]


class EventWriter:
    """The queue of the events lane. Event loop only; the store is called in threads.

    Args:
        finish: called with messages that are durable (True) or given up (False).
    Attributes:
        urgent: set when something arrived that an agent or the detectors wait for, or much.
    """

    def __init__(self, context: IngestContext, retrier: StoreRetrier, offsets: LaneOffsets, finish: Finish) -> None:
        self._context, self._retrier, self._offsets, self._finish = context, retrier, offsets, finish
        self.room = MemoryBudget(context.limits.record_bytes)
        self.arrived = asyncio.Event()
        self.urgent = asyncio.Event()
        self._written_s = 0.0  # end of the newest turn
        self._queue: list[PendingMessage] = []
        self._in_progress: list[PendingMessage] = []
        self._judged_early: RecentlyUsed[str, None] = RecentlyUsed(JUDGED_EARLY)  # and not stored then
        self._inventories: RecentlyUsed[str, tuple[str, int, dict[str, str]]] = RecentlyUsed(INVENTORIES)

    def put(self, message: PendingMessage) -> None:
        """Queue a record. While the store fails, its event is judged at once."""
        if self._retrier.failing:
            self.judge_early([message])
        self.room.grow(message.account, message.size)
        self._queue.append(message)
        self.arrived.set()
        if message.urgent or self.room.filling:
            self.urgent.set()

    def put_inventory(self, node: str, ts_ms: int, inventory: dict[str, str]) -> None:
        """Queue a node's inventory. It is not acknowledged: the next Hello repeats it."""
        self._inventories[node] = (node, ts_ms, inventory)
        self.arrived.set()

    def tick(self) -> None:
        """Judge events that the store delays. Call twice a second or so."""
        due_s = time.monotonic() - self._context.limits.judge_s
        self.judge_early([m for m in (*self._in_progress, *self._queue) if m.received_s <= due_s])

    async def turn(self) -> bool:
        """Store what waits. Return True after the last turn."""
        await self.arrived.wait()
        await self._wait_for_more()
        work, self._queue = self._queue, []
        if not work and not self._inventories:
            self.arrived.clear()
            return self._retrier.closing
        self._in_progress = work
        durable = False
        try:
            await self._store(work)
            durable = True
        finally:
            self._in_progress = []
            self._finish(work, durable, self.room)
            self._written_s = time.monotonic()
        inventories = [value for _, value in self._inventories.items()]
        if inventories:
            self._inventories = RecentlyUsed(INVENTORIES)
            write = self._context.store.inventories.write
            await self._retrier.until_stored(RECORDS, write, inventories, lambda _: None)
        return False

    async def _store(self, work: Sequence[PendingMessage]) -> None:
        new: dict[tuple[tuple[str, str], int], PendingMessage] = {}
        old: list[PendingMessage] = []
        for message in work:  # the same record may have arrived on two streams
            if message.record is not None:
                if self._is_stored(message):
                    old.append(message)
                else:
                    new[message.key, message.seq] = message
        todo = list(new.values())
        for _, changed in await self._retrier.store_each(RECORDS, self._find_changed, old):
            todo += changed
        for part, _ in await self._retrier.store_each(RECORDS, self._write, todo, self.judge_early):
            self._hand_on(part)
        for message in work:
            if message.key[0]:
                self._offsets.advance(message.key, pb.EVENTS, message.seq)

    async def _wait_for_more(self) -> None:
        """Wait so that records are stored together. An event waits only if many arrive."""
        flush_s = self._context.limits.flush_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(flush_s):
                await self.urgent.wait()
        await asyncio.sleep(self._written_s + min(PAUSE_S, flush_s) - time.monotonic())
        if not self._retrier.closing:
            self.urgent.clear()

    def judge_early(self, work: Sequence[PendingMessage]) -> None:
        """Pass events on that are not stored, each once."""
        fresh: dict[str, Event] = {}
        for message in work:
            event = message.record.event if message.record is not None else None
            if event is not None and not self._is_stored(message) and event.id not in self._judged_early:
                fresh[event.id] = event
        if fresh:
            for id_ in fresh:
                self._judged_early[id_] = None
            self._context.stats.unstored_events = len(self._judged_early)
            listeners = self._context.listeners
            self._notify(listeners.on_unstored or listeners.on_stored, list(fresh.values()))

    def _is_stored(self, message: PendingMessage) -> bool:
        return message.seq <= self._offsets.get(message.key).get(pb.EVENTS, 0)

    def _find_changed(self, work: Sequence[PendingMessage]) -> list[PendingMessage]:
        """Return the records that differ from the stored ones with their sequence, under an id of their own.

        An agent whose spool is restored from a backup reuses its sequences. Absences and holdings are identified by
        their content, and may be stored again.
        """
        found: list[PendingMessage] = []
        ids: set[str] = set()
        for message in work:
            record = message.record
            if record is None or record.event is None:
                found.append(message)
                continue
            event = record.event
            held = self._context.store.events.read(event.ts_ms, event.ts_ms + 1, event.node, limit=10_000)
            if _content(event) not in {_content(other) for other in held}:
                digest = hashlib.blake2b(repr(_content(event)).encode(), digest_size=4).hexdigest()
                event = replace(event, id=f"{event.id}~{digest}")
                if event.id not in ids:
                    found.append(replace(message, record=ParsedRecord(event=event)))
                ids.add(event.id)
        return found

    def _write(self, work: Sequence[PendingMessage]) -> None:
        store, records = self._context.store, [message.record for message in work if message.record is not None]
        store.absences.write([r.absence for r in records if r.absence is not None])
        store.jobs.write_holdings([r.holding for r in records if r.holding is not None])
        if probes := [r.probe for r in records if r.probe is not None]:
            inventories = {node: store.inventories.newest(node) for node in {result.node for result in probes}}
            now_ms = self._context.now_ms()
            store.probes.results.write([row_of(result, inventories[result.node], now_ms) for result in probes])
        # Last: at a start the newest stored event shows how far its lane is, and so that all before it is stored.
        store.events.write([r.event for r in records if r.event is not None])

    def _hand_on(self, work: Sequence[PendingMessage]) -> None:
        """Pass stored records on; events that were judged early are not repeated."""
        stats, listeners = self._context.stats, self._context.listeners
        events = [m.record.event for m in work if m.record is not None and m.record.event is not None]
        fresh = [event for event in events if event.id not in self._judged_early]
        for event in events:
            self._judged_early.pop(event.id)
        stats.unstored_events = len(self._judged_early)
        stats.records += len(work)
        stats.events += len(events)
        if fresh:
            self._notify(listeners.on_stored, fresh)
        if probes := [m.record.probe for m in work if m.record is not None and m.record.probe is not None]:
            stats.probes += len(probes)
            self._notify(listeners.on_probes, probes)

    def _notify(self, listener: Callable[[list[T]], None], items: list[T]) -> None:
        try:
            listener(items)
        except Exception:  # they are stored: a defect of a listener must not make their agent resend them
            log.exception("%d records could not be passed on", len(items))


def _content(event: Event) -> tuple[object, ...]:
    return event.ts_ms, event.gpu, event.kind, event.code, event.message, event.source, event.backlog, event.count
