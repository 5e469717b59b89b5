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


class EndError(Exception):
    """The stream cannot go on: `code` and the message go to the agent."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class Session:
    """State of a stream. Used in the event loop only."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.node = ""  # before Hello
        self.spool = ""
        self.dictionary: Dictionary | None = None  # None: before Hello, or after one that was refused
        self.no_dictionary = Refusal("no hello", "the stream did not begin with a Hello")
        self.hello_ms = 0  # the agent's clock at Hello
        self.clock_offset_ms = 0  # the collector's clock minus that
        self.reader: asyncio.Task[None] | None = None
        self.end: str | None = None  # why we end this stream
        self.waiting = 0  # messages not acknowledged yet
        self._settled = asyncio.Event()
        self._refusals: list[pb.Rejection] = []  # for the next Ack
        self._writing = asyncio.Lock()

    @property
    def key(self) -> tuple[str, str]:
        """Whose sequences these are; ("", "") while the stream speaks for nobody."""
        return (self.node, self.spool) if self.dictionary is not None else ("", "")

    def refuse(self, lane: pb.Lane.ValueType, seq: int, refusal: Refusal) -> None:
        """To be told with the next Ack."""
        self._refusals.append(pb.Rejection(lane=lane, seq=seq, reason=refusal.text[:500]))

    async def acknowledge(self, held: Mapping[int, int], done: int, now_ms: int) -> None:
        """Tell what is durable; `done` more messages need no more waiting."""
        refused, self._refusals = self._refusals, []
        await self.send(pb.CollectorMessage(ack=pb.Ack(held=lane_seqs(held), rejected=refused, ts_ms=now_ms)))
        self.waiting -= done
        if not self.waiting:
            self._settled.set()

    async def settled(self) -> None:
        """Returns when all that came is acknowledged."""
        while self.waiting:
            self._settled.clear()
            await self._settled.wait()

    async def send(self, message: pb.CollectorMessage) -> None:
        """A stream that has ended meanwhile gets nothing; its agent will ask again."""
        async with self._writing:
            try:
                await self.context.write(message)
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
