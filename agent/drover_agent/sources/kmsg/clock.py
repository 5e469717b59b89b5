"""When a line of the kernel log was written, as wall time.

The log's own time is in microseconds since boot, by a clock that stands still while the machine is suspended
(kernel/printk: local_clock), as CLOCK_MONOTONIC does, and that nothing corrects, so that it is minutes off after weeks.
So a line that is read as it comes is sent with the time now, and others are computed: back from now, by the age of the
line, less what the log's clock was seen to lag, plus what the machine slept since (CLOCK_BOOTTIME less
CLOCK_MONOTONIC). Where the lag was not seen lately, an age of a few seconds may be nothing but lag, and counts as none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

LIVE_US = 5_000_000  # a line younger than this happened now, unless the lag is known
LAG_HOLDS_US = 600_000_000  # so long the lag counts as known: at 100 ppm it changes by 0.06 s meanwhile
SLEPT_US = 50_000  # less than this is no suspend: the two clocks are not read at once
MAX_SLEEPS = 100  # suspends remembered, the newest

# kernel/power/suspend.c and hibernate.c; the length comes from kernel/time/timekeeping_debug.c, where it is turned on.
_ENTRY = re.compile(r"(?:PM: )?(?:hibernation: )?(?:suspend|hibernation) entry\b")
_LENGTH = re.compile(r"(?:PM: )?Timekeeping suspended for (\d{1,9}\.\d{3}) seconds")


@dataclass(frozen=True, slots=True)
class Clocks:
    """What the machine's clocks say, in microseconds."""

    wall_us: int
    awake_us: int  # since boot without suspends
    slept_us: int  # suspended since boot


def system_clocks() -> Clocks:
    awake = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    slept = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - awake
    return Clocks(time.time_ns() // 1000, awake // 1000, slept // 1000)


def may_be_suspend(text: str) -> bool:
    """Whether `LogClock.explain` could learn from the line."""
    return bool(_ENTRY.match(text) or _LENGTH.match(text))


class LogClock:
    """`when` the log's lines were written. Call `look` before each read, so that a suspend is noticed."""

    def __init__(self, clocks: Callable[[], Clocks] = system_clocks, saved: Any = None) -> None:
        """`saved`: what `state` gave in an earlier run of this boot.

        Raises:
            TypeError, ValueError, KeyError: `saved` is not that.
        """
        self._clocks = clocks
        now = clocks()
        self._lag_us = 0
        self._lag_seen_us: int | None = None  # when it was seen in this run
        self._looked_us = 0  # when it was known last how long the machine had slept
        self._noticed = 0, 0  # between these times of the log the newest suspend began
        self._sleeps: list[tuple[int, int]] = [(0, 0)]  # (from this time of the log on, slept so far)
        if saved:
            self._lag_us, self._looked_us = int(saved["lag_us"]), int(saved["looked_us"])
            self._sleeps = [(int(from_us), int(slept_us)) for from_us, slept_us in saved["sleeps"]] or self._sleeps
        self.unexplained = now.slept_us - self._sleeps[-1][1] > SLEPT_US  # it slept while nobody looked

    @property
    def state(self) -> dict[str, Any]:
        return {"lag_us": self._lag_us, "looked_us": self._looked_us, "sleeps": self._sleeps[-MAX_SLEEPS:]}

    def explain(self, lines: Iterable[tuple[int, str]]) -> None:
        """Take from the whole log (time, text) when the machine slept while the log was not read, if it shows that.

        A length that the kernel did not write is what is left, in equal parts: right for one suspend.
        """
        found: list[list[int | None]] = []  # [from, length or None]
        for us, text in lines:
            if us <= self._looked_us:
                continue
            if _ENTRY.match(text):
                found.append([us, None])
            elif length := _LENGTH.match(text):
                slept_us = int(float(length[1]) * 1e6)
                if found and found[-1][1] is None:
                    found[-1][1] = slept_us
                else:
                    found.append([us, slept_us])
        now = self._clocks()
        total = self._sleeps[-1][1]
        left = now.slept_us - total - sum(length or 0 for _, length in found)
        unknown = [one for one in found if one[1] is None]
        for one in unknown:
            one[1] = max(left, 0) // len(unknown)
        if not unknown and left > SLEPT_US:  # before what the log still holds
            total += left
            self._sleeps.append((self._looked_us, total))
        for from_us, slept_us_then in found:
            total += slept_us_then or 0
            self._sleeps.append((from_us or 0, total))
        self._looked_us, self.unexplained = now.awake_us, False

    def look(self, lines: Iterable[tuple[int, str]] = ()) -> None:
        """Notice a suspend. What was written since the last look counts as written after it, unless `lines`, which
        were read since then, hold the line with which the kernel begins one."""
        now = self._clocks()
        if now.slept_us - self._sleeps[-1][1] > SLEPT_US:
            self._sleeps.append((self._looked_us, now.slept_us))
            del self._sleeps[:-MAX_SLEEPS]
            self._noticed = self._looked_us, now.awake_us
        for us, text in lines:
            if self._noticed[0] < us <= self._noticed[1] and _ENTRY.match(text):
                self._sleeps[-1] = us, self._sleeps[-1][1]
        self._looked_us = now.awake_us

    def boot_us(self) -> int:
        """Microseconds since boot with suspends."""
        now = self._clocks()
        return now.awake_us + now.slept_us

    def came_now(self, us: int) -> None:
        """A line was waited for and came: what it seems to be old is the lag of the log's clock."""
        self._lag_seen_us = self._clocks().awake_us
        self._lag_us = self._lag_seen_us - us

    def when(self, us: int) -> tuple[int, int]:
        """Milliseconds UTC at which the line with the log's time `us` was written, and how long ago that was, suspends
        with them, in microseconds."""
        now = self._clocks()
        age_us = self._age_us(now, us)
        known = self._lag_seen_us is not None and now.awake_us - self._lag_seen_us < LAG_HOLDS_US
        return (now.wall_us - (age_us if age_us > (0 if known else LIVE_US) else 0)) // 1000, age_us

    def _age_us(self, now: Clocks, us: int) -> int:
        slept_us = next((slept for from_us, slept in reversed(self._sleeps) if us >= from_us), 0)
        return now.awake_us - us - self._lag_us + now.slept_us - slept_us
