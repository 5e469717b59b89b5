"""From the queues of ingest into the store: few large inserts of telemetry, events at once, and then the Acks.

Nothing is acknowledged before its insert has returned, which is when it survives a kill -9. A store that fails is tried
until it works; meanwhile the queues fill up to their bound and agents keep their data.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
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
SPOOLS = 16  # of one node, whose positions are kept in memory
TELEMETRY, RECORDS, POSITIONS = "telemetry", "records", "lane positions"  # what is written, in logs and troubles


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of memory and delay."""

    flush_s: float = 0.25  # how long telemetry waits for company
    flush_bytes: int = 16 << 20  # of one insert; about 30,000 GPUs x 5 s
    waiting_bytes: int = 64 << 20  # taken in and not stored, of all agents
    batch_bytes: int = 8 << 20  # of one batch
    retry_s: float = 1.0  # after the store has failed
    backoff_ms: int = 2_000  # what agents are asked to wait when too much waits here
    hello_s: float = 30.0  # a stream that has not said by then who it is ends
    denied_every_s: float = 5.0  # how often the certificate of an open stream is looked up among the denied
    hello_bytes: int = 4 << 20  # of one Hello; 16 GPUs take 5 kB
    unknown_nodes: int = 10_000  # nodes that are not in the fleet file
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
        self._spools: dict[str, list[tuple[str, str]]] = {}  # of each node, in the order in which they came
        for key in self.held:
            self._spools.setdefault(key[0], []).append(key)
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
            turns = {TELEMETRY: self._write_telemetry, RECORDS: self._write_records}
            self._tasks = [asyncio.create_task(self._keep_on(name, turn)) for name, turn in turns.items()]

    async def _keep_on(self, name: str, turn: Callable[[], Awaitable[bool]]) -> None:
        """Turn after turn until one says that it was the last. A defect of ours costs a turn, and is told."""
        while True:
            try:
                if await turn():
                    return
            except _GivenUpError:
                return
            except Exception as error:  # noqa: BLE001  # this task must not die; _defect logs it with its traceback
                self._defect(name, error)
                await asyncio.sleep(self._limits.retry_s)

    def _defect(self, name: str, error: Exception) -> None:
        self._stats.defects += 1
        self._stats.defect = f"{name}: {type(error).__name__}"
        log.error("%s could not be taken in", name, exc_info=error)

    # ---- telemetry

    async def _write_telemetry(self) -> bool:
        await self._telemetry_came.wait()
        if not self._telemetry:
            self._telemetry_came.clear()
            return self._closing
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._full.wait(), self._limits.flush_s)
        work = self._next_insert()
        with self._released(work):
            batches = [waiting for waiting in work if waiting.batch is not None]
            for part, decoded in await self._store_each(TELEMETRY, self._store_batches, batches):
                self._note_decoded(part, decoded)
            self._mark_held(work)
        await self._note_seqs_in_time()
        return False

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

    async def _write_records(self) -> bool:
        await self._records_came.wait()
        work, self._records = self._records, []
        if not work and not self._inventories:
            self._records_came.clear()
            return self._closing
        new: dict[tuple[tuple[str, str], int], Waiting] = {}
        for waiting in work:  # the same one may have come on two streams
            if waiting.record is not None and waiting.seq > self.held.get(waiting.key, {}).get(pb.EVENTS, 0):
                new[waiting.key, waiting.seq] = waiting
        with self._released(work):
            for part, _ in await self._store_each(RECORDS, self._store_records, list(new.values())):
                self._hand_on([w.record for w in part if w.record is not None])
            self._mark_held(work)
        inventories, self._inventories = list(self._inventories.values()), {}
        if inventories:
            await self._until_stored(RECORDS, self._store.write_inventories, inventories)
        await self._note_seqs_in_time()
        return False

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
        self, name: str, call: Callable[[Sequence[Waiting]], R], work: list[Waiting]
    ) -> list[tuple[list[Waiting], R]]:
        """(part of the work, what storing it gave). What makes `call` fail is found, and refused alone.

        Raises:
            _GivenUpError: the store takes nothing, and we are closing.
        """
        if not work:
            return []
        try:
            return [(work, await self._until_stored(name, call, work))]
        except _GivenUpError:
            raise
        except Exception as error:  # noqa: BLE001  # _defect logs it with its traceback
            self._defect(name, error)
            if len(work) == 1:
                one = work[0]
                text = f"this collector failed on it ({type(error).__name__}); its log says how"
                self._refuse(one.session, one.lane, one.seq, Refusal("collector error", text))
                return []
            return [result for one in work for result in await self._store_each(name, call, [one])]

    async def _until_stored(self, name: str, call: Callable[[Sequence[T]], R], work: list[T]) -> R:
        while True:
            started = self._stats.writing[name] = time.monotonic()
            try:
                result = await asyncio.to_thread(call, work)
            except StoreError as error:
                self._trouble(name, error)
                if self._closing:
                    raise _GivenUpError from error
                await asyncio.sleep(self._limits.retry_s)
            else:
                self._stats.write_seconds = time.monotonic() - started
                self._stats.troubles.pop(name, None)
                return result
            finally:
                self._stats.writing.pop(name, None)

    def _mark_held(self, work: Sequence[Waiting]) -> None:
        """These are durable now, or refused."""
        for waiting in work:
            if waiting.key[0]:
                held = self.held.get(waiting.key)
                if held is None:
                    held = self.held[waiting.key] = {}
                    self._forget_spools(waiting.key)
                held[waiting.lane] = max(held.get(waiting.lane, 0), waiting.seq)
                self._unsaved.add(waiting.key)

    def _forget_spools(self, newest: tuple[str, str]) -> None:
        """An agent that makes spool after spool is remembered by its newest ones; a resend changes no answer."""
        spools = self._spools.setdefault(newest[0], [])
        spools.append(newest)
        if len(spools) > SPOOLS:
            oldest = spools.pop(0)
            self.held.pop(oldest, None)
            self._unsaved.discard(oldest)

    @contextlib.contextmanager
    def _released(self, work: Sequence[Waiting]) -> Iterator[None]:
        """Makes room in the end, whatever happens: acknowledges, or else leaves it to the agents to send again."""
        done = Counter(waiting.session for waiting in work)
        acknowledged = False
        try:
            yield
            acknowledged = True
        finally:
            self._grow(-sum(waiting.size for waiting in work))
            now_ms = self._now_ms()
            for session, count in done.items():
                if acknowledged:
                    session.acknowledge(self.held.get((session.node, session.spool), {}), count, now_ms)
                else:
                    session.give_up(count)

    async def _note_seqs_in_time(self) -> None:
        if time.monotonic() - self._saved_at >= self._limits.seqs_every_s:
            await self._note_seqs()

    async def _note_seqs(self) -> None:
        self._saved_at = time.monotonic()
        keys, self._unsaved = self._unsaved, set()
        try:
            await asyncio.to_thread(
                self._store.write_lane_seqs, {key: dict(self.held[key]) for key in keys if key in self.held}
            )
        except StoreError as error:
            self._unsaved |= keys & self.held.keys()
            self._trouble(POSITIONS, error)
        else:
            self._stats.troubles.pop(POSITIONS, None)

    def _trouble(self, name: str, error: StoreError) -> None:
        """Count a failure of the store, and log it once until it changes."""
        self._stats.store_failures += 1
        if self._stats.troubles.get(name) != str(error):
            log.error("%s not stored, tried again until it is: %s", name, error)
        self._stats.troubles[name] = str(error)

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
