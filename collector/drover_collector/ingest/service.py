"""The Telemetry service: streams of agents, from their handshake to queued batches and records.

Invalid input is refused in the Ack with its reason, counted, and logged once for each node and reason; it ends no
stream. Memory is bounded: a stream is not read while too much waits for the store, and its agent is asked to wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from drover_collector.auth.authorization import caller, when_ended
from drover_collector.grpc_h2 import Handler
from drover_collector.ingest.admission import Admission, PendingStreams, RetryLaterError
from drover_collector.ingest.clock_skew import ClockMonitor
from drover_collector.ingest.context import IngestContext
from drover_collector.ingest.handshake import HandshakeHandler
from drover_collector.ingest.limits import MESSAGE_BYTES, AgentAllowance, MemoryBudget
from drover_collector.ingest.message_parts import (
    HELLO_TAG,
    INVALID,
    RECORDS,
    UNCOUNTED_BYTES,
    PartsError,
    check_parts,
)
from drover_collector.ingest.parse_records import ParsedRecord, RecordSource, parse_record
from drover_collector.ingest.schema_registry import Refusal, SchemaRegistry
from drover_collector.ingest.session import NO_HELLO, PendingMessage, Session, StreamClosed
from drover_collector.ingest.stats import IngestStats
from drover_collector.ingest.telemetry_writer import TelemetryWriter
from drover_proto import telemetry_pb2 as pb

__all__ = ["IngestService"]

log = logging.getLogger(__name__)

OVERHEAD = 512  # bytes of memory that a message takes in addition to its own
TELEMETRY = (pb.LIVE, pb.BACKFILL)
RECORDS_PER_TURN = 64  # before others have their turn: as many as agents put into one message
NOTIFY_S = 1.0  # an agent that is slowed for longer is asked to wait
OVERLOADED = "the collector has more to store than it can"


class IngestService:
    """Give its `methods` to a server. Call `close` after the server has stopped.

    Raises:
        StoreError: the store cannot be read.
    """

    def __init__(self, context: IngestContext) -> None:
        self._context = context
        self._writer = TelemetryWriter(context)
        self._handshakes = HandshakeHandler(context, self._writer)
        self._admission = Admission(context.stats, context.limits)
        self._clocks = ClockMonitor(context.stats, context.now_ms)
        self._sessions: set[Session] = set()
        self._pending = PendingStreams(context)
        self._gapped: dict[Session, None] = {}  # streams from which a message was dropped
        self._checker: asyncio.Task[None] | None = None

    @property
    def stats(self) -> IngestStats:
        return self._context.stats

    def methods(self) -> dict[str, Handler]:
        """Return path -> handler. Messages arrive as bytes, so that one that cannot be parsed ends no stream."""
        return {f"/{pb.DESCRIPTOR.services_by_name['Telemetry'].full_name}/Stream": self._serve}

    def stream(self, node: str) -> Session | None:
        """Return the stream that reports for a node, after its Welcome, to send requests on."""
        return self._handshakes.welcomed(node)

    def has_agent(self, node: str) -> bool:
        """Return whether a node's newest stream, which may have ended, was an agent's and not of pages. Any thread."""
        return node in self._handshakes.nodes.by_agents

    def spoke_ms(self) -> Mapping[str, int]:
        """Return node -> when its newest message came, here or to another collector of this store, ms."""
        elsewhere, here = self._handshakes.elsewhere, self.stats.last_seen
        elsewhere.ask()
        there = elsewhere.spoke_ms()
        return here | {node: max(ms, here.get(node, 0)) for node, ms in there.items()} if there else here

    def streams(self) -> list[Session]:
        """Return the streams of all agents that have their Welcome."""
        return self._handshakes.all_welcomed()

    async def close(self) -> None:
        """Store what was received, and the lane offsets. If the store fails now, agents resend: nothing is lost."""
        if self._checker is not None:
            self._checker.cancel()
        await self._writer.close()

    # ---- streams

    async def _serve(self, _messages: object, call: Any) -> None:
        """Serve one stream until its agent leaves or the collector ends it.

        This task ends the stream by raising StreamClosed. Other tasks call `Session.close`, which cancels this one.
        """
        session = Session(call, AgentAllowance(self._context.limits))
        when_ended(lambda why: session.close(grpc.StatusCode.PERMISSION_DENIED, why))
        self._sessions.add(session)
        self.stats.connected = len(self._sessions)
        if self._checker is None:
            self._checker = asyncio.create_task(self._check_forever())
        try:
            await self._read_all(session, call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if session.closed is None or task is None:
                raise  # the agent has left
            task.uncancel()
            await session.stream.abort(session.closed)
        except StreamClosed as error:
            await session.stream.abort(error)
        finally:
            call.on_message = None
            self._forget(session)

    async def _read_all(self, session: Session, call: Any) -> None:
        self._pending.add(session)
        first = await call.read()
        if first is not grpc.aio.EOF:
            await self._open(session, first)
            del first
            call.on_message = partial(self._take_if_free, session)
            # No variable holds the message: it would keep the memory until the next one.
            while await self._take(session, await call.read()):
                pass
        if session.acks.unacked and not session.acks.sending:
            await self._writer.acks.send(session)
        await session.acks.wait_settled()  # the agent may wait for its last Ack

    def _forget(self, session: Session) -> None:
        self._sessions.discard(session)
        self._pending.remove(session)
        self._gapped.pop(session, None)
        self._clocks.remove(session)
        self.stats.connected = len(self._sessions)
        self._writer.acks.forget(session)
        self._handshakes.release(session)

    async def _open(self, session: Session, raw: bytes) -> None:
        """Process the first message in its turn.

        Raises:
            StreamClosed: it is not a Hello, and was not parsed; or the Hello is refused.
        """
        if not raw or raw[0] != HELLO_TAG:
            raise self._refuse_opening(NO_HELLO)
        try:
            check_parts(raw, self._context.limits.entities)
        except PartsError as error:
            raise self._refuse_opening(error.refusal) from None
        session.opening.hello_ms, session.opening.queued = self._context.now_ms(), True
        try:
            await self._admission.enter(session, len(raw))
            session.opening.queued, session.opening.due_s = False, time.monotonic()
            await self._take(session, raw)
            if not session.node:
                raise self._refuse_opening(NO_HELLO)
        except RetryLaterError as error:
            backoff = pb.Backoff(wait_ms=round(1000 * error.wait_s), reason=str(error))
            await session.send(pb.CollectorMessage(backoff=backoff))
            raise
        finally:
            self._admission.leave(session)

    def _refuse_opening(self, refusal: Refusal) -> StreamClosed:
        """Count a stream that does not begin with a Hello. Return how it ends."""
        certificate = caller()
        self._context.count_refusal("an agent before its Hello" if certificate is None else str(certificate), refusal)
        return StreamClosed(grpc.StatusCode.INVALID_ARGUMENT, refusal.text)

    # ---- messages

    async def _take(self, session: Session, raw: Any) -> bool:
        """Process a message. Return False for the end of the stream."""
        if raw is grpc.aio.EOF:
            return False
        session.last_message_s = time.monotonic()
        message = await self._parse(session, raw)
        if session.node:
            self.stats.last_seen[session.node] = self._context.now_ms()
        size = len(raw)
        del raw  # else the memory is used twice while the message waits for room
        rows = events = 0
        if message is not None:
            rows, events = await self._dispatch(session, message, size)
        await self._writer.acks.send_if_soon(session)
        if wait_s := session.account.take_message(size, rows, events):
            await self._slow_down(session, min(wait_s, self._context.limits.pause_s))
        return True

    async def _dispatch(self, session: Session, message: pb.AgentMessage, size: int) -> tuple[int, int]:
        """Process a message by its kind. Return its rows and events, for the agent's allowance."""
        match message.WhichOneof("kind"):
            case "hello":
                await self._take_hello(session, message.hello, size)
            case "batch":
                await self._take_batch(session, message.batch, size)
                return _max_rows(message.batch, size), 0
            case "record":
                await self._take_record(session, message.record, size)
                return 0, 1
            case "records":
                await self._take_records(session, message.records)
                return 0, len(message.records.records)
            case kind:
                self.stats.skipped[kind or "unknown"] += 1  # from a newer agent
        return 0, 0

    async def _parse(self, session: Session, raw: bytes) -> pb.AgentMessage | None:
        """Return the message; None if it was refused."""
        try:
            check_parts(raw, self._context.limits.entities)
            return pb.AgentMessage.FromString(raw)
        except PartsError as error:
            await self._refuse_unparsed(session, error)
        except DecodeError:
            self._context.refuse(session, pb.LANE_UNSPECIFIED, 0, INVALID)
        return None

    def _take_if_free(self, session: Session, raw: bytes) -> bool:
        """Queue a batch that need not wait, without waking the stream's task. Return whether it was queued."""
        size, room, account = len(raw), self._writer.room, session.account
        if session.registry is None or size > self._context.limits.batch_bytes:
            return False
        try:
            if size > UNCOUNTED_BYTES:
                check_parts(raw, self._context.limits.entities)
            batch = pb.AgentMessage.FromString(raw).batch
        except (DecodeError, PartsError):
            return False
        lane = batch.lane
        if lane not in TELEMETRY or lane in session.gapped or self._clocks.doubt:  # also any other kind of message
            return False
        now_s = time.monotonic()
        if room.filling or not room.fits(account) or not account.take_if_free(size, _max_rows(batch, size), now_s):
            return False
        session.last_message_s = now_s
        self.stats.last_seen[session.node] = self._context.now_ms()
        self._put(session, session.registry, batch, size)
        self._writer.acks.try_send_if_soon(session)
        return True

    async def _take_hello(self, session: Session, hello: pb.Hello, size: int) -> None:
        await self._handshakes.handle(session, hello, size)
        session.stream.call.max_message_bytes = MESSAGE_BYTES
        if hello.ts_ms:
            self._clocks.add(session)
        self._pending.remove(session)

    async def _refuse_unparsed(self, session: Session, error: PartsError) -> None:
        """Refuse a message that was not parsed. Of a batch the sequence is known, so its agent can drop it."""
        lane = pb.Lane.ValueType(error.lane)
        if lane not in TELEMETRY or session.registry is None:
            self._context.refuse(session, pb.LANE_UNSPECIFIED, 0, error.refusal)
        elif await self._wait_for_room(session, lane, self._writer.room):
            self._put_refused(session, lane, error.seq, error.refusal)

    async def _take_batch(self, session: Session, batch: pb.Batch, size: int) -> None:
        if not await self._wait_for_room(session, batch.lane, self._writer.room):
            return
        limit = self._context.limits.batch_bytes
        if batch.lane not in TELEMETRY:
            refusal = Refusal("bad lane", f"a batch on lane {batch.lane}; LIVE and BACKFILL are allowed")
        elif session.registry is None:
            refusal = session.no_registry
        elif size <= limit:
            self._put(session, session.registry, batch, size)
            return
        else:
            refusal = Refusal("oversize", f"a batch of {size} bytes; at most {limit} are allowed")
        self._put_refused(session, batch.lane, batch.seq, refusal)

    def _put(self, session: Session, registry: SchemaRegistry, batch: pb.Batch, size: int) -> None:
        size += OVERHEAD + session.opening.hello_bytes  # what waits holds its registry too
        session.opening.hello_bytes = 0
        self._writer.put(PendingMessage(session, session.key, batch.lane, batch.seq, size, batch=(registry, batch)))

    def _put_refused(self, session: Session, lane: pb.Lane.ValueType, seq: int, refusal: Refusal) -> None:
        self._context.refuse(session, lane, seq, refusal)
        self._writer.put(PendingMessage(session, session.key, lane, seq, OVERHEAD))

    async def _take_records(self, session: Session, records: pb.Records) -> None:
        if len(records.records) > RECORDS:
            text = f"{len(records.records)} records in a message; at most {RECORDS} are allowed"
            self._context.refuse(session, pb.LANE_UNSPECIFIED, 0, Refusal("too many parts", text))
            return
        for number, record in enumerate(records.records, 1):
            await self._take_record(session, record, record.ByteSize())
            if number % RECORDS_PER_TURN == 0:
                await asyncio.sleep(0)

    async def _take_record(self, session: Session, record: pb.Record, size: int) -> None:
        parsed: ParsedRecord | Refusal = session.no_registry
        if session.registry is not None:
            parsed = parse_record(record, self._source(session, record.event))
        held = None if isinstance(parsed, Refusal) else parsed
        message = PendingMessage(session, session.key, pb.EVENTS, record.seq, OVERHEAD + size, record=held)
        events = self._writer.events
        if pb.EVENTS in session.gapped or not events.room.fits(session.account):
            events.judge_early([message])
        if not await self._wait_for_room(session, pb.EVENTS, events.room):
            return
        if isinstance(parsed, Refusal):
            self._context.refuse(session, pb.EVENTS, record.seq, parsed)
        self._writer.put(message)

    def _source(self, session: Session, event: pb.Event) -> RecordSource:
        clock = session.clock
        same_boot = event.boot_id and event.boot_id == session.boot
        return RecordSource(
            node=session.node,
            spool=session.spool,
            received_ms=self._context.now_ms(),
            hello_ms=clock.hello_ms,
            clock_offset_ms=clock.offset_ms,
            boot=session.boot,
            age_ms=clock.age_ms(event.up_ms) if same_boot else None,
        )

    # ---- waiting

    async def _wait_for_room(self, session: Session, lane: pb.Lane.ValueType, room: MemoryBudget) -> bool:
        """Wait until a message fits. Return False if it is dropped: the store accepts nothing.

        Waiting in vain would hold up the stream's events. A dropped message stays in its agent's spool, with all later
        ones of its lane, until the stream is closed and the agent resends them on a new one.
        """
        while lane not in session.gapped and not (self._clocks.doubt and lane in TELEMETRY):
            if room.filling:
                await self._ask_to_wait(session, OVERLOADED)
            if room.fits(session.account):  # checked after the wait; nothing is awaited from here on
                return True
            if self._writer.retrier.failing:
                break
            await self._ask_to_wait(session, OVERLOADED)
            self._writer.room_freed.clear()
            try:
                async with asyncio.timeout(self._context.limits.check_s):
                    await self._writer.room_freed.wait()
            except TimeoutError:
                continue  # the store may have begun to fail
        session.gapped.add(lane)
        self._gapped[session] = None
        self.stats.dropped += 1
        await self._ask_to_wait(session, self.stats.trouble or self._clocks.doubt or "the store accepts nothing")
        return False

    async def _slow_down(self, session: Session, wait_s: float) -> None:
        """Read an agent that sends too much later. Other streams go on."""
        self.stats.slowed += 1
        text = "%s sends more than an agent should; it is slowed down. Check its settings."
        self._context.logger.warning((session.node, "slowed"), text, session.node)
        if wait_s >= NOTIFY_S:
            await self._ask_to_wait(session, "this agent sends more than its share", round(wait_s * 1000))
        await asyncio.sleep(wait_s)

    async def _ask_to_wait(self, session: Session, reason: str, wait_ms: int = 0) -> None:
        """Send a Backoff, unless the agent still waits after the last one."""
        now, wait_ms = time.monotonic(), wait_ms or self._context.limits.backoff_ms
        if now - session.backoff_s < wait_ms / 2000:
            return
        session.backoff_s = now
        self.stats.backoffs += 1
        reason = self.stats.trouble or reason
        await session.send(pb.CollectorMessage(backoff=pb.Backoff(wait_ms=wait_ms, reason=reason[:200])))

    # ---- checks

    async def _check_forever(self) -> None:
        """Run what is due by time, for all streams in one task."""
        while True:
            await asyncio.sleep(self._context.limits.check_s)
            try:
                self._writer.tick()
                self._admission.tick()
                self._clocks.tick()
                self._pending.close_late()
                self._handshakes.tick()
                self._close_outdated()
            except Exception:  # a defect must not end this task
                log.exception("the check of the streams failed")
                self.stats.count_defect("check of the streams")

    def _close_outdated(self) -> None:
        """Close streams whose agents must report their clock again, and those that must resend what was dropped."""
        for session in self._clocks.outdated():
            text = "the clocks of this node and of the collector differed; reconnect to compare them again"
            session.close(grpc.StatusCode.UNAVAILABLE, text)
        if self._writer.retrier.failing or self._clocks.doubt or self._writer.room.filling:
            return
        limits = self._context.limits
        for session in list(self._gapped)[: round(limits.ends_per_s * limits.check_s)]:
            text = "the store accepts data again; reconnect and resend what was not acknowledged"
            session.close(grpc.StatusCode.UNAVAILABLE, text)


def _max_rows(batch: pb.Batch, size: int) -> int:
    """Return how many rows a batch declares, at most as many as its bytes can hold."""
    rows = 0
    for block in batch.blocks:
        rows += block.rows
    return min(rows, size)
