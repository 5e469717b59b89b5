"""Bytes a sample on disk after all merges: this store against VictoriaMetrics, the same values, times and series.

A simulated fleet at 1 Hz, all GPU rows of the catalog, values in the resolution that is stored. VictoriaMetrics
(Debian's) takes them by its import API into a folder of its own and merges them by force; ours takes them as the
collector does, minute by minute, and merges by OPTIMIZE FINAL. Ours counts all of the table: keys, primary index, null
maps, marks. VictoriaMetrics is counted without its index of series, which is printed next to it.

PCIe and NVLink rates, in B/s, are multiples of 1e6. VictoriaMetrics keeps the values of a block with one decimal
exponent and packs them worse than the same in MB/s. So it takes the rates a second time in MB/s; `ratio_rates_in_mb` is
against that. --rate-step 1 is a fleet whose rates are not rounded.

Prints a table per column on stderr, with --per-column VictoriaMetrics' bytes for the larger ones and their entropy,
then one JSON line.

    python benchmarks/bench_bytes.py [--nodes 8] [--seconds 7200] [--seed 1] [--rate-step 1] [--per-column]
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

from drover_agent.sources.base import RATE_STEP
from drover_collector.store import SampleBatch, Store, sizes_of
from drover_core.metrics.catalog import (
    BY_NAME,
    Kind,
    Scope,
    of_scope,
)
from drover_simulator.sensors import Sensors

SERVER = "/usr/bin/victoria-metrics"
WAIT_S = 120.0
GOAL = 0.75
MB = 1_000_000


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
    if not Path(SERVER).exists():
        raise SystemExit(f"{SERVER} is not installed; on Debian: apt-get install victoria-metrics")
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


def parted(batch: SampleBatch, rates: bool) -> SampleBatch:
    """The columns that are rates, or the others."""
    columns = {name: column for name, column in batch.columns.items() if (BY_NAME[name].unit == "B/s") is rates}
    return SampleBatch(batch.scope, batch.entity_id, batch.ts_ms, columns)


def lines_of(batch: SampleBatch, divisor: int) -> Iterator[bytes]:
    """A line of the import API per series. With a divisor, a series has a name of its own."""
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
            if divisor != 1:
                values = values // divisor
            labels = {
                "__name__": name if divisor == 1 else f"{name}_divided",
                "gpu": f"GPU-{batch.entity_id[held[0]]:016x}",
                "job": "drover",
            }
            line = {"metric": labels, "values": values.tolist(), "timestamps": batch.ts_ms[held].tolist()}
            yield json.dumps(line, separators=(",", ":")).encode()


def feed(server: Victoria, batch: SampleBatch, divisor: int = 1) -> None:
    lines: list[bytes] = []
    size = 0
    for line in lines_of(batch, divisor):
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


@dataclass(frozen=True, slots=True)
class Theirs:
    """Bytes of VictoriaMetrics."""

    data: int
    index: int
    folder: int
    rates: int  # of `data`
    rates_in_mb: int | None  # had it got them in MB/s; None: they are not multiples of that


def measure_victoria(batches: list[SampleBatch]) -> Theirs:
    samples = sum(batch.samples for batch in batches)
    rates = [parted(batch, rates=True) for batch in batches]
    with victoria() as server:
        for batch in batches:
            feed(server, parted(batch, rates=False))
        others = settle(server)[1]
        for batch in rates:
            feed(server, batch)
        held, sizes = settle(server)
        folder = disk_bytes(server.folder / "data")
        if held != samples:
            raise RuntimeError(f"victoria-metrics holds {held} of {samples} samples")
        whole = all((stored % MB == 0).all() for batch in rates for stored, _ in batch.columns.values())
        again = None
        if whole:
            for batch in rates:
                feed(server, batch, MB)
            again = settle(server)[1]
    data = data_bytes(sizes)
    return Theirs(
        data, int(sum(size for kind, size in sizes.items() if kind.startswith("indexdb/"))), folder,
        data - data_bytes(others), None if again is None else data_bytes(again) - data,
    )  # fmt: skip


def data_bytes(sizes: dict[str, float]) -> int:
    return int(sum(size for kind, size in sizes.items() if kind.startswith("storage/")))


def entropy(values: Any, cuts: Any) -> float:
    """Bytes a value that an ideal coder without memory needs, that knows the distribution in each series, of the values
    or of their differences, whichever is less. Too low where most values of a series differ."""
    bits = total = 0.0
    for series in np.split(values.astype(np.int64), cuts):
        found = []
        for form in (series, np.diff(series)):
            counts = np.unique(form, return_counts=True)[1]
            found.append(float(-(counts * np.log2(counts / max(1, len(form)))).sum()))
        bits += min(found)
        total += len(series)
    return bits / 8 / max(1.0, total)


def compare_columns(batches: list[SampleBatch], ours: dict[str, float]) -> dict[str, dict[str, float]]:
    """For columns of some size: bytes a value here and there, and their entropy; on stderr, too."""
    whole = SampleBatch.join(batches)
    order = np.lexsort((whole.ts_ms, whole.entity_id))
    found: dict[str, dict[str, float]] = {}
    print(f"{'column':<28} {'ours':>8} {'theirs':>8} {'entropy':>8}", file=sys.stderr)
    with victoria() as server:
        before = 0
        for name, each in ours.items():
            if name not in whole.columns or each < 0.02:
                continue
            stored, mask = whole.columns[name]
            feed(server, SampleBatch(whole.scope, whole.entity_id, whole.ts_ms, {name: (stored, mask)}))
            after = data_bytes(settle(server)[1])
            rows = order[mask[order]]
            cuts = np.flatnonzero(np.diff(whole.entity_id[rows])) + 1
            theirs, floor = (after - before) / len(rows), entropy(stored[rows], cuts)
            before = after
            found[name] = {"ours": each, "theirs": round(theirs, 4), "entropy": round(floor, 4)}
            print(f"{name:<28} {each:8.4f} {theirs:8.4f} {floor:8.4f}", file=sys.stderr)
    return found


def aggregate_sql(metric: str) -> str:
    """One value of a metric per group, as `buckets.aggregate` makes it; both skip NULL."""
    value = f"quantileExactLow(0.5)(`{metric}`)" if BY_NAME[metric].kind is Kind.GAUGE else f"argMax(`{metric}`, ts)"
    return f"{value} AS `{metric}`"


def roll_up(store: Store) -> None:
    """The rollups of all that is stored, as the collector keeps them."""
    metrics = [metric.name for metric in of_scope(Scope.GPU)]
    columns = ", ".join(f"`{name}`" for name in metrics)
    source = "gpu_samples"
    for level, seconds in (("10s", 10), ("5m", 300)):
        store.clients.command(
            f"INSERT INTO gpu_{level} (entity_id, ts, version, rows, present, {columns})"
            f" SELECT entity_id, b, 1, count(), sum(present), {', '.join(map(aggregate_sql, metrics))} FROM"
            f" (SELECT *, toStartOfInterval(ts, toIntervalSecond({seconds})) AS b FROM {source}) GROUP BY entity_id, b"
        )
        store.clients.command(f"OPTIMIZE TABLE gpu_{level} FINAL")
        source = f"gpu_{level}"


def table_bytes(store: Store, table: str) -> int:
    return sum(size.bytes for size in sizes_of(store.sizes.partitions()) if size.name == table)


def print_columns(store: Store, batches: list[SampleBatch]) -> dict[str, float]:
    """Bytes a present value of each column on stderr."""
    counts: dict[str, int] = {}
    for batch in batches:
        for name, (_, mask) in batch.columns.items():
            counts[name] = counts.get(name, 0) + int(mask.sum())
    rows = store.clients.rows(
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8, help="of 8 GPUs")
    parser.add_argument("--seconds", type=int, default=7200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate-step", type=int, default=int(RATE_STEP), help="what rates are rounded to, in B/s")
    parser.add_argument("--per-column", action="store_true", help="VictoriaMetrics' bytes per column too: minutes")
    args = parser.parse_args(argv)
    Sensors.rate_step = args.rate_step
    batches = [b for b in record(args.nodes, args.seconds, args.seed) if b.scope is Scope.GPU]
    samples = sum(batch.samples for batch in batches)
    theirs = measure_victoria(batches)
    with tempfile.TemporaryDirectory(prefix="drover-bench-") as folder:
        store = Store.open(f"chdb://{folder}/store", retention_days=3650)
        for batch in batches:
            store.samples.write(batch)
        fresh = table_bytes(store, "gpu_samples")
        began = time.process_time()
        store.clients.command("OPTIMIZE TABLE gpu_samples FINAL")
        merged_s = time.process_time() - began
        if store.rollups.totals().samples != samples:
            raise RuntimeError(f"this store holds {store.rollups.totals().samples} of {samples} samples")
        ours = table_bytes(store, "gpu_samples")
        columns = print_columns(store, batches)
        rates = sum(
            each * sum(int(batch.columns[name][1].sum()) for batch in batches)
            for name, each in columns.items()
            if name in BY_NAME and BY_NAME[name].unit == "B/s"
        )
        roll_up(store)
        rollups = {level: table_bytes(store, f"gpu_{level}") for level in ("10s", "5m")}
        store.close()
    compared = compare_columns(batches, columns) if args.per_column else {}
    ratio = ours / theirs.data
    in_mb = None if theirs.rates_in_mb is None else theirs.data - theirs.rates + theirs.rates_in_mb
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
                "last_merge_cpu_ns_per_sample": round(merged_s / samples * 1e9, 1),
                "rollup_share": {level: round(size / ours, 4) for level, size in rollups.items()},
                "victoria_bytes_per_sample": round(theirs.data / samples, 4),
                "victoria_with_index": round((theirs.data + theirs.index) / samples, 4),
                "victoria_data_folder": round(theirs.folder / samples, 4),
                "ratio": round(ratio, 4),
                "ratio_rates_in_mb": None if in_mb is None else round(ours / in_mb, 4),
                "ratio_without_rates": round((ours - rates) / (theirs.data - theirs.rates), 4),
                "ratio_with_rollups": round((ours + sum(rollups.values())) / theirs.data, 4),
                "goal": GOAL,
                "met": ratio <= GOAL,
                "columns": columns,
                "compared": compared,
            }
        )
    )


if __name__ == "__main__":
    main()
