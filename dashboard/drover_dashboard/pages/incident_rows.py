"""Incidents as lines of a table: severity, what, where, since when, wanted action."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from drover_core.model.events import Incident, from_json
from drover_core.model.incident_title import incident_title
from drover_dashboard import client
from drover_dashboard.pages import incident_handling as handling
from drover_dashboard.pages import silence_forms as silencing
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import view
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb

COLUMNS = (Column("Severity"), Column("What is wrong, where", wrap=True), Column("Since"), Column("Wanted"))


CALM_MS, STEP_MS = 120_000, 10_000  # ages move once a minute; those of what is younger every 10 s
_parsed: list[tuple[pb.IncidentList, list[Incident]]] = []  # of the newest answers, which all open pages share
KEPT = 4
NONE: Mapping[str, pb.SilenceNote] = MappingProxyType({})
UNHANDLED: Mapping[str, pb.IncidentHandling] = MappingProxyType({})


def parse(reply: pb.IncidentList) -> list[Incident]:
    """An answer that several pages show is parsed once."""
    for known, found in tuple(_parsed):
        if known is reply:
            return found
    found = [from_json(Incident, text) for text in reply.incidents_json]
    _parsed.insert(0, (reply, found))
    del _parsed[KEPT:]
    return found


def rows(
    found: Iterable[Incident],
    racks: dict[str, str],
    who: view.Viewer,
    silences: Mapping[str, pb.SilenceNote] = NONE,
    handled: Mapping[str, pb.IncidentHandling] = UNHANDLED,
) -> list[Row]:
    """`silences`: by incident, of those that are silenced. `handled`: of those with notes of people."""
    return [
        Row(
            (
                view.severity_cell(incident.severity),
                Cell(
                    incident_title(incident, racks),
                    sub=place(incident, racks),
                    title=who.localize(incident.summary),
                    mark=handling.mark(handled.get(incident.id), silencing.mark(silences.get(incident.id), who)),
                ),
                Cell(who.clock(incident.since_ms), sub=_age(incident, who)),
                Cell(fmt.action(incident.action), kind="strong"),
            ),
            id=incident.id,
            href=view.href(view.INCIDENTS, id=incident.id),
            tone="muted" if incident.id in silences or _acknowledged(handled.get(incident.id)) else "",
        )
        for incident in found
    ]


TITLES, TITLE_DAYS = 200, 90.0  # incidents whose ids are given words; older ones stay ids


def titles() -> dict[str, str]:
    """Return the title of each incident of the last days, by id, for pages that name incidents: an id says nothing."""
    answer = client.fleet().incidents("all", TITLE_DAYS, limit=TITLES, sort="newest")
    return {} if answer.value is None else {one.id: incident_title(one) for one in parse(answer.value)}


def _acknowledged(found: pb.IncidentHandling | None) -> bool:
    return found is not None and bool(found.acknowledged_by)


def place(incident: Incident, racks: dict[str, str]) -> str:
    """What its title does not say: the rack, its members where it has many, the job."""
    rack = racks.get(incident.node or "", "")
    parts = [f"rack {rack}"] if rack else []
    if incident.node is None and incident.members:
        parts.append(fmt.members(incident.members, 3))
    if incident.job and incident.scope != "job":
        parts.append(fmt.job(incident.job))
    return " · ".join(parts)


def _age(incident: Incident, who: view.Viewer) -> str:
    if incident.closed_ms is not None:
        return f"closed after {fmt.duration(incident.closed_ms - incident.since_ms)}"
    # All ages move at once, and seldom: a list is sent to every open page again whenever one word of it changes.
    step_ms = 60_000 if who.now_ms - incident.since_ms > CALM_MS else STEP_MS
    return f"for {fmt.duration(who.now_ms // step_ms * step_ms - incident.since_ms)}"


def show(key: str, lines: list[Row], *, empty: str, selected: str = "", height: int | None = None) -> str | None:
    """The id of the incident just clicked."""
    return table(key, COLUMNS, lines, empty=empty, selected=selected, link_column=1, height=height)
