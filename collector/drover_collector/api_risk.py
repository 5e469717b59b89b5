"""Which nodes are likelier than others to fail within a week."""

from __future__ import annotations

from drover_collector.api_facts import Facts
from drover_collector.detectors.risk_model import HORIZON_DAYS
from drover_proto import fleet_pb2 as pb

LIMIT = 50
MOST = 20_000


def list_risk(facts: Facts, request: pb.RiskRequest) -> pb.RiskList:
    found = facts.pipeline.engine.risks
    rows = [
        pb.RiskRow(node=risk.node, chance=risk.chance, reasons=risk.reasons, in_trouble=risk.in_trouble)
        for risk in found[: min(request.limit or LIMIT, MOST)]
    ]
    return pb.RiskList(nodes=rows, total=len(found), days=HORIZON_DAYS)
