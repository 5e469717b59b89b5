"""From the queues of ingest into the store: few large inserts of telemetry, events at once, and then the Acks.

Nothing is acknowledged before its insert has returned, when it survives a kill -9. A failing store is tried until it
works; meanwhile the queues fill up to their limit, and agents keep their data.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence

from drover_collector.fleet.buckets import BUCKET_MS
from drover_collector.ingest.acks import AckSender
from drover_collector.ingest.context import IngestContext
from drover_collector.ingest.decode import Decoded, decode
from drover_collector.ingest.event_writer import RECORDS, EventWriter
from drover_collector.ingest.limits import AgentAllowance, Limits, MemoryBudget
from drover_collector.ingest.offsets import LaneOffsets
from drover_collector.ingest.session import PendingMessage, Session
from drover_collector.ingest.store_retry import StoreRetrier
from drover_collector.store import StoreError
from drover_collector.store.rollups.dirty_ranges import SLACK_MS
from drover_proto import telemetry_pb2 as pb

DAY_MS = 86_400_000
FEW = 8  # streams: telemetry waits until nothing arrived in a 20th of the flush time. With more, some always arrives
PARTS_OF_FEW, PARTS = 20, 4
# Less than LITTLE_BYTES (10 s of 5,000 GPUs) waits several times as long: an insert of few rows costs as much as one of
# thousands, and so do its merges. While nobody reads newest values (for SEEN_S) there is one insert for each read of a
# bucket, early enough for AHEAD_TIMES the duration of the last insert.
LITTLE_BYTES = 8 << 20
LITTLE_TIMES, UNSEEN_TIMES = 3, 10
SEEN_S = 60.0
AHEAD_TIMES = 3
TELEMETRY, OFFSETS = "telemetry", "lane positions"  # what is written, in logs and troubles


class TelemetryWriter:
    """Two tasks, one for telemetry and one for records. Event loop only; the store is called in threads.

    Attributes:
        room_freed: set when messages have left memory.
    Raises:
        StoreError: the store cannot be read.
    """

    def __init__(self, context: IngestContext) -> None:
        self._context = context
        self.offsets = LaneOffsets(context.store, context.index.node_number)
        self.acks = AckSender(context, self.offsets)
        self.retrier = StoreRetrier(context)
        self.events = EventWriter(context, self.retrier, self.offsets, self._finish)
        self.room = MemoryBudget(context.limits.waiting_bytes)
        self.room_freed = asyncio.Event()
        self._queue: list[PendingMessage] = []
        self._bytes = 0  # in the queue
        self._insert_s = 0.0  # duration of the newest insert
        self._arrived = asyncio.Event()
        self._full = asyncio.Event()  # there is enough for an insert
        self._tasks: list[asyncio.Task[None]] = []

    def put(self, message: PendingMessage) -> None:
        """Queue a message. It is acknowledged on its session when it is stored."""
        self._start()
        message.session.acks.waiting += 1
        if message.lane == pb.EVENTS:
            self.events.put(message)
        else:
            self.room.grow(message.account, message.size)
            self._queue.append(message)
            self._bytes += message.size
            self._arrived.set()
            if self._bytes >= self._context.limits.flush_bytes:
                self._full.set()
        self._context.stats.waiting_bytes = self.room.used + self.events.room.used

    def put_inventory(self, node: str, ts_ms: int, inventory: dict[str, str]) -> None:
        """Queue a node's inventory. It is not acknowledged: the next Hello repeats it."""
        self.events.put_inventory(node, ts_ms, inventory)
        self._start()

    def tick(self) -> None:
        """Send due Acks, and judge delayed events. Call twice a second or so."""
        self.events.tick()
        self.acks.send_due()

    async def close(self) -> None:
        """Store what waits, and the lane offsets. What a failing store does not accept is still with the agents."""
        self.retrier.closing = True
        for event in (self._arrived, self.events.arrived, self.events.urgent, self._full):
            event.set()
        await asyncio.gather(*self._tasks)
        await self._save_offsets()

    def _start(self) -> None:
        if not self._tasks:
            turns = {TELEMETRY: self._write_telemetry, RECORDS: self._write_records}
            self._tasks = [asyncio.create_task(self.retrier.run(name, turn)) for name, turn in turns.items()]

    # ---- telemetry

    async def _write_telemetry(self) -> bool:
        await self._arrived.wait()
        if not self._queue:
            self._arrived.clear()
            return self.retrier.closing
        await self._wait_for_more()
        work, began_s = self._next_insert(), time.monotonic()
        durable = False
        try:
            batches = [message for message in work if message.batch is not None]
            for part, decoded in await self.retrier.store_each(TELEMETRY, self._store_batches, batches):
                self._count(part, decoded)
            self._insert_s = time.monotonic() - began_s
            for message in work:
                if message.key[0]:
                    self.offsets.advance(message.key, message.lane, message.seq)
            durable = True
        finally:
            self._finish(work, durable, self.room)
        await self._save_offsets_if_due()
        return False

    async def _wait_for_more(self) -> None:
        """Wait while more arrives: few large inserts cost less, and so do their merges.

        A small amount waits longer, but is stored before the next bucket is read: what arrived up to a second before
        that is in it.
        """
        store, limits = self._context.store, self._context.limits
        began_s = now_s = time.monotonic()
        lag_ms = store.dirty_ranges.lag_ms  # the detectors read the next bucket so late
        next_read_s = (lag_ms - self._context.now_ms()) % BUCKET_MS / 1000
        while True:
            before, few = self._bytes, self._context.stats.connected < FEW
            seen = store.shared or now_s - store.last_query.at_s < SEEN_S
            wait_s = batching_s(self._bytes, next_read_s, self._insert_s, seen, store.shared, limits)
            left_s = began_s + wait_s - now_s
            if left_s <= 0:
                return
            part_s = limits.flush_s / (PARTS_OF_FEW if few else PARTS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(part_s, left_s)):
                    await self._full.wait()
            if self._full.is_set() or (few and self._bytes == before):
                return
            now_s = time.monotonic()

    def _next_insert(self) -> list[PendingMessage]:
        flush_bytes = self._context.limits.flush_bytes
        size = count = 0
        while count < len(self._queue) and (not count or size < flush_bytes):
            size += self._queue[count].size
            count += 1
        work, self._queue = self._queue[:count], self._queue[count:]
        self._bytes -= size
        if self._bytes < flush_bytes and not self.retrier.closing:
            self._full.clear()
        return work

    def _store_batches(self, work: Sequence[PendingMessage]) -> Decoded:
        store, now_ms = self._context.store, self._context.now_ms()
        batches = [message.batch for message in work if message.batch is not None]
        decoded = decode(batches, now_ms - store.retention_days * DAY_MS, now_ms)
        store.entities.write(decoded.entities)  # first, or a read would find samples without an entity
        for samples in decoded.samples:
            store.samples.write(samples)
            store.dirty_ranges.mark_late(samples, self._context.now_ms())
        decoded.mark_stored()
        return decoded

    def _count(self, work: Sequence[PendingMessage], decoded: Decoded) -> None:
        for number, refusal in decoded.refused.items():
            message = work[number]
            self._context.refuse(message.session, message.lane, message.seq, refusal)
        for number, refusal in decoded.left_out.items():
            self._context.count_refusal(work[number].session.node, refusal)
        stats = self._context.stats
        stats.batches += len(work) - len(decoded.refused)
        rows = sum(samples.rows for samples in decoded.samples)
        stats.rows += rows
        stats.insert_rows.observe(rows)
        stats.bytes += sum(message.size for message in work)
        stats.samples += decoded.present
        for (node, metric), count in decoded.out_of_range.items():
            stats.out_of_range[metric] += count
            text = "%s: %s has impossible values; they are stored as absent. Check the sensor."
            self._context.logger.warning((node, metric), text, node, metric)

    # ---- records, and both

    async def _write_records(self) -> bool:
        last = await self.events.turn()
        await self._save_offsets_if_due()
        return last

    def _finish(self, work: Sequence[PendingMessage], durable: bool, room: MemoryBudget) -> None:
        """Free the messages' memory, and acknowledge them if they are durable; else their agents resend them."""
        done: Counter[Session] = Counter(message.session for message in work)
        urgent = {message.session for message in work if message.urgent}
        sizes: dict[AgentAllowance, int] = {}
        for message in work:
            sizes[message.account] = sizes.get(message.account, 0) + message.size
        for account, size in sizes.items():
            room.grow(account, -size)
        self._context.stats.waiting_bytes = self.room.used + self.events.room.used
        for session, count in done.items():
            self.acks.settle(session, count, durable, at_once=session in urgent)
        self.room_freed.set()

    async def _save_offsets_if_due(self) -> None:
        if time.monotonic() - self.offsets.saved_at >= self._context.limits.seqs_every_s:
            await self._save_offsets()

    async def _save_offsets(self) -> None:
        moved = self.offsets.take_unsaved()
        try:
            await asyncio.to_thread(self._context.store.offsets.write, moved)
        except StoreError as error:
            self.offsets.give_back(moved)
            self.retrier.note_failure(OFFSETS, error)
        else:
            self.retrier.note_success(OFFSETS)


def batching_s(size: int, next_read_s: float, insert_s: float, seen: bool, shared: bool, limits: Limits) -> float:
    """Return how long telemetry waits for more, seconds.

    Args:
        size: bytes that wait. next_read_s: from the beginning of the wait to the next read of a bucket.
        insert_s: duration of the previous insert. seen: someone reads newest values.
        shared: other collectors write to the store: what arrives just before a read is missed by it.
    """
    if size >= LITTLE_BYTES:
        return limits.flush_s
    ahead_s = limits.flush_s * (1 + 1 / PARTS_OF_FEW) + (SLACK_MS / 1000 if shared else 0)
    if next_read_s < limits.flush_s:  # it misses this one
        next_read_s += BUCKET_MS / 1000
    most_s = limits.flush_s * (LITTLE_TIMES if seen else UNSEEN_TIMES)
    return max(limits.flush_s, min(most_s, next_read_s - max(ahead_s, AHEAD_TIMES * insert_s)))
