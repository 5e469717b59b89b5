"""Events, absences and holdings on their way into the store, and events on their way to be judged.

An event is stored, judged and acknowledged, in this order. A store that fails or hangs does not keep it from being
judged: it is judged once, in memory, and stored and acknowledged when the store works again (docs/decisions/0008).
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

from drover_collector.ingest.limits import Limits, MemoryBudget, Recent
from drover_collector.ingest.offsets import LaneOffsets
from drover_collector.ingest.parse_records import Taken
from drover_collector.ingest.session import Waiting
from drover_collector.ingest.stats import IngestStats
from drover_collector.ingest.store_retry import StoreRetrier
from drover_collector.probes.judging.rows import row_of
from drover_collector.store import Store
from drover_core.model.events import Event, ProbeResult
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

T = TypeVar("T")

RECORDS = "records"
REMEMBERED = 100_000  # ids of events that were judged before they were stored
STORM_S = 0.25  # between writes of events, however many come: each costs the store some 50 ms
INVENTORIES = 20_000  # waiting


class EventWriter:
    """The queue of the events lane. Used in the event loop; only the store works in threads.

    Args:
        on_events: is told of new events that are stored; on_unstored: of those that are not yet. Each is told once.
        on_probes: of results of probes that are stored.
        release: is told of messages that are done: durable, or else given up.
    """

    def __init__(
        self,
        store: Store,
        stats: IngestStats,
        limits: Limits,
        storing: StoreRetrier,
        positions: LaneOffsets,
        on_events: Callable[[list[Event]], None],
        on_unstored: Callable[[list[Event]], None],
        on_probes: Callable[[list[ProbeResult]], None],
        now_ms: Callable[[], int],
        release: Callable[[Sequence[Waiting], bool, MemoryBudget], None],
    ) -> None:
        self._store, self._stats, self._storing, self._positions = store, stats, storing, positions
        self._limits, self._release = limits, release
        self.on_events, self._on_unstored, self._on_probes = on_events, on_unstored, on_probes
        self._now_ms = now_ms
        self.room = MemoryBudget(limits.record_bytes)
        self.came = asyncio.Event()
        self.urgent = asyncio.Event()  # something came that somebody waits for, or much
        self._rested_s = 0.0  # when the newest turn ended
        self._queue: list[Waiting] = []
        self._under_way: list[Waiting] = []
        self._early: Recent[str, None] = Recent(REMEMBERED)  # judged, and not stored when they were
        self._inventories: Recent[str, tuple[str, int, dict[str, str]]] = Recent(INVENTORIES)

    def put(self, waiting: Waiting) -> None:
        """Take a record in. While the store fails, its event is judged at once."""
        if self._storing.failing:
            self.judge_early([waiting])
        self.room.grow(waiting.account, waiting.size)
        self._queue.append(waiting)
        self.came.set()
        if waiting.urgent or self.room.filling:
            self.urgent.set()

    def put_inventory(self, node: str, ts_ms: int, inventory: dict[str, str]) -> None:
        """What a node is made of. Not acknowledged: its next Hello tells it again."""
        self._inventories[node] = (node, ts_ms, inventory)
        self.came.set()

    def tick(self) -> None:
        """Now and then: events that the store keeps waiting are judged."""
        due_s = time.monotonic() - self._limits.judge_s
        self.judge_early([w for w in (*self._under_way, *self._queue) if w.came_s <= due_s])

    async def turn(self) -> bool:
        """Store what waits. True: that was the last."""
        await self.came.wait()
        await self._company()
        work, self._queue = self._queue, []
        if not work and not self._inventories:
            self.came.clear()
            return self._storing.closing
        self._under_way = work
        new: dict[tuple[tuple[str, str], int], Waiting] = {}
        old: list[Waiting] = []
        for waiting in work:  # the same one may have come on two streams
            if waiting.record is not None:
                if waiting.seq > self._positions.of(waiting.key).get(pb.EVENTS, 0):
                    new[waiting.key, waiting.seq] = waiting
                else:
                    old.append(waiting)
        acknowledged = False
        try:
            todo = list(new.values())
            for _, unlike in await self._storing.each(RECORDS, self._unlike_held, old):
                todo += unlike
            for part, _ in await self._storing.each(RECORDS, self._write, todo, self.judge_early):
                self._hand_on(part)
            for waiting in work:
                if waiting.key[0]:
                    self._positions.advance(waiting.key, pb.EVENTS, waiting.seq)
            acknowledged = True
        finally:
            self._under_way = []
            self._release(work, acknowledged, self.room)
            self._rested_s = time.monotonic()
        inventories = [value for _, value in self._inventories.items()]
        if inventories:
            self._inventories = Recent(INVENTORIES)
            await self._storing.until_stored(RECORDS, self._store.inventories.write, inventories, lambda _: None)
        return False

    async def _company(self) -> None:
        """Wait for more. An event waits only in a storm of them; a thousand agents that say what runs on them are
        stored together."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.flush_s):
                await self.urgent.wait()
        await asyncio.sleep(self._rested_s + min(STORM_S, self._limits.flush_s) - time.monotonic())
        if not self._storing.closing:
            self.urgent.clear()

    def judge_early(self, work: Sequence[Waiting]) -> None:
        """Have events judged that are not stored. Each once: its id is remembered."""
        fresh: dict[str, Event] = {}
        for waiting in work:
            event = waiting.record.event if waiting.record is not None else None
            known = event is None or waiting.seq <= self._positions.of(waiting.key).get(pb.EVENTS, 0)
            if event is not None and not known and event.id not in self._early:
                fresh[event.id] = event
        if fresh:
            for id_ in fresh:
                self._early[id_] = None
            self._stats.unstored_events = len(self._early)
            self._tell(self._on_unstored, list(fresh.values()))

    def _unlike_held(self, work: Sequence[Waiting]) -> list[Waiting]:
        """Of records whose sequence is held, those that are something else: an agent whose spool came out of a backup
        gives its sequences out again. Absences and holdings are told by their content, and may be stored again."""
        found: list[Waiting] = []
        told: set[str] = set()
        for waiting in work:
            taken = waiting.record
            if taken is None or taken.event is None:
                found.append(waiting)
                continue
            event = taken.event
            held = self._store.events.read(event.ts_ms, event.ts_ms + 1, event.node, limit=10_000)
            if _content(event) not in {_content(other) for other in held}:
                digest = hashlib.blake2b(repr(_content(event)).encode(), digest_size=4).hexdigest()
                event = replace(event, id=f"{event.id}~{digest}")
                if event.id not in told:
                    found.append(replace(waiting, record=Taken(event=event)))
                told.add(event.id)
        return found

    def _write(self, work: Sequence[Waiting]) -> None:
        taken = [waiting.record for waiting in work if waiting.record is not None]
        self._store.absences.write([t.absence for t in taken if t.absence is not None])
        self._store.jobs.write_holdings([t.holding for t in taken if t.holding is not None])
        if probes := [t.probe for t in taken if t.probe is not None]:
            made_of = {node: self._store.inventories.newest(node) for node in {result.node for result in probes}}
            now_ms = self._now_ms()
            self._store.probes.results.write([row_of(result, made_of[result.node], now_ms) for result in probes])
        # Last: at a start the newest event that is stored tells how far its lane is, and what came before it with it.
        self._store.events.write([t.event for t in taken if t.event is not None])

    def _hand_on(self, work: Sequence[Waiting]) -> None:
        """These are stored: those that were not judged before are."""
        events = [w.record.event for w in work if w.record is not None and w.record.event is not None]
        fresh = [event for event in events if event.id not in self._early]
        for event in events:
            self._early.pop(event.id)
        self._stats.unstored_events = len(self._early)
        self._stats.records += len(work)
        self._stats.events += len(events)
        if fresh:
            self._tell(self.on_events, fresh)
        if probes := [w.record.probe for w in work if w.record is not None and w.record.probe is not None]:
            self._stats.probes += len(probes)
            self._tell(self._on_probes, probes)

    def _tell(self, listener: Callable[[list[T]], None], told: list[T]) -> None:
        try:
            listener(told)
        except Exception:
            log.exception("%d records could not be handed on", len(told))


def _content(event: Event) -> tuple[object, ...]:
    return event.ts_ms, event.gpu, event.kind, event.code, event.message, event.source, event.backlog, event.count
