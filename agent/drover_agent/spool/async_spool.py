"""The spool as the event loop uses it: no call here waits for the disk.

A record gets its sequence here and stays in memory until the disk thread (`disk_thread.py`) has written it; only then
may it be sent. If the disk does not answer for DISK_LIMIT_S, records are sent from memory and written when the disk is
back. Memory is bounded: above the bound the oldest record goes, and is counted as lost if no collector holds it.

At most one write, one read for each lane and one Welcome wait for the disk thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from pathlib import Path

from drover_agent.clock import Clock
from drover_agent.config import SpoolConfig
from drover_agent.spool.backfill import BackfillPlan
from drover_agent.spool.disk_jobs import DiskStatus, Files, StateFile, WriteJob, WriteResult, read, write
from drover_agent.spool.disk_thread import DiskThread
from drover_agent.spool.memory import MemoryTail, ReadAhead
from drover_agent.spool.messages import Outgoing, outgoing
from drover_agent.spool.record_format import Stored
from drover_agent.spool.spool import LANES, Losses, Spool
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

DISK_LIMIT_S = 2.0  # a disk that is silent for so long must not keep an event from leaving
CLOSE_LIMIT_S = 5.0
MEMORY_BYTES = 4 * 2**20  # of events, and of telemetry, while the disk does not answer
CACHE_BYTES = 2**20  # of each, on the disk and not acknowledged: sent again without reading
MAX_REJECTED = 10_000


class WriteState(Enum):
    """What the spool's writing does now."""

    IDLE = auto()
    SCHEDULED = auto()  # begins when the event loop has finished what it does now
    WRITING = auto()
    OVERDUE = auto()  # the disk thread has not answered for DISK_LIMIT_S
    CLOSED = auto()


@dataclass(slots=True)
class Lanes:
    """What is sent under which sequences.

    Attributes:
        spool_id: the id under which sequences are counted.
        plan: which batches go out on the BACKFILL lane.
        held: lane -> the highest sequence that the collector holds.
        rejected: (lane, sequence) of what the collector refused for good.
    """

    spool_id: str
    plan: BackfillPlan
    held: dict[int, int]
    rejected: set[tuple[int, int]] = field(default_factory=set)


@dataclass(slots=True)
class Counts:
    """Records and bytes that no collector holds and that are not in memory, and what was lost.

    `evicted` is the part of `waiting` that left memory while a write ran, which that write has not counted.
    """

    waiting: tuple[int, int]
    losses: Losses
    evicted: tuple[int, int] = (0, 0)

    def evict(self, size: int) -> None:
        """Count a record that left memory and waits on the disk."""
        self.waiting = self.waiting[0] + 1, self.waiting[1] + size
        self.evicted = self.evicted[0] + 1, self.evicted[1] + size

    def apply(self, result: WriteResult) -> None:
        """Take over what a write counted."""
        if result.losses:
            self.losses.add(result.losses)
        self.waiting = result.waiting[0] + self.evicted[0], result.waiting[1] + self.evicted[1]


@dataclass(slots=True)
class Chores:
    """What the next write does besides writing records: state files, removing old files, counting."""

    files: Files = field(default_factory=dict)
    tidy: bool = False
    count: bool = False

    def __bool__(self) -> bool:
        return bool(self.files) or self.tidy or self.count


class SpoolClock:
    """Wall time for a Welcome, and steady time for ages: a wall clock that jumps ahead must not make records old."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_ms, self._started_s = clock.now_ms(), clock.monotonic()

    def wall_ms(self) -> int:
        return self._clock.now_ms()

    def steady_ms(self) -> int:
        return self._started_ms + round((self._clock.monotonic() - self._started_s) * 1000)


class AsyncSpool:
    """The spool of one agent. For the event loop's thread only.

    Raises (at construction, which reads the folder and may wait for the disk):
        SpoolError: the folder cannot be used.
    """

    def __init__(
        self,
        config: SpoolConfig,
        clock: Clock,
        disk: DiskThread | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            disk: the thread that writes; None: a thread of its own, which `close` ends.
            on_ready: called when there may be something to send.
        """
        self._time = SpoolClock(clock)
        self._spool = Spool(config, self._time.steady_ms())
        self._owns_disk = disk is None
        self._disk = disk or DiskThread()
        self._on_ready = on_ready
        self._state = WriteState.IDLE
        self._status = DiskStatus.of(self._spool)
        self._lanes = Lanes(self._spool.id, self._spool.plan, dict(self._spool.held))
        self._counts = Counts(self._spool.pending(), self._spool.take_losses() or Losses())
        self._chores = Chores()
        self.events = MemoryTail.behind(self._spool.events.next_seq)
        self.telemetry = MemoryTail.behind(self._spool.telemetry.next_seq)
        self._ahead = {
            lane: ReadAhead(lane, self._tail(lane), partial(self._start_read, lane), on_ready) for lane in LANES
        }
        self._waiters: deque[tuple[int, int, Callable[[], None]]] = deque()  # (event, batch, what to call)

    @property
    def folder(self) -> Path:
        return self._spool.folder

    @property
    def id(self) -> str:
        return self._lanes.spool_id

    @property
    def held(self) -> dict[int, int]:
        """Lane -> the highest sequence that the collector holds."""
        return self._lanes.held

    @property
    def is_hung(self) -> bool:
        """Whether the disk does not answer now."""
        return self._state is WriteState.OVERDUE

    @property
    def status(self) -> DiskStatus:
        return self._status

    @property
    def _tails(self) -> tuple[MemoryTail, MemoryTail]:
        return self.telemetry, self.events

    def _tail(self, lane: int) -> MemoryTail:
        return self.events if lane == pb.EVENTS else self.telemetry

    # ---- in

    def add_record(self, ts_ms: int, record: pb.Record) -> None:
        """Store an event, absence or holding. Its sequence is set here."""
        self._add(self.events, ts_ms, record.SerializeToString())

    def add_batch(self, ts_ms: int, blocks: Sequence[pb.Block]) -> None:
        """Store one batch; `ts_ms` is the time of its newest row."""
        self._add(self.telemetry, ts_ms, pb.Batch(blocks=blocks).SerializeToString())

    def _add(self, tail: MemoryTail, ts_ms: int, payload: bytes) -> None:
        tail.add(ts_ms, payload)
        self._trim(tail)
        if self.is_hung:
            self._release_all()
        self._schedule()

    def write_file(self, name: str, data: bytes, *, before_records: bool) -> None:
        """Replace a small state file, before or after the records that were added lately."""
        self._chores.files[name] = StateFile(data, before_records)
        self._schedule()

    def call_when_stored(self, then: Callable[[], None]) -> None:
        """Call `then` when all records added so far are on disk (events synced), or may be sent because it hangs."""
        self._waiters.append((self.events.last, self.telemetry.last, then))
        self._call_waiters()

    async def wait_stored(self) -> None:
        """Wait until all records added so far are on disk, or may be sent because it hangs."""
        done = asyncio.Event()
        self.call_when_stored(done.set)
        await done.wait()

    def tidy(self) -> None:
        """Remove old files and write what waits. Call it every few seconds."""
        self._chores.tidy = True
        self._schedule()

    # ---- writing

    def _schedule(self) -> None:
        """Begin one write for all that is added before the event loop's next turn."""
        if self._state is WriteState.IDLE:
            self._state = WriteState.SCHEDULED
            asyncio.get_running_loop().call_soon(self._start_write)

    def _start_write(self) -> None:
        if self._state is not WriteState.SCHEDULED:
            return
        self._state = WriteState.IDLE
        events, batches = self.events.submit(), self.telemetry.submit()
        if not (events or batches or self._chores):
            return
        job = self._write_job(events, batches, self._time.steady_ms() if self._chores.tidy else None)
        self._chores = Chores()
        self._counts.evicted = 0, 0
        self._state = WriteState.WRITING
        limit = asyncio.get_running_loop().call_later(DISK_LIMIT_S, self._mark_overdue)
        ends = self.events.submitted, self.telemetry.submitted
        running = self._disk.submit(lambda: write(self._spool, job))
        running.add_done_callback(lambda done: self._finish_write(done, job.files, ends, limit))

    def _write_job(self, events: list[Stored], batches: list[Stored], tidy_ms: int | None) -> WriteJob:
        below = self.telemetry.first, self.events.first
        return WriteJob(events, batches, self._chores.files, dict(self.held), below, tidy_ms)

    def _finish_write(
        self, job: asyncio.Future[WriteResult], files: Files, ends: tuple[int, int], limit: asyncio.TimerHandle
    ) -> None:
        limit.cancel()
        if job.cancelled() or self._state is WriteState.CLOSED:
            return
        if self.is_hung:
            log.warning("The spool's disk answers again: %s", self.folder)
        self._state = WriteState.IDLE
        error = job.exception()
        if error is None:
            self._apply(job.result())
        else:  # a defect in Drover, not a failure of the disk: the records are sent from memory
            log.error("Writing the spool failed: %s", error, exc_info=error)
            self._status = DiskStatus(
                f"{self.folder}: {error}", self._status.oldest_batch_ms, self._status.has_all_events
            )
            self._chores.files = files | self._chores.files
        for tail, end in zip((self.events, self.telemetry), ends, strict=True):
            tail.write_failed = error is not None  # the next addition starts another write
            if error is None:
                tail.written = max(tail.written, end)
            tail.released = max(tail.released, end)
            self._trim(tail)
        self._call_waiters()
        self._on_ready()
        if any(tail.submitted < tail.last for tail in self._tails) or self._chores.tidy or self._chores.count:
            self._schedule()

    def _apply(self, result: WriteResult) -> None:
        self._status = result.status
        self._chores.files = result.failed | self._chores.files
        self._counts.apply(result)
        self._chores.count |= self._counts.evicted[0] > 0  # some may have been counted twice

    def _mark_overdue(self) -> None:
        if self._state is not WriteState.WRITING:
            return
        log.error(
            "The spool's disk has not answered for %g s: %s. Data is sent from memory.", DISK_LIMIT_S, self.folder
        )
        self._state = WriteState.OVERDUE
        trouble = f"{self.folder}: the disk does not answer"
        self._status = DiskStatus(trouble, self._status.oldest_batch_ms, self._status.has_all_events)
        self._release_all()

    def _release_all(self) -> None:
        for tail in self._tails:
            tail.released = tail.last
        self._call_waiters()
        self._on_ready()

    def _call_waiters(self) -> None:
        while self._waiters and self._waiters[0][0] <= self.events.released:
            if self._waiters[0][1] > self.telemetry.released:
                return
            self._waiters.popleft()[2]()

    def _trim(self, tail: MemoryTail) -> None:
        """Remove from memory what is on disk and held or above CACHE_BYTES, and what is above MEMORY_BYTES."""
        held = self.held[pb.EVENTS] if tail is self.events else max(self.held[pb.LIVE], self._lanes.plan.through)
        while tail.records:
            oldest = tail.records[0]
            if oldest.seq <= tail.written:
                if oldest.seq > held and tail.size <= CACHE_BYTES:
                    return
                tail.pop()
                if oldest.seq > held:
                    tail.nothing_from = oldest.seq
                    self._counts.evict(len(oldest.payload))
                continue
            if tail.size <= MEMORY_BYTES or len(tail.records) == 1:
                return
            tail.pop()
            if oldest.seq > held:
                lost = Losses(events=1) if tail is self.events else Losses(telemetry=1)
                lost.reason = f"{self._status.trouble or self.folder}, and memory for it is full"
                self._counts.losses.add(lost)

    # ---- out

    def next(self, lane: int, after: int) -> Outgoing | None:
        """Return the first record or batch of a lane above `after` that may be sent now.

        None: there is none, or it is being read; `on_ready` is called when it was.
        """
        after = max(after, self.held[lane])
        while found := self._next(lane, after):
            if (lane, found.seq) not in self._lanes.rejected:
                return found
            after = found.seq
        return None

    def _next(self, lane: int, after: int) -> Outgoing | None:
        plan = self._lanes.plan
        if lane == pb.BACKFILL:
            return self._ahead[lane].next(after) if plan.after(after) else None
        tail = self._tail(lane)
        if lane == pb.LIVE:
            after = max(after, plan.through)
        if after < tail.nothing_from:
            return self._ahead[lane].next(after)
        record = tail.first_above(after)
        if record is None or record.seq > tail.released:
            return None
        return outgoing(lane, record.seq, record.payload)

    def _start_read(self, lane: int, after: int) -> asyncio.Future[list[Outgoing]]:
        held = dict(self.held)
        return self._disk.submit(lambda: read(self._spool, lane, after, held))

    async def apply_welcome(self, held: Mapping[int, int]) -> bool:
        """Take over what a collector holds, and move an old backlog to the BACKFILL lane.

        Returns:
            False if the stream must begin again: the collector holds sequences that this spool never gave out (a copied
            or restored folder), so the spool has a new id now.
        """
        given = self._given()
        known = all(held.get(lane, 0) <= given[lane] for lane in LANES)
        wanted, now_ms, late = dict(held), self._time.wall_ms(), False

        def work() -> None:
            if not late:
                if known:
                    self._spool.welcome(wanted, now_ms)
                else:
                    self._spool.new_identity()

        job = self._disk.submit(work)
        done, _ = await asyncio.wait([job], timeout=DISK_LIMIT_S)
        late = not done
        if not known:
            self._lanes = Lanes(self._spool.id, self._spool.plan, self.held)  # refused sequences begin again too
            self._set_held({})
            return False
        if not late:
            self._lanes.plan = self._spool.plan
        else:  # the backlog goes on in order until the plan that was begun is there
            job.add_done_callback(lambda _: self._apply_late_plan())
        self._set_held(held)
        return True

    def _apply_late_plan(self) -> None:
        """Go on by a plan that the disk thread finished after the stream began without it."""
        if self._state is not WriteState.CLOSED and self._lanes.plan is not self._spool.plan:
            self._lanes.plan = self._spool.plan
            self._follow_plan()
            self._on_ready()

    def _set_held(self, held: Mapping[int, int]) -> None:
        self._lanes.held = {lane: held.get(lane, 0) for lane in LANES}
        for tail in self._tails:  # the collector may ask again for what was held
            tail.nothing_from = min(tail.first - 1, tail.written)
        self._follow_plan()

    def _follow_plan(self) -> None:
        while self.telemetry.records and self.telemetry.first <= self._lanes.plan.through:
            self.telemetry.pop()
        for ahead in self._ahead.values():
            ahead.restart()
        self._chores.count = True
        self._schedule()

    def ack(self, lane: int, seq: int) -> bool:
        """Take over that the collector holds a lane up to `seq`. False: `seq` was never given out by this spool."""
        if lane not in self.held or seq <= self.held[lane]:
            return True
        if seq > self._given()[lane]:
            return False
        self.held[lane] = seq
        if self._lanes.rejected:
            self._lanes.rejected = {(at, number) for at, number in self._lanes.rejected if at != lane or number > seq}
        for tail in self._tails:
            self._trim(tail)
        if self._counts.waiting[0] or self._state in (WriteState.WRITING, WriteState.OVERDUE):
            self._chores.count = True  # a running write counts by what was held before
            self._schedule()
        return True

    def _given(self) -> dict[int, int]:
        """Return the last sequence of each lane that was given out."""
        return {pb.EVENTS: self.events.last, pb.LIVE: self.telemetry.last, pb.BACKFILL: self._lanes.plan.next_base - 1}

    def reject(self, lane: int, seq: int) -> None:
        """Never send this sequence again: the collector refuses it for good."""
        if seq > self.held.get(lane, 0) and len(self._lanes.rejected) < MAX_REJECTED:
            self._lanes.rejected.add((lane, seq))

    # ---- state

    def pending(self) -> tuple[int, int]:
        """Return (records, bytes) that no collector holds yet."""
        records, size = self._counts.waiting
        for tail, held in ((self.events, self.held[pb.EVENTS]), (self.telemetry, self.held[pb.LIVE])):
            waiting = [len(record.payload) for record in tail.records if record.seq > held]
            records += len(waiting)
            size += sum(waiting)
        return records, size

    def take_losses(self) -> Losses | None:
        """Return what was lost since the last call, None if nothing was."""
        losses, self._counts.losses = self._counts.losses, Losses()
        return losses if losses else None

    def close(self) -> None:
        """Write what waits and release the folder. Wait CLOSE_LIMIT_S at most, less if the disk hangs."""
        if self._state is WriteState.CLOSED:
            return
        limit_s = DISK_LIMIT_S if self.is_hung else CLOSE_LIMIT_S
        self._state = WriteState.CLOSED
        for ahead in self._ahead.values():
            ahead.close()
        last = self._write_job(self.events.submit(), self.telemetry.submit(), None)

        def work() -> None:
            write(self._spool, last)
            self._spool.close()

        if not self._disk.run_last(work, limit_s):
            log.error("The spool's disk did not answer at the end: %s. Data not yet written is lost.", self.folder)
        if self._owns_disk:
            self._disk.close()
