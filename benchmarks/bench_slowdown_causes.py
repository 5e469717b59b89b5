"""Slow jobs by what slowed them, and jobs whose loops report nothing: what is found, how fast, and what is blamed.

    nice python benchmarks/bench_slowdown_causes.py --rows FILE [--runs 24] [--weeks 30] [--jobs 100] [--page]

Jobs are drawn by tests/testbed/job_telemetry.py, which makes what each GPU and port shows from the steps. Each job of a
kind is played to the whole detector, on 64 GPUs in two racks, once with a loop that reports and once without. Jobs
without a loop are also played alone, for weeks, to count false warnings. Writes docs/evidence/slowdown-causes.md.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import subprocess
import sys
import textwrap
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from drover_collector.detectors._lib.examples import LAG_MS, START_MS, small_fleet
from drover_collector.detectors._lib.window import Window
from drover_collector.detectors.slowdown import detector as slowdown
from drover_collector.detectors.slowdown.telemetry import METRICS, TRAFFIC
from drover_collector.detectors.slowdown.work_rate import EVERY, POWER, WARM_MS, Track, Work, together
from drover_collector.fleet.buckets import BUCKET_MS, NO_WORKLOADS, Bucket, Floats, Workloads
from drover_collector.ledger.blame import OF_CAUSE, Blame
from drover_core.model.events import Severity
from testbed.job_telemetry import BUCKET_S, KINDS, Other, Plan, figures, scoring, slowed, telemetry, tuning

PAGE = ROOT / "docs/evidence/slowdown-causes.md"
SIZES = (0.05, 0.10, 0.20)
NODES, PORTS, RACK = 8, 2, 4
AT_S, LENGTH_S, PAUSE_S = 4200.0, 1800.0, 300.0
LAG_S = 7
FIRST = {"tuning": 3_000, "scoring": 5_000}
DRAWS: dict[str, Callable[[int, float], Plan]] = {"tuning": tuning, "scoring": scoring}
WEEK_HOURS, HOURS = 168, 24.0
# Kind -> (what slows the job, whose fault it is)
CAUSES = {
    "slow network": ("network", Blame.NETWORK), "slow storage": ("data", Blame.STORAGE),
    "all clocks capped": ("clock", Blame.JOB), "a rack capped": ("rack", Blame.HOST),
    "image: slower kernels": ("kernels", Blame.PROGRAM), "image: slower network": ("image network", Blame.PROGRAM),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """One job. `reports`: its loop does."""

    kind: str
    size: float
    seed: int
    reports: bool


def played(run: Run) -> dict[str, Any]:
    """Return what the detector said of one job."""
    why, _ = CAUSES[run.kind]
    image = why in ("kernels", "image network")
    at_s = AT_S + PAUSE_S if image else AT_S
    state, false, first = slowdown.SlowdownState(), 0, None
    for window in windows(run, why):
        findings, state = slowdown.detect(window, state, window.newest.end_ms + LAG_MS)
        for found in findings:
            if found.severity is Severity.INFO:
                continue
            after_s = (found.ts_ms - START_MS) / 1000 - at_s
            if after_s < 30:
                false += 1
            elif first is None:
                first = after_s, found.cause
        if first:
            break
    said = OF_CAUSE.get(first[1], Blame.UNKNOWN) if first else None
    return {
        "kind": run.kind, "size": run.size, "reports": run.reports, "seed": run.seed, "false": bool(false),
        "delay_s": first[0] if first else None, "said": said,
    }  # fmt: skip


def windows(run: Run, why: str) -> Iterator[Window]:
    """Yield the windows of a fleet on which the job runs, on all GPUs."""
    index = small_fleet(NODES, per_rack=RACK, ports=PORTS)
    racks, image = plans(run, why)
    seen = [telemetry(plan, run.seed) for plan in racks]
    rng = np.random.default_rng(run.seed)
    unit = np.exp(rng.normal(0, 0.005, index.gpu_count))
    rack = index.rack[index.gpu_node]
    sent, energy = np.zeros(NODES * PORTS), np.zeros(index.gpu_count)
    nodes = np.arange(NODES, dtype=np.int32)
    held: tuple[Bucket, ...] = ()
    for number in range(len(seen[0][0])):
        rows = np.array([each[0][number] for each in seen])[rack]
        sent = sent + rows[0, TRAFFIC] / PORTS * BUCKET_S
        energy = energy + rows[:, POWER] * BUCKET_S * unit
        gpu: dict[str, Floats] = {metric: rows[:, at] * unit for at, metric in enumerate(METRICS)}
        gpu["sm_clock_mhz"], gpu["energy_j"] = rows[:, METRICS.index("sm_clock_mhz")], energy
        second = image and number * BUCKET_S >= AT_S
        step_s, work = float(seen[0][1][number]), NO_WORKLOADS
        if run.reports and not math.isnan(step_s):
            values = {"step_time_s": step_s, "tokens_per_step": 4e6, "flops_per_step": 1.7e17}
            columns = {metric: np.full(NODES, value) for metric, value in values.items()}
            columns["step_time_s"] *= np.exp(rng.normal(0, 0.001, NODES))
            work = Workloads.of(nodes, ["pretrain"] * NODES, columns)
        bucket = Bucket(
            START_MS + number * BUCKET_MS, BUCKET_MS, gpu, {}, np.full(index.gpu_count, 10, np.int32),
            np.full(NODES, 10, np.int32), np.zeros(index.gpu_count, np.int32),
            ("813" if second and run.reports else "812",), {"tx_bytes": sent}, work=work,
        )  # fmt: skip
        held = (*held[-1:], bucket)
        yield Window(index, held, True, (), START_MS)


def plans(run: Run, why: str) -> tuple[list[Plan], bool]:
    """Return what the GPUs of each of the two racks do, and whether the job starts again with another image."""
    base = scoring(run.seed, (AT_S + LENGTH_S) / 3600 + 1)
    image = why in ("kernels", "image network")
    if why == "rack":  # its GPUs compute more slowly, and the others wait for them
        both = (slowed(base, AT_S, run.size, each) for each in ("network", "clock"))
        return [replace(plan, hours=(AT_S + LENGTH_S) / 3600) for plan in both], False
    plan = slowed(base, AT_S + (PAUSE_S if image else 0), run.size, "network" if why == "image network" else why)
    plan = replace(plan, hours=(AT_S + LENGTH_S) / 3600)
    if image:
        plan = replace(plan, others=[*plan.others, Other("pause", AT_S, PAUSE_S)])
    return [plan, plan], image


def alone(plan: Plan, seed: int) -> list[float]:
    """Return when a job whose loop reports nothing is called slower, in seconds after its begin."""
    recent: deque[Work] = deque(maxlen=EVERY)
    found: list[float] = []
    track = None
    for number, row in enumerate(figures(plan, seed)):
        recent.append(Work(4, 32, row))
        if number % EVERY != EVERY - 1 or (seen := together(list(recent))) is None:
            continue
        ts_ms = START_MS + (number + 1) * BUCKET_MS
        track = track or Track(ts_ms, ts_ms, ts_ms + WARM_MS)
        if track.add(seen, ts_ms):
            found.append((number + 1) * BUCKET_S + LAG_S)
    return found


Task = tuple[str, Any]


def done(task: Task) -> dict[str, Any]:
    """Return what one task found, as a row."""
    what, given = task
    if what == "cause":
        return {"what": what, **played(Run(*given))}
    name, seed = given[:2]
    if what == "healthy":
        return {"what": what, "draw": name, "false": len(alone(DRAWS[name](seed, HOURS), seed))}
    by, why = given[2:]
    at_s = 7200.0 + (seed * 37) % 1500
    found = alone(slowed(DRAWS[name](seed, 4.0), at_s, by, why), seed)
    delay_s = next((at - at_s for at in found if at > at_s + 30), None)
    return {"what": what, "draw": name, "size": by, "delay_s": delay_s}


def tasks(args: argparse.Namespace) -> list[Task]:
    """Return all tasks, those of each kind spread over the whole."""
    found: list[tuple[float, Task]] = []
    many = args.runs // len(SIZES)
    for n in range(many):
        found += [
            (n / many, ("cause", (kind, size, 40_000 + n, reports)))
            for kind in CAUSES for size in SIZES for reports in (True, False)
        ]  # fmt: skip
    healthy = math.ceil(args.weeks * WEEK_HOURS / HOURS)
    for name in DRAWS:
        found += [(n / healthy, ("healthy", (name, FIRST[name] + n))) for n in range(healthy)]
        found += [
            (n / args.jobs, ("slow", (name, FIRST[name] + n, by, KINDS[n % len(KINDS)])))
            for n in range(args.jobs) for by in SIZES
        ]  # fmt: skip
    return [task for _, task in sorted(found, key=lambda each: each[0])]


ABOUT = (
    "Written by `benchmarks/bench_slowdown_causes.py`, at {commit}. All is made up: `tests/testbed/job_telemetry.py`"
    " makes what GPUs and ports show, once a second, from the steps of a job (0.15 to 30 s), with checkpoints,"
    " evaluations, generated samples, saves in the background, restarts, longer sequences, larger batches and other"
    " programs within one job. No GPU and no network took part, and the author of the detector wrote the jobs, so real"
    " ones are harder. No inference service is among them. The jobs of `tuning` set the thresholds; those of"
    " `scoring` have another structure, but errors of both were looked at once, with other seeds, so these figures are"
    " of new seeds and not of a structure that was never seen."
)
ALONE = (
    "The job's loop reports nothing: what its ports send, what its GPUs draw, and their activities. A"
    " job that is slower is so for an hour, by its network,"
    " its input or its clocks in turn."
)
BY_CAUSE = (
    "{runs} runs of each kind, a third each of 5, 10 and 20 %, of 64 GPUs in two racks. With a loop that reports and"
    " without one. A wrong image starts 5 minutes after the run before it has ended: with a loop it is another job of"
    " the scheduler, without one a restart within the job. `said` has the blame of those that were found; a false"
    " warning is one before the job was slower."
)


def page(found: Sequence[dict[str, Any]], commit: str) -> str:
    causes = [row for row in found if row["what"] == "cause"]
    runs = min(Counter((row["kind"], row["reports"]) for row in causes).values(), default=0)
    weeks, false = (dict.fromkeys(DRAWS, 0.0) for _ in range(2))
    for row in found:
        if row["what"] == "healthy":
            weeks[row["draw"]] += HOURS / WEEK_HOURS
            false[row["draw"]] += row["false"]
    lines = [
        "# Slowdown: causes, and jobs whose loops report nothing", "", _wrapped(ABOUT.format(commit=commit)), "",
        "## From telemetry alone", "", _wrapped(ALONE), "",
        "| jobs | job-weeks | false warnings | a job-week | goal |", "| --- | --- | --- | --- | --- |",
        *(
            f"| {name} | {weeks[name]:.1f} | {false[name]:.0f} | {false[name] / max(weeks[name], 1e-9):.3f} | 0.1 |"
            for name in DRAWS
        ), "",
        "| jobs | slower by | found | median | p95 |", "| --- | --- | --- | --- | --- |",
        *(_slow(found, name, by) for name in DRAWS for by in SIZES), "",
        "## By cause", "", _wrapped(BY_CAUSE.format(runs=runs)), "",
        "| kind | loop | found | 5 % | 10 % | 20 % | median | p95 | blame right | said | false |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(causes, kind, reports) for kind in CAUSES for reports in (True, False)), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _slow(found: Sequence[dict[str, Any]], name: str, by: float) -> str:
    mine = [row for row in found if row["what"] == "slow" and (row["draw"], row["size"]) == (name, by)]
    delays = [row["delay_s"] for row in mine if row["delay_s"] is not None]
    return f"| {name} | {by:.0%} | {len(delays)} of {len(mine)} | {_times(delays)} |"


def _row(rows: Sequence[dict[str, Any]], kind: str, reports: bool) -> str:
    mine = [row for row in rows if row["kind"] == kind and row["reports"] is reports]
    found = [row for row in mine if row["delay_s"] is not None]
    sizes = []
    for size in SIZES:
        these = [row["delay_s"] is not None for row in mine if row["size"] == size]
        sizes.append(f"{sum(these)}/{len(these)}")
    right = sum(row["said"] == CAUSES[kind][1] for row in found)
    said = ", ".join(f"{blame} {count}" for blame, count in Counter(row["said"] for row in found).most_common())
    return (
        f"| {kind} | {'reports' if reports else 'silent'} | {len(found)}/{len(mine)} | {' | '.join(sizes)} |"
        f" {_times([row['delay_s'] for row in found])} | {right}/{len(found)} | {said or '-'} |"
        f" {sum(row['false'] for row in mine)} |"
    )


def _times(delays: Sequence[float]) -> str:
    if not delays:
        return "- | -"
    return f"{np.median(delays):.0f} s | {np.quantile(delays, 0.95):.0f} s"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=24, help="of each kind, with and without a loop")
    parser.add_argument("--weeks", type=float, default=30.0, help="of healthy jobs without a loop, of each draw")
    parser.add_argument("--jobs", type=int, default=99, help="without a loop that get slower, of each draw and size")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=Path, required=True, help="a file to which each result is appended as it comes")
    parser.add_argument("--page", action="store_true", help="write the page of the rows that are there, and end")
    args = parser.parse_args()
    if not args.page:
        with multiprocessing.Pool(args.processes) as pool, args.rows.open("a", encoding="utf-8") as file:
            for row in pool.imap_unordered(done, tasks(args)):
                print(json.dumps(row), file=file, flush=True)
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in args.rows.read_text("utf-8").splitlines()]
    PAGE.write_text(page(rows, head.stdout.strip()), "utf-8")


if __name__ == "__main__":
    main()
