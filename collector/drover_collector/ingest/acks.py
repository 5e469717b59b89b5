"""When which stream gets its Ack. One for several messages: each costs the collector as much as a message does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from drover_collector.ingest.session import Session
from drover_collector.ingest.stats import IngestStats

FEW, SOME_S = 50, 4.0  # more streams than a few: between two Acks of one
ACKS_PER_S, LONGEST_S = 600, 20.0  # over all streams; an agent gives up after a minute without
SOON = 0.9  # of the pause: an Ack goes with the work for a message that has just come
MESSAGES = 8  # durable ones of a stream for which an Ack does not wait


class AckSender:
    """Tells agents how far their data is durable. Used in the event loop."""

    def __init__(
        self,
        stats: IngestStats,
        held: Callable[[tuple[str, str]], Mapping[int, int]],
        now_ms: Callable[[], int],
    ) -> None:
        self._stats, self._held, self._now_ms = stats, held, now_ms
        self._later: dict[Session, None] = {}
        self._sending: set[asyncio.Task[None]] = set()

    def settle(self, session: Session, done: int, acknowledged: bool, at_once: bool) -> None:
        """So many messages of a stream are durable, or else given up."""
        session.settle(done, acknowledged)
        if not acknowledged:
            return
        if at_once or self._due(session):
            self._send(session)
        else:
            self._later[session] = None

    async def piggyback(self, session: Session) -> None:
        """While its task is awake anyway: the Ack that would be due soon."""
        if self._soon(session):
            self._later.pop(session, None)
            await self.acknowledge(session)

    def piggyback_at_once(self, session: Session) -> None:
        """The same from outside of its task."""
        if self._soon(session):
            self._send(session)

    async def acknowledge(self, session: Session) -> None:
        self._stats.acks += 1
        await session.acknowledge(self._held((session.node, session.spool)), self._now_ms())

    def tick(self) -> None:
        """Now and then: what has waited long enough."""
        for session in [s for s in self._later if self._due(s)]:
            self._send(session)

    def forget(self, session: Session) -> None:
        self._later.pop(session, None)

    @property
    def pause_s(self) -> float:
        """Between two Acks of a stream: the longer, the more streams there are."""
        streams = self._stats.connected
        return min(LONGEST_S, max(streams / ACKS_PER_S, SOME_S if streams > FEW else 0.0))

    def _soon(self, session: Session) -> bool:
        return session.unacked > 0 and not session.sending and self._rested_s(session) >= SOON * self.pause_s

    def _rested_s(self, session: Session) -> float:
        return time.monotonic() - session.acked_s

    def _due(self, session: Session) -> bool:
        return session.pressing or session.unacked >= MESSAGES or self._rested_s(session) >= self.pause_s

    def _send(self, session: Session) -> None:
        if session.sending:  # an agent that does not read keeps nobody else waiting
            self._later[session] = None
            return
        self._later.pop(session, None)
        if session.acknowledge_at_once(self._held((session.node, session.spool)), self._now_ms()):
            self._stats.acks += 1
            return
        session.sending = True
        task = asyncio.create_task(self.acknowledge(session))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
