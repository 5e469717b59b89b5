"""Which incidents are listed, in which order, and the same as a CSV. The address has all of it: a link is a view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import streamlit as st

from drover_core.model.events import Incident, IncidentKind, Severity, from_json
from drover_core.model.incident_title import incident_title
from drover_core.times import iso
from drover_dashboard import client
from drover_dashboard.client import FleetClient
from drover_dashboard.widgets import address, charts, csv_file, moment, view
from drover_proto import fleet_pb2 as pb

OF_LIST = ("id", charts.OPEN)  # leave the address with another choice: the incident shown is one of the new list
STATES = ("open", "closed", "all")
SEVERITIES = {"info": "every severity", "warning": "warning and worse", "critical": "critical only"}
SORTS = {
    "worst": "worst first", "newest": "newest first", "oldest": "oldest first", "longest": "longest first",
    "lost": "costliest first",
}  # fmt: skip
SILENCED = {"": "silenced too", "no": "hide silenced", "only": "only silenced"}
ACKNOWLEDGED = {"": "acknowledged too", "no": "hide acknowledged", "only": "only acknowledged"}
SINCE = {"": "any time", "1h": "last hour", "1d": "last 24 hours", "7d": "last 7 days", "30d": "last 30 days"}
DAYS = {"": 0.0, "1h": 1 / 24, "1d": 1.0, "7d": 7.0, "30d": 30.0}
OF_SEVERITY = {
    "info": "incident",
    "warning": "incident of severity warning or critical",
    "critical": "critical incident",
}
CSV_MOST = 10_000
HEADERS = (
    "id", "severity", "kind", "cause", "title", "node", "gpu", "rack", "job", "since", "closed", "wanted",
    "gpu_hours_lost", "gpu_hours_waited", "silenced_until", "acknowledged_by", "assignee", "tickets", "outcome",
    "summary",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Filters:
    """`fields`: of the request. `narrow`: how many of those in the popover are in use."""

    state: str
    since: str
    narrow: int
    fields: dict[str, Any] = field(default_factory=dict)

    def ask(self, fleet: FleetClient, **more: Any) -> client.Answer[pb.IncidentList]:
        return fleet.incidents(self.state, DAYS[self.since], **(self.fields | more))

    def empty(self) -> str:
        """Say what was not found."""
        fits = " that fits the filter" if self.narrow else ""
        if self.narrow == 1 and self.fields["silenced"]:
            fits = " that is silenced" if self.fields["silenced"] == "only" else " that is not silenced"
        kinds = [self.state] if self.state != "all" else []
        return f"No {' '.join([*kinds, OF_SEVERITY[self.fields['min_severity']]])}{fits}."


def choose() -> Filters:
    """The selectors, each kept in the address."""
    with st.container(horizontal=True, vertical_alignment="center"):
        state = address.segments(
            "state", "State", STATES, "open", key="incidents_state", drops=OF_LIST, label_visibility="collapsed"
        )
        severity = _pick("severity", "Severity", SEVERITIES, Severity.INFO.value, width=160)
        sort = _pick("sort", "Sort", SORTS, "worst", width=140)
        used = sum(map(_used, NARROW))
        with st.popover(
            f"Filter ({used})" if used else "Filter", icon=":material/filter_list:", key="incidents_filter"
        ):
            fields, since = _narrow()
        moment.pick(key="incidents_moment")
        made = Filters(state, since, used, {"min_severity": severity, "sort": sort, **fields})
        _csv(made)
    return made


NARROW = ("text", "kind", "node", "rack", "job", "assignee", "since", "acknowledged", "silenced")


def _used(name: str) -> bool:
    """Return True if this filter is in use, before it is drawn: a link or Back leads, else the widget does."""
    key, asked = f"incidents_{name}", st.query_params.get(name)
    led = key not in st.session_state or st.session_state.get(f"{key}_in_address") != asked
    return bool(asked if led else st.session_state[key])


def _narrow() -> tuple[dict[str, str], str]:
    """What the popover holds: fields of the request, and since when."""
    kinds = {"": "every kind", **{str(kind): str(kind) for kind in IncidentKind}}
    text = _line("text", "Text", "in title, node, job, ticket")
    kind = _pick("kind", "Kind", kinds, "", label_visibility="visible")
    node = _line("node", "Node", "r01n01")
    rack = _line("rack", "Rack", "r01")
    job = _line("job", "Job", "job-1001")
    assignee = _line("assignee", "Assigned to", "alex")
    since = _pick("since", "Open or closed within", SINCE, "", label_visibility="visible")
    acknowledged = _pick("acknowledged", "Acknowledged", ACKNOWLEDGED, "", label_visibility="visible")
    silenced = _pick("silenced", "Silenced", SILENCED, "", label_visibility="visible")
    fields = {
        "text": text, "kind": kind, "node": node, "rack": rack, "job": job, "assignee": assignee,
        "acknowledged": acknowledged, "silenced": silenced,
    }  # fmt: skip
    return fields, since


def _pick(name: str, label: str, options: dict[str, str], usual: str, **more: Any) -> str:
    return address.select(
        name,
        label,
        list(options),
        usual,
        key=f"incidents_{name}",
        drops=OF_LIST,
        format_func=options.__getitem__,
        **more,
    )


def _line(name: str, label: str, example: str) -> str:
    return address.text(name, label, key=f"incidents_{name}", drops=OF_LIST, placeholder=example, max_chars=100)


def _csv(filters: Filters) -> None:
    fleet, racks = client.fleet(), view.racks()  # the file is made on a thread that knows neither page nor cluster
    at_ms = moment.at_ms()  # nor the moment

    def make() -> str:
        reply = filters.ask(fleet, limit=CSV_MOST, at_ms=at_ms).value
        if reply is None:
            raise RuntimeError("the collector does not answer: no CSV")
        return csv_of(reply, racks)

    csv_file.button("incidents_csv", "incidents", make)


def csv_of(reply: pb.IncidentList, racks: dict[str, str]) -> str:
    """Times are ISO 8601 UTC; what is not known is empty."""
    found = (from_json(Incident, text) for text in reply.incidents_json)
    return csv_file.csv_text(HEADERS, [_cells(incident, reply, racks) for incident in found])


def _cells(i: Incident, reply: pb.IncidentList, racks: dict[str, str]) -> Sequence[object]:
    silence = reply.silences.get(i.id)
    handling = reply.handling.get(i.id, pb.IncidentHandling())
    nodes = dict.fromkeys(node for node, _ in i.members)
    return (
        i.id, i.severity, i.kind, i.cause, incident_title(i, racks), i.node or " ".join(nodes), i.gpu,
        " ".join(dict.fromkeys(racks[node] for node in nodes if node in racks)), i.job, iso(i.since_ms),
        None if i.closed_ms is None else iso(i.closed_ms), i.action, i.gpu_hours_lost, i.gpu_hours_waited,
        None if silence is None else iso(silence.until_ms), handling.acknowledged_by, handling.assignee,
        " ".join(handling.tickets), handling.outcome, i.summary,
    )  # fmt: skip
