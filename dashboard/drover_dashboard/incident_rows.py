"""Incidents as lines of a table: severity, what, where, since when, wanted action."""

from __future__ import annotations

from collections.abc import Iterable

from drover_dashboard import format as fmt
from drover_dashboard import view
from drover_dashboard.table import Cell, Column, Row, table
from drover_proto import fleet_pb2 as pb
from drover_proto.events import Incident, from_json

COLUMNS = (Column("Severity"), Column("What is wrong, where", wrap=True), Column("Since"), Column("Wanted"))


def parse(reply: pb.IncidentList) -> list[Incident]:
    return [from_json(Incident, text) for text in reply.incidents_json]


def rows(found: Iterable[Incident], racks: dict[str, str], who: view.Viewer) -> list[Row]:
    return [
        Row(
            (
                view.severity_cell(incident.severity),
                Cell(who.told(incident.summary), sub=place(incident, racks)),
                Cell(who.clock(incident.since_ms), sub=_age(incident, who)),
                Cell(fmt.action(incident.action), kind="strong"),
            ),
            id=incident.id,
            href=view.href(view.INCIDENTS, id=incident.id),
        )
        for incident in found
    ]


def place(incident: Incident, racks: dict[str, str]) -> str:
    parts = [fmt.where(incident, racks), f"cause: {fmt.cause(incident.cause)}"]
    if incident.job:
        parts.append(f"job {incident.job}")
    return " · ".join(parts)


def _age(incident: Incident, who: view.Viewer) -> str:
    if incident.closed_ms is not None:
        return f"closed after {fmt.duration(incident.closed_ms - incident.since_ms)}"
    return f"for {who.ago(incident.since_ms)}"


def show(key: str, lines: list[Row], *, empty: str, selected: str = "", height: int | None = None) -> str | None:
    """The id of the incident just clicked."""
    return table(key, COLUMNS, lines, empty=empty, selected=selected, link_column=1, height=height)
