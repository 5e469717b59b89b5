"""What a validation ran and found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from drover_core.model.events import ProbeOrder, ProbeResult, ProbeVerdict


class Mark(StrEnum):
    PASSED = "pass"
    FAILED = "fail"
    UNKNOWN = "unknown"  # not measured, or nothing to judge it by: never a pass


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `reference`: what it was held against, in words; "": nothing. `device`: its model, or "cpu"."""

    stage: str
    node: str
    on: str
    figure: str
    value: float | None
    unit: str
    reference: str
    mark: Mark
    why: str
    device: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """`about`: a node, "NODE GPU K", or "A - B" for what lies between two nodes. `mark`: fail, or unknown: a doubt."""

    stage: str
    about: str
    mark: Mark
    text: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an order, and what the collector judged of its figures. `late`: it was not waited for any more."""

    stage: str
    order: ProbeOrder
    results: Sequence[ProbeResult]
    verdicts: Sequence[ProbeVerdict]
    rows: Sequence[Row] = ()
    late: bool = False

    @property
    def figures(self) -> list[ProbeResult]:
        return [result for result in self.results if not result.end]


@dataclass(frozen=True, slots=True)
class Member:
    """A node under validation. `facts`: of its inventory, such as driver and firmware."""

    name: str
    pool: str
    leaf: str
    health: str
    agent: str
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Judgement:
    rows: Sequence[Row]
    findings: Sequence[Finding]
    mark: Mark
    doubts: Sequence[str]  # why it is no pass, or what a pass does not say
