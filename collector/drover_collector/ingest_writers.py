"""From the queues of ingest into the store: few large inserts of telemetry, events at once, and then the Acks.

Nothing is acknowledged before its insert has returned, which is when it survives a kill -9. A store that fails is tried
until it works; meanwhile the queues fill up to their bound and agents keep their data.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from drover_collector.decode import Decoded, Refusal, decode
from drover_collector.ingest_session import Session, Waiting
from drover_collector.ingest_stats import IngestStats
from drover_collector.records import Taken
from drover_collector.store import Store, StoreError
from drover_proto import telemetry_pb2 as pb
from drover_proto.events import Event

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of memory and delay."""

    flush_s: float = 0.25  # how long telemetry waits for company
    flush_bytes: int = 16 << 20  # of one insert; about 30,000 GPUs x 5 s
    waiting_bytes: int = 64 << 20  # taken in and not stored, of all agents
    batch_bytes: int = 8 << 20  # of one batch
    retry_s: float = 1.0  # after the store has failed
    backoff_ms: int = 2_000  # what agents are asked to wait when too much waits here
    seqs_every_s: float = 5.0  # how often lane positions are noted; resends after a crash collapse anyway


class Writers:
    """Two tasks, one for telemetry and one for records. Used in the event loop; only the store works in threads.

    Args:
        refuse: is told of what the store's side refuses, before it is acknowledged.
        on_events: is told of new events once they are stored.
    Attributes:
        held: (node, spool id) -> lane -> the last sequence that is stored.
        room: set while more may be taken in.
    Raises:
        StoreError: the store cannot be read.
    """

    def __init__(
        self,
        store: Store,
        stats: IngestStats,
        limits: Limits,
        now_ms: Callable[[], int],
        refuse: Callable[[Session, pb.Lane.ValueType, int, Refusal], None],
        on_events: Callable[[list[Event]], None],
    ) -> None:
        self._store, self._stats, self._limits, self._now_ms = store, stats, limits, now_ms
        self._refuse, self._on_events = refuse, on_events
        self.held = store.read_lane_seqs()
        self.room = asyncio.Event()
        self.room.set()
        self._unsaved: set[tuple[str, str]] = set()  # whose position is not noted yet
        self._saved_at = time.monotonic()
        self._inventories: dict[str, tuple[str, int, dict[str, str]]] = {}
        self._telemetry: list[Waiting] = []
        self._records: list[Waiting] = []
        self._telemetry_came = asyncio.Event()
        self._records_came = asyncio.Event()
        self._full = asyncio.Event()  # enough for an insert, no need to wait for company
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._told: set[tuple[str, str]] = set()  # (node, metric) of values out of range that were logged

    def put(self, waiting: Waiting) -> None:
        """Take a message in. It is acknowledged on its session in its turn."""
        self._start()
        waiting.session.waiting += 1
        self._grow(waiting.size)
        if waiting.lane == pb.EVENTS:
            self._records.append(waiting)
            self._records_came.set()
        else:
            self._telemetry.append(waiting)
            self._telemetry_came.set()

    def put_inventory(self, node: str, ts_ms: int, inventory: dict[str, str]) -> None:
        """What a node is made of. Not acknowledged: its next Hello tells it again."""
        self._inventories[node] = (node, ts_ms, inventory)
        self._start()
        self._records_came.set()

    async def close(self) -> None:
        """Stores what waits, and where each lane stands. What a failing store does not take, the agents still have."""
        self._closing = True
        for came in (self._telemetry_came, self._records_came, self._full):
            came.set()
        await asyncio.gather(*self._tasks)
        await self._note_seqs()

    def _start(self) -> None:
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._write_telemetry()), asyncio.create_task(self._write_records())]

    # ---- telemetry

    async def _write_telemetry(self) -> None:
        while True:
            await self._telemetry_came.wait()
            if not self._telemetry:
                if self._closing:
                    return
                self._telemetry_came.clear()
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._full.wait(), self._limits.flush_s)
            work = self._next_insert()
            try:
                stored = await self._store_each(self._store_batches, [w for w in work if w.batch is not None])
            except _GivenUpError:
                return
            for part, decoded in stored:
                self._note_decoded(part, decoded)
            await self._acknowledge(work)

    def _next_insert(self) -> list[Waiting]:
        size = count = 0
        while count < len(self._telemetry) and (not count or size < self._limits.flush_bytes):
            size += self._telemetry[count].size
            count += 1
        work, self._telemetry = self._telemetry[:count], self._telemetry[count:]
        return work

    def _store_batches(self, work: Sequence[Waiting]) -> Decoded:
        now_ms = self._now_ms()
        batches = [waiting.batch for waiting in work if waiting.batch is not None]
        decoded = decode(batches, now_ms - self._store.retention_days * DAY_MS, now_ms)
        self._store.write_entities(decoded.entities)  # first, or a read would meet samples of nobody
        for samples in decoded.samples:
            self._store.write_samples(samples)
        decoded.mark_placed()
        return decoded

    def _note_decoded(self, work: Sequence[Waiting], decoded: Decoded) -> None:
        for number, refusal in decoded.refused.items():
            waiting = work[number]
            self._refuse(waiting.session, waiting.lane, waiting.seq, refusal)
        stats = self._stats
        stats.batches += len(work) - len(decoded.refused)
        stats.rows += sum(samples.rows for samples in decoded.samples)
        stats.samples += sum(samples.samples for samples in decoded.samples)
        for (node, metric), count in decoded.out_of_range.items():
            stats.out_of_range[metric] += count
            if (node, metric) not in self._told:
                self._told.add((node, metric))
                log.warning("%s: %s came with values that cannot be true; they are stored as absent", node, metric)

    # ---- records

    async def _write_records(self) -> None:
        while True:
            await self._records_came.wait()
            work, self._records = self._records, []
            inventories, self._inventories = list(self._inventories.values()), {}
            if not work and not inventories:
                if self._closing:
                    return
                self._records_came.clear()
                continue
            new: dict[tuple[tuple[str, str], int], Waiting] = {}
            for waiting in work:  # the same one may have come on two streams
                if waiting.record is not None and waiting.seq > self.held.get(waiting.key, {}).get(pb.EVENTS, 0):
                    new[waiting.key, waiting.seq] = waiting
            try:
                stored = await self._store_each(self._store_records, list(new.values()))
                if inventories:
                    await self._until_stored(self._store.write_inventories, inventories)
            except _GivenUpError:
                return
            for part, _ in stored:
                self._hand_on([w.record for w in part if w.record is not None])
            await self._acknowledge(work)

    def _store_records(self, work: Sequence[Waiting]) -> None:
        taken = [waiting.record for waiting in work if waiting.record is not None]
        self._store.write_events([t.event for t in taken if t.event is not None])
        self._store.write_absences([t.absence for t in taken if t.absence is not None])
        self._store.write_holdings([t.holding for t in taken if t.holding is not None])

    def _hand_on(self, taken: Sequence[Taken]) -> None:
        events = [t.event for t in taken if t.event is not None]
        self._stats.records += len(taken)
        self._stats.events += len(events)
        if events:
            try:
                self._on_events(events)
            except Exception:
                log.exception("%d events are stored, but could not be handed on", len(events))

    # ---- both

    async def _store_each(
        self, call: Callable[[Sequence[Waiting]], R], work: list[Waiting]
    ) -> list[tuple[list[Waiting], R]]:
        """(part of the work, what storing it gave). What makes `call` fail is found, and refused alone.

        Raises:
            _GivenUpError: the store takes nothing, and we are closing.
        """
        if not work:
            return []
        try:
            return [(work, await self._until_stored(call, work))]
        except _GivenUpError:
            raise
        except Exception as error:
            log.exception("%d messages could not be taken in", len(work))
            if len(work) == 1:
                one = work[0]
                text = f"this collector failed on it ({type(error).__name__}); its log says how"
                self._refuse(one.session, one.lane, one.seq, Refusal("collector error", text))
                return []
            return [result for one in work for result in await self._store_each(call, [one])]

    async def _until_stored(self, call: Callable[[Sequence[T]], R], work: list[T]) -> R:
        while True:
            started = time.monotonic()
            try:
                result = await asyncio.to_thread(call, work)
            except StoreError as error:
                self.trouble(error)
                if self._closing:
                    raise _GivenUpError from error
                await asyncio.sleep(self._limits.retry_s)
            else:
                self._stats.write_seconds = time.monotonic() - started
                self._stats.trouble = ""
                return result

    async def _acknowledge(self, work: Sequence[Waiting]) -> None:
        """What is durable now, or refused; and make room."""
        done: dict[Session, int] = {}
        for waiting in work:
            if waiting.key[0]:
                held = self.held.setdefault(waiting.key, {})
                held[waiting.lane] = max(held.get(waiting.lane, 0), waiting.seq)
                self._unsaved.add(waiting.key)
            done[waiting.session] = done.get(waiting.session, 0) + 1
        self._grow(-sum(waiting.size for waiting in work))
        now_ms = self._now_ms()
        for session, count in done.items():
            await session.acknowledge(self.held.get((session.node, session.spool), {}), count, now_ms)
        if time.monotonic() - self._saved_at >= self._limits.seqs_every_s:
            await self._note_seqs()

    async def _note_seqs(self) -> None:
        self._saved_at = time.monotonic()
        keys, self._unsaved = self._unsaved, set()
        try:
            await asyncio.to_thread(self._store.write_lane_seqs, {key: dict(self.held[key]) for key in keys})
        except StoreError as error:
            self._unsaved |= keys
            self.trouble(error)

    def trouble(self, error: StoreError) -> None:
        """Count a failure of the store, and log it once until it changes."""
        self._stats.store_failures += 1
        if self._stats.trouble != str(error):
            log.error("not stored, tried again until it is: %s", error)
        self._stats.trouble = str(error)

    def _grow(self, size: int) -> None:
        self._stats.waiting_bytes += size
        if self._stats.waiting_bytes >= self._limits.waiting_bytes:
            self.room.clear()
        else:
            self.room.set()
        if self._closing or self._stats.waiting_bytes >= self._limits.flush_bytes:
            self._full.set()
        else:
            self._full.clear()


class _GivenUpError(Exception):
    """The store takes nothing, and we are closing."""
