"""What happened to a node and why, newest first, each row leading to its incident."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from drover_core.model.events import (
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_dashboard import client
from drover_dashboard.pages import node_history
from drover_dashboard.widgets import view
from drover_proto import fleet_pb2 as pb

T0 = 1_795_320_000_000  # Sunday 2026-11-22 05:00 in Berlin
DAY_MS = 86_400_000
WHO = view.Viewer(ZoneInfo("Europe/Berlin"), T0)
OVER = Incident(
    "i1", IncidentKind.XID, "xid_79", "gpu", "n1", 3, (("n1", 3),), T0 - 5 * DAY_MS, T0 - 5 * DAY_MS, T0 - 4 * DAY_MS,
    Severity.CRITICAL, 0.9, RecommendedAction.DRAIN, "GPU 3 fell off the bus", "Reset it.",
)  # fmt: skip


def line(act: str, ts_ms: int, state: str = "done", by: str = "drover", incident: str = "i1") -> pb.ActionLine:
    return pb.ActionLine(act=act, state=state, by=by, ts_ms=ts_ms, incident_id=incident, why="GPU 3", detail="no job")


def test_days_and_people_are_named_and_rows_lead_to_the_incident() -> None:
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


def test_what_is_not_known_is_not_shown_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = client.Answer(pb.ActionList(), T0), client.Answer(pb.IncidentList(), T0)
    unknown: client.Answer[Any] = client.Answer(None, 0)
    said: list[str] = []
    monkeypatch.setattr(node_history, "table", lambda *_, empty, **__: said.append(empty))
    for done, found in (nothing, (unknown, nothing[1]), (nothing[0], unknown)):
        fleet = SimpleNamespace(actions=lambda *_, a=done: a, incidents=lambda *_, b=found, **__: b)
        monkeypatch.setattr(client, "fleet", lambda f=fleet: f)
        node_history.show("n1", WHO)
    assert said == ["No past actions or incidents on this node.", *[node_history.NOT_KNOWN] * 2]
