"""The parts of the Capacity page. All but those that draw are pure."""

from __future__ import annotations

import streamlit as st

from drover_core.model.events import IncidentKind
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets import view
from drover_dashboard.widgets.bars import Bar, Kind, bars
from drover_dashboard.widgets.table import (
    Cell,
    Column,
    Row,
    table,
)
from drover_proto import fleet_pb2 as pb

USES = (
    Kind("busy", "at work", "held by a job and busy, or idle for too short a time to judge"),
    Kind("idle", "held, idle", "held by a job: no kernel, power near rest, no traffic, without a break"),
    Kind("free", "free", "in service, held by no job"),
    Kind("out", "out of service", "drained, under validation or in repair"),
    Kind("unknown", "unknown", "no data received from it"),
)
PIECES = (
    Kind("whole", "on whole free nodes"),
    Kind("pieces", "in pieces", "on nodes that others use: no job of whole nodes gets them"),
)
COSTS = (
    Kind("lost", "lost to the fault itself"),
    Kind("waited", "peers waited for it"),
)
IDLE, SERVICE = str(IncidentKind.IDLE), "service"
SHOWN_LEAFS = 24
LISTED_PX = 300


def hours(reply: pb.Capacity) -> tuple[float, float, float]:
    """GPU-hours lost to faults, waited by peers, and of nodes out of service; what is idle is no fault's."""
    faults = [row for row in reply.lost if row.kind not in (IDLE, SERVICE)]
    return (
        sum(row.lost for row in faults),
        sum(row.waited for row in faults),
        sum(row.lost for row in reply.lost if row.kind == SERVICE),
    )


def money(reply: pb.Capacity, amount: float | None) -> str:
    """`1,234 EUR`; a word where no price is set."""
    if amount is None:
        return "no price set"
    return f"{fmt.number(amount, 0 if abs(amount) >= 100 else 2)} {reply.currency}"


def fault_cost(reply: pb.Capacity) -> float | None:
    """Of all faults; None where one of the pools they befell has no price."""
    rows = [row for row in reply.lost if row.kind not in (IDLE, SERVICE)]
    if not reply.currency or any(not row.HasField("cost") for row in rows):
        return None
    return sum(row.cost for row in rows)


def tiles(reply: pb.Capacity) -> None:
    pools = reply.pools
    gpus = sum(pool.gpus for pool in pools)
    held = sum(pool.held for pool in pools)
    known = [pool.idle for pool in pools if pool.HasField("idle")]
    free, whole = sum(pool.free for pool in pools), sum(pool.free_nodes for pool in pools)
    lost, waited, _ = hours(reply)
    idle_hours = sum(row.gpu_hours for row in reply.idle)
    cost = fault_cost(reply)
    shown = (
        ("Held by jobs", fmt.number(held), f"of {fmt.number(gpus)} GPUs"),
        (
            "Held and idle",
            fmt.number(sum(known)) if known else "not known",
            f"{fmt.hours(idle_hours)} GPU-hours so far" if known else "no GPU use is reported",
        ),
        (
            "Free",
            fmt.number(free) if reply.judged_ms else "not known",
            f"whole nodes: {fmt.number(whole)}" if reply.judged_ms else "nothing judged lately",
        ),
        ("GPU-hours faults took", fmt.hours(lost + waited), f"lost {fmt.hours(lost)}, waited {fmt.hours(waited)}"),
        ("What that cost", money(reply, cost), "[cost] of the settings" if cost is None else "faults and waiting"),
    )
    view.tiles("capacity", shown)


def pools(reply: pb.Capacity) -> None:
    rows = []
    for pool in reply.pools:
        idle = pool.idle if pool.HasField("idle") else 0
        price = f"{pool.price:g} {reply.currency} a GPU-hour" if pool.HasField("price") else ""
        use = (pool.held - idle, idle, pool.free, pool.out, pool.unknown)
        label = pool.pool or "(no pool)"
        rows.append(Bar(label, tuple(map(float, use)), f"{fmt.number(pool.gpus)} GPUs", price))
    st.caption("GPUs of each pool, now")
    bars("pools", USES, rows, "GPUs", "The fleet file names no node.", shares=True)
    lines = [
        Row(
            (
                Cell(pool.pool or "(no pool)", sub=f"{fmt.number(pool.nodes)} nodes"),
                Cell(fmt.hours(pool.gpu_hours_lost)),
                Cell(fmt.hours(pool.gpu_hours_waited)),
                Cell(fmt.hours(pool.gpu_hours_out)),
                _a_day(reply, pool, pool.gpus),
                _a_day(reply, pool, pool.idle if pool.HasField("idle") else None),
            )
        )
        for pool in reply.pools
    ]
    columns = (
        Column("Pool"),
        Column("Lost, h", "right", help="GPU-hours lost to faults in the time chosen above"),
        Column("Waited, h", "right", help="GPU-hours that peers waited for them"),
        Column("Out, h", "right", help="GPU-hours of nodes out of service, from when their jobs were gone"),
        Column("Costs a day", "right"),
        Column("Idle, a day", "right", help="what held and idle GPUs cost a day, as many as now"),
    )
    table("pool_costs", columns, lines, empty="", link_column=-1)


def _a_day(reply: pb.Capacity, pool: pb.PoolCapacity, gpus: int | None) -> Cell:
    if not pool.HasField("price"):
        return Cell("no price", kind="absent", title="[cost] in the collector's settings")
    if gpus is None:
        return Cell("not known", kind="absent")
    return Cell(money(reply, pool.price * gpus * 24))


def lost(reply: pb.Capacity, days: float) -> None:
    """By cause, most first; what is out of service and what is idle in lines of their own, for they are no fault's."""
    faults = [row for row in reply.lost if row.kind not in (IDLE, SERVICE)]
    st.caption(f"GPU-hours that faults cost in the last {fmt.several(round(days), 'day')}, by cause")
    rows = [
        Bar(
            f"{fmt.cause(row.cause)}",
            (round(row.lost, 2), round(row.waited, 2)),
            f"{fmt.hours(row.lost + row.waited)} h" + (f" · {money(reply, row.cost)}" if row.HasField("cost") else ""),
            f"{row.kind}, {fmt.number(row.incidents)} {'incident' if row.incidents == 1 else 'incidents'}",
        )
        for row in faults[:SHOWN_LEAFS]
    ]
    bars("lost", COSTS, rows, "GPU-hours", "No fault cost anything in this time.")
    with view.place():
        _remarks(reply)
    clicked = table(
        "dearest",
        (Column("Open the costliest incident of a cause"), Column("The cause's hours", "right")),
        [
            Row(
                (Cell(fmt.kind_and_cause(row.kind, row.cause)), Cell(fmt.hours(row.lost + row.waited))),
                id=row.worst,
                href=view.href(view.INCIDENTS, id=row.worst, state="all"),
            )
            for row in faults[:6]
        ],
        empty="",
    )
    if clicked:
        st.switch_page(view.INCIDENTS, query_params={"id": clicked, "state": "all"})


def idle(reply: pb.Capacity, who: view.Viewer) -> None:
    """Who holds GPUs and does not use them."""
    rows = [
        Row(
            (
                Cell(row.job, sub=f"{row.pool} · {', '.join(row.nodes)}", kind="strong"),
                Cell(f"{fmt.number(row.idle)} of {fmt.number(row.gpus)}"),
                Cell(who.clock(row.since_ms), sub=who.ago(row.since_ms)),
                Cell(fmt.hours(row.gpu_hours)),
            ),
            id=row.job,
            href=view.href(view.JOB, job=row.job),
        )
        for row in reply.idle
    ]
    columns = (
        Column("Job", wrap=True),
        Column("GPUs", "right"),
        Column("Since"),
        Column("h", "right"),
    )
    after = fmt.duration(reply.idle_after_s * 1000)
    known = reply.judged_ms and any(pool.HasField("idle") for pool in reply.pools)
    empty = (
        f"No job holds GPUs that have been idle for {after}." if known else "Whether GPUs are idle is not known now."
    )
    st.caption("Held and idle, by job")
    clicked = table("idle", columns, rows, empty=empty, height=LISTED_PX if len(rows) > 5 else None)
    if clicked:
        st.switch_page(view.JOB, query_params={"job": clicked})


def leafs(reply: pb.Capacity) -> None:
    """Free GPUs under each leaf: a job of whole nodes gets only whole ones."""
    st.caption("Free GPUs under each leaf, most whole nodes first")
    rows = [
        Bar(
            leaf.leaf or "(no leaf)",
            (float(leaf.free - leaf.scattered), float(leaf.scattered)),
            f"{fmt.number(leaf.free_nodes)} of {fmt.number(leaf.nodes)} nodes whole",
            f"{fmt.number(leaf.out_nodes)} out of service" if leaf.out_nodes else "",
        )
        for leaf in reply.leafs
        if leaf.free
    ]
    empty = "No GPU is free." if reply.judged_ms else "What is free is not known now."
    bars("leafs", PIECES, rows[:SHOWN_LEAFS], "GPUs", empty)
    with view.place():
        if rows:
            most = max(leaf.free_nodes for leaf in reply.leafs)
            more = f" {len(rows) - SHOWN_LEAFS} more leafs have free GPUs." if len(rows) > SHOWN_LEAFS else ""
            view.notice(
                "largest",
                "remark",
                f"Largest job of whole nodes that fits under one leaf: {fmt.several(most, 'node')}.{more}",
            )


def services(reply: pb.Capacity, who: view.Viewer) -> None:
    """Inference: how soon the first token comes, and how many."""
    rows = [
        Row(
            (
                Cell(row.service, sub=f"{row.servers} on {', '.join(row.nodes)}", kind="strong"),
                _value(row, "ttft_p50_s", "s", 2),
                _value(row, "ttft_p95_s", "s", 2),
                _value(row, "tokens_per_s", "/s", 0),
                _value(row, "waiting", "", 0),
            )
        )
        for row in reply.services
    ]
    columns = (
        Column("Service"),
        Column("First token, p50", "right", help="median of its servers"),
        Column("p95, worst server", "right"),
        Column("Tokens", "right", help="all servers together"),
        Column("Waiting", "right", help="requests in the queue"),
    )
    empty = "No inference server is read (setting inference_urls of the agents)."
    if reply.services_trouble:
        empty = f"What services do is not known: {who.localize(reply.services_trouble)}"
    table("services", columns, rows, empty=empty, link_column=-1)


def _remarks(reply: pb.Capacity) -> None:
    """What is counted separately from faults, and what is not known."""
    for row in reply.lost:
        if row.kind == SERVICE:
            text = (
                f"Nodes out of service: {fmt.hours(row.lost)} GPU-hours. A fault that goes on there counts above too."
            )
            view.notice("out_hours", "remark", text)
        if row.kind == IDLE and row.cause == "idle_gpus":
            text = f"Held and idle: {fmt.hours(row.lost)} GPU-hours in this time, of no fault."
            view.notice("idle_hours", "remark", text)
    if reply.untold:
        view.notice("untold", "remark", f"What {fmt.several(reply.untold, 'more incident')} cost is not known.")


def _value(row: pb.ServiceSpeed, name: str, unit: str, digits: int) -> Cell:
    if not row.HasField(name):  # type: ignore[arg-type]  # one of its fields
        return Cell("not reported", kind="absent")
    return Cell(f"{fmt.number(getattr(row, name), digits)} {unit}".strip())
