"""From the queues of ingest into the store: few large inserts of telemetry, events at once, and then the Acks.

Nothing is acknowledged before its insert has returned, which is when it survives a kill -9. A store that fails is tried
until it works; meanwhile the queues fill up to their bound and agents keep their data.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.ingest.acks import AckSender
from drover_collector.ingest.decode import Decoded, decode
from drover_collector.ingest.event_writer import RECORDS, EventWriter
from drover_collector.ingest.limits import (
    AgentAllowance,
    Limits,
    MemoryBudget,
    RateLimitedLogger,
)
from drover_collector.ingest.offsets import LaneOffsets
from drover_collector.ingest.session import Session, Waiting
from drover_collector.ingest.stats import IngestStats
from drover_collector.ingest.store_retry import Refuse, StoreRetrier
from drover_collector.store import Store, StoreError
from drover_collector.store.rollups.dirty_ranges import SLACK_MS
from drover_core.model.events import Event, ProbeResult
from drover_proto import telemetry_pb2 as pb

DAY_MS = 86_400_000
FEW = 8  # streams: their wait for company ends with a 20th of it in which nobody came. Of more, some always come
PARTS_OF_FEW, PARTS = 20, 4
# So many times as long waits what is less than this, 10 s of 5,000 GPUs: an insert of few rows costs as much as one of
# thousands, and so do its merges. Where nobody has looked at newest values for a minute there is one for each read of a
# bucket, before it by so many times what the last one took.
LITTLE_BYTES = 8 << 20
LITTLE_TIMES, UNSEEN_TIMES = 3, 10
SEEN_S = 60.0
AHEAD_TIMES = 3
TELEMETRY, POSITIONS = "telemetry", "lane positions"  # what is written, in logs and troubles


class TelemetryWriter:
    """Two tasks, one for telemetry and one for records. Used in the event loop; only the store works in threads.

    Args:
        known: nodes of the fleet file.
        refuse: is told of what the store's side refuses, before it is acknowledged.
        on_events: is told of new events once they are stored; on_unstored: of those that the store keeps waiting.
        on_probes: of results of probes that are stored.
    Attributes:
        freed: set when room was made.
    Raises:
        StoreError: the store cannot be read.
    """

    def __init__(
        self,
        store: Store,
        known: Mapping[str, object],
        stats: IngestStats,
        limits: Limits,
        now_ms: Callable[[], int],
        teller: RateLimitedLogger,
        refuse: Refuse,
        on_events: Callable[[list[Event]], None],
        on_unstored: Callable[[list[Event]], None],
        on_probes: Callable[[list[ProbeResult]], None],
    ) -> None:
        self._store, self._stats, self._limits, self._now_ms, self._teller = store, stats, limits, now_ms, teller
        self.positions = LaneOffsets(store, known)
        self.acks = AckSender(stats, self.positions.of, now_ms)
        self.storing = StoreRetrier(stats, limits, refuse)
        self.records = EventWriter(
            store,
            stats,
            limits,
            self.storing,
            self.positions,
            on_events,
            on_unstored,
            on_probes,
            now_ms,
            self._release,
        )
        self.room = MemoryBudget(limits.waiting_bytes)
        self.freed = asyncio.Event()
        self._telemetry: list[Waiting] = []
        self._bytes = 0  # in that list
        self._took_s = 0.0  # the newest insert
        self._came = asyncio.Event()
        self._full = asyncio.Event()  # enough for an insert, no need to wait for company
        self._tasks: list[asyncio.Task[None]] = []

    def put(self, waiting: Waiting) -> None:
        """Take a message in. It is acknowledged on its session in its turn."""
        self._start()
        waiting.session.waiting += 1
        if waiting.lane == pb.EVENTS:
            self.records.put(waiting)
        else:
            self.room.grow(waiting.account, waiting.size)
            self._telemetry.append(waiting)
            self._bytes += waiting.size
            self._came.set()
            if self._bytes >= self._limits.flush_bytes:
                self._full.set()
        self._stats.waiting_bytes = self.room.used + self.records.room.used

    def put_inventory(self, node: str, ts_ms: int, inventory: dict[str, str]) -> None:
        """What a node is made of. Not acknowledged: its next Hello tells it again."""
        self.records.put_inventory(node, ts_ms, inventory)
        self._start()

    def tick(self) -> None:
        """Now and then."""
        self.records.tick()
        self.acks.tick()

    async def close(self) -> None:
        """Stores what waits, and where each lane stands. What a failing store does not take, the agents still have."""
        self.storing.closing = True
        for came in (self._came, self.records.came, self.records.urgent, self._full):
            came.set()
        await asyncio.gather(*self._tasks)
        await self._note_seqs()

    def _start(self) -> None:
        if not self._tasks:
            turns = {TELEMETRY: self._write_telemetry, RECORDS: self._write_records}
            self._tasks = [asyncio.create_task(self.storing.keep_on(name, turn)) for name, turn in turns.items()]

    # ---- telemetry

    async def _write_telemetry(self) -> bool:
        await self._came.wait()
        if not self._telemetry:
            self._came.clear()
            return self.storing.closing
        await self._company()
        work, began_s = self._next_insert(), time.monotonic()
        acknowledged = False
        try:
            batches = [waiting for waiting in work if waiting.batch is not None]
            for part, decoded in await self.storing.each(TELEMETRY, self._store_batches, batches):
                self._note_decoded(part, decoded)
            self._took_s = time.monotonic() - began_s
            for waiting in work:
                if waiting.key[0]:
                    self.positions.advance(waiting.key, waiting.lane, waiting.seq)
            acknowledged = True
        finally:
            self._release(work, acknowledged, self.room)
        await self._note_seqs_in_time()
        return False

    async def _company(self) -> None:
        """Wait while more comes: few large inserts cost less, and so do their merges.

        Little waits longer, but is stored before the next bucket is read: what came a second before that is in it.
        """
        began_s = now_s = time.monotonic()
        reads_in_s = (
            (self._store.dirty_ranges.lag_ms - self._now_ms()) % BUCKET_MS / 1000
        )  # the detectors, the next bucket
        while True:
            before, few = self._bytes, self._stats.connected < FEW
            seen = self._store.shared or now_s - self._store.last_query.at_s < SEEN_S
            lasts_s = waits_s(self._bytes, reads_in_s, self._took_s, seen, self._store.shared, self._limits)
            left_s = began_s + lasts_s - now_s
            if left_s <= 0:
                return
            part_s = self._limits.flush_s / (PARTS_OF_FEW if few else PARTS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(part_s, left_s)):
                    await self._full.wait()
            if self._full.is_set() or (few and self._bytes == before):
                return
            now_s = time.monotonic()

    def _next_insert(self) -> list[Waiting]:
        size = count = 0
        while count < len(self._telemetry) and (not count or size < self._limits.flush_bytes):
            size += self._telemetry[count].size
            count += 1
        work, self._telemetry = self._telemetry[:count], self._telemetry[count:]
        self._bytes -= size
        if self._bytes < self._limits.flush_bytes and not self.storing.closing:
            self._full.clear()
        return work

    def _store_batches(self, work: Sequence[Waiting]) -> Decoded:
        now_ms = self._now_ms()
        batches = [waiting.batch for waiting in work if waiting.batch is not None]
        decoded = decode(batches, now_ms - self._store.retention_days * DAY_MS, now_ms)
        self._store.entities.write(decoded.entities)  # first, or a read would meet samples of nobody
        for samples in decoded.samples:
            self._store.samples.write(samples)
            self._store.dirty_ranges.mark_late(samples, self._now_ms())
        decoded.mark_placed()
        return decoded

    def _note_decoded(self, work: Sequence[Waiting], decoded: Decoded) -> None:
        for number, refusal in decoded.refused.items():
            waiting = work[number]
            self.storing.refuse(waiting.session, waiting.lane, waiting.seq, refusal)
        stats = self._stats
        stats.batches += len(work) - len(decoded.refused)
        rows = sum(samples.rows for samples in decoded.samples)
        stats.rows += rows
        stats.insert_rows.observe(rows)
        stats.bytes += sum(waiting.size for waiting in work)
        stats.samples += decoded.present
        for (node, metric), count in decoded.out_of_range.items():
            stats.out_of_range[metric] += count
            text = "%s: %s came with values that cannot be true; they are stored as absent"
            self._teller.warn((node, metric), text, node, metric)

    # ---- records, and both

    async def _write_records(self) -> bool:
        last = await self.records.turn()
        await self._note_seqs_in_time()
        return last

    def _release(self, work: Sequence[Waiting], acknowledged: bool, room: MemoryBudget) -> None:
        """Makes room in the end, whatever happened: acknowledges, or else leaves it to the agents to send again."""
        done: Counter[Session] = Counter(waiting.session for waiting in work)
        awaited = {waiting.session for waiting in work if waiting.urgent}
        sizes: dict[AgentAllowance, int] = {}
        for waiting in work:
            sizes[waiting.account] = sizes.get(waiting.account, 0) + waiting.size
        for account, size in sizes.items():
            room.grow(account, -size)
        self._stats.waiting_bytes = self.room.used + self.records.room.used
        for session, count in done.items():
            self.acks.settle(session, count, acknowledged, at_once=session in awaited)
        self.freed.set()

    async def _note_seqs_in_time(self) -> None:
        if time.monotonic() - self.positions.saved_at >= self._limits.seqs_every_s:
            await self._note_seqs()

    async def _note_seqs(self) -> None:
        moved = self.positions.take_unsaved()
        try:
            await asyncio.to_thread(self._store.offsets.write, moved)
        except StoreError as error:
            self.positions.give_back(moved)
            self.storing.trouble(POSITIONS, error)
        else:
            self.storing.well(POSITIONS)


def waits_s(size: int, reads_in_s: float, took_s: float, seen: bool, shared: bool, limits: Limits) -> float:
    """How long telemetry waits for company.

    Args:
        size: bytes that wait. reads_in_s: how long after the wait began the next bucket is read.
        took_s: what the insert before it took. seen: somebody looks at newest values.
        shared: what comes just before a read counts as missed by it.
    """
    if size >= LITTLE_BYTES:
        return limits.flush_s
    ahead_s = limits.flush_s * (1 + 1 / PARTS_OF_FEW) + (SLACK_MS / 1000 if shared else 0)
    if reads_in_s < limits.flush_s:  # it misses this one
        reads_in_s += BUCKET_MS / 1000
    most_s = limits.flush_s * (LITTLE_TIMES if seen else UNSEEN_TIMES)
    return max(limits.flush_s, min(most_s, reads_in_s - max(ahead_s, AHEAD_TIMES * took_s)))
