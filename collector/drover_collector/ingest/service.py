"""The gRPC server for agents: who they are, what they may send, and what they are told.

Bad input is refused in the Ack with its reason, counted, logged once per node and reason, and ends no stream. Memory is
bounded: a stream is not read on while too much waits for the store, and its agent is asked to hold back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from drover_collector.auth.authorization import caller, when_ended
from drover_collector.auth.identity import Identity
from drover_collector.fleet.index import FleetIndex
from drover_collector.grpc_h2 import Handler
from drover_collector.ingest.admission import Admission, ComeAgainError
from drover_collector.ingest.clock_skew import Clocks
from drover_collector.ingest.handshake import HandshakeHandler
from drover_collector.ingest.limits import (
    MESSAGE_BYTES,
    AgentAllowance,
    Limits,
    MemoryBudget,
    RateLimitedLogger,
)
from drover_collector.ingest.message_parts import (
    HELLO_TAG,
    JUNK,
    RECORDS,
    UNCOUNTED_BYTES,
    PartsError,
    check,
)
from drover_collector.ingest.parse_records import Taken, take_record
from drover_collector.ingest.schema_registry import Dictionary, Refusal
from drover_collector.ingest.session import (
    NO_HELLO,
    EndError,
    Session,
    Waiting,
)
from drover_collector.ingest.stats import IngestStats
from drover_collector.ingest.telemetry_writer import TelemetryWriter
from drover_collector.store import Store
from drover_core.model.events import Event, ProbeResult
from drover_proto import telemetry_pb2 as pb

__all__ = ["Ingest", "IngestStats", "Limits"]

log = logging.getLogger(__name__)

OVERHEAD = 512  # bytes of memory that a message takes beside its own
TELEMETRY = (pb.LIVE, pb.BACKFILL)
HELLO_SLACK_BYTES = 1 << 20  # a Hello that is a little too long is told so in our words
RECORDS_IN_A_ROW = 64  # before others have their turn: as many as agents put into one message
BACKOFF_S = 1.0  # an agent that must wait for longer is told so


class Ingest:
    """The Telemetry service. Give its `methods` to a server; `close` it after the server's stop.

    Args:
        on_events: is told of events that are stored, from the event loop; returns at once.
        on_unstored: of events that the store keeps waiting, likewise (default: the same). Each event is told once.
        on_probes: of results of probes that are stored, likewise.
    """

    def __init__(
        self,
        store: Store,
        index: FleetIndex,
        on_events: Callable[[list[Event]], None],
        *,
        on_unstored: Callable[[list[Event]], None] | None = None,
        on_probes: Callable[[list[ProbeResult]], None] = lambda _: None,
        limits: Limits | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """
        Raises:
            StoreError: the store cannot be read.
        """
        self._limits = limits or Limits()
        self.stats = IngestStats(limits=self._limits)
        self._now_ms = now_ms
        self._teller = RateLimitedLogger()
        self._writers = TelemetryWriter(
            store, index.node_number, self.stats, self._limits, now_ms, self._teller, self._refuse, on_events,
            on_unstored or on_events, on_probes,
        )  # fmt: skip
        self._hellos = HandshakeHandler(
            index, self.stats, self._limits, now_ms, self._teller, self._writers, self._count, store.shared,
            store.entities.gpu_id,
        )  # fmt: skip
        self._admission = Admission(self.stats, self._limits)
        self._clocks = Clocks(self.stats, now_ms)
        self._sessions: dict[Session, None] = {}
        self._nameless: dict[Session, Identity | None] = {}  # those that have not said who they are, oldest first
        self._nameless_of: Counter[Identity] = Counter()
        self._gapped: dict[Session, None] = {}  # those of which something was left with the agent
        self._carer: asyncio.Task[None] | None = None

    def methods(self) -> dict[str, Handler]:
        """For the agents' server. Messages come as bytes, so that one that cannot be parsed does not end its stream."""
        return {f"/{pb.DESCRIPTOR.services_by_name['Telemetry'].full_name}/Stream": self._stream}

    def stream(self, node: str) -> Session | None:
        """The stream that speaks for a node, once it is welcomed; for what a collector has to ask of it."""
        return self._hellos.stream(node)

    async def close(self) -> None:
        """Stores what was taken in, and where each lane stands. A store that fails now loses nothing: agents resend."""
        if self._carer is not None:
            self._carer.cancel()
        await self._writers.close()

    # ---- streams

    async def _stream(self, _messages: object, context: Any) -> None:
        """One agent, until it leaves, is replaced by a newer stream of its node, or may not speak for it."""
        session = Session(context, AgentAllowance(self._limits))
        when_ended(lambda why: session.stop(EndError(grpc.StatusCode.PERMISSION_DENIED, why)))
        self._sessions[session] = None
        self.stats.connected = len(self._sessions)
        if self._carer is None:
            self._carer = asyncio.create_task(self._care())
        try:
            self._begin(session)
            more = await self._open(session, await context.read())
            context.on_message = partial(self._take_at_once, session)
            while more:
                more = await self._take(session, await context.read())  # no name for it: it would stay until the next
            await self._last_words(session)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if session.end is None or task is None:
                raise  # the agent has left
            task.uncancel()
            await session.abort(session.end)
        except EndError as error:
            await session.abort(error)
        finally:
            context.on_message = None
            del self._sessions[session]
            self._named(session)
            self._gapped.pop(session, None)
            self._clocks.forget(session)
            self.stats.connected = len(self._sessions)
            self._writers.acks.forget(session)
            self._hellos.leave(session)

    def _begin(self, session: Session) -> None:
        """
        Raises:
            EndError: too many streams of this peer say nothing; one that opens stream after stream would fill memory.
        """
        who = caller()
        if who is not None and self._nameless_of[who] >= self._limits.nameless:
            self._count(str(who), Refusal("no hello", f"{self._limits.nameless} streams of {who} say nothing"))
            text = f"{self._limits.nameless} other streams of {who} have not begun with a Hello; use one stream a node"
            raise EndError(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        large = who is None or not self._nameless_of[who]
        session.context.max_message_bytes = (
            self._limits.hello_bytes + HELLO_SLACK_BYTES if large else self._limits.nameless_bytes
        )
        self._nameless[session] = who
        if who is not None:
            self._nameless_of[who] += 1

    def _named(self, session: Session) -> None:
        """It has said who it is, or has ended."""
        who = self._nameless.pop(session, None)
        if who is not None:
            self._nameless_of[who] -= 1
            if not self._nameless_of[who]:
                del self._nameless_of[who]

    async def _last_words(self, session: Session) -> None:
        """The agent has said its last, and may wait for the Ack."""
        if session.unacked and not session.sending:
            await self._writers.acks.acknowledge(session)
        await session.settled()

    async def _open(self, session: Session, raw: Any) -> bool:
        """The first message, in its turn.

        Raises:
            EndError: it is no Hello, and was not parsed.
        """
        if raw is grpc.aio.EOF:
            return False
        if not raw or raw[0] != HELLO_TAG:
            raise self._unread(NO_HELLO)
        try:
            check(raw, self._limits.entities)
        except PartsError as error:
            raise self._unread(error.refusal) from None
        session.hello_came_ms, session.queued = self._now_ms(), True
        try:
            await self._admission.enter(session, len(raw))
            session.queued, session.due_s = False, time.monotonic()
            await self._take(session, raw)
            if not session.node:
                raise self._unread(NO_HELLO)
            return True
        except ComeAgainError as error:
            back = pb.Backoff(wait_ms=round(1000 * error.wait_s), reason=str(error))
            await session.send(pb.CollectorMessage(backoff=back))
            raise
        finally:
            self._admission.leave(session)

    def _unread(self, refusal: Refusal) -> EndError:
        """How a stream ends that did not begin with a Hello."""
        who = caller()
        self._count("an agent before its Hello" if who is None else str(who), refusal)
        return EndError(grpc.StatusCode.INVALID_ARGUMENT, refusal.text)

    async def _take(self, session: Session, raw: Any) -> bool:
        """Whether there was a message: bytes, else EOF."""
        if raw is grpc.aio.EOF:
            return False
        session.heard_s = time.monotonic()
        message, kind = pb.AgentMessage(), "refused"
        try:
            check(raw, self._limits.entities)
            message = pb.AgentMessage.FromString(raw)
            kind = message.WhichOneof("kind") or "unknown"
        except PartsError as error:
            await self._refuse_unread(session, error)
        except DecodeError:
            self._refuse(session, pb.LANE_UNSPECIFIED, 0, JUNK)
        if session.node:
            self.stats.last_seen[session.node] = self._now_ms()
        size, rows, events = len(raw), 0, 0
        del raw  # twice what waits for room, else
        match kind:
            case "refused":
                pass  # counted; and against its share, below
            case "hello":
                await self._hellos.take(session, message.hello, size)
                session.context.max_message_bytes = MESSAGE_BYTES
                if message.hello.ts_ms:
                    self._clocks.note(session)
                self._named(session)
            case "batch":
                rows = _rows(message.batch, size)
                await self._batch(session, message.batch, size)
            case "record":
                events = 1
                await self._record(session, message.record, size)
            case "records":
                events = len(message.records.records)
                await self._records(session, message.records)
            case _:
                self.stats.skipped[kind] += 1  # from a newer agent
        await self._writers.acks.piggyback(session)
        wait_s = session.account.take_message(size, rows, events)
        if wait_s:
            await self._slow_down(session, min(wait_s, self._limits.pause_s))
        return True

    def _take_at_once(self, session: Session, raw: bytes) -> bool:
        """A batch that nothing stands in the way of, without waking the stream's task; False: nothing was taken in."""
        size, room, account = len(raw), self._writers.room, session.account
        if session.dictionary is None or size > self._limits.batch_bytes:
            return False
        try:
            if size > UNCOUNTED_BYTES:
                check(raw, self._limits.entities)
            batch = pb.AgentMessage.FromString(raw).batch
        except (DecodeError, PartsError):
            return False
        lane = batch.lane
        if lane not in TELEMETRY or lane in session.gapped or self._clocks.doubted:  # also what is no batch
            return False
        now_s = time.monotonic()
        if room.filling or not room.fits(account) or not account.take_at_once(size, _rows(batch, size), now_s):
            return False
        session.heard_s = now_s
        self.stats.last_seen[session.node] = self._now_ms()
        self._put(session, session.dictionary, batch, size)
        self._writers.acks.piggyback_at_once(session)
        return True

    async def _slow_down(self, session: Session, wait_s: float) -> None:
        """An agent that sends more than its share is read later; nobody else is."""
        self.stats.slowed += 1
        self._teller.warn(
            (session.node, "slowed"), "%s sends more than an agent should; it is slowed down", session.node
        )
        if wait_s >= BACKOFF_S:
            await self._hold_back(session, "this agent sends more than its share", round(wait_s * 1000))
        await asyncio.sleep(wait_s)

    async def _care(self) -> None:
        """One task for all streams: what is due by time."""
        while True:
            await asyncio.sleep(self._limits.care_s)
            try:
                self._writers.tick()
                self._admission.tick()
                self._clocks.tick()
                self._end_late_ones()
            except Exception:  # a defect of ours must not end this task
                log.exception("looking after the streams")
                self.stats.defects += 1
                self.stats.defect = "looking after the streams"

    def _end_late_ones(self) -> None:
        """Streams without a Hello, and those that must send again what was left with them."""
        now = time.monotonic()
        waits = self._writers.storing.failing or self._clocks.doubted
        again = 0 if waits else round(self._limits.ends_per_s * self._limits.care_s)
        for session in list(self._nameless):
            if now - session.opened_s <= self._limits.hello_s:
                break  # all after it are younger
            if not session.queued and now - session.due_s > self._limits.hello_s:
                what = "its Hello took more than" if session.hello_came_ms else "no Hello came within"
                text = f"{what} {self._limits.hello_s:g} s"
                session.stop(EndError(grpc.StatusCode.DEADLINE_EXCEEDED, text))
        self._bound_unread()
        for session in self._clocks.differing():
            session.stop(EndError(grpc.StatusCode.UNAVAILABLE, "come again: this node had another time than here"))
        for session in list(self._gapped)[:again] if not self._writers.room.filling else ():
            text = "the store takes data again; what was not acknowledged is to be sent again"
            session.stop(EndError(grpc.StatusCode.UNAVAILABLE, text))

    def _bound_unread(self) -> None:
        """Of streams that have not said who they are, let those go that hold most where all hold too much."""
        held = {session: session.context.partial_bytes for session in self._nameless}
        total = sum(held.values())
        if total <= self._limits.openings_bytes:
            return
        for session in sorted(held, key=held.__getitem__, reverse=True):
            text = "Hellos that are not there whole take too much; come again"
            session.stop(EndError(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
            total -= held[session]
            if total <= self._limits.openings_bytes:
                return

    # ---- batches and records

    async def _refuse_unread(self, session: Session, error: PartsError) -> None:
        """A message that was not parsed. That of a batch is known, so its agent can drop it."""
        lane = pb.Lane.ValueType(error.lane)
        if lane not in TELEMETRY or session.dictionary is None:
            self._refuse(session, pb.LANE_UNSPECIFIED, 0, error.refusal)
        elif await self._may_wait(session, lane, self._writers.room):
            self._refuse(session, lane, error.seq, error.refusal)
            self._writers.put(Waiting(session, session.key, lane, error.seq, OVERHEAD))

    async def _batch(self, session: Session, batch: pb.Batch, size: int) -> None:
        if not await self._may_wait(session, batch.lane, self._writers.room):
            return
        if batch.lane not in TELEMETRY:
            refusal = Refusal("bad lane", f"a batch on lane {batch.lane}; LIVE and BACKFILL are right")
        elif session.dictionary is None:
            refusal = session.no_dictionary
        elif size <= self._limits.batch_bytes:
            self._put(session, session.dictionary, batch, size)
            return
        else:
            refusal = Refusal("oversize", f"a batch of {size} bytes; up to {self._limits.batch_bytes} are right")
        self._refuse(session, batch.lane, batch.seq, refusal)
        self._writers.put(Waiting(session, session.key, batch.lane, batch.seq, OVERHEAD))

    def _put(self, session: Session, dictionary: Dictionary, batch: pb.Batch, size: int) -> None:
        size, session.hello_bytes = size + session.hello_bytes, 0  # what waits holds its dictionary too
        self._writers.put(
            Waiting(session, session.key, batch.lane, batch.seq, OVERHEAD + size, batch=(dictionary, batch))
        )

    async def _records(self, session: Session, records: pb.Records) -> None:
        if len(records.records) > RECORDS:
            text = f"{len(records.records)} records in a message; up to {RECORDS} are right"
            self._refuse(session, pb.LANE_UNSPECIFIED, 0, Refusal("too many parts", text))
            return
        for number, record in enumerate(records.records, 1):
            await self._record(session, record, record.ByteSize())
            if number % RECORDS_IN_A_ROW == 0:
                await asyncio.sleep(0)

    async def _record(self, session: Session, record: pb.Record, size: int) -> None:
        taken: Taken | Refusal = session.no_dictionary
        if session.dictionary is not None:
            taken = take_record(
                record, session.node, session.spool, self._now_ms(), session.hello_ms, session.clock_offset_ms,
                session.boot, session.age_ms(record.event.boot_id, record.event.up_ms),
            )  # fmt: skip
        held = None if isinstance(taken, Refusal) else taken
        waiting = Waiting(session, session.key, pb.EVENTS, record.seq, OVERHEAD + size, record=held)
        records = self._writers.records
        if pb.EVENTS in session.gapped or not records.room.fits(session.account):
            records.judge_early([waiting])
        if not await self._may_wait(session, pb.EVENTS, records.room):
            return
        if isinstance(taken, Refusal):
            self._refuse(session, pb.EVENTS, record.seq, taken)
        self._writers.put(waiting)

    async def _may_wait(self, session: Session, lane: pb.Lane.ValueType, room: MemoryBudget) -> bool:
        """Whether a message may be taken in; returns when there is room for it.

        False: the store takes nothing, and to wait in vain would keep the stream's events back. The message stays with
        its agent, as does all of its lane after it, until the stream ends and another begins.
        """
        writers = self._writers
        while lane not in session.gapped and not (self._clocks.doubted and lane in TELEMETRY):
            if room.filling:
                await self._hold_back(session, "the collector has more to store than it can")
            if room.fits(session.account):  # others may have come meanwhile: nothing is waited for from here on
                return True
            if writers.storing.failing:
                break
            await self._hold_back(session, "the collector has more to store than it can")
            writers.freed.clear()
            try:
                async with asyncio.timeout(self._limits.care_s):
                    await writers.freed.wait()
            except TimeoutError:
                continue  # the store may have begun to fail
        await self._leave_with_agent(session, lane)
        return False

    async def _leave_with_agent(self, session: Session, lane: pb.Lane.ValueType) -> None:
        session.gapped.add(lane)
        self._gapped[session] = None
        self.stats.dropped += 1
        await self._hold_back(session, self.stats.trouble or self._clocks.doubted or "the store takes nothing")

    async def _hold_back(self, session: Session, reason: str, wait_ms: int = 0) -> None:
        """Ask an agent to wait, not more often than it does."""
        now, wait_ms = time.monotonic(), wait_ms or self._limits.backoff_ms
        if now - session.told_back_s < wait_ms / 2000:
            return
        session.told_back_s = now
        self.stats.backoffs += 1
        reason = self.stats.trouble or reason
        await session.send(pb.CollectorMessage(backoff=pb.Backoff(wait_ms=wait_ms, reason=reason[:200])))

    # ---- counts

    def _refuse(self, session: Session, lane: pb.Lane.ValueType, seq: int, refusal: Refusal) -> None:
        self._count(session.node or "an agent before its Hello", refusal)
        if lane != pb.LANE_UNSPECIFIED:  # else there is nothing that the agent could drop
            session.refuse(lane, seq, refusal)

    def _count(self, node: str, refusal: Refusal) -> None:
        self.stats.refused(node, refusal.code, refusal.text)
        self._teller.warn((node, refusal.code), "%s: refused: %s", node, refusal.text[:500])


def _rows(batch: pb.Batch, size: int) -> int:
    """As many as a message of so many bytes can have, at most."""
    rows = 0
    for block in batch.blocks:
        rows += block.rows
    return min(rows, size)
