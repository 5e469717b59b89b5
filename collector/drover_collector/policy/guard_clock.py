"""Steps of the collector's clock, so that the guard counts the time that passed and not what a step adds. Pure.

Times are kept as the wall clock gave them when they were noted. After a step forward those of before it lie too far
back: `now_of` moves them. After a step back they lie in the future, and whoever keeps them takes them for now.
"""

from __future__ import annotations

MOST = 20  # steps remembered, the newest


class Steps:
    def __init__(self) -> None:
        self._steps: list[tuple[int, int]] = []  # (from this time on the clock is another one, by how much), forward

    def note(self, at_ms: int, step_ms: int) -> None:
        """The clock was set by `step_ms`; what was noted before it has times below `at_ms`, if the step was forward.
        A step back undoes those steps forward that now lie ahead."""
        self._steps = [(at, step) for at, step in self._steps if at <= at_ms]
        if step_ms > 0:
            self._steps = [*self._steps, (at_ms, step_ms)][-MOST:]

    def now_of(self, ts_ms: int) -> int:
        """A time that was noted, as today's clock would have given it."""
        for at_ms, step_ms in self._steps:
            if ts_ms < at_ms:
                ts_ms += step_ms
        return ts_ms

    def age_ms(self, now_ms: int, ts_ms: int) -> int:
        """How long ago that was; negative after a step back."""
        return now_ms - self.now_of(ts_ms)
