"""Steps of the collector's clock, so that the guard counts the time that passed and not what a step adds. Pure.

Times are stored as the wall clock showed them. After a step forward, older times lie too far back: `now_of` moves them.
After a step back they lie in the future, and their owner takes them for now.
"""

from __future__ import annotations

MAX_STEPS = 20  # in memory, the newest


class ClockSteps:
    def __init__(self) -> None:
        self._steps: list[tuple[int, int]] = []  # forward only: (from when on the clock was ahead, by how many ms)

    def note(self, at_ms: int, step_ms: int) -> None:
        """Note that the clock was set by `step_ms`.

        After a step forward, older times lie below `at_ms`. A step back undoes the steps forward that now lie ahead.
        """
        self._steps = [(at, step) for at, step in self._steps if at <= at_ms]
        if step_ms > 0:
            self._steps = [*self._steps, (at_ms, step_ms)][-MAX_STEPS:]

    def now_of(self, ts_ms: int) -> int:
        """Return a stored time as today's clock would have shown it."""
        for at_ms, step_ms in self._steps:
            if ts_ms < at_ms:
                ts_ms += step_ms
        return ts_ms

    def age_ms(self, now_ms: int, ts_ms: int) -> int:
        """Return how long ago a stored time was; negative after a step back."""
        return now_ms - self.now_of(ts_ms)
