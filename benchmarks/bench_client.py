"""What the three lines of `drover_agent.client` cost a training loop at 100 steps a second.

    python benchmarks/bench_client.py [--seconds 10] [--no-write]

A process runs steps of 10 ms, and takes the time of each call of the reporter, by the clock of the wall and by that of
its own CPU, without what reading the clock takes. Steps either only wait, or run Python for 1 ms before the call, as a
loop does that launches kernels. The agent's source of steps listens in a process of its own; then nobody listens; then
somebody does who never reads. Each thousandth step the loop reports a checkpoint. Writes docs/evidence/client.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from drover_agent.client.training_steps import Reporter
from drover_agent.sources.gpus import Gpus
from drover_agent.sources.workloads.steps import StepsSource

PAGE = Path(__file__).resolve().parents[1] / "docs/evidence/client.md"
STEP_S, WORK_S = 0.01, 0.001
CHECKPOINT_STEPS = 1_000
GOAL = 0.001

ABOUT = (
    "Written by `benchmarks/bench_client.py`, at {commit}, on {cores} cores whose load was {load:.1f}. A loop calls"
    " `reporter.step()` after each step of 10 ms and `reporter.saved()` after each 1,000. The cost of a step is"
    " the mean time in these calls, without that of reading the clock; its share is that of 10 ms. A step that only"
    " waits leaves nothing of the reporter in the core's caches, which on a loaded machine others fill; one that works"
    " runs Python for 1 ms before the call, as a loop does that launches kernels. The goal is at most 0.1 % of the"
    " time of a step. The wall's clock also counts what other processes take of the core, in a call as while"
    " the clock is read: on a loaded machine its figures may be too large, or below 0."
)


def listen(path: str, ready: Event, end: Event) -> None:
    """Take reports as an agent does."""
    source = StepsSource("n1", Path(path), Gpus())
    source.read(0)
    ready.set()
    while not end.wait(1.0):
        source.read(0)
    source.close()


def measure(path: str, seconds: float, works: bool) -> dict[str, Any]:
    """Return what the calls cost a step, in microseconds of the wall's and of the CPU's clock."""
    reporter = Reporter("bench", 4e6, 1e17, world_size=8, rank=0, socket_path=path)
    steps = round(seconds / STEP_S)
    clocks = (time.perf_counter_ns, time.thread_time_ns)
    took = [[0, 0], [0, 0]]  # by clock: of the clock alone, of the call
    for number in range(steps):
        time.sleep(STEP_S - works * WORK_S)
        upto = time.thread_time() + works * WORK_S
        while works and time.thread_time() < upto:
            json.dumps({"loss": number, "lr": 0.1})
        clock, mine = clocks[number % 2], took[number % 2]
        began = clock()
        between = clock()
        reporter.step()
        if number % CHECKPOINT_STEPS == CHECKPOINT_STEPS - 1:
            reporter.saved(number + 1)
        ended = clock()
        mine[0] += between - began
        mine[1] += ended - between
    wall, cpu = ((call - alone) / (steps / 2) / 1000 for alone, call in took)
    return {"steps": steps, "wall_us": wall, "cpu_us": cpu, "unsent": reporter.unsent}


def with_agent(path: str, seconds: float, works: bool) -> dict[str, Any]:
    ready, end = multiprocessing.Event(), multiprocessing.Event()
    agent = multiprocessing.Process(target=listen, args=(path, ready, end))
    agent.start()
    try:
        if not ready.wait(30):
            raise SystemExit("the agent's source of steps did not begin to listen within 30 s")
        return measure(path, seconds, works)
    finally:
        end.set()
        agent.join()


def with_deaf_agent(path: str, seconds: float, works: bool) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as deaf:
        deaf.bind(path)
        return measure(path, seconds, works)


CASES: dict[str, Callable[[str, float, bool], dict[str, Any]]] = {
    "an agent listens": with_agent, "no agent": measure, "an agent that never reads": with_deaf_agent,
}  # fmt: skip


def page(found: dict[str, dict[str, Any]], load: float, commit: str) -> str:
    about = ABOUT.format(commit=commit, cores=os.cpu_count(), load=load)
    rows = [
        f"| {name} | {row['steps']:,} | {row['cpu_us']:.2f} us | {row['cpu_us'] / STEP_S / 1e6:.3%} |"
        f" {row['wall_us']:.2f} us | {row['wall_us'] / STEP_S / 1e6:.3%} | {row['unsent']} |"
        for name, row in found.items()
    ]
    return "\n".join(
        [
            "# The client in a training loop", "", textwrap.fill(about, 100, break_on_hyphens=False), "",
            "| case | steps | CPU of a step | share | wall of a step | share | reports that were late |",
            "| --- | --- | --- | --- | --- | --- | --- |", *rows, "",
        ]
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each case")
    parser.add_argument("--no-write", action="store_true", help="leave docs/evidence/client.md unchanged")
    args = parser.parse_args()
    os.environ["DROVER_JOB"] = "bench"  # an agent takes no checkpoint of no job
    found = {}
    for works in (False, True):
        for name, case in CASES.items():
            with tempfile.TemporaryDirectory() as folder:
                row = case(f"{folder}/steps.sock", args.seconds, works)
                found[f"{name}; the step {'works' if works else 'waits'}"] = row
    load = os.getloadavg()[0]
    print(json.dumps({"load": load, "goal": GOAL, **found}))
    if not args.no_write:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        PAGE.write_text(page(found, load, head.stdout.strip()), "utf-8")


if __name__ == "__main__":
    main()
