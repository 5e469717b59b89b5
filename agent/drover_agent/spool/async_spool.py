"""The spool as the event loop sees it: nothing here waits for the disk.

What the agent tells gets its sequence here and stays in memory until the spool's thread (`disk.py`) has it on disk;
only then may it be sent. A disk that does not answer for `DISK_LIMIT_S` holds nothing back: what is in memory is sent
from there, and is written when the disk is back. Memory is bounded; over it the oldest goes, and what nobody holds is
counted as lost.

At most one job that writes, one that reads for each lane and one for a Welcome wait for the thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from drover_agent.clock import Clock
from drover_agent.config import SpoolConfig
from drover_agent.spool.disk_jobs import (
    Done,
    Files,
    Sendable,
    read,
    write,
)
from drover_agent.spool.disk_thread import DiskThread
from drover_agent.spool.memory_tail import MemoryTail
from drover_agent.spool.read_ahead import ReadAhead
from drover_agent.spool.record_format import Stored
from drover_agent.spool.spool import (
    LANES,
    Losses,
    Spool,
    as_message,
)
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

DISK_LIMIT_S = 2.0  # a disk that is silent for so long must not keep an event from leaving
CLOSE_LIMIT_S = 5.0
MEMORY_BYTES = 4 * 2**20  # of events, and of telemetry, while the disk does not answer
CACHE_BYTES = 2**20  # of each, on disk and not acknowledged: sent again without reading
MAX_REJECTED = 10_000


class AsyncSpool:
    """Not thread-safe: for the event loop's thread.

    Raises (at construction, which reads the folder and so may wait for the disk):
        SpoolError: the folder cannot be used.
    """

    def __init__(self, config: SpoolConfig, clock: Clock, disk: DiskThread | None = None) -> None:
        self._clock = clock
        self._started_ms, self._started_s = clock.now_ms(), clock.monotonic()
        self._spool = Spool(config, self._started_ms)
        self._own_disk = disk is None
        self._disk = disk or DiskThread()
        self.folder: Path = self._spool.folder
        self.id, self.plan = self._spool.id, self._spool.plan
        self.held: dict[int, int] = dict(self._spool.held)
        self.trouble: str | None = self._spool.trouble
        self.oldest_batch_ms = self._spool.oldest_batch_ms()
        self.has_all_events = self._spool.has_all_events
        self.on_ready: Callable[[], None] = lambda: None  # called when there may be something to send
        self.hangs = False
        self._closed = False
        self.events, self.telemetry = (
            MemoryTail.behind(log_.next_seq) for log_ in (self._spool.events, self._spool.telemetry)
        )
        self._ahead = {
            lane: ReadAhead(
                lane,
                self.events if lane == pb.EVENTS else self.telemetry,
                partial(self._read, lane),
                lambda: self.on_ready(),
            )
            for lane in LANES
        }
        self._rejected: set[tuple[int, int]] = set()
        self._losses = self._spool.take_losses() or Losses()
        self._waiting = self._spool.pending()  # below the tails, that nobody holds
        self._evicted = (0, 0)  # what went there while a job ran
        self._files: Files = {}
        self._comes = self._works = self._faulty = False
        self._tidy_due = self._count_due = False
        self._limit: asyncio.TimerHandle | None = None
        self._waiters: deque[tuple[int, int, Callable[[], None]]] = deque()

    @property
    def _tails(self) -> tuple[MemoryTail, MemoryTail]:
        return self.telemetry, self.events

    # ---- in

    def add_record(self, ts_ms: int, record: pb.Record) -> None:
        """Keep one event, absence or holding (without its sequence)."""
        self._add(self.events, ts_ms, record.SerializeToString())

    def add_batch(self, ts_ms: int, blocks: Sequence[pb.Block]) -> None:
        """Keep one batch; `ts_ms` is the time of its newest row."""
        self._add(self.telemetry, ts_ms, pb.Batch(blocks=blocks).SerializeToString())

    def _add(self, tail: MemoryTail, ts_ms: int, payload: bytes) -> None:
        tail.add(ts_ms, payload)
        self._trim(tail)
        if self.hangs:
            self._release()
        self._soon()

    def keep_file(self, name: str, data: bytes, *, first: bool) -> None:
        """Write a small state file whole: before what was added lately (`first`), or after it."""
        self._files[name] = data, first
        self._soon()

    def when_kept(self, then: Callable[[], None]) -> None:
        """Call `then` when all added so far is on disk (events synced), or may leave without because the disk hangs."""
        self._waiters.append((self.events.next_seq - 1, self.telemetry.next_seq - 1, then))
        self._call_waiters()

    async def kept(self) -> None:
        """The same, to wait for."""
        done = asyncio.Event()
        self.when_kept(done.set)
        await done.wait()

    def tidy(self) -> None:
        """Keep the spool in bounds, write what waits. Call it now and then."""
        self._tidy_due = True
        self._soon()

    # ---- the disk's side

    def _steady_ms(self) -> int:
        """A wall clock for ages that no jump moves: a clock that runs ahead for a moment makes nothing too old."""
        return self._started_ms + round((self._clock.monotonic() - self._started_s) * 1000)

    def _soon(self) -> None:
        """One job for all that is added at this moment."""
        if not self._comes and not self._works:
            self._comes = True
            asyncio.get_running_loop().call_soon(self._work)

    def _work(self) -> None:
        """Give the thread what there is to do, if it is not at it already."""
        self._comes = False
        if self._works or self._closed:
            return
        events, batches = self._untaken()
        if not (events or batches or self._files or self._tidy_due or self._count_due):
            return
        for tail in self._tails:
            tail.given = tail.next_seq - 1
        files, self._files = self._files, {}
        now_ms = self._steady_ms() if self._tidy_due else None
        self._tidy_due = self._count_due = False
        self._evicted = 0, 0
        self._works = True
        self._limit = asyncio.get_running_loop().call_later(DISK_LIMIT_S, self._overdue)
        held, below = dict(self.held), (self.telemetry.first, self.events.first)
        job = self._disk.submit(lambda: write(self._spool, events, batches, files, held, below, now_ms))
        ends = self.events.given, self.telemetry.given
        job.add_done_callback(lambda done: self._wrote(done, files, *ends))

    def _untaken(self) -> tuple[list[Stored], list[Stored]]:
        """Events and batches that the thread was not given yet, or did not take because of a fault."""
        if self._faulty:
            self._faulty = False
            for tail in self._tails:
                tail.given = tail.written
        return self.events.new(), self.telemetry.new()

    def _wrote(self, job: asyncio.Future[Done], files: Files, events: int, batches: int) -> None:
        self._works = False
        if self._limit:
            self._limit.cancel()
        if job.cancelled() or self._closed:
            return
        if self.hangs:
            self.hangs = False
            log.warning("spool: the disk answers again: %s", self.folder)
        if error := job.exception():  # none that a disk brings about: a fault in Drover; it is sent from memory
            log.error("spool: %s", error, exc_info=error)
            self.trouble = f"{self.folder}: {error}"
            self._files = files | self._files
            self._faulty = True  # the next job, at the next addition, begins where the last good one ended
        else:
            self._take(job.result())
        for tail, end in ((self.events, events), (self.telemetry, batches)):
            tail.written = tail.written if error else max(tail.written, end)
            tail.released = max(tail.released, end)
            self._trim(tail)
        self._call_waiters()
        self.on_ready()
        if any(tail.given < tail.next_seq - 1 for tail in self._tails) or self._tidy_due or self._count_due:
            self._soon()

    def _take(self, done: Done) -> None:
        self.trouble, self.oldest_batch_ms = done.trouble, done.oldest_batch_ms
        self.has_all_events = done.has_all_events
        self._files = done.failed | self._files
        if done.losses:
            self._losses.add(done.losses)
        self._waiting = done.waiting[0] + self._evicted[0], done.waiting[1] + self._evicted[1]
        self._count_due |= self._evicted[0] > 0  # perhaps counted twice

    def _overdue(self) -> None:
        log.error("spool: the disk did not answer for %g s; data is sent before it is safe", DISK_LIMIT_S)
        self.hangs = True
        self.trouble = f"{self.folder}: the disk does not answer"
        self._release()

    def _release(self) -> None:
        for tail in self._tails:
            tail.released = tail.next_seq - 1
        self._call_waiters()
        self.on_ready()

    def _call_waiters(self) -> None:
        while self._waiters and self._waiters[0][0] <= self.events.released:
            if self._waiters[0][1] > self.telemetry.released:
                return
            self._waiters.popleft()[2]()

    def _trim(self, tail: MemoryTail) -> None:
        """Let go of what is on disk and held or too much for memory, and of what is too much although it is not."""
        held = self.held[pb.EVENTS] if tail is self.events else max(self.held[pb.LIVE], self.plan.through)
        while tail.records:
            oldest = tail.records[0]
            if oldest.seq <= tail.written:
                if oldest.seq > held and tail.size <= CACHE_BYTES:
                    return
                tail.pop()
                if oldest.seq > held:
                    tail.nothing_from = oldest.seq
                    self._evicted = self._evicted[0] + 1, self._evicted[1] + len(oldest.payload)
                    self._waiting = self._waiting[0] + 1, self._waiting[1] + len(oldest.payload)
                continue
            if tail.size <= MEMORY_BYTES or len(tail.records) == 1:
                return
            tail.pop()
            if oldest.seq > held:
                one = Losses(events=1) if tail is self.events else Losses(telemetry=1)
                one.reason = f"{self.trouble or self.folder}, and memory for it is full"
                self._losses.add(one)

    # ---- out

    def next(self, lane: int, after: int) -> Sendable | None:
        """(sequence, message, its size) of the first one of a lane above `after` that may be sent now. None: there is
        none, or it is being read; `on_ready` tells."""
        after = max(after, self.held[lane])
        while found := self._next(lane, after):
            if (lane, found[0]) not in self._rejected:
                return found
            after = found[0]
        return None

    def _next(self, lane: int, after: int) -> Sendable | None:
        if lane == pb.BACKFILL:
            return self._ahead[lane].next(after) if self.plan.after(after) else None
        tail = self.events if lane == pb.EVENTS else self.telemetry
        if lane == pb.LIVE:
            after = max(after, self.plan.through)
        if after < tail.nothing_from:
            return self._ahead[lane].next(after)
        record = tail.above(after)
        if record is None or record.seq > tail.released:
            return None
        return record.seq, as_message(lane, record.seq, record.payload), len(record.payload)

    def _read(self, lane: int, after: int) -> asyncio.Future[list[Sendable]]:
        held = dict(self.held)
        return self._disk.submit(lambda: read(self._spool, lane, after, held))

    async def welcome(self, held: Mapping[int, int]) -> bool:
        """Take over what a collector holds, and move an old backlog to the backfill lane.

        Returns:
            False when the stream must begin again: the collector holds sequences that this spool never gave out (a
            copied or restored folder), so the spool has a new id now.
        """
        given = self._given()
        known = all(held.get(lane, 0) <= given[lane] for lane in LANES)
        wanted, now_ms, late = dict(held), self._clock.now_ms(), False

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
            self.id, self.plan = self._spool.id, self._spool.plan
            self._rejected.clear()  # their sequences begin again
            self._take_held({})
            return False
        if not late:
            self.plan = self._spool.plan
        else:  # the backlog goes on in order, until the plan that was begun is there
            job.add_done_callback(lambda _: self._take_plan())
        self._take_held(held)
        return True

    def _take_plan(self) -> None:
        """It was made after all: the stream that began without it goes on by it."""
        if not self._closed and self.plan is not self._spool.plan:
            self.plan = self._spool.plan
            self._follow_plan()
            self.on_ready()

    def _take_held(self, held: Mapping[int, int]) -> None:
        self.held = {lane: held.get(lane, 0) for lane in LANES}
        for tail in self._tails:  # what was held may be wanted again
            tail.nothing_from = min(tail.first - 1, tail.written)
        self._follow_plan()

    def _follow_plan(self) -> None:
        while self.telemetry.records and self.telemetry.first <= self.plan.through:
            self.telemetry.pop()
        for ahead in self._ahead.values():
            ahead.again()
        self._count_due = True
        self._soon()

    def ack(self, lane: int, seq: int) -> bool:
        """Everything of a lane up to `seq` is held. False: it was never given out, so the Ack is not for this spool."""
        if lane not in self.held or seq <= self.held[lane]:
            return True
        if seq > self._given()[lane]:
            return False
        self.held[lane] = seq
        if self._rejected:
            self._rejected = {(at, number) for at, number in self._rejected if at != lane or number > seq}
        for tail in self._tails:
            self._trim(tail)
        if self._waiting[0] or self._works:  # a job that runs counts with what was held before
            self._count_due = True
            self._soon()
        return True

    def _given(self) -> dict[int, int]:
        """The last sequence of each lane that was given out."""
        return {
            pb.EVENTS: self.events.next_seq - 1,
            pb.LIVE: self.telemetry.next_seq - 1,
            pb.BACKFILL: self.plan.next_base - 1,
        }

    def reject(self, lane: int, seq: int) -> None:
        """The collector will never take this one."""
        if seq > self.held.get(lane, 0) and len(self._rejected) < MAX_REJECTED:
            self._rejected.add((lane, seq))

    # ---- what it knows of itself

    def pending(self) -> tuple[int, int]:
        """(records, bytes) that nobody holds yet."""
        records, size = self._waiting
        for tail, held in ((self.events, self.held[pb.EVENTS]), (self.telemetry, self.held[pb.LIVE])):
            waits = [len(record.payload) for record in tail.records if record.seq > held]
            records += len(waits)
            size += sum(waits)
        return records, size

    def take_losses(self) -> Losses | None:
        """What was lost since the last call; None for nothing."""
        losses, self._losses = self._losses, Losses()
        return losses if losses else None

    def close(self) -> None:
        """Write what there is and let go of the folder; a disk that hangs is not waited for."""
        if self._closed:
            return
        self._closed = True
        for ahead in self._ahead.values():
            ahead.close()
        if self._limit:
            self._limit.cancel()
        events, batches = self._untaken()
        files, held, below = self._files, dict(self.held), (self.telemetry.first, self.events.first)

        def work() -> None:
            write(self._spool, events, batches, files, held, below, None)
            self._spool.close()

        if not self._disk.run_last(work, DISK_LIMIT_S if self.hangs else CLOSE_LIMIT_S):
            log.error("spool: the disk did not answer at the end; what it had not taken is lost")
        if self._own_disk:
            self._disk.close()
