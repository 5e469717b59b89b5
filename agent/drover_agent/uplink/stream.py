"""The stream to a collector: what waits in the spool goes up, what a collector holds is forgotten.

One collector at a time; the next address is tried when one fails, with growing pauses. Sent but not acknowledged
messages are bounded in number and size, and are sent again on the next stream.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any, Protocol

import grpc

from drover_agent.clock import Clock
from drover_agent.config import AgentConfig
from drover_agent.spool.async_spool import AsyncSpool
from drover_agent.spool.spool import LANES
from drover_agent.uplink.clock_offset import ClockOffset
from drover_agent.uplink.close_reason import CloseReason
from drover_agent.uplink.in_flight import InFlight
from drover_agent.uplink.tls import ClientTls
from drover_core.x509 import CertificateError
from drover_proto import telemetry_pb2 as pb
from drover_proto import telemetry_pb2_grpc as rpc

log = logging.getLogger(__name__)

PROTOCOL = 1
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
ANSWER_LIMIT_S = 15.0  # for a write that flow control holds back
# All agents come at once after a restart of the collector, and a handshake that is given up has to be made again: each
# try that fails doubles what the next one waits. A collector that works on others first says so, and is waited for.
# The first is longer than two cores take for 12,500 openings (docs/evidence/scale.md), and not much longer than the
# 63 s after which the kernel knocks for the seventh time: at the end of a partition the eighth would be another minute
# away.
WELCOME_LIMIT_S, LONGEST_WELCOME_S = 90.0, 240.0
CONNECT_SHARE = 0.5  # of that, for a connection and its handshake, where another collector can be asked instead
TURN_MARGIN_S = 60.0  # beyond what a collector says
ACK_LIMIT_S = 60.0  # a collector that takes data and acknowledges nothing is given up
LOOK_S = 5.0  # how often a stream that has nothing to send looks at the clock
LONGEST_BACKOFF_S = 300.0
RENEWED_LOOK_S = 60.0  # how often a stream looks whether its certificate was renewed; agents do not do so all at once
DRAIN_S = 5.0  # how long such a stream waits for the Acks of what it sent before it goes on as it was
RECORDS_TOGETHER, TOGETHER_BYTES = 64, 65_536  # in a message
MAX_MESSAGE_BYTES = 16 * 2**20
WAITS = (("drover-turn", "1"),)  # a Backoff with `turn` is understood
OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Servers count pings that come often while they send nothing; what is sent and not taken ends a dead connection
    # after the timeout anyway.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # our pauses between attempts, not those of a shared channel
    ("grpc.enable_retries", 0),
    # Little comes down the stream: no pings that measure its bandwidth after each Ack, each of which wakes gRPC's pool.
    ("grpc.http2.bdp_probe", 0),
)


class StreamEndedError(Exception):
    """The stream cannot go on; the message says why."""


class CallEndedError(Exception):
    """Nothing more will come; the call knows why."""


class BusyError(StreamEndedError):
    """The collector asks to come back later, in `wait_s`."""

    def __init__(self, wait_s: float, reason: str) -> None:
        super().__init__(f"asked to come back in {wait_s:.0f} s: {reason}")
        self.wait_s = wait_s


class RenewedError(Exception):
    """The certificate was renewed, and all that was sent is acknowledged: the next stream uses it."""


# InvalidStateError: the call ended while it was written to.
CALL_FAILURES = (CallEndedError, grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
FAILURES = (StreamEndedError, *CALL_FAILURES, OSError, ValueError)  # ValueError: certificates that cannot be parsed


class Owner(Protocol):
    """What the uplink needs of the agent."""

    def hello(self) -> pb.Hello: ...

    def told_anew(self) -> None: ...

    def rejected(self, lane: int, seq: int, reason: str) -> None: ...

    def probe_asked(self, request: pb.ProbeRequest) -> None: ...


class Uplink:
    """Runs until cancelled. `wake` tells it of new data, `hello_changed` of new entities or schemas."""

    def __init__(self, config: AgentConfig, spool: AsyncSpool, owner: Owner, clock: Clock) -> None:
        self._config, self._spool, self._owner, self._clock = config, spool, owner, clock
        self._work = asyncio.Event()
        self._hello_due = False
        self._pause_until = 0.0
        self._tls = ClientTls(config.tls)
        self._trouble: dict[str, str] = {}  # address -> what was logged of it last
        self._progress = 0  # acknowledgements taken
        self._tries = 0  # without a Welcome, one after the other
        self._busy_until: dict[str, float] = {}  # address -> when it wants to be called again
        self._together = False  # the collector takes several records in a message
        self.connected_to: str | None = None
        self._offset = ClockOffset(clock)
        self.streams = 0  # streams that got a Welcome

    @property
    def offset_s(self) -> float | None:
        """Node clock minus the collector's, at the last exchange."""
        return self._offset.seconds

    def wake(self) -> None:
        self._work.set()

    def hello_changed(self) -> None:
        self._hello_due = True
        self._work.set()

    async def run(self) -> None:
        attempt = 0
        addresses = self._config.collectors
        at = 0
        while True:
            before, began, address = self._progress, self._clock.monotonic(), addresses[at]
            try:
                await self._stream(address)
            except RenewedError:
                log.info("the certificate was renewed: connecting with it")
                self.connected_to = None
                continue
            except FAILURES as error:
                self._tell_trouble(address, error)
                if isinstance(error, BusyError):
                    self._busy_until[address] = self._clock.monotonic() + error.wait_s
            except asyncio.CancelledError:
                # grpc raises this too when the other side cancels the stream, which is no reason to stop.
                if _is_cancelled():
                    raise
                self._tell_trouble(address, StreamEndedError("the stream was cancelled"))
            self.connected_to = None
            if _is_cancelled():  # grpc turned the cancellation into an error of the stream
                raise asyncio.CancelledError
            # A Welcome alone is no success: a collector that cannot store would be asked by all agents every second.
            lasted = self._clock.monotonic() - began
            attempt = 0 if self._progress > before or lasted > LONGEST_PAUSE_S else attempt + 1
            # The next one that did not ask for a pause, else the one whose pause ends first.
            at, asked_s = min(
                (
                    (n % len(addresses), self._asked_s(addresses[n % len(addresses)]))
                    for n in range(at + 1, at + 1 + len(addresses))
                ),
                key=lambda each: each[1],
            )
            pause = pause_s(attempt // len(addresses), random)  # all are tried before it grows
            await self._clock.sleep(max(pause, asked_s))

    def _asked_s(self, address: str) -> float:
        """For how long this collector asked not to be called."""
        return max(0.0, self._busy_until.get(address, 0.0) - self._clock.monotonic())

    def _tell_trouble(self, address: str, error: Exception) -> None:
        """Log what went wrong, once until it changes."""
        why = str(error)
        # A certificate's error explains itself, and a stream that was welcomed has no trouble with TLS.
        if not isinstance(error, CertificateError) and self.connected_to != address:
            why = self._tls.explain(why)
        text = f"{address}: {why}"
        if text != self._trouble.get(address):
            log.warning("no collector: %s; data is kept in the spool", text)
        self._trouble[address] = text

    def _channel(self, address: str, limit_s: float) -> grpc.aio.Channel:
        connect_s = limit_s * (CONNECT_SHARE if len(self._config.collectors) > 1 else 1.0)
        options = (*OPTIONS, ("grpc.min_reconnect_backoff_ms", round(1000 * connect_s)))  # bounds a connection's making
        if not self._tls.on:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._tls.credentials(), options=options)

    async def _stream(self, address: str) -> None:
        limit_s = welcome_limit_s(self._tries // len(self._config.collectors), random)
        self._tries += 1
        async with self._channel(address, limit_s) as channel:
            # To a quarter of its size, for some 35 us of CPU a second. A message that stays below 6 kB spares the
            # collector 64 KiB of read buffer a stream, as much as a stream costs otherwise.
            call = rpc.TelemetryStub(channel).Stream(metadata=WAITS, compression=grpc.Compression.Gzip)
            end = CloseReason(call)
            try:
                welcome = await self._greet(call, address, limit_s)
                held = _held(welcome.held)
                if not await self._spool.welcome(held):
                    raise StreamEndedError("the spool has a new id, so the stream begins again")
                if not held.get(pb.EVENTS) and not self._spool.has_all_events:
                    self._owner.told_anew()
                self.streams += 1
                self._tries, self._together = 0, welcome.records
                self._pause_until = 0.0
                self.connected_to = address
                self._trouble.clear()
                log.info("connected to collector %s at %s", welcome.collector or "?", address)
                await self._exchange(call)
            except CALL_FAILURES as error:
                raise StreamEndedError(await end.why()) from error
            finally:
                call.cancel()

    async def _greet(self, call: Any, address: str, limit_s: float) -> pb.Welcome:
        # First, or its handshake would be taken for a clock that is wrong: a Hello tells the time.
        await _limited(call.wait_for_connection(), "no connection came about", limit_s)
        sent_s = self._clock.monotonic()
        self._hello_due = False
        await self._write(call, pb.AgentMessage(hello=self._owner.hello()))
        while True:
            answer = await _limited(call.read(), "no Welcome came", limit_s)
            if not isinstance(answer, pb.CollectorMessage):  # grpc's marker for the end of the stream
                raise CallEndedError
            if answer.WhichOneof("kind") != "backoff":
                break
            wait_s = min(answer.backoff.wait_ms / 1000, LONGEST_BACKOFF_S)
            if not answer.backoff.turn:
                raise BusyError(wait_s, answer.backoff.reason)
            log.info("collector at %s: %s, for about %.0f s", address, answer.backoff.reason, wait_s)
            limit_s = max(limit_s, wait_s + TURN_MARGIN_S)
        if answer.WhichOneof("kind") != "welcome":
            raise StreamEndedError(f"answered Hello with {answer.WhichOneof('kind')}; is this a Drover collector?")
        if answer.welcome.protocol != PROTOCOL:
            raise StreamEndedError(
                f"speaks protocol {answer.welcome.protocol}, this agent {PROTOCOL}; update the older"
            )
        if answer.welcome.ignored:
            log.warning("the collector does not know these columns: %s", ", ".join(answer.welcome.ignored))
        self._offset.answered(sent_s, answer.welcome.ts_ms)
        return answer.welcome

    async def _exchange(self, call: Any) -> None:
        """Send and read until one of them ends."""
        flight = InFlight(self._clock)
        tasks = [asyncio.create_task(self._send(call, flight)), asyncio.create_task(self._read(call, flight))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, call: Any, flight: InFlight) -> None:
        sent = dict(self._spool.held)
        look_s = self._clock.monotonic() + random.uniform(0.5, 1.0) * RENEWED_LOOK_S
        renewed, drained_s = False, 0.0
        while True:
            self._work.clear()
            if not renewed and self._clock.monotonic() >= look_s:
                look_s = self._clock.monotonic() + RENEWED_LOOK_S
                renewed, drained_s = self._tls.renewed(), self._clock.monotonic() + DRAIN_S
            if renewed and self._clock.monotonic() >= drained_s:
                renewed = False  # the collector's store lags, and events must not wait for it; another time
            if renewed and not flight.count:  # else it waits for the Acks of what was sent, and sends no more
                raise RenewedError
            if self._hello_due:
                self._hello_due = False
                await self._write(call, pb.AgentMessage(hello=self._owner.hello()))
                continue  # meanwhile a batch of a still newer schema may have come
            if flight.age() > ACK_LIMIT_S:
                raise StreamEndedError(f"nothing was acknowledged for {ACK_LIMIT_S:g} s")
            waits = self._pause_until - self._clock.monotonic()
            if not renewed and await self._send_next(call, flight, sent, waits <= 0):
                self._work.set()
            try:
                async with asyncio.timeout(min(max(waits, 0.05), LOOK_S) if waits > 0 else LOOK_S):
                    await self._work.wait()
            except TimeoutError:
                continue  # look at the clock again

    async def _send_next(self, call: Any, flight: InFlight, sent: dict[int, int], telemetry: bool) -> bool:
        """Send one message, events before telemetry and the live lane before the backfill.

        Telemetry that the collector asked to hold back, or cannot store, holds no event back.
        """
        for lane in LANES:
            if not flight.has_room(lane) or (lane != pb.EVENTS and not telemetry):
                continue
            if found := self._spool.next(lane, sent[lane]):
                seq, message, size = found
                sent[lane] = seq
                flight.add(lane, seq, size)
                if lane == pb.EVENTS and self._together:
                    message = self._more_records(message, flight, sent)
                await self._write(call, message)
                return True
        return False

    def _more_records(self, first: pb.AgentMessage, flight: InFlight, sent: dict[int, int]) -> pb.AgentMessage:
        """The records that wait behind one, in a message with it: a new agent has dozens to tell."""
        several, size = pb.Records(records=[first.record]), 0
        while len(several.records) < RECORDS_TOGETHER and size < TOGETHER_BYTES and flight.has_room(pb.EVENTS):
            found = self._spool.next(pb.EVENTS, sent[pb.EVENTS])
            if found is None:
                break
            sent[pb.EVENTS] = found[0]
            flight.add(pb.EVENTS, found[0], found[2])
            several.records.append(found[1].record)
            size += found[2]
        return first if len(several.records) == 1 else pb.AgentMessage(records=several)

    async def _write(self, call: Any, message: pb.AgentMessage) -> None:
        await _limited(call.write(message), "the collector does not take data", ANSWER_LIMIT_S)

    async def _read(self, call: Any, flight: InFlight) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, pb.CollectorMessage):
                raise CallEndedError
            kind = message.WhichOneof("kind")
            if kind == "ack":
                self._progress += 1
                for refused in message.ack.rejected:
                    self._spool.reject(refused.lane, refused.seq)
                    flight.refused(refused.lane, refused.seq)
                    self._owner.rejected(refused.lane, refused.seq, refused.reason)
                self._offset.answered(self._take(message.ack.held, flight), message.ack.ts_ms)
            elif kind == "welcome":  # the answer to a second Hello
                self._take(message.welcome.held, flight)
            elif kind == "backoff":
                wait_s = min(message.backoff.wait_ms / 1000, LONGEST_BACKOFF_S)
                log.info("the collector asks to wait %g s: %s", wait_s, message.backoff.reason)
                self._pause_until = self._clock.monotonic() + wait_s
            elif kind == "probe_request":
                self._owner.probe_asked(message.probe_request)

    def _take(self, held: Any, flight: InFlight) -> float | None:
        """Returns: the steady time when the newest of what is held was sent; None where nothing new is."""
        newest: float | None = None
        for lane, seq in _held(held).items():
            if not self._spool.ack(lane, seq):  # by the next Welcome the spool finds out whose it is
                name = pb.Lane.Name(pb.Lane.ValueType(lane))
                raise StreamEndedError(f"acknowledges {name} {seq}, which was never sent; the stream begins again")
            sent_s = flight.held(lane, seq)
            newest = sent_s if newest is None else max(newest, sent_s or newest)
        self._work.set()
        return newest

    async def delivered(self) -> None:
        """Returns when a collector holds everything."""
        while self.connected_to is None or self._spool.pending()[0]:
            await self._clock.sleep(0.02)


def pause_s(attempt: int, chance: Any) -> float:
    """Before the next attempt: anything up to a bound that doubles, so that agents that lost a collector at the same
    moment do not come back at the same moment. `chance`: the module `random`, or one of its generators."""
    longest = min(FIRST_PAUSE_S * 2 ** min(attempt, 10), LONGEST_PAUSE_S)
    return float(chance.uniform(FIRST_PAUSE_S, max(longest, 2 * FIRST_PAUSE_S)))


def welcome_limit_s(tries: int, chance: Any) -> float:
    """How long to wait for a connection, and then for a Welcome, after so many tries in vain. `chance` as above."""
    return float(min(WELCOME_LIMIT_S * 2 ** min(tries, 10), LONGEST_WELCOME_S) * chance.uniform(0.8, 1.0))


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _held(items: Any) -> dict[int, int]:
    return {item.lane: item.seq for item in items}


async def _limited(waiting: Any, otherwise: str, limit_s: float) -> Any:
    try:
        # Not wait_for: in Python 3.11 that may lose a cancellation.
        async with asyncio.timeout(limit_s):
            return await waiting
    except TimeoutError:
        raise StreamEndedError(f"{otherwise} for {limit_s:g} s") from None
