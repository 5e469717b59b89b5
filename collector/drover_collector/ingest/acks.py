"""When each stream gets its Ack. One Ack covers several messages: each costs the collector as much as a message."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from drover_collector.ingest.context import IngestContext
from drover_collector.ingest.offsets import LaneOffsets
from drover_collector.ingest.session import Session

FEW, SOME_S = 50, 4.0  # with more streams: the least pause between two Acks of one
ACKS_PER_S, MAX_PAUSE_S = 600, 20.0  # of all streams together; an agent gives up after a minute without one
SOON = 0.9  # of the pause: such an Ack leaves together with the work for a message
MESSAGES = 8  # durable ones of a stream, after which its Ack does not wait


class AckSender:
    """Reports to agents how far their data is durable. Event loop only."""

    def __init__(self, context: IngestContext, offsets: LaneOffsets) -> None:
        self._context, self._offsets = context, offsets
        self._waiting: dict[Session, None] = {}
        self._sending: set[asyncio.Task[None]] = set()

    def settle(self, session: Session, done: int, acknowledged: bool, at_once: bool) -> None:
        """Count messages of a stream as durable, or else given up, and send an Ack if it is due."""
        session.acks.settle(done, acknowledged)
        if not acknowledged:
            return
        if at_once or self._is_due(session):
            self._send(session)
        else:
            self._waiting[session] = None

    async def send_if_soon(self, session: Session) -> None:
        """Send an Ack that is due soon. From the stream's task, which is awake anyway."""
        if self._is_soon(session):
            self._waiting.pop(session, None)
            await self.send(session)

    def try_send_if_soon(self, session: Session) -> None:
        """Send an Ack that is due soon. From outside of the stream's task."""
        if self._is_soon(session):
            self._send(session)

    async def send(self, session: Session) -> None:
        self._context.stats.acks += 1
        await session.acks.send(session.stream, self._held(session), self._context.now_ms())

    def send_due(self) -> None:
        """Send the Acks that have waited long enough."""
        for session in [s for s in self._waiting if self._is_due(s)]:
            self._send(session)

    def forget(self, session: Session) -> None:
        self._waiting.pop(session, None)

    @property
    def pause_s(self) -> float:
        """Seconds between two Acks of a stream: the more streams, the longer."""
        streams = self._context.stats.connected
        return min(MAX_PAUSE_S, max(streams / ACKS_PER_S, SOME_S if streams > FEW else 0.0))

    def _held(self, session: Session) -> Mapping[int, int]:
        return self._offsets.get((session.node, session.spool))

    def _is_soon(self, session: Session) -> bool:
        acks = session.acks
        return acks.unacked > 0 and not acks.sending and time.monotonic() - acks.sent_s >= SOON * self.pause_s

    def _is_due(self, session: Session) -> bool:
        acks = session.acks
        return acks.urgent or acks.unacked >= MESSAGES or time.monotonic() - acks.sent_s >= self.pause_s

    def _send(self, session: Session) -> None:
        if session.acks.sending:  # an agent that does not read delays no others
            self._waiting[session] = None
            return
        self._waiting.pop(session, None)
        if session.acks.try_send(session.stream, self._held(session), self._context.now_ms()):
            self._context.stats.acks += 1
            return
        session.acks.sending = True
        task = asyncio.create_task(self.send(session))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
