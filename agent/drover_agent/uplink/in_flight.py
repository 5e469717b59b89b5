"""What was sent on a stream and is not acknowledged: bounded in number and size."""

from __future__ import annotations

from drover_agent.clock import Clock
from drover_proto import telemetry_pb2 as pb

WINDOW_MESSAGES = 256
WINDOW_BYTES = 8 * 2**20
WINDOW_EVENTS = 256  # beside them


class InFlight:
    """Messages sent on this stream and not acknowledged."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sizes: dict[tuple[int, int], tuple[int, float]] = {}
        self._bytes = 0

    def add(self, lane: int, seq: int, size: int) -> None:
        self._sizes[lane, seq] = size, self._clock.monotonic()
        self._bytes += size

    @property
    def count(self) -> int:
        return len(self._sizes)

    def has_room(self, lane: int) -> bool:
        if lane == pb.EVENTS:
            return len(self._sizes) < WINDOW_MESSAGES + WINDOW_EVENTS
        return len(self._sizes) < WINDOW_MESSAGES and self._bytes < WINDOW_BYTES

    def age(self) -> float:
        """Seconds that the oldest one has waited."""
        oldest = next(iter(self._sizes.values()), None)
        return self._clock.monotonic() - oldest[1] if oldest else 0.0

    def held(self, lane: int, seq: int) -> float | None:
        """The collector has this and what was sent before it on that lane.

        Returns: the steady time when the newest of it was sent; None where it was known to be held.
        """
        newest = None
        for key in [key for key in self._sizes if key[0] == lane and key[1] <= seq]:
            size, newest = self._sizes.pop(key)  # in the order in which they were sent
            self._bytes -= size
        return newest

    def refused(self, lane: int, seq: int) -> None:
        self._bytes -= self._sizes.pop((lane, seq), (0, 0.0))[0]
