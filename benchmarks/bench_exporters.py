"""CPU of a real collector with each exporter on, next to none: the same load, one collector after the other.

The load is that of bench_ingest.py: mutual TLS, a durable store, detectors on. A scraper asks for the page every 15 s
with gzip, as Prometheus does; remote_write goes to a receiver in a process of its own that reads and counts. With
--cut the receiver answers nothing for the first so many seconds, and then takes what has waited. Prints one JSON line:
CPU in cores, its ratio to none, how long acknowledgements took, what the exporter sent, dropped and still holds.

    python benchmarks/bench_exporters.py [--gpus 100000] [--seconds 90] [--only none page remote_write_1] [--cut 600]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import shutil
import socketserver
import ssl
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from load.collector import Collector, running
from load.fleet import shape_of
from load.measure import Plan, Run, drive

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

    server: socketserver.BaseServer = Server(("127.0.0.1", 0), Handler)
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
    waiting = [m.page.get('drover_export_waiting_bytes{exporter="bench"}', 0.0) for m in moments]
    return {
        "cpu": round((last.usage.cpu_s - first.usage.cpu_s) / seconds, 3),
        "lag_s_max": round(max(moment.lag_s for moment in moments), 2),
        "tick_s_max": round(max((m.status.detector_seconds for m in moments if m.status is not None), default=0.0), 2),
        "acked": round(last.total("acked") - first.total("acked")),
        "rss_mib_max": round(max(moment.usage.rss_bytes for moment in moments) / MIB),
        "spool_mib_max": round(max(waiting) / MIB, 1),
        "rejected": round(run.moments[-1].total("rejected")),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=90.0, help="of load, for each exporter")
    parser.add_argument("--only", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--cut", type=float, default=0.0, help="seconds from the start in which the receiver is away")
    parser.add_argument("--interval", type=float, default=30.0, help="seconds between samples of remote_write")
    args = parser.parse_args(argv)
    plan = Plan(shape_of(args.gpus, GPUS_PER_STREAM), 1, 3.0, 5.0, 5, args.seconds)
    found = {mode: measure(mode, plan, args.cut, args.interval) for mode in dict.fromkeys(args.only)}
    if none := found.get("none"):
        for figure in found.values():
            figure["cpu_ratio"] = round(figure["cpu"] / none["cpu"], 3)
    print(json.dumps({"gpus": args.gpus, "seconds": args.seconds, "cut_s": args.cut, "modes": found}))


if __name__ == "__main__":
    main()
