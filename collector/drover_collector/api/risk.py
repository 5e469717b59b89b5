"""Which nodes are likelier than others to fail within a week, and how good such rankings were where that is known."""

from __future__ import annotations

import functools
import importlib.resources
import json
from itertools import islice
from typing import Any

from drover_collector.api.snapshot import ApiSnapshot, worst_first
from drover_collector.detectors.risk.model import HORIZON_DAYS, counts
from drover_proto import fleet_pb2 as pb

LIMIT = 50
MOST = 20_000
MEASURED = "measured.json"  # what benchmarks/bench_risk.py prints; a test holds it to that


def list_risk(facts: ApiSnapshot, request: pb.RiskRequest) -> pb.RiskList:
    found, most = facts.pipeline.engine.risks, min(request.limit or LIMIT, MOST)
    troubled = _in_trouble(facts)
    ranked = (risk for risk in found if risk.node not in troubled)
    rows = [pb.RiskRow(node=risk.node, chance=risk.chance, reasons=risk.reasons) for risk in islice(ranked, most)]
    return pb.RiskList(
        nodes=rows, total=len(found), days=HORIZON_DAYS, measured=measured(),
        in_trouble=islice(troubled.values(), most), in_trouble_total=len(troubled),
    )  # fmt: skip


def _in_trouble(facts: ApiSnapshot) -> dict[str, pb.TroubledNode]:
    """Nodes with an open incident of their own hardware, the worst first: as of now, not of the last ranking."""
    found: dict[str, pb.TroubledNode] = {}
    for i in sorted(facts.open_incidents(), key=worst_first):
        for node in dict.fromkeys(node for node, _ in i.members) if counts(i) else ():
            if node in facts.index.node_number and node not in found:
                found[node] = pb.TroubledNode(
                    node=node, incident_id=i.id, kind=i.kind.value, cause=i.cause, severity=i.severity.value,
                    since_ms=i.since_ms, summary=i.summary,
                )  # fmt: skip
    return found


@functools.cache
def measured() -> pb.RiskMeasured:
    text = (importlib.resources.files("drover_collector.detectors.risk") / MEASURED).read_text("utf-8")
    line: dict[str, Any] = json.loads(text)
    first, last = line["days"]
    return pb.RiskMeasured(
        trace=line["trace"],
        servers=line["servers"],
        days=last - first + 1,
        faults=line["faults"],
        top_share=line["top_share"],
        captured=line["model"]["captured"],
        recency=line["recency"]["captured"],
        chance=line["random"]["captured"],
        auc=line["model"]["auc"],
        failed_before=line["on_nodes_that_had_failed_before"],
    )
