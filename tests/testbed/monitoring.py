"""A metrics page on which every family stands, and the names in it."""

from __future__ import annotations

import re
from pathlib import Path

from drover_cli.pki import authority as certs
from drover_collector.api.snapshot import ApiSnapshot, HeartbeatStatus, OptionalParts
from drover_collector.api.store import StoreWatch
from drover_collector.auth.tls import ServerTls
from drover_collector.config import CollectorConfig
from drover_collector.engine.detector_runner import DetectorError
from drover_collector.exporters.sending import SendStatus
from drover_collector.ingest.stats import IngestStats
from drover_collector.notify import Outbox, Webhook
from drover_collector.notify.base import ReceiverOptions
from drover_collector.observability.metrics_server import exposition
from drover_collector.pipeline.expiry import ClockGuardedExpiry
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Policy
from drover_collector.store import Store
from drover_core.model.events import (
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)
from testbed.certificates import Fleet
from testbed.collected import small_index, write_entities, write_ticks

INCIDENT = Incident(
    "i1",
    IncidentKind.XID,
    "xid_79",
    "gpu",
    "n0",
    0,
    (("n0", 0),),
    0,
    0,
    None,
    Severity.CRITICAL,
    0.9,
    RecommendedAction.DRAIN,
    "summary",
    "advice",
    job="train",
)
NAME = re.compile(r"\b(?:drover|process)_[a-z0-9_]+\b")


def names_of(page: str) -> set[str]:
    """Names of the samples of a page."""
    return {line.partition("{")[0].partition(" ")[0] for line in page.splitlines() if not line.startswith("#")}


def facts_of(store: Store) -> ApiSnapshot:
    """Four nodes of two GPUs; some things have been counted."""
    webhook = Webhook(ReceiverOptions("ops", Severity.WARNING, 1.0), "http://127.0.0.1:9/", b"x" * 32)
    pipeline = Pipeline(
        small_index(), store, Policy.load(), Outbox(store, [webhook], "http://console"), PipelineOptions(lag_ms=7000)
    )
    stats = IngestStats(connected=3, batches=17)
    stats.rejected['a "bad"\nbatch'] += 2
    for seconds in (0.2, 99.0):
        stats.count_write("telemetry", seconds)
    stats.insert_rows.observe(800)
    return ApiSnapshot(pipeline, stats, CollectorConfig())


def whole_page(facts: ApiSnapshot, folder: Path) -> str:
    """The page of a collector that has something to say in every family; `folder` is for its certificate."""
    now_ms = facts.now_ms() // 1000 * 1000
    write_entities(facts.store, facts.index)
    write_ticks(facts.store, facts.index, now_ms - 1_800_000, now_ms, 10_000)
    files = Fleet(folder).issue(certs.COLLECTOR, "collector")
    facts.tls = ServerTls(*files.paths)
    stats, pipeline = facts.stats, facts.pipeline
    stats.last_seen = {node.name: now_ms for node in facts.index.nodes}
    stats.out_of_range["power_w"] += 1
    stats.skipped["news"] += 1
    facts.gate.refused["denied"] += 1
    facts.gate.calls["drover.fleet.v1.Fleet"] += 1
    facts.tls.connections["api"] += 1
    expiry = ClockGuardedExpiry(facts.store, None, 4, {})
    facts.parts = OptionalParts(
        heartbeat=HeartbeatStatus(sent=3), expiry=expiry, exports=lambda: {"prometheus": SendStatus(sent=5)}
    )
    pipeline.leading = True
    pipeline.incidents = {"i1": INCIDENT}
    pipeline.engine.errors["xid"] = DetectorError(1, "ValueError: x")
    watch = StoreWatch(facts)
    watch._read()  # here: a scrape waits for it for two seconds only, which a busy machine may take
    return exposition(facts, watch)
