"""One stream of one agent, and what is taken from it on its way into the store."""

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
from drover_collector.ingest.parse_records import Taken
from drover_collector.ingest.schema_registry import Dictionary, Refusal
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

LANES = (pb.EVENTS, pb.LIVE, pb.BACKFILL)
SEND_S = 30.0  # how long an agent may leave an answer unread; its stream ends then
MAX_REFUSALS = 1000  # told with one Ack
NO_HELLO = Refusal("no hello", "the stream did not begin with a Hello")


def boot_s() -> float:
    """Of this machine's steady clock, the time it slept too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class EndError(Exception):
    """The stream cannot go on: `code` and the message go to the agent."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Session:
    """State of a stream. Used in the event loop only; made in the task that reads the stream.

    There may be many thousands: no task, lock or event of its own waits for each of them.
    """

    __slots__ = (
        "_refusals", "_settled", "_task", "_writing", "account", "acked_s", "boot", "clock_offset_ms", "context",
        "dictionary", "due_s", "end", "gapped", "heard_s", "hello_bytes", "hello_came_ms", "hello_ms", "no_dictionary",
        "node", "opened_s", "queued", "sending", "spool", "told_back_s", "unacked", "up_ms",
        "up_s", "waiting", "welcomed",
    )  # fmt: skip

    def __init__(self, context: Any, account: AgentAllowance) -> None:
        self.context = context
        self.account = account
        self.node = ""  # before Hello
        self.spool = ""
        self.boot = ""
        self.dictionary: Dictionary | None = None  # None: before Hello, or after one that was refused
        self.no_dictionary = NO_HELLO
        self.hello_ms = 0  # the agent's clock at its Hello's answer
        self.clock_offset_ms = 0  # the collector's clock minus the agent's, when the Hello came
        self.up_ms = 0  # of its node, as of `up_s`; 0: its agent does not say
        self.up_s = 0.0
        self.hello_came_ms = 0  # when the first Hello was there, which may have waited for its turn; 0: not yet
        self.hello_bytes = 0  # of the newest Hello, until the first batch that needs it is counted
        self.end: EndError | None = None  # why we end this stream
        self.opened_s = self.heard_s = time.monotonic()
        self.due_s = self.opened_s  # since when its Hello is due, or worked on
        self.queued = False  # its Hello waits for its turn, which takes as long as it takes
        self.waiting = 0  # messages that are neither durable nor given up
        self.unacked = 0  # those that are durable since the last Ack
        self.acked_s = 0.0  # when the last Ack left
        self.told_back_s = 0.0  # when the agent was asked to hold back last
        self.gapped: set[int] = set()  # lanes of which something was dropped: nothing after it may be acknowledged
        self.sending = False  # an Ack is on its way
        self.welcomed = False
        self._refusals: list[pb.Rejection] = []  # for the next Ack
        self._task = asyncio.current_task()
        self._settled: asyncio.Event | None = None
        self._writing: asyncio.Lock | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Whose sequences these are; ("", "") while the stream speaks for nobody."""
        return (self.node, self.spool) if self.dictionary is not None else ("", "")

    def age_ms(self, boot: str, up_ms: int) -> int | None:
        """How long ago it was that its node was up for `up_ms` in this boot, whatever any wall clock says; None: not
        known, or of another boot."""
        if not boot or boot != self.boot or not up_ms or not self.up_ms:
            return None
        return max(0, self.up_ms + round(1000 * (boot_s() - self.up_s)) - up_ms)

    @property
    def identity(self) -> tuple[str, str]:
        """Which agent this is, among several that claim a node."""
        return self.spool, self.boot

    @property
    def pressing(self) -> bool:
        """Whether an Ack must not wait: it tells of something refused."""
        return bool(self._refusals) or self._settled is not None

    def refuse(self, lane: pb.Lane.ValueType, seq: int, refusal: Refusal) -> None:
        """To be told with the next Ack."""
        if len(self._refusals) < MAX_REFUSALS:  # the Ack alone makes the agent drop it too
            self._refusals.append(pb.Rejection(lane=lane, seq=seq, reason=refusal.text[:500]))

    def settle(self, done: int, acknowledged: bool) -> None:
        """`done` messages are durable, or else given up: the agent sends them again."""
        self.waiting -= done
        if acknowledged:
            self.unacked += done
        self._tell_settled()

    def acknowledge_at_once(self, held: Mapping[int, int], now_ms: int) -> bool:
        """As `acknowledge`, where nothing stands in its way; False: nothing was told."""
        if not self._said_at_once(ack(held, now_ms, self._refusals)):
            return False
        self._refusals.clear()
        self.unacked, self.acked_s = 0, time.monotonic()
        self._tell_settled()
        return True

    async def acknowledge(self, held: Mapping[int, int], now_ms: int) -> None:
        """Tell how far all is durable, and what was refused; the newest Ack stands for those before it."""
        refused, self._refusals = self._refusals, []
        self.unacked, self.acked_s, self.sending = 0, time.monotonic(), True
        try:
            await self._send(ack(held, now_ms, refused))
        finally:
            self.sending = False
            self._tell_settled()

    async def settled(self) -> None:
        """Returns when all that came is acknowledged."""
        while self.waiting or self.unacked or self.sending:
            self._settled = asyncio.Event()
            await self._settled.wait()

    def _tell_settled(self) -> None:
        if self._settled is not None and not (self.waiting or self.unacked or self.sending):
            self._settled.set()

    def stop(self, why: EndError) -> None:
        """End the stream."""
        if self.end is None:
            self.end = why
            if self._task is not None:
                self._task.cancel()

    async def abort(self, why: EndError) -> None:
        """End the stream from its own task. Not while an answer is on its way: gRPC would refuse, and leave it open."""
        self._writing = self._writing or asyncio.Lock()
        async with self._writing:
            await self.context.abort(why.code, str(why))

    @property
    def peer(self) -> str:
        """Whence it comes, as gRPC names it: "ipv4:10.0.0.7:43210"."""
        return str(self.context.peer())

    async def send(self, message: pb.CollectorMessage) -> None:
        """A stream that has ended meanwhile gets nothing; its agent will ask again."""
        await self._send(message.SerializeToString())

    def _said_at_once(self, said: bytes) -> bool:
        return (self._writing is None or not self._writing.locked()) and bool(self.context.try_write(said))

    async def _send(self, said: bytes) -> None:
        if self._said_at_once(said):
            return
        self._writing = self._writing or asyncio.Lock()
        try:
            async with asyncio.timeout(SEND_S), self._writing:
                await self.context.write(said)
        except TimeoutError:
            self.stop(EndError(grpc.StatusCode.ABORTED, f"the agent did not take an answer for {SEND_S:g} s"))
        except CallEndedError as error:
            log.debug("%s: not told: %s", self.node, error)


@dataclass(slots=True)
class Waiting:
    """A message on its way into the store. Without batch and record: refused or known, only to be acknowledged."""

    session: Session
    key: tuple[str, str]  # node, spool id
    lane: pb.Lane.ValueType
    seq: int
    size: int
    batch: tuple[Dictionary, pb.Batch] | None = None
    record: Taken | None = None
    came_s: float = field(default_factory=time.monotonic)
    account: AgentAllowance = field(init=False)

    def __post_init__(self) -> None:
        self.account = self.session.account  # a later Hello may change the session's

    @property
    def urgent(self) -> bool:
        """Whether its agent, or whoever judges, waits for it: what is refused, events and results of probes."""
        record = self.record
        return self.lane == pb.EVENTS and (record is None or (record.absence is None and record.holding is None))


def lane_seqs(held: Mapping[int, int]) -> list[pb.LaneSeq]:
    return [pb.LaneSeq(lane=lane, seq=held.get(lane, 0)) for lane in LANES]


_ACK = pb.CollectorMessage(ack=pb.Ack(held=lane_seqs({})))  # one for all: to make one costs more than to write it
_SEQS = {place.lane: place for place in _ACK.ack.held}


def ack(held: Mapping[int, int], now_ms: int, refused: Sequence[pb.Rejection]) -> bytes:
    for lane, place in _SEQS.items():
        place.seq = held.get(lane, 0)
    del _ACK.ack.rejected[:]
    _ACK.ack.rejected.extend(refused)
    _ACK.ack.ts_ms = now_ms
    return _ACK.SerializeToString()
