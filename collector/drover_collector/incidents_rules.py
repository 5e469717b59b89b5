"""Which observation explains which: the rules by which findings and incidents belong together. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from drover_proto.events import SEVERITY_ORDER, Finding, Incident, IncidentKind

ROOT: Mapping[IncidentKind, int] = {  # which kind explains the others seen on the same thing
    IncidentKind.MEMORY: 6,
    IncidentKind.LINK: 6,
    IncidentKind.XID: 6,
    IncidentKind.SDC: 5,
    IncidentKind.LIVENESS: 4,
    IncidentKind.THERMAL: 3,
    IncidentKind.HANG: 2,
    IncidentKind.STRAGGLER: 1,
    IncidentKind.DRIFT: 0,
    IncidentKind.RISK: 0,
    IncidentKind.IDLE: 0,
}
NODE_GONE = frozenset({"silent", "never_came", "driver_hung", "driver_lost", "agent_stopped"})
EXPLAINS_NOTHING = "kernel"  # the detector of what a host says of itself: no word on what its GPUs show
CONSEQUENCES = frozenset({IncidentKind.LIVENESS, IncidentKind.STRAGGLER, IncidentKind.HANG, IncidentKind.THERMAL})

# Why a GPU is slow, told by its own registers: no failure elsewhere in its job can make it look so.
OWN_CAUSES = frozenset({"power_cap", "thermal", "hbm", "pcie"})

_WIDTHS = {"gpu": 0, "node": 1, "job": 2, "leaf": 3, "rack": 3}


def width(scope: str) -> int:
    return _WIDTHS[scope]


def heat_explains(wide: IncidentKind, narrow: IncidentKind) -> bool:
    return wide is IncidentKind.THERMAL and narrow is IncidentKind.STRAGGLER


def explains(wide: Finding, narrow: Incident) -> bool:
    if wide.kind is narrow.kind is IncidentKind.LINK and narrow.scope == "gpu":
        return wide.cause == narrow.cause  # ports and switches explain no NVLink or PCIe of a GPU
    return wide.kind is narrow.kind or heat_explains(wide.kind, narrow.kind)


def leads(finding: Finding, incident: Incident) -> bool:
    """Whether the finding explains more than what the incident shows now; the same cause renews its own words."""
    ranks = ROOT[finding.kind] - ROOT[incident.kind]
    severities = SEVERITY_ORDER.index(finding.severity) - SEVERITY_ORDER.index(incident.severity)
    same = (finding.kind, finding.cause) == (incident.kind, incident.cause)
    return same or ranks > 0 or (ranks == 0 and severities > 0)
