"""Describe a fault or hard negative of the adversary."""

from __future__ import annotations

from dataclasses import dataclass, field

from drover_simulator.adversary.kinds import CREEPING, INTERMITTENT
from drover_simulator.hardware import Ints


@dataclass(frozen=True, slots=True)
class Trouble:
    """A fault or hard negative. Seconds count from the fleet's start; units are indices over the fleet.

    Attributes:
        gpus, nodes, links: the units that it hits. job: number of the job that held them at the onset; None: none.
        onset: sudden; creeping (full after `ramp_s`); intermittent (active for `on_s`, away for `off_s`, repeatedly).
        facts: further drawn details, by name.
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
    follows: str = ""  # id of the trouble that it results from or repeats

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
        """Return the present share of its severity, 0..1."""
        passed = now_s - self.start_s
        if self.onset == CREEPING:
            return min(1.0, max(0.0, passed / self.ramp_s))
        if self.onset == INTERMITTENT:
            return float(passed % (self.on_s + self.off_s) < self.on_s)
        return 1.0
