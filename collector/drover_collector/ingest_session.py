"""One stream of one agent, and what is taken from it on its way into the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from drover_collector.decode import Dictionary, Refusal
from drover_collector.records import Taken
from drover_proto import telemetry_pb2 as pb

log = logging.getLogger(__name__)

LANES = (pb.EVENTS, pb.LIVE, pb.BACKFILL)
SEND_S = 30.0  # how long an agent may leave an answer unread; its stream ends then
MAX_REFUSALS = 1000  # told with one Ack


class EndError(Exception):
    """The stream cannot go on: `code` and the message go to the agent."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Session:
    """State of a stream. Used in the event loop only.

    Acks are sent by a task of the stream's own: an agent that does not read keeps nobody else waiting. They say how
    far all is durable, so the newest stands for those before it.
    """

    def __init__(self, context: Any) -> None:
        self.context = context
        self.node = ""  # before Hello
        self.spool = ""
        self.dictionary: Dictionary | None = None  # None: before Hello, or after one that was refused
        self.no_dictionary = Refusal("no hello", "the stream did not begin with a Hello")
        self.hello_ms = 0  # the agent's clock at Hello
        self.clock_offset_ms = 0  # the collector's clock minus that
        self.hello_bytes = 0  # of the newest Hello, until the first batch that needs it is counted
        self.reader: asyncio.Task[None] | None = None
        self.end: EndError | None = None  # why we end this stream
        self.waiting = 0  # messages not acknowledged yet
        self._ack: pb.Ack | None = None  # to be sent
        self._due = asyncio.Event()
        self._settled = asyncio.Event()
        self._refusals: list[pb.Rejection] = []  # for the next Ack
        self._writing = asyncio.Lock()

    @property
    def key(self) -> tuple[str, str]:
        """Whose sequences these are; ("", "") while the stream speaks for nobody."""
        return (self.node, self.spool) if self.dictionary is not None else ("", "")

    def refuse(self, lane: pb.Lane.ValueType, seq: int, refusal: Refusal) -> None:
        """To be told with the next Ack."""
        if len(self._refusals) < MAX_REFUSALS:  # the Ack alone makes the agent drop it too
            self._refusals.append(pb.Rejection(lane=lane, seq=seq, reason=refusal.text[:500]))

    def acknowledge(self, held: Mapping[int, int], done: int, now_ms: int) -> None:
        """What is durable, to be sent; `done` more messages need no more waiting."""
        self._ack = pb.Ack(held=lane_seqs(held), ts_ms=now_ms)
        self.waiting -= done
        self._due.set()

    def give_up(self, done: int) -> None:
        """`done` messages will not be acknowledged: the agent sends them again."""
        self.waiting -= done
        self._due.set()

    async def send_acks(self) -> None:
        """Until cancelled, or until the agent does not take them any more."""
        while True:
            await self._due.wait()
            self._due.clear()
            if self._ack is not None:
                ack, self._ack = self._ack, None
                refused, self._refusals = self._refusals, []
                ack.rejected.extend(refused)
                await self.send(pb.CollectorMessage(ack=ack))
            if not self.waiting and self._ack is None:
                self._settled.set()

    async def settled(self) -> None:
        """Returns when all that came is acknowledged."""
        while self.waiting or self._ack is not None:
            self._settled.clear()
            await self._settled.wait()

    def stop(self, why: EndError) -> None:
        """End the stream."""
        self.end = self.end or why
        if self.reader is not None:
            self.reader.cancel()

    def miss_hello(self, within_s: float) -> None:
        """End a stream that has not said who it is."""
        if not self.node:
            self.stop(EndError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no Hello came within {within_s:g} s"))

    async def send(self, message: pb.CollectorMessage) -> None:
        """A stream that has ended meanwhile gets nothing; its agent will ask again."""
        try:
            async with asyncio.timeout(SEND_S), self._writing:
                await self.context.write(message)
        except TimeoutError:
            self.stop(EndError(grpc.StatusCode.ABORTED, f"the agent did not take an answer for {SEND_S:g} s"))
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as error:
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


def lane_seqs(held: Mapping[int, int]) -> list[pb.LaneSeq]:
    return [pb.LaneSeq(lane=lane, seq=held.get(lane, 0)) for lane in LANES]
