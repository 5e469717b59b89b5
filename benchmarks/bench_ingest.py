"""Ingest by a real collector: mutual TLS, validation, a durable store, detectors on; at growing fleets.

Each stream speaks for a node of 250 GPUs (slots have a byte, so 100,000 GPUs need 400 streams; a real fleet has 12,500
streams of 8 GPUs, whose messages cost more: that is what `--streams` measures). A message holds 5 s of telemetry. The
generator shares the machine: its CPU is printed by itself. Prints one JSON line.

    python benchmarks/bench_ingest.py [--sizes 1000 10000 100000] [--seconds 45]
    python benchmarks/bench_ingest.py --streams 12500 [--every 30] [--seconds 180]      streams of 8 GPUs, all open
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load.collector import running
from load.fleet import Shape, shape_of
from load.measure import Plan, Run, cpu_by_thread, drive, slope

WARM_S = 15.0  # of the load, before figures count
GPUS_PER_STREAM = 250
MIB = 2**20
TALK = ("event loop", "event_engine")  # threads that receive, parse and answer: what a message costs, whatever is in it
KEPT_UP_S = 15.0  # a lag below this at the end, and no growing one, is no backlog: two messages and an Ack


def measure(plan: Plan) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="drover-bench-"))
    try:
        with running(folder, plan.shape) as collector:
            run = drive(collector, plan)
            return figures(run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def figures(run: Run) -> dict[str, Any]:
    """What a run came to, between the end of its warm-up and the end of its load."""
    plan = run.plan
    moments = run.between(min(WARM_S, plan.run_s / 3), plan.run_s)
    first, last, end = moments[0], moments[-1], run.moments[-1]
    seconds = last.at_s - first.at_s
    values = last.total("acked") - first.total("acked")
    cpu_s = last.usage.cpu_s - first.usage.cpu_s
    generator_s = last.total("cpu_s") - first.total("cpu_s")
    rss = [moment.usage.rss_bytes / MIB for moment in moments]
    anonymous = [moment.usage.anonymous_bytes / MIB for moment in moments]
    grown = slope([moment.at_s for moment in moments], rss) * 60
    acked_in_all, ticks = end.total("acked"), [m.status.detector_seconds for m in moments if m.status is not None]
    parts = cpu_by_thread(first.usage, last.usage)
    talk_s = sum(parts.get(thread, 0.0) for thread in TALK)
    lag_grows = slope([moment.at_s for moment in moments], [moment.lag_s for moment in moments])
    return {
        "gpus": plan.shape.total,
        "streams": plan.shape.streams,
        "seconds": round(seconds, 1),
        "offered_samples_per_s": round((last.total("offered") - first.total("offered")) / seconds),
        "stored_samples_per_s": round(values / seconds),
        "messages_per_s": round(plan.shape.streams / plan.every_s),
        "lag_s": {"first": round(first.lag_s, 2), "last": round(last.lag_s, 2), "grows_s_per_s": round(lag_grows, 4)},
        "waiting_mib": {"first": _mib(first.waiting_bytes), "last": _mib(last.waiting_bytes)},
        "kept_up": last.lag_s < KEPT_UP_S + plan.every_s and lag_grows < 0.05,
        "unacknowledged_at_end": round(end.total("offered") - acked_in_all),
        "rss_mib": {
            "first": round(rss[0]), "last": round(rss[-1]), "max": round(max(rss)), "per_minute": round(grown, 1),
        },
        "rss_mib_ever": round(max(moment.usage.rss_bytes for moment in run.moments) / MIB),
        "rss_mib_at_rest": round(run.moments[0].usage.rss_bytes / MIB),
        "anonymous_mib": {
            "rest": round(run.moments[0].usage.anonymous_bytes / MIB), "last": round(anonymous[-1]),
            "max": round(max(anonymous)),
        },
        "collector_cpu": round(cpu_s / seconds, 3),
        "generator_cpu": round(generator_s / seconds, 3),
        "collector_ns_per_sample": round(cpu_s / max(values, 1) * 1e9, 1),
        "messages_ms_each": round(1e3 * talk_s / (seconds * plan.shape.streams / plan.every_s), 3),
        "cpu_by_thread": {name: round(spent / seconds, 3) for name, spent in parts.items()},
        "detector_tick_s": {"median": _median(ticks), "max": round(max(ticks, default=0.0), 2)},
        "status_answer_s_max": round(max(moment.status_s for moment in moments), 2),
        "opening": opening(run),
        "streams_open": round(last.total("opened")),
        "welcomes": round(end.total("welcomes")),
        "failures": round(end.total("failures")),
        "rejected": round(end.total("rejected")),
        "backoffs": round(end.total("backoffs")),
        "turns": round(end.total("turns")),
        "sent_away": round(end.total("sent_away")),
        "reasons": dict(sum((Counter(generator.get("reasons", {})) for generator in run.last), Counter[str]())),
        "troubles": list(last.status.troubles)[:5] if last.status is not None else ["no Status"],
    }  # fmt: skip


def opening(run: Run) -> dict[str, Any]:
    """What it cost until the first moment at which all streams were open at once."""
    streams = run.plan.shape.streams
    before = [moment for moment in run.moments if not moment.total("welcomes") and not moment.total("failures")]
    after = [moment for moment in run.moments if moment.total("opened") >= streams]
    if not before or not after:
        return {"all_open": False, "most_open": round(max((m.total("opened") for m in run.moments), default=0.0))}
    first, last = before[-1], after[0]
    cpu_s, parts = last.usage.cpu_s - first.usage.cpu_s, cpu_by_thread(first.usage, last.usage)
    generator_s = last.total("cpu_s") - first.total("cpu_s")
    return {
        "all_open": True,
        "within_s": round(last.at_s + run.plan.open_s, 1),  # from when the first was to open
        "cpu_ms_each": round(1e3 * cpu_s / streams, 2),
        "talk_cpu_ms_each": round(1e3 * sum(parts.get(thread, 0.0) for thread in TALK) / streams, 2),
        "generator_cpu_ms_each": round(1e3 * generator_s / streams, 2),
        "fewest_open_since": min(
            (round(m.total("opened")) for m in run.between(last.at_s, run.plan.run_s)), default=None
        ),
        "failures": round(last.total("failures")),
    }


def _median(values: Sequence[float]) -> float:
    return round(sorted(values)[len(values) // 2], 2) if values else 0.0


def _mib(count: float) -> float | None:
    return None if count != count else round(count / MIB, 2)  # NaN: the page does not say


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000], help="GPUs")
    parser.add_argument("--seconds", type=float, default=45.0, help="of load, for each size")
    parser.add_argument("--streams", type=int, help="so many streams of 8 GPUs instead")
    parser.add_argument("--every", type=float, help="seconds between messages of a stream")
    parser.add_argument("--ticks", type=int, help="seconds of telemetry in a message (default: as many as pass)")
    parser.add_argument("--open", type=float, default=60.0, help="seconds within which the streams of --streams open")
    args = parser.parse_args(argv)
    if args.streams:
        every_s = args.every or 30.0
        shape = Shape(args.streams, 8)
        plans = [Plan(shape, 3, args.open, every_s, args.ticks or 1, args.seconds)]
    else:
        every_s = args.every or 5.0
        ticks = args.ticks or round(every_s)
        plans = [Plan(shape_of(size, GPUS_PER_STREAM), 1, 3.0, every_s, ticks, args.seconds) for size in args.sizes]
    found = []
    for plan in plans:
        found.append(measure(plan))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    line = {"benchmark": "ingest", "cores": os.cpu_count(), "message_s": every_s, "sizes": found}
    if len(found) > 1:
        small, large = found[0], found[-1]
        line["cpu_per_sample_large_to_small"] = round(
            large["collector_ns_per_sample"] / small["collector_ns_per_sample"], 3
        )
        line["gpus_large_to_small"] = large["gpus"] / small["gpus"]
        line["rss_large_to_small"] = round(large["rss_mib"]["max"] / small["rss_mib"]["max"], 2)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
