"""What the fleet file says of each node, next to what its agent reports; with nodes that are not in the file."""

from __future__ import annotations

from collections import Counter

import grpc

from drover_collector.api.snapshot import ApiSnapshot, RefusalError, bad_argument, not_found
from drover_collector.pipeline.adopted_nodes import adopted, line, next_ms
from drover_core.model.fleet import MOST_GPUS, NodeSpec, is_node_name
from drover_proto import fleet_pb2 as pb

WHY_CHARS = 500
CHARS = 100  # of a place or model
SOON = "the collector starts again for it within half a minute"


def list_reporting(facts: ApiSnapshot) -> pb.ReportingList:
    known = facts.index.spec.by_name
    seen = dict(zip(known, facts.last_seen().tolist(), strict=True))
    by_person = adopted(facts.store)
    names = sorted({*known, *facts.stats.unknown_nodes})
    return pb.ReportingList(
        nodes=[_node(facts, name, known.get(name), seen.get(name, 0), name in by_person) for name in names]
    )


def _node(facts: ApiSnapshot, name: str, spec: NodeSpec | None, seen_ms: int, by_person: bool) -> pb.ReportingNode:
    last_ms = max(seen_ms, facts.stats.last_seen.get(name, 0))
    row = pb.ReportingNode(
        name=name,
        in_file=spec is not None,
        last_seen_ms=last_ms,
        agent_version=facts.stats.agent_versions.get(name, ""),
        adopted=by_person and spec is not None,
    )
    if spec is not None:
        row.rack, row.leaf, row.pool, row.sku, row.gpus = spec.rack, spec.leaf, spec.pool, spec.sku, spec.gpus
    gpus = facts.store.entities.gpus_of(name)
    if last_ms:
        row.gpus_reported = len(gpus)
    if named := Counter(gpu.model for gpu in gpus if gpu.model):
        row.model = named.most_common(1)[0][0]
    return row


def adopt_node(facts: ApiSnapshot, request: pb.AdoptRequest, by: str) -> pb.AdoptReply:
    """Take a node that reports into the fleet, or end that. The collectors start again for it, within seconds.

    Raises:
        RefusalError: it does not report, is in the fleet already, or its GPUs are not known.
    """
    name, why = request.node, " ".join(request.why.split())
    if not facts.pipeline.leading:
        raise RefusalError(grpc.StatusCode.FAILED_PRECONDITION, "this collector stands by; ask the active one")
    if not why or len(why) > WHY_CHARS:
        raise bad_argument(f"say why, in 1 to {WHY_CHARS} characters")
    if not is_node_name(name):
        raise bad_argument(f"{name[:80]!r} is no name that a node can have")
    known, now_ms = adopted(facts.store), next_ms(facts.store, name, facts.now_ms())
    if request.forget:
        if name not in known:
            raise not_found(f"{name} is not adopted; what stands in the fleet file is removed there")
        facts.store.audit.write([line(known[name], by, why, now_ms, forget=True)])
        return pb.AdoptReply(detail=f"{name} leaves the fleet, unless the fleet file has it; {SOON}")
    if "fleet" in facts.pipeline.ticks.troubles:
        raise bad_argument("there is no fleet file: each node that reports is in the fleet already")
    if name in facts.index.spec.by_name:
        raise bad_argument(f"{name} is in the fleet already")
    if name not in facts.stats.unknown_nodes:
        raise not_found(f"no node {name[:80]!r} reports; `drover fleet diff` lists those that do")
    count = request.gpus if request.HasField("gpus") else len(facts.store.entities.gpus_of(name))
    if not request.HasField("gpus") and not count:
        raise bad_argument(f"no GPU of {name} reports; say how many it has, 0 for none")
    if count > MOST_GPUS:
        raise bad_argument(f"{count} GPUs; at most {MOST_GPUS}")
    models = Counter(gpu.model.removeprefix("NVIDIA ") for gpu in facts.store.entities.gpus_of(name) if gpu.model)
    sku = request.sku or (models.most_common(1)[0][0] if models else "")
    if wrong := [value for value in (request.rack, request.leaf, request.pool, sku) if not value.isprintable()]:
        raise bad_argument(f"{wrong[0][:80]!r} has characters that cannot be printed")
    node = NodeSpec(name, request.rack[:CHARS], request.leaf[:CHARS], request.pool[:CHARS], sku[:CHARS], count)
    facts.store.audit.write([line(node, by, why, now_ms)])
    return pb.AdoptReply(detail=f"{name} is adopted with {count} GPUs; {SOON}")
