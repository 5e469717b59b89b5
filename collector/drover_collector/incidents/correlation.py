"""Which observation explains which: the rules by which findings and incidents belong together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from drover_core.model.conditions import is_foreign
from drover_core.model.events import (
    SEVERITY_ORDER,
    Finding,
    Incident,
    IncidentKind,
    Severity,
)

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
    IncidentKind.SLOWDOWN: 0,
}
NODE_GONE = frozenset({"silent", "never_came", "driver_hung", "driver_lost", "agent_stopped", "maintenance"})
GPU_GONE = frozenset({"gpu_lost"})
GONE_LATER_MS = 600_000  # as long as a failure explains what follows in its job: NCCL's watchdog ends that by then
COMMON = "_common"  # end of the cause of what too many boards show at once (detectors/crowd.py)
EXPLAINS_NOTHING = "kernel"  # the detector of what a host says of itself: no word on what its GPUs show
CONSEQUENCES = frozenset({IncidentKind.LIVENESS, IncidentKind.STRAGGLER, IncidentKind.HANG, IncidentKind.THERMAL})

OF_PORTS = frozenset({IncidentKind.LINK, IncidentKind.STRAGGLER, IncidentKind.HANG})  # what a bad port brings about
HARDLY_TOGETHER = ({IncidentKind.MEMORY, IncidentKind.THERMAL}, {IncidentKind.LINK, IncidentKind.THERMAL})

# What slows a whole job down: its incident says it already, and a slowdown of the job is evidence of it.
SLOWS_A_JOB = frozenset(
    {IncidentKind.STRAGGLER, IncidentKind.THERMAL, IncidentKind.LINK, IncidentKind.HANG, IncidentKind.XID}
)
SLOWS_WITHIN_MS = 1_200_000  # what began so long before the job became slower, or after it, explains that
EXPLAIN_NO_OTHERS = frozenset({IncidentKind.IDLE, IncidentKind.DRIFT, IncidentKind.RISK, IncidentKind.SLOWDOWN})
OBJECTIVE = "_objective"  # end of the cause of what a user wanted to be reported, whatever explains it

# Why a GPU is slow, by its own registers: no failure elsewhere in its job can cause these values.
OWN_CAUSES = frozenset({"power_cap", "thermal", "hbm", "pcie"})

_WIDTHS = {"gpu": 0, "node": 1, "job": 2, "leaf": 3, "rack": 3}


def width(scope: str) -> int:
    return _WIDTHS[scope]


def fleet_wide(cause: str) -> bool:
    """Whether an incident of this cause is about the fleet, whatever rack its first member is in."""
    return cause == "no_telemetry" or cause.endswith(COMMON)


def jobs_hurt(incidents: Iterable[Incident]) -> set[str]:
    """Jobs that open incidents hurt; a note (a newer driver) hurts none, and who holds GPUs idle hurts nobody's job."""
    hurting = (i for i in incidents if i.severity is not Severity.INFO and i.kind is not IncidentKind.IDLE)
    return {i.job for i in hurting if i.job and i.closed_ms is None}


def heat_explains(wide: IncidentKind, narrow: IncidentKind) -> bool:
    return wide is IncidentKind.THERMAL and narrow is IncidentKind.STRAGGLER


def explains_slowdown(incident: Incident, slow: Finding | Incident) -> bool:
    """Return whether an open incident explains why a job became slower as a whole."""
    if incident.closed_ms is not None or incident.severity is Severity.INFO or incident.kind not in SLOWS_A_JOB:
        return False
    if is_foreign(incident.cause):
        return False
    if slow.kind is not IncidentKind.SLOWDOWN or slow.severity is Severity.INFO or slow.cause.endswith(OBJECTIVE):
        return False
    if abs(incident.since_ms - slow.since_ms) > SLOWS_WITHIN_MS:
        return False
    nodes = {node for node, _ in slow.members}
    return incident.job == slow.job or any(node in nodes for node, _ in incident.members)


def foreign_apart(finding: Finding, incident: Incident) -> bool:
    """Return whether only one of the two rests on what others have written on a Kubernetes node.

    Neither explains, joins or closes the other: what Drover measures decides about nodes, and nothing that others say
    may change its cause, its severity or what is done.
    """
    return is_foreign(finding.cause) is not is_foreign(incident.cause)


def apart(finding: Finding, incident: Incident) -> bool:
    """Return whether a finding and an incident on one node or GPU are unrelated: each is an incident of its own.

    A cable's fault does not follow from a fan's, and a wrong clock causes neither; mending one must not close the
    other. On a GPU all joins, as its heat, errors and silence usually have one cause. But a GPU that is lost minutes
    after its memory, links or heat were reported is new, also for people who silenced that: until then it worked, and
    now its job is dead.
    """
    if foreign_apart(finding, incident):
        return True
    if finding.kind is incident.kind:
        return False
    if finding.cause in GPU_GONE and finding.detector not in incident.detectors:
        dying = incident.kind is IncidentKind.XID  # its driver or its bus had given it up: the end of the same fault
        return not dying and finding.since_ms - incident.opened_ms > GONE_LATER_MS
    kinds = {finding.kind, incident.kind}
    if IncidentKind.DRIFT in kinds:
        return True  # how a node is set up stands for weeks: no fault is its sequel, and it keeps none open
    if finding.scope != "node":
        return False
    if "clock_wrong" in (finding.cause, incident.cause):
        return True
    ports = finding.detector == "links" or incident.detectors == ("links",)
    return (ports and not kinds <= OF_PORTS) or kinds in HARDLY_TOGETHER


def goes_on(finding: Finding, incident: Incident) -> bool:
    """Return whether this detector has reported an open fault before: its finding joins that."""
    known = finding.detector in incident.detectors and incident.closed_ms is None
    return known and incident.severity is not Severity.INFO


def explains(wide: Finding, narrow: Incident) -> bool:
    if wide.cause.endswith(COMMON):  # the very same of each, and nothing else that these boards have
        return wide.kind is narrow.kind and narrow.cause == wide.cause.removesuffix(COMMON)
    if wide.kind is narrow.kind is IncidentKind.LINK and narrow.scope == "gpu":
        return wide.cause == narrow.cause  # ports and switches explain no NVLink or PCIe of a GPU
    return wide.kind is narrow.kind or heat_explains(wide.kind, narrow.kind)


def leads(finding: Finding, incident: Incident) -> bool:
    """Whether the finding explains more than what the incident shows now; the same cause renews its own words."""
    ranks = ROOT[finding.kind] - ROOT[incident.kind]
    severities = SEVERITY_ORDER.index(finding.severity) - SEVERITY_ORDER.index(incident.severity)
    same = (finding.kind, finding.cause) == (incident.kind, incident.cause)
    return same or ranks > 0 or (ranks == 0 and severities > 0)
