"""The Policy page's table of what the policy in force and each preset would have made of the last days' incidents."""

from __future__ import annotations

import streamlit as st

from drover_dashboard import client
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import view
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb

KEY = "policies_decided_again"  # in the session
NAMED = 4
COLUMNS = (
    Column("Decided again by"),
    Column("Would have taken out", wrap=True),
    Column("Times", "right", help="a node that came back may go again"),
    Column("At once", "right", help="the most nodes at the same time"),
    Column("GPU-hours", "right", help="out of service, each until its incidents were over: to compare, no prophecy"),
    Column("Held back", "right", help="incidents that the guard held back"),
    Column("Wants", wrap=True, help="incidents by what is wanted for them, held ones too"),
)


def show(who: view.Viewer) -> None:
    """A button, because the collector decides it all again for each policy. The result stays until the next press."""
    if st.button("Decide the last 7 days again: this policy next to each preset"):
        st.session_state[client.scoped(KEY)] = client.fleet().backtest()
    answer: client.Answer[pb.BacktestReply] | None = st.session_state.get(client.scoped(KEY))
    if answer is None:
        return
    view.trouble("backtest", answer.trouble, answer.as_of_ms, who)
    if answer.value is None:
        return
    view.notice("backtest_of", "remark", said(answer.value, answer.as_of_ms, who))
    table("policy_backtest", COLUMNS, [_row(row) for row in answer.value.policies], empty="")


def said(reply: pb.BacktestReply, as_of_ms: int, who: view.Viewer) -> str:
    which = fmt.several(reply.total, "incident")
    if reply.incidents < reply.total:
        which = f"the newest {fmt.number(reply.incidents)} of {which}"
    return (
        f"Decided again {who.clock(as_of_ms)}: {which}, since {who.clock(reply.since_ms)}; limits for a job's nodes are"
        " left out. drover policy backtest FILE does it with a file of yours, and names every node."
    )


def _row(row: pb.BacktestRow) -> Row:
    nodes = ", ".join(row.nodes[:NAMED]) + (f" and {row.nodes_out - NAMED} more" if row.nodes_out > NAMED else "")
    wants = ", ".join(f"{what} {fmt.number(count)}" for what, count in sorted(row.wanted.items()))
    held = fmt.number(row.held) + (f", {fmt.several(row.mass_events, 'mass event')}" if row.mass_events else "")
    return Row(
        (
            Cell(row.policy, sub="in force" if row.in_force else "preset", kind="strong"),
            Cell(fmt.several(row.nodes_out, "node") if row.nodes_out else "no node", sub=nodes),
            Cell(fmt.number(row.times)),
            Cell(fmt.number(row.most_out)),
            Cell(fmt.hours(row.gpu_hours)),
            Cell(held),
            Cell(wants or "nothing"),
        )
    )
