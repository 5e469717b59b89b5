"""Measure how far this node's clock is from the collector's.

A message of the collector carries its time. It was written after the message that it answers was sent, and before it
was read, which bounds the offset from both sides (as NTP does; RFC 5905, section 8). On a machine so busy that messages
wait for seconds the bounds are far apart; the clock is not called wrong for that.
"""

from __future__ import annotations

from collections import deque

from drover_agent.clock import Clock

KEPT = 8  # exchanges whose bounds count together: the fastest one bounds best
CLOSE_S = 2.0  # bounds this close: take the upper one, because answers wait for the disk and not on their way


class ClockOffset:
    """The offset from the exchanges so far.

    Attributes:
        seconds: this node's clock minus the collector's, at the last exchange; None before the first.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Bounds of the steady clock minus the collector's: they stay true when this node's clock is set.
        self._bounds: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self.seconds: float | None = None

    def add_exchange(self, sent_s: float | None, collector_ms: int) -> None:
        """Take a message that was read just now.

        Args:
            sent_s: steady time when the newest message that it answers was sent; None if it answers none.
            collector_ms: the collector's time when it wrote the message.
        """
        steady_s, collector_s = self._clock.monotonic(), collector_ms / 1000
        low = float("-inf") if sent_s is None else sent_s - collector_s
        self._bounds.append((low, steady_s - collector_s))
        if max(low for low, _ in self._bounds) > min(high for _, high in self._bounds):
            # They contradict each other: the collector's clock was set, or this machine was suspended.
            self._bounds = deque([self._bounds[-1]], KEPT)
        wall_s = self._clock.now_ms() / 1000 - steady_s
        low = wall_s + max(low for low, _ in self._bounds)
        high = wall_s + min(high for _, high in self._bounds)
        self.seconds = high if high - low <= CLOSE_S else min(max(low, 0.0), high)
