"""What the fleet file says of each node, next to what its agent reports; with nodes that are not in the file."""

from __future__ import annotations

from collections import Counter

from drover_collector.api.snapshot import ApiSnapshot
from drover_core.model.fleet import NodeSpec
from drover_proto import fleet_pb2 as pb


def list_reporting(facts: ApiSnapshot) -> pb.ReportingList:
    known = facts.index.spec.by_name
    seen = dict(zip(known, facts.last_seen().tolist(), strict=True))
    names = sorted({*known, *facts.stats.unknown_nodes})
    return pb.ReportingList(nodes=[_node(facts, name, known.get(name), seen.get(name, 0)) for name in names])


def _node(facts: ApiSnapshot, name: str, spec: NodeSpec | None, seen_ms: int) -> pb.ReportingNode:
    last_ms = max(seen_ms, facts.stats.last_seen.get(name, 0))
    row = pb.ReportingNode(
        name=name,
        in_file=spec is not None,
        last_seen_ms=last_ms,
        agent_version=facts.stats.agent_versions.get(name, ""),
    )
    if spec is not None:
        row.rack, row.leaf, row.pool, row.sku, row.gpus = spec.rack, spec.leaf, spec.pool, spec.sku, spec.gpus
    gpus = facts.store.entities.gpus_of(name)
    if last_ms:
        row.gpus_reported = len(gpus)
    if named := Counter(gpu.model for gpu in gpus if gpu.model):
        row.model = named.most_common(1)[0][0]
    return row
