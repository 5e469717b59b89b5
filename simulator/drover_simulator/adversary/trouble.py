"""One fault or hard negative of the adversary, laid out over the fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

from drover_simulator.adversary.kinds import CREEPING, INTERMITTENT
from drover_simulator.hardware import Ints


@dataclass(frozen=True, slots=True)
class Trouble:
    """Seconds count from the fleet's start. Units are indices over the fleet.

    Attributes:
        gpus, nodes, links: what it hits. job: number of the job that held the target at the onset, None without one.
        onset: sudden; creeping (full after `ramp_s`); intermittent (`on_s` there, `off_s` away, again and again).
        facts: what was drawn for it beyond that, by name.
    """

    id: str
    kind: str
    cause: str
    gpus: Ints
    nodes: Ints
    links: Ints
    job: int | None
    start_s: float
    end_s: float
    severity: float
    onset: str
    ramp_s: float = 0.0
    on_s: float = 0.0
    off_s: float = 0.0
    facts: dict[str, float] = field(default_factory=dict)
    follows: str = ""  # id of the trouble that it comes from, or comes back after

    @property
    def name(self) -> tuple[str, str]:
        return self.kind, self.cause

    @property
    def gpu(self) -> int:
        return int(self.gpus[0])

    @property
    def node(self) -> int:
        return int(self.nodes[0])

    def level(self, now_s: float) -> float:
        """How much of it is there, 0..1."""
        passed = now_s - self.start_s
        if self.onset == CREEPING:
            return min(1.0, max(0.0, passed / self.ramp_s))
        if self.onset == INTERMITTENT:
            return float(passed % (self.on_s + self.off_s) < self.on_s)
        return 1.0
