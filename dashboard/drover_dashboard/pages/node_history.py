"""What happened to a node and why: what was done to it, and its incidents that are over."""

from __future__ import annotations

from datetime import datetime

from drover_core.model.events import Incident
from drover_dashboard import client
from drover_dashboard.pages.incident_rows import parse
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import view
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb

SHOWN = 100
NOT_KNOWN = "What was done to it is not known."
LIST_PX, FIT = 320, 7
DID = {
    "drain": "drained", "isolate": "isolated", "resume": "put back", "reset": "reset", "reboot": "rebooted",
    "advise": "advised against", "unadvise": "no longer advised against", "repair": "ticket",
    "isolate_gpu": "isolated", "return_gpu": "put back",
}  # fmt: skip


def show(node: str, who: view.Viewer) -> str | None:
    """The newest first; the id of the incident just clicked."""
    done, found = client.fleet().actions(node, SHOWN), client.fleet().incidents("all", node=node, limit=SHOWN)
    known = done.value is not None and found.value is not None
    lines = rows(done.value, parse(found.value) if found.value else [], who)
    return table(
        "node_history",
        (Column("What happened"), Column(), Column("Why", wrap=True)),
        lines,
        empty="No past actions or incidents on this node." if known else NOT_KNOWN,
        link_column=1,
        height=LIST_PX if len(lines) > FIT else None,
    )


def rows(done: pb.ActionList | None, found: list[Incident], who: view.Viewer) -> list[Row]:
    """Pure."""
    moments: list[tuple[int, Row]] = []
    for line in done.actions if done else ():
        by = "" if line.by == "drover" else f" by {line.by}"
        did = DID.get(line.act, line.act) if line.state == "done" else f"{line.act.replace('_gpu', '')}: {line.state}"
        did = f"GPU {line.gpu} {did}" if line.HasField("gpu") else did
        moments.append((line.ts_ms, _row(line.ts_ms, f"{did}{by}", line.why, line.detail, line.incident_id, who)))
    for incident in found:
        if incident.closed_ms is not None:
            over = f"{incident.severity} incident, over after {fmt.duration(incident.closed_ms - incident.since_ms)}"
            moments.append((incident.since_ms, _row(incident.since_ms, over, incident.summary, "", incident.id, who)))
    return [row for _, row in sorted(moments, key=lambda item: -item[0])]


def _row(ts_ms: int, what: str, why: str, more: str, incident: str, who: view.Viewer) -> Row:
    day = datetime.fromtimestamp(ts_ms / 1000, who.where).strftime("%a")
    return Row(
        (Cell(f"{day} {who.clock(ts_ms)}", kind="faint"), Cell(what, kind="strong"), Cell(who.localize(why), sub=more)),
        id=incident,
        href=view.href(view.INCIDENTS, id=incident, state="all") if incident else "",
    )
