"""Who opens a stream now, and who waits: all agents come at once after a restart of the collector or of its network.

An opening costs as much as dozens of messages. A few are worked on at a time, in the order in which they came, each
behind what open streams have sent meanwhile: so their lag does not grow while others open. Who waits has its TLS
handshake behind it and keeps its stream; turned away it would have to pay for another. It is told how long it will
take, so that its own limits do not end the stream. Agents that do not know that word (`drover-turn` in their metadata)
wait for a minute; when it will take longer they are told to come again, spread over the time that the others need.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable

import grpc

from drover_collector.ingest.limits import Limits
from drover_collector.ingest.session import EndError, Session
from drover_collector.ingest.stats import IngestStats
from drover_proto import telemetry_pb2 as pb

TURN = "drover-turn"  # in the metadata of agents that wait when they are told to
FIRST_PER_S = 100.0  # openings, until it was measured
SLOWEST_PER_S = 1.0  # below, a guess of how long it takes says nothing
WEIGHT = 0.3  # of the newest second in the rate
TOLD_S = 15.0  # who will wait for longer is told
TELL_S = 60.0  # and again after so long
TOLD = "many agents connect at once; this one waits for its turn"
OLD_S = 40.0  # agents that do not know the word wait a minute for their Welcome, the handshake included
LONGEST_S = 300.0  # what an agent takes for a pause at most
INSIDE_S = 2.0  # an opening that takes longer waits for something: another goes beside it


class ComeAgainError(EndError):
    """Not now: in `wait_s`."""

    def __init__(self, wait_s: float, waiting: int) -> None:
        text = f"{waiting} agents wait to be welcomed; come again in {wait_s:.0f} s"
        super().__init__(grpc.StatusCode.UNAVAILABLE, text)
        self.wait_s = wait_s


class _Place:
    __slots__ = ("number", "session", "turn")

    def __init__(self, session: Session, number: int) -> None:
        self.session, self.number = session, number  # how many were in the queue before it, since the start
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Admission:
    """The queue of openings. Used in the event loop.

    Args:
        chance: 0 to 1, which spreads those that are to come again.
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
        self._came = self._served = 0  # places given, and those whose turn has come or whose agents have left
        self._bytes = 0  # of Hellos that wait
        self._per_s = FIRST_PER_S
        self._done = 0  # since `_counted_s`, all the time with others waiting
        self._counted_s = now_s()

    @property
    def waiting(self) -> int:
        """Streams whose Hello waits for its turn."""
        return self._came - self._served

    def expected_s(self, place: int) -> float:
        """About how long the stream at this place of the queue waits for its Welcome."""
        return place / max(self._per_s, SLOWEST_PER_S)

    async def enter(self, session: Session, size: int) -> None:
        """Returns when the Hello of `size` bytes may be worked on; `leave` when that is done.

        Raises:
            ComeAgainError: it would take too long, or too many wait.
        """
        if not self._queue and len(self._inside) < self._limits.openings:
            self._inside[session] = self._now_s()
            return
        patient, expected_s = _is_patient(session), self.expected_s(self.waiting + 1)
        full = self.waiting >= self._limits.openings_waiting or self._bytes + size > self._limits.openings_bytes
        if full or (not patient and expected_s > OLD_S):
            self._stats.turned_away += 1
            wait_s = min(max(expected_s, 1.0) * (0.5 + self._chance()), LONGEST_S)
            raise ComeAgainError(wait_s, self.waiting)
        if not self._queue:
            self._done, self._counted_s = 0, self._now_s()
        place = _Place(session, self._came)
        self._came += 1
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
            tell = late or expected_s > TOLD_S  # late: it went slower than was expected when it came
            if patient and tell:
                told = pb.Backoff(wait_ms=round(1000 * expected_s), reason=TOLD, turn=True)
                await place.session.send(pb.CollectorMessage(backoff=told))
            await asyncio.wait((place.turn,), timeout=TELL_S if tell else TOLD_S)
            late = True

    def leave(self, session: Session) -> None:
        """Its Hello is answered, or it has ended; the next one's turn comes behind all that is ready to run now."""
        if self._inside.pop(session, None) is not None:
            self._done += 1
        if self._queue:
            asyncio.get_running_loop().call_soon(self._next)

    def tick(self) -> None:
        """Now and then: the rate is measured; who waits for long is told; who works for long does not hold others."""
        now_s = self._now_s()
        for session, since_s in list(self._inside.items()):
            if now_s - since_s > INSIDE_S:
                del self._inside[session]
                self._done += 1  # its place is free: that is what others wait for
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
    return any(key == TURN for key, _ in session.context.invocation_metadata() or ())
