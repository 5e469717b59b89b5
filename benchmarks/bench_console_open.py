"""How long each page of the console takes to open, in real Chromium, on a live simulated fleet of 256 nodes.

First: by a browser that has nothing of the console yet; second: the same page again in that browser. Until what the
page is for is drawn (its table, chart or picture). Prints one JSON line: seconds of each page, and of the very first
opening after the console's start; CPU seconds of the browser and of the console for an opening, which say what it
costs on a machine that others use too. Browser, console, collector and fleet share one machine.

Prints each page on standard error as it goes; stopped, it prints the line of what it has.

    python benchmarks/bench_console_open.py [--rounds 2] [--nodes 256]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import psutil

from drover_proto import fleet_pb2 as pb
from testbed.browsing import SCREEN, chromium
from testbed.console import MEMORY, OPERATOR, RED, STRAGGLER, console
from testbed.waiting import wait_until

PICTURE = "window.__drover_fleet && !window.__drover_fleet.early && window.__drover_fleet.cells().length"
WAIT_MS = 60_000
GOAL_S = 3.0  # of every page
AFTER_START = "after start"


def pages(job: str, incident: str) -> dict[str, tuple[str, str]]:
    """Link, and the text or (with `js:`) the condition that says that it is there."""
    return {
        "fleet": ("", f"js:{PICTURE}"),
        "incidents": (f"incidents?id={incident}", "Timeline"),
        "node": (f"node?node={RED[0]}", "Inventory"),
        "jobs": ("job", "GPU-hours waited"),
        "job": (f"job?job={job}", "Its GPUs against each other"),
        "fabric": ("fabric?leaf=leaf01", "Sent / received"),
        "thermals": ("thermals?rack=r02", "r02n08"),
        "probes": ("probes", "Ask for one on"),
        "risk": ("risk", "this ranking"),
        "capacity": ("capacity", "Free GPUs under each leaf"),
        "ledger": ("capacity?show=ledger", "By job"),
        "policy": ("policy", "Breaker"),
        "silences": ("silences", "Maintenance windows"),
        "audit": ("audit?by=Drover+too", "in force from this start on"),
        "system": ("system", "Connected now"),
    }


class Opening(NamedTuple):
    """Seconds of the clock, and of CPU in the browser and in the console."""

    wall: float
    browser: float
    console: float


def cpu_s() -> tuple[float, float]:
    """CPU seconds so far: browser, console."""
    spent = [0.0, 0.0]
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times, command = process.cpu_times(), " ".join(process.cmdline())
            if "chrom" in process.name():
                spent[0] += times.user + times.system
            elif "drover_dashboard.main" in command:
                spent[1] += times.user + times.system
    return spent[0], spent[1]


def opened(page: Any, url: str, there: str) -> Opening:
    before, began = cpu_s(), time.monotonic()
    page.goto(url, wait_until="commit")
    if there.startswith("js:"):
        page.wait_for_function(there[3:])
    else:
        page.get_by_text(there).first.wait_for()
    wall, after = time.monotonic() - began, cpu_s()
    return Opening(wall, after[0] - before[0], after[1] - before[1])


def measured(chromium: Any, url: str, there: str) -> tuple[Opening, Opening]:
    context = chromium.new_context(viewport=SCREEN, extra_http_headers={"X-User": OPERATOR})
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    first = opened(page, url, there)
    page.goto("about:blank")
    second = opened(page, url, there)
    context.close()
    return first, second


def figures(openings: list[Opening]) -> dict[str, float]:
    walls = sorted(opening.wall for opening in openings)
    return {
        "median_s": round(statistics.median(walls), 2),
        "p95_s": round(walls[min(len(walls) - 1, int(0.95 * len(walls)))], 2),
        "browser_cpu_s": round(statistics.median(opening.browser for opening in openings), 2),
        "console_cpu_s": round(statistics.median(opening.console for opening in openings), 3),
    }


Found = dict[str, list[tuple[Opening, Opening]]]


def measure(folder: Path, nodes: int, rounds: int, found: Found) -> None:
    """Fills `found`, page by page; `after start` is the first opening of all."""
    began_s = time.monotonic()
    with console(folder, nodes) as live, chromium() as browser:
        jobs: list[pb.JobRow] = []

        def running() -> bool:
            known = live.fleet.jobs().value
            jobs[:] = known.jobs if known else []
            return bool(jobs)

        def note(page: str, link: str, there: str) -> None:
            first, second = measured(browser, f"{live.url}/{link}", there)
            found.setdefault(page, []).append((first, second))
            line = f"{page}: {first.wall:.2f} s, again {second.wall:.2f} s"
            print(f"{time.monotonic() - began_s:6.1f} s  {line}", file=sys.stderr, flush=True)

        note(AFTER_START, "system", "Connected now")
        wait_until(running, "jobs run", 60)
        incident = live.incident(MEMORY)
        live.incident(STRAGGLER)
        for _ in range(rounds):
            for page, (link, there) in pages(jobs[0].job, incident.id).items():
                note(page, link, there)


def line(found: Found) -> dict[str, Any]:
    result = {
        page: {"first": figures([a for a, _ in each]), "second": figures([b for _, b in each])}
        for page, each in found.items()
    }
    if not result:
        return {}
    firsts = [first for each in found.values() for first, _ in each]
    seconds = [second for each in found.values() for _, second in each]
    slowest = max(each["first"]["median_s"] for each in result.values())
    return {
        "slowest_first_median_s": slowest, "met": slowest < GOAL_S,
        "all": {"first": figures(firsts), "second": figures(seconds)}, "pages": result,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="openings of each page (default 2)")
    parser.add_argument("--nodes", type=int, default=256, help="nodes of 8 GPUs (default 256)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else what it started would live on
    load = [os.getloadavg()[0]]
    found: Found = {}
    try:
        with tempfile.TemporaryDirectory() as name:
            measure(Path(name), args.nodes, args.rounds, found)
    finally:
        load.append(os.getloadavg()[0])
        after_start = found.pop(AFTER_START, [])
        result = {
            "benchmark": "console_open", "nodes": args.nodes, "rounds": args.rounds, "cores": os.cpu_count(),
            "load_before_after": [round(value, 1) for value in load], "goal_s": GOAL_S,
            "after_start_s": [round(first.wall, 2) for first, _ in after_start], **line(found),
        }  # fmt: skip
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
