"""Codecs of the samples tables: each candidate on each metric's column, in the real engine, on simulated telemetry.

The values lie in the order of a merged part. Bytes a value are what the column takes on disk, its null map included;
CPU is the engine's, to write the column and to read it. Prints a table per metric on stderr, then one JSON line.

    python benchmarks/bench_codecs.py [--nodes 16] [--seconds 3600] [--seed 1000] [--metric power_w]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from telemetry import record

from drover_collector.store import SampleBatch, Store
from drover_collector.store.schema import codecs
from drover_core.metrics.catalog import (
    METRICS,
    STORAGE,
    Metric,
    Scope,
)

WHOLE = ("ZSTD(1)", "T64, ZSTD(1)", "T64('bit'), ZSTD(1)", "Delta(W), ZSTD(1)", "DoubleDelta, ZSTD(1)", "LZ4")
MORE = (
    "ZSTD(3)", "T64, ZSTD(3)", "T64, LZ4", "GCD, ZSTD(1)", "GCD, T64, ZSTD(1)", "GCD, T64('bit'), ZSTD(1)",
    "GCD, T64, ZSTD(3)", "Delta(W), T64, ZSTD(1)", "Delta(W), Delta(W), ZSTD(1)", "Delta(W), Delta(W), ZSTD(3)",
    "DoubleDelta, ZSTD(3)",
)  # fmt: skip
REAL = ("ZSTD(1)", "Gorilla(8), ZSTD(1)", "FPC(12), ZSTD(1)", "LZ4", "ZSTD(3)", "Delta(8), ZSTD(1)")


def candidates(metric: Metric) -> Iterator[str]:
    width = np.dtype(metric.type).itemsize
    for codec in REAL if metric.type == "d" else WHOLE + MORE:
        yield codec.replace("W", str(width))


def measure(store: Store, metric: Metric, codec: str) -> tuple[float, float, float]:
    """(bytes, ns to write, ns to read) a value."""
    clients = store.clients
    kind = f"Nullable({STORAGE[metric.type][0]})"
    clients.command("DROP TABLE IF EXISTS tried SYNC")
    clients.command(
        f"CREATE TABLE tried (v {kind} CODEC({codec})) ENGINE = MergeTree ORDER BY tuple()"
        " SETTINGS min_bytes_for_wide_part = 0"
    )
    began = time.process_time()
    clients.command("INSERT INTO tried SELECT v FROM source")
    wrote = time.process_time() - began
    began = time.process_time()
    clients.rows("SELECT count() AS n FROM tried WHERE NOT ignore(v)")
    read = time.process_time() - began
    size = clients.rows(
        "SELECT sum(column_data_compressed_bytes) AS b, sum(rows) AS n FROM system.parts_columns"
        " WHERE active AND database = currentDatabase() AND table = 'tried'"
    )[0]
    rows = size["n"]
    return size["b"] / rows, wrote / rows * 1e9, read / rows * 1e9


def ordered(nodes: int, seconds: int, seed: int) -> dict[Scope, SampleBatch]:
    """The telemetry of each scope in the order of a merged part."""
    held: dict[Scope, list[SampleBatch]] = {}
    for batch in record(nodes, seconds, seed):
        held.setdefault(batch.scope, []).append(batch)
    found = {}
    for scope, batches in held.items():
        whole = SampleBatch.join(batches)
        order = np.lexsort((whole.ts_ms, whole.entity_id))
        columns = {name: (stored[order], mask[order]) for name, (stored, mask) in whole.columns.items()}
        found[scope] = SampleBatch(scope, whole.entity_id[order], whole.ts_ms[order], columns)
    return found


def try_metric(store: Store, metric: Metric, stored: Any, mask: Any) -> dict[str, tuple[float, float, float]]:
    clients = store.clients
    clients.command("DROP TABLE IF EXISTS source SYNC")
    clients.command(f"CREATE TABLE source (v Nullable({STORAGE[metric.type][0]})) ENGINE = Memory")
    clients.insert("source", pa.table({"v": pa.array(stored, mask=~mask)}))
    tried = dict.fromkeys((*candidates(metric), codecs.of_metric(metric)))
    return {codec: measure(store, metric, codec) for codec in tried}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--metric", help="this one only")
    args = parser.parse_args(argv)
    data = ordered(args.nodes, args.seconds, args.seed)
    total = {"chosen": 0.0, "best": 0.0, "zstd": 0.0}
    values = 0
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="drover-bench-") as folder:
        store = Store.open(f"chdb://{folder}/store")
        for metric in METRICS:
            batch = data.get(metric.scope)
            if batch is None or metric.name not in batch.columns or args.metric not in (None, metric.name):
                continue
            stored, mask = batch.columns[metric.name]
            if not mask.any():
                continue
            results = try_metric(store, metric, stored, mask)
            chosen = codecs.of_metric(metric)
            best = min(results, key=lambda codec: results[codec][0])
            for key, codec in (("chosen", chosen), ("best", best), ("zstd", "ZSTD(1)")):
                total[key] += results[codec][0] * batch.rows
            values += int(mask.sum())
            found[metric.name] = {codec: [round(x, 4) for x in result] for codec, result in results.items()}
            print(f"{metric.scope} {metric.name} ({metric.type} {metric.kind}): {chosen}", file=sys.stderr)
            for codec, (size, wrote, read) in sorted(results.items(), key=lambda item: item[1][0]):
                mark = "*" if codec == chosen else " "
                print(f"  {mark} {codec:<26} {size:7.4f} B {wrote:6.1f} {read:6.1f} ns", file=sys.stderr)
        store.close()
    print(
        json.dumps(
            {
                "bench": "codecs",
                "values": values,
                "bytes_per_sample": {key: round(size / values, 4) for key, size in total.items()},
                "chosen_over_best": round(total["chosen"] / total["best"], 4),
                "chosen_over_zstd_only": round(total["chosen"] / total["zstd"], 4),
                "metrics": found,
            }
        )
    )


if __name__ == "__main__":
    main()
