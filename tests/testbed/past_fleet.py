"""A Fleet API over a store with two hours of the past: one incident came and went, a job ended, an agent was upgraded.

`python -m testbed.past_fleet FOLDER PORT [NODES]` serves it until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace

import grpc

from drover_collector.api.service import FleetApi
from drover_collector.api.snapshot import ApiSnapshot
from drover_collector.config import CollectorConfig
from drover_collector.fleet.index import FleetIndex
from drover_collector.ingest.stats import IngestStats
from drover_collector.notify import Outbox, OutboxOptions
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.pipeline.start_line import START
from drover_collector.policy.policy import Policy
from drover_collector.store import Store
from drover_core.model.events import (
    Audit,
    Event,
    EventKind,
    Evidence,
    Holding,
    Incident,
    IncidentKind,
    Note,
    NoteKind,
    RecommendedAction,
    Severity,
    Silence,
)
from drover_core.model.fleet import FleetSpec, NodeSpec
from testbed.collected import write_entities, write_ticks

MIN_MS = 60_000
NODES, GPUS = 32, 8
SICK, SLOT, ID = "n5", 3, "0123456789abcdef"
BEFORE, ONSET, OVER, JOB_END = 120, 80, 50, 45  # minutes ago
TICK_MS = 10_000


def moments(now_ms: int) -> dict[str, int]:
    """Return when what happened, ms."""
    return {
        name: now_ms - minutes * MIN_MS
        for name, minutes in {"begin": BEFORE, "onset": ONSET, "over": OVER, "job_end": JOB_END}.items()
    }


def index_of(nodes: int) -> FleetIndex:
    """Racks of 16 nodes."""
    specs = [NodeSpec(f"n{i}", f"r{i // 16}", f"leaf{i // 16}", "pool", "H100", GPUS) for i in range(nodes)]
    return FleetIndex(FleetSpec(tuple(specs), (), "past"))


def incident(at: dict[str, int]) -> Incident:
    """Return it as it was opened."""
    return Incident(
        ID, IncidentKind.THERMAL, "cooling", "gpu", SICK, SLOT, ((SICK, SLOT),), at["onset"], at["onset"], None,
        Severity.CRITICAL, 0.95, RecommendedAction.DRAIN, f"GPU {SLOT} of node {SICK} is poorly cooled: 88 degC.",
        f"Drain {SICK} and look at its heat sink.",
        (Evidence("It is hotter than its peers.", "gpu_temp_c", 88.0, 62.0, 7),), (Note(at["onset"], "opened"),),
        ("thermal",), job="job-7", updated_ms=at["onset"],
    )  # fmt: skip


def fill(store: Store, index: FleetIndex, now_ms: int) -> None:
    """Write the two hours; of a large fleet no samples."""
    at = moments(now_ms)
    write_entities(store, index)
    hot = {(SICK, SLOT): {"gpu_temp_c": 88.0, "sm_clock_mhz": 1200.0}}
    for begin, end, changed in (
        (at["begin"], at["onset"], None), (at["onset"], at["over"], hot), (at["over"], now_ms - MIN_MS, None),
    ):  # fmt: skip
        begin, end = (ms // TICK_MS * TICK_MS for ms in (begin, end))
        if len(index.nodes) <= NODES:
            write_ticks(store, index, begin, end, TICK_MS, changed=changed)
    store.jobs.write_holdings(
        [Holding(node.name, slot, "job-7", at["begin"]) for node in index.nodes[:16] for slot in range(GPUS)]
        + [Holding(node.name, slot, None, at["job_end"]) for node in index.nodes[:16] for slot in range(GPUS)]
    )  # fmt: skip
    changes = [_change(at["begin"], node.name, None, "healthy") for node in index.nodes]
    for slot in (None, SLOT):
        changes += [
            _change(at["onset"], SICK, slot, "confirmed", "poorly cooled"),
            _change(at["over"], SICK, slot, "healthy"),
        ]
    store.health.write(changes)
    opened = incident(at)
    closed = replace(
        opened, version=2, closed_ms=at["over"], updated_ms=at["over"],
        timeline=(*opened.timeline, Note(at["over"], "closed", kind=NoteKind.CLOSED)),
    )  # fmt: skip
    store.incidents.write([opened])
    store.incidents.write([closed])
    upgraded = at["onset"] - 5 * MIN_MS
    store.events.write(
        [Event(f"{SICK}/a/1", upgraded, SICK, None, EventKind.LIFECYCLE, "agent_started", "drover-agent 0.9.1 started",
               "agent", received_ms=upgraded)]
    )  # fmt: skip
    store.audit.write(
        [Audit("s1", at["begin"], "drover", START, "collector", "", "drover-collector 0.9.1 started", "")]
    )
    window = Silence("w1", now_ms, at["over"], at["job_end"], "kim", "new fans", node=(SICK,), maintenance=True)
    store.silences.write([window])


def _change(ts_ms: int, node: str, gpu: int | None, health: str, reason: str = "") -> dict[str, object]:
    return {"ts_ms": ts_ms, "node": node, "gpu": gpu, "health": health, "reason": reason, "incident_id": None}


async def serve(folder: str, port: int, nodes: int) -> None:
    store = Store.open(f"chdb://{folder}/store")
    index = index_of(nodes)
    fill(store, index, time.time_ns() // 1_000_000)
    outbox = Outbox(store, [], "http://console", OutboxOptions(delays_s=(3600,)))
    pipeline = Pipeline(index, store, Policy.load(), outbox, PipelineOptions(lag_ms=7000))
    api = FleetApi(ApiSnapshot(pipeline, IngestStats(), CollectorConfig()))
    server = grpc.aio.server()
    api.add_to(server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else NODES))
