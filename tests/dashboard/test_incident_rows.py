"""Incidents as rows: an answer that all open pages share is parsed once, and ages move seldom."""

from __future__ import annotations

from dataclasses import replace
from zoneinfo import ZoneInfo

from drover_core.model.events import (
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
    to_json,
)
from drover_dashboard.pages import incident_rows
from drover_dashboard.widgets import table, view
from drover_proto import fleet_pb2 as pb

T0 = 1_795_320_000_000  # a full minute
OPEN = Incident(
    "i1", IncidentKind.XID, "xid_79", "gpu", "n1", 3, (("n1", 3),), T0 - 601_000, T0 - 601_000, None,
    Severity.CRITICAL, 0.9, RecommendedAction.DRAIN, "GPU 3 fell off the bus", "Reset it.",
)  # fmt: skip


def age(incident: Incident, now_ms: int) -> str:
    (row,) = incident_rows.rows([incident], {}, view.Viewer(ZoneInfo("UTC"), now_ms))
    return row.cells[2].sub


def test_each_answer_is_parsed_once() -> None:
    reply = pb.IncidentList(incidents_json=[to_json(OPEN)])
    first = incident_rows.parse(reply)
    assert first == [OPEN]
    assert incident_rows.parse(reply) is first
    assert incident_rows.parse(pb.IncidentList(incidents_json=[to_json(replace(OPEN, id="i2"))]))[0].id == "i2"


def test_the_age_of_an_old_one_is_the_same_for_a_whole_minute() -> None:
    assert {age(OPEN, T0 + second * 1000) for second in range(60)} == {"for 10 min"}
    assert age(OPEN, T0 + 60_000) == "for 11 min"


def test_the_age_of_a_young_one_moves_every_ten_seconds_and_is_never_negative() -> None:
    young = replace(OPEN, since_ms=T0 + 5_000)
    assert age(young, T0 + 6_000) == "for 0 s"
    assert age(young, T0 + 19_000) == "for 5 s"
    assert age(young, T0 + 20_000) == "for 15 s"


def test_a_row_carries_what_is_set_and_nothing_else() -> None:
    row = table.Row((table.Cell("a"), table.Cell("b", sub="c", mark=table.Mark("+5 %", "warn"))), id="i", href="x?id=i")
    assert table._row(row) == {
        "cells": [{"text": "a"}, {"text": "b", "sub": "c", "mark": {"text": "+5 %", "tone": "warn"}}],
        "id": "i", "href": "x?id=i",
    }  # fmt: skip
