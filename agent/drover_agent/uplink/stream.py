"""Send what waits in the spool to a collector, and take its acknowledgements.

One collector at a time. If its stream fails, the next address is tried, with growing pauses. Messages that were sent
and not acknowledged are bounded in number and size, and are sent again on the next stream.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from drover_agent.clock import Clock
from drover_agent.config import AgentConfig
from drover_agent.spool.async_spool import AsyncSpool
from drover_agent.spool.messages import Outgoing, agent_message
from drover_agent.spool.spool import LANES
from drover_agent.uplink.clock_offset import ClockOffset
from drover_agent.uplink.close_reason import CloseReason
from drover_agent.uplink.in_flight import InFlight
from drover_agent.uplink.tls import ClientTls
from drover_core.x509 import CertificateError
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

PROTOCOL = 1
STREAM = f"/{pb.DESCRIPTOR.services_by_name['Telemetry'].full_name}/Stream"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
ANSWER_LIMIT_S = 15.0  # for a write that flow control holds back
# All agents connect at once after a restart of the collector, and a handshake that is given up has to be repeated. So
# each failed try doubles the wait of the next one. A collector that is busy with others says so, and is waited for.
# The first wait is longer than two cores take for 12,500 streams (docs/evidence/scale.md), and little longer than the
# 63 s after which the kernel sends its seventh SYN: after a partition the eighth would follow a minute later.
WELCOME_LIMIT_S, LONGEST_WELCOME_S = 90.0, 240.0
CONNECT_SHARE = 0.5  # of that, for a connection and its handshake, if there is another collector to try
TURN_MARGIN_S = 60.0  # added to the wait that a collector announces
ACK_LIMIT_S = 60.0  # a collector that takes data and acknowledges nothing is given up
CHECK_S = 5.0  # how often a stream with nothing to send checks its limits
LONGEST_BACKOFF_S = 300.0
RENEWAL_CHECK_S = 60.0  # how often a stream checks for a renewed certificate; agents spread these checks
DRAIN_S = 5.0  # how long such a stream waits for Acks before it goes on with the old certificate
RECORDS_PER_MESSAGE, RECORDS_BYTES = 64, 65_536
MAX_MESSAGE_BYTES = 16 * 2**20
METADATA = (("drover-turn", "1"),)  # this agent understands a Backoff with `turn`
OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Servers count frequent pings while they send nothing. Data that is sent and not taken ends a dead connection after
    # the timeout anyway.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # our pauses between tries, not those of a shared channel
    ("grpc.enable_retries", 0),
    # Little is received: no pings that measure bandwidth after each Ack. Each ping wakes gRPC's threads.
    ("grpc.http2.bdp_probe", 0),
)


class StreamEndedError(Exception):
    """The stream cannot go on; the message says why."""


class CallEndedError(Exception):
    """The collector ended the call; the call knows why."""


class BusyError(StreamEndedError):
    """The collector asks to be called again in `wait_s`."""

    def __init__(self, wait_s: float, reason: str) -> None:
        super().__init__(f"asked to come back in {wait_s:.0f} s: {reason}")
        self.wait_s = wait_s


class RenewedError(Exception):
    """The certificate was renewed and all that was sent is acknowledged: the next stream uses it."""


# InvalidStateError: the call ended while it was written to.
CALL_FAILURES = (CallEndedError, grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
FAILURES = (StreamEndedError, *CALL_FAILURES, OSError, ValueError)  # ValueError: certificates that cannot be parsed


class Owner(Protocol):
    """What the uplink needs of the agent."""

    def hello(self) -> pb.Hello: ...

    def report_state_again(self) -> None: ...

    def count_rejection(self, lane: int, seq: int, reason: str) -> None: ...

    def add_probe_request(self, request: pb.ProbeRequest) -> None: ...

    def take_gate_verdict(self, verdict: pb.GateVerdict) -> None: ...


@dataclass(slots=True)
class CollectorState:
    """What is known of one address.

    Attributes:
        trouble: what was logged last, "" while there is nothing to log.
        busy_until_s: steady time before which it does not want to be called.
    """

    trouble: str = ""
    busy_until_s: float = 0.0


class Uplink:
    """The stream of one agent; `run` keeps it open until cancelled. For the event loop's thread."""

    def __init__(
        self, config: AgentConfig, spool: AsyncSpool, owner: Owner, clock: Clock, work: asyncio.Event | None = None
    ) -> None:
        """`work` is set when there may be something to send."""
        self._config = config
        self._spool = spool
        self._owner = owner
        self._clock = clock
        self._work = work or asyncio.Event()
        self._tls = ClientTls(config.tls)
        self._offset = ClockOffset(clock)
        self._collectors = {address: CollectorState() for address in config.collectors}
        self._hello_due = False
        self._pause_until_s = 0.0  # steady time; telemetry waits until then
        self._acks = 0
        self._failed_tries = 0  # in a row, without a Welcome
        self._accepts_records = False  # the collector takes several records in a message
        self.connected_to: str | None = None
        self.streams = 0  # streams that got a Welcome

    @property
    def offset_s(self) -> float | None:
        """Node clock minus the collector's in s, at the last exchange."""
        return self._offset.seconds

    def wake(self) -> None:
        """Check now whether there is something to send."""
        self._work.set()

    def send_hello(self) -> None:
        """Send a Hello again: entities, schemas or inventory have changed."""
        self._hello_due = True
        self._work.set()

    async def run(self) -> None:
        attempt = 0
        addresses = self._config.collectors
        at = 0
        while True:
            before, began, address = self._acks, self._clock.monotonic(), addresses[at]
            try:
                await self._stream(address)
            except RenewedError:
                log.info("Reconnecting with the renewed certificate.")
                self.connected_to = None
                continue
            except FAILURES as error:
                self._log_trouble(address, error)
                if isinstance(error, BusyError):
                    self._collectors[address].busy_until_s = self._clock.monotonic() + error.wait_s
            except asyncio.CancelledError:
                # grpc raises this too when the other side cancels the stream, which is no reason to stop.
                if _is_cancelled():
                    raise
                self._log_trouble(address, StreamEndedError("the stream was cancelled"))
            self.connected_to = None
            if _is_cancelled():  # grpc turned the cancellation into an error of the stream
                raise asyncio.CancelledError
            # A Welcome alone is not a success: all agents would call a collector that cannot store every second.
            lasted = self._clock.monotonic() - began
            attempt = 0 if self._acks > before or lasted > LONGEST_PAUSE_S else attempt + 1
            # The next one that is not busy, else the one that is free first.
            following = (n % len(addresses) for n in range(at + 1, at + 1 + len(addresses)))
            at = min(following, key=lambda n: self._busy_s(addresses[n]))
            pause = pause_s(attempt // len(addresses), random)  # all are tried before it grows
            await self._clock.sleep(max(pause, self._busy_s(addresses[at])))

    def _busy_s(self, address: str) -> float:
        """Return for how many seconds a collector does not want to be called."""
        return max(0.0, self._collectors[address].busy_until_s - self._clock.monotonic())

    def _log_trouble(self, address: str, error: Exception) -> None:
        """Log why a stream failed, once until the reason changes."""
        why = str(error)
        # An error of a certificate explains itself, and after a Welcome TLS works.
        if not isinstance(error, CertificateError) and self.connected_to != address:
            why = self._tls.explain(why)
        text = f"{address}: {why}"
        if text != self._collectors[address].trouble:
            log.warning("No connection to a collector: %s. Data is kept in the spool.", text)
        self._collectors[address].trouble = text

    def _channel(self, address: str, limit_s: float) -> grpc.aio.Channel:
        connect_s = limit_s * (CONNECT_SHARE if len(self._config.collectors) > 1 else 1.0)
        options = (
            *OPTIONS,
            ("grpc.min_reconnect_backoff_ms", round(1000 * connect_s)),
        )  # bounds how long connecting takes
        if not self._tls.on:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._tls.credentials(), options=options)

    async def _stream(self, address: str) -> None:
        limit_s = welcome_limit_s(self._failed_tries // len(self._config.collectors), random)
        self._failed_tries += 1
        async with self._channel(address, limit_s) as channel:
            # Gzip: a quarter of the size for some 35 us of CPU a second. Messages below 6 kB save the collector 64 KiB
            # of read buffer for each stream, as much as the stream costs otherwise.
            stream: Any = channel.stream_stream(STREAM, response_deserializer=pb.CollectorMessage.FromString)
            call = stream(metadata=METADATA, compression=grpc.Compression.Gzip)
            end = CloseReason(call)
            try:
                welcome = await self._greet(call, address, limit_s)
                held = _held(welcome.held)
                if not await self._spool.apply_welcome(held):
                    raise StreamEndedError("the spool has a new id, so the stream begins again")
                if not held.get(pb.EVENTS) and not self._spool.status.has_all_events:
                    self._owner.report_state_again()
                self.streams += 1
                self._failed_tries, self._accepts_records = 0, welcome.records
                self._pause_until_s = 0.0
                self.connected_to = address
                for collector in self._collectors.values():
                    collector.trouble = ""
                log.info("Connected to collector %s at %s.", welcome.collector or "?", address)
                await self._exchange(call)
            except CALL_FAILURES as error:
                raise StreamEndedError(await end.text()) from error
            finally:
                call.cancel()

    async def _greet(self, call: Any, address: str, limit_s: float) -> pb.Welcome:
        # Before the Hello, which carries the time: the handshake would be taken for a clock that is wrong.
        await _limited(call.wait_for_connection(), "no connection", limit_s)
        sent_s = self._clock.monotonic()
        await self._send_hello(call)
        while True:
            answer = await _limited(call.read(), "no Welcome", limit_s)
            if not isinstance(answer, pb.CollectorMessage):  # grpc's marker for the end of the stream
                raise CallEndedError
            if answer.WhichOneof("kind") != "backoff":
                break
            wait_s = min(answer.backoff.wait_ms / 1000, LONGEST_BACKOFF_S)
            if not answer.backoff.turn:
                raise BusyError(wait_s, answer.backoff.reason)
            log.info("Collector at %s: %s, for about %.0f s.", address, answer.backoff.reason, wait_s)
            limit_s = max(limit_s, wait_s + TURN_MARGIN_S)
        if answer.WhichOneof("kind") != "welcome":
            raise StreamEndedError(f"answered Hello with {answer.WhichOneof('kind')}; is this a Drover collector?")
        if answer.welcome.protocol != PROTOCOL:
            raise StreamEndedError(
                f"speaks protocol {answer.welcome.protocol}, this agent {PROTOCOL}; update the older of the two"
            )
        if answer.welcome.ignored:
            log.warning(
                "The collector does not know these metrics and ignores them: %s", ", ".join(answer.welcome.ignored)
            )
        self._offset.add_exchange(sent_s, answer.welcome.ts_ms)
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

    async def _send_hello(self, call: Any) -> None:
        self._hello_due = False
        await self._write(call, pb.AgentMessage(hello=self._owner.hello()).SerializeToString())

    async def _send(self, call: Any, flight: InFlight) -> None:
        sent = dict(self._spool.held)
        check_s = self._clock.monotonic() + random.uniform(0.5, 1.0) * RENEWAL_CHECK_S
        renewed, drained_s = False, 0.0
        while True:
            self._work.clear()
            if not renewed and self._clock.monotonic() >= check_s:
                check_s = self._clock.monotonic() + RENEWAL_CHECK_S
                renewed, drained_s = self._tls.renewed(), self._clock.monotonic() + DRAIN_S
            if renewed and self._clock.monotonic() >= drained_s:
                renewed = False  # the collector stores slowly, and events must not wait for it; try again later
            if renewed and not flight.count:  # until then nothing is sent, and Acks are waited for
                raise RenewedError
            if self._hello_due:
                await self._send_hello(call)
                continue  # meanwhile a batch of a still newer schema may have been added
            if flight.age_s() > ACK_LIMIT_S:
                raise StreamEndedError(f"nothing was acknowledged for {ACK_LIMIT_S:g} s")
            wait_s = self._pause_until_s - self._clock.monotonic()
            if not renewed and await self._send_next(call, flight, sent, wait_s <= 0):
                self._work.set()
            try:
                async with asyncio.timeout(min(max(wait_s, 0.05), CHECK_S) if wait_s > 0 else CHECK_S):
                    await self._work.wait()
            except TimeoutError:
                continue  # check the clock again

    async def _send_next(self, call: Any, flight: InFlight, sent: dict[int, int], telemetry: bool) -> bool:
        """Send one message, events before telemetry and the LIVE lane before the BACKFILL lane.

        Events go out also while the collector asks for no telemetry, or cannot store it.
        """
        for lane in LANES:
            if not flight.has_room(lane) or (lane != pb.EVENTS and not telemetry):
                continue
            if found := self._take_next(lane, flight, sent):
                bodies = [found.body]
                if lane == pb.EVENTS and self._accepts_records:
                    bodies += self._more_records(flight, sent)
                await self._write(call, agent_message(lane, bodies))
                return True
        return False

    def _take_next(self, lane: int, flight: InFlight, sent: dict[int, int]) -> Outgoing | None:
        found = self._spool.next(lane, sent[lane])
        if found is not None:
            sent[lane] = found.seq
            flight.add(lane, found.seq, len(found.body))
        return found

    def _more_records(self, flight: InFlight, sent: dict[int, int]) -> list[bytes]:
        """Return further records for the same message: a new agent reports dozens at once."""
        bodies: list[bytes] = []
        size = 0
        while len(bodies) < RECORDS_PER_MESSAGE - 1 and size < RECORDS_BYTES and flight.has_room(pb.EVENTS):
            found = self._take_next(pb.EVENTS, flight, sent)
            if found is None:
                break
            bodies.append(found.body)
            size += len(found.body)
        return bodies

    async def _write(self, call: Any, message: bytes) -> None:
        await _limited(call.write(message), "the collector takes no data", ANSWER_LIMIT_S)

    async def _read(self, call: Any, flight: InFlight) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, pb.CollectorMessage):
                raise CallEndedError
            kind = message.WhichOneof("kind")
            if kind == "ack":
                self._acks += 1
                for refused in message.ack.rejected:
                    self._spool.reject(refused.lane, refused.seq)
                    flight.drop(refused.lane, refused.seq)
                    self._owner.count_rejection(refused.lane, refused.seq, refused.reason)
                self._offset.add_exchange(self._take(message.ack.held, flight), message.ack.ts_ms)
            elif kind == "welcome":  # the answer to a second Hello
                self._take(message.welcome.held, flight)
            elif kind == "backoff":
                wait_s = min(message.backoff.wait_ms / 1000, LONGEST_BACKOFF_S)
                log.info("The collector asks to send no telemetry for %g s: %s", wait_s, message.backoff.reason)
                self._pause_until_s = self._clock.monotonic() + wait_s
            elif kind == "probe_request":
                self._owner.add_probe_request(message.probe_request)
            elif kind == "gate_verdict":
                self._owner.take_gate_verdict(message.gate_verdict)

    def _take(self, held: Any, flight: InFlight) -> float | None:
        """Take over offsets. Return the steady time when the newest of them was sent, None if none is new."""
        newest: float | None = None
        for lane, seq in _held(held).items():
            if not self._spool.ack(lane, seq):  # the spool finds out at the next Welcome whose sequence this is
                name = pb.Lane.Name(pb.Lane.ValueType(lane))
                raise StreamEndedError(f"acknowledges {name} {seq}, which was never sent; the stream begins again")
            sent_s = flight.ack(lane, seq)
            newest = sent_s if newest is None else max(newest, sent_s or newest)
        self._work.set()
        return newest

    async def delivered(self) -> None:
        """Wait until a collector holds everything."""
        while self.connected_to is None or self._spool.pending()[0]:
            await self._clock.sleep(0.02)


def pause_s(attempt: int, chance: Any) -> float:
    """Return the pause before the next try: a random time below a bound that doubles with each attempt.

    So agents that lost a collector together do not come back together. `chance`: the module `random` or a generator.
    """
    longest = min(FIRST_PAUSE_S * 2 ** min(attempt, 10), LONGEST_PAUSE_S)
    return float(chance.uniform(FIRST_PAUSE_S, max(longest, 2 * FIRST_PAUSE_S)))


def welcome_limit_s(tries: int, chance: Any) -> float:
    """Return how long to wait for a connection, and then for a Welcome, after so many failed tries."""
    return float(min(WELCOME_LIMIT_S * 2 ** min(tries, 10), LONGEST_WELCOME_S) * chance.uniform(0.8, 1.0))


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _held(items: Any) -> dict[int, int]:
    return {item.lane: item.seq for item in items}


async def _limited(waiting: Any, failure: str, limit_s: float) -> Any:
    """Wait for `waiting`; after `limit_s` raise StreamEndedError with `failure`."""
    try:
        # Not wait_for: in Python 3.11 it may lose a cancellation.
        async with asyncio.timeout(limit_s):
            return await waiting
    except TimeoutError:
        raise StreamEndedError(f"{failure} for {limit_s:g} s") from None
