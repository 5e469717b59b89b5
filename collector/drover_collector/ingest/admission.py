"""Which streams may open now, and which wait: all agents connect at once after a restart of the collector.

A handshake costs as much as dozens of messages. A few are processed at a time, in order of arrival, each after what
open streams have sent meanwhile: so the delay of open streams does not grow. An agent that waits has completed its TLS
handshake and keeps its stream; turned away, it would have to repeat it. It is sent how long the wait takes, so that
its own time limit does not end the stream. Agents that do not know this (no `drover-turn` in their metadata) wait for
at most a minute; if it takes longer, they are asked to reconnect, spread over the time that the others need.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable

import grpc

from drover_collector.auth.authorization import caller
from drover_collector.auth.identity import Identity
from drover_collector.ingest.context import IngestContext
from drover_collector.ingest.limits import Limits
from drover_collector.ingest.schema_registry import Refusal
from drover_collector.ingest.session import Session, StreamClosed
from drover_collector.ingest.stats import IngestStats
from drover_proto import telemetry_pb2 as pb

TURN = "drover-turn"  # in the metadata of agents that can wait
FIRST_PER_S = 100.0  # assumed rate of handshakes until it is measured
MIN_PER_S = 1.0  # below this rate an estimate of the wait means nothing
WEIGHT = 0.3  # of the newest second in the rate
NOTIFY_S = 15.0  # agents that wait for longer are sent the time
NOTIFY_AGAIN_S = 60.0
REASON = "many agents connect at once; this one waits for its turn"
MAX_WAIT_S = 40.0  # of old agents: they wait a minute for their Welcome, the TLS handshake included
MAX_BACKOFF_S = 300.0  # the longest pause that an agent accepts
STUCK_S = 2.0  # a handshake that takes longer waits for something: another may start
HELLO_SLACK_BYTES = 1 << 20  # so that a Hello slightly above the limit is refused with its size


class RetryLaterError(StreamClosed):
    """Too many agents wait. This one should reconnect in `wait_s`."""

    def __init__(self, wait_s: float, waiting: int) -> None:
        text = f"{waiting} agents wait for their handshake; come again in {wait_s:.0f} s"
        super().__init__(grpc.StatusCode.UNAVAILABLE, text)
        self.wait_s = wait_s


class _Place:
    __slots__ = ("number", "session", "turn")

    def __init__(self, session: Session, number: int) -> None:
        self.session, self.number = session, number  # how many entered the queue before it, since the start
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Admission:
    """The queue of handshakes. Event loop only.

    Args:
        chance: returns 0 to 1; spreads agents that are asked to reconnect.
    """

    def __init__(
        self,
        stats: IngestStats,
        limits: Limits,
        now_s: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._stats, self._limits, self._now_s, self._chance = stats, limits, now_s, chance
        self._inside: dict[Session, float] = {}  # since when
        self._queue: deque[_Place] = deque()
        self._entered = self._served = 0  # places given, and those whose turn was reached or whose agents have left
        self._bytes = 0  # of Hellos that wait
        self._per_s = FIRST_PER_S
        self._done = 0  # since `_counted_s`, while others waited
        self._counted_s = now_s()

    @property
    def waiting(self) -> int:
        """Streams whose Hello waits for its turn."""
        return self._entered - self._served

    def expected_s(self, place: int) -> float:
        """Return about how long the stream at this place of the queue waits."""
        return place / max(self._per_s, MIN_PER_S)

    async def enter(self, session: Session, size: int) -> None:
        """Return when the Hello of `size` bytes may be processed. Call `leave` afterwards in any case.

        Raises:
            RetryLaterError: it would take too long, or too many wait.
        """
        if not self._queue and len(self._inside) < self._limits.openings:
            self._inside[session] = self._now_s()
            return
        patient, expected_s = _is_patient(session), self.expected_s(self.waiting + 1)
        full = self.waiting >= self._limits.openings_waiting or self._bytes + size > self._limits.openings_bytes
        if full or (not patient and expected_s > MAX_WAIT_S):
            self._stats.turned_away += 1
            wait_s = min(max(expected_s, 1.0) * (0.5 + self._chance()), MAX_BACKOFF_S)
            raise RetryLaterError(wait_s, self.waiting)
        if not self._queue:
            self._done, self._counted_s = 0, self._now_s()
        place = _Place(session, self._entered)
        self._entered += 1
        self._queue.append(place)
        self._bytes += size
        self._stats.openings_waiting = self.waiting
        try:
            await self._wait(place, patient)
        except BaseException:
            if place.turn.done():
                self.leave(session)
            else:
                place.turn.cancel()
            raise
        finally:
            self._bytes -= size

    async def _wait(self, place: _Place, patient: bool) -> None:
        late = False
        while not place.turn.done():
            expected_s = self.expected_s(place.number - self._served + 1)
            notify = late or expected_s > NOTIFY_S  # late: it takes longer than expected at first
            if patient and notify:
                backoff = pb.Backoff(wait_ms=round(1000 * expected_s), reason=REASON, turn=True)
                await place.session.send(pb.CollectorMessage(backoff=backoff))
            await asyncio.wait((place.turn,), timeout=NOTIFY_AGAIN_S if notify else NOTIFY_S)
            late = True

    def leave(self, session: Session) -> None:
        """End the session's turn. The next one starts after all that is ready to run now."""
        if self._inside.pop(session, None) is not None:
            self._done += 1
        if self._queue:
            asyncio.get_running_loop().call_soon(self._next)

    def tick(self) -> None:
        """Measure the rate, and let others start while a handshake takes long. Call twice a second or so."""
        now_s = self._now_s()
        for session, since_s in list(self._inside.items()):
            if now_s - since_s > STUCK_S:
                del self._inside[session]
                self._done += 1  # its place is free, which is what others wait for
        passed_s = now_s - self._counted_s
        if self._queue and passed_s >= 1.0:
            self._per_s += WEIGHT * (self._done / passed_s - self._per_s)
            self._done, self._counted_s = 0, now_s
        self._next()

    def _next(self) -> None:
        while self._queue and len(self._inside) < self._limits.openings:
            place = self._queue.popleft()
            self._served += 1
            if not place.turn.cancelled():
                self._inside[place.session] = self._now_s()
                place.turn.set_result(None)
        self._stats.openings_waiting = self.waiting
        self._stats.openings_per_s = self._per_s


def _is_patient(session: Session) -> bool:
    return any(key == TURN for key, _ in session.metadata())


class PendingStreams:
    """Streams without a handshake. Their number, size and time are limited. Event loop only."""

    def __init__(self, context: IngestContext) -> None:
        self._context = context
        self._sessions: dict[Session, Identity | None] = {}  # oldest first
        self._by_certificate: Counter[Identity] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: Session) -> None:
        """
        Raises:
            StreamClosed: too many of the certificate's streams are pending; they would fill memory.
        """
        limits, certificate = self._context.limits, caller()
        pending = 0 if certificate is None else self._by_certificate[certificate]
        if pending >= limits.pending_streams:
            text = f"{pending} streams of {certificate} have not begun with a Hello; use one stream for each node"
            self._context.count_refusal(str(certificate), Refusal("no hello", text))
            raise StreamClosed(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        longest = limits.hello_bytes + HELLO_SLACK_BYTES
        session.stream.call.max_message_bytes = limits.pending_hello_bytes if pending else longest
        self._sessions[session] = certificate
        if certificate is not None:
            self._by_certificate[certificate] += 1

    def remove(self, session: Session) -> None:
        """Forget a stream that has completed its handshake or has ended. May be called twice."""
        certificate = self._sessions.pop(session, None)
        if certificate is not None:
            self._by_certificate[certificate] -= 1
            if not self._by_certificate[certificate]:
                del self._by_certificate[certificate]

    def close_late(self) -> None:
        """Close the streams whose handshake takes too long, and the largest if unread Hellos take too much memory."""
        now, limit_s = time.monotonic(), self._context.limits.hello_s
        for session in list(self._sessions):
            opening = session.opening
            if now - opening.opened_s <= limit_s:
                break  # all later ones are younger
            if not opening.queued and now - opening.due_s > limit_s:
                what = "its Hello took more than" if opening.hello_ms else "no Hello arrived within"
                session.close(grpc.StatusCode.DEADLINE_EXCEEDED, f"{what} {limit_s:g} s")
        held = {session: session.stream.call.partial_bytes for session in self._sessions}
        total, limit = sum(held.values()), self._context.limits.openings_bytes
        for session in sorted(held, key=held.__getitem__, reverse=True):
            if total <= limit:
                return
            text = "incomplete Hellos take too much memory; come again"
            session.close(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            total -= held[session]
