"""Micro-benchmarks that prove a suspect: each measures one thing with a physical meaning, one file each.

They run in a child process (`child.py`), never in the agent: `runner.py` starts it, bounds it in time and memory, and
makes a hang or a crash a result. Only the child imports torch. This table imports nothing of the probes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Level(StrEnum):
    """How thorough; each level has the probes of those before it."""

    QUICK = "quick"  # the whole node in less than 60 s
    STANDARD = "standard"  # less than 5 min
    DEEP = "deep"  # as long as it takes; bounded by the request's timeout


@dataclass(frozen=True, slots=True)
class Probe:
    """One row of the table below.

    Attributes:
        module: under `drover_agent.probes`; its `run(context, name)` yields `base.Result`; several rows may share one.
        unit: of its values. better: higher, lower, or exact (a wrong answer is a fault, whatever its size).
        seconds: about how long it takes, for each device or pair or the node, at level quick and at the others.
        what: its physical meaning, one sentence.
    """

    name: str
    module: str
    level: Level
    unit: str
    better: str
    seconds: tuple[float, float]
    what: str


_ROWS: tuple[Probe, ...] = ()

PROBES: Mapping[str, Probe] = MappingProxyType({probe.name: probe for probe in _ROWS})


def of_level(level: Level) -> list[Probe]:
    """The probes that a level runs, in table order."""
    levels = list(Level)
    return [probe for probe in _ROWS if levels.index(probe.level) <= levels.index(level)]
