"""Messages and places for tests of notifiers."""

from __future__ import annotations

import dataclasses

from drover_collector.incidents.incident import closing
from drover_collector.notify.receivers.webhook import message
from drover_core.model.events import (
    Evidence,
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from drover_core.model.fleet import NodeSpec

NOW_MS = 1_795_400_000_000  # 2026-11-23T02:13:20Z
PLACES = {
    name: NodeSpec(name, rack=name[:3], leaf="leaf01", pool="train", sku="H100-SXM")
    for name in (f"r{rack:02}n{node:02}" for rack in (1, 2) for node in range(1, 17))
}
LOST_GPU = Incident(
    "3f2a9c1e77aa01bc",
    IncidentKind.XID,
    "xid_79",
    "gpu",
    "r01n03",
    3,
    (("r01n03", 3),),
    NOW_MS,
    NOW_MS - 840_000,
    None,
    Severity.CRITICAL,
    0.95,
    RecommendedAction.ISOLATE,
    "XID 79 on GPU 3 of node r01n03: GPU has fallen off the bus.",
    "Drain the node, then reset it; if it comes back, replace the board.",
    (Evidence("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."), Evidence("7 of its 8 GPUs answer.")),
    job="4711",
    gpu_hours_lost=0.4,
    gpu_hours_waited=31.2,
    asked=RecommendedAction.ISOLATE,
)
OVER = dataclasses.replace(
    LOST_GPU, closed_ms=NOW_MS + 1_680_000, version=2, timeline=(closing(NOW_MS, "the condition has ended"),)
)
NASTY = dataclasses.replace(
    LOST_GPU, summary="<!channel> & <https://evil|look>: " + "x" * 20_000, advice="y" * 20_000,
    evidence=tuple(Evidence(f"{n} <b> & " + "z" * 9000) for n in range(16)),
    members=tuple((f"node-with-a-rather-long-name-{n:05}", None) for n in range(5000)),
)  # fmt: skip


def body(step: str = "opened", incident: Incident = LOST_GPU, now_ms: int = NOW_MS) -> bytes:
    """The stored message, as the outbox gives it to a notifier."""
    return message(f"incident.{step}", incident, now_ms, "https://drover.example").encode()
