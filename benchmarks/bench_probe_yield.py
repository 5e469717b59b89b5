"""How long a node waits for a probe that must give way: from the moment to when no process of the probe is left.

preempted: the scheduler asks its job (`drover-agent probe --hold`) to end; until that job has ended, which is when the
next one may begin. held: a process comes to hold a GPU under test (the stand-in for NVML reports it); until the last
process of the probe is gone. Real probe service, runner and process, in a soak on the CPU; RUNS of each, one after the
other. Prints one JSON line; ends with 1 where the slowest took longer than the goal.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from drover_agent.probes import Level, eligible, plan, processes
from drover_agent.probes.exchange import JOB, ExchangeFolder, ProbeAsk, read_answer
from drover_agent.probes.runner import End, Runner
from drover_agent.probes.service import Service

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from testbed.nvml import SCRIPT_VARIABLE, FakeNvml, build, load

GOAL_S = 1.0
RUNS = 10
LIMIT_S = 300.0  # for torch to be imported, on a machine that has other work
HOLD = (sys.executable, "-m", "drover_agent.main", "probe", "--hold")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS, help=f"of each way; default: {RUNS}")
    options = parser.parse_args()
    ways: dict[str, Callable[[Path], float]] = {"preempted": preempted, "held": held}
    if shutil.which("gcc") is None:  # NVML's stand-in is compiled
        del ways["held"]
    found = {name: [in_a_folder(way) for _ in range(options.runs)] for name, way in ways.items()}
    shown = {n: {"median_s": round(statistics.median(t), 3), "slowest_s": round(max(t), 3)} for n, t in found.items()}
    slowest = max(max(times) for times in found.values())
    print(
        json.dumps({
            "benchmark": "probe_yield",
            **shown,
            "runs": options.runs, "goal_s": GOAL_S, "met": slowest <= GOAL_S, "load1": round(os.getloadavg()[0], 1),
        })
    )  # fmt: skip
    return int(slowest > GOAL_S)


def in_a_folder(way: Callable[[Path], float]) -> float:
    with tempfile.TemporaryDirectory(prefix="drover-bench-yield-") as folder:
        took = way(Path(folder))
    print(f"{way.__name__}: {took:.3f} s", file=sys.stderr, flush=True)
    return took


def preempted(root: Path) -> float:
    folder, id_ = ExchangeFolder(root / "probes"), f"p{os.getpid()}"
    folder.make()
    folder.put(folder.requests, id_, ProbeAsk(id_, ("soak",), protection=JOB))
    service, loaded = Service(folder.root, str(root)), threading.Event()
    with subprocess.Popen([*HOLD, id_], stderr=subprocess.DEVNULL) as job:
        serving = threading.Thread(target=lambda: signalled(loaded, lambda: service.serve(linger_s=0.1)))
        serving.start()
        wait(loaded)
        began = time.monotonic()
        job.send_signal(signal.SIGTERM)
        job.wait(LIMIT_S)
        took = time.monotonic() - began
        serving.join(LIMIT_S)
    answer = read_answer(folder.results / f"{id_}.json")
    assert answer.end == End.STOPPED, answer
    return took


def signalled(loaded: threading.Event, run: Callable[[], Any]) -> None:
    """`loaded` is set when the probe's load runs, by what the service logs of it."""
    import logging

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "soak: " in record.getMessage():
                loaded.set()

    log = logging.getLogger("drover_agent.probes.service")
    log.setLevel("INFO")
    handler = Handler()
    log.addHandler(handler)
    try:
        run()
    finally:
        log.removeHandler(handler)


def held(root: Path) -> float:
    fake = FakeNvml(root / "nvml.script", stand_in())
    os.environ[SCRIPT_VARIABLE] = str(fake.script)
    fake.healthy(1)
    fake.hold(0)
    (gpu,) = eligible.look().gpus
    asked = plan.request_of(("soak",), Level.QUICK, (), LIMIT_S, str(root))
    loaded, session = threading.Event(), [0]
    reports = []

    def needed(its: int) -> str:
        session[0] = its
        return guard.needed(its)

    with eligible.Guard([gpu]) as guard, subprocess.Popen(
        ["cat"], stdin=subprocess.PIPE, start_new_session=True
    ) as job:  # fmt: skip
        runner = Runner(replace(asked, cpus=1), needed, lambda text: loaded.set() if "soak: " in text else None)
        running = threading.Thread(target=lambda: reports.append(runner.run()))
        running.start()
        wait(loaded)
        began = time.monotonic()
        fake.hold(0, job.pid)
        while not all(processes.is_dead(pid) for pid in processes.members(session[0])):
            time.sleep(0.005)
        took = time.monotonic() - began
        running.join(LIMIT_S)
        job.communicate()
    assert reports[0].end is End.STOPPED, reports
    return took


@functools.cache
def stand_in() -> Path:
    """NVML's, in this process."""
    library = build(Path(tempfile.mkdtemp(prefix="drover-bench-nvml-")))
    atexit.register(shutil.rmtree, library.parent)
    load(library)
    return library


def wait(event: threading.Event) -> None:
    if not event.wait(LIMIT_S):
        raise SystemExit(f"the probe has not begun within {LIMIT_S:g} s")


if __name__ == "__main__":
    sys.exit(main())
