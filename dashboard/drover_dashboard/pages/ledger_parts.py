"""The ledger: what every GPU-hour that jobs held was used for, by team, pool and job. All but those that draw are pure.

What each share means: docs/explanation/ledger.md. `drover report` prints the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from drover_core.model.reports import job_label
from drover_dashboard import client
from drover_dashboard.widgets import csv_file, view
from drover_dashboard.widgets import format as fmt
from drover_dashboard.widgets.bars import Bar, Kind, bars
from drover_dashboard.widgets.table import Cell, Column, Row, table
from drover_proto import fleet_pb2 as pb
from drover_proto.fleet_methods import GET_LEDGER

HOUR_MS, STEP_MS, MJ_PER_KWH = 3_600_000, 300_000, 3_600_000_000
MOST_DAYS = 35.0  # of one answer
TEAMS = 12  # with lines of their own; the CSV has all
LISTED_PX = 560
SHARES = (
    Kind("busy", "useful", "telemetry shows work; of a job that reports steps, only while it reports them"),
    Kind("waited", "waiting", "for a GPU that a fault stopped or slowed"),
    Kind("lost", "lost", "to a fault of the GPU or its node, or because the whole job was slower than before"),
    Kind("restarting", "restarting", "idle after a fault, until the job works again"),
    Kind("repeated", "repeated", "work since the last checkpoint, done again; needs jobs that report checkpoints"),
    Kind("unused", "idle", "held and not used"),
    Kind("unknown", "unknown", "nothing says what it did"),
)
NO_OWNER = "unknown"
CSV_HEADERS = (
    "table", "name", "gpus", "held_h", "useful_h", "waiting_h", "lost_h", "restarting_h", "repeated_h", "idle_h",
    "unknown_h", "goodput", "ettr", "ended_by_faults", "cost", "cost_of_faults", "currency", "energy_kwh",
)  # fmt: skip


def shares_of(found: pb.LedgerShares) -> tuple[int, ...]:
    """Return the GPU-milliseconds of `SHARES`."""
    return (
        found.useful_ms, found.waiting_ms, found.lost_ms, found.restarting_ms, found.repeated_ms, found.idle_ms,
        found.unknown_ms,
    )  # fmt: skip


def taken_ms(found: pb.LedgerShares) -> int:
    """Return what faults took."""
    return found.waiting_ms + found.lost_ms + found.restarting_ms + found.repeated_ms


def bar(label: str, shares: pb.LedgerShares, held_ms: int, sub: str = "") -> Bar:
    hours = tuple(round(ms / HOUR_MS, 3) for ms in shares_of(shares))
    return Bar(label, hours, f"{fmt.hours(held_ms / HOUR_MS)} h", sub)


def percent(part: float | None) -> str:
    """`98.2 %`, `99.95 %`: up to two digits more near 100 %, where availability is."""
    if part is None:
        return "not known"
    text = f"{part * 100:.3f}" if 0.99 <= part < 1 else f"{part * 100:.1f}"
    return f"{text.rstrip('0')}0 %" if text.rstrip("0").endswith(".") else f"{text.rstrip('0')} %"


def goodput(row: pb.LedgerRow) -> str:
    """`57.3 %`; with what is unknown a range, as that may have been useful."""
    if not row.held_ms:
        return "not known"
    least, unknown = row.shares.useful_ms / row.held_ms, row.shares.unknown_ms / row.held_ms
    if unknown < 0.0005:
        return percent(least)
    return f"{least * 100:.1f} to {(least + unknown) * 100:.1f} %"


def money(ledger: pb.Ledger, row: pb.LedgerRow, field: str) -> str:
    """`1,234 EUR`, `0.35 EUR`; empty where a pool of it has no price."""
    amount = view.given(row, field)
    if amount is None or not ledger.currency:
        return ""
    return f"{fmt.number(amount, 0 if amount >= 100 else 2)} {ledger.currency}"


def csv_rows(ledger: pb.Ledger) -> str:
    """Return total, pools, teams, jobs and days, in GPU-hours. What is not known is empty."""
    tables: tuple[tuple[str, Sequence[pb.LedgerRow]], ...] = (
        ("total", [ledger.total]), ("team", ledger.teams), ("pool", ledger.pools), ("job", ledger.jobs),
        ("other jobs", [ledger.other_jobs] if ledger.HasField("other_jobs") else []), ("day", ledger.days),
    )  # fmt: skip
    return csv_file.csv_text(
        CSV_HEADERS,
        (
            (
                name, row.name, row.gpus, round(row.held_ms / HOUR_MS, 6), *_csv_shares(row.shares),
                view.given(row, "goodput"), view.given(row, "ettr"), row.interruptions, view.given(row, "cost"),
                view.given(row, "lost_cost"), ledger.currency,
                row.energy.mj / MJ_PER_KWH if row.energy.known_ms else None,
            )
            for name, rows in tables
            for row in rows
        ),
    )  # fmt: skip


def _csv_shares(found: pb.LedgerShares) -> list[float | None]:
    """Without checkpoints the repeated work is not known, which is not nothing."""
    named = zip(SHARES, shares_of(found), strict=True)
    return [None if kind.kind == "repeated" and not ms else round(ms / HOUR_MS, 6) for kind, ms in named]


def tiles(ledger: pb.Ledger) -> list[tuple[str, str, str]]:
    """(label, value, remark) of the whole time."""
    total = ledger.total
    cost, lost = money(ledger, total, "cost"), money(ledger, total, "lost_cost")
    fleet = ledger.availability[0] if ledger.availability else None
    served = None if fleet is None else view.given(fleet, "available")
    met = "" if served is None else "met" if served >= ledger.objective else "missed"
    energy, kwh = ledger.fleet_energy, ledger.fleet_energy.mj / MJ_PER_KWH
    known = energy.known_ms / max(1, energy.known_ms + energy.unknown_ms)
    return [
        ("Held by jobs", fmt.hours(total.held_ms / HOUR_MS), f"GPU-hours{f', {cost}' if cost else ''}"),
        ("Goodput", goodput(total), "useful of held"),
        ("Faults took", fmt.hours(taken_ms(total.shares) / HOUR_MS), f"GPU-hours{f', {lost}' if lost else ''}"),
        ("In service", percent(served), f"objective {percent(ledger.objective)} {met}".strip()),
        (
            "Energy", f"{fmt.number(kwh, 0 if kwh >= 10 else 1)} kWh" if energy.known_ms else "not known",
            f"known of {percent(known)} of the time" if energy.known_ms else "no GPU reports it",
        ),
    ]  # fmt: skip


def _columns(ledger: pb.Ledger, row: pb.LedgerRow) -> tuple[Cell, ...]:
    hours, taken = fmt.hours, taken_ms(row.shares)
    cost = money(ledger, row, "lost_cost") if taken else ""
    return (
        Cell(hours(row.held_ms / HOUR_MS)),
        Cell(goodput(row)),
        Cell(hours(taken / HOUR_MS), sub=cost),
        Cell(str(row.interruptions)),
        Cell(hours(row.shares.idle_ms / HOUR_MS)),
        Cell(hours(row.shares.unknown_ms / HOUR_MS)),
    )


COLUMNS = (
    Column("Held, h", "right", help="GPU-hours"),
    Column("Goodput", "right", help="useful of held; a range where it is not known of all of it"),
    Column("Faults took, h", "right", help="waiting, lost, restarting and repeated"),
    Column("Runs ended", "right", help="by a fault that Drover found"),
    Column("Idle, h", "right"),
    Column("Unknown, h", "right", help="nothing says what the GPUs did"),
)


def show(days: float) -> None:
    """Draw the ledger of the last days."""
    who = view.viewer()
    answer = _ask(min(days, MOST_DAYS), who.now_ms)
    view.trouble("ledger", answer.trouble, answer.as_of_ms, who)
    if answer.trouble is not None:  # the page does not ask again by itself
        st.button("Ask again", icon=":material/refresh:", key="ledger_again")
    if answer.value is None:
        return
    ledger = answer.value
    span = f"{who.clock(ledger.from_ms)} to {who.clock(ledger.to_ms)} {who.zone_name()}"
    if days > MOST_DAYS:
        view.notice("ledger_most", "remark", f"One ledger has at most {MOST_DAYS:g} days; these are the last.")
    if not ledger.total.held_ms:
        view.notice("ledger_none", "remark", f"No job is known to have held a GPU, {span}.")
        _doubts(ledger)
        return
    view.tiles("ledger", tiles(ledger))
    with st.container(horizontal=True, vertical_alignment="center"):
        st.caption(fmt.plain(f"GPU-hours that jobs held, {span}. Each is one of these; drover report prints the same."))
        csv_file.button("ledger_csv", "drover-ledger", lambda: csv_rows(ledger))
    _by_team(ledger)
    _by_job(ledger)
    _doubts(ledger)


def _ask(days: float, now_ms: int) -> client.Answer[pb.Ledger]:
    """The collector keeps a ledger for a minute: it begins at a whole step, so that all who look ask for the same.

    It ends with the next step, so that it is never longer than was asked for, whatever the collector's clock says.
    """
    step_ms = -(-now_ms // STEP_MS) * STEP_MS
    request = pb.LedgerRequest(from_ms=step_ms - round(days * 86_400_000), to_ms=step_ms)
    return client.fleet().ask(GET_LEDGER, request, days)


def _by_team(ledger: pb.Ledger) -> None:
    groups = [("All jobs", ledger.total), *((row.name or NO_OWNER, row) for row in ledger.teams[:TEAMS])]
    if others := ledger.teams[TEAMS:]:
        groups.append((fmt.several(len(others), "more team"), _sum(others)))
    pools = ledger.pools if len(ledger.pools) > 1 else []
    groups += [(f"pool {row.name}" if row.name else "no pool", row) for row in pools]
    view.heading("By team and pool" if ledger.teams else "By pool" if pools else "All jobs together")
    bars("ledger_bars", SHARES, [bar(label, row.shares, row.held_ms) for label, row in groups], "GPU-hours", "",
         shares=True)  # fmt: skip
    lines = [Row((Cell(label, kind="strong"), *_columns(ledger, row))) for label, row in groups]
    if len(lines) > 1:
        table("ledger_groups", (Column("Team or pool", wrap=True), *COLUMNS), lines, empty="", link_column=-1)


def _sum(rows: Sequence[pb.LedgerRow]) -> pb.LedgerRow:
    """Return teams as one: no job is of two. What faults cost is known where it is known of each."""
    found = pb.LedgerRow(held_ms=sum(row.held_ms for row in rows), interruptions=sum(row.interruptions for row in rows))
    for field in pb.LedgerShares.DESCRIPTOR.fields:
        setattr(found.shares, field.name, sum(getattr(row.shares, field.name) for row in rows))
    costs = [view.given(row, "lost_cost") for row in rows]
    if None not in costs:
        found.lost_cost = sum(cost for cost in costs if cost is not None)
    return found


def _by_job(ledger: pb.Ledger) -> None:
    view.heading("By job, those that lost most first")
    lines = [
        Row(
            (Cell(job_label(row.name), sub=f"{fmt.several(row.gpus, 'GPU')}", kind="strong"), *_columns(ledger, row)),
            id=row.name, href=view.href(view.JOB, job=row.name),
        )
        for row in ledger.jobs
    ]  # fmt: skip
    if ledger.HasField("other_jobs"):
        others = ledger.jobs_total - len(ledger.jobs)
        lines.append(Row((Cell(f"{fmt.number(others)} more jobs"), *_columns(ledger, ledger.other_jobs))))
    clicked = table(
        "ledger_jobs", (Column("Job", wrap=True), *COLUMNS), lines, empty="No job held a GPU.",
        height=LISTED_PX if len(lines) > 12 else None,
    )  # fmt: skip
    if clicked:
        st.switch_page(view.JOB, query_params={"job": clicked})


def _doubts(ledger: pb.Ledger) -> None:
    if ledger.doubts:
        view.heading("What is not known")
    with view.place():
        for number, text in enumerate(ledger.doubts):
            view.notice(f"ledger_doubt_{number}", "remark", text)


def of_job(detail: pb.JobDetail) -> None:
    """Draw what the GPU-hours of one job were used for, and what is not known of them."""
    loss = detail.loss
    if not loss.held_ms:
        return
    name = "Its GPU-hours"
    bars("job_ledger", SHARES, [bar(name, loss.shares, loss.held_ms, "held")], "GPU-hours", "", shares=True)
    with view.place():
        for number, text in enumerate(loss.doubts):
            view.notice(f"job_doubt_{number}", "remark", text)
