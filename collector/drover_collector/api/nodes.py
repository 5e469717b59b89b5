"""Nodes and GPUs: the list with the worst first, and one node in full."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from drover_collector.api.moment import Moment
from drover_collector.api.snapshot import (
    DAY_MS,
    HEALTH_ORDER,
    RECENT_MS,
    ApiSnapshot,
    bad_argument,
)
from drover_collector.detectors._lib.inventory import (
    GPU_KEYS,
    NODE_KEYS,
    UNKNOWN,
    Codes,
    Inventory,
)
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.incidents.health import HEALTHS
from drover_core.metrics.catalog import Kind, Scope, of_scope
from drover_core.model import gpu_processes
from drover_core.model.conditions import NodeCondition
from drover_core.model.events import (
    SEVERITY_ORDER,
    Absence,
    Health,
    Incident,
    to_json,
)
from drover_core.times import iso
from drover_proto import fleet_pb2 as pb

NODES_LIMIT = 1000
NODES_MAX = 10_000
EVENTS_LIMIT = 200
SILENT_MS = 60_000  # as old as a value may be to count as the newest
EXACT_PEERS = 256  # in larger groups a GPU's own value does not move the median, and leaving it out costs
NOT_REPORTED = "not reported"  # neither a value nor a reason came from the agent

Newest = Mapping[str, tuple[float, int]]
Reasons = Mapping[str, tuple[str, int]]
_STATES = {m.name for scope in (Scope.GPU, Scope.NODE) for m in of_scope(scope) if m.kind is Kind.STATE}


def list_nodes(facts: ApiSnapshot, request: pb.ListNodesRequest) -> pb.NodeList:
    if request.health and request.health not in list(Health):
        raise bad_argument(f"health {request.health!r}: give one of {', '.join(Health)}, or nothing for all")
    if request.order not in ("", "trouble", "name"):
        raise bad_argument(f"order {request.order!r}: give trouble or name")
    codes, troubled = facts.pipeline.engine.health_codes[0], facts.open_by_node()
    health = [HEALTHS[code] for code in codes]
    numbers = [
        n
        for n, node in enumerate(facts.index.nodes)
        if (not request.health or health[n] == request.health) and request.contains in node.name
    ]
    names = [node.name for node in facts.index.nodes]
    if request.order == "name":
        numbers.sort(key=lambda n: names[n])
    else:
        numbers.sort(key=lambda n: (_trouble(troubled.get(names[n], ()), health[n]), names[n]))
    limit = min(request.limit or NODES_LIMIT, NODES_MAX)
    versions = facts.stats.agent_versions
    rows = [node_row(facts, n, troubled.get(names[n], ()), versions.get(names[n], "")) for n in numbers[:limit]]
    return pb.NodeList(nodes=rows, total=len(numbers))


def _trouble(incidents: Iterable[Incident], health: Health) -> tuple[int, int]:
    worst = max((SEVERITY_ORDER.index(i.severity) for i in incidents), default=-1)
    return -worst, HEALTH_ORDER.index(health)


def node_row(facts: ApiSnapshot, n: int, incidents: Iterable[Incident], agent_version: str) -> pb.NodeRow:
    index, health_of = facts.index, facts.pipeline.engine.health_of
    first, end = int(index.first_gpu[n]), int(index.first_gpu[n + 1])
    codes, job_names = facts.jobs()
    node = index.nodes[n]
    health, reason = health_of(node.name)
    return pb.NodeRow(
        name=node.name,
        rack=node.rack,
        leaf=node.leaf,
        pool=node.pool,
        sku=node.sku,
        health=health,
        reason=reason,
        gpu_health=[health_of(node.name, slot)[0] for slot in range(node.gpus)],
        last_seen_ms=int(facts.last_seen()[n]),
        incidents=[i.id for i in incidents],
        jobs=sorted({job_names[code] for code in codes[first:end] if code >= 0}),
        agent_version=agent_version,
        maintenance=facts.pipeline.outbox.silences.held(facts.now_ms()).get(node.name, ""),
    )


def get_node(facts: ApiSnapshot, request: pb.NodeRequest, names: bool = True) -> pb.NodeDetail:
    """
    Args:
        names: with users and processes, which a reader does not see.
    """
    n = facts.node_number(request.node)
    index, store, now_ms = facts.index, facts.store, facts.now_ms()
    node = index.nodes[n]
    newest = store.samples.latest_values(node.name, now_ms)
    reasons = _reasons(store.absences.current(node.name))
    inventory = store.inventories.newest(node.name)
    seen_ms = int(facts.last_seen()[n])
    lacking = _absent_reason(seen_ms, now_ms)
    gpus = _gpu_details(facts, n, newest, reasons, lacking)
    own = _values(Scope.NODE, newest.get((Scope.NODE, None, None), {}), reasons.get((None, None), {}), lacking)
    for value in own:
        value.peers_median, value.peers = _node_median(facts, value.metric, n)
    ports = sorted({link for scope, _, link in newest if scope is Scope.LINK and link})
    links = [
        pb.LinkDetail(
            link=port,
            values=_values(Scope.LINK, newest[(Scope.LINK, None, port)], reasons.get((None, port), {}), lacking),
        )
        for port in ports
    ]
    incidents = [i for i in facts.incidents(now_ms - RECENT_MS) if any(m[0] == node.name for m in i.members)]
    incidents.sort(key=lambda i: i.opened_ms, reverse=True)
    version = facts.stats.agent_versions.get(node.name, "")
    reading = facts.parts.conditions()
    conditions, well = reading.nodes.get(node.name, ((), 0))
    return pb.NodeDetail(
        row=node_row(facts, n, facts.open_by_node().get(node.name, ()), version),
        inventory=inventory if names else gpu_processes.without(inventory),
        gpus=gpus,
        values=own,
        incident_ids=[i.id for i in incidents],
        events_json=[to_json(e) for e in store.events.read(0, now_ms + DAY_MS, node.name, limit=EVENTS_LIMIT)],
        links=links,
        inventory_peers=inventory_peers(facts.pipeline.engine.inventory, index, n, inventory),
        health=_health(facts, node.name, request),
        conditions=[_condition(each) for each in conditions],
        conditions_well=well,
        conditions_read_ms=reading.at_ms,
    )


def _condition(found: NodeCondition) -> pb.NodeCondition:
    return pb.NodeCondition(
        type=found.type, status=found.status, reason=found.reason, message=found.message, since_ms=found.since_ms,
        standing=found.standing,
    )  # fmt: skip


def _absent_reason(seen_ms: int, now_ms: int) -> str:
    """Return why a value without a reason of its own is absent."""
    if seen_ms > now_ms - SILENT_MS:
        return NOT_REPORTED
    return f"silent since {iso(seen_ms)}" if seen_ms else "never reported"


def _gpu_details(
    facts: ApiSnapshot,
    n: int,
    newest: Mapping[tuple[Scope, int | None, str | None], Newest],
    reasons: Mapping[tuple[int | None, str | None], Reasons],
    lacking: str,
) -> list[pb.GpuDetail]:
    node, first = facts.index.nodes[n], int(facts.index.first_gpu[n])
    entities = {e.gpu: e for e in facts.store.entities.gpus_of(node.name)}
    codes, job_names = facts.jobs()
    medians = GpuMedians(facts)
    gpus = []
    for slot in range(node.gpus):
        g = first + slot
        health, reason = facts.pipeline.engine.health_of(node.name, slot)
        detail = pb.GpuDetail(
            gpu=slot,
            health=health,
            reason=reason,
            job=job_names[codes[g]] if codes[g] >= 0 else "",
            values=_values(Scope.GPU, newest.get((Scope.GPU, slot, None), {}), reasons.get((slot, None), {}), lacking),
        )
        if entity := entities.get(slot):
            detail.serial, detail.uuid, detail.pci, detail.model = (
                entity.serial, entity.uuid, entity.pci, entity.model,
            )  # fmt: skip
        for value in detail.values:
            value.peers_median, value.peers = medians.of(value.metric, g)
            if (own_now := medians.own(value.metric, g)) is not None:
                value.own = own_now
        gpus.append(detail)
    return gpus


def _health(facts: ApiSnapshot, node: str, request: pb.NodeRequest) -> list[pb.HealthMoment]:
    if not request.health_from_ms:
        return []
    to_ms = request.health_to_ms or facts.now_ms() + 1
    return [
        pb.HealthMoment(
            ts_ms=c["ts_ms"], gpu=c["gpu"], health=c["health"], reason=c["reason"], incident_id=c["incident_id"] or ""
        )
        for c in facts.store.health.of_node(node, request.health_from_ms, to_ms)
    ]


def _reasons(absences: Iterable[Absence]) -> Mapping[tuple[int | None, str | None], Reasons]:
    """(slot, link) -> metric -> (why it is absent, since when)."""
    found: dict[tuple[int | None, str | None], dict[str, tuple[str, int]]] = {}
    for absence in sorted(absences, key=lambda a: a.from_ms):
        found.setdefault((absence.gpu, absence.link or None), {})[absence.metric] = absence.reason, absence.from_ms
    return found


def _values(scope: Scope, newest: Newest, reasons: Reasons, lacking: str) -> list[pb.Value]:
    """Every metric of a scope: its newest value, or why there is none.

    A reason outweighs a value that is older than it. A value that is newer shows that the reason has passed, though
    nobody said so: the agent may have lost its memory of it.
    """
    values = []
    for metric in of_scope(scope):
        value, ts_ms = newest.get(metric.name, (0.0, 0))
        reason, since_ms = reasons.get(metric.name, (lacking, -1))
        if metric.name in newest and ts_ms > since_ms:
            values.append(pb.Value(metric=metric.name, present=True, value=value, ts_ms=ts_ms))
        else:
            values.append(pb.Value(metric=metric.name, ts_ms=ts_ms, reason=reason))
    return values


def newest_bucket(facts: ApiSnapshot) -> Bucket | None:
    """What peers did lately; None when nothing was judged lately, for then it is no measure."""
    if isinstance(facts, Moment):
        return next(reversed(facts.buckets()), None)
    bucket = facts.pipeline.buckets.newest
    return bucket if bucket is not None and bucket.end_ms > facts.now_ms() - SILENT_MS else None


class GpuMedians:
    """Medians over a GPU's peers in the newest bucket: those of its job, else of its SKU."""

    def __init__(self, facts: ApiSnapshot) -> None:
        self._facts = facts
        self._groups: dict[tuple[str, int], npt.NDArray[np.intp]] = {}
        self._whole: dict[tuple[str, str, int], tuple[float, int]] = {}

    def group(self, gpu: int) -> tuple[tuple[str, int], npt.NDArray[np.intp]]:
        """The GPU's group: its name and its members, the GPU among them."""
        return gpu_group(self._facts, gpu, self._groups)

    def own(self, metric: str, gpu: int) -> float | None:
        """The GPU's own value in the same bucket; None: it has none there."""
        bucket = newest_bucket(self._facts)
        value = math.nan if bucket is None or metric not in bucket.gpu else float(bucket.gpu[metric][gpu])
        return None if math.isnan(value) else value

    def of(self, metric: str, gpu: int) -> tuple[float, int]:
        """(median, peers) without the GPU itself; (0, 0) when no peer has a value."""
        bucket = newest_bucket(self._facts)
        if bucket is None or metric not in bucket.gpu:
            return 0.0, 0
        key, members = self.group(gpu)
        if len(members) <= EXACT_PEERS:
            return _median(bucket.gpu[metric][members[members != gpu]], metric)
        whole = (metric, *key)
        if whole not in self._whole:
            self._whole[whole] = _median(bucket.gpu[metric][members], metric)
        return self._whole[whole]


def gpu_group(
    facts: ApiSnapshot, gpu: int, known: dict[tuple[str, int], npt.NDArray[np.intp]] | None = None
) -> tuple[tuple[str, int], npt.NDArray[np.intp]]:
    """("job" or "sku", its code) and the GPUs of it, `gpu` among them; `known` keeps them between calls."""
    index = facts.index
    codes, _ = facts.jobs()
    of_sku = index.sku[index.gpu_node]
    key, of_all = (("job", int(codes[gpu])), codes) if codes[gpu] >= 0 else (("sku", int(of_sku[gpu])), of_sku)
    known = {} if known is None else known
    if key not in known:
        known[key] = np.flatnonzero(of_all == key[1])
    return key, known[key]


def _node_median(facts: ApiSnapshot, metric: str, n: int) -> tuple[float, int]:
    """(median, peers) of a node metric over the other nodes of its SKU."""
    bucket = newest_bucket(facts)
    if bucket is None or metric not in bucket.node:
        return 0.0, 0
    peers = np.flatnonzero(facts.index.sku == facts.index.sku[n])
    return _median(bucket.node[metric][peers[peers != n]], metric)


def _median(values: npt.NDArray[np.float64], metric: str) -> tuple[float, int]:
    values = values[~np.isnan(values)]
    if not len(values):
        return 0.0, 0
    # Between two codes or flags lies nothing: take the lower of the middle two.
    middle = np.quantile(values, 0.5, method="lower") if metric in _STATES else np.median(values)
    return float(middle), len(values)


def inventory_peers(inventory: Inventory, index: FleetIndex, n: int, own: Mapping[str, str]) -> list[pb.InventoryPeers]:
    """For each key of `own` that is compared (docs/explanation/detectors.md, drift) what the peers of node `n` have;
    nothing for a key that no peer reported."""
    alike = (index.sku == index.sku[n]) & (index.pool == index.pool[n])
    alike[n] = False
    return list(_node_keys(inventory, np.flatnonzero(alike), own)) + list(_gpu_keys(inventory, index, n, alike, own))


def _node_keys(
    inventory: Inventory, peers: npt.NDArray[np.intp], own: Mapping[str, str]
) -> Iterator[pb.InventoryPeers]:
    keys = {**NODE_KEYS, **{f"{name}.firmware": name for name in inventory.nic_boards}}
    for key, name in keys.items():
        if own.get(key) and (found := _usual(inventory, inventory.node[name].codes[peers])):
            yield pb.InventoryPeers(key=key, usual=found[0], having=found[1], peers=found[2])


def _gpu_keys(
    inventory: Inventory, index: FleetIndex, n: int, alike: npt.NDArray[np.bool_], own: Mapping[str, str]
) -> Iterator[pb.InventoryPeers]:
    peers = np.flatnonzero(alike[index.gpu_node])
    for key, name in GPU_KEYS.items():
        slots = [slot for slot in range(index.nodes[n].gpus) if own.get(f"gpu{slot}.{key}")]
        if slots and (found := _usual(inventory, inventory.gpu[name].codes[peers])):
            for slot in slots:
                yield pb.InventoryPeers(key=f"gpu{slot}.{key}", usual=found[0], having=found[1], peers=found[2])


def _usual(inventory: Inventory, codes: Codes) -> tuple[str, int, int] | None:
    """Return (value that most have, how many have it, how many reported one)."""
    known = codes[codes != UNKNOWN]
    if not len(known):
        return None
    counts = np.bincount(known)
    most = int(counts.argmax())
    return inventory.values[most], int(counts[most]), len(known)
