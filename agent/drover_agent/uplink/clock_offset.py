"""How far this node's clock is from the collector's: as much as exchanges of messages prove.

A message of the collector says when it was written: after what it answers was sent, and before it was read. That bounds
the offset from both sides (NTP does the same; RFC 5905, section 8). On a machine so busy that messages wait for seconds
the bounds lie far apart: that is no wrong clock.
"""

from __future__ import annotations

from collections import deque

from drover_agent.clock import Clock

KEPT = 8  # exchanges whose bounds hold together: the quickest of them says most
SURE_S = (
    2.0  # bounds as near as this: the upper one is the better guess, as answers wait for the disk, not on their way
)


class ClockOffset:
    """Attributes: seconds: this node's clock minus the collector's, at the last exchange; None before the first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Of the steady clock minus the collector's: what was proven holds on when this node's clock is set.
        self._bounds: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self.seconds: float | None = None

    def answered(self, sent_s: float | None, theirs_ms: int) -> None:
        """A message was read just now.

        Args:
            sent_s: steady time when the newest of what it answers was sent; None where it answers nothing.
            theirs_ms: the collector's time when it wrote the message.
        """
        steady_s, theirs_s = self._clock.monotonic(), theirs_ms / 1000
        self._bounds.append((float("-inf") if sent_s is None else sent_s - theirs_s, steady_s - theirs_s))
        if max(low for low, _ in self._bounds) > min(high for _, high in self._bounds):
            # Both cannot be true: the collector's clock was set, or this machine was suspended.
            self._bounds = deque([self._bounds[-1]], KEPT)
        wall_s = self._clock.now_ms() / 1000 - steady_s
        low = wall_s + max(low for low, _ in self._bounds)
        high = wall_s + min(high for _, high in self._bounds)
        self.seconds = high if high - low <= SURE_S else min(max(low, 0.0), high)
