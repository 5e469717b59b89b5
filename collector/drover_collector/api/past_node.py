"""One node as of a moment of the past."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from drover_collector.api.moment import Moment
from drover_collector.api.nodes import EVENTS_LIMIT, GpuMedians
from drover_collector.api.snapshot import RECENT_MS
from drover_collector.store.samples.entities import Target
from drover_core.metrics.catalog import Scope, of_scope
from drover_core.model import gpu_processes
from drover_core.model.events import to_json
from drover_proto import fleet_pb2 as pb

VALUES_MS = 600_000  # a value this old is still shown, with its age
POINTS = 1000
SUMMED = "see the charts"
NOT_THEN = "no value then"
NOT_KEPT = (
    "Not known of then: the agent's version, maintenance, counted time. Ports: see Fabric. Values are the"
    " newest of the 10 minutes before."
)

Newest = Mapping[tuple[int | None, str], tuple[float, int]]  # slot, metric -> value, ms


def get_node(facts: Moment, request: pb.NodeRequest, names: bool) -> pb.NodeDetail:
    """
    Args:
        names: with users and processes, which a reader does not see.
    """
    n = facts.node_number(request.node)
    node, at_ms, store = facts.index.nodes[n], facts.at_ms, facts.store
    newest = _newest(facts, node.name, node.gpus)
    found = facts.open_by_node().get(node.name, [])
    codes, job_names = facts.jobs()
    first, end = int(facts.index.first_gpu[n]), int(facts.index.first_gpu[n + 1])
    health, reason = facts.health_of(node.name)
    row = pb.NodeRow(
        name=node.name, rack=node.rack, leaf=node.leaf, pool=node.pool, sku=node.sku, health=health, reason=reason,
        gpu_health=[facts.health_of(node.name, slot)[0] for slot in range(node.gpus)],
        last_seen_ms=max((ms for _, ms in newest.values()), default=0), incidents=[i.id for i in found],
        jobs=sorted({job_names[code] for code in codes[first:end] if code >= 0}),
    )  # fmt: skip
    inventory = store.inventories.at(node.name, at_ms)
    known = [i for i in facts.incidents(at_ms - RECENT_MS) if any(m[0] == node.name for m in i.members)]
    known.sort(key=lambda i: i.opened_ms, reverse=True)
    events = store.events.read(0, at_ms + 1, node.name, limit=EVENTS_LIMIT)
    return pb.NodeDetail(
        row=row, inventory=inventory if names else gpu_processes.without(inventory), gpus=_gpus(facts, n, newest),
        values=_values(newest, None), incident_ids=[i.id for i in known], events_json=[to_json(e) for e in events],
        absent=[NOT_KEPT],
    )  # fmt: skip


def _newest(facts: Moment, node: str, gpus: int) -> Newest:
    """Return the newest values of the 10 minutes before. The step follows from what is kept of that time."""
    span = facts.at_ms - VALUES_MS, facts.at_ms
    found: dict[tuple[int | None, str], tuple[float, int]] = {}
    slots: list[Target] = [(node, slot, None) for slot in range(gpus)]
    itself: list[Target] = [(node, None, None)]
    for scope, targets in ((Scope.GPU, slots), (Scope.NODE, itself)):
        if not targets:
            continue
        metrics = [metric.name for metric in of_scope(scope) if not metric.sums_time]
        step_ms, ts_ms, series = facts.store.series.read(scope, targets, metrics, *span, POINTS)
        for (_, slot, _, metric), values in series.items():
            there = np.flatnonzero(~np.isnan(values))
            if len(there):
                at = int(there[-1])
                found[slot, metric] = float(values[at]), min(int(ts_ms[at]) + step_ms, facts.at_ms)
    return found


def _gpus(facts: Moment, n: int, newest: Newest) -> list[pb.GpuDetail]:
    node, first = facts.index.nodes[n], int(facts.index.first_gpu[n])
    entities = {e.gpu: e for e in facts.store.entities.gpus_of(node.name)}  # where it stands now
    codes, job_names = facts.jobs()
    medians = GpuMedians(facts)
    found = []
    for slot in range(node.gpus):
        g = first + slot
        health, reason = facts.health_of(node.name, slot)
        gpu = pb.GpuDetail(gpu=slot, health=health, reason=reason, values=_values(newest, slot))
        gpu.job = job_names[codes[g]] if codes[g] >= 0 else ""
        if (entity := entities.get(slot)) and entity.first_ms <= facts.at_ms:
            gpu.serial, gpu.uuid, gpu.pci, gpu.model = entity.serial, entity.uuid, entity.pci, entity.model
        for value in gpu.values:
            value.peers_median, value.peers = medians.of(value.metric, g)
            if (own := medians.own(value.metric, g)) is not None:
                value.own = own
        found.append(gpu)
    return found


def _values(newest: Newest, slot: int | None) -> list[pb.Value]:
    values = []
    for metric in of_scope(Scope.NODE if slot is None else Scope.GPU):
        known = newest.get((slot, metric.name))
        if known is None:
            values.append(pb.Value(metric=metric.name, reason=SUMMED if metric.sums_time else NOT_THEN))
        else:
            values.append(pb.Value(metric=metric.name, present=True, value=known[0], ts_ms=known[1]))
    return values
