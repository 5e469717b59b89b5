"""Which nodes are likelier than others to fail soon, why, and how far such a ranking may be trusted."""

from __future__ import annotations

import streamlit as st

from drover_dashboard import client
from drover_dashboard.widgets import address, view
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Mark,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb

SHOWN = 200
LIST_PX = 620
TROUBLED_PX, FIT = 330, 6
EVERY_S = 10


@st.fragment(run_every=EVERY_S)
def show() -> None:
    who = view.viewer()
    answer = client.fleet().risk(SHOWN)
    view.trouble("risk", answer.trouble, answer.as_of_ms, who)
    reply = answer.value
    if reply is None:
        return
    left, right = st.columns([1.9, 1], gap="medium")
    with left:
        ranking(reply, who)
    with right:
        trust(reply)


def ranking(reply: pb.RiskList, who: view.Viewer) -> None:
    racks = view.racks()
    if reply.in_trouble:
        in_trouble(reply, racks, who)
    known = [risk for risk in reply.nodes if risk.reasons]
    rows = [_row(number, risk, racks, who) for number, risk in enumerate(known, 1)]
    columns = (
        Column("", "right"),
        Column("May fail next"),
        Column(f"Chance within {reply.days} days", "right", help="of a new failure, by the model; no forecast"),
        Column("Why it stands here", wrap=True),
    )
    left = "of the other nodes " if reply.in_trouble else ""
    empty = f"Nothing is known that sets one {left}apart: no failure in the last months and no sign of one."
    if not reply.total:
        empty = "No ranking yet: it comes with the first buckets. A standby collector has none."
    clicked = table("risk", columns, rows, empty=empty, link_column=1, height=LIST_PX if len(rows) > 12 else None)
    if clicked:
        st.switch_page(view.NODE, query_params={"node": clicked})
    others = [risk.chance for risk in reply.nodes if not risk.reasons]
    if others:
        total = reply.total - reply.in_trouble_total
        which = f"{fmt.number(total - len(rows))} more" if rows else f"all {fmt.number(total)}"
        text = f"{fmt.capital(which)} nodes show no sign: {_percent(others[0])} each, as any node has."
        view.notice("risk_others", "remark", text)
    elif reply.total - reply.in_trouble_total > len(rows):
        total = reply.total - reply.in_trouble_total
        text = f"{fmt.number(len(rows))} of {fmt.number(total)} nodes shown, the likeliest first."
        view.notice("risk_more", "remark", text)


def in_trouble(reply: pb.RiskList, racks: dict[str, str], who: view.Viewer) -> None:
    """They have failed already: nobody has to guess. Each leads to its incident."""
    rows = [
        Row(
            (
                Cell(node.severity.upper(), badge=node.severity),
                Cell(node.node, sub=f"rack {racks[node.node]}" if node.node in racks else "", kind="strong"),
                Cell(who.localize(node.summary), sub=who.since(node.since_ms)),
            ),
            id=node.incident_id,
            href=view.href(view.INCIDENTS, id=node.incident_id),
        )
        for node in reply.in_trouble
    ]
    columns = (Column("Severity"), Column("In trouble now"), Column("What is wrong", wrap=True))
    height = TROUBLED_PX if len(rows) > FIT else None
    if clicked := table("in_trouble", columns, rows, empty="", link_column=1, height=height):
        st.switch_page(view.INCIDENTS, query_params={"id": clicked})
    if reply.in_trouble_total > len(rows):
        view.notice("trouble_more", "remark", f"{len(rows)} of {fmt.number(reply.in_trouble_total)} nodes shown.")


def _row(number: int, risk: pb.RiskRow, racks: dict[str, str], who: view.Viewer) -> Row:
    rack = racks.get(risk.node, "")
    dealt_with = Mark("in trouble now", "warn") if risk.in_trouble else None
    return Row(
        (
            Cell(str(number), kind="faint"),
            Cell(risk.node, sub=f"rack {rack}" if rack else "", kind="strong", mark=dealt_with),
            Cell(f"{risk.chance * 100:.1f} %"),
            Cell(who.localize("; ".join(risk.reasons))),
        ),
        id=risk.node,
        href=view.href(view.NODE, node=risk.node),
    )


def trust(reply: pb.RiskList) -> None:
    """What was measured of it, next to what it is compared with."""
    text = (
        "A ranking, not a prophecy: most failures come without a forerunner. Use it to choose where to look, test or"
        " repair first, never to take a node out by itself."
    )
    view.notice("no_prophecy", "todo", text)
    measured = reply.measured
    if not measured.trace:
        view.notice("unmeasured", "remark", "This older collector does not report how good the ranking is.")
        return
    top = f"{measured.top_share * 100:g} %"
    rows = [
        Row((Cell("this ranking", kind="strong"), Cell(_percent(measured.captured)))),
        Row((Cell("who came back from repair last"), Cell(_percent(measured.recency)))),
        Row((Cell("no ranking", kind="faint"), Cell(_percent(measured.chance)))),
    ]
    columns = (
        Column(f"Of the next {reply.days} days' failures, found in the top {top}", wrap=True),
        Column("share", "right"),
    )
    table("measured", columns, rows, empty="")
    basis = (
        f"Measured on a public trace, {measured.trace}: {fmt.number(measured.servers)} servers,"
        f" {fmt.number(measured.faults)} faults, ranked again on each of {measured.days} days that it had not seen."
        f" The chance that a node that failed stood above one that did not was {measured.auc:.3f} (0.5: by luck)."
        f" {_percent(1 - measured.failed_before)} of the failures befell nodes that had not failed before: no history"
        " knows of these. Your fleet may differ."
    )
    view.notice("measured_on", "remark", basis)


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


address.title("Risk")
show()
