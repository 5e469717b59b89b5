"""The account as a message of the Fleet API, which the console, the command line and the offline report share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from drover_collector.fleet.index import FleetIndex
from drover_collector.ledger.account import Account
from drover_collector.ledger.availability import SERVICES, Service
from drover_collector.ledger.facts import SHARES, Facts, LedgerIncident, Share
from drover_collector.ledger.partition import DAY_MS
from drover_collector.ledger.spans import GpuSpans, Ints
from drover_core.model.events import OUT_STAGES, Health, Severity
from drover_core.model.reports import job_label
from drover_proto import fleet_pb2 as pb

HOUR_MS = 3_600_000
MJ_PER_KWH = 3_600_000_000
LISTED = 10  # incidents
WORST = 20  # nodes
TAKEN = (Share.WAITING, Share.LOST, Share.RESTARTING, Share.REPEATED)


@dataclass(frozen=True, slots=True)
class Prices:
    """What GPU time and energy cost.

    Attributes:
        gpu_hour: of each node's GPUs; None: no price.
    """

    currency: str
    gpu_hour: Sequence[float | None]
    kwh: float | None
    objective: float


@dataclass(frozen=True, slots=True)
class Asked:
    """`job`: its number, to list its nodes; None: the whole fleet. `limit`: rows of jobs and of nodes."""

    job: int | None = None
    limit: int = 200


def make_message(
    index: FleetIndex, facts: Facts, account: Account, prices: Prices, asked: Asked, doubts: Iterable[str] = ()
) -> pb.Ledger:
    """Return the reply. `doubts`: what else is not known, a sentence each."""
    rows = _Rows(index, facts, account, prices, asked.job)
    reply = pb.Ledger(
        from_ms=account.from_ms, to_ms=account.to_ms, objective=prices.objective, currency=prices.currency,
        total=rows.total(""), kwh_price=prices.kwh,
    )  # fmt: skip
    reply.pools.extend(rows.pools())
    reply.teams.extend(rows.teams())
    reply.days.extend(rows.days())
    jobs = _worst_first(rows.jobs())
    reply.jobs.extend(jobs[: asked.limit])
    reply.jobs_total = len(jobs)
    if len(jobs) > asked.limit:
        reply.other_jobs.CopyFrom(rows.others(jobs[: asked.limit]))
    nodes = _worst_first(rows.nodes())
    reply.nodes.extend(nodes[: asked.limit])
    reply.nodes_total = len(nodes)
    incidents = _Incidents(index, facts, account, prices, asked.job)
    reply.causes.extend(incidents.causes())
    reply.incidents.extend(incidents.costliest())
    services = _Services(index, facts, account)
    reply.availability.extend(services.groups())
    reply.worst_nodes.extend(services.worst())
    reply.repair.extend(services.repair(incidents))
    mj, known = account.fleet_energy
    span_ms = (account.to_ms - account.from_ms) * index.gpu_count
    reply.fleet_energy.CopyFrom(_energy(mj, known, span_ms, prices))
    reply.doubts.extend([*_doubts(facts, account, reply), *doubts])
    return reply


def _taken(shares: pb.LedgerShares) -> int:
    return shares.waiting_ms + shares.lost_ms + shares.restarting_ms + shares.repeated_ms


def _worst_first(rows: list[pb.LedgerRow]) -> list[pb.LedgerRow]:
    return sorted(rows, key=lambda row: (-_taken(row.shares), -row.held_ms, row.name))


def _shares(ms: Ints) -> pb.LedgerShares:
    return pb.LedgerShares(**{f"{share.name.lower()}_ms": int(ms[share]) for share in Share})


def _energy(mj: int, known_ms: int, whole_ms: int, prices: Prices) -> pb.LedgerEnergy:
    found = pb.LedgerEnergy(mj=mj, known_ms=known_ms, unknown_ms=whole_ms - known_ms)
    if prices.currency and prices.kwh is not None and known_ms:
        found.cost = mj / MJ_PER_KWH * prices.kwh
    return found


class _Rows:
    """Rows of the ledger, grouped. `every`: which rows count."""

    def __init__(self, index: FleetIndex, facts: Facts, account: Account, prices: Prices, job: int | None) -> None:
        self._facts, self._account, self._prices = facts, account, prices
        ledger = account.ledger
        self.every = np.flatnonzero(ledger.job == job) if job is not None else np.arange(len(ledger.job))
        self.node = index.gpu_node[ledger.gpu].astype(np.int64)
        self.pool = index.pool[self.node].astype(np.int64)
        self._index = index
        hourly = np.array([np.nan if price is None else price for price in prices.gpu_hour], np.float64)
        self._price = hourly[self.node] if len(hourly) else np.zeros(0)
        jobs = set(np.unique(ledger.job[self.every]).tolist())
        self._ends = [each for each in account.interruptions if each.attempt.job in jobs]
        self._between = {number: gap for number, gap in account.between_ms.items() if job in (None, number)}

    def row(self, name: str, rows: Ints, between_ms: int = 0, interruptions: int = 0) -> pb.LedgerRow:
        """Return the sum of some rows."""
        account, prices = self._account, self._prices
        by_row = account.ledger.ms[rows]
        ms = by_row.sum(axis=0) if len(rows) else np.zeros(SHARES, np.int64)
        held = int(ms.sum())
        mj, known_ms = int(account.energy_mj[rows].sum()), int(account.energy_known_ms[rows].sum())
        found = pb.LedgerRow(
            name=name, shares=_shares(ms), held_ms=held, gpus=len(np.unique(account.ledger.gpu[rows])),
            between_ms=between_ms, interruptions=interruptions, energy=_energy(mj, known_ms, held, prices),
        )  # fmt: skip
        if held:
            found.goodput = int(ms[Share.USEFUL]) / held
            price = self._price[rows]
            if prices.currency and not np.isnan(price).any():
                found.cost = float(by_row.sum(axis=1) @ price) / HOUR_MS
                found.lost_cost = float(by_row[:, TAKEN].sum(axis=1) @ price) / HOUR_MS
        return found

    def total(self, name: str) -> pb.LedgerRow:
        """Return the sum of all rows that count."""
        return self._of_jobs(name, self.every, set(self._between), len(self._ends))

    def _of_jobs(self, name: str, rows: Ints, jobs: set[int], interruptions: int) -> pb.LedgerRow:
        between_ms = sum(gap for number, gap in self._between.items() if number in jobs)
        row = self.row(name, rows, between_ms, interruptions)
        if row.held_ms:
            row.ettr = row.shares.useful_ms / (row.held_ms + between_ms)
        return row

    def jobs(self) -> list[pb.LedgerRow]:
        """Return a row for each job."""
        ends = Counter(each.attempt.job for each in self._ends)
        names = self._facts.jobs
        return [self._of_jobs(names[number], rows, {number}, ends[number]) for number, rows in self._by(self._job)]

    def pools(self) -> list[pb.LedgerRow]:
        pool = self._index.pool
        ends = Counter(code for each in self._ends for code in np.unique(pool[list(each.nodes)]).tolist())
        names = self._index.pools
        return [self.row(names[code], rows, interruptions=ends[code]) for code, rows in self._by(self.pool)]

    def teams(self) -> list[pb.LedgerRow]:
        """Return a row for each team, and one without a name for jobs whose owner is not known."""
        names = sorted(set(self._facts.teams.values()))
        if not names:
            return []
        place = {name: at + 1 for at, name in enumerate(names)}
        team = np.array([place.get(self._facts.teams.get(job, ""), 0) for job in self._facts.jobs], np.int64)
        found = []
        for code, rows in self._by(team[self._job]):
            jobs = set(np.flatnonzero(team == code).tolist())
            ends = sum(each.attempt.job in jobs for each in self._ends)
            found.append(self._of_jobs(names[code - 1] if code else "", rows, jobs, ends))
        return _worst_first(found)

    def nodes(self) -> list[pb.LedgerRow]:
        ends = Counter(n for each in self._ends for n in each.nodes)
        found = []
        for n, rows in self._by(self.node):
            row = self.row(self._index.nodes[n].name, rows, interruptions=ends[n])
            row.pool = self._index.nodes[n].pool
            found.append(row)
        return found

    def days(self) -> list[pb.LedgerRow]:
        ends = Counter((each.attempt.to_ms - 1) // DAY_MS for each in self._ends)
        return [
            self.row(_date(day), rows, interruptions=ends[day]) for day, rows in self._by(self._account.ledger.day)
        ]  # fmt: skip

    def others(self, listed: Sequence[pb.LedgerRow]) -> pb.LedgerRow:
        """Return the row of the jobs that are not listed."""
        shown = {row.name for row in listed}
        rest = [number for number, name in enumerate(self._facts.jobs) if name not in shown]
        ends = sum(each.attempt.job in set(rest) for each in self._ends)
        return self._of_jobs("", np.flatnonzero(np.isin(self._job, rest)), set(rest), ends)

    @property
    def _job(self) -> Ints:
        return self._account.ledger.job

    def _by(self, key: Ints) -> Iterator[tuple[int, Ints]]:
        """Yield each value of a key, and its rows."""
        key = key[self.every]
        order = np.argsort(key, kind="stable")
        for part in np.split(order, np.flatnonzero(np.diff(key[order])) + 1) if len(order) else ():
            yield int(key[part[0]]), self.every[part]


def _date(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_MS / 1000, UTC).date().isoformat()


class _Incidents:
    """What incidents took from jobs."""

    def __init__(self, index: FleetIndex, facts: Facts, account: Account, prices: Prices, job: int | None) -> None:
        self._facts, self._prices = facts, prices
        ledger = account.ledger
        kept = np.ones(len(ledger.claim_incident), np.bool_)
        if job is not None:  # claims are of GPUs: those that it held
            kept = np.isin(ledger.claim_gpu, ledger.gpu[ledger.job == job])
            named = [i.job == facts.jobs[job] for i in facts.incidents]
            kept &= np.array(named, np.bool_)[ledger.claim_incident] if len(kept) else kept
        self._node = index.gpu_node[ledger.claim_gpu[kept]]
        self._incident, self._ms = ledger.claim_incident[kept], ledger.claim_ms[kept]
        self.ms = np.zeros((len(facts.incidents), SHARES), np.int64)
        np.add.at(self.ms, self._incident, self._ms)

    def _cost(self, incidents: Ints) -> float | None:
        rows = np.isin(self._incident, incidents)
        price = [self._prices.gpu_hour[n] for n in self._node[rows].tolist()]
        if not self._prices.currency or None in price:
            return None
        taken = self._ms[rows].sum(axis=1).tolist()
        return float(sum(ms * (each or 0.0) for ms, each in zip(taken, price, strict=True))) / HOUR_MS

    def causes(self) -> list[pb.LedgerCause]:
        by: dict[tuple[str, str], list[int]] = {}
        for number, incident in enumerate(self._facts.incidents):
            if self.ms[number].any():
                by.setdefault((incident.kind, incident.cause), []).append(number)
        found = [
            pb.LedgerCause(
                kind=kind, cause=cause, incidents=len(numbers), shares=_shares(self.ms[numbers].sum(axis=0)),
                cost=self._cost(np.array(numbers)),
            )
            for (kind, cause), numbers in by.items()
        ]  # fmt: skip
        return sorted(found, key=lambda row: (-_taken(row.shares), row.kind, row.cause))

    def costliest(self) -> list[pb.LedgerIncident]:
        took = self.ms.sum(axis=1)
        order = [number for number in np.argsort(-took, kind="stable").tolist() if took[number] > 0][:LISTED]
        return [
            pb.LedgerIncident(
                id=i.id, kind=i.kind, cause=i.cause, where=place_of(i), summary=i.summary, since_ms=i.since_ms,
                closed_ms=i.closed_ms, shares=_shares(self.ms[number]), cost=self._cost(np.array([number])),
            )
            for number in order
            for i in (self._facts.incidents[number],)
        ]  # fmt: skip


def place_of(incident: LedgerIncident) -> str:
    nodes = {node for node, _ in incident.members}
    slots = {slot for _, slot in incident.members}
    if len(nodes) == 1:
        (node,) = nodes
        gpus = sorted(slot for slot in slots if slot is not None)
        return f"{node} GPU {gpus[0]}" if len(gpus) == 1 and None not in slots else node
    return job_label(incident.job) if incident.job else f"{len(nodes)} nodes"


class _Services:
    """Availability by fleet, pool and node, and the nodes that need a repair."""

    def __init__(self, index: FleetIndex, facts: Facts, account: Account) -> None:
        self._index, self._facts, self._account = index, facts, account
        self._by_node = np.zeros((index.node_count, SERVICES), np.int64)
        np.add.at(self._by_node, index.gpu_node, account.service)

    def groups(self) -> list[pb.Availability]:
        index = self._index
        pools = [(name, index.pool == code) for code, name in enumerate(index.pools)]
        return [self._row(name, nodes) for name, nodes in [("", np.ones(index.node_count, np.bool_)), *pools]]

    def worst(self) -> list[pb.Availability]:
        away = self._by_node.sum(axis=1) - self._by_node[:, Service.IN] - self._by_node[:, Service.UNKNOWN]
        order = np.argsort(-away, kind="stable")[:WORST]
        found = []
        for n in order[away[order] > 0].tolist():
            row = self._row(self._index.nodes[n].name, np.arange(self._index.node_count) == n)
            row.pool = self._index.nodes[n].pool
            found.append(row)
        return found

    def _row(self, name: str, nodes: Ints) -> pb.Availability:
        index, account = self._index, self._account
        ms = self._by_node[nodes].sum(axis=0)
        numbers = set(np.flatnonzero(nodes).tolist())
        found = pb.Availability(
            name=name, gpus=sum(index.nodes[n].gpus for n in numbers), in_ms=int(ms[Service.IN]),
            out_ms=int(ms[Service.OUT]), lost_ms=int(ms[Service.LOST]), silent_ms=int(ms[Service.SILENT]),
            unknown_ms=int(ms[Service.UNKNOWN]),
        )  # fmt: skip
        if len(account.kept):
            found.kept_ms = int(account.kept[nodes[index.gpu_node]].sum())
        known = int(ms.sum() - ms[Service.UNKNOWN])
        if known:
            found.available = int(ms[Service.IN]) / known
        hits = [i for i in account.interruptions if numbers.intersection(i.nodes) or not name]
        found.interruptions = len(hits)
        if hits:
            holds = self._facts.holds.clipped(account.from_ms, account.to_ms)
            found.between_ms = _union_ms(holds.where(nodes[index.gpu_node[holds.gpu]])) // len(hits)
        times = [i.recovery_ms for i in hits if i.recovery_ms is not None]
        found.recovered = len(times)
        if times:
            found.recovery_ms = sum(times) // len(times)
        return found

    def repair(self, incidents: _Incidents) -> list[pb.NodeToRepair]:
        """Return nodes that wait for a repair, then those with an open critical fault, then those that interrupt."""
        index, facts = self._index, self._facts
        stages = {node: states[-1] for node, states in facts.outages.items() if states[-1].stage in OUT_STAGES}
        faults: dict[str, list[int]] = {}
        for number, incident in enumerate(facts.incidents):
            if len({node for node, _ in incident.members}) == 1:
                faults.setdefault(incident.members[0][0], []).append(number)
        found = []
        for n, node in enumerate(index.nodes):
            numbers, outage = faults.get(node.name, []), stages.get(node.name)
            grave = [
                facts.incidents[k]
                for k in numbers
                if facts.incidents[k].closed_ms is None and facts.incidents[k].severity == Severity.CRITICAL
            ]
            hits = sum(n in each.nodes for each in self._account.interruptions)
            if outage is None and not grave and hits < 2:
                continue
            reason = outage.reason if outage is not None else ""
            reason = reason or (grave[-1].summary if grave else f"it ended {hits} runs of jobs in this time")
            found.append(
                pb.NodeToRepair(
                    node=node.name, pool=node.pool, stage=outage.stage.value if outage else "", reason=reason,
                    interruptions=hits, lost_ms=int(incidents.ms[numbers].sum()) if numbers else 0,
                )
            )  # fmt: skip
        return sorted(found, key=lambda row: (row.stage != Health.REPAIR, not row.stage, -row.lost_ms, row.node))


def _union_ms(spans: GpuSpans) -> int:
    """Return how long at least one of the spans lasts."""
    if not len(spans):
        return 0
    order = np.argsort(spans.from_ms, kind="stable")
    low, high = spans.from_ms[order], np.maximum.accumulate(spans.to_ms[order])
    gaps = np.maximum(low[1:] - high[:-1], 0)
    return int(high[-1] - low[0] - gaps.sum())


def _doubts(facts: Facts, account: Account, reply: pb.Ledger) -> list[str]:
    found = []
    if reply.total.held_ms:
        stepping = {job for job, low, high in facts.steps if low < account.to_ms and high > account.from_ms}
        jobs = set(np.unique(account.ledger.job).tolist())
        found.append(
            f"{len(jobs & stepping)} of {len(jobs)} jobs report steps. Of the others a busy GPU counts as useful: a"
            " loop that spins without progress is useful here until a detector finds it."
        )
        if not facts.checkpoints:
            found.append(
                "Work repeated since the last checkpoint is not known, as no loop reports checkpoints"
                " (reporter.saved). It counts as useful."
            )
        elif account.unsaved:
            of = "1 restart" if account.unsaved == 1 else f"{account.unsaved} restarts"
            found.append(f"What {of} repeated is not known: no checkpoint before is. It counts as useful.")
        nobodys = jobs - {at for at, name in enumerate(facts.jobs) if name in facts.teams}
        if nobodys:
            held_ms = int(account.ledger.ms[np.isin(account.ledger.job, list(nobodys))].sum())
            found.append(
                f"Whose {len(nobodys)} of {len(jobs)} jobs are is not known: {held_ms / HOUR_MS:,.1f} GPU-hours"
                " (docs/how-to/owners.md)."
            )
    open_cost = [
        i for i in facts.incidents
        if i.lost_ms is None and i.waited_ms is None and i.severity != Severity.INFO
        and i.since_ms < account.to_ms and (i.closed_ms is None or i.closed_ms > account.from_ms)
    ]  # fmt: skip
    if open_cost:
        count = "1 incident" if len(open_cost) == 1 else f"{len(open_cost)} incidents"
        found.append(f"What {count} took is not known: there the telemetry of the GPUs counts.")
    dark_ms = int(account.service[:, Service.UNKNOWN].sum())
    if dark_ms:
        found.append(f"No GPU of the fleet reported for {dark_ms / HOUR_MS:,.1f} GPU-hours: unknown.")
    energy = reply.fleet_energy
    if energy.unknown_ms and energy.known_ms:
        share = energy.unknown_ms / (energy.unknown_ms + energy.known_ms)
        found.append(
            f"The energy of {share * 100:.1f} % of all GPU time is not known (gaps, or counters that began again)."
        )
    elif not energy.known_ms:
        found.append("Energy is not known: no GPU reported its counter twice.")
    return found
