"""What GPUs are there for: held, idle, free in whole nodes or in pieces; and what faults cost, by pool and cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from drover_collector.actions.node_outage import gpu_hours_lost
from drover_collector.api.nodes import newest_bucket
from drover_collector.api.snapshot import (
    DAY_MS,
    LONG_S,
    ApiSnapshot,
    bad_argument,
)
from drover_collector.config import CostConfig
from drover_collector.detectors.idle import IDLE_MS
from drover_collector.store import StoreError, WorkloadRow
from drover_core.model.events import OUT_STAGES, Incident, IncidentKind, NodeOutage
from drover_proto import fleet_pb2 as pb

Bools = npt.NDArray[np.bool_]

DAYS = 7
MOST_DAYS = 366
READ_DAYS = (8, 32, 93, MOST_DAYS + 1)  # one of these is read and kept, whatever span is asked for
HOUR_MS = 3_600_000
SERVICES_MS = 60_000  # inference servers are read every 10 s, those that did not answer every 40 s
KEPT_S = 15.0
SHOWN = 200
SHOWN_NODES = 8
SERVED = ("ttft_p50_s", "ttft_p95_s", "tokens_per_s", "requests_running", "requests_waiting")
OUT = "out_of_service"  # cause of what nodes cost that are out; its kind is `service`


@dataclass(frozen=True, slots=True)
class Use:
    """Of each GPU, bool [G]: exactly one of held, unknown, out, free. `idle_ms`: int64 [G], None: not known.

    `judged_ms`: end of the bucket that says so; 0: none of the last minute, then what is not held is unknown.
    """

    held: Bools
    unknown: Bools
    out: Bools
    free: Bools
    jobs: npt.NDArray[np.int32]
    job_names: Sequence[str]
    idle_ms: npt.NDArray[np.int64] | None
    activity_known: Bools  # whether it is at work is known
    judged_ms: int

    @property
    def idle(self) -> Bools:
        """Held and idle for as long as the detector asks for."""
        if self.idle_ms is None:
            return np.zeros(len(self.held), np.bool_)
        return self.held & (self.idle_ms >= IDLE_MS)


def get_capacity(facts: ApiSnapshot, request: pb.CapacityRequest) -> pb.Capacity:
    to_ms = request.to_ms or facts.now_ms()
    from_ms = request.from_ms or to_ms - DAYS * DAY_MS
    if not 0 < to_ms - from_ms <= MOST_DAYS * DAY_MS or from_ms < 0:
        raise bad_argument(
            f"from_ms {from_ms} to to_ms {to_ms}: give a span of more than 0 and at most {MOST_DAYS} days"
        )
    if from_ms < facts.now_ms() - READ_DAYS[-1] * DAY_MS:
        raise bad_argument(f"from_ms {from_ms}: it is at most {MOST_DAYS} days ago")
    used = use(facts)
    losses = _losses(facts, from_ms, to_ms)
    reply = pb.Capacity(
        from_ms=from_ms,
        to_ms=to_ms,
        judged_ms=used.judged_ms,
        pools=_pools(facts, used, losses),
        leafs=_leafs(facts, used),
        idle=_idle(facts, used),
        lost=_lost(losses, facts.config.cost),
        currency=facts.config.cost.currency,
        idle_after_s=IDLE_MS / 1000,
        untold=losses.untold,
    )
    try:
        reply.services.extend(_services(workloads(facts)))
    except StoreError as error:
        reply.services_trouble = str(error)
    return reply


def workloads(facts: ApiSnapshot) -> list[WorkloadRow]:
    """Return what inference servers and training loops reported lately. Raises StoreError."""
    return facts.once("workloads", LONG_S, lambda: facts.store.samples.workloads(facts.now_ms(), SERVICES_MS))


def use(facts: ApiSnapshot) -> Use:
    """What each GPU is used for now."""
    index, pipeline = facts.index, facts.pipeline
    codes, names = facts.jobs()
    held = codes >= 0
    bucket = newest_bucket(facts)
    if bucket is None:
        nobody = np.zeros(index.gpu_count, np.bool_)
        return Use(held, ~held, nobody, nobody, codes, names, None, nobody, 0)
    unheard = (bucket.node_rows == 0)[index.gpu_node]
    away = set(pipeline.engine.decider.away or ()) | {
        duty.node for duty in dict(pipeline.engine.duties).values() if duty.stage in OUT_STAGES
    }
    gone = np.array([node.name in away for node in index.nodes], np.bool_)[index.gpu_node]
    unknown = ~held & unheard
    out = ~held & ~unheard & gone
    util = bucket.gpu.get("gpu_util_ratio")
    activity_known = np.isfinite(util) if util is not None else np.zeros(index.gpu_count, np.bool_)
    free = ~(held | unknown | out)
    return Use(held, unknown, out, free, codes, names, pipeline.engine.idle_ms, activity_known, bucket.end_ms)


# ---- what faults cost


@dataclass(slots=True)
class _Row:
    incidents: int = 0
    lost: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by pool
    waited: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    worst: tuple[float, str] = (-1.0, "")

    def add(self, pools: dict[str, float], lost: float, waited: float, incident: str) -> None:
        self.incidents += 1
        for pool, share in pools.items():
            self.lost[pool] += lost * share
            self.waited[pool] += waited * share
        self.worst = max(self.worst, (lost + waited, incident))


@dataclass(slots=True)
class Losses:
    rows: dict[tuple[str, str], _Row] = field(default_factory=dict)  # (kind, cause)
    untold: int = 0

    def row(self, kind: str, cause: str) -> _Row:
        return self.rows.setdefault((kind, cause), _Row())


def share_of(start_ms: int, end_ms: int, from_ms: int, to_ms: int) -> float:
    """How much of [start, end) lies in [from, to): hours of an incident are spread evenly over its time."""
    if end_ms <= start_ms:
        return 1.0 if from_ms <= start_ms < to_ms else 0.0
    return max(0, min(end_ms, to_ms) - max(start_ms, from_ms)) / (end_ms - start_ms)


def _losses(facts: ApiSnapshot, from_ms: int, to_ms: int) -> Losses:
    now_ms = facts.now_ms()
    days = next(days for days in READ_DAYS if from_ms >= now_ms - days * DAY_MS or days == READ_DAYS[-1])
    since_ms = now_ms - days * DAY_MS
    stored = facts.once(("costs", days), KEPT_S, lambda: facts.store.incidents.for_cost(since_ms))
    incidents = {i.id: i for i in stored} | dict(facts.pipeline.incidents)
    losses = Losses()
    for incident in incidents.values():
        end_ms = incident.closed_ms or now_ms
        share = share_of(incident.since_ms, end_ms, from_ms, to_ms)
        if not share:
            continue
        if incident.gpu_hours_lost is None and incident.gpu_hours_waited is None:
            losses.untold += 1
            continue
        lost, waited = (share * (hours or 0.0) for hours in (incident.gpu_hours_lost, incident.gpu_hours_waited))
        losses.row(incident.kind, incident.cause).add(_pools_of(facts, incident), lost, waited, incident.id)
    histories = facts.once(("duties", days), KEPT_S, lambda: facts.store.outages.histories(since_ms))
    for node, duties in histories.items():
        n = facts.index.node_number.get(node)
        if n is None:
            continue
        lost = gpu_hours_lost(_within(duties, from_ms, to_ms), facts.index.nodes[n].gpus, min(to_ms, now_ms))
        if lost:
            losses.row("service", OUT).add({facts.index.nodes[n].pool: 1.0}, lost, 0.0, duties[-1].incident_id)
    return losses


def _within(duties: Sequence[NodeOutage], from_ms: int, to_ms: int) -> list[NodeOutage]:
    """As they stood in [from, to)."""
    return [replace(duty, ts_ms=max(duty.ts_ms, from_ms)) for duty in duties if duty.ts_ms < to_ms]


def _pools_of(facts: ApiSnapshot, incident: Incident) -> dict[str, float]:
    """Pool -> share of the incident's GPUs; "" where the fleet file has none of its nodes."""
    counts: dict[str, int] = defaultdict(int)
    for node, gpu in incident.members:
        n = facts.index.node_number.get(node)
        if n is not None:
            counts[facts.index.nodes[n].pool] += 1 if gpu is not None else max(1, facts.index.nodes[n].gpus)
    total = sum(counts.values())
    return {pool: count / total for pool, count in counts.items()} if total else {"": 1.0}


def _lost(losses: Losses, cost: CostConfig) -> list[pb.LostHours]:
    found = []
    for (kind, cause), row in losses.rows.items():
        hours = {pool: row.lost[pool] + row.waited[pool] for pool in row.lost}
        prices = {pool: cost.price(pool) for pool in hours}
        line = pb.LostHours(
            kind=kind, cause=cause, incidents=row.incidents, lost=sum(row.lost.values()),
            waited=sum(row.waited.values()), worst=row.worst[1],
        )  # fmt: skip
        if cost.currency and all(price is not None for price in prices.values()):
            line.cost = sum((prices[pool] or 0.0) * hours[pool] for pool in hours)
        found.append(line)
    return sorted(found, key=lambda line: (-(line.lost + line.waited), line.kind, line.cause))


# ---- pools, leafs, jobs, services


def _pools(facts: ApiSnapshot, used: Use, losses: Losses) -> list[pb.PoolCapacity]:
    index = facts.index
    pool_of = index.pool[index.gpu_node]
    faults = [row for (kind, _), row in losses.rows.items() if kind not in ("service", IncidentKind.IDLE)]
    out_row = losses.rows.get(("service", OUT), _Row())
    whole = _whole(facts, used)
    found = []
    for number, name in enumerate(index.pools):
        here = pool_of == number
        held = here & used.held
        row = pb.PoolCapacity(
            pool=name,
            nodes=int((index.pool == number).sum()),
            gpus=int(here.sum()),
            held=int(held.sum()),
            unknown=int((here & used.unknown).sum()),
            out=int((here & used.out).sum()),
            free=int((here & used.free).sum()),
            free_nodes=int((whole & (index.pool == number)).sum()),
            gpu_hours_lost=sum(row.lost.get(name, 0.0) for row in faults),
            gpu_hours_waited=sum(row.waited.get(name, 0.0) for row in faults),
            gpu_hours_out=out_row.lost.get(name, 0.0),
        )
        if used.idle_ms is not None and ((used.activity_known & held).any() or not held.any()):
            row.idle = int((here & used.idle).sum())
        price = facts.config.cost.price(name)
        if price is not None and facts.config.cost.currency:
            row.price = price
        found.append(row)
    return found


def _whole(facts: ApiSnapshot, used: Use) -> Bools:
    """bool [N]: all GPUs are free."""
    index = facts.index
    sizes = np.diff(index.first_gpu)
    free = np.bincount(index.gpu_node[used.free], minlength=index.node_count)
    return np.asarray((sizes > 0) & (free == sizes), np.bool_)


def _leafs(facts: ApiSnapshot, used: Use) -> list[pb.LeafCapacity]:
    index, whole = facts.index, _whole(facts, used)
    leaf_of = index.leaf[index.gpu_node]
    gone = np.bincount(index.gpu_node[used.out], minlength=index.node_count) > 0
    pieces = used.free & ~whole[index.gpu_node]
    found = [
        pb.LeafCapacity(
            leaf=name,
            nodes=int((index.leaf == number).sum()),
            gpus=int((leaf_of == number).sum()),
            free=int((used.free & (leaf_of == number)).sum()),
            free_nodes=int((whole & (index.leaf == number)).sum()),
            scattered=int((pieces & (leaf_of == number)).sum()),
            out_nodes=int((gone & (index.leaf == number)).sum()),
        )
        for number, name in enumerate(index.leafs)
    ]
    return sorted(found, key=lambda row: (-row.free_nodes, -row.free, row.leaf))


def _idle(facts: ApiSnapshot, used: Use) -> list[pb.IdleHolder]:
    if used.idle_ms is None:
        return []
    index, idle = facts.index, used.idle
    now_ms, found = facts.now_ms(), []
    lain_ms = np.bincount(used.jobs[idle], used.idle_ms[idle], len(used.job_names))
    worst = np.argsort(-lain_ms, kind="stable")[:SHOWN]  # there may be as many jobs as GPUs
    for code in worst[lain_ms[worst] > 0].tolist():
        of_job = used.jobs == code
        gpus = np.flatnonzero(idle & of_job)
        nodes = sorted({index.nodes[n].name for n in index.gpu_node[gpus].tolist()})
        longest_ms = int(used.idle_ms[gpus].max())
        found.append(
            pb.IdleHolder(
                job=used.job_names[code],
                gpus=int(of_job.sum()),
                idle=len(gpus),
                since_ms=(used.judged_ms or now_ms) - longest_ms,
                gpu_hours=float(used.idle_ms[gpus].sum()) / HOUR_MS,
                nodes=nodes[:SHOWN_NODES],
                pool=index.nodes[int(index.gpu_node[gpus[0]])].pool,
            )
        )
    return sorted(found, key=lambda row: (-row.gpu_hours, row.job))


def _services(rows: Iterable[WorkloadRow]) -> list[pb.ServiceSpeed]:
    """By the name that nodes give their servers; training loops are no services."""
    of: dict[str, list[WorkloadRow]] = defaultdict(list)
    for row in rows:
        if any(name in row.values for name in SERVED):
            of[row.name].append(row)
    found = []
    for service, servers in sorted(of.items()):
        values = {name: np.array([row.values[name] for row in servers if name in row.values], float) for name in SERVED}
        line = pb.ServiceSpeed(
            service=service, servers=len(servers), nodes=sorted({row.node for row in servers})[:SHOWN_NODES],
            ts_ms=max(row.ts_ms for row in servers),
        )  # fmt: skip
        if len(values["ttft_p50_s"]):
            line.ttft_p50_s = float(np.median(values["ttft_p50_s"]))
        if len(values["ttft_p95_s"]):
            line.ttft_p95_s = float(values["ttft_p95_s"].max())
        if len(values["tokens_per_s"]):
            line.tokens_per_s = float(values["tokens_per_s"].sum())
        if len(values["requests_running"]):
            line.running = float(values["requests_running"].sum())
        if len(values["requests_waiting"]):
            line.waiting = float(values["requests_waiting"].sum())
        found.append(line)
    return found[:SHOWN]
