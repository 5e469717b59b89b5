"""The report of a week: how long the ledger takes out of a store with the 5-minute rollups of a fleet, and its memory.

    .venv/bin/python benchmarks/bench_ledger.py --nodes 2000

A script writes the rollups, holds and incidents; nothing of them is measured. Jobs of 64 GPUs run for 6 hours each, one
GPU in 200 is silent for an hour each day, and each job has one chance in 50 of a fault. Then the ledger is made of the
store, twice, and of its days. One line of JSON: seconds of each, the process's peak memory, and whether the sums are
exact: what jobs held, added up from the holds alone, and the days against the week.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa

from drover_collector.api import ledger as api
from drover_collector.config import CollectorConfig
from drover_collector.fleet.index import FleetIndex
from drover_collector.store import EntityRow, Store
from drover_collector.store.schema.tables import rollup_table
from drover_collector.store.sql import millis
from drover_core.metrics.catalog import Scope
from drover_core.model.events import Incident, IncidentKind, RecommendedAction, Severity
from drover_core.model.fleet import FleetSpec, NodeSpec
from drover_proto import fleet_pb2 as pb

T0 = 1_800_000_000_000 // 86_400_000 * 86_400_000
DAY_MS, HOUR_MS, STEP_MS = 86_400_000, 3_600_000, 300_000
DAYS, JOB_GPUS, JOB_MS = 7, 64, 6 * HOUR_MS
PIECE = 500  # GPUs whose rollups are written at once


def fleet(nodes: int) -> FleetIndex:
    specs = [NodeSpec(f"n{n:05}", f"r{n // 8}", f"leaf{n // 32}", f"pool{n % 4}", "H100", 8) for n in range(nodes)]
    return FleetIndex(FleetSpec(tuple(specs), (), "ledger"))


def write_rollups(store: Store, index: FleetIndex, rng: np.random.Generator) -> int:
    """Write 8 days: a report also reads the day before."""
    rows = []
    for gpu in range(index.gpu_count):
        node, slot = index.member(gpu)
        key = f"serial-{node}-{slot}"
        at = store.entities.gpu_id(key, node, index.near(node))
        rows.append(EntityRow(at, Scope.GPU, key, node, slot, serial=key, model="H100", first_ms=T0, last_ms=T0))
    store.entities.write(rows)
    starts = np.arange(T0 - DAY_MS, T0 + DAYS * DAY_MS, STEP_MS, dtype=np.int64)
    written = 0
    for first in range(0, len(rows), PIECE):
        ids = np.array([row.entity_id for row in rows[first : first + PIECE]], np.uint64)
        shape = (len(ids), len(starts))
        watts = rng.uniform(550, 690, shape)
        silent = (rng.random((len(ids), len(starts) // 12)) < 1 / 4800).repeat(12, axis=1)
        busy = np.where(rng.random(shape) < 0.02, 0, rng.integers(9000, 10_000, shape)).astype(np.uint16)
        keep = ~silent.ravel()
        table = pa.table(
            {
                "entity_id": pa.array(np.repeat(ids, len(starts))[keep]),
                "ts": millis(np.tile(starts, len(ids))[keep]),
                "version": pa.array(np.ones(keep.sum(), np.uint64)),
                "rows": pa.array(np.full(keep.sum(), 300, np.uint32)),
                "present": pa.array(np.full(keep.sum(), 3000, np.uint32)),
                "gpu_util_ratio": pa.array(busy.ravel()[keep]),
                "energy_j": pa.array((watts * STEP_MS).cumsum(axis=1).astype(np.uint64).ravel()[keep]),
            }
        )
        store.clients.insert(rollup_table(Scope.GPU, "5m"), table)
        written += int(keep.sum())
    end = T0 + DAYS * DAY_MS
    store.clients.insert(
        "rollup_state",
        pa.table(
            {
                "level": pa.array(["10s", "5m"]), "upto": millis([end, end]), "samples": pa.array([0, 0], pa.uint64()),
                "version": pa.array([9, 9], pa.uint64()),
            }
        ),
    )  # fmt: skip
    store.rollups.load()
    return written


def write_jobs(store: Store, index: FleetIndex, rng: np.random.Generator) -> tuple[int, int]:
    """Write holds and incidents. Return how many milliseconds jobs held GPUs, by the holds alone, and the incidents."""
    node, gpu, since, job, held, incidents = [], [], [], [], 0, []
    ends = (T0, T0 + DAYS * DAY_MS)
    for block in range(0, index.gpu_count, JOB_GPUS):
        members = [index.member(g) for g in range(block, min(block + JOB_GPUS, index.gpu_count))]
        for number, start in enumerate(range(T0 - DAY_MS + int(rng.integers(HOUR_MS)), ends[1], JOB_MS)):
            end, name = min(start + JOB_MS - int(rng.integers(1, HOUR_MS)), ends[1]), f"job-{block}-{number}x"
            for at, holder in ((start, name), (end, "")):
                node += [m[0] for m in members]
                gpu += [m[1] for m in members]
                since += [at] * len(members)
                job += [holder] * len(members)
            held += max(0, min(end, ends[1]) - max(start, ends[0])) * len(members)
            if rng.random() < 0.02 and start > T0:
                bad, at = members[int(rng.integers(len(members)))], end - 300_000
                incidents.append(
                    Incident(
                        f"{block:08x}{number:08x}", IncidentKind.XID, "xid_79", "gpu", *bad, (bad,), at + 5000, at,
                        end + HOUR_MS, Severity.CRITICAL, 0.9, RecommendedAction.DRAIN, f"{bad[0]} fell off the bus",
                        "Drain it.", job=name, gpu_hours_lost=1.0 + 1 / 12, updated_ms=end + HOUR_MS,
                    )
                )  # fmt: skip
    columns = {
        "node": pa.array(node), "gpu": pa.array(gpu, pa.int16()), "from": millis(since), "job": pa.array(job),
    }  # fmt: skip
    store.clients.insert("holdings", pa.table(columns))
    store.incidents.write(incidents)
    return held, len(incidents)


def memory_mb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024


def parts(facts: Any) -> Iterator[tuple[float, float, Any]]:
    """Yield (seconds, seconds of CPU, what was made) of the week twice, then of each day."""
    spans = [(T0, T0 + DAYS * DAY_MS)] * 2 + [(T0 + d * DAY_MS, T0 + (d + 1) * DAY_MS) for d in range(DAYS)]
    for low, high in spans:
        began, cpu = time.monotonic(), time.process_time()
        made = api._read(facts, low, high)
        yield time.monotonic() - began, time.process_time() - cpu, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--store", help="a folder to keep; default: a new one that is deleted")
    args = parser.parse_args()
    index, rng = fleet(args.nodes), np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(f"chdb://{args.store or folder}")
        rows = write_rollups(store, index, rng)
        held, incidents = write_jobs(store, index, rng)
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins again
        before_mb = memory_mb("VmHWM")
        end_ms = T0 + DAYS * DAY_MS
        facts = SimpleNamespace(index=index, store=store, now_ms=lambda: end_ms, config=CollectorConfig())
        found = list(parts(facts))
        (first_s, cpu_s, week), (again_s, _, _), *days = found
        began = time.monotonic()
        facts.once = lambda _key, _s, _make: week
        reply = api.get_ledger(cast(Any, facts), pb.LedgerRequest(from_ms=T0, to_ms=end_ms))
        sums = week.account.ledger.ms
        by_day = sum(made.account.ledger.ms.sum(axis=0) for _, _, made in days)
        line = {
            "bench": "ledger", "load": round(os.getloadavg()[0], 1), "nodes": args.nodes,
            "gpus": index.gpu_count, "rollups": rows,
            "incidents": incidents,
            "jobs": reply.jobs_total, "week_s": round(first_s, 2), "week_cpu_s": round(cpu_s, 2),
            "week_again_s": round(again_s, 2), "slowest_day_s": round(max(s for s, _, _ in days), 2),
            "message_s": round(time.monotonic() - began, 2),
            "before_mb": before_mb, "peak_mb": memory_mb("VmHWM"),
            "held_gpu_hours": round(held / HOUR_MS, 1), "goodput": round(reply.total.goodput, 6),
            "exact": int(sums.sum()) == held == reply.total.held_ms,
            "days_add_up": bool((by_day == sums.sum(axis=0)).all()),
            "energy_days_add_up": sum(int(made.account.energy_mj.sum()) for _, _, made in days)
            == int(week.account.energy_mj.sum()),
        }  # fmt: skip
        print(json.dumps(line))
        store.close()


if __name__ == "__main__":
    main()
