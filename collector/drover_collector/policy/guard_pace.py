"""The guard's pace: so many nodes an hour, and a while of peace for a node that came back. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from drover_collector.policy.guard import GuardLimits
from drover_collector.policy.guard_clock import Steps
from drover_core.model.events import Health, NodeOutage

HOUR_MS = 3_600_000


class Pace:
    """What was taken out in the last hour, and who came back when."""

    def __init__(self, steps: Steps | None = None) -> None:
        self._steps = steps or Steps()
        self.taken: deque[tuple[int, str]] = deque()  # what observe mode only said among it
        self.done: deque[tuple[int, str]] = deque()  # without that
        self.returned: dict[str, NodeOutage] = {}

    def note_taken(self, node: str, at_ms: int, said: bool = False) -> None:
        """A decision took `node` out; `said`: it would have, in observe mode."""
        self.taken.append((at_ms, node))
        if not said:
            self.done.append((at_ms, node))

    def note_duty(self, duty: NodeOutage) -> None:
        if duty.stage is Health.HEALTHY:
            self.returned[duty.node] = duty

    def within_hour(self, now_ms: int, said: bool = True) -> int:
        for taken in (self.taken, self.done):
            for at, (at_ms, node) in enumerate(taken):
                if self._steps.now_of(at_ms) > now_ms:  # the clock went back: as if it were now, or it would stay
                    taken[at] = now_ms, node
            while taken and self._steps.age_ms(now_ms, taken[0][0]) >= HOUR_MS:
                taken.popleft()
        return len({node for _, node in (self.taken if said else self.done)})

    def hold(self, node: str, now_ms: int, limits: GuardLimits, said: bool = False) -> str | None:
        """Why `node` must wait, as a sentence; None when it need not. `said`: what observe mode says counts too."""
        if limits.per_hour and (count := self.within_hour(now_ms, said)) >= limits.per_hour:
            return f"{count} nodes went out within the last hour (at most {limits.per_hour} may)"
        duty = self.returned.get(node)
        if duty is not None and self._steps.now_of(duty.ts_ms) > now_ms:  # likewise
            duty = self.returned[node] = replace(duty, ts_ms=now_ms)
        age_ms = 0 if duty is None else self._steps.age_ms(now_ms, duty.ts_ms)
        if duty is not None and age_ms < limits.cooldown_s * 1000:
            minutes = max(0, age_ms) // 60_000
            return f"{node} came back {minutes} min ago: it is left alone for {limits.cooldown_s / 60:.0f} min"
        return None
