"""CPU of a real collector with each exporter on, next to none: the same load, one collector after the other.

The load is that of bench_ingest.py: mutual TLS, a durable store, detectors on. A scraper asks for the page every 15 s
with gzip, as Prometheus does; remote_write goes to a receiver in a process of its own that reads and counts. With
--cut the receiver answers nothing for the first so many seconds, and then takes what has waited. Prints one JSON line:
CPU in cores and for each sample acknowledged, both with their ratio to none, how long acknowledgements took, what the
exporter sent, dropped and still holds. Where a collector does not keep up (`lag_s_max` grows to the length of the run),
as on a machine that others use, only the CPU for each sample can be compared.

--parts measures the exporters' own work alone, in this process: CPU seconds of one page and of one sending, and what
they are in cores at their default intervals. It needs no load, and other processes hardly change it.

    python benchmarks/bench_exporters.py [--gpus 100000] [--seconds 90] [--only none page remote_write_1] [--cut 600]
    python benchmarks/bench_exporters.py --gpus 100000 --parts

--write puts either's figures into docs/evidence/standards.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import multiprocessing
import os
import shutil
import ssl
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
from load.collector import Collector, running
from load.fleet import shape_of
from load.measure import Plan, Run, drive
from page_block import EVIDENCE, put, when

from drover_collector.exporters.gpus import IdentityReader, LastXids
from drover_collector.exporters.otlp import MetricsEncoder
from drover_collector.exporters.page import FleetPage
from drover_collector.exporters.remote_write import Encoder, Snapshot, Snapshots
from drover_collector.exporters.settings import HARDWARE, FleetPageConfig
from drover_collector.fleet.buckets import Bucket
from drover_collector.fleet.index import FleetIndex
from drover_collector.store.records import EntityRow, entity_id
from drover_collector.store.samples.entities import EntityRegistry
from drover_core.metrics.catalog import BY_NAME, Scope
from drover_core.metrics.series import DCGM, DROVER, USUAL, series_of

WARM_S = 30.0  # until buckets are judged and the first export is over
GPUS_PER_STREAM = 250
SCRAPE_S = 15.0
MIB = 2**20
MODES = ("none", "page", "dcgm_page", "remote_write_1", "remote_write_2", "otlp")


def receive(port: Synchronized[int], taken: Synchronized[int], deaf_until_s: float) -> None:
    """Serve remote_write until killed. Before `deaf_until_s` (epoch) each connection is closed unread."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers["content-length"])
            self.rfile.read(size)
            taken.value += size
            self.send_response(204)
            self.send_header("x-prometheus-remote-write-samples-written", "1")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def verify_request(self, request: object, client_address: object) -> bool:  # noqa: ARG002  # as socketserver calls it
            return time.time() >= deaf_until_s

    server = Server(("127.0.0.1", 0), Handler)
    port.value = server.server_address[1]
    server.serve_forever()


@contextlib.contextmanager
def receiver(deaf_until_s: float) -> Iterator[tuple[int, Synchronized[int]]]:
    port, taken = multiprocessing.Value("i", 0), multiprocessing.Value("q", 0)
    child = multiprocessing.Process(target=receive, args=(port, taken, deaf_until_s), daemon=True)
    child.start()
    while not port.value:
        time.sleep(0.01)
    try:
        yield port.value, taken
    finally:
        child.kill()
        child.join()


class Scraper:
    """Reads a page every SCRAPE_S; `took_s` and `sizes` of each."""

    def __init__(self, collector: Collector, path: str) -> None:
        self._context = ssl.create_default_context(cafile=str(collector.folder / "ca.crt"))
        self._context.load_cert_chain(collector.folder / "viewer.pem")
        self._url = f"https://{collector._metrics}{path}"
        self.took_s: list[float] = []
        self.sizes: list[int] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(SCRAPE_S):
            began_s = time.monotonic()
            request = urllib.request.Request(self._url, headers={"accept-encoding": "gzip"})
            with urllib.request.urlopen(request, context=self._context, timeout=60) as answer:
                self.sizes.append(len(answer.read()))
            self.took_s.append(time.monotonic() - began_s)

    def close(self) -> None:
        self._end.set()
        self._thread.join(60)


def settings_of(mode: str, port: int, interval_s: float) -> str:
    if mode == "none":
        return ""
    if mode.endswith("page"):
        return '[export.page]\nnames = ["drover", "dcgm"]\n'
    if mode == "otlp":
        return (
            f'[[export.otlp]]\nname = "bench"\nurl = "http://127.0.0.1:{port}"\nsignals = ["metrics"]\n'
            f"interval_s = {interval_s}\n"
        )
    return (
        f'[[export.remote_write]]\nname = "bench"\nurl = "http://127.0.0.1:{port}/write"\n'
        f"version = {mode[-1]}\ninterval_s = {interval_s}\n"
    )


def measure(mode: str, plan: Plan, cut_s: float, interval_s: float) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="drover-bench-"))
    scraper = None
    try:
        with (
            receiver(time.time() + cut_s) as (port, taken),
            running(folder, plan.shape, settings=settings_of(mode, port, interval_s)) as collector,
        ):
            if mode.endswith("page"):
                scraper = Scraper(collector, "/metrics/dcgm" if mode.startswith("dcgm") else "/metrics/fleet")
            run = drive(collector, plan)
            found = figures(run)
            page = {name.replace("bench-metrics", "bench"): value for name, value in run.moments[-1].page.items()}
            found |= {
                name: page[f'drover_export_{name}{{exporter="bench"}}']
                for name in ("sent_total", "dropped_total", "refused_total", "failures_total", "waiting")
                if f'drover_export_{name}{{exporter="bench"}}' in page
            }
            if scraper is not None:
                scraper.close()
                found |= {
                    "scrapes": len(scraper.sizes), "page_mib": round(max(scraper.sizes, default=0) / MIB, 2),
                    "scrape_s_max": round(max(scraper.took_s, default=0.0), 2),
                }  # fmt: skip
            return found | {"received_mib": round(taken.value / MIB, 2)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def figures(run: Run) -> dict[str, Any]:
    moments = run.between(min(WARM_S, run.plan.run_s / 3), run.plan.run_s)
    first, last = moments[0], moments[-1]
    seconds = last.at_s - first.at_s
    acked = last.total("acked") - first.total("acked")
    waiting = [m.page.get('drover_export_waiting_bytes{exporter="bench"}', 0.0) for m in moments]
    return {
        "cpu": round((last.usage.cpu_s - first.usage.cpu_s) / seconds, 3),
        "lag_s_max": round(max(moment.lag_s for moment in moments), 2),
        "tick_s_max": round(max((m.status.detector_seconds for m in moments if m.status is not None), default=0.0), 2),
        "acked": round(acked),
        "ns_per_sample": round((last.usage.cpu_s - first.usage.cpu_s) / max(acked, 1) * 1e9, 1),
        "rss_mib_max": round(max(moment.usage.rss_bytes for moment in moments) / MIB),
        "spool_mib_max": round(max(waiting) / MIB, 1),
        "rejected": round(run.moments[-1].total("rejected")),
    }


def bucket_of(index: FleetIndex) -> Bucket:
    """A bucket of a busy fleet: each metric near one level, as its step has it; a job for each 64 GPUs."""
    random, count = np.random.default_rng(1), index.gpu_count
    columns = {}
    for name in {*USUAL, *HARDWARE}:
        metric = BY_NAME[name]
        level = {"power_w": 600.0, "gpu_temp_c": 60.0, "framebuffer_used_bytes": 6e10}.get(
            name, metric.step * 5000 or 1
        )
        values = random.normal(level, 0.1 * level, count).clip(metric.low, metric.high)
        columns[name] = np.round(values / metric.step) * metric.step if metric.step else values
    rows, nodes = np.full(count, 10, np.int32), np.full(index.node_count, 10, np.int32)
    jobs = tuple(f"job-{n}" for n in range(-(-count // 64)))
    return Bucket(1_790_000_000_000, 10_000, columns, {}, rows, nodes, (np.arange(count) // 64).astype(np.int32), jobs)


def parts(gpus: int) -> dict[str, dict[str, float]]:
    """CPU of each exporter's own work, the first pass (labels are made) and a later one."""
    index = FleetIndex(shape_of(gpus, 8).spec())
    rows = [
        EntityRow(entity_id(Scope.GPU, f"{node.name}/{slot}"), Scope.GPU, f"{node.name}/{slot}", node.name, slot,
                  uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node.name}/{slot}')}", pci=f"0000:{slot:02x}:00.0",
                  model="NVIDIA H100 80GB HBM3")
        for node in index.nodes for slot in range(node.gpus)
    ]  # fmt: skip
    reader, xids, bucket = IdentityReader(index, EntityRegistry(rows)), LastXids(index), bucket_of(index)
    known = reader.read(bucket)

    def page(naming: str) -> Callable[[], int]:
        made = FleetPage(naming, replace(FleetPageConfig(), interval_s=0), lambda: bucket, reader, xids)
        return lambda: made.read().size

    def encoder(make: Callable[[Snapshot, int, int], tuple[bytes, int]], metrics: Sequence[str]) -> Callable[[], int]:
        (snapshot,) = Snapshots(series_of(DROVER, metrics)).of(bucket, known, xids)
        step = 10_000 // len(metrics)
        return lambda: sum(len(make(snapshot, first, min(first + step, gpus))[0]) for first in range(0, gpus, step))

    families, work = series_of(DROVER, USUAL), {}
    for naming in (DROVER, DCGM):
        work[f"page {naming}"] = (page(naming), FleetPageConfig().interval_s)
    for version in (1, 2):
        work[f"remote_write {version}"] = (encoder(Encoder(families, DROVER, {}, version).request, USUAL), 30.0)
    metrics = MetricsEncoder(HARDWARE, {})

    def packed(snapshot: Snapshot, first: int, last: int) -> tuple[bytes, int]:
        body, count = metrics.request(snapshot, first, last)
        return gzip.compress(body, 1), count  # as over HTTP

    work["otlp"] = (encoder(packed, HARDWARE), 30.0)
    found = {}
    for name, (call, every_s) in work.items():
        cpu, size = [], 0
        for _ in range(3):
            began_s = time.process_time()
            size = call()
            cpu.append(time.process_time() - began_s)
        found[name] = {
            "first_cpu_s": round(cpu[0], 2), "cpu_s": round(min(cpu[1:]), 2), "every_s": every_s,
            "cores": round(min(cpu[1:]) / every_s, 4), "mib": round(size / MIB, 1),
        }  # fmt: skip
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=90.0, help="of load, for each exporter")
    parser.add_argument("--only", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--cut", type=float, default=0.0, help="seconds from the start in which the receiver is away")
    parser.add_argument("--interval", type=float, default=30.0, help="seconds between samples of remote_write")
    parser.add_argument("--parts", action="store_true", help="the exporters' own work alone, without a collector")
    parser.add_argument("--write", action="store_true", help="write the figures into docs/evidence/standards.md")
    args = parser.parse_args(argv)
    if args.parts:
        work = parts(args.gpus)
        print(json.dumps({"gpus": args.gpus, "parts": work}))
        if args.write:
            put(EVIDENCE / "standards.md", "work", work_lines(args.gpus, work))
        return
    load = os.getloadavg()[0]
    plan = Plan(shape_of(args.gpus, GPUS_PER_STREAM), 1, 3.0, 5.0, 5, args.seconds)
    found = {mode: measure(mode, plan, args.cut, args.interval) for mode in dict.fromkeys(args.only)}
    if none := found.get("none"):
        for figure in found.values():
            figure["cpu_ratio"] = round(figure["cpu"] / none["cpu"], 3)
            figure["ns_ratio"] = round(figure["ns_per_sample"] / max(none["ns_per_sample"], 0.1), 3)
    print(json.dumps({"gpus": args.gpus, "seconds": args.seconds, "cut_s": args.cut, "modes": found}))
    if args.write:
        loads = load, os.getloadavg()[0]
        put(EVIDENCE / "standards.md", "collector", mode_lines(args, found, loads))


def work_lines(gpus: int, work: dict[str, dict[str, float]]) -> list[str]:
    """Return the block of the exporters' own work."""
    return [
        f"CPU of one pass for {gpus:,} GPUs, `bench_exporters.py --parts`, run on {when()}:", "",
        "| exporter | first pass | a later one | every | cores | bytes of a pass |",
        "| --- | --- | --- | --- | --- | --- |",
        *(f"| {name} | {row['first_cpu_s']} s | {row['cpu_s']} s | {row['every_s']:g} s | {row['cores']} |"
          f" {row['mib']} MiB |" for name, row in work.items()),
    ]  # fmt: skip


def mode_lines(args: argparse.Namespace, found: dict[str, dict[str, Any]], loads: tuple[float, float]) -> list[str]:
    """Return the block of a whole collector."""
    columns = {
        "cpu": "cores", "cpu_ratio": "to none", "ns_per_sample": "CPU of a sample, ns", "ns_ratio": "to none",
        "lag_s_max": "oldest batch, s", "tick_s_max": "detectors, s", "rss_mib_max": "memory, MiB",
        "dropped_total": "dropped", "scrape_s_max": "slowest scrape, s",
    }  # fmt: skip
    away = f" The receiver was away for the first {args.cut:g} s." if args.cut else ""
    return [
        f"A collector with {args.gpus:,} GPUs at 1 Hz for {args.seconds:g} s with each, `bench_exporters.py`,",
        f"run on {when()}, {os.cpu_count()} cores, load {loads[0]:.1f} before and {loads[1]:.1f} after.{away}", "",
        f"| exporter | {' | '.join(columns.values())} |", "| --- |" + " --- |" * len(columns),
        *(f"| {mode} | {' | '.join(str(row.get(key, '')) for key in columns)} |" for mode, row in found.items()), "",
        "Where the oldest batch is as old as the run, the collector did not keep up: only CPU of a sample compares.",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
