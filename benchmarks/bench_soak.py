"""A collector under steady load for a long time: memory, parts and merges of the store, latencies; flat or not.

Streams of 250 GPUs (--per-stream 8: an agent each), a message of 5 s each, mutual TLS, detectors on; meanwhile a
console asks for the picture of the fleet and an hour of a node. Writes a picture (docs/images/soak.svg for the long
form) and prints one JSON line with slopes after the warm-up.

    python benchmarks/bench_soak.py --minutes 30 --gpus 20000 --picture docs/images/soak.svg
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from load.collector import MERGES, Collector, running
from load.fleet import name, shape_of
from load.measure import Moment, Plan, Run, drive, slope
from load.picture import Chart, Line, svg

from drover_proto import fleet_pb2 as pb

MIB = 2**20
LOOK_S = 5.0
CALL_S = 30.0
HOUR_MS = 3_600_000
NAN = float("nan")
PART = re.compile(r"[0-9A-Za-z-]+_\d+_\d+_\d+(_\d+)?")  # PARTITION_FIRST_LAST_LEVEL, as ClickHouse names them
WRITES = ('drover_write_seconds_sum{what="telemetry"}', 'drover_write_seconds_count{what="telemetry"}')


class Console:
    """What a console asks now and then, and how long each answer took."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self.took: dict[str, list[tuple[float, float]]] = {"picture": [], "node, 1 h": []}
        self.parts: list[tuple[float, float]] = []
        self.failures: dict[str, int] = {}

    def ask(self, moment: Moment) -> None:
        at_s, stub = moment.at_s, self._collector.stub
        self._time("picture", at_s, lambda: stub.GetPicture(pb.PictureRequest(color_by="power_w"), timeout=CALL_S))
        now_ms = time.time_ns() // 1_000_000
        request = pb.SeriesRequest(
            scope="gpu", targets=[pb.SeriesTarget(node=name(0), gpu=slot) for slot in range(8)],
            metrics=["power_w", "gpu_temp_c"], from_ms=now_ms - HOUR_MS, to_ms=now_ms,
        )  # fmt: skip
        self._time("node, 1 h", at_s, lambda: stub.QuerySeries(request, timeout=CALL_S))
        self.parts.append((at_s, float(parts_on_disk(self._collector.folder / "store"))))

    def _time(self, what: str, at_s: float, call: Any) -> None:
        began_s = time.monotonic()
        try:
            call()
        except grpc.RpcError as error:
            self.failures[f"{what}: {error.code().name}"] = self.failures.get(f"{what}: {error.code().name}", 0) + 1
            return
        self.took[what].append((at_s, time.monotonic() - began_s))


def parts_on_disk(store: Path) -> int:
    """Those that were merged into others stay for some minutes, so that the count is steady only after these."""
    count = 0
    for _, folders, _ in os.walk(store):
        found = [folder for folder in folders if PART.fullmatch(folder)]
        count += len(found)
        folders[:] = [folder for folder in folders if folder not in found]
    return count


def series(run: Run, console: Console) -> dict[str, list[tuple[float, float]]]:
    """(seconds, value) of all that is watched; what the page does not show is NaN."""
    moments = [moment for moment in run.moments if moment.at_s <= run.plan.run_s]
    found = {
        "rss_mib": [(m.at_s, m.usage.rss_bytes / MIB) for m in moments],
        "lag_s": [(m.at_s, m.lag_s) for m in moments],
        "tick_s": [(m.at_s, m.status.detector_seconds) for m in moments if m.status is not None],
        "status_s": [(m.at_s, m.status_s) for m in moments],
        "threads": [(m.at_s, float(m.usage.threads)) for m in moments],
        "parts": console.parts,
        "picture_s": console.took["picture"],
        "node_hour_s": console.took["node, 1 h"],
    }
    found["cpu"], found["merge_cpu"], found["insert_s"] = [], [], []
    for before, after in itertools.pairwise(moments):
        passed_s = max(after.at_s - before.at_s, 1e-9)
        found["cpu"].append((after.at_s, (after.usage.cpu_s - before.usage.cpu_s) / passed_s))
        merged_s = [sum(m.usage.by_thread.get(part, 0.0) for part in MERGES) for m in (before, after)]
        found["merge_cpu"].append((after.at_s, (merged_s[1] - merged_s[0]) / passed_s))
        spent_s, count = (after.page.get(key, NAN) - before.page.get(key, NAN) for key in WRITES)
        found["insert_s"].append((after.at_s, spent_s / count if count else NAN))
    return {key: [(at, value) for at, value in points if at >= 0] for key, points in found.items()}


def picture(found: dict[str, list[tuple[float, float]]], gpus: int) -> str:
    charts = [
        Chart("Memory of the collector", "MiB", [Line("", found["rss_mib"])]),
        Chart("CPU", "cores", [Line("collector", found["cpu"]), Line("of it merges", found["merge_cpu"])]),
        Chart("From due to acknowledged, the slowest agent", "s", [Line("", found["lag_s"])]),
        Chart("Parts of the store on disk, merged ones until they go", "parts", [Line("", found["parts"])]),
        Chart(
            "Reading and judging a bucket of 10 s; one insert", "s",
            [Line("bucket", found["tick_s"]), Line("insert", found["insert_s"])],
        ),
        Chart(
            "Answers", "s",
            [Line("fleet picture", found["picture_s"]), Line("node, 1 h", found["node_hour_s"])],
        ),
    ]  # fmt: skip
    drawn = [chart for chart in charts if any(value == value for line in chart.lines for _, value in line.points)]
    return svg(f"Soak: {gpus:,} GPUs at 1 Hz, all GPU metrics, mutual TLS, generator on the same machine", drawn)


def line_of(run: Run, console: Console, found: dict[str, list[tuple[float, float]]], warm_s: float) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for key, points in found.items():
        kept = [(at, value) for at, value in points if at >= warm_s and value == value]
        if not kept:
            figures[key] = None
            continue
        values = sorted(value for _, value in kept)
        figures[key] = {
            "first": round(kept[0][1], 3),
            "median": round(values[len(values) // 2], 3),
            "p95": round(values[int(0.95 * (len(values) - 1))], 3),
            "last": round(kept[-1][1], 3),
            "per_hour": round(slope([at for at, _ in kept], [value for _, value in kept]) * 3600, 3),
        }
    rss = figures["rss_mib"] or {"first": NAN, "last": NAN}
    end = run.moments[-1]
    return {
        "benchmark": "soak",
        "cores": os.cpu_count(),
        "gpus": run.plan.shape.total,
        "minutes": round(run.plan.run_s / 60, 1),
        "warm_up_minutes": round(warm_s / 60, 1),
        "samples": round(end.total("acked")),
        "samples_per_s": round(end.total("acked") / run.plan.run_s),
        "unacknowledged_at_end": round(end.total("offered") - end.total("acked")),
        "rss_last_to_first": round(rss["last"] / rss["first"], 3),
        "generator_cpu": round(end.total("cpu_s") / run.plan.run_s, 3),
        "failures": round(end.total("failures")),
        "reasons": {k: v for generator in run.last for k, v in generator.get("reasons", {}).items()},
        "rejected": round(end.total("rejected")),
        "backoffs": round(end.total("backoffs")),
        "failed_questions": console.failures,
        "troubles": list(end.status.troubles)[:5] if end.status is not None else ["no Status"],
        **figures,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--gpus", type=int, default=20_000)
    parser.add_argument("--per-stream", type=int, default=250, metavar="GPUS")
    parser.add_argument("--warm-up", type=float, help="minutes that do not count (default: a fifth, at most 5)")
    parser.add_argument("--picture", type=Path, help="where to write the picture (default: nowhere)")
    args = parser.parse_args(argv)
    warm_s = 60 * (args.warm_up if args.warm_up is not None else min(5.0, args.minutes / 5))
    plan = Plan(shape_of(args.gpus, args.per_stream), 1, 3.0, 5.0, 5, args.minutes * 60)
    folder = Path(tempfile.mkdtemp(prefix="drover-bench-"))
    try:
        with running(folder, plan.shape) as collector:
            console = Console(collector)
            run = drive(collector, plan, LOOK_S, console.ask)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = series(run, console)
    if args.picture is not None:
        args.picture.write_text(picture(found, args.gpus), "utf-8")
    print(json.dumps(line_of(run, console, found, warm_s)))


if __name__ == "__main__":
    main()
