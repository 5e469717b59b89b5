"""How small a straggler may be, how large its job, how seldom the samples: recall and delay as curves.

Fleets of the adversary (scoring seeds 20-39) with nothing wrong but stragglers that this script puts there: one GPU or
node of each training job at a time, suddenly, for 12 minutes. Severity is the share of speed that the unit loses.
Found: reported within 10 minutes. Writes three pictures to docs/images (`--no-write`: not) and prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from detection_run import OURS, play

from drover_cli.scoring.score import median, percentile
from drover_core.times import iso
from drover_simulator.adversary import AdversaryFleet, draw
from drover_simulator.adversary.trouble import Trouble

IMAGES = Path(__file__).parents[1] / "docs" / "images"
CAUSES = ("power_cap", "clock", "thermal", "hbm", "host")
SEVERITIES = (0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.10, 0.15, 0.20)
INTERVALS_S = (1, 2, 5, 10, 20, 30, 60)
STARTS_S = (1300.0, 2500.0)  # after loading and learning; far enough apart for the offsets to calm down
LASTS_S, IN_TIME_S = 720.0, 600.0
HOURS = 1.0
SIZES = ((8, 8), (16, 16), (32, 64), (65, 256), (257, 2048))  # GPUs of the job
Record = tuple[str, float, int, float | None]  # cause, severity, GPUs of the job, delay


def with_stragglers(fleet: AdversaryFleet, severities: Sequence[float]) -> AdversaryFleet:
    """The fleet with a straggler in each of its training jobs at STARTS_S."""
    rng = np.random.default_rng([fleet.seed, 200])
    hw = fleet.hardware
    troubles: list[Trouble] = []
    labels: list[dict[str, Any]] = []
    for number, job in enumerate(fleet.jobs):
        for start_s in STARTS_S:
            settled = job.ready_s() + 300 < start_s and job.end_s > start_s + LASTS_S + 60
            if not job.trains or not settled:
                continue
            causes = CAUSES if len(job.nodes) > 1 else CAUSES[:-1]
            cause, severity = str(rng.choice(causes)), float(rng.choice(severities))
            node = int(rng.choice(job.nodes))
            mine = job.gpus[hw.gpu_node[job.gpus] == node]
            gpus = mine if cause == "host" else np.array([int(rng.choice(mine))])
            gpu = None if cause == "host" else int(hw.gpu_slot[gpus[0]])
            id_ = f"s{len(labels) + 1:03d}"
            facts = {"silent": float(rng.random() < 0.5), "busy": 0.8}
            links = np.flatnonzero(hw.link_node == node)
            end_s = start_s + LASTS_S
            troubles.append(
                Trouble(
                    id_, "straggler", cause, gpus, np.array([node]), links, number, start_s, end_s, severity, "sudden",
                    facts=facts,
                )
            )  # fmt: skip
            labels.append(
                {
                    "id": id_, "kind": "straggler", "cause": cause, "node": hw.names[node], "gpu": gpu,
                    "members": [[hw.names[node], gpu]], "hardware": True, "severity": severity,
                    "job_gpus": len(job.gpus), "start": iso(fleet.start_ms + round(start_s * 1000)),
                    "end": iso(fleet.start_ms + round(end_s * 1000)), "scope": "node" if gpu is None else "gpu",
                }
            )  # fmt: skip
    return replace(fleet, troubles=troubles, labels=labels)


def one(job: tuple[int, int], gpus: int, severities: Sequence[float]) -> tuple[int, list[Record]]:
    """(seed, interval in ms) -> the interval and what became of each straggler."""
    seed, interval_ms = job
    quiet = draw(seed, gpus=gpus, hours=HOURS, faults_per_1000_gpu_days=0.0, negatives_per_1000_gpu_days=0.0)
    p = play(with_stragglers(quiet, severities), interval_ms, {})[OURS]
    return interval_ms, [(c, p.severity[i], p.job_gpus[i], p.delays_s.get(i)) for i, (_, c) in p.faults.items()]


def found_share(records: Sequence[Record]) -> tuple[float, int]:
    """Share reported in time, of how many."""
    hits = sum(delay is not None and delay <= IN_TIME_S for *_, delay in records)
    return hits / len(records) if records else float("nan"), len(records)


def svg(title: str, x_label: str, y_label: str, xs: Sequence[str], lines: Mapping[str, Sequence[float | None]]) -> str:
    """A picture of lines over named places."""
    width, height, left, top, right, low = 720, 380, 64, 44, 170, 52
    colours = ("#0b6e99", "#c2410c", "#4d7c0f", "#7c3aed", "#be123c", "#525252")
    known = [y for ys in lines.values() for y in ys if y is not None]
    highest = max(known, default=1.0)
    step = 10.0 ** math.floor(math.log10(max(highest, 1.0) / 5))
    most = 1.0 if highest <= 1.0 else 5 * next(n * step for n in (1, 2, 5, 10) if 5 * n * step >= highest)

    def at(i: int, y: float) -> tuple[float, float]:
        wide = (width - left - right) / max(1, len(xs) - 1)
        return left + i * wide, height - low - y / most * (height - low - top)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/><text x="{left}" y="24" font-size="15">{title}</text>',
        f'<text x="{left}" y="{height - 10}">{x_label}</text><text x="6" y="{top - 14}">{y_label}</text>',
    ]
    for k in range(6):
        x, y = at(0, most * k / 5)
        parts.append(f'<line x1="{x}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4:.1f}" text-anchor="end">{most * k / 5:.3g}</text>')
    for i, name in enumerate(xs):
        parts.append(f'<text x="{at(i, 0)[0]:.1f}" y="{height - low + 18}" text-anchor="middle">{name}</text>')
    for number, (name, ys) in enumerate(lines.items()):
        colour = colours[number % len(colours)]
        points = [at(i, y) for i, y in enumerate(ys) if y is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        y = top + 18 * number
        parts.append(f'<text x="{width - right + 14}" y="{y + 4}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _known(value: float) -> float | None:
    return None if value != value else round(value, 4)  # NaN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleets", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=512)
    parser.add_argument("--first-seed", type=int, default=20, help="for trying out: 1000 and more")
    parser.add_argument("--intervals", type=int, nargs="*", default=list(INTERVALS_S), help="seconds")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--no-write", action="store_true", help="leave docs/images unchanged")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.fleets)
    records: list[Record] = []
    of_interval: dict[int, list[Record]] = defaultdict(list)
    few = seeds[: max(1, args.fleets // 5)]  # 1 s samples take ten times the time
    with multiprocessing.get_context("spawn").Pool(args.processes, maxtasksperchild=1) as pool:
        for _, some in pool.imap_unordered(
            partial(one, gpus=args.gpus, severities=SEVERITIES), [(seed, 10_000) for seed in seeds]
        ):
            records += some
            print(f"{len(records)} stragglers", file=sys.stderr, flush=True)
        for interval_ms, some in pool.imap_unordered(
            partial(one, gpus=args.gpus, severities=(0.10,)), [(s, 1000 * i) for i in args.intervals for s in few]
        ):
            of_interval[interval_ms] += some
    by_severity = {
        cause: [found_share([r for r in records if r[0] == cause and r[1] == s]) for s in SEVERITIES]
        for cause in CAUSES
    }
    by_severity["all"] = [found_share([r for r in records if r[1] == s]) for s in SEVERITIES]
    bands = {"3-5 %": (0.03, 0.05), "7-10 %": (0.07, 0.10), "15-20 %": (0.15, 0.20)}
    by_size = {
        name: [found_share([r for r in records if a <= r[2] <= b and low <= r[1] <= high]) for a, b in SIZES]
        for name, (low, high) in bands.items()
    }
    delays = {i: [r[3] for r in of_interval[1000 * i] if r[3] is not None] for i in args.intervals}
    result: dict[str, Any] = {
        "benchmark": "sensitivity", "seeds": [seeds[0], seeds[-1]], "gpus": args.gpus, "stragglers": len(records),
        "recall_by_severity": {
            name: {f"{s:g}": [_known(v), n] for s, (v, n) in zip(SEVERITIES, row, strict=True)}
            for name, row in by_severity.items()
        },
        "recall_3_to_5_percent": _known(found_share([r for r in records if 0.03 <= r[1] <= 0.05])[0]),
        "recall_by_job_gpus": {
            name: {f"{a}-{b}": [_known(v), n] for (a, b), (v, n) in zip(SIZES, row, strict=True)}
            for name, row in by_size.items()
        },
        "delay_s_by_interval_s": {
            str(i): {"median": median(d), "p95": percentile(d, 0.95), "of": len(of_interval[1000 * i])}
            for i, d in delays.items()
        },
    }  # fmt: skip
    if not args.no_write:
        sizes = [str(a) if a == b else f"{a}-{b}" for a, b in SIZES]
        for name, text in (
            ("recall_severity.svg", svg(
                "Stragglers reported within 10 minutes", "speed that the unit loses", "recall",
                [f"{s:.0%}" for s in SEVERITIES], {k: [_known(v) for v, _ in row] for k, row in by_severity.items()},
            )),
            ("recall_job_size.svg", svg(
                "Stragglers reported within 10 minutes", "GPUs of the job", "recall", sizes,
                {k: [_known(v) for v, _ in row] for k, row in by_size.items()},
            )),
            ("delay_interval.svg", svg(
                "Time to report a GPU that lost 10 % of its speed", "seconds between samples", "seconds",
                [str(i) for i in args.intervals],
                {"median": [median(d) for d in delays.values()], "p95": [percentile(d, 0.95) for d in delays.values()]},
            )),
        ):  # fmt: skip
            (IMAGES / name).write_text(text, encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
