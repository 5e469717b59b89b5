"""Which nodes are likelier than others to fail within a week, and how good such rankings were where that is known."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

from drover_collector.api_facts import Facts
from drover_collector.detectors.risk_model import HORIZON_DAYS
from drover_proto import fleet_pb2 as pb

LIMIT = 50
MOST = 20_000
MEASURED = "risk_measured.json"  # what benchmarks/bench_risk.py prints; a test holds it to that


def list_risk(facts: Facts, request: pb.RiskRequest) -> pb.RiskList:
    found = facts.pipeline.engine.risks
    rows = [
        pb.RiskRow(node=risk.node, chance=risk.chance, reasons=risk.reasons, in_trouble=risk.in_trouble)
        for risk in found[: min(request.limit or LIMIT, MOST)]
    ]
    return pb.RiskList(nodes=rows, total=len(found), days=HORIZON_DAYS, measured=measured())


@functools.cache
def measured() -> pb.RiskMeasured:
    text = (importlib.resources.files("drover_collector.detectors") / MEASURED).read_text("utf-8")
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
