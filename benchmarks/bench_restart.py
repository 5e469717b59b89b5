"""How long a collector takes to begin again: its store opened, the last minutes read, the detectors' windows rebuilt.

Writes a fleet's last minutes with all GPU and node metrics and their rollups, closes the store, and opens it as a start
does: `Store.open`, then `Pipeline.start`, from which on events are judged, then the past is taken up. One sample a
bucket: the start reads rollups, which do not depend on how many there were. Prints one JSON line.

    python benchmarks/bench_restart.py [--gpus 100000] [--minutes 10] [--incidents 200]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from load.fleet import Shape, name

from drover_collector.fleet.buckets import BUCKET_MS, Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.notify import Outbox
from drover_collector.pipeline.pipeline import Pipeline, PipelineOptions
from drover_collector.policy.policy import Policy
from drover_collector.store import EntityRow, SampleBatch, Store, entity_id
from drover_collector.store.records import Ids, storage_dtype
from drover_core.metrics.catalog import Kind, Scope, of_scope
from drover_core.model.events import (
    Incident,
    IncidentKind,
    RecommendedAction,
    Severity,
)

GPUS = 8  # of a node


def fill(store: Store, index: FleetIndex, buckets: int, incidents: int, end_ms: int) -> None:
    """The last `buckets` buckets before `end_ms`, and incidents that are open."""
    rows = [EntityRow(entity_id(Scope.NODE, n.name), Scope.NODE, n.name, n.name, None) for n in index.nodes]
    for node in index.nodes:
        for slot in range(node.gpus):
            key = f"SN-{node.name}-{slot}"
            id_ = store.entities.gpu_id(key, node.name, index.near(node.name))
            rows.append(EntityRow(id_, Scope.GPU, key, node.name, slot, f"GPU-{key}", key))
    store.entities.write(rows)
    ids = {
        scope: np.array([row.entity_id for row in rows if row.scope is scope], np.uint64)
        for scope in (Scope.GPU, Scope.NODE)
    }
    for back in range(buckets, 0, -1):
        start_ms = end_ms - back * BUCKET_MS
        for scope, which in ids.items():
            store.samples.write(_moment(scope, which, start_ms))
        store.buckets.read_closing(index, start_ms)
        store.rollups.roll_up()
    store.incidents.write(
        [
            Incident(
                f"i{n}",
                IncidentKind.STRAGGLER,
                "nic",
                "gpu",
                name(n),
                0,
                ((name(n), 0),),
                end_ms - 60_000,
                end_ms - 90_000,
                None,
                Severity.WARNING,
                0.9,
                RecommendedAction.PROBE,
                "slow",
                "Look.",
                (),
                (),
                ("straggler",),
                updated_ms=end_ms - 60_000,
            )
            for n in range(min(incidents, index.node_count))
        ]
    )


def _moment(scope: Scope, ids: Ids, ts_ms: int) -> SampleBatch:
    every, columns = np.ones(len(ids), np.bool_), {}
    for metric in of_scope(scope):
        moves = metric.kind is Kind.GAUGE  # no errors and no limits: a healthy fleet, as most of one is
        values = (np.arange(len(ids)) % 7 + ts_ms // 1000 % 13) * moves
        columns[metric.name] = values.astype(storage_dtype(metric.name)), every
    return SampleBatch(scope, ids, np.full(len(ids), ts_ms, np.int64), columns)


async def restart(url: str, index: FleetIndex, now_ms: int) -> dict[str, Any]:
    began_s, cpu_s = time.monotonic(), time.process_time()
    store = Store.open(url)
    opened_s = time.monotonic()
    try:
        outbox = Outbox(store, [], "")
        reading_s: list[float] = []
        read = store.buckets.read_past

        def timed(*args: Any, **named: Any) -> list[Bucket]:
            at_s = time.monotonic()
            try:
                return read(*args, **named)
            finally:
                reading_s.append(time.monotonic() - at_s)

        store.buckets.read_past = timed  # type: ignore[method-assign]  # to time its part of a start
        pipeline = Pipeline(index, store, Policy.load(), outbox, PipelineOptions(lag_ms=7000, now_ms=lambda: now_ms))
        await pipeline.start()
        ready_s, ready_cpu_s = time.monotonic(), time.process_time()
        taking = asyncio.create_task(pipeline.buckets.take_up_past(pipeline))
        waits_s = []
        while not taking.done():  # as an XID would wait that comes meanwhile
            at_s = time.monotonic()
            await asyncio.to_thread(pipeline.of_engine, lambda _: None)
            waits_s.append(time.monotonic() - at_s)
            await asyncio.sleep(0.1)
        await taking
        found = {
            "opened_s": round(opened_s - began_s, 2),
            "events_judged_after_s": round(ready_s - began_s, 2),  # from the process' first look at the store on
            "event_waits_s_max": round(max(waits_s, default=0.0), 2),  # while the past is taken up
            "buckets_judged_after_s": round(time.monotonic() - began_s, 2),
            "reading_s": round(sum(reading_s), 2),
            "events_judged_cpu_s": round(ready_cpu_s - cpu_s, 2),
            "cpu_s": round(time.process_time() - cpu_s, 2),
            "rss_mib_max": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "incidents": len(pipeline.incidents),
        }
        await pipeline.stop()
    finally:
        store.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=10.0, help="of history; a start reads the last ten")
    parser.add_argument("--incidents", type=int, default=200, help="open ones")
    given = parser.parse_args()
    index = FleetIndex(Shape(given.gpus // GPUS, GPUS).spec())
    now_ms = time.time_ns() // 1_000_000 // BUCKET_MS * BUCKET_MS
    buckets = round(given.minutes * 60_000) // BUCKET_MS
    with tempfile.TemporaryDirectory(prefix="drover-bench-restart-") as folder:
        url = f"chdb://{Path(folder)}/store"
        store = Store.open(url)
        try:
            fill(store, index, buckets, given.incidents, now_ms)
        finally:
            store.close()
        found = asyncio.run(restart(url, index, now_ms))
    line = {"benchmark": "restart", "gpus": index.gpu_count, "buckets": buckets} | found
    print(json.dumps(line))


if __name__ == "__main__":
    main()
