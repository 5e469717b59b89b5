"""How small a slowdown of a whole job is found, how fast, and at what price in false alarms, on made-up step series.

    python benchmarks/bench_slowdown.py [--weeks 100] [--jobs 400] [--no-write]

Jobs are drawn by tests/testbed/step_series.py, by `tuning` (thresholds were set by these) and by `scoring` (another
structure, other seeds). Each reports to the detector's tests as its buckets have it; that rows of a store become the
same values is tested elsewhere. Writes docs/evidence/slowdown.md and prints one JSON line for each kind.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from drover_collector.detectors._lib.examples import START_MS
from drover_collector.detectors.slowdown.change import medians
from drover_collector.detectors.slowdown.detector import SlowdownState, advance
from drover_collector.detectors.slowdown.series import Shape, Steps
from drover_collector.detectors.slowdown.telemetry import PART, more_work
from drover_collector.fleet.buckets import BUCKET_MS
from testbed.step_series import FLOPS, TOKENS, JobPlan, Row, figures, rows, scoring, slowed, tuning

PAGE = ROOT / "docs/evidence/slowdown.md"
SIZES = (0.03, 0.05, 0.10, 0.20)
HOURS = 24.0  # of a healthy job
LAG_S = 7  # a bucket is judged so long after its end
GOAL_S, GOAL_FALSE = 180, 0.1
STEADY = 0.01  # deviation of the means of a minute, log
DRAWS = {"tuning": tuning, "scoring": scoring}
FIRST_SEED = {"tuning": 0, "scoring": 30_000}
WEEK_HOURS = 168


ABOUT = (
    "Written by `benchmarks/bench_slowdown.py`, at {commit}. Jobs are made up (`tests/testbed/step_series.py`): "
    "steps of 0.15 to 45 s, noise of a step of 0.1 to 5 %, noise that wanders, uneven batches, saves with and "
    "without `reset`, saves in the background, evaluations that are reported as steps, generated samples, "
    "restarts, growing sequences, slow first minutes, reports that are missing. Thresholds were set by the jobs "
    "of `tuning`. Those of `scoring` have another structure: at their first playing (seeds 20,000 on, 105 "
    "job-weeks) 23 warnings were false, 0.219 a job-week, 11 of them in the first 90 minutes of a job. Then four "
    "thresholds became more careful, by seeds from 10,000 on, so the figures below are of seeds that were not "
    "played before, but not of a structure that was not seen before. Nothing of this is measured on a real "
    "cluster."
)
FOUND = (
    "A job that is slower from a minute on, for an hour. Steady: the means of its minutes differ by 1 % at most, "
    "and its steps are shorter than a bucket. Above 11 %, where nothing shows that the work of a step is the "
    "same, the detector waits for 7 minutes, above 40 % for 10: an evaluation looks like that."
)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A warning: seconds after the job's begin, and the size that it gave, log."""

    at_s: float
    effect: float


def alarms_of(plan: JobPlan, seed: int) -> tuple[list[Alarm], list[Row]]:
    """Return the warnings about one job, and what it reported."""
    state, found, seen = SlowdownState(), [], list(rows(plan, seed))
    gpus, nodes = np.arange(8 * plan.nodes), tuple(range(plan.nodes))
    for row in seen:
        tensor, network = figures(plan, row)
        known = (tensor, math.nan, 1755.0, math.nan, math.nan, network) if plan.tensor else (math.nan,) * 6
        flops = FLOPS * row.flops if plan.flops else math.nan
        steps = Steps("pretrain", "812", nodes, gpus, row.step_s, Shape(TOKENS * row.tokens, flops))
        track = advance(state, steps, np.array(known), START_MS + (row.bucket + 1) * BUCKET_MS)
        if track is None:
            continue
        change = track.change
        now = medians(np.array([one.extra for one in change.recent]))
        other = more_work(change.past.usual_extra(), now, change.effect) >= PART * change.effect
        if not other or track.since_restart is not None:  # else it is information
            found.append(Alarm((row.bucket + 1) * BUCKET_MS / 1000 + LAG_S, change.effect))
    return found, seen


def is_steady(seen: list[Row], before_s: float) -> bool:
    """Return whether the minutes of the half hour before differ little, and steps are shorter than a bucket."""
    mine = [row for row in seen if before_s - 1800 <= row.bucket * BUCKET_MS / 1000 < before_s - 10]
    if len(mine) < 100:
        return False
    costs = np.log([row.step_s / row.flops for row in mine])
    minutes = np.array([costs[at : at + 6].mean() for at in range(0, len(costs) - 5, 6)])
    return float(minutes.std()) <= STEADY


def slowdowns(draw: Callable[[int, float], JobPlan], first: int, jobs: int, by: float) -> dict[str, Any]:
    """Return how many of the jobs that get slower are found within the hour, and how fast."""
    delays: list[float] = []
    steady: list[float] = []
    for seed in range(first, first + jobs):
        at_s = 5400.0 + (seed * 37) % 1500
        found, seen = alarms_of(slowed(draw(seed, 3.0), at_s, by), seed)
        delay = next((alarm.at_s - at_s for alarm in found if alarm.at_s > at_s + 30), math.inf)
        delays.append(delay)
        if is_steady(seen, at_s):
            steady.append(delay)
    return {"size": by, "all": figures_of(delays), "steady": figures_of(steady)}


def figures_of(delays: list[float]) -> dict[str, Any]:
    """Return the share found, and median and 95th percentile of the delay of those that were found, in seconds."""
    known = [delay for delay in delays if delay < math.inf]
    return {
        "jobs": len(delays), "found": round(len(known) / max(1, len(delays)), 3),
        "in_goal": round(sum(delay <= GOAL_S for delay in delays) / max(1, len(delays)), 3),
        "median_s": round(float(np.median(known))) if known else None,
        "p95_s": round(float(np.quantile(known, 0.95))) if known else None,
    }  # fmt: skip


def healthy(draw: Callable[[int, float], JobPlan], first: int, weeks: float) -> dict[str, Any]:
    """Return the false alarms over so many weeks of healthy jobs."""
    jobs = math.ceil(weeks * WEEK_HOURS / HOURS)
    false = {seed: found for seed in range(first, first + jobs) if (found := alarms_of(draw(seed, HOURS), seed)[0])}
    count = sum(map(len, false.values()))
    played = jobs * HOURS / WEEK_HOURS
    return {
        "weeks": round(played, 1), "false": count, "per_week": round(count / played, 3),
        "seeds": {seed: [(round(a.at_s), round(a.effect, 3)) for a in found] for seed, found in false.items()},
    }  # fmt: skip


def page(results: dict[str, dict[str, Any]], commit: str) -> str:
    """Return docs/evidence/slowdown.md."""
    lines = [
        "# Slowdown: jobs that slow as a whole", "", _wrapped(ABOUT.format(commit=commit)), "",
        "## False alarms", "",
        "| jobs | job-weeks | false warnings | a job-week | goal |", "| --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {each['healthy']['weeks']:g} | {each['healthy']['false']} |"
            f" {each['healthy']['per_week']:.3f} | {GOAL_FALSE:g} |"
            for name, each in results.items()
        ), "",
        "## Found", "", _wrapped(FOUND), "",
        "| jobs | slower by | found, steady | within 3 min | median | p95 | found, all | within 3 min | median | p95 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {row['size']:.0%} | {_cells(row['steady'])} | {_cells(row['all'])} |"
            for name, each in results.items()
            for row in each["slowdowns"]
        ), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False)


def _cells(each: dict[str, Any]) -> str:
    times = [f"{each[key]} s" if each[key] is not None else "-" for key in ("median_s", "p95_s")]
    return f"{each['found']:.3f} of {each['jobs']} | {each['in_goal']:.3f} | {times[0]} | {times[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weeks", type=float, default=100.0, help="of healthy jobs, of each kind")
    parser.add_argument("--jobs", type=int, default=400, help="that get slower, of each kind and size")
    parser.add_argument("--only", default="", choices=["", *DRAWS], help="jobs of this kind alone; writes no page")
    parser.add_argument("--page-of", type=Path, metavar="FILE", help="write the page of what a run printed, and end")
    parser.add_argument("--no-write", action="store_true", help="leave docs/evidence/slowdown.md unchanged")
    args = parser.parse_args()
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    if args.page_of:
        lines = [json.loads(line) for line in args.page_of.read_text("utf-8").splitlines()]
        PAGE.write_text(page({line["jobs"]: line for line in lines}, lines[0]["commit"]), "utf-8")
        return
    results = {}
    for name, draw in DRAWS.items():
        if args.only not in ("", name):
            continue
        first = FIRST_SEED[name]
        found = [slowdowns(draw, first, args.jobs, by) for by in SIZES]
        results[name] = {
            "jobs": name,
            "commit": head.stdout.strip(),
            "slowdowns": found,
            "healthy": healthy(draw, first, args.weeks),
        }
        print(json.dumps(results[name]), flush=True)
    if not args.no_write and not args.only:
        PAGE.write_text(page(results, head.stdout.strip()), "utf-8")


if __name__ == "__main__":
    main()
