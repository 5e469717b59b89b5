"""What happened to a node and why, newest first, each row leading to its incident."""

from __future__ import annotations

from zoneinfo import ZoneInfo

from drover_dashboard import node_history, view
from drover_proto import fleet_pb2 as pb
from drover_proto.events import Incident, IncidentKind, Severity, Wanted

T0 = 1_795_320_000_000  # Sunday 2026-11-22 05:00 in Berlin
DAY_MS = 86_400_000
WHO = view.Viewer(ZoneInfo("Europe/Berlin"), T0)
OVER = Incident(
    "i1", IncidentKind.XID, "xid_79", "gpu", "n1", 3, (("n1", 3),), T0 - 5 * DAY_MS, T0 - 5 * DAY_MS, T0 - 4 * DAY_MS,
    Severity.CRITICAL, 0.9, Wanted.DRAIN, "GPU 3 fell off the bus", "Reset it.",
)  # fmt: skip


def line(act: str, ts_ms: int, state: str = "done", by: str = "drover", incident: str = "i1") -> pb.ActionLine:
    return pb.ActionLine(act=act, state=state, by=by, ts_ms=ts_ms, incident_id=incident, why="GPU 3", detail="no job")


def test_days_are_named_who_did_it_is_told_and_rows_lead_to_the_incident() -> None:
    done = pb.ActionList(
        actions=[
            line("drain", OVER.since_ms + 60_000), line("resume", T0 - 3_600_000, by="kim", incident=""),
            line("drain", T0 - 60_000, "failed"),
        ]
    )  # fmt: skip
    rows = node_history.rows(done, [OVER], WHO)
    assert [[cell.text for cell in row.cells[:2]] for row in rows] == [
        ["Sun 04:59:00", "drain: failed"],
        ["Sun 04:00:00", "put back by kim"],
        ["Tue Nov 17 05:01:00", "drained"],
        ["Tue Nov 17 05:00:00", "critical incident, over after 24 h 00 min"],
    ]
    assert [row.href for row in rows] == ["incidents?id=i1&state=all", "", *["incidents?id=i1&state=all"] * 2]


def test_open_incidents_stand_elsewhere_and_no_answer_is_no_history() -> None:
    assert node_history.rows(None, [], WHO) == []
