"""The timeline of an incident: everything that happened to it, in order, whether Drover or a person did it."""

from __future__ import annotations

from drover_core.model.events import (
    Act,
    Action,
    ActionState,
    Audit,
    Decision,
    Health,
    Incident,
    IncidentKind,
    NodeOutage,
    Note,
    ProbeOrder,
    ProbeReason,
    ProbeVerdict,
    RecommendedAction,
    Severity,
    to_json,
)
from drover_proto import fleet_pb2 as pb
from drover_proto.incident_timeline import build_timeline


def test_one_timeline_of_all_that_happened() -> None:
    incident = Incident(
        "i",
        IncidentKind.XID,
        "xid_79",
        "gpu",
        "n1",
        0,
        (("n1", 0),),
        1,
        0,
        None,
        Severity.CRITICAL,
        1.0,
        RecommendedAction.DRAIN,
        "dead",
        "drain",
        timeline=(Note(1, "opened"), Note(90, "closed")),
    )
    drained = Action("x", "d", "i", "n1", Act.DRAIN, "slurm", ActionState.DONE, 20, "verified", attempts=3)
    duties = [NodeOutage("n1", Health.DRAINED, 30, "i", "no jobs", "bo"), NodeOutage("n1", Health.HEALTHY, 80, "i", "")]
    passed = ProbeVerdict("o", "n1", 0, True, "", "all as expected", 50, ProbeReason.VALIDATE, "i")
    asked = Decision("d", "i", 2, "n1", RecommendedAction.DRAIN, "approve", "pending_approval", "fatal", "asks")
    detail = pb.IncidentDetail(
        incident_json=to_json(incident), decisions_json=[to_json(asked)],
        audit_json=[to_json(Audit("a", 10, "anna", "approve", "i", "seen"))],
        actions_json=[to_json(drained)],
        duties_json=[to_json(duty) for duty in duties],
        probe_orders_json=[to_json(ProbeOrder("o", "n1", (), "quick", (), ProbeReason.VALIDATE, "done", 60, "i"))],
        probe_verdicts_json=[to_json(passed)],
    )  # fmt: skip
    assert [(m.ts_ms, m.source, m.text) for m in build_timeline(detail)] == [
        (1, "incident", "opened"),
        (2, "policy", "drain n1: pending approval: asks [fatal]"),
        (10, "person", "approve by anna: seen"),
        (20, "action", "drain n1 through slurm: done, 3 attempts: verified"),
        (30, "node", "n1 drained by bo: no jobs"),
        (50, "probe", "n1 GPU 0 passed: all as expected"),
        (60, "probe", "quick probes of n1 to validate: done"),
        (80, "node", "n1 back in service"),
        (90, "incident", "closed"),
    ]
