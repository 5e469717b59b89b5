"""Names of this release that the scripts of tests/data/release_0_1 use; in release 0.1 they had other homes."""

from __future__ import annotations

from drover_agent.clock import SystemClock
from drover_collector.detectors._lib.examples import LAG_MS, START_MS, training_bucket
from drover_collector.engine.engine import Engine, Outcome
from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.notify.silences import Silences
from drover_collector.policy.policy import Policy
from drover_collector.store import Store
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Decision, Event, EventKind, Finding, Incident, Silence
from drover_core.model.fleet import FleetSpec, LinkSpec, NodeSpec

__all__ = [
    "BUCKET_MS", "LAG_MS", "START_MS", "Bucket", "Decision", "Engine", "Event", "EventKind", "Finding", "FleetIndex",
    "FleetSpec", "Incident", "LinkSpec", "NodeSpec", "Outcome", "Policy", "Scope", "Silence", "Silences", "Store",
    "SystemClock", "training_bucket",
]  # fmt: skip
