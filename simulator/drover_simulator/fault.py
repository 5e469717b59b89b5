"""Describe a fault to inject, and its row of ground truth."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from drover_core.model.events import Member
from drover_simulator.sku import SimulationError


class FaultsError(SimulationError):
    """Faults that cannot be injected; the message names the place and what to change."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. Seconds count from the fleet's start; `end_s` None: no end.

    kinds.py has the meaning of `severity`; `ramp_s` is the time from onset to full severity.
    """

    kind: str
    cause: str
    node: str
    gpu: int | None
    start_s: float
    end_s: float | None
    severity: float = 1.0
    ramp_s: float = 0.0
    id: str = ""


@dataclass(frozen=True, slots=True)
class Label:
    """One row of labels.jsonl. `hardware` False: a hard negative, which must not lead to a drain."""

    id: str
    kind: str
    node: str
    gpu: int | None
    start: str
    end: str | None
    cause: str
    hardware: bool
    scope: str
    members: tuple[Member, ...]

    def to_dict(self) -> dict[str, Any]:
        row = dataclasses.asdict(self)
        row["members"] = [list(member) for member in self.members]
        return row
