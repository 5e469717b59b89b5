"""Messages that were sent on a stream and not acknowledged: bounded in number and size."""

from __future__ import annotations

from drover_agent.clock import Clock
from drover_proto import telemetry_pb2 as pb

WINDOW_MESSAGES = 256
WINDOW_BYTES = 8 * 2**20
WINDOW_EVENTS = 256  # in addition, so that telemetry never holds an event back


class InFlight:
    """The messages of one stream that wait for an Ack."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sent: dict[tuple[int, int], tuple[int, float]] = {}  # (lane, sequence) -> (size, steady time)
        self._bytes = 0

    def add(self, lane: int, seq: int, size: int) -> None:
        self._sent[lane, seq] = size, self._clock.monotonic()
        self._bytes += size

    @property
    def count(self) -> int:
        return len(self._sent)

    def has_room(self, lane: int) -> bool:
        if lane == pb.EVENTS:
            return len(self._sent) < WINDOW_MESSAGES + WINDOW_EVENTS
        return len(self._sent) < WINDOW_MESSAGES and self._bytes < WINDOW_BYTES

    def age_s(self) -> float:
        """Return how long the oldest message has waited."""
        oldest = next(iter(self._sent.values()), None)
        return self._clock.monotonic() - oldest[1] if oldest else 0.0

    def ack(self, lane: int, seq: int) -> float | None:
        """Remove what was sent on a lane up to `seq`.

        Returns:
            The steady time when the newest of it was sent; None if nothing was removed.
        """
        newest_s = None
        for key in [key for key in self._sent if key[0] == lane and key[1] <= seq]:
            size, newest_s = self._sent.pop(key)  # in the order in which they were sent
            self._bytes -= size
        return newest_s

    def drop(self, lane: int, seq: int) -> None:
        """Remove one message that the collector refused."""
        self._bytes -= self._sent.pop((lane, seq), (0, 0.0))[0]
