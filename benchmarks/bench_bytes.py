"""Bytes a sample on disk after all merges: this store against VictoriaMetrics, the same values, times and series.

A simulated fleet at 1 Hz, all GPU rows of the catalog, values in the resolution that is stored. VictoriaMetrics
(Debian's) takes them by its import API into a folder of its own and merges them by force; ours takes them as the
collector does, minute by minute, and merges by OPTIMIZE FINAL. Ours counts all of the table: keys, null maps, marks.
VictoriaMetrics is counted without its index of series, which is told beside it. Prints a table per column on stderr,
then one JSON line.

    python benchmarks/bench_bytes.py [--nodes 16] [--seconds 3600] [--seed 1] [--rate-step 1024]
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from telemetry import record

from drover_collector.store import SampleBatch, Store
from drover_collector.store.base import aggregate_sql
from drover_proto.catalog import BY_NAME, Scope, of_scope

SERVER = "/usr/bin/victoria-metrics"
WAIT_S = 120.0
GOAL = 0.75


@dataclass(frozen=True, slots=True)
class Victoria:
    port: int
    folder: Path

    def ask(self, path: str, body: bytes | None = None) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request("GET" if body is None else "POST", path, body)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 300:
            raise RuntimeError(f"victoria-metrics: {path}: {answer.status} {text[:200]}")
        return text

    def running(self) -> list[float]:
        """Merges under way, by kind."""
        lines = self.ask("/metrics").splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith("vm_active_")]

    def gauges(self, name: str) -> dict[str, float]:
        """Value of a metric of its own by the label `type`."""
        found: dict[str, float] = {}
        for line in self.ask("/metrics").splitlines():
            if line.startswith(name + "{"):
                label, _, value = line.rpartition(" ")
                found[label.split('type="')[1].split('"')[0]] = float(value)
        return found


@contextmanager
def victoria() -> Iterator[Victoria]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="drover-bench-vm-"))
    command = [SERVER, f"-storageDataPath={folder}", f"-httpListenAddr=127.0.0.1:{port}", "-retentionPeriod=100y"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = Victoria(port, folder)
    try:
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                server.ask("/health")
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def coarser(batch: SampleBatch, step: int) -> SampleBatch:
    """With rates in coarser steps."""
    columns = {
        name: ((stored // step * step).astype(stored.dtype), mask) if BY_NAME[name].unit == "B/s" else (stored, mask)
        for name, (stored, mask) in batch.columns.items()
    }
    return SampleBatch(batch.scope, batch.entity_id, batch.ts_ms, columns)


def lines_of(batch: SampleBatch) -> Iterator[bytes]:
    """A line of the import API per series."""
    order = np.lexsort((batch.ts_ms, batch.entity_id))
    ids = batch.entity_id[order]
    cuts = np.flatnonzero(np.diff(ids)) + 1
    for name, (stored, mask) in batch.columns.items():
        step = BY_NAME[name].step
        digits = 0 if step in (0, 1) else -int(Decimal(str(step)).adjusted())
        for rows in np.split(order, cuts):
            held = rows[mask[rows]]
            if not len(held):
                continue
            values: Any = stored[held]
            if step not in (0, 1):
                values = np.round(values * step, digits)
            labels = {"__name__": name, "gpu": f"GPU-{batch.entity_id[held[0]]:016x}", "job": "drover"}
            line = {"metric": labels, "values": values.tolist(), "timestamps": batch.ts_ms[held].tolist()}
            yield json.dumps(line, separators=(",", ":")).encode()


def feed(server: Victoria, batch: SampleBatch) -> None:
    lines: list[bytes] = []
    size = 0
    for line in lines_of(batch):
        lines.append(line)
        size += len(line)
        if size > 16 << 20:
            server.ask("/api/v1/import", b"\n".join(lines))
            lines, size = [], 0
    server.ask("/api/v1/import", b"\n".join(lines))


def disk_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # merged in this moment
            total += path.stat().st_size if path.is_file() else 0
    return total


def settle(server: Victoria) -> tuple[int, dict[str, float]]:
    """(samples, bytes by type) after all merges."""
    deadline = time.monotonic() + WAIT_S
    before = -1
    while (size := disk_bytes(server.folder / "data")) != before:  # a merge may start late, and its input go late
        if time.monotonic() > deadline:
            raise RuntimeError("victoria-metrics does not end its merges")
        before = size
        server.ask("/internal/force_flush")
        server.ask("/internal/force_merge")
        time.sleep(5)
        while any(value for value in server.running()):
            time.sleep(1)
    rows, sizes = server.gauges("vm_rows"), server.gauges("vm_data_size_bytes")
    return int(sum(n for kind, n in rows.items() if kind.startswith("storage/"))), sizes


def roll_up(store: Store) -> None:
    """The rollups of all that is stored, as the collector keeps them."""
    metrics = [metric.name for metric in of_scope(Scope.GPU)]
    columns = ", ".join(f"`{name}`" for name in metrics)
    source = "gpu_samples"
    for level, seconds in (("10s", 10), ("5m", 300)):
        store._clients.command(
            f"INSERT INTO gpu_{level} (entity_id, ts, version, rows, present, {columns})"
            f" SELECT entity_id, b, 1, count(), sum(present), {', '.join(map(aggregate_sql, metrics))} FROM"
            f" (SELECT *, toStartOfInterval(ts, toIntervalSecond({seconds})) AS b FROM {source}) GROUP BY entity_id, b"
        )
        store._clients.command(f"OPTIMIZE TABLE gpu_{level} FINAL")
        source = f"gpu_{level}"


def table_bytes(store: Store, table: str) -> int:
    return sum(size.bytes for size in store.table_sizes() if size.name == table)


def print_columns(store: Store, batches: list[SampleBatch]) -> dict[str, float]:
    """Bytes a present value of each column on stderr."""
    counts: dict[str, int] = {}
    for batch in batches:
        for name, (_, mask) in batch.columns.items():
            counts[name] = counts.get(name, 0) + int(mask.sum())
    rows = store._clients.rows(
        "SELECT column, sum(column_data_compressed_bytes) AS b, sum(column_marks_bytes) AS marks, sum(rows) AS n,"
        " sum(column_data_uncompressed_bytes) AS u FROM system.parts_columns"
        " WHERE active AND database = currentDatabase() AND table = 'gpu_samples' GROUP BY column ORDER BY b DESC"
    )
    total = sum(row["b"] for row in rows)
    print(f"{'column':<28} {'MB':>8} {'share':>6} {'B/value':>8} {'ratio':>7}", file=sys.stderr)
    found = {}
    for row in rows:
        count = counts.get(row["column"], row["n"])
        each = row["b"] / count if count else 0.0
        found[row["column"]] = round(each, 4)
        print(
            f"{row['column']:<28} {row['b'] / 1e6:8.3f} {row['b'] / total:6.1%} {each:8.4f}"
            f" {row['u'] / max(1, row['b']):7.1f}",
            file=sys.stderr,
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=16, help="of 8 GPUs")
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate-step", type=int, default=1, help="round what is in B/s to multiples of this")
    args = parser.parse_args(argv)
    batches = [b for b in record(args.nodes, args.seconds, args.seed) if b.scope is Scope.GPU]
    if args.rate_step > 1:
        batches = [coarser(batch, args.rate_step) for batch in batches]
    samples = sum(batch.samples for batch in batches)
    with victoria() as server:
        for batch in batches:
            feed(server, batch)
        held, sizes = settle(server)
        on_disk = disk_bytes(server.folder / "data")
    if held != samples:
        raise RuntimeError(f"victoria-metrics holds {held} of {samples} samples")
    theirs = sum(size for kind, size in sizes.items() if kind.startswith("storage/"))
    index = sum(size for kind, size in sizes.items() if kind.startswith("indexdb/"))
    with tempfile.TemporaryDirectory(prefix="drover-bench-") as folder:
        store = Store.open(f"chdb://{folder}/store", retention_days=3650)
        for batch in batches:
            store.write_samples(batch)
        fresh = table_bytes(store, "gpu_samples")
        store._clients.command("OPTIMIZE TABLE gpu_samples FINAL")
        if store.totals().samples != samples:
            raise RuntimeError(f"this store holds {store.totals().samples} of {samples} samples")
        ours = table_bytes(store, "gpu_samples")
        columns = print_columns(store, batches)
        roll_up(store)
        rollups = {level: table_bytes(store, f"gpu_{level}") for level in ("10s", "5m")}
        store.close()
    ratio = ours / theirs
    print(
        json.dumps(
            {
                "bench": "bytes",
                "gpus": args.nodes * 8,
                "seconds": args.seconds,
                "seed": args.seed,
                "rate_step": args.rate_step,
                "samples": samples,
                "bytes_per_sample": round(ours / samples, 4),
                "bytes_per_sample_with_rollups": round((ours + sum(rollups.values())) / samples, 4),
                "bytes_per_sample_before_merges": round(fresh / samples, 4),
                "rollup_share": {level: round(size / ours, 4) for level, size in rollups.items()},
                "victoria_bytes_per_sample": round(theirs / samples, 4),
                "victoria_with_index": round((theirs + index) / samples, 4),
                "victoria_data_folder": round(on_disk / samples, 4),
                "ratio": round(ratio, 4),
                "ratio_with_rollups": round((ours + sum(rollups.values())) / theirs, 4),
                "goal": GOAL,
                "met": ratio <= GOAL,
                "columns": columns,
            }
        )
    )


if __name__ == "__main__":
    main()
