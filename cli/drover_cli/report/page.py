"""What a report says, in plain words: a title, facts, and tables. Markdown and HTML are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drover_cli.output import duration, plain, when
from drover_cli.report.span import title
from drover_core.model.reports import job_label
from drover_proto import fleet_pb2 as pb

HOUR_MS, MJ_PER_KWH = 3_600_000, 3_600_000_000
ROWS = 10  # of a table: the report is one page
NONE = "-"
SHARES = (
    ("useful", "useful work"),
    ("waiting", "waiting for a GPU that a fault stopped or slowed"),
    ("lost", "lost to a fault of the GPU or its node, or as the whole job was slower than before"),
    ("restarting", "restarting after a fault"),
    ("repeated", "repeating work since the last checkpoint"),
    ("idle", "held without being used"),
    ("unknown", "unknown"),
)
KINDS = {
    "straggler": "slow GPU", "hang": "job that stood still", "thermal": "heat", "memory": "memory errors",
    "link": "links and network", "xid": "GPU error", "liveness": "GPU or node that did not answer",
    "sdc": "wrong results", "slowdown": "job slower than before", "drift": "different setup", "risk": "risk",
    "idle": "idle GPUs",
}  # fmt: skip
LEGEND = (
    "GPU-hours are hours of one GPU. Goodput is useful time over held time. ETTR is useful time over the whole time of"
    " a job's runs, the pauses between a fault and the next run included."
)


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1  # so many columns at the beginning are words, the rest are numbers
    note: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    facts: Sequence[str]
    tables: Sequence[Table]
    doubts: Sequence[str]


def make_page(ledger: pb.Ledger) -> Page:
    tables = [
        _shares(ledger), _days(ledger), _rows("Pools", "pool", ledger.pools, ledger), _teams(ledger),
        _causes(ledger),
        _incidents(ledger), _repair(ledger), _availability(ledger), _jobs(ledger), _moves(ledger),
    ]  # fmt: skip
    return Page(
        f"GPU report, {title(ledger.from_ms, ledger.to_ms)}", _facts(ledger), [t for t in tables if t.rows],
        ledger.doubts,
    )  # fmt: skip


def hours(ms: int) -> str:
    return f"{ms / HOUR_MS:,.1f}"


def percent(part: float | None) -> str:
    """Return a share; two digits more near 100 %, where availability is."""
    if part is None:
        return NONE
    return f"{part * 100:.3f} %" if 0.99 <= part < 1 else f"{part * 100:.1f} %"


def money(amount: float | None, currency: str) -> str:
    return NONE if amount is None or not currency else f"{amount:,.0f} {currency}"


def taken_ms(shares: pb.LedgerShares) -> int:
    return shares.waiting_ms + shares.lost_ms + shares.restarting_ms + shares.repeated_ms


def known(message: pb.LedgerRow | pb.LedgerEnergy | pb.Availability, name: str) -> float | None:
    return getattr(message, name) if message.HasField(name) else None  # type: ignore[arg-type]  # the stub lists the names; ours come from a table


def _facts(ledger: pb.Ledger) -> list[str]:
    total, currency = ledger.total, ledger.currency
    shares = total.shares
    if not total.held_ms:
        found = ["No job held a GPU in this time."]
    else:
        unknown = shares.unknown_ms / total.held_ms
        upto = (shares.useful_ms + shares.unknown_ms) / total.held_ms
        doubt = f" {percent(unknown)} is unknown: goodput is at most {percent(upto)}." if shares.unknown_ms else ""
        cost = "" if not total.HasField("cost") else f" ({money(total.cost, currency)})"
        found = [
            f"Jobs held {hours(total.held_ms)} GPU-hours{cost}. {percent(total.goodput)} of that was useful work"
            f" (goodput).{doubt}"
        ]
        lost = "" if not total.HasField("lost_cost") else f" ({money(total.lost_cost, currency)})"
        found.append(
            f"Faults took {hours(taken_ms(shares))} GPU-hours{lost}: {hours(shares.lost_ms)} lost,"
            f" {hours(shares.waiting_ms)} waiting, {hours(shares.restarting_ms)} restarting."
        )
    if ledger.availability:
        found += _service_facts(ledger, ledger.availability[0])
    found.append(_energy_fact(ledger))
    return found


def _service_facts(ledger: pb.Ledger, fleet: pb.Availability) -> list[str]:
    found = []
    if fleet.HasField("available"):
        met = "which meets" if fleet.available >= ledger.objective else "which misses"
        found.append(
            f"GPUs were in service for {percent(fleet.available)} of the time, {met} the objective of"
            f" {percent(ledger.objective)}."
        )
    else:
        found.append("Availability is not known: no GPU reported.")
    if fleet.kept_ms:
        found.append(f"Isolating single GPUs instead of their nodes kept {hours(fleet.kept_ms)} GPU-hours in service.")
    if fleet.interruptions:
        runs = "run" if fleet.interruptions == 1 else "runs"
        text = f"Faults ended {fleet.interruptions} {runs} of jobs"
        text += f", one each {duration(fleet.between_ms / 1000)}" if fleet.HasField("between_ms") else ""
        if fleet.recovered:
            text += f". {fleet.recovered} worked again, on average {duration(fleet.recovery_ms / 1000)} after the fault"
        found.append(text + ".")
    else:
        found.append("No fault that Drover found ended a run of a job.")
    return found


def _energy_fact(ledger: pb.Ledger) -> str:
    energy = ledger.fleet_energy
    if not energy.known_ms:
        return "Energy is not known."
    cost = "" if not energy.HasField("cost") else f" ({money(energy.cost, ledger.currency)})"
    share = energy.unknown_ms / (energy.known_ms + energy.unknown_ms)
    rest = f" For {percent(share)} of the time it is not known." if energy.unknown_ms else ""
    return f"GPUs took {energy.mj / MJ_PER_KWH:,.1f} kWh{cost}.{rest}"


def _shares(ledger: pb.Ledger) -> Table:
    total = ledger.total
    rows = []
    for name, words in SHARES:
        ms = getattr(total.shares, f"{name}_ms")
        if name == "repeated" and not ms:
            rows.append([words, "not known", NONE])
        elif total.held_ms:
            rows.append([words, hours(ms), percent(ms / total.held_ms)])
    rows.append(["held by jobs", hours(total.held_ms), percent(1.0)])
    return Table("Where GPU time went", ["", "GPU-hours", "share"], rows if total.held_ms else [])


def _columns(row: pb.LedgerRow, ledger: pb.Ledger) -> list[str]:
    energy = row.energy
    return [
        hours(row.held_ms), percent(known(row, "goodput")), hours(taken_ms(row.shares)),
        money(known(row, "lost_cost"), ledger.currency), hours(row.shares.idle_ms), hours(row.shares.unknown_ms),
        f"{energy.mj / MJ_PER_KWH:,.1f}" if energy.known_ms else NONE,
    ]  # fmt: skip


HEADERS = ("held", "goodput", "faults took", "cost of that", "idle", "unknown", "kWh")


def _rows(name: str, kind: str, found: Sequence[pb.LedgerRow], ledger: pb.Ledger) -> Table:
    return Table(name, [kind, *HEADERS], [[plain(row.name) or "(none)", *_columns(row, ledger)] for row in found])


def _teams(ledger: pb.Ledger) -> Table:
    rows = [
        [plain(row.name) or "unknown", percent(known(row, "ettr")), str(row.interruptions), *_columns(row, ledger)]
        for row in ledger.teams[:ROWS]
    ]
    more = len(ledger.teams) - len(rows)
    note = f"{more} more teams are in the CSV and JSON forms." if more > 0 else ""
    return Table("Teams", ["team", "ETTR", "ended by faults", *HEADERS], rows, note=note)


def _days(ledger: pb.Ledger) -> Table:
    return _rows("Days", "day", ledger.days if len(ledger.days) > 1 else [], ledger)


def _jobs(ledger: pb.Ledger) -> Table:
    rows = [
        [plain(job_label(row.name)), str(row.gpus), percent(known(row, "ettr")), str(row.interruptions),
         *_columns(row, ledger)]
        for row in ledger.jobs[:ROWS]
    ]  # fmt: skip
    more = ledger.jobs_total - len(rows)
    note = f"{more} more jobs are in the CSV and JSON forms, as far as --limit goes." if more > 0 else ""
    return Table("Jobs that lost most", ["job", "GPUs", "ETTR", "ended by faults", *HEADERS], rows, note=note)


def _moves(ledger: pb.Ledger) -> Table:
    rows = [
        [plain(job_label(row.job)), plain(row.node), when(row.asked_ms), row.answer,
         str(row.steps_kept) if row.HasField("steps_kept") else NONE,
         f"{row.kept_ms / HOUR_MS:,.2f}" if row.HasField("kept_ms") else NONE]
        for row in ledger.moves[:ROWS]
    ]  # fmt: skip
    kept = [row.kept_ms for row in ledger.moves if row.HasField("kept_ms")]
    note = f"Together {sum(kept) / HOUR_MS:,.2f} GPU-hours need not be repeated." if kept else ""
    unknown = sum(not row.HasField("kept_ms") for row in ledger.moves)
    note += f" Of {unknown} it is not known." if unknown and rows else ""
    headers = ["job", "node", "asked", "answer", "steps not repeated", "GPU-hours not repeated"]
    return Table("Jobs that could save themselves before their node went", headers, rows, words=4, note=note.strip())


def what(kind: str, cause: str) -> str:
    words, cause = KINDS.get(kind, kind), cause.replace("_", " ").replace("xid ", "XID ")
    return f"{words} ({cause})" if cause else words


def _causes(ledger: pb.Ledger) -> Table:
    rows = [
        [what(row.kind, row.cause), str(row.incidents), hours(row.shares.lost_ms), hours(row.shares.waiting_ms),
         hours(row.shares.restarting_ms), money(row.cost if row.HasField("cost") else None, ledger.currency)]
        for row in ledger.causes[:ROWS]
    ]  # fmt: skip
    return Table(
        "What faults took, by cause", ["cause", "incidents", "lost", "waiting", "restarting", "cost"], rows
    )  # fmt: skip


def _incidents(ledger: pb.Ledger) -> Table:
    rows = [
        [plain(row.where), what(row.kind, row.cause), when(row.since_ms), hours(taken_ms(row.shares)),
         money(row.cost if row.HasField("cost") else None, ledger.currency)]
        for row in ledger.incidents
    ]  # fmt: skip
    return Table("The costliest incidents", ["where", "what", "since", "GPU-hours", "cost"], rows, words=3)


def _repair(ledger: pb.Ledger) -> Table:
    rows = [
        [plain(row.node), plain(row.pool) or NONE, row.stage or "in service", plain(row.reason),
         str(row.interruptions), hours(row.lost_ms)]
        for row in ledger.repair[:ROWS]
    ]  # fmt: skip
    more = len(ledger.repair) - len(rows)
    return Table(
        "Nodes to repair", ["node", "pool", "state", "why", "runs ended", "GPU-hours taken"], rows, words=4,
        note=f"{more} more nodes are in the JSON form." if more > 0 else "",
    )  # fmt: skip


def _availability(ledger: pb.Ledger) -> Table:
    rows = []
    fleet, pools = ledger.availability[:1], ledger.availability[1:]
    groups = [("all GPUs", row) for row in fleet]
    if len(pools) > 1 or any(row.name for row in pools):
        groups += [(f"pool {row.name}" if row.name else "GPUs of no pool", row) for row in pools]
    worst = [(f"node {row.name}", row) for row in ledger.worst_nodes[:5]]
    for name, row in [*groups, *worst]:
        available = known(row, "available")
        met = NONE if available is None else "yes" if available >= ledger.objective else "no"
        rows.append(
            [
                plain(name), percent(available), met, hours(row.out_ms), hours(row.lost_ms), hours(row.silent_ms),
                hours(row.unknown_ms), str(row.interruptions),
                duration(row.between_ms / 1000) if row.HasField("between_ms") else NONE,
                duration(row.recovery_ms / 1000) if row.HasField("recovery_ms") else NONE,
            ]
        )  # fmt: skip
    headers = ["", "in service", f"{percent(ledger.objective)} met", "drained", "stopped by a fault", "silent",
               "unknown", "runs ended", "time between", "time to recover"]  # fmt: skip
    return Table("Availability, in GPU-hours", headers, rows)
