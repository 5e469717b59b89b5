"""The state of one agent's stream, and its messages on their way into the store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from drover_collector.grpc_h2 import CallEndedError
from drover_collector.ingest.limits import AgentAllowance
from drover_collector.ingest.parse_records import ParsedRecord
from drover_collector.ingest.schema_registry import Refusal, SchemaRegistry
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

LANES = (pb.EVENTS, pb.LIVE, pb.BACKFILL)
SEND_S = 30.0  # an agent may leave an answer unread so long; then its stream ends
MAX_REFUSALS = 1000  # in one Ack
NO_HELLO = Refusal("no hello", "the stream did not begin with a Hello")


def boot_s() -> float:
    """Return this machine's steady clock, which runs during sleep too, seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class StreamClosed(Exception):  # noqa: N818  # a reason, which is raised in the stream's task and stored elsewhere
    """The stream ends: `code` and the message go to the agent.

    The stream's own task raises it. Other tasks pass it to `AgentStream.close`, which cancels that task.
    """

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class AgentStream:
    """Sends on a stream, and ends it. Made in the task that serves the stream.

    Attributes:
        closed: why the collector ends the stream.
    """

    __slots__ = ("_lock", "_task", "call", "closed")

    def __init__(self, call: Any) -> None:
        self.call = call
        self.closed: StreamClosed | None = None
        self._task = asyncio.current_task()
        self._lock: asyncio.Lock | None = None  # held while a send waits

    def close(self, why: StreamClosed) -> None:
        """End the stream from any task, by cancelling its own."""
        if self.closed is None:
            self.closed = why
            if self._task is not None:
                self._task.cancel()

    async def abort(self, why: StreamClosed) -> None:
        """End the stream from its own task. Waits for a send: gRPC refuses to abort during one."""
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            await self.call.abort(why.code, str(why))

    def try_send(self, data: bytes) -> bool:
        """Send a message if that needs no waiting. Return whether it was sent."""
        return (self._lock is None or not self._lock.locked()) and bool(self.call.try_write(data))

    async def send(self, data: bytes) -> None:
        """Send a message. Ignored if the stream has ended: its agent asks again."""
        if self.try_send(data):
            return
        self._lock = self._lock or asyncio.Lock()
        try:
            async with asyncio.timeout(SEND_S), self._lock:
                await self.call.write(data)
        except TimeoutError:
            text = f"the agent did not read an answer for {SEND_S:g} s; check its network"
            self.close(StreamClosed(grpc.StatusCode.ABORTED, text))
        except CallEndedError as error:
            log.debug("%s: not sent: %s", self.call.peer(), error)


@dataclass(slots=True)
class Opening:
    """The time and size of a stream's handshake.

    Attributes:
        due_s: since when the Hello is due, or processed; monotonic.
        hello_ms: when the first Hello arrived, which may then wait for its turn; 0: not yet.
        queued: the Hello waits for its turn, which may take long.
        hello_bytes: of the newest Hello, until the first batch that needs it is counted.
    """

    opened_s: float = field(default_factory=time.monotonic)
    due_s: float = field(default_factory=time.monotonic)
    hello_ms: int = 0
    queued: bool = False
    hello_bytes: int = 0


@dataclass(slots=True)
class NodeClock:
    """The clocks of an agent's node, as of its Hello.

    Attributes:
        hello_ms: the node's wall clock when the Hello was answered.
        offset_ms: the collector's wall clock minus the node's when the Hello arrived.
        up_ms: how long the node was up at `up_s` of our steady clock; 0: not reported.
    """

    hello_ms: int = 0
    offset_ms: int = 0
    up_ms: int = 0
    up_s: float = 0.0

    def age_ms(self, up_ms: int) -> int | None:
        """Return how long ago the node was up for `up_ms`, whatever any wall clock says; None: not known."""
        if not up_ms or not self.up_ms:
            return None
        return max(0, self.up_ms + round(1000 * (boot_s() - self.up_s)) - up_ms)


class AckState:
    """What the next Ack of a stream reports.

    Attributes:
        waiting: messages that are neither durable nor given up.
        unacked: messages that became durable since the last Ack.
        sent_s: when the last Ack left. sending: an Ack waits to be sent.
    """

    __slots__ = ("_refusals", "_settled", "sending", "sent_s", "unacked", "waiting")

    def __init__(self) -> None:
        self.waiting = self.unacked = 0
        self.sent_s, self.sending = 0.0, False
        self._refusals: list[pb.Rejection] = []
        self._settled: asyncio.Event | None = None

    @property
    def urgent(self) -> bool:
        """Whether the Ack must not wait: it reports a refusal, or the agent waits for it to leave."""
        return bool(self._refusals) or self._settled is not None

    def refuse(self, lane: pb.Lane.ValueType, seq: int, refusal: Refusal) -> None:
        """Report a refusal with the next Ack."""
        if len(self._refusals) < MAX_REFUSALS:  # beyond, the Ack alone makes the agent drop the message
            self._refusals.append(pb.Rejection(lane=lane, seq=seq, reason=refusal.text[:500]))

    def settle(self, done: int, acknowledged: bool) -> None:
        """Count `done` messages as durable, or else given up: then the agent resends them."""
        self.waiting -= done
        if acknowledged:
            self.unacked += done
        self._check_settled()

    def try_send(self, stream: AgentStream, held: Mapping[int, int], now_ms: int) -> bool:
        """Send the Ack if that needs no waiting. Return whether it was sent."""
        if not stream.try_send(encode_ack(held, now_ms, self._refusals)):
            return False
        self._refusals.clear()
        self.unacked, self.sent_s = 0, time.monotonic()
        self._check_settled()
        return True

    async def send(self, stream: AgentStream, held: Mapping[int, int], now_ms: int) -> None:
        """Send the Ack. It replaces all earlier ones."""
        refused, self._refusals = self._refusals, []
        self.unacked, self.sent_s, self.sending = 0, time.monotonic(), True
        try:
            await stream.send(encode_ack(held, now_ms, refused))
        finally:
            self.sending = False
            self._check_settled()

    async def wait_settled(self) -> None:
        """Return when every message is acknowledged or given up."""
        while self.waiting or self.unacked or self.sending:
            self._settled = asyncio.Event()
            await self._settled.wait()

    def _check_settled(self) -> None:
        if self._settled is not None and not (self.waiting or self.unacked or self.sending):
            self._settled.set()


class Session:
    """State of one stream. Event loop only; made in the task that serves the stream.

    There may be thousands: no task, lock or event waits for each of them.

    Attributes:
        account: what the agent has used of its limits.
        node, spool, boot: the agent's; "" before its Hello.
        registry: None before a Hello, or after one that was refused; `no_registry` says why.
        last_message_s, backoff_s: when the last message arrived, and when the agent was last asked to wait; monotonic.
        gapped: lanes from which a message was dropped: later ones must not be acknowledged.
    """

    __slots__ = (
        "account", "acks", "backoff_s", "boot", "clock", "gapped", "last_message_s", "no_registry", "node", "opening",
        "registry", "spool", "stream", "welcomed",
    )  # fmt: skip

    def __init__(self, call: Any, account: AgentAllowance) -> None:
        self.stream = AgentStream(call)
        self.account = account
        self.node = self.spool = self.boot = ""
        self.registry: SchemaRegistry | None = None
        self.no_registry = NO_HELLO
        self.opening, self.clock, self.acks = Opening(), NodeClock(), AckState()
        self.last_message_s = self.opening.opened_s
        self.backoff_s = 0.0
        self.gapped: set[int] = set()
        self.welcomed = False

    @property
    def key(self) -> tuple[str, str]:
        """Node and spool that the stream's sequences belong to; ("", "") without a registry."""
        return (self.node, self.spool) if self.registry is not None else ("", "")

    @property
    def identity(self) -> tuple[str, str]:
        """What distinguishes agents that claim the same node."""
        return self.spool, self.boot

    @property
    def closed(self) -> StreamClosed | None:
        return self.stream.closed

    @property
    def peer(self) -> str:
        """The agent's address as gRPC writes it: "ipv4:10.0.0.7:43210"."""
        return str(self.stream.call.peer())

    @property
    def scraped(self) -> bool:
        """Whether the values are those of exporters' pages: the node's own agent outranks them."""
        return bool(getattr(self.stream.call, "scraped", False))

    def metadata(self) -> Sequence[tuple[str, str]]:
        return self.stream.call.invocation_metadata() or ()

    def close(self, code: grpc.StatusCode, text: str) -> None:
        """End the stream from any task."""
        self.stream.close(StreamClosed(code, text))

    def try_send(self, message: pb.CollectorMessage) -> bool:
        """Send a message if that needs no waiting. Return whether it was sent."""
        return self.stream.try_send(message.SerializeToString())

    async def send(self, message: pb.CollectorMessage) -> None:
        await self.stream.send(message.SerializeToString())


@dataclass(slots=True)
class PendingMessage:
    """A message on its way into the store. Without batch and record it is only acknowledged."""

    session: Session
    key: tuple[str, str]  # node, spool id
    lane: pb.Lane.ValueType
    seq: int
    size: int  # bytes of memory
    batch: tuple[SchemaRegistry, pb.Batch] | None = None
    record: ParsedRecord | None = None
    received_s: float = field(default_factory=time.monotonic)
    account: AgentAllowance = field(init=False)

    def __post_init__(self) -> None:
        self.account = self.session.account  # a later Hello may change the session's

    @property
    def urgent(self) -> bool:
        """Whether its agent or the detectors wait for it: refusals, events and probe results."""
        record = self.record
        return self.lane == pb.EVENTS and (record is None or (record.absence is None and record.holding is None))


def lane_seqs(held: Mapping[int, int]) -> list[pb.LaneSeq]:
    return [pb.LaneSeq(lane=lane, seq=held.get(lane, 0)) for lane in LANES]


_ACK = pb.CollectorMessage(ack=pb.Ack(held=lane_seqs({})))  # reused: making one costs more than serializing it
_SEQS = {place.lane: place for place in _ACK.ack.held}


def encode_ack(held: Mapping[int, int], now_ms: int, refused: Sequence[pb.Rejection]) -> bytes:
    for lane, place in _SEQS.items():
        place.seq = held.get(lane, 0)
    del _ACK.ack.rejected[:]
    _ACK.ack.rejected.extend(refused)
    _ACK.ack.ts_ms = now_ms
    return _ACK.SerializeToString()
