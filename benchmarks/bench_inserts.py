"""What it costs the store to take in one fleet in inserts of different size, its merges included, and to read it after.

A fleet at 1 Hz is written in real time, since merges follow the clock: each insert holds the share of the fleet that
comes in `--every` seconds (or so many seconds of all of it), with all GPU and node metrics. CPU is that of the whole
process. `parts` and `read_ms` (CPU to read one metric of one node) show what fewer merges cost. Prints one JSON line.

    python benchmarks/bench_inserts.py [--gpus 2000] [--every 0.25] [--base 10] [--seconds 75]

`--synced` is another question: what an insert of one row waits for the disk, into a table of what people decided
(`schema.SYNCED`), against the same without; in turn, milliseconds.

    python benchmarks/bench_inserts.py --synced
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from drover_collector.store import SampleBatch, Store
from drover_collector.store.records import Ids, storage_dtype
from drover_collector.store.schema.tables import SYNCED, samples_table
from drover_core.metrics.catalog import Scope, of_scope
from drover_core.model.events import Audit

GPUS = 8  # of a node
AFTER_S = 8.0  # for merges that follow
READS = 15
TURNS, IN_TURN = 10, 8


def batch(scope: Scope, ids: Ids, ts_ms: int, moments: int) -> SampleBatch:
    """The last moments of these entities, all metrics there."""
    times = np.repeat(ts_ms - 1000 * np.arange(moments, dtype=np.int64), len(ids))
    every, columns = np.ones(len(times), np.bool_), {}
    for metric in of_scope(scope):
        values = np.tile(np.arange(len(ids)), moments) % 7 + times // 1000 % 13
        columns[metric.name] = values.astype(storage_dtype(metric.name)), every
    return SampleBatch(scope, np.tile(ids, moments), times, columns)


def run(store: Store, gpus: int, every_s: float, base: float, seconds: float) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    fleet = {
        scope: np.sort(rng.integers(0, 2**63, count).astype(np.uint64))
        for scope, count in ((Scope.GPU, gpus), (Scope.NODE, gpus // GPUS))
    }
    for scope in fleet if base else ():
        store.clients.command(f"ALTER TABLE {samples_table(scope)} MODIFY SETTING merge_selector_base = {base:g}")
    parts_of_second, moments = max(1, round(1 / every_s)), max(1, round(every_s))
    shares = {scope: np.array_split(ids, parts_of_second) for scope, ids in fleet.items()}
    cpu_s, begin_s, turns, rows = time.process_time(), time.monotonic(), 0, 0
    while time.monotonic() - begin_s < seconds:
        now_ms = time.time_ns() // 1_000_000_000 * 1000
        for scope, share in shares.items():
            ids = share[turns % parts_of_second]
            store.samples.write(batch(scope, ids, now_ms, moments))
            rows += len(ids) * moments
        turns += 1
        time.sleep(max(0.0, begin_s + turns * every_s - time.monotonic()))
    time.sleep(AFTER_S)
    cpu_s = time.process_time() - cpu_s
    held = store.clients.rows(
        f"SELECT table, count() AS n FROM {store.clients.parts} WHERE endsWith(table, '_samples') GROUP BY table"
    )
    which = ", ".join(map(str, fleet[Scope.GPU][:GPUS].tolist()))
    sql = f"SELECT entity_id, ts, power_w FROM gpu_samples WHERE entity_id IN ({which}) SETTINGS max_threads = 1"
    reads = []
    for _ in range(READS):
        began = time.process_time()
        store.clients.arrow(sql)
        reads.append((time.process_time() - began) * 1000)
    return {
        "gpus": gpus, "every_s": every_s, "merge_selector_base": base or "default", "seconds": seconds, "turns": turns,
        "rows": rows, "cpu": round(cpu_s / seconds, 3), "parts": {row["table"]: row["n"] for row in held},
        "read_ms": round(statistics.median(reads), 1),
    }  # fmt: skip


def synced(store: Store) -> dict[str, Any]:
    took: dict[int, list[float]] = {0: [], 1: []}
    for turn in range(TURNS):
        for on, waits in took.items():
            settings = ", ".join(f"{name} = {on}" for name, _ in SYNCED)
            store.clients.command(f"ALTER TABLE audit MODIFY SETTING {settings}")
            for number in range(IN_TURN):
                began = time.perf_counter()
                store.audit.write([Audit(f"{turn}-{on}-{number}", number, "jo", "silence", "n1", "spare")])
                waits.append((time.perf_counter() - began) * 1000)
    return {
        name: {"p50": round(statistics.median(waits), 1), "p95": round(float(np.quantile(waits, 0.95)), 1)}
        for name, waits in (("not_synced_ms", took[0]), ("synced_ms", took[1]))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2000)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between inserts: a number, or 1 over one")
    parser.add_argument("--base", type=float, default=0.0, help="merge_selector_base; 0: the engine's own, 5")
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--synced", action="store_true", help="what an insert that waits for the disk takes")
    given = parser.parse_args()
    if not 0 < given.every <= 10:
        parser.error("--every: more than 0, up to 10 s")
    with tempfile.TemporaryDirectory(prefix="drover-bench-inserts-") as folder:
        store = Store.open(f"chdb://{Path(folder)}/store")
        try:
            found = synced(store) if given.synced else run(store, given.gpus, given.every, given.base, given.seconds)
        finally:
            store.close()
    print(json.dumps({"benchmark": "inserts", **found}))


if __name__ == "__main__":
    main()
