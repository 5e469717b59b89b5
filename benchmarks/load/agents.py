"""The streams: each does what an agent's uplink does, without its spool.

What is due and cannot leave (no stream, no room in flight, asked to hold back) leaves later under its own time, as it
would from a spool: nothing offered is given up, so that lag is the collector's and not the generator's choice.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import grpc

from drover_proto import telemetry_pb2 as pb
from drover_proto.telemetry_pb2_grpc import TelemetryStub
from load.messages import PERIOD_S, Pool

WINDOW_BYTES = 8 << 20  # as agents have it
WINDOW_MESSAGES = 256
EVENT_SEQ = 1_000  # of the events lane: above those of what each slot holds
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
ANSWER_S, LONGEST_ANSWER_S, TURN_MARGIN_S = 90.0, 240.0, 60.0  # as agents have it
WAITS = (("drover-turn", "1"),)  # the same
AGENT_GPUS = 16  # at most, of a real node
CONNECT_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.http2.bdp_probe", 0),  # costs the generator; the collector does not feel it
    ("grpc.enable_channelz", 0),
)


@dataclass(slots=True)
class Counts:
    """Of all streams of a generator process, since it began."""

    opened: int = 0  # streams open at the moment
    welcomes: int = 0
    failures: int = 0  # streams that ended, or did not come about
    turns: int = 0  # times a stream was asked to wait for its turn
    sent_away: int = 0  # times one was asked to come again later
    offered: int = 0  # values whose time has come
    sent: int = 0
    acked: int = 0
    rejected: int = 0  # messages
    backoffs: int = 0
    events_sent: int = 0
    events_acked: int = 0
    event_first_s: float = 0.0  # epoch, of all events: when the first was sent, the last was, and the last Ack came
    event_last_s: float = 0.0
    event_acked_s: float = 0.0
    event_acks: dict[str, float] = field(default_factory=dict)  # node -> when its Ack came
    reasons: dict[str, int] = field(default_factory=dict)  # of failures and rejections

    def note(self, reason: str) -> None:
        if len(self.reasons) < 20 or reason in self.reasons:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class Pace:
    """Every `every_s` seconds a message of `ticks` seconds of telemetry, from `begin_s` (epoch) to `end_s`."""

    every_s: float
    ticks: int
    begin_s: float
    end_s: float


class SentAwayError(Exception):
    """The collector wants this one to come again later."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"come again in {wait_s:.0f} s")
        self.wait_s = wait_s


class Stream:
    """One agent. `number` counts over all generator processes; `phase` in 0..1 is its place within a period."""

    def __init__(self, node: str, number: int, phase: float, pool: Pool, pace: Pace, counts: Counts) -> None:
        self.node, self._pool, self._pace, self._counts = node, pool, pace, counts
        self._spool = f"spool-{node}"
        self._loop_at = number * 7 % PERIOD_S
        self._phase = phase * pace.every_s
        self._next = 1  # the sequence that is sent next
        self._held = 0
        self._offered = 0  # sequences whose time has come
        self._flight: deque[tuple[int, int, int]] = deque()  # (seq, bytes, values) sent and not acknowledged
        self._flight_bytes = 0
        self._pause_until = 0.0
        self._room = asyncio.Event()
        self._reported_jobs = False
        self._welcomes = 0
        self._call: Any = None  # of the open stream
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._event_waits = False  # for its Ack

    def due_s(self, seq: int) -> float:
        """When a message leaves: its last second has just passed."""
        return self._pace.begin_s + self._phase + (seq - 1) * self._pace.every_s

    @property
    def lag_s(self) -> float:
        """How long the oldest message that is due has waited for its Ack."""
        return max(0.0, time.time() - self.due_s(self._held + 1))

    @property
    def done(self) -> bool:
        return self.due_s(self._held + 1) > self._pace.end_s

    async def run(self, address: str, credentials: grpc.ChannelCredentials) -> None:
        """Until cancelled."""
        pause_s, tries = FIRST_PAUSE_S, 0
        while True:
            held, welcomes, asked_s = self._held, self._welcomes, 0.0
            limit_s = min(ANSWER_S * 2 ** min(tries, 10), LONGEST_ANSWER_S) * random.uniform(0.8, 1.0)
            options = (*CONNECT_OPTIONS, ("grpc.min_reconnect_backoff_ms", round(1000 * limit_s)))
            try:
                async with grpc.aio.secure_channel(address, credentials, options=options) as channel:
                    # As agents have it, where streams are agents' in size; else it would cost the generator a core.
                    small = self._pool.gpus <= AGENT_GPUS
                    packing = grpc.Compression.Gzip if small else grpc.Compression.NoCompression
                    await self._stream(TelemetryStub(channel).Stream(metadata=WAITS, compression=packing), limit_s)
            except SentAwayError as error:
                self._counts.sent_away += 1
                asked_s = error.wait_s
            except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, TimeoutError, EOFError) as error:
                self._counts.failures += 1
                self._counts.note(_why(error))
            tries = 0 if self._welcomes > welcomes else tries + 1
            pause_s = FIRST_PAUSE_S if self._held > held else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(max(asked_s, random.uniform(FIRST_PAUSE_S, max(pause_s, 2 * FIRST_PAUSE_S))))

    async def _stream(self, call: Any, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await call.wait_for_connection()
            await call.write(pb.AgentMessage(hello=self._pool.hello(self.node, self._spool, time.time_ns() // 10**6)))
            while True:
                async with asyncio.timeout(limit_s):
                    answer = await call.read()
                if not isinstance(answer, pb.CollectorMessage) or answer.WhichOneof("kind") != "backoff":
                    break
                if not answer.backoff.turn:
                    raise SentAwayError(answer.backoff.wait_ms / 1000)
                self._counts.turns += 1
                limit_s = max(limit_s, answer.backoff.wait_ms / 1000 + TURN_MARGIN_S)
            if not isinstance(answer, pb.CollectorMessage) or answer.WhichOneof("kind") != "welcome":
                raise EOFError(f"no Welcome: {await call.code()}: {await call.details()}")
            self._welcomes += 1
            self._counts.welcomes += 1
            self._counts.opened += 1
            try:
                await self._exchange(call, answer.welcome)
            finally:
                self._counts.opened -= 1
        finally:
            call.cancel()

    async def _exchange(self, call: Any, welcome: pb.Welcome) -> None:
        self._take(max((lane.seq for lane in welcome.held if lane.lane == pb.LIVE), default=0))
        self._flight.clear()
        self._flight_bytes, self._next = 0, self._held + 1
        if not self._reported_jobs:
            await self._report_jobs(call, welcome.records)
        self._call = call
        sender = asyncio.create_task(self._send(call))
        try:
            while True:
                message = await call.read()
                if not isinstance(message, pb.CollectorMessage):
                    raise EOFError(f"{await call.code()}: {await call.details()}")
                self._receive(message)
                if sender.done():
                    sender.result()
        finally:
            self._call = None
            sender.cancel()

    async def send_event(self, event: pb.Event, at_s: float) -> None:
        """Send this event at `at_s` (epoch) on the open stream. Where none is open, it is counted as a failure."""
        await asyncio.sleep(max(0.0, at_s - time.time()))
        call, self._event_waits = self._call, True
        if call is None:
            self._counts.failures += 1
            self._counts.note("no stream is open for an event")
            return
        event.ts_ms = time.time_ns() // 10**6
        async with self._writing:
            await call.write(pb.AgentMessage(record=pb.Record(seq=EVENT_SEQ, event=event)))
        now_s = time.time()
        self._counts.events_sent += 1
        self._counts.event_first_s = self._counts.event_first_s or now_s
        self._counts.event_last_s = max(self._counts.event_last_s, now_s)

    def _receive(self, message: pb.CollectorMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "ack":
            for refused in message.ack.rejected:
                self._counts.rejected += 1
                self._counts.note(refused.reason[:120])
            self._take(max((lane.seq for lane in message.ack.held if lane.lane == pb.LIVE), default=0))
            if self._event_waits and any(h.lane == pb.EVENTS and h.seq >= EVENT_SEQ for h in message.ack.held):
                self._event_waits = False
                self._counts.events_acked += 1
                self._counts.event_acked_s = self._counts.event_acks[self.node] = time.time()
        elif kind == "backoff":
            self._counts.backoffs += 1
            self._pause_until = time.monotonic() + message.backoff.wait_ms / 1000
        self._room.set()

    def _take(self, seq: int) -> None:
        self._held = max(self._held, seq)
        while self._flight and self._flight[0][0] <= seq:
            _, size, values = self._flight.popleft()
            self._flight_bytes -= size
            self._counts.acked += values

    async def _send(self, call: Any) -> None:
        while self.due_s(self._next) <= self._pace.end_s:
            wait_s = self.due_s(self._next) - time.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            await self._until_room()
            seq, first_s = self._next, self.due_s(self._next) - self._pace.ticks
            at = self._loop_at + (seq - 1) * self._pace.ticks
            blocks, values = self._pool.batch(at, round(first_s * 1000), self._pace.ticks)
            message = pb.AgentMessage(batch=pb.Batch(lane=pb.LIVE, seq=seq, blocks=blocks))
            size = sum(len(block.body) + len(block.presence) for block in blocks)
            self._next += 1
            self._flight.append((seq, size, values))
            self._flight_bytes += size
            if seq > self._offered:
                self._offered = seq
                self._counts.offered += values
            async with self._writing:
                await call.write(message)
            self._counts.sent += values

    async def _until_room(self) -> None:
        while True:
            wait_s = self._pause_until - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            elif len(self._flight) < WINDOW_MESSAGES and self._flight_bytes < WINDOW_BYTES:
                return
            else:
                self._room.clear()
                await self._room.wait()

    async def _report_jobs(self, call: Any, together: bool) -> None:
        self._reported_jobs = True
        now_ms = time.time_ns() // 10**6
        records = [
            pb.Record(seq=slot + 1, holding=pb.Holding(gpu=slot, job=f"{job}-{self.node}", from_ms=now_ms))
            for slot, job in enumerate(self._pool.jobs)
            if job
        ]
        if together and records:
            await call.write(pb.AgentMessage(records=pb.Records(records=records)))
        else:
            for record in records:
                await call.write(pb.AgentMessage(record=record))


def _why(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"[:120]
    return f"{type(error).__name__}: {error}"[:120]
