"""What is said of how good the ranking is: what the benchmark gives, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drover_collector.api.fleet import MEASURED, list_risk, measured
from drover_collector.detectors.risk.model import Risk
from drover_core.model.events import Incident, IncidentKind, Severity
from drover_proto import fleet_pb2 as pb
from testbed.deciding import fleet, incident

ROOT = Path(__file__).resolve().parents[3]


def test_the_measured_figures_are_those_of_the_benchmark() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/bench_risk.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    written = json.loads((ROOT / "collector/drover_collector/detectors/risk" / MEASURED).read_text("utf-8"))
    again = "python benchmarks/bench_risk.py > collector/drover_collector/detectors/risk/measured.json"
    assert written == json.loads(done.stdout), f"the model or the benchmark changed: {again}"


def test_they_reach_the_console_whole() -> None:
    figures = measured()
    assert 0 < figures.chance < figures.captured < 1
    assert figures.top_share == 0.05
    assert figures.days > 100
    assert figures.trace


def facts(*open_: Incident) -> Any:
    """Of a fleet of 32 nodes whose newest ranking was made before any of these incidents."""
    ranking = [Risk(f"n{n:03d}", 0.023, ()) for n in range(32)]
    engine = SimpleNamespace(risks=ranking)
    return SimpleNamespace(index=fleet(32), pipeline=SimpleNamespace(engine=engine), open_incidents=lambda: list(open_))


def test_nodes_in_trouble_stand_apart_and_not_among_those_that_may_fail_next() -> None:
    """In the first minutes five incidents were open, and nothing was "known that sets a node apart"."""
    hot = dataclasses.replace(incident("n004", "cooling", 5, kind=IncidentKind.THERMAL), severity=Severity.WARNING)
    rack = dataclasses.replace(hot, id="r", scope="rack", node=None, members=(("n008", None), ("n009", None)))
    note = dataclasses.replace(incident("n010"), severity=Severity.INFO)
    reply = list_risk(facts(hot, incident("n003"), incident("n003", "xid_48"), rack, note), pb.RiskRequest(limit=4))
    assert [(t.node, t.cause, t.severity) for t in reply.in_trouble][1:] == [("n004", "cooling", "warning")]
    assert (reply.in_trouble[0].node, reply.in_trouble[0].severity) == ("n003", "critical")
    assert reply.in_trouble[1].since_ms == 5
    assert reply.in_trouble[1].incident_id == hot.id
    assert [row.node for row in reply.nodes] == ["n000", "n001", "n002", "n005"]
    assert (reply.total, reply.in_trouble_total) == (32, 2)


def test_the_list_of_those_in_trouble_is_bounded_too() -> None:
    many = [incident(f"n{n:03d}") for n in range(20)]
    reply = list_risk(facts(*many), pb.RiskRequest(limit=3))
    assert (len(reply.in_trouble), reply.in_trouble_total, len(reply.nodes)) == (3, 20, 3)
